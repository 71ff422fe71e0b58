# SPDX-License-Identifier: Apache-2.0
#
# cmake -DCOMPILER=... -DSOURCE=... -DINCLUDES=a|b [-DEXPECT=regex -DDEFINITIONS=X] -P compile.cmake
# With EXPECT the source must not compile and the output must match; without, it must compile with -DCONTROL.

string(REPLACE "|" ";" includes "${INCLUDES}")
list(TRANSFORM includes PREPEND -isystem)
if(NOT DEFINED EXPECT)
  set(DEFINITIONS CONTROL)
endif()
list(TRANSFORM DEFINITIONS PREPEND -D)

# All of a translation unit (templates are instantiated at its end), nothing written.
execute_process(COMMAND ${COMPILER} -std=c++20 ${DEFINITIONS} ${includes} -c ${SOURCE} -o /dev/null
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)

if(NOT DEFINED EXPECT)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${SOURCE} with -DCONTROL must compile:\n${output}")
  endif()
elseif(status EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles and must not")
elseif(NOT output MATCHES "${EXPECT}")
  message(FATAL_ERROR "${SOURCE} fails, but not with a message that matches\n  ${EXPECT}\nThe compiler said:\n${output}")
endif()
