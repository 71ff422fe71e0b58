// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend.hpp"
#include "model.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// @file A small continuous-batching engine: pages, requests, forwards, scheduler. It owns its
/// tensors, pages and streams, and knows nothing of the library; all attention goes through
/// AttentionBackend.

namespace mini {

// ---- pages: a free list, and full pages that requests with the same beginning share

/// A page is a block of every cache of the model at once: KV of all layers, index keys of the full
/// ones, those of the MTP layer too. So whoever reuses a page has all that any layer needs.
class PagePool {
 public:
  PagePool(int pages, int page_size)
      : page_size_(static_cast<std::size_t>(page_size)), pages_(static_cast<std::size_t>(pages)) {
    for (int page = 0; page < pages; ++page) free_.push_back(page);
  }

  int free_pages() const { return static_cast<int>(free_.size()); }

  /// The pages that already hold the beginning of `tokens`; each gains a user.
  std::vector<int> reuse(std::vector<int> const& tokens) {
    std::vector<int> found;
    for (std::uint64_t const key : keys(tokens, tokens.size())) {
      auto const known = known_.find(key);
      if (known == known_.end()) break;
      int const page = known->second;
      if (at(page).users++ == 0) std::erase(free_, page);
      found.push_back(page);
    }
    return found;
  }

  /// Adds `count` pages of nobody to `pages`, or none if there are too few.
  bool take(int count, std::vector<int>& pages) {
    if (count > free_pages()) return false;
    for (; count > 0; --count) {
      int const page = free_.front();
      free_.pop_front();
      forget(page);
      at(page).users = 1;
      pages.push_back(page);
    }
    return true;
  }

  /// From now on the full pages among a request's first `computed` tokens can be reused. They are
  /// not written to any more.
  void publish(std::vector<int> const& pages, std::vector<int> const& tokens, int computed) {
    std::size_t i = 0;
    for (std::uint64_t const key : keys(tokens, static_cast<std::size_t>(computed) + 1)) {
      int const page = pages[i++];
      if (at(page).key == 0 && known_.emplace(key, page).second) at(page).key = key;
    }
  }

  /// The request leaves. What can be reused is the last to be given away.
  void release(std::vector<int> const& pages) {
    for (int const page : pages) {
      if (--at(page).users > 0) continue;
      if (at(page).key == 0) {
        free_.push_front(page);
      } else {
        free_.push_back(page);
      }
    }
  }

 private:
  struct Page {
    int users = 0;
    std::uint64_t key = 0;  // 0: not published
  };
  Page& at(int page) { return pages_[static_cast<std::size_t>(page)]; }

  void forget(int page) {
    if (at(page).key != 0) known_.erase(at(page).key);
    at(page).key = 0;
  }

  /// One key per full page among the first `known` tokens: a hash of all tokens up to the end of
  /// the page, and of the token after it. A row of the MTP layer depends on the token that follows
  /// its own, so without that one the last row of a page would belong to another continuation.
  std::vector<std::uint64_t> keys(std::vector<int> const& tokens, std::size_t known) const {
    std::vector<std::uint64_t> result;
    std::uint64_t hash = 0xCBF29CE484222325u;
    for (std::size_t i = 0; i < known && i < tokens.size(); ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(tokens[i] + 1)) * 0x100000001B3u;
      if (i > 0 && i % page_size_ == 0) result.push_back(hash ^ hash >> 32);
    }
    return result;
  }

  std::size_t page_size_;
  std::vector<Page> pages_;
  std::deque<int> free_;
  std::unordered_map<std::uint64_t, int> known_;
};

// ---- requests and their rows

/// What a row left behind in a layer: digests of the bytes of its selection and of its output.
struct LayerRecord {
  std::uint64_t selection = 0;
  std::uint64_t output = 0;

  friend bool operator==(LayerRecord const&, LayerRecord const&) = default;
};
struct RowRecord {
  int step = -1;  ///< of the engine; -1: not computed, but reused or restored
  std::vector<LayerRecord> layers;
};
/// A drafted token, and what the draft step that it comes from left behind (step 0 is the MTP layer
/// of the forward: what it left is in the rows' records).
struct DraftRecord {
  int anchor = 0;  ///< position of the last accepted token, whose selection all steps use
  int step = 0;
  int token = 0;
  LayerRecord layer{};

  friend bool operator==(DraftRecord const&, DraftRecord const&) = default;
};

struct Request {
  int id = 0;
  int arrival = 0;          ///< step of the engine
  int prompt = 0;           ///< tokens of the prompt
  int stored = 0;           ///< leading tokens whose cache rows come from a store
  int new_tokens = 0;       ///< to generate
  std::vector<int> tokens;  ///< the prompt and what was generated

  int computed = 0;  ///< tokens, from the first on, whose rows lie in the caches
  std::vector<int> pages{};
  std::vector<int> drafts{};         ///< guesses of the tokens after the last one
  int reused = 0;                    ///< tokens whose pages were there already
  std::vector<RowRecord> records{};  ///< by position
  std::vector<DraftRecord> draft_records{};

  int pending() const { return static_cast<int>(tokens.size()) - computed; }
  int generated() const { return static_cast<int>(tokens.size()) - prompt; }
  bool done() const { return generated() >= new_tokens; }
};

/// Consecutive tokens of one request in one forward: pending ones, then drafts to be verified.
struct Chunk {
  Request* request = nullptr;
  int rows = 0;
  int first_row = 0;  ///< in its micro-batch
  int accepted = 0;   ///< rows that are right, known after the forward

  int first() const { return request->computed; }
  int known() const { return std::min(rows, request->pending()); }
  /// Whether the forward tells the token after the request's last one.
  bool samples() const { return rows >= request->pending(); }
  int token(int i) const {
    return i < known() ? request->tokens[static_cast<std::size_t>(first() + i)]
                       : request->drafts[static_cast<std::size_t>(i - known())];
  }
};

/// A part of a step that runs through the layers on its own stream. It has nothing in common with
/// the other micro-batches but the caches.
struct MicroBatch {
  int number = 0;
  void* stream = nullptr;
  std::vector<Chunk> chunks{};  ///< those that sample come first
  Batch batch{};
  Batch drafts{};  ///< one row for each of the first chunks
  Tensor<std::int32_t> accepted{};
  LayerTensors tensors{};
  std::vector<Hidden> hidden{};
  std::vector<int> next{};  ///< token after each row, as far as this forward can tell
  std::vector<RowRecord> records{};
};

inline std::uint64_t digest(void const* data, std::size_t bytes) {
  std::uint64_t hash = bytes;
  auto const* const from = static_cast<unsigned char const*>(data);
  for (std::size_t i = 0; i + 4 <= bytes; i += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, from + i, sizeof word);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

/// What row `row` of a call left behind, once it is done.
inline LayerRecord record_of(AttentionBackend const& backend, Call const& call,
                             LayerTensors const& tensors, int row) {
  SelectionRows const selection = backend.selection(call);
  Tensor<float> const& out = tensors.out;
  return {
      digest(selection.positions + std::int64_t{row} * selection.top_k,
             static_cast<std::size_t>(selection.top_k) * sizeof(std::int32_t)),
      digest(out.row(row), static_cast<std::size_t>(out.size(1) * out.size(2)) * sizeof(float))};
}

// ---- a forward: micro-batches through the layers of the model

/// The model's layers over micro-batches.
class Runner {
 public:
  Runner(Sizes const& sizes, Model const& model, AttentionBackend& backend, Device& device,
         int micro_batches)
      : sizes_(sizes), model_(&model), backend_(&backend), device_(&device) {
    for (int i = 0; i < micro_batches; ++i) micros_.push_back(make_micro(i));
  }

  std::span<MicroBatch> micros() { return micros_; }

  /// One forward: the chunks of each micro-batch through all layers, then through the MTP layer.
  /// Afterwards each chunk knows how many of its rows are right.
  void forward(int step) {
    for (MicroBatch& micro : micros_) begin(micro, step);
    for (MicroBatch& micro : micros_) backend_->begin(call_of(micro, 0), micro.batch);
    for (int layer = 0; layer < sizes_.layers; ++layer) run_layer(layer);
    for (MicroBatch& micro : micros_) accept(micro);
    run_layer(sizes_.mtp_layer());
  }

  /// Guesses tokens after those of the forward, for each chunk that samples.
  void draft(MicroBatch& micro) {
    auto const sampling = std::count_if(micro.chunks.begin(), micro.chunks.end(),
                                        [](Chunk const& c) { return c.samples(); });
    micro.drafts.requests = micro.drafts.rows = static_cast<int>(sampling);
    std::vector<int> last(static_cast<std::size_t>(sampling));
    for (int i = 0; i < sampling; ++i) {  // the row of the last accepted token: never before row i
      int const row = anchor_row(micro, i);
      at(micro.hidden, i) = at(micro.hidden, row);
      at(last, i) = at(micro.next, row);
      at(micro.chunks, i).request->drafts.clear();
    }
    std::vector<LayerRecord> layers(last.size());
    for (int step = 0; sampling > 0 && step < sizes_.drafts; ++step) {
      if (step > 0) run_draft_step(micro, last, step, layers);
      for (int i = 0; i < sampling; ++i) {
        Chunk const& chunk = at(micro.chunks, i);
        at(last, i) = model_->next_token(at(micro.hidden, i), at(last, i));
        chunk.request->drafts.push_back(at(last, i));
        chunk.request->draft_records.push_back({chunk.first() + chunk.accepted - 1, step,
                                                chunk.request->drafts.back(), at(layers, i)});
      }
    }
  }

  /// Tokens [from, to) of a request get their cache rows from a store.
  void restore(Request& request, int from, int to) {
    MicroBatch& micro = micros_.front();
    for (int rows = 0; from < to; from += rows) {
      rows = std::min(sizes_.rows, to - from);
      request.computed = from;
      micro.chunks = {Chunk{.request = &request, .rows = rows}};
      lay_out(micro);
      Call call = call_of(micro, 0);
      backend_->begin(call, micro.batch);
      for (; call.layer <= sizes_.mtp_layer(); ++call.layer) {
        for (int i = 0; i < rows; ++i) {
          Hidden const hidden = model_->stored(
              call.layer, request.tokens[static_cast<std::size_t>(from + i)], from + i);
          model_->project_kv(call.layer, hidden, micro.tensors, i);
          if (backend_->has_index_keys(call)) {
            model_->project_index_key(call.layer, hidden, micro.tensors, i);
          }
        }
        backend_->append(call, micro.tensors);
        device_->wait(micro.stream);
      }
    }
    request.computed = to;
  }

 private:
  template <class T>
  static T& at(std::vector<T>& values, int i) {
    return values[static_cast<std::size_t>(i)];
  }

  MicroBatch make_micro(int number) const {
    MicroBatch micro;
    Sizes const& s = sizes_;
    Device& device = *device_;
    micro.number = number;
    micro.stream = device.new_stream();
    for (Batch* const batch : {&micro.batch, &micro.drafts}) {
      batch->starts = Tensor<std::int32_t>(device, {s.requests + 1});
      batch->lengths = Tensor<std::int32_t>(device, {s.requests});
      batch->pages = Tensor<std::int32_t>(device, {s.requests, s.request_pages()});
    }
    micro.accepted = Tensor<std::int32_t>(device, {s.requests});
    micro.tensors = {Tensor<float>(device, {s.rows, s.key_dim}),
                     Tensor<Bf16>(device, {s.rows, s.heads, s.key_dim}),
                     Tensor<float>(device, {s.rows, s.index_dim}),
                     Tensor<Bf16>(device, {s.rows, s.index_heads, s.index_dim}),
                     Tensor<float>(device, {s.rows, s.index_heads}),
                     Tensor<float>(device, {s.rows, s.heads, s.value_dim})};
    return micro;
  }

  static Call call_of(MicroBatch const& micro, int layer, int draft_step = 0) {
    return {micro.number, micro.stream, layer, draft_step};
  }

  static int anchor_row(MicroBatch const& micro, int i) {
    Chunk const& chunk = micro.chunks[static_cast<std::size_t>(i)];
    return chunk.first_row + chunk.accepted - 1;
  }

  /// Writes what the backend reads of the chunks.
  void lay_out(MicroBatch& micro) const {
    Batch& batch = micro.batch;
    batch.requests = batch.rows = 0;
    batch.starts[0] = 0;
    for (Chunk& chunk : micro.chunks) {
      int const i = batch.requests++;
      chunk.first_row = batch.rows;
      batch.rows += chunk.rows;
      batch.starts[i + 1] = batch.rows;
      batch.lengths[i] = chunk.first() + chunk.rows;
      std::int32_t* const line = batch.pages.row(i);
      std::fill_n(line, sizes_.request_pages(), -1);
      std::copy(chunk.request->pages.begin(), chunk.request->pages.end(), line);
    }
  }

  void begin(MicroBatch& micro, int step) const {
    lay_out(micro);
    micro.hidden.clear();
    micro.records.assign(static_cast<std::size_t>(micro.batch.rows), RowRecord{step, {}});
    for (Chunk const& chunk : micro.chunks) {
      for (int i = 0; i < chunk.rows; ++i) {
        micro.hidden.push_back(model_->embed(chunk.token(i), chunk.first() + i));
      }
    }
  }

  /// One layer of all micro-batches. The host keeps its hands off the tensors while any is under
  /// way.
  void run_layer(int layer) {
    for (MicroBatch& micro : micros_) project(micro, call_of(micro, layer), micro.batch.rows);
    for (MicroBatch& micro : micros_) enqueue(micro, call_of(micro, layer), micro.batch.rows);
    for (MicroBatch& micro : micros_) device_->wait(micro.stream);
    for (MicroBatch& micro : micros_) {
      record(micro, layer);
      absorb(micro, layer, micro.batch.rows);
    }
  }

  void project(MicroBatch& micro, Call const& call, int rows) const {
    for (int row = 0; row < rows; ++row) {
      Hidden const& hidden = at(micro.hidden, row);
      model_->project_kv(call.layer, hidden, micro.tensors, row);
      model_->project_query(call.layer, hidden, micro.tensors, row);
      if (backend_->has_index_keys(call)) {
        model_->project_index_key(call.layer, hidden, micro.tensors, row);
      }
      if (backend_->selects(call)) {
        model_->project_index_query(call.layer, hidden, micro.tensors, row);
      }
    }
  }

  void enqueue(MicroBatch& micro, Call const& call, int rows) const {
    if (rows == 0) return;
    backend_->append(call, micro.tensors);
    backend_->attend(call, micro.tensors);
  }

  void absorb(MicroBatch& micro, int layer, int rows) const {
    for (int row = 0; row < rows; ++row) {
      at(micro.hidden, row) =
          model_->absorb(layer, at(micro.hidden, row), micro.tensors.out.row(row));
    }
  }

  void record(MicroBatch& micro, int layer) const {
    for (int row = 0; row < micro.batch.rows; ++row) {
      at(micro.records, row)
          .layers.push_back(record_of(*backend_, call_of(micro, layer), micro.tensors, row));
    }
  }

  /// Compares drafts with what the model says, and turns the hidden states into the MTP layer's.
  void accept(MicroBatch& micro) const {
    micro.next.clear();
    int i = 0;
    for (Chunk& chunk : micro.chunks) {
      for (int row = 0; row < chunk.rows; ++row) {
        micro.next.push_back(
            row + 1 < chunk.request->pending()  // known, not to be guessed
                ? chunk.request->tokens[static_cast<std::size_t>(chunk.first() + row + 1)]
                : model_->next_token(at(micro.hidden, chunk.first_row + row), chunk.token(row)));
      }
      chunk.accepted = chunk.known();
      int const limit = chunk.known() + chunk.request->new_tokens - chunk.request->generated() - 1;
      while (chunk.accepted < std::min(chunk.rows, limit) &&
             chunk.token(chunk.accepted) == at(micro.next, chunk.first_row + chunk.accepted - 1)) {
        ++chunk.accepted;
      }
      micro.accepted[i++] = chunk.accepted;
    }
    for (int row = 0; row < micro.batch.rows; ++row) {
      at(micro.hidden, row) = model_->mtp_input(at(micro.hidden, row), at(micro.next, row));
    }
  }

  /// The MTP layer at the next position of each request, on the token drafted last.
  void run_draft_step(MicroBatch& micro, std::vector<int>& last, int step,
                      std::vector<LayerRecord>& layers) const {
    Batch& batch = micro.drafts;
    batch.starts[0] = 0;
    for (int i = 0; i < batch.rows; ++i) {
      Chunk const& chunk = at(micro.chunks, i);
      batch.starts[i + 1] = i + 1;
      batch.lengths[i] = chunk.first() + chunk.accepted + step;
      std::copy_n(micro.batch.pages.row(i), sizes_.request_pages(), batch.pages.row(i));
      at(micro.hidden, i) = model_->mtp_input(at(micro.hidden, i), at(last, i));
    }
    Call const call = call_of(micro, sizes_.mtp_layer(), step);
    project(micro, call, batch.rows);
    backend_->begin_draft(call, batch, micro.accepted);
    enqueue(micro, call, batch.rows);
    device_->wait(micro.stream);
    absorb(micro, call.layer, batch.rows);
    for (int i = 0; i < batch.rows; ++i) {
      at(layers, i) = record_of(*backend_, call, micro.tensors, i);
    }
  }

  Sizes sizes_;
  Model const* model_;
  AttentionBackend* backend_;
  Device* device_;
  std::vector<MicroBatch> micros_;
};

/// What a chunk's forward found goes to its request.
inline void commit(MicroBatch& micro, Chunk const& chunk) {
  Request& request = *chunk.request;
  bool const samples = chunk.samples();
  int const pending = request.pending();
  for (int i = 0; i < chunk.accepted; ++i) {
    auto const row = static_cast<std::size_t>(chunk.first_row + i);
    auto const position = static_cast<std::size_t>(request.computed + i);
    if (request.records.size() <= position) request.records.resize(position + 1);
    request.records[position] = std::move(micro.records[row]);
    if (samples && i >= pending - 1) request.tokens.push_back(micro.next[row]);
  }
  request.computed += chunk.accepted;
}

// ---- the engine: requests come and go, each step is one forward of what the scheduler picks

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
      auto const fewest =
          static_cast<std::size_t>(std::min_element(rows.begin(), rows.end()) - rows.begin());
      rows[fewest] += chunk.rows;
      micros[fewest].chunks.push_back(chunk);
    }
    counts_.forwards +=
        static_cast<int>(std::count_if(rows.begin(), rows.end(), [](int n) { return n > 0; }));
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
