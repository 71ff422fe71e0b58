# SPDX-License-Identifier: Apache-2.0
#
# cmake -DPROGRAM=indexshare-search -DPYTHON=... -DEVALUATOR=search_evaluator.py -DLOG=file -P search_example.cmake
# The example of an evaluator, as its first lines say to run it; half of the search, then the rest from the log.
function(search shared status expected)  # further options follow
  execute_process(
    COMMAND ${PROGRAM} --layers 12 --shared ${shared} --log ${LOG} --name example ${ARGN}
      --evaluator "'${PYTHON}' '${EVALUATOR}'"
    OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE got)
  if(NOT got EQUAL status OR NOT "${output}${errors}" MATCHES "${expected}")
    message(FATAL_ERROR "expected status ${status} and ${expected}\ngot ${got} and\n${errors}${output}")
  endif()
endfunction()

file(REMOVE ${LOG})
search(4 0 "pattern: FFFSFSFFSFSF\n")
search(9 2 "^error: --log: [^\n]+ \\(--resume goes on from it\\)\n$")
search(9 0 "63 of candidates; 39 of them from the log\npattern: FSSSFSSFSSSS\n" --resume)
