// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

/// @file What the engine produced against the same requests run alone, the slow and plain way.

namespace mini {

/// A request without an engine: its prompt in plain chunks, then one token per step; no pages, no
/// other request, no drafts.
inline Request run_alone(Runner& runner, Sizes const& sizes, Request request) {
  MicroBatch& micro = runner.micros().front();
  runner.restore(request, 0, request.stored);
  for (int step = 0; !request.done(); ++step) {
    micro.chunks = {Chunk{.request = &request, .rows = std::min(sizes.rows, request.pending())}};
    runner.forward(step);
    commit(micro, micro.chunks.front());
  }
  return request;
}

struct Comparison {
  std::int64_t tokens = 0, equal_tokens = 0;
  std::int64_t selections = 0, equal_selections = 0;
  std::int64_t outputs = 0, equal_outputs = 0;
  std::int64_t drafts = 0, equal_drafts = 0;
  int reported = 0;

  bool all_equal() const {
    return tokens == equal_tokens && selections == equal_selections && outputs == equal_outputs &&
           drafts == equal_drafts && tokens > 0 && selections > 0;
  }
};

class Checker {
 public:
  Comparison const& result() const { return result_; }

  void compare(Request const& got, Request const& alone) {
    compare_tokens(got, alone);
    for (std::size_t position = 0; position < got.records.size() && position < alone.records.size();
         ++position) {
      compare_row(got, alone, position);
    }
    for (DraftRecord const& draft : got.draft_records) {
      LayerRecord const& expected =
          alone.records[static_cast<std::size_t>(draft.anchor)].layers.back();
      count(result_.drafts, result_.equal_drafts, draft.selection == expected.selection, [&] {
        return "request " + std::to_string(got.id) + ", draft step after position " +
               std::to_string(draft.anchor) + ": selection";
      });
    }
  }

 private:
  template <class Where>
  void count(std::int64_t& all, std::int64_t& equal, bool same, Where const& where) {
    constexpr int most_lines = 20;
    ++all;
    equal += same ? 1 : 0;
    if (!same && result_.reported++ < most_lines) std::printf("DIFFERS: %s\n", where().c_str());
  }

  void compare_tokens(Request const& got, Request const& alone) {
    for (std::size_t i = static_cast<std::size_t>(alone.prompt); i < alone.tokens.size(); ++i) {
      bool const same = i < got.tokens.size() && got.tokens[i] == alone.tokens[i];
      count(result_.tokens, result_.equal_tokens, same, [&] {
        return "request " + std::to_string(got.id) + ", token at position " + std::to_string(i);
      });
    }
  }

  /// Rows that the engine computed: those of reused pages were compared where they were made.
  void compare_row(Request const& got, Request const& alone, std::size_t position) {
    RowRecord const& row = got.records[position];
    for (std::size_t layer = 0; layer < row.layers.size(); ++layer) {
      LayerRecord const& a = row.layers[layer];
      LayerRecord const& b = alone.records[position].layers[layer];
      auto const where = [&] {
        return "request " + std::to_string(got.id) + ", position " + std::to_string(position) +
               ", step " + std::to_string(row.step) + ", layer " + std::to_string(layer);
      };
      count(result_.selections, result_.equal_selections, a.selection == b.selection,
            [&] { return where() + ": selection"; });
      count(result_.outputs, result_.equal_outputs, a.output == b.output,
            [&] { return where() + ": output"; });
    }
  }

  Comparison result_;
};

}  // namespace mini
