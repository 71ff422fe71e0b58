// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <cstdint>

/// @file For engines compiled as C++17: the plain structures that a layer call crosses into a
/// translation unit compiled as C++20 (or CUDA). This header and what it includes is C++17, with
/// the CCCL headers on the include path; interop/boundary_views.hpp turns the structures into views
/// on the other side. examples/embed_cxx17 shows both sides.
///
/// Nothing here says in which space memory lies or what the untyped elements are: that is settled
/// where the engine chooses a back end and its policies.

namespace indexshare {
inline namespace v0 {
namespace boundary {

/// A strided tensor; strides in elements, the innermost 1. Without data: absent.
/// @tparam T  the element; `void` where the two sides know it
template <class T, std::size_t Rank>
struct Array {
  T* data = nullptr;
  index_t extents[Rank] = {};
  index_t strides[Rank] = {};
};

/// A dense row-major array.
template <class T, class... Extents>
constexpr Array<T, sizeof...(Extents)> dense(T* data, Extents... extents) noexcept {
  constexpr std::size_t rank = sizeof...(Extents);
  Array<T, rank> array{data, {static_cast<index_t>(extents)...}, {}};
  index_t step = 1;
  for (std::size_t i = rank; i-- > 0;) {
    array.strides[i] = step;
    step *= array.extents[i];
  }
  return array;
}

/// A cache as CacheView describes it, without its format. Strides in elements of the storage type:
/// bytes for the e4m3 formats.
struct Cache {
  void* data = nullptr;
  index_t blocks = 0;
  index_t block_size = 1;    ///< tokens per block
  index_t lanes = 0;         ///< values that a row decodes to
  index_t block_stride = 0;  ///< between blocks
  index_t row_stride = 0;    ///< between the rows (or codes) of tokens in a block
};

/// A dense cache of plain elements [blocks, block size, lanes].
constexpr Cache dense_cache(void* data, index_t blocks, index_t block_size,
                            index_t lanes) noexcept {
  return {data, blocks, block_size, lanes, block_size * lanes, lanes};
}

/// Pages of each request; without data the cache is contiguous, one block of `page_size` tokens per
/// request.
struct Pages {
  Array<position_t const, 2> table{};  ///< [requests, max pages]
  index_t page_size = 1;
};

/// The query rows of one call. Lengths and requests have the same extent.
struct Batch {
  Array<position_t const, 1> lengths{};   ///< [rows] keys that the row sees
  Array<position_t const, 1> requests{};  ///< [rows] line of the page tables
  Pages index_pages{};                    ///< of the index-key cache; unused by shared layers
  Pages kv_pages{};
};

/// One call of a layer of ReluDotIndexer and an MLA policy: its inputs and outputs. Shapes as in
/// docs/shapes.md.
struct LayerCall {
  Batch batch{};
  std::int64_t forward = -1;  ///< names the forward, see ForwardId
  std::int32_t batch_id = 0;

  Array<void const, 3> index_q{};  ///< [rows, index heads, index dim]; absent on a shared layer
  Array<float const, 2> head_weights{};  ///< [rows, index heads]
  Cache index_keys{};

  Array<void const, 3> q{};  ///< [rows, heads, key_dim]
  Cache kv{};
  float scale = 0;               ///< of the logits; no default
  Array<float const, 1> sink{};  ///< [heads] or absent

  Array<void, 3> out{};   ///< [rows, heads, value_dim]
  Array<float, 2> lse{};  ///< [rows, heads] or absent
};

}  // namespace boundary
}  // namespace v0
}  // namespace indexshare
