# SPDX-License-Identifier: Apache-2.0
#
# cmake -DPROGRAM=... -DOBJDUMP=... -P check_symbols.cmake: each translation unit's kernels are there under their own
# names, and those of a unit without flags hold no instruction of a later set than their own.

execute_process(COMMAND ${OBJDUMP} -d -C --no-show-raw-insn ${PROGRAM} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE ";" " " text "${text}")
string(REGEX REPLACE "[][]" " " text "${text}")

foreach(built IN ITEMS built_with_baseline::ieee_math built_with_avx512::ieee_math built_with_baseline::fast_math)
  foreach(isa IN ITEMS portable avx2 avx512)
    if(NOT text MATCHES "<indexshare::v0::detail::${built}::${isa}::[a-z_0-9]+\\(")
      message(SEND_ERROR "no kernel of ${isa} in ${built}")
    endif()
  endforeach()
endforeach()

# One function at a time: its name, then its instructions.
string(REPLACE "\n\n" ";" functions "${text}")
set(checked 0)
foreach(function IN LISTS functions)
  if(function MATCHES "<indexshare::v0::detail::built_with_baseline::[a-z]+_math::(portable|avx2)::([a-z_0-9]+)\\(")
    set(isa ${CMAKE_MATCH_1})
    set(name ${CMAKE_MATCH_2})
    math(EXPR checked "${checked} + 1")
    if(function MATCHES "%zmm" OR (isa STREQUAL "portable" AND function MATCHES "%ymm"))
      message(SEND_ERROR "${isa}::${name} of a unit without flags uses ${CMAKE_MATCH_0}")
    endif()
  endif()
endforeach()
if(checked LESS 20)
  message(SEND_ERROR "only ${checked} kernels found")
endif()
message("${checked} kernels hold no instruction beyond their set")
