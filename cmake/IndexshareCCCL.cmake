# SPDX-License-Identifier: Apache-2.0
#
# Defines the imported target indexshare::cccl: the CCCL headers (cuda::std::mdspan, span, expected).
# Used by this project and, installed beside the package configuration, by its consumers, so that both
# find CCCL in the same way:
#   1. INDEXSHARE_CCCL_INCLUDE_DIR, the directory that holds cuda/std/mdspan, if it is set;
#   2. CCCL's own CMake package (it comes with a CUDA toolkit >= 13 and with the wheel nvidia-cuda-cccl).
# Nothing is downloaded. Without a result no target is defined and INDEXSHARE_CCCL_MESSAGE says why.

if(TARGET indexshare::cccl)
  return()
endif()

set(INDEXSHARE_CCCL_INCLUDE_DIR "" CACHE PATH "Directory that holds cuda/std/mdspan (empty: find_package(CCCL))")

set(INDEXSHARE_CCCL_MESSAGE "")
set(indexshare_cccl_dirs "${INDEXSHARE_CCCL_INCLUDE_DIR}")
if(indexshare_cccl_dirs)
  if(NOT EXISTS "${indexshare_cccl_dirs}/cuda/std/mdspan")
    set(INDEXSHARE_CCCL_MESSAGE
      "INDEXSHARE_CCCL_INCLUDE_DIR=${indexshare_cccl_dirs} holds no cuda/std/mdspan")
  endif()
else()
  if(NOT TARGET CCCL::libcudacxx)
    find_package(CCCL 3.0 CONFIG QUIET COMPONENTS libcudacxx
      HINTS ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda)
  endif()
  if(TARGET CCCL::libcudacxx)
    get_target_property(indexshare_cccl_dirs CCCL::libcudacxx INTERFACE_INCLUDE_DIRECTORIES)
  else()
    set(INDEXSHARE_CCCL_MESSAGE
      "indexshare needs the headers of CCCL >= 3.0 (no CUDA toolkit): set INDEXSHARE_CCCL_INCLUDE_DIR to the "
      "directory that holds cuda/std/mdspan, or let find_package(CCCL) find its package. In a checkout of "
      "indexshare, scripts/demo.sh and scripts/test.sh fetch them")
    string(CONCAT INDEXSHARE_CCCL_MESSAGE ${INDEXSHARE_CCCL_MESSAGE})
  endif()
endif()

if(NOT INDEXSHARE_CCCL_MESSAGE)
  # Only the directory is taken from CCCL's target: that target is not SYSTEM, so its headers would be
  # compiled under the consumer's warnings, and it adds a definition in Debug that way 1 would not.
  add_library(indexshare::cccl INTERFACE IMPORTED GLOBAL)
  target_include_directories(indexshare::cccl SYSTEM INTERFACE ${indexshare_cccl_dirs})
endif()
unset(indexshare_cccl_dirs)
