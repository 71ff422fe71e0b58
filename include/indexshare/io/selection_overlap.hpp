// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/io/safetensors_format.hpp>
#include <indexshare/io/selection_file.hpp>
#include <indexshare/status.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

namespace detail {

/// Rows that are read at once, so that what a worker holds stays in its cache.
inline index_t rows_per_read(SelectionFile const& file) noexcept {
  constexpr index_t bytes = index_t{1} << 20;
  index_t const row = static_cast<index_t>(file.layers().size()) * file.top_k() *
                      static_cast<index_t>(sizeof(position_t));
  return std::max<index_t>(bytes / row, 1);
}

/// The fault of the lowest row, whichever worker finds which one first.
class FirstFault {
 public:
  /// Whether a row below `row` is at fault, so that rows from there on need no look.
  bool before(index_t row) const {
    std::lock_guard const lock(mutex_);
    return fault_ && row_ < row;
  }
  void report(index_t row, SafetensorsError fault) {
    std::lock_guard const lock(mutex_);
    if (fault_ && row_ <= row) return;
    row_ = row;
    fault_ = std::move(fault);
  }
  std::optional<SafetensorsError> take() { return std::move(fault_); }

 private:
  mutable std::mutex mutex_;
  index_t row_ = 0;
  std::optional<SafetensorsError> fault_;
};

}  // namespace detail

/// Counts the overlaps of all rows of a file, block by block on the workers of `parallel_for`; the
/// result does not depend on them. Add up several files with OverlapCounts::merge.
/// Memory: about 3 MiB for each worker (more where one row is more), whatever the file's size.
/// Errors: those of SelectionFile::read_rows, of the lowest block of rows with one; no memory is an
/// exception, as everywhere, and ends the program on a thread that does not catch it.
template <ParallelFor PF>
cuda::std::expected<indexcache::OverlapCounts, SafetensorsError> count_overlap(
    SelectionFile const& file, indexcache::OverlapOptions options, PF const& parallel_for) {
  auto const layers = static_cast<index_t>(file.layers().size());
  struct Worker {
    indexcache::OverlapCounter counter;
    SelectionRows rows;
  };
  std::vector<Worker> workers;
  for (int i = 0; i < parallel_for.concurrency(); ++i) {
    workers.push_back({indexcache::OverlapCounter(layers, options), {}});
  }
  detail::FirstFault fault;
  index_t const step = detail::rows_per_read(file);
  index_t const blocks = (file.rows() + step - 1) / step;
  parallel_for(blocks, [&](index_t begin, index_t end, int number) {
    Worker& worker = workers[static_cast<std::size_t>(number)];
    for (index_t block = begin; block < end && !fault.before(block); ++block) {
      index_t const first = block * step;
      auto const read = file.read_rows(first, std::min(step, file.rows() - first), worker.rows);
      if (!read) {
        fault.report(block, read.error());
      } else if (Status const added = worker.counter.add(worker.rows.view()); !added.ok()) {
        fault.report(block, {file.name(), "", added.what, "what read_rows accepts"});
      }
    }
  });
  if (auto found = fault.take()) return cuda::std::unexpected<SafetensorsError>(std::move(*found));
  indexcache::OverlapCounts total(layers);
  for (Worker const& worker : workers) {
    [[maybe_unused]] Status const merged = total.merge(worker.counter.counts());  // same layers
  }
  return total;
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
