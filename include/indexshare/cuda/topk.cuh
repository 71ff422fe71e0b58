// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/topk_kernels.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/cuda/topk_plan.hpp>
#include <indexshare/select.hpp>
#include <indexshare/topk/radix.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Whether each row begins at a 128-byte line.
template <class Score>
bool rows_begin_lines(ScoreView<Space::device, Score const> const& scores) noexcept {
  auto const begins = [](std::uintptr_t bytes) { return bytes % 128 == 0; };
  return begins(reinterpret_cast<std::uintptr_t>(scores.data_handle())) &&
         begins(static_cast<std::uintptr_t>(scores.stride(0)) * sizeof(Score));
}

/// The call with the kernels' sizes as parameters, for tests that reach every branch on short rows.
template <class Narrow, class Wide, class Score>
Status radix_select(CudaExec const& x, ScoreView<Space::device, Score const> const& scores,
                    LengthView<Space::device> const& lengths,
                    SelectionView<Space::device> const& out, Workspace ws) noexcept {
  Shape const shape = topk_shape<Score>(scores, out);
  auto const plan = plan_topk<Narrow, Wide>(x.limits(), shape,
                                            rows_begin_lines(scores) ? 0 : most_line_elements - 1);
  if (!plan) return plan.error();
  if (Status const status =
          check_workspace("workspace of top-k, in bytes", ws, plan->workspace.bytes);
      !status.ok()) {
    return status;
  }
  TopKRows<Score> const rows = topk_rows<Score>(scores, lengths, out);
  WorkspaceCarver carver(ws);
  TopKBuffers const buffers =
      plan->row_chunks > 0 ? carve_topk<Wide>(carver, shape.rows, plan->row_chunks) : TopKBuffers{};
  auto const shape_of = [](TopKLaunch const& kernel, index_t blocks) {
    return LaunchShape{dim3(static_cast<unsigned>(blocks)), kernel.threads, kernel.shared_bytes};
  };
  bool const narrow = shape.keys <= Narrow::row_keys;
  Status const status =
      launch(x, plan->rows.kernel, narrow ? topk_row<Narrow, Score> : topk_row<Wide, Score>,
             shape_of(plan->rows, plan->rows.blocks), rows, buffers);
  if (!status.ok() || plan->row_chunks == 0) return status;
  // a grid has no more than max_position blocks
  return for_each_pass(shape.rows, max_position / plan->row_chunks, [&](RowRange pass) noexcept {
    return launch(x, plan->chunks.kernel, topk_chunk<Wide, Score>,
                  shape_of(plan->chunks, pass.count * plan->row_chunks), rows, buffers,
                  static_cast<std::uint32_t>(plan->row_chunks), pass.first);
  });
}

}  // namespace detail

/// One launch for rows of up to 16384 keys, two for longer ones; scores of any element type, rows
/// at any address. Each score is read once, 2048 to 16384 of a long row twice. Exact for any
/// scores: where the threshold that the sample of a long row gave lets fewer than k or more than
/// 10240 scores pass, one block selects anew and reads the row four times more, five where ties are
/// cut. Errors: bad_shape, bad_stride, missing_input for `scores` [rows, keys], `lengths` [rows]
/// and `out` [rows, k], whose innermost strides are 1; workspace_too_small; those of the size
/// query; backend_error. Only enqueues; counters are reset on the stream.
template <Element Score>
Status topk_select(CudaExec const& x, RadixTopK policy,
                   ScoreView<Space::device, Score const> const& scores,
                   LengthView<Space::device> const& lengths,
                   SelectionView<Space::device> const& out, Workspace ws) noexcept {
  if (Status const status = check_inputs(policy, scores, lengths, out); !status.ok()) return status;
  return detail::radix_select<detail::TopKNarrow, detail::TopKWide, Score>(x, scores, lengths, out,
                                                                           ws);
}

static_assert(TopKPolicy<RadixTopK, CudaExec, float> && TopKPolicy<RadixTopK, CudaExec, bf16> &&
              TopKPolicy<RadixTopK, CudaExec, fp16>);

}  // namespace v0
}  // namespace indexshare
