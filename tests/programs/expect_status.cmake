# SPDX-License-Identifier: Apache-2.0
#
# cmake "-DCOMMAND=program;argument..." -DSTATUS=n "-DERRORS=regex" -P expect_status.cmake
execute_process(COMMAND ${COMMAND} OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE status)
if(NOT status EQUAL STATUS OR NOT errors MATCHES "${ERRORS}")
  message(FATAL_ERROR "expected status ${STATUS} and errors like ${ERRORS}\ngot ${status} and\n${errors}${output}")
endif()
