// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_stack.hpp"

#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// @file The demo's plot: a long context is in the caches; then a prefill chunk at its end, decode
/// steps, one draft round of the MTP layer; each forward without and with sharing.

namespace programs {

struct DemoSettings {
  std::int32_t first_layer = 0;
  std::int32_t last_layer = 0;
  index_t context = 16384;
  index_t decode_steps = 4;
  index_t draft_steps = 3;
  bool share_off = true;  ///< run without sharing
  bool share_on = true;   ///< run with sharing
  int threads = 1;
  std::uint64_t seed = 1;
};

struct DemoResult {
  StackReport off;
  StackReport on;
  DemoChecker checker;
};

using DemoProgress = std::function<void(std::string const&)>;

/// @tparam Machine  where the layers run, see host_machine.hpp
template <class Machine>
class Demo {
 public:
  Demo(indexshare::ModelConfig const& model, indexshare::SharePlan const& plan,
       DemoSettings const& settings, Machine const& machine, DemoProgress progress)
      : plan_(plan),
        settings_(settings),
        mtp_layer_(plan.mtp_layers() > 0 && settings.draft_steps > 0 ? plan.num_layers()
                                                                     : indexshare::no_source),
        mtp_shares_(model.index_share_for_mtp_iteration),
        lengths_{static_cast<position_t>(settings.context),
                 static_cast<position_t>(settings.context / 2 + 1)},
        shape_(indexshare::shape_of(model, indexshare::Rows{prefill_rows},
                                    indexshare::Keys{settings.context + room()})),
        stack_(machine, settings.seed, model, shape_, requests, physical_layers()),
        progress_(std::move(progress)) {
    result_.checker.allowed = Machine::output_tolerance;
  }

  /// Throws std::runtime_error when a layer call fails.
  DemoResult run() {
    fill_context();
    trunk(prefill_chunk());
    for (index_t step = 0; step < settings_.decode_steps; ++step) {
      Phase phase{"decode " + std::to_string(step + 1), {}};
      for (position_t request = 0; request < requests; ++request) {
        phase.rows.push_back({request, lengths_[at(request)]++});
      }
      trunk(phase);
    }
    if (mtp_layer_ != indexshare::no_source) draft_round();
    return std::move(result_);
  }

 private:
  using State = typename DemoStack<Machine>::State;

  static constexpr position_t requests = 2;
  static constexpr index_t prefill_rows = 16;

  /// Tokens that may come behind the context.
  index_t room() const { return settings_.decode_steps + settings_.draft_steps + 1; }

  std::vector<std::int32_t> physical_layers() const {
    std::vector<std::int32_t> layers;
    for (std::int32_t layer = settings_.first_layer; layer < settings_.last_layer; ++layer) {
      layers.push_back(layer);
    }
    if (mtp_layer_ != indexshare::no_source) layers.push_back(mtp_layer_);
    return layers;
  }

  /// The last rows of both requests, three of four from the longer one.
  Phase prefill_chunk() const {
    Phase phase{"prefill chunk", {}};
    for (position_t request = 0; request < requests; ++request) {
      position_t const length = lengths_[at(request)];
      position_t const rows = request == 0 ? prefill_rows * 3 / 4 : prefill_rows / 4;
      for (position_t i = std::max(0, length - rows); i < length; ++i) {
        phase.rows.push_back({request, i});
      }
    }
    return phase;
  }

  /// Everything before the prefill chunk; on the MTP layer everything, as the trunk's prefill feeds
  /// it too.
  void fill_context() {
    for (std::int32_t const layer : physical_layers()) {
      progress_("filling the caches of layer " + std::to_string(layer));
      Phase const chunk = prefill_chunk();
      for (position_t request = 0; request < requests; ++request) {
        std::vector<Token> tokens;
        for (position_t i = 0; i < lengths_[at(request)]; ++i) tokens.push_back({request, i});
        if (layer != mtp_layer_) {
          std::erase_if(tokens, [&](Token const& token) {
            return std::any_of(chunk.rows.begin(), chunk.rows.end(), [&](Token const& row) {
              return row.request == token.request && row.position == token.position;
            });
          });
        }
        stack_.append(layer, tokens);
      }
    }
  }

  /// One forward through the trunk layers, under each share policy asked for.
  void trunk(Phase const& phase) {
    progress_(phase.name);
    for (std::int32_t layer = settings_.first_layer; layer < settings_.last_layer; ++layer) {
      stack_.append(layer, phase.rows);
    }
    ++forward_;
    if (settings_.share_off) {
      trunk(indexshare::EveryLayer{plan_.num_layers()}, phase, {forward_, 0}, result_.off);
    }
    if (settings_.share_on) trunk(plan_, phase, {forward_, 1}, result_.on);
  }

  template <class Share>
  void trunk(Share const& share, Phase const& phase, indexshare::ForwardId id,
             StackReport& report) {
    State state(indexshare::Rows{prefill_rows}, indexshare::TopK{shape_.top_k});
    for (std::int32_t layer = settings_.first_layer; layer < settings_.last_layer; ++layer) {
      stack_.run(share, layer, layer, phase, id, state, report.layers[layer], result_.checker);
    }
  }

  /// The MTP layer drafts: step 0 runs over the newly accepted tokens of each request, the steps
  /// after it over one draft token each.
  void draft_round() {
    Phase first{"draft step 0", {}};
    std::vector<position_t> last_accepted;
    for (position_t request = 0; request < requests; ++request) {
      for (position_t i = 2 - request; i >= 0; --i) {  // 3 rows of request 0, 2 of request 1
        first.rows.push_back({request, lengths_[at(request)] - 1 - i});
      }
      last_accepted.push_back(static_cast<position_t>(first.rows.size()) - 1);
    }
    for (position_t request = 0; request < requests; ++request) {
      std::vector<Token> tokens;
      for (index_t i = 1; i <= settings_.decode_steps; ++i) {
        tokens.push_back({request, lengths_[at(request)] - static_cast<position_t>(i)});
      }
      stack_.append(mtp_layer_, tokens);
    }
    if (settings_.share_off) draft_round({mtp_layer_, false}, first, last_accepted, result_.off);
    if (settings_.share_on) {
      draft_round({mtp_layer_, mtp_shares_}, first, last_accepted, result_.on);
    }
  }

  void draft_round(indexshare::MtpDraft const& share, Phase const& first,
                   std::vector<position_t> const& last_accepted, StackReport& report) {
    State first_state(indexshare::Rows{prefill_rows}, indexshare::TopK{shape_.top_k});
    State step_state(indexshare::Rows{requests}, indexshare::TopK{shape_.top_k});
    LayerReport& layer_report = report.layers[mtp_layer_];
    progress_(first.name);
    indexshare::ForwardId const round{++forward_, 2};
    stack_.run(share, mtp_layer_, mtp_layer_, first, round, first_state, layer_report,
               result_.checker);
    for (std::int32_t step = 1; step < settings_.draft_steps; ++step) {
      Phase phase{"draft step " + std::to_string(step), {}};
      for (position_t request = 0; request < requests; ++request) {
        phase.rows.push_back({request, lengths_[at(request)] + step - 1});
      }
      progress_(phase.name);
      stack_.append(mtp_layer_, phase.rows);  // index keys too, whoever selects
      indexshare::ForwardId const id{++forward_, 2};
      if (share.share_across_steps) {
        phase.source_rows = last_accepted;
        stack_.hand_over(first_state, round, last_accepted, phase, id, step_state);
      }
      stack_.run(share, mtp_layer_ + step, mtp_layer_, phase, id, step_state, layer_report,
                 result_.checker);
    }
    layer_report.role = "mtp";
    layer_report.source = mtp_layer_;
  }

  indexshare::SharePlan plan_;
  DemoSettings settings_;
  std::int32_t mtp_layer_;
  bool mtp_shares_;
  std::vector<position_t> lengths_;
  indexshare::Shape shape_;
  DemoStack<Machine> stack_;
  DemoProgress progress_;
  std::int64_t forward_ = 0;
  DemoResult result_;
};

}  // namespace programs
