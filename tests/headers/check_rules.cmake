# SPDX-License-Identifier: Apache-2.0
#
# cmake -DINCLUDE_DIR=... -P check_rules.cmake: the rules for public headers that a compiler does not check.

set(heavy_headers iostream sstream fstream iomanip string vector map unordered_map regex filesystem functional)
set(violations "")

file(READ ${INCLUDE_DIR}/indexshare/macros.hpp macros)
string(REGEX MATCHALL "#[ \t]*define[ \t]+[A-Za-z_0-9]+" macros "${macros}")
list(TRANSFORM macros REPLACE "#[ \t]*define[ \t]+" "")
list(REMOVE_DUPLICATES macros)
foreach(macro IN LISTS macros)
  if(NOT macro MATCHES "^INDEXSHARE_")
    list(APPEND violations "macros.hpp: ${macro} lacks the prefix INDEXSHARE_")
  endif()
endforeach()

file(GLOB_RECURSE files RELATIVE ${INCLUDE_DIR} ${INCLUDE_DIR}/*.hpp ${INCLUDE_DIR}/*.cuh)
foreach(file IN LISTS files)
  file(READ ${INCLUDE_DIR}/${file} text)
  # Brackets and semicolons mean something to CMake's lists and nothing to the rules.
  string(REGEX REPLACE "[][;]" " " text "${text}")

  if(NOT text MATCHES "SPDX-License-Identifier: Apache-2.0")
    list(APPEND violations "${file}: no SPDX line")
  endif()
  if(NOT text MATCHES "#pragma once")
    list(APPEND violations "${file}: no #pragma once")
  endif()
  if(text MATCHES "\nusing namespace ")  # indented it is a function's own business
    list(APPEND violations "${file}: using namespace")
  endif()
  if(text MATCHES "getenv *\\(")
    list(APPEND violations "${file}: getenv")
  endif()
  string(REGEX MATCHALL "#[ \t]*include[ \t]+\"[^\"]*\"" quoted "${text}")
  if(quoted)
    list(APPEND violations "${file}: ${quoted}: use <...>")
  endif()

  # Standard containers and streams cost every consumer compile time; only readers and tools may use them.
  if(NOT file MATCHES "^indexshare/(io|cuda|indexcache)/")
    foreach(heavy IN LISTS heavy_headers)
      if(text MATCHES "#[ \t]*include[ \t]+<${heavy}>")
        list(APPEND violations "${file}: <${heavy}> in a core header")
      endif()
    endforeach()
  endif()

  # A macro is one of macros.hpp's, or is gone at the end of the header.
  if(NOT file STREQUAL "indexshare/macros.hpp")
    string(REGEX MATCHALL "#[ \t]*define[ \t]+[A-Za-z_0-9]+" defined "${text}")
    list(TRANSFORM defined REPLACE "#[ \t]*define[ \t]+" "")
    foreach(macro IN LISTS defined)
      if(NOT text MATCHES "#[ \t]*undef[ \t]+${macro}[ \t\n]")
        list(APPEND violations "${file}: defines ${macro}")
      endif()
    endforeach()
  endif()
endforeach()

if(violations)
  list(JOIN violations "\n  " violations)
  message(FATAL_ERROR "rules for headers (docs: CONTRIBUTING.md):\n  ${violations}")
endif()
list(LENGTH files count)
message("${count} headers follow the rules")
