// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

/// @file What the CUDA indexer launches for a shape, as arithmetic: which kernel, how its blocks
/// cut rows and keys, how much shared memory. Needs no toolkit and no device.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// How the dots of a pair of element types are computed.
enum class ScoreDots : std::uint8_t {
  scalar,   ///< fp32 multiply-adds, any types
  half,     ///< tensor cores, queries and keys in the same 16-bit type
  widened,  ///< tensor cores, e4m3 keys converted exactly to the queries' 16-bit type
  e4m3,     ///< tensor cores in e4m3; converted exactly to fp16 where mma.sync has none
};

template <class Query, class KeyFormat>
constexpr ScoreDots score_dots() noexcept {
  constexpr bool half = std::is_same_v<Query, bf16> || std::is_same_v<Query, fp16>;
  if constexpr (std::is_same_v<KeyFormat, format::IndexKeyE4m3>) {
    if (half) return ScoreDots::widened;
    return std::is_same_v<Query, e4m3> ? ScoreDots::e4m3 : ScoreDots::scalar;
  } else {
    return half && std::is_same_v<KeyFormat, format::Plain<Query>> ? ScoreDots::half
                                                                   : ScoreDots::scalar;
  }
}

/// The tensor-core kernel's limits; every other shape takes the scalar one.
inline constexpr index_t most_tensor_lanes = 256;
inline constexpr index_t most_tensor_heads = 128;

/// The path is a function of types and heads and lanes alone, so a row's bits are too.
constexpr bool runs_on_tensor_cores(ScoreDots dots, index_t heads, index_t lanes) noexcept {
  return dots != ScoreDots::scalar && lanes % 16 == 0 && lanes <= most_tensor_lanes &&
         heads <= most_tensor_heads;
}

inline constexpr int most_score_warps = 8;  ///< of a block
inline constexpr int most_score_rows = 16;  ///< of a block

/// One block of the tensor-core kernel: `rows` query rows against `warps` streams of keys. A warp
/// has `stages` buffers of 32 keys for itself, which its copies fill ahead of its arithmetic.
/// Shared memory, in this order:
///   queries  [rows][8 * head_tiles] lines of `query_line` bytes
///   keys     [warps][stages] buffers: 32 lines of `key_line` bytes and then 32 scales, float
///   weights  [rows][8 * head_tiles] float
/// Lines are multiples of 128 bytes; 16-byte piece p of line l lies at piece p ^ (l % 8), so that
/// eight lines' pieces of one column are in different banks.
struct ScoreBlock {
  int rows = 0;
  int warps = 0;
  int stages = 0;
  int head_tiles = 0;
  int query_line = 0;
  int key_line = 0;

  static constexpr int warp_keys = 32;  ///< of a buffer
  static constexpr int most_stages = 4;

  // where the parts after the queries begin, in bytes
  int keys_at = 0;
  int weights_at = 0;
  int bytes = 0;  ///< of all

  INDEXSHARE_HD constexpr int padded_heads() const noexcept { return 8 * head_tiles; }
  INDEXSHARE_HD constexpr int tile() const noexcept { return warps * warp_keys; }

  constexpr void lay_out() noexcept {
    keys_at = rows * padded_heads() * query_line;
    weights_at = keys_at + stages * tile() * (key_line + 4);
    bytes = weights_at + rows * padded_heads() * 4;
  }
};

/// One block of the scalar kernel: `rows` rows, a warp for each and each 32 keys of a tile. Shared
/// memory: keys [tile] lines of `line` floats, an odd number of 16-byte pieces; a piece of query
/// per warp [heads_at_once][lanes_at_once]; which keys of the tile exist.
struct ScalarBlock {
  int rows = 0;
  int tile = 0;
  index_t line = 0;

  static constexpr int heads_at_once = 4;
  static constexpr int lanes_at_once = 64;
  static constexpr int most_key_warps = 4;
  static constexpr int most_warps = 8;
  static constexpr int most_rows = 8;

  INDEXSHARE_HD constexpr int key_warps() const noexcept { return tile > 32 ? tile / 32 : 1; }
  INDEXSHARE_HD constexpr int warps() const noexcept { return rows * key_warps(); }
  INDEXSHARE_HD constexpr index_t queries_at() const noexcept { return tile * line * 4; }
  INDEXSHARE_HD constexpr index_t exists_at() const noexcept {
    return queries_at() + index_t{warps()} * heads_at_once * lanes_at_once * 4;
  }
  INDEXSHARE_HD constexpr index_t bytes() const noexcept { return exists_at() + tile * 4; }
};

}  // namespace detail

/// What `indexer_score` launches on CUDA: blocks of `rows` query rows by `chunk` keys. None of it
/// changes a score.
struct IndexerPlan {
  char const* kernel = "";
  int rows = 0;            ///< query rows of a block
  int tile = 0;            ///< keys in shared memory at once
  int threads = 0;         ///< of a block
  int shared_bytes = 0;    ///< of a block
  index_t chunk = 0;       ///< keys of a block, whole tiles
  index_t row_groups = 0;  ///< grid.x
  index_t key_chunks = 0;  ///< grid.y
  bool tensor = false;     ///< tensor cores, and `block` says how; else `scalar` does
  detail::ScoreBlock block{};
  detail::ScalarBlock scalar{};
};

namespace detail {

constexpr index_t score_cut(index_t n, index_t by) noexcept { return (n + by - 1) / by; }

/// Cuts the keys into at most `most_chunks` chunks of whole tiles: as many blocks as one to four
/// waves of one block per multiprocessor, whichever ends first; of equals the fewest. Returns the
/// keys that a multiprocessor sees one after the other.
constexpr index_t cut_score_grid(IndexerPlan& plan, DeviceLimits const& limits, index_t rows,
                                 index_t keys, index_t most_chunks) noexcept {
  index_t const sms = std::max(1, limits.multiprocessors);
  plan.row_groups = score_cut(rows, plan.rows);
  index_t const groups = std::max<index_t>(1, plan.row_groups);
  index_t shortest = 0;
  for (index_t waves = 1; waves <= 4; ++waves) {
    index_t const chunks =
        std::clamp<index_t>(waves * sms / groups, 1, std::max<index_t>(1, most_chunks));
    index_t const chunk =
        score_cut(std::max<index_t>(1, score_cut(keys, chunks)), plan.tile) * plan.tile;
    index_t const time = score_cut(groups * score_cut(keys, chunk), sms) * chunk;
    if (waves > 1 && time >= shortest) continue;
    shortest = time;
    plan.chunk = chunk;
    plan.key_chunks = score_cut(keys, chunk);
  }
  return shortest;
}

/// The most warps with the deepest queues that fit beside the queries of `rows` rows; bytes is
/// above the limit if none do. One buffer per warp suffices where a warp holds its keys in
/// registers while it is filled again.
constexpr ScoreBlock fit_score_block(ScoreBlock block, int rows, int limit) noexcept {
  constexpr int flight = 64 * 1024;  // bytes of keys under way that hide the latency of memory
  block.rows = rows;
  for (block.warps = most_score_warps;; block.warps /= 2) {
    int const deepest = flight / (block.tile() * block.key_line);
    for (block.stages = std::clamp(deepest, 1, ScoreBlock::most_stages);; --block.stages) {
      block.lay_out();
      if (block.bytes <= limit) return block;
      if (block.stages == 1) break;
    }
    if (block.warps == 1) return block;
  }
}

/// Every further chunk of keys reads the queries of its rows again. So many chunks cost a twelfth
/// of the bytes of the keys; where they leave multiprocessors idle, as many more as cost no more
/// than reading the queries once for each group of rows.
constexpr index_t most_score_chunks(DeviceLimits const& limits, ScoreDots dots, index_t groups,
                                    index_t rows, Shape const& shape) noexcept {
  index_t const queries = rows * shape.index_heads * (dots == ScoreDots::widened ? 2 : 1);
  index_t const cheap = 1 + shape.keys / (12 * queries);
  index_t const busy = score_cut(limits.multiprocessors, std::max<index_t>(1, groups));
  return std::max(cheap, std::min(busy, groups - 1 + cheap));
}

constexpr int line_of(index_t bytes) noexcept {
  return static_cast<int>(score_cut(bytes, 128) * 128);
}

/// The most rows per block, since keys are read once for all of them, unless fewer shorten the
/// longest work of a multiprocessor by an eighth. Rows count alike whether they are of one request
/// or of several, which only the device knows; bringing a tile of keys counts as one row, or as
/// three with its conversion (instructions, counted).
constexpr IndexerPlan plan_tensor_scores(DeviceLimits const& limits, ScoreDots dots,
                                         Shape const& shape) noexcept {
  ScoreBlock form;
  form.head_tiles = static_cast<int>(score_cut(shape.index_heads, 8));
  // two bytes also where e4m3 queries stay one: images for other parts widen them
  form.query_line = line_of(2 * shape.index_dim);
  form.key_line = line_of(dots == ScoreDots::half ? 2 * shape.index_dim : shape.index_dim);

  index_t const tile_rows = dots == ScoreDots::widened ? 3 : 1;
  IndexerPlan best;
  index_t shortest = 0;
  for (int rows = most_score_rows; rows >= 1; rows /= 2) {
    IndexerPlan plan;
    plan.block = fit_score_block(form, rows, limits.shared_memory_bytes);
    if (rows > 1 && (rows / 2 >= shape.rows || plan.block.warps < most_score_warps)) continue;
    plan.rows = rows;
    plan.tile = plan.block.tile();
    index_t const groups = score_cut(shape.rows, rows);
    index_t const keys = cut_score_grid(plan, limits, shape.rows, shape.keys,
                                        most_score_chunks(limits, dots, groups, rows, shape));
    index_t const time = keys * (std::clamp<index_t>(shape.rows, 1, rows) + tile_rows);
    if (best.rows > 0 && 8 * time > 7 * shortest) continue;
    best = plan;
    shortest = time;
  }
  best.kernel = shape.index_dim == 128 ? "indexer scores, tensor cores, 128 lanes"
                                       : "indexer scores, tensor cores";
  best.tensor = true;
  best.threads = 32 * best.block.warps;
  best.shared_bytes = best.block.bytes;
  return best;
}

constexpr IndexerPlan plan_scalar_scores(DeviceLimits const& limits, Shape const& shape) noexcept {
  ScalarBlock block;
  block.line = 4 * (score_cut(shape.index_dim, 4) | 1);
  block.rows = ScalarBlock::most_rows;
  while (block.rows > 1 && block.rows / 2 >= shape.rows) block.rows /= 2;
  block.tile = 32 * std::min(ScalarBlock::most_key_warps, ScalarBlock::most_warps / block.rows);
  while (block.tile > 1 && block.bytes() > limits.shared_memory_bytes) block.tile /= 2;
  while (block.rows > 1 && block.bytes() > limits.shared_memory_bytes) block.rows /= 2;

  IndexerPlan plan;
  plan.kernel = "indexer scores, scalar";
  plan.rows = block.rows;
  plan.tile = block.tile;
  plan.threads = 32 * block.warps();
  plan.shared_bytes = static_cast<int>(std::min<index_t>(block.bytes(), max_position));
  plan.scalar = block;
  cut_score_grid(plan, limits, shape.rows, shape.keys, score_cut(shape.keys, block.tile));
  return plan;
}

}  // namespace detail

/// What the CUDA indexer launches for at most shape.rows rows of shape.keys keys on a part with
/// these limits, or why it cannot. The scores do not depend on `limits`, rows or keys.
/// Errors: bad_shape; unsupported (before sm_80, or a block needs more shared memory than the part
/// has: `expected` is the need in bytes).
template <Element Query, class KeyFormat>
constexpr Result<IndexerPlan> indexer_plan(DeviceLimits const& limits,
                                           ReluDotIndexer<Query, KeyFormat> const& policy,
                                           Shape const& shape) noexcept {
  using namespace detail;
  if (Status const status = first_failure(
          {check_shape(policy, shape),
           check_compute_capability("compute capability of the device (CUDA indexer)", limits)});
      !status.ok()) {
    return refuse(status);
  }
  Shape capped = shape;  // lengths are int32
  capped.rows = std::max<index_t>(shape.rows, 0);
  capped.keys = std::clamp<index_t>(shape.keys, 0, max_position);
  if (capped.rows > max_position) {
    return refuse(failure(Errc::unsupported, "rows of one call of the CUDA indexer", max_position,
                          shape.rows));
  }
  constexpr ScoreDots dots = score_dots<Query, KeyFormat>();
  IndexerPlan const plan = runs_on_tensor_cores(dots, shape.index_heads, shape.index_dim)
                               ? plan_tensor_scores(limits, dots, capped)
                               : plan_scalar_scores(limits, capped);
  Status const fits = check_shared_memory(
      "shared memory of a block, which these index heads and lanes need (CUDA indexer)", limits,
      plan.shared_bytes);
  return fits.ok() ? Result<IndexerPlan>(plan) : refuse(fits);
}

/// No scratch. Errors: those of `indexer_plan`.
template <detail::HasDeviceLimits X, Element Query, class KeyFormat>
constexpr Result<WorkspaceSize> indexer_workspace(X const& x,
                                                  ReluDotIndexer<Query, KeyFormat> const& policy,
                                                  Shape const& shape) noexcept {
  Result<IndexerPlan> const plan = indexer_plan(x.limits(), policy, shape);
  if (!plan) return refuse(plan.error());
  return WorkspaceSize{0};
}

}  // namespace v0
}  // namespace indexshare
