# SPDX-License-Identifier: Apache-2.0
#
# cmake -DSOURCE=... -DBINARY=... -DGENERATOR=... -DCOMPILER=... -DCCCL=... -DSTAGE=... -DSOURCE_TREE=...
#   "-DOPTIONS=-Dname=value;..." -P build_consumer.cmake
# Configures, builds and tests a project in a fresh directory.

file(REMOVE_RECURSE ${BINARY})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BINARY} -G ${GENERATOR}
    -DCMAKE_BUILD_TYPE=Debug
    -DCMAKE_CXX_COMPILER=${COMPILER}
    -DINDEXSHARE_CCCL_INCLUDE_DIR=${CCCL}
    -DCMAKE_PREFIX_PATH=${STAGE}
    -DINDEXSHARE_SOURCE_TREE=${SOURCE_TREE}
    ${OPTIONS}
    --no-warn-unused-cli
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BINARY} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir ${BINARY} --output-on-failure
  COMMAND_ERROR_IS_FATAL ANY)
