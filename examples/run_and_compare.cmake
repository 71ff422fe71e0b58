# SPDX-License-Identifier: Apache-2.0
#
# cmake "-DPROGRAM=[launcher;]program" -DEXPECTED=<file> -P run_and_compare.cmake
# Runs the program and compares its standard output with the file, except for newlines at the end.

execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE actual ERROR_VARIABLE errors RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} ended with ${status}\n${actual}${errors}")
endif()
file(READ ${EXPECTED} expected)
string(REGEX REPLACE "\n+$" "" expected "${expected}")
string(REGEX REPLACE "\n+$" "" actual "${actual}")
if(NOT "${actual}" STREQUAL "${expected}")
  message(FATAL_ERROR "output differs from ${EXPECTED}\n--- expected\n${expected}\n--- actual\n${actual}\n---")
endif()
