// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/views.hpp>

namespace indexshare {
inline namespace v0 {

/// Inputs of MLA in the absorbed form: one KV row per token serves all heads.
template <Element Query, class KvFormat, Space S>
struct MlaInputs {
  QueryView<S, Query> q{};      ///< [rows, heads, key_dim]: W_UK^T q_nope | q_rope
  CacheView<S, KvFormat> kv{};  ///< rows of key_dim lanes: latent | rope; value = first value_dim
  float scale = 0;     ///< of the logits; no default: d_qk^-0.5 of the model, not key_dim^-0.5
  SinkView<S> sink{};  ///< [heads] or empty: a learned logit that only takes weight away
};

/// Outputs of MLA. Rows without a visible key: out 0, lse -inf.
template <Element Out, Space S>
struct MlaOutputs {
  OutputView<S, Out> out{};  ///< [rows, heads, value_dim]
  LseView<S> lse{};          ///< [rows, heads] or empty; natural log, without the sink
};

/// Softmax over the selected keys only, in fp32:
///   logit[s] = scale * q . kv[s],  out = sum_s softmax(logit)[s] * kv[s][0 .. value_dim).
/// Entries without a slot or outside the cache contribute nothing; a duplicate counts each time.
/// With a sink, out is multiplied by exp(lse) / (exp(lse) + exp(sink)), once.
///
/// @tparam KvFormat  format::Plain<T> or format::LatentE4m3
/// @source DeepSeek-V3.2-Exp inference/model.py, MLA.forward (decode branch), commit 3b99a53
template <Element Query, class KvFormat, Element Out = float>
struct SparseMla {
  static constexpr bool reads_selection = true;
  template <Space S>
  using inputs = MlaInputs<Query, KvFormat, S>;
  template <Space S>
  using outputs = MlaOutputs<Out, S>;
};

/// The same over all visible keys of each row: the switch to dense attention. A layer with this
/// policy runs no indexer. Equal to SparseMla where top_k >= length.
template <Element Query, class KvFormat, Element Out = float>
struct DenseMla {
  static constexpr bool reads_selection = false;
  template <Space S>
  using inputs = MlaInputs<Query, KvFormat, S>;
  template <Space S>
  using outputs = MlaOutputs<Out, S>;
};

namespace detail {

/// The two policies that share inputs, outputs and back-end code.
template <class Policy>
inline constexpr bool is_mla = false;
template <class Q, class F, class O>
inline constexpr bool is_mla<SparseMla<Q, F, O>> = true;
template <class Q, class F, class O>
inline constexpr bool is_mla<DenseMla<Q, F, O>> = true;

}  // namespace detail

/// What every back end asks of a shape, for its `attention_workspace`. Errors: bad_shape.
template <class Policy>
requires detail::is_mla<Policy>
constexpr Status check_shape(Policy const&, Shape const& shape) noexcept {
  using namespace detail;
  return first_failure(
      {check_at_least("shape.heads", 1, shape.heads),
       check_at_most("shape.heads", max_width, shape.heads),
       check_at_least("shape.key_dim", 1, shape.key_dim),
       check_at_most("shape.key_dim", max_width, shape.key_dim),
       check_at_least("shape.value_dim", 1, shape.value_dim),
       check_at_most("shape.value_dim against shape.key_dim", shape.key_dim, shape.value_dim)});
}

/// The checks that every back end shares, for its `attention_check`; a back end adds its own
/// limits. Errors: bad_shape, bad_stride, missing_input, bad_value; `what` names the extent.
template <Element Query, class KvFormat, Element Out, Space S>
Status check_inputs(MlaInputs<Query, KvFormat, S> const& in, MlaOutputs<Out, S> const& out,
                    RowBatch<S> const& batch, Shape const& shape) noexcept {
  using namespace detail;
  // absent is a view of no extent; a null pointer with an extent is a mistake
  bool const has_lse = out.lse.data_handle() != nullptr || out.lse.extent(0) > 0;
  bool const has_sink = in.sink.data_handle() != nullptr || in.sink.extent(0) > 0;
  return first_failure({
      check_shape(SparseMla<Query, KvFormat, Out>{}, shape),
      check_extent("rows of the attention queries", batch.count(), in.q.extent(0)),
      check_extent("heads of the attention queries", shape.heads, in.q.extent(1)),
      check_extent("lanes of the attention queries", shape.key_dim, in.q.extent(2)),
      check_extent("rows of the attention output", batch.count(), out.out.extent(0)),
      check_extent("heads of the attention output", shape.heads, out.out.extent(1)),
      check_extent("lanes of the attention output", shape.value_dim, out.out.extent(2)),
      has_lse ? check_extent("rows of lse", batch.count(), out.lse.extent(0)) : Status{},
      has_lse ? check_extent("heads of lse", shape.heads, out.lse.extent(1)) : Status{},
      has_sink ? check_extent("heads of the sink", shape.heads, in.sink.extent(0)) : Status{},
      check_readable("attention queries", in.q),
      check_writable("attention output", out.out),
      has_lse ? check_writable("lse", out.lse) : Status{},
      has_sink ? check_readable("sink", in.sink) : Status{},
      check_cache(kv_cache_names, in.kv, shape.key_dim, batch.kv_pages),
      in.scale > 0 && in.scale < 3.0e38f
          ? Status{}
          : failure(Errc::bad_value, "scale of the attention must be given, positive and finite"),
  });
}

}  // namespace v0
}  // namespace indexshare
