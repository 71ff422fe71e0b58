# SPDX-License-Identifier: Apache-2.0
#
# cmake -DBUILD_DIR=... -DSOURCE_DIR=... -DSTAGE=... -P install.cmake
# Installs to a prefix and moves it, so that a package which is not relocatable fails the consumers' tests.

file(REMOVE_RECURSE ${STAGE} ${STAGE}.installed)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${STAGE}.installed
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${output}")
endif()
file(RENAME ${STAGE}.installed ${STAGE})

file(GLOB_RECURSE files ${STAGE}/*.cmake)
foreach(file IN LISTS files)
  file(READ ${file} text)
  foreach(path IN ITEMS ${SOURCE_DIR} ${BUILD_DIR} ${STAGE})
    string(FIND "${text}" "${path}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}: the package is not relocatable")
    endif()
  endforeach()
endforeach()
foreach(expected IN ITEMS include/indexshare/version.hpp share/cmake/indexshare/indexshareConfig.cmake)
  if(NOT EXISTS ${STAGE}/${expected})
    message(FATAL_ERROR "not installed: ${expected}")
  endif()
endforeach()
