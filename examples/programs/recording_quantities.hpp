// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

/// @file What a recording of sparse-attention layers holds, in the order in which a layer computes
/// it. docs/comparing.md describes the format.

namespace programs {

inline constexpr std::string_view recording_format = "indexshare-recording-1";

/// In pipeline order; the number is the index in `quantities`.
enum class Quantity : std::size_t {
  hidden,
  q_a,
  q_resid,
  q,
  q_rope,
  kv_a,
  kv_latent,
  k_rope,
  index_q_raw,
  index_q,
  index_k_raw,
  index_k_norm,
  index_k,
  head_weights_raw,
  head_weights,
  scores,
  selection,
  lse,
  attention,
  gated,
  output,
};

/// The name of an extent. Extents of one layer that have the same name are equal, except `keys` and
/// `selected`, which occur once.
enum class Extent {
  none,
  tokens,
  rows,
  hidden_size,
  q_rank,
  heads,
  query_dim,
  rope_dim,
  kv_row,
  kv_rank,
  index_heads,
  index_dim,
  keys,
  selected,
  value_dim,
};

struct QuantitySpec {
  Quantity id;
  std::string_view name;
  std::array<Extent, 3> extents;  ///< `none` at the end: the rank is lower
  std::string_view hint;          ///< what usually makes this the first quantity to differ

  constexpr bool per_token() const { return extents[0] == Extent::tokens; }
  constexpr std::size_t rank() const { return extents[2] == Extent::none ? 2 : 3; }
};

inline constexpr QuantitySpec quantities[] = {
    {Quantity::hidden,
     "hidden",
     {Extent::tokens, Extent::hidden_size},
     "the input itself: taken before input_layernorm instead of after, other tokens, or a layer "
     "below that differs (near-tie rows included)"},
    {Quantity::q_a,
     "q_a",
     {Extent::rows, Extent::q_rank},
     "the weight of q_a_proj: wrong layer, transposed, a fused tensor split at the wrong row, or a "
     "quantised weight whose scale is missing"},
    {Quantity::q_resid,
     "q_resid",
     {Extent::rows, Extent::q_rank},
     "q_a_layernorm is an RMS norm; its eps is 1e-6 in some programs and rms_norm_eps (1e-5) in "
     "others (indexshare-demo --latent-eps tells that choice from a fault), or its weight is "
     "missing"},
    {Quantity::q,
     "q",
     {Extent::rows, Extent::heads, Extent::query_dim},
     "q_b_proj: heads and lanes split the wrong way, the rope lanes not last, or q_a used in place "
     "of the normed q_resid"},
    {Quantity::q_rope,
     "q_rope",
     {Extent::rows, Extent::heads, Extent::rope_dim},
     "rotary embedding: pairs interleaved (2i, 2i+1) against half-split (i, i+n/2), theta, YaRN, "
     "or positions; pairs sound but moved means that rotated_lanes is stated wrongly"},
    {Quantity::kv_a,
     "kv_a",
     {Extent::tokens, Extent::kv_row},
     "the weight of kv_a_proj_with_mqa: wrong layer, or its latent and rope lanes exchanged"},
    {Quantity::kv_latent,
     "kv_latent",
     {Extent::tokens, Extent::kv_rank},
     "kv_a_layernorm is an RMS norm over the latent lanes alone, without the rope lanes; its eps "
     "is 1e-6 in some programs and rms_norm_eps (1e-5) in others (indexshare-demo --latent-eps "
     "tells that choice from a fault)"},
    {Quantity::k_rope,
     "k_rope",
     {Extent::tokens, Extent::rope_dim},
     "rotary embedding of the key: pairing, theta, YaRN, or positions; the lanes are not normed"},
    {Quantity::index_q_raw,
     "index_q_raw",
     {Extent::rows, Extent::index_heads, Extent::index_dim},
     "wq_b reads q_resid, the normed query latent, not q_a and not hidden"},
    {Quantity::index_q,
     "index_q",
     {Extent::rows, Extent::index_heads, Extent::index_dim},
     "rotary embedding of the indexer: its pairing may differ from the attention's, the rotated "
     "lanes are the first or the last of the head by family, the other lanes pass; else a "
     "Hadamard transform on one side: state it by index_basis, and let indexshare-demo do the same "
     "with --hadamard"},
    {Quantity::index_k_raw,
     "index_k_raw",
     {Extent::tokens, Extent::index_dim},
     "the weight of wk, which reads hidden: wrong layer, or loaded into a shared layer"},
    {Quantity::index_k_norm,
     "index_k_norm",
     {Extent::tokens, Extent::index_dim},
     "k_norm is a LayerNorm with bias and eps 1e-6: not an RMS norm, not rms_norm_eps "
     "(indexshare-demo --index-key-eps tells a choice of eps from a fault)"},
    {Quantity::index_k,
     "index_k",
     {Extent::tokens, Extent::index_dim},
     "rotary embedding of the index key: pairing, first or last lanes, positions; else a Hadamard "
     "transform on one side: state it by index_basis, and let indexshare-demo do the same with "
     "--hadamard"},
    {Quantity::head_weights_raw,
     "head_weights_raw",
     {Extent::rows, Extent::index_heads},
     "weights_proj reads hidden, not q_resid; it is computed and kept in fp32"},
    {Quantity::head_weights,
     "head_weights",
     {Extent::rows, Extent::index_heads},
     "the constants index_heads^-0.5 and index_dim^-0.5, folded once each, in fp32; a constant "
     "factor means that one was left out or folded twice"},
    {Quantity::scores,
     "scores",
     {Extent::rows, Extent::keys},
     "ReLU of each head's dot product before its weight, then the sum over heads; else keys of "
     "another request, a stale or misplaced row of the index-key cache, or fp8 keys"},
    {Quantity::selection,
     "selection",
     {Extent::rows, Extent::selected},
     "where the scores agree it is the choice: k, the visible keys (a row sees itself), ties "
     "(lower "
     "position wins here), or in a shared layer whose selection it reads"},
    {Quantity::lse,
     "lse",
     {Extent::rows, Extent::heads},
     "the softmax scale, (nope + rope)^-0.5 and not that of the latent width, times mscale^2 under "
     "YaRN; the sum over selected keys alone, as a natural logarithm, without the sink"},
    {Quantity::attention,
     "attention",
     {Extent::rows, Extent::heads, Extent::value_dim},
     "where lse agrees it is the values: W_UV (the value half of kv_b_proj, per head), or a "
     "learned "
     "sink left out"},
    {Quantity::gated,
     "gated",
     {Extent::rows, Extent::heads, Extent::value_dim},
     "the output gate: a sigmoid of a projection of hidden, before o_proj"},
    {Quantity::output,
     "output",
     {Extent::rows, Extent::hidden_size},
     "o_proj: heads and lanes flattened in another order, its weight, or a sum over "
     "tensor-parallel ranks that is missing; the residual is not part of it"},
};
inline constexpr std::size_t quantity_count = std::size(quantities);

namespace recording_detail {
constexpr bool quantities_in_order() {
  for (std::size_t i = 0; i < quantity_count; ++i)
    if (quantities[i].id != static_cast<Quantity>(i)) return false;
  return quantity_count == static_cast<std::size_t>(Quantity::output) + 1;
}
static_assert(quantities_in_order());
}  // namespace recording_detail

constexpr QuantitySpec const& spec_of(Quantity id) {
  return quantities[static_cast<std::size_t>(id)];
}

/// What an extent is called in errors.
constexpr std::string_view extent_name(Extent extent) {
  constexpr std::string_view names[] = {"",
                                        "tokens",
                                        "rows",
                                        "hidden size",
                                        "query rank",
                                        "heads",
                                        "query lanes",
                                        "rope lanes",
                                        "latent and rope lanes",
                                        "latent lanes",
                                        "index heads",
                                        "index lanes",
                                        "keys",
                                        "selected keys",
                                        "value lanes"};
  static_assert(std::size(names) == static_cast<std::size_t>(Extent::value_dim) + 1);
  return names[static_cast<std::size_t>(extent)];
}

/// What only a full layer has; a shared layer has the selection of its source.
constexpr bool belongs_to_indexer(Quantity id) {
  return id >= Quantity::index_q_raw && id <= Quantity::scores;
}

/// `layer3.q_a`
inline std::string tensor_name(std::int32_t layer, Quantity id) {
  return "layer" + std::to_string(layer) + "." + std::string(spec_of(id).name);
}

/// A tensor of a layer, by its name.
struct TensorPlace {
  std::int32_t layer;
  Quantity id;
};

/// Nothing for a name that is not exactly `layerN.<quantity>`.
inline std::optional<TensorPlace> parse_tensor_name(std::string_view name) {
  constexpr std::string_view prefix = "layer";
  std::size_t const dot = name.find('.');
  if (!name.starts_with(prefix) || dot == std::string_view::npos) return std::nullopt;
  std::string_view const digits = name.substr(prefix.size(), dot - prefix.size());
  std::int32_t layer = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), layer);
  bool const whole = error == std::errc() && end == digits.data() + digits.size();
  if (!whole || layer < 0) return std::nullopt;
  for (QuantitySpec const& spec : quantities)
    if (name == tensor_name(layer, spec.id)) return TensorPlace{layer, spec.id};
  return std::nullopt;
}

}  // namespace programs
