// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "page_pool.hpp"
#include "runner.hpp"

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

/// @file The engine: requests come and go, each step is one forward of what the scheduler picks.

namespace mini {

struct EngineCounts {
  int steps = 0;
  int forwards = 0;  ///< of micro-batches with rows
  int rows = 0;
  int most_rows = 0;  ///< of one step
  int prefill_chunks = 0;
  int decode_rows = 0;
  int mixed_steps = 0;  ///< with prefill and decode rows
  int drafted = 0;      ///< tokens, verified later
  int accepted = 0;     ///< of them
  int reused = 0;       ///< tokens whose pages were there already
  int restored = 0;
};

class Engine {
 public:
  Engine(Sizes const& sizes, Model const& model, AttentionBackend& backend, Device& device,
         int micro_batches)
      : sizes_(sizes),
        runner_(sizes, model, backend, device, micro_batches),
        pool_(sizes.pages, sizes.page_size) {}

  /// Queues a request, in order of arrival. Refused at once if it could never run.
  void submit(Request request) {
    int const tokens = most_tokens(request);
    if (tokens > sizes_.keys || pages_for(tokens) > sizes_.pages) {
      throw std::runtime_error("request " + std::to_string(request.id) + " needs room for " +
                               std::to_string(tokens) + " tokens");
    }
    waiting_.push_back(std::make_unique<Request>(std::move(request)));
  }

  /// Steps until all requests are done; returns them in the order in which they left.
  std::vector<std::unique_ptr<Request>> run() {
    while (!waiting_.empty() || !running_.empty()) step();
    return std::move(done_);
  }

  EngineCounts const& counts() const { return counts_; }

 private:
  void step() {
    admit();
    std::vector<Chunk> const chunks = schedule();
    count(chunks);
    deal(chunks);
    runner_.forward(counts_.steps++);
    for (MicroBatch& micro : runner_.micros()) {
      if (sizes_.drafts > 0) runner_.draft(micro);
      for (Chunk const& chunk : micro.chunks) {
        counts_.accepted += chunk.accepted - chunk.known();
        commit(micro, chunk);
        pool_.publish(chunk.request->pages, chunk.request->tokens, chunk.request->computed);
      }
    }
    retire();
  }

  /// The longest that a request can get: drafts are written behind its last token.
  int most_tokens(Request const& request) const {
    return request.prompt + request.new_tokens + sizes_.drafts;
  }
  int pages_for(int tokens) const { return (tokens + sizes_.page_size - 1) / sizes_.page_size; }

  /// Waiting requests start when there are pages for all that they can become.
  void admit() {
    while (!waiting_.empty() && waiting_.front()->arrival <= counts_.steps &&
           static_cast<int>(running_.size()) < sizes_.requests) {
      Request& request = *waiting_.front();
      request.pages = pool_.reuse(request.tokens);
      int const found = static_cast<int>(request.pages.size());
      if (!pool_.take(pages_for(most_tokens(request)) - found, request.pages)) {
        pool_.release(request.pages);
        request.pages.clear();
        return;
      }
      request.computed = request.reused = found * sizes_.page_size;
      restore(request);
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
  }

  void restore(Request& request) {
    counts_.reused += request.reused;
    if (request.computed >= request.stored) return;
    counts_.restored += request.stored - request.computed;
    runner_.restore(request, request.computed, request.stored);
    pool_.publish(request.pages, request.tokens, request.computed);
  }

  /// Decode rows with their drafts first, then as much of the prompts as fits into the step.
  std::vector<Chunk> schedule() const {
    std::vector<Chunk> chunks;
    int budget = sizes_.rows;
    for (bool const prompts : {false, true}) {
      for (auto const& request : running_) {
        if ((request->pending() > 1) != prompts) continue;
        int const wanted = request->pending() + static_cast<int>(request->drafts.size());
        int const rows = std::min(wanted, budget);
        if (rows == 0) continue;
        chunks.push_back({.request = request.get(), .rows = rows});
        budget -= rows;
      }
    }
    std::stable_partition(chunks.begin(), chunks.end(), [](Chunk const& c) { return c.samples(); });
    return chunks;
  }

  /// Each chunk goes to the micro-batch with the fewest rows.
  void deal(std::vector<Chunk> const& chunks) {
    auto const micros = runner_.micros();
    std::vector<int> rows(micros.size());
    for (MicroBatch& micro : micros) micro.chunks.clear();
    for (Chunk const& chunk : chunks) {
      auto const fewest = static_cast<std::size_t>(std::min_element(rows.begin(), rows.end()) - rows.begin());
      rows[fewest] += chunk.rows;
      micros[fewest].chunks.push_back(chunk);
    }
    counts_.forwards += static_cast<int>(std::count_if(rows.begin(), rows.end(), [](int n) { return n > 0; }));
  }

  void count(std::vector<Chunk> const& chunks) {
    int rows = 0, prefill = 0, decode = 0;
    for (Chunk const& chunk : chunks) {
      rows += chunk.rows;
      ++(chunk.request->pending() > 1 ? prefill : decode);
      counts_.drafted += chunk.rows - chunk.known();
      if (chunk.request->pending() == 1) counts_.decode_rows += chunk.rows;
    }
    counts_.rows += rows;
    counts_.most_rows = std::max(counts_.most_rows, rows);
    counts_.prefill_chunks += prefill;
    counts_.mixed_steps += prefill > 0 && decode > 0 ? 1 : 0;
  }

  void retire() {
    for (auto& request : running_) {
      if (!request->done()) continue;
      pool_.release(request->pages);
      done_.push_back(std::move(request));
    }
    std::erase(running_, nullptr);
  }

  Sizes sizes_;
  Runner runner_;
  PagePool pool_;
  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> running_;
  std::vector<std::unique_ptr<Request>> done_;
  EngineCounts counts_;
};

}  // namespace mini
