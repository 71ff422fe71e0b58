// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "worst.hpp"

#include <indexshare/host/memory.hpp>
#include <indexshare/indexshare.hpp>
#include <indexshare/io/safetensors.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

/// @file Feeds a fixture of tests/golden (what transformers computed) through a stack of layers and
/// compares. The tensors of a fixture are described in tests/golden/README.md.

namespace programs {

/// What a replay found. Errors are absolute, except `output_error`, which is relative to the
/// largest output of the layer.
struct GoldenReport {
  std::int64_t rows = 0;         ///< rows of full layers whose selection was compared
  std::int64_t skipped = 0;      ///< rows left out: the oracle's boundary gap is below 1e-5
  std::int64_t wrong = 0;        ///< selections that differ from the oracle's set
  std::int64_t shared_rows = 0;  ///< rows of shared layers, compared with the producer's selection
  std::int64_t shared_wrong = 0;
  double score_error = 0;
  double lse_error = 0;
  double output_error = 0;
};

/// Memory of a replay: what executor X works on and the host reads and writes, too. This is the one
/// of host executors; a back end with memory of its own specialises it.
template <class X>
struct ReplayMemory {
  static_assert(X::space == indexshare::Space::host,
                "specialise programs::ReplayMemory for this executor");
  /// Made from a number of elements or from a std::vector.
  template <class T>
  using Array = std::vector<T>;
  /// Made from a WorkspaceSize; for workspaces and states.
  using Block = indexshare::HostMemory;
  /// Waits for the executor's work.
  static void finish(X const&) {}
};

namespace golden_detail {

using indexshare::bf16;
using indexshare::index_t;
using indexshare::position_t;
using indexshare::Space;

inline constexpr double smallest_gap = 1e-5;
inline constexpr index_t page_size = 16;

/// The schedule of the fixtures' model.
using Schedule = indexshare::Pattern<"FFFSSSFS">;

/// Reads tensors and turns what cannot be read into an exception of the program.
class Fixture {
 public:
  explicit Fixture(std::string const& path) : file_(open(path)) {}

  template <class T>
  std::vector<T> read(std::string const& name) const {
    auto tensor = file_.read<T>(name);
    if (!tensor) throw std::runtime_error(tensor.error().message());
    return std::move(*tensor);
  }
  index_t extent(std::string const& name, std::size_t axis) const {
    if (!file_.has(name)) throw std::runtime_error("golden fixture: no tensor " + name);
    return file_.tensors().at(name).shape.at(axis);
  }
  bool has(std::string const& name) const { return file_.has(name); }

 private:
  static indexshare::io::SafetensorsFile open(std::string const& path) {
    auto file = indexshare::io::SafetensorsFile::open(path);
    if (!file) throw std::runtime_error(file.error().message());
    return std::move(*file);
  }
  indexshare::io::SafetensorsFile file_;
};

/// What the library refuses is an exception of the program, too.
inline void require(indexshare::Status const& status) {
  if (status.ok()) return;
  throw std::runtime_error(std::string(status.what) + ": expected " +
                           std::to_string(status.expected) + ", got " + std::to_string(status.got));
}
inline indexshare::WorkspaceSize require(
    indexshare::Result<indexshare::WorkspaceSize> const& size) {
  if (!size) require(size.error());
  return *size;
}

template <class X, class T>
using Array = typename ReplayMemory<X>::template Array<T>;

/// The rows of a fixture as a batch: B requests of T columns, of which `pad` in front are none.
template <class X>
struct Rows {
  static constexpr Space space = X::space;
  index_t requests;
  index_t columns;
  std::vector<position_t> pad;
  Array<X, position_t> lengths;     ///< [rows]
  Array<X, position_t> of_request;  ///< [rows]
  Array<X, position_t> pages;       ///< [requests, pages per request], scattered
  index_t count() const { return static_cast<index_t>(lengths.size()); }
  index_t pages_per_request() const { return (columns + page_size - 1) / page_size; }

  explicit Rows(Fixture const& fixture)
      : requests(fixture.extent("visible_len", 0)),
        columns(fixture.extent("input_ids", 1)),
        pad(fixture.read<position_t>("pad")),
        lengths(fixture.read<position_t>("visible_len")),
        of_request(lengths.size()),
        pages(static_cast<std::size_t>(requests * pages_per_request())) {
    for (index_t i = 0; i < count(); ++i) {
      of_request[static_cast<std::size_t>(i)] = static_cast<position_t>(i / (count() / requests));
    }
    auto const total = static_cast<position_t>(pages.size());
    for (position_t i = 0; i < total; ++i) {
      pages[static_cast<std::size_t>(i)] = total - 1 - i;  // no page where its number suggests
    }
  }

  indexshare::PageTable<space> table() const {
    return indexshare::make_page_table<space>(pages.data(), indexshare::Requests{requests},
                                              indexshare::Pages{pages_per_request()},
                                              indexshare::PageSize{page_size});
  }
  indexshare::RowBatch<space> batch() const {
    return {indexshare::make_lengths<space>(lengths.data(), {count()}),
            indexshare::make_lengths<space>(of_request.data(), {count()}), table(), table()};
  }
};

/// A paged cache filled from a [requests, columns, lanes] tensor without its pad columns.
template <class M, class X>
struct Cache {
  static constexpr Space space = X::space;
  index_t pages;
  index_t lanes;
  Array<X, M> storage;

  Cache(X const& exec, Rows<X> const& rows, std::vector<M> const& tensor)
      : pages(rows.requests * rows.pages_per_request()),
        lanes(static_cast<index_t>(tensor.size()) / (rows.requests * rows.columns)),
        storage(std::vector<M>(static_cast<std::size_t>(pages * page_size * lanes),
                               indexshare::from_float<M>(std::nanf("")))) {
    for (index_t request = 0; request < rows.requests; ++request) {
      position_t const pad = rows.pad[static_cast<std::size_t>(request)];
      index_t const tokens = rows.columns - pad;
      auto const first = tensor.begin() + (request * rows.columns + pad) * lanes;
      Array<X, M> const appended(std::vector<M>(first, first + tokens * lanes));
      Array<X, position_t> positions(static_cast<std::size_t>(tokens));
      std::iota(positions.data(), positions.data() + tokens, position_t{0});
      Array<X, position_t> const requests(
          std::vector<position_t>(positions.size(), static_cast<position_t>(request)));
      auto const status = append_rows(
          exec, indexshare::make_dense<space, M const, 2>(appended.data(), {tokens, lanes}),
          indexshare::make_lengths<space>(positions.data(), {tokens}),
          indexshare::make_lengths<space>(requests.data(), {tokens}), rows.table(), writable());
      require(status);
      ReplayMemory<X>::finish(exec);
    }
  }

  auto writable() {
    return indexshare::make_paged_cache<space>(storage.data(), indexshare::Pages{pages},
                                               indexshare::PageSize{page_size},
                                               indexshare::HeadDim{lanes});
  }
  auto view() const {
    return indexshare::make_paged_cache<space>(storage.data(), indexshare::Pages{pages},
                                               indexshare::PageSize{page_size},
                                               indexshare::HeadDim{lanes});
  }
};

template <class M, class X>
class Replay {
  using Indexer = indexshare::ReluDotIndexer<M, indexshare::format::Plain<M>>;
  using Attention = indexshare::SparseMla<float, indexshare::format::Plain<M>>;
  using Layer =
      indexshare::SparseAttentionLayer<Indexer, indexshare::RadixTopK, Schedule, Attention>;
  static constexpr Space space = X::space;
  using State = indexshare::SelectionState<space>;
  using Block = typename ReplayMemory<X>::Block;

 public:
  Replay(X const& exec, Fixture const& fixture, Fixture const& weights)
      : exec_(exec),
        fixture_(fixture),
        weights_(weights),
        rows_(fixture),
        top_k_(fixture.read<position_t>("index_topk").at(0)),
        scale_(fixture.read<float>("softmax_scale").at(0)),
        state_memory_(State::size({rows_.count()}, {top_k_})),
        state_(State::make(state_memory_.view(), {rows_.count()}, {top_k_}).value()) {}

  GoldenReport run() {
    for (std::int32_t layer = 0; layer < Schedule::layers; ++layer) {
      if (fixture_.has(name(layer, "o"))) run_layer(layer);
    }
    return report_;
  }

 private:
  static std::string name(std::int32_t layer, char const* tensor) {
    return "layer" + std::to_string(layer) + "." + tensor;
  }

  void run_layer(std::int32_t number) {
    Cache<M, X> const kv(exec_, rows_, fixture_.read<M>(name(number, "key_row")));
    Array<X, float> const q(fixture_.read<float>(name(number, "q_abs")));
    index_t const heads = fixture_.extent(name(number, "q_abs"), 2);
    index_t const rope = 2 * fixture_.extent("rope_cos", 2);
    // Not by an assignment from a list with designators, of which nvcc 13.0 loses the gaps.
    Layer layer{.shape = {.rows = rows_.count(),
                          .keys = rows_.columns,
                          .top_k = top_k_,
                          .heads = heads,
                          .key_dim = kv.lanes,
                          .value_dim = kv.lanes - rope},
                .layer = number};

    typename Layer::template inputs<space> in{};
    in.batch = rows_.batch();
    in.id = {1, 0};
    in.attention = {indexshare::make_query<space>(q.data(), {rows_.count()}, {heads}, {kv.lanes}),
                    kv.view(),
                    scale_,
                    {}};
    std::optional<Cache<M, X>> keys;
    std::optional<Array<X, M>> q_index;
    std::optional<Array<X, float>> head_weights;
    if (layer.is_full()) {
      keys.emplace(exec_, rows_, fixture_.read<M>(name(number, "k_index")));
      q_index.emplace(fixture_.read<M>(name(number, "q_index")));
      head_weights.emplace(fixture_.read<float>(name(number, "head_weights")));
      layer.shape.index_heads = fixture_.extent(name(number, "q_index"), 2);
      layer.shape.index_dim = keys->lanes;
      in.indexer.emplace();
      in.indexer->q = indexshare::make_query<space>(q_index->data(), {rows_.count()},
                                                    {layer.shape.index_heads}, {keys->lanes});
      in.indexer->weights = indexshare::make_head_weights<space>(
          head_weights->data(), {rows_.count()}, {layer.shape.index_heads});
      in.indexer->keys = keys->view();
      compare_scores(number, layer.shape, *in.indexer, in.batch);
      gaps_ = fixture_.read<float>(name(number, "gap"));
    }

    Array<X, float> out(at(rows_.count() * heads * layer.shape.value_dim));
    Array<X, float> lse(at(rows_.count() * heads));
    typename Layer::template outputs<space> const outputs{
        indexshare::make_output<space>(out.data(), {rows_.count()}, {heads},
                                       {layer.shape.value_dim}),
        indexshare::make_lse<space>(lse.data(), {rows_.count()}, {heads})};
    Block const scratch(require(layer.workspace(exec_, std::size_t{1} << 22)));
    auto const status = layer.run(exec_, in, state_, outputs, scratch.view());
    require(status);
    ReplayMemory<X>::finish(exec_);

    std::vector<bool> const comparable = compare_selection(number, layer.is_full());
    compare_outputs(number, layer.shape, out, lse, comparable);
  }

  template <class Inputs>
  void compare_scores(std::int32_t number, indexshare::Shape const& shape, Inputs const& in,
                      indexshare::RowBatch<space> const& batch) {
    Array<X, float> scores(at(rows_.count() * rows_.columns));
    Block const scratch(require(indexer_workspace(exec_, Indexer{}, shape)));
    auto const status = indexer_score(
        exec_, Indexer{}, in, batch, indexshare::ScoreRequest{{0, rows_.count()}, 0},
        indexshare::make_scores<space>(scores.data(), {rows_.count()}, {rows_.columns}),
        scratch.view());
    require(status);
    ReplayMemory<X>::finish(exec_);
    auto const expected = fixture_.read<float>(name(number, "scores"));
    for (index_t row = 0; row < rows_.count(); ++row) {
      index_t const pad = rows_.pad[at(rows_.of_request[at(row)])];
      for (index_t s = 0; s < rows_.lengths[at(row)]; ++s) {
        double const ours = scores[at(row * rows_.columns + s)];
        double const theirs = expected[at(row * rows_.columns + pad + s)];
        report_.score_error = worst(report_.score_error, ours - theirs);
      }
    }
  }

  /// Compares each row's set and says which rows have the oracle's selection.
  std::vector<bool> compare_selection(std::int32_t number, bool full) {
    auto const expected = fixture_.read<position_t>(name(number, "selected"));
    auto const selection = state_.selection();
    std::vector<bool> comparable(at(rows_.count()));
    for (index_t row = 0; row < rows_.count(); ++row) {
      bool const narrow = gaps_[at(row)] < smallest_gap;
      bool same = selection.counts(row) ==
                  std::min<position_t>(rows_.lengths[at(row)], static_cast<position_t>(top_k_));
      for (index_t j = 0; j < top_k_; ++j) {
        same = same && selection.indices(row, j) == expected[at(row * top_k_ + j)];
      }
      comparable[at(row)] = same;
      if (full) {
        ++(narrow ? report_.skipped : report_.rows);
        report_.wrong += !narrow && !same ? 1 : 0;
      } else if (!narrow) {
        ++report_.shared_rows;
        report_.shared_wrong += same ? 0 : 1;
      }
    }
    return comparable;
  }

  /// o[h] = W_UV[h] * out[h], against the attention output before o_proj.
  void compare_outputs(std::int32_t number, indexshare::Shape const& shape,
                       Array<X, float> const& out, Array<X, float> const& lse,
                       std::vector<bool> const& comparable) {
    auto const kv_b = weights_.read<float>(name(number, "kv_b"));
    auto const expected = fixture_.read<M>(name(number, "o"));
    auto const expected_lse = fixture_.read<float>(name(number, "lse"));
    index_t const latent = shape.value_dim;
    index_t const per_head = static_cast<index_t>(kv_b.size()) / latent / shape.heads;
    index_t const nope = fixture_.extent(name(number, "q_nope"), 3);
    index_t const value = per_head - nope;
    double largest = 0;
    double error = 0;
    for (index_t row = 0; row < rows_.count(); ++row) {
      if (!comparable[at(row)]) continue;
      for (index_t h = 0; h < shape.heads; ++h) {
        report_.lse_error = worst(report_.lse_error, double{lse[at(row * shape.heads + h)]} -
                                                         expected_lse[at(row * shape.heads + h)]);
        for (index_t v = 0; v < value; ++v) {
          double sum = 0;
          for (index_t c = 0; c < latent; ++c) {
            sum += double{kv_b[at((h * per_head + nope + v) * latent + c)]} *
                   double{out[at((row * shape.heads + h) * latent + c)]};
          }
          double const theirs =
              indexshare::to_float(expected[at((row * shape.heads + h) * value + v)]);
          largest = worst(largest, theirs);
          error = worst(error, sum - theirs);
        }
      }
    }
    if (largest > 0) report_.output_error = worst(report_.output_error, error / largest);
  }

  static std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

  X exec_;
  Fixture const& fixture_;
  Fixture const& weights_;
  Rows<X> rows_;
  index_t top_k_;
  float scale_;
  Block state_memory_;
  State state_;
  std::vector<float> gaps_;
  GoldenReport report_;
};

}  // namespace golden_detail

/// Replays `directory`/`name`.safetensors on executor `exec` in ReplayMemory<X>. Throws
/// std::runtime_error with file and tensor when a fixture cannot be read.
template <class X>
GoldenReport replay_golden(X const& exec, std::string const& directory, std::string const& name) {
  golden_detail::Fixture const fixture(directory + "/" + name + ".safetensors");
  golden_detail::Fixture const weights(directory + "/weights.safetensors");
  if (name.ends_with("bf16")) {
    return golden_detail::Replay<indexshare::bf16, X>(exec, fixture, weights).run();
  }
  return golden_detail::Replay<float, X>(exec, fixture, weights).run();
}

}  // namespace programs
