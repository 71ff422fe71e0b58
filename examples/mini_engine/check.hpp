// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

/// @file What the engine produced against the same requests run alone, the slow and plain way.

namespace mini {

/// Requests without an engine: a prompt in plain chunks, then one token per step; no pages, no
/// other request. Drafts are guessed after each token, and forgotten.
class AloneRun {
 public:
  AloneRun(Sizes const& sizes, Model const& model, AttentionBackend& backend, Device& device)
      : sizes_(sizes),
        model_(&model),
        backend_(&backend),
        device_(&device),
        runner_(sizes, model, backend, device, 1) {}

  Request run(Request request) {
    MicroBatch& micro = runner_.micros().front();
    runner_.restore(request, 0, request.stored);
    for (int step = 0; request.generated() < request.new_tokens; ++step) {
      micro.chunks = {Chunk{.request = &request, .rows = std::min(sizes_.rows, request.pending())}};
      Chunk const& chunk = micro.chunks.front();
      runner_.forward(step);
      bool const samples = chunk.samples();
      commit(micro, chunk);
      if (samples) draft(request, micro);
    }
    return request;
  }

 private:
  void draft(Request& request, MicroBatch& micro) {
    Hidden hidden = micro.hidden.back();
    DraftRecord record{.anchor = request.computed - 1, .token = micro.next.back()};
    for (; record.step < sizes_.drafts; ++record.step) {
      if (record.step > 0) hidden = draft_step(micro, hidden, record);
      record.token = model_->next_token(hidden, record.token);
      request.draft_records.push_back(record);
    }
  }

  /// The MTP layer on the token drafted last.
  Hidden draft_step(MicroBatch const& micro, Hidden hidden, DraftRecord& record) {
    Call const call{micro.number, micro.stream, sizes_.mtp_layer(), record.step};
    hidden = model_->mtp_input(hidden, record.token);
    model_->project_query(call.layer, hidden, micro.tensors, 0);
    backend_->begin_draft(call, micro.batch, micro.accepted);
    backend_->attend(call, micro.tensors);
    device_->wait(micro.stream);
    record.layer = record_of(*backend_, call, micro.tensors, 0);
    return model_->absorb(call.layer, hidden, micro.tensors.out.row(0));
  }

  Sizes sizes_;
  Model const* model_;
  AttentionBackend* backend_;
  Device* device_;
  Runner runner_;
};

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

/// What is missing or too much counts as a difference.
class Checker {
 public:
  /// @param layers  that leave a record of each row
  explicit Checker(int layers) : layers_(static_cast<std::size_t>(layers)) {}

  Comparison const& result() const { return result_; }

  void compare(Request const& got, Request const& alone) {
    auto const tokens = static_cast<std::size_t>(alone.prompt + alone.new_tokens);
    compare_tokens(got, alone, tokens);
    // Rows of reused pages were compared where they were made, and the last token has no row.
    auto const first = static_cast<std::size_t>(std::max(got.reused, got.stored));
    for (std::size_t i = first; i < std::max(tokens - 1, got.records.size()); ++i) {
      compare_row(got, alone, i);
    }
    compare_drafts(got, alone);
  }

 private:
  template <class Where>
  void count(std::int64_t& all, std::int64_t& equal, bool same, Where const& where) {
    constexpr int most_lines = 20;
    ++all;
    equal += same ? 1 : 0;
    if (!same && result_.reported++ < most_lines) std::printf("DIFFERS: %s\n", where().c_str());
  }

  void compare_tokens(Request const& got, Request const& alone, std::size_t expected) {
    for (auto i = static_cast<std::size_t>(alone.prompt);
         i < std::max({expected, got.tokens.size(), alone.tokens.size()}); ++i) {
      bool const same = i < expected && i < got.tokens.size() && i < alone.tokens.size() &&
                        got.tokens[i] == alone.tokens[i];
      count(result_.tokens, result_.equal_tokens, same, [&] {
        return "request " + std::to_string(got.id) + ", token at position " + std::to_string(i);
      });
    }
  }

  static LayerRecord const* find(Request const& request, std::size_t position, std::size_t layer) {
    if (position >= request.records.size()) return nullptr;
    auto const& layers = request.records[position].layers;
    return layer < layers.size() ? &layers[layer] : nullptr;
  }

  void compare_row(Request const& got, Request const& alone, std::size_t position) {
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      LayerRecord const* const a = find(got, position, layer);
      LayerRecord const* const b = find(alone, position, layer);
      bool const both = a != nullptr && b != nullptr;
      auto const where = [&] {
        return "request " + std::to_string(got.id) + ", position " + std::to_string(position) +
               ", step " + std::to_string(step_of(got, position)) + ", layer " +
               std::to_string(layer) + (both ? "" : " (no record)");
      };
      count(result_.selections, result_.equal_selections, both && a->selection == b->selection,
            [&] { return where() + ": selection"; });
      count(result_.outputs, result_.equal_outputs, both && a->output == b->output,
            [&] { return where() + ": output"; });
    }
  }

  static int step_of(Request const& request, std::size_t position) {
    return position < request.records.size() ? request.records[position].step : -1;
  }

  /// Alone, tokens are drafted after each position; in the engine after the last accepted one of
  /// each step.
  void compare_drafts(Request const& got, Request const& alone) {
    std::vector<DraftRecord> expected;
    for (DraftRecord const& draft : alone.draft_records) {
      auto const anchor = static_cast<std::size_t>(draft.anchor);
      int const next = step_of(got, anchor + 1);
      if (next < 0 || next != step_of(got, anchor)) expected.push_back(draft);
    }
    for (std::size_t i = 0; i < std::max(expected.size(), got.draft_records.size()); ++i) {
      bool const both = i < expected.size() && i < got.draft_records.size();
      DraftRecord const& draft = i < expected.size() ? expected[i] : got.draft_records[i];
      count(result_.drafts, result_.equal_drafts, both && got.draft_records[i] == expected[i], [&] {
        return "request " + std::to_string(got.id) + ", draft step " + std::to_string(draft.step) +
               " after position " + std::to_string(draft.anchor) + (both ? "" : " (no record)");
      });
    }
  }

  std::size_t layers_;
  Comparison result_;
};

}  // namespace mini
