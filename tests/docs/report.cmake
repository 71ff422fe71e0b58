# SPDX-License-Identifier: Apache-2.0
file(READ ${ERRORS} errors)
if(errors)
  message(FATAL_ERROR "code blocks in documents (marks: tests/docs/CMakeLists.txt):${errors}")
endif()
