# SPDX-License-Identifier: Apache-2.0
#
# For this project's own tests, benchmarks and programs: enables CUDA where there is a toolkit, sets
# INDEXSHARE_HAS_CUDA, and INDEXSHARE_CUDA_MESSAGE with the reason where it is off. The library's targets need none
# of this.

set(INDEXSHARE_CUDA AUTO CACHE STRING "What needs a CUDA toolkit: AUTO (built if there is one), ON or OFF")
set_property(CACHE INDEXSHARE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(INDEXSHARE_CUDA_LAUNCHER "" CACHE STRING "Command that CUDA programs of this build run under (empty: none)")

set(INDEXSHARE_HAS_CUDA OFF)
set(INDEXSHARE_CUDA_MESSAGE "INDEXSHARE_CUDA=OFF")
if(INDEXSHARE_CUDA)
  # PTX alone: it runs on every GPU from sm_80 on, and in an emulator. Two images, for e4m3 on the tensor cores.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual 89-virtual)
  endif()
  # The shared runtime, which a launcher may replace; the run path must then not come first.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
  if(NOT DEFINED CMAKE_CUDA_COMPILER)
    find_program(INDEXSHARE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(INDEXSHARE_NVCC)
    if(INDEXSHARE_NVCC)
      set(CMAKE_CUDA_COMPILER ${INDEXSHARE_NVCC})
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(INDEXSHARE_CUDA_MESSAGE "no CUDA compiler (nvcc) on this machine")
  else()
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
      set(INDEXSHARE_CUDA_MESSAGE "the CUDA compiler is older than 13.0: ${CMAKE_CUDA_COMPILER_VERSION}")
    else()
      set(INDEXSHARE_HAS_CUDA ON)
    endif()
  endif()
  if(NOT INDEXSHARE_HAS_CUDA AND NOT INDEXSHARE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "INDEXSHARE_CUDA=${INDEXSHARE_CUDA}, but ${INDEXSHARE_CUDA_MESSAGE}")
  endif()
endif()
if(NOT INDEXSHARE_HAS_CUDA)
  message(STATUS "indexshare: CUDA tests, benchmarks and examples are left out: ${INDEXSHARE_CUDA_MESSAGE}")
endif()

# A program of CUDA sources that the launcher, if any, runs.
function(indexshare_cuda_program target)
  set_target_properties(${target} PROPERTIES CROSSCOMPILING_EMULATOR "${INDEXSHARE_CUDA_LAUNCHER}")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)  # CMake 3.25 has no CUDA20
  target_link_options(${target} PRIVATE LINKER:--enable-new-dtags)  # LD_LIBRARY_PATH before the run path
endfunction()
