// SPDX-License-Identifier: Apache-2.0
//
// A small continuous-batching engine whose attention is the library's. docs/engines.md walks
// through.
#include "../programs/arguments.hpp"
#include "../programs/glm52.hpp"
#include "check.hpp"
#include "platform.hpp"

#include <indexshare/accounting.hpp>
#include <indexshare/cache_inventory.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace mini;
using programs::Arguments;
using programs::Parsed;

constexpr programs::OptionSpec options[] = {
    {"--check", "", "compares each request with the same one run alone"},
    {"--small", "", "8 layers, 8 heads, top-k 32 instead of GLM-5.2's sizes (cuda: always)"},
    {"--backend", "host|cuda", "where attention runs (default host)"},
    {"--requests", "N", "requests (default 6; without --small 3)"},
    {"--new-tokens", "N", "to generate per request, about (default 12; without --small 6)"},
    {"--document", "N", "tokens that a prompt begins with (default 80; without --small 3000)"},
    {"--stored", "N",
     "of them restored from a store instead of computed (default 0; without --small all)"},
    {"--budget", "N", "rows of a step, at most (default 40; without --small 24)"},
    {"--drafts", "N", "tokens drafted by the MTP layer after each step (default 3)"},
    {"--cache", "bf16|e4m3", "format of the caches (default bf16); e4m3: 132 and 656 bytes a row"},
    {"--micro-batches", "N", "parts of a step that run interleaved layer by layer (default 1)"},
    {"--pages", "N",
     "of 16 tokens (64 without --small) in the pool (default: two thirds of what all need)"},
    {"--scratch", "MiB", "of each workspace, at most (default 64)"},
    {"--threads", "N", "threads (default: the machine's)"},
    {"--seed", "N", "of the synthetic model (default 1)"},
    {"--help", "", "this text"},
};

constexpr char const* purpose =
    "A small continuous-batching engine on a synthetic model with GLM-5.2's schedule: chunked\n"
    "prefill, decode, MTP drafts and shared prefixes in one batch. Exit status 0: ran, and with\n"
    "--check all is equal; 1: something differs; 2: an error, in one line on stderr.";

struct Settings {
  bool small = false;
  bool check = false;
  std::int64_t requests = 0, new_tokens = 0, document = 0, stored = 0, budget = 0, drafts = 0,
               micro_batches = 0, pages = 0, scratch_mib = 0, threads = 0, seed = 0;
};

Parsed<Settings> read_settings(Arguments const& arguments, bool on_cuda) {
  Settings s;
  s.check = arguments.has("--check");
  s.small = on_cuda || arguments.has("--small");
  programs::NumberOption const numbers[] = {
      {"--requests", s.small ? 6 : 3, 1, 64, &s.requests},
      {"--new-tokens", s.small ? 12 : 6, 1, 4096, &s.new_tokens},
      {"--document", s.small ? 80 : 3000, 0, 1 << 20, &s.document},
      {"--stored", s.small ? 0 : -1, 0, 1 << 20, &s.stored},
      {"--budget", s.small ? 40 : 24, 1, 4096, &s.budget},
      {"--drafts", 3, 0, 8, &s.drafts},
      {"--micro-batches", 1, 1, 8, &s.micro_batches},
      {"--pages", 0, 1, 1 << 24, &s.pages},
      {"--scratch", 64, 1, 1 << 20, &s.scratch_mib},
      {"--threads", std::max(1u, std::thread::hardware_concurrency()), 1, 1024, &s.threads},
      {"--seed", 1, 0, 1 << 30, &s.seed}};
  if (auto const read = programs::read_numbers(arguments, numbers); !read) {
    return cuda::std::unexpected(read.error());
  }
  if (s.stored < 0) s.stored = s.document;
  if (s.stored > s.document) {
    return programs::reject("--stored", "got " + std::to_string(s.stored) + ", the document has " +
                                            std::to_string(s.document) + " tokens");
  }
  return s;
}

/// GLM-5.2's first layers and its MTP layer, or all of them.
indexshare::SharePlan schedule_of(bool small) {
  if (!small) return programs::glm52_plan();
  indexshare::ScheduleFields fields;
  fields.num_layers = 8;
  fields.mtp_layers = 1;
  fields.freq = 4;
  fields.offset = 3;
  return indexshare::make_share_plan(fields).value();
}

/// Prompts: of every three requests, two begin with the same document. They arrive in different
/// steps, and the shortest is one token.
std::vector<Request> make_requests(Settings const& s, Model const& model) {
  std::vector<Request> requests;
  for (int id = 0; id < s.requests; ++id) {
    bool const tiny = s.small && id == 3;
    int const shared = tiny ? 0 : static_cast<int>(s.document);
    int const own = tiny ? 1 : 20 + 7 * id % 23;
    Request request{.id = id,
                    .arrival = 2 * id,
                    .prompt = shared + own,
                    .stored = tiny ? 0 : static_cast<int>(s.stored),
                    .new_tokens = static_cast<int>(s.new_tokens) + id % 3,
                    .tokens = {}};
    int const text = id % 3 == 2 ? 1 : 0;
    for (int i = 0; i < shared; ++i) request.tokens.push_back(model.prompt_token(text, i));
    for (int i = 0; i < own; ++i) request.tokens.push_back(model.prompt_token(100 + id, i));
    requests.push_back(std::move(request));
  }
  return requests;
}

Sizes sizes_of(Settings const& s, indexshare::SharePlan const& plan) {
  indexshare::ModelConfig const glm = programs::glm52_model();
  Sizes sizes;
  sizes.layers = plan.num_layers();
  sizes.rows = static_cast<int>(s.budget);
  sizes.requests = static_cast<int>(std::min<std::int64_t>(s.requests, s.budget));
  sizes.top_k = s.small ? 32 : static_cast<int>(glm.index_topk);
  sizes.heads = s.small ? 8 : static_cast<int>(glm.num_attention_heads);
  sizes.index_heads = s.small ? 8 : static_cast<int>(glm.index_n_heads);
  sizes.index_dim = static_cast<int>(glm.index_head_dim);
  sizes.value_dim = static_cast<int>(glm.kv_lora_rank);
  sizes.key_dim = static_cast<int>(glm.kv_lora_rank + glm.qk_rope_head_dim);
  sizes.drafts = static_cast<int>(s.drafts);
  sizes.page_size = s.small ? 16 : 64;
  return sizes;
}

/// Room for the longest request, and unless the pool's size is given, pages for half of all at
/// once: the rest must wait, and pages go from one to another.
void fit_to(Sizes& sizes, Settings const& s, std::vector<Request> const& requests) {
  int all = 0;
  for (Request const& request : requests) {
    int const tokens = request.prompt + request.new_tokens + sizes.drafts;
    sizes.keys = std::max(sizes.keys, tokens);
    all += tokens / sizes.page_size + 1;
  }
  sizes.pages =
      s.pages > 0 ? static_cast<int>(s.pages) : std::max(sizes.request_pages(), all * 2 / 3);
}

double mib(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void print_plan(Sizes const& sizes, indexshare::SharePlan const& plan, BackendBytes const& bytes,
                std::string const& where) {
  std::printf(
      "%d layers and an MTP layer, %d of %d with an indexer; %d heads, latent %d + rope %d, "
      "indexer %d x "
      "%d, top-k %d; on %s\n",
      sizes.layers, plan.full_layers().count() + 1, sizes.layers + 1, sizes.heads, sizes.value_dim,
      sizes.key_dim - sizes.value_dim, sizes.index_heads, sizes.index_dim, sizes.top_k,
      where.c_str());
  std::printf(
      "planned up front: scratch %.2f MiB, selection states %.2f MiB, %d pages of %d tokens: KV "
      "%.1f MiB, index keys %.1f MiB\n",
      mib(bytes.scratch), mib(bytes.states), sizes.pages, sizes.page_size, mib(bytes.kv),
      mib(bytes.index_keys));
}

/// Bytes of the trunk's caches per token, with an indexer in every layer and as scheduled.
void print_token_bytes(Sizes const& sizes, indexshare::SharePlan const& plan, std::int64_t kv,
                       std::int64_t index_keys, char const* format) {
  indexshare::CacheInventory const trunk(plan, 0, sizes.layers, kv, index_keys);
  std::int64_t const kv_bytes = sizes.layers * kv;
  std::printf(
      "bytes per token, %s: index keys %lld without sharing, %lld with; KV %lld either way\n",
      format, static_cast<long long>(sizes.layers * index_keys),
      static_cast<long long>(trunk.bytes(1) - kv_bytes), static_cast<long long>(kv_bytes));
}

void print_counts(EngineCounts const& c, std::size_t requests, std::int64_t indexer_calls,
                  std::int64_t expected_calls) {
  std::printf(
      "%zu requests in %d steps: %d rows (%.1f per step, %d at most), %d prompt chunks, %d decode "
      "rows, %d steps with both\n",
      requests, c.steps, c.rows, static_cast<double>(c.rows) / c.steps, c.most_rows,
      c.prefill_chunks, c.decode_rows, c.mixed_steps);
  std::printf("drafts: %d verified, %d accepted; prefix: %d tokens in reused pages, %d restored\n",
              c.drafted, c.accepted, c.reused, c.restored);
  std::printf("indexer calls: %lld, by the schedule %lld\n", static_cast<long long>(indexer_calls),
              static_cast<long long>(expected_calls));
}

int fail(std::string const& message) {
  std::cerr << "error: " << message << "\n";
  return 2;
}

/// Runs each request alone and compares. Exit status.
int check(Sizes const& sizes, Model const& model, AttentionPlan const& plan, Platform& platform,
          std::vector<Request> const& requests, std::vector<std::unique_ptr<Request>> const& done,
          bool calls_right) {
  auto const backend = platform.make_alone(sizes, plan, *platform.device);
  AloneRun alone(sizes, model, *backend, *platform.device);
  Checker checker(sizes.layers + 1);
  for (auto const& request : done) {
    std::fprintf(stderr, "checking request %d\n", request->id);
    checker.compare(*request, alone.run(requests[static_cast<std::size_t>(request->id)]));
  }
  Comparison const& r = checker.result();
  auto const line = [](std::int64_t equal, std::int64_t all, char const* what) {
    std::printf("%lld of %lld %s\n", static_cast<long long>(equal), static_cast<long long>(all),
                what);
  };
  line(r.equal_selections, r.selections, "selections equal (of a row in a layer)");
  line(r.equal_outputs, r.outputs, "outputs equal, bit for bit");
  if (sizes.drafts > 0) {
    line(r.equal_drafts, r.drafts, "drafted tokens equal, with their step's selection and output");
  }
  line(r.equal_tokens, r.tokens, "tokens equal");
  bool const passed = r.all_equal() && calls_right && done.size() == requests.size();
  std::printf(passed ? "CHECK PASSED\n" : "CHECK FAILED\n");
  return passed ? 0 : 1;
}

int run(Settings const& s, Platform& platform) {
  indexshare::SharePlan const schedule = schedule_of(s.small);
  Sizes sizes = sizes_of(s, schedule);
  Model const model(sizes, static_cast<std::uint32_t>(s.seed));
  std::vector<Request> const requests = make_requests(s, model);
  fit_to(sizes, s, requests);
  if (sizes.pages < sizes.request_pages()) {
    return fail("--pages: got " + std::to_string(sizes.pages) + ", the longest request needs " +
                std::to_string(sizes.request_pages()));
  }
  AttentionPlan const plan{
      .schedule = schedule,
      .scale = static_cast<float>(indexshare::softmax_scale(programs::glm52_model())),
      .scratch_budget = static_cast<std::size_t>(s.scratch_mib) << 20,
      .micro_batches = static_cast<int>(s.micro_batches)};
  auto const backend = platform.make_backend(sizes, plan, *platform.device);
  print_plan(sizes, schedule, backend->bytes(), platform.where);
  indexshare::ModelConfig const glm = programs::glm52_model();
  print_token_bytes(sizes, schedule, 2 * sizes.key_dim, 2 * sizes.index_dim, "bf16 caches");
  print_token_bytes(sizes, schedule, indexshare::kv_entry_bytes(glm),
                    indexshare::index_key_bytes(glm), "fp8 caches");

  auto const start = std::chrono::steady_clock::now();
  Engine engine(sizes, model, *backend, *platform.device, plan.micro_batches);
  for (Request const& request : requests) engine.submit(request);
  auto const done = engine.run();
  std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
  std::fprintf(stderr, "engine: %.1f s\n", taken.count());

  EngineCounts const& counts = engine.counts();
  std::int64_t const expected =
      std::int64_t{counts.forwards} * (schedule.full_layers().count() + 1);
  print_counts(counts, done.size(), backend->indexer_calls(), expected);
  std::fflush(stdout);
  if (!s.check) return 0;
  return check(sizes, model, plan, platform, requests, done, backend->indexer_calls() == expected);
}

}  // namespace

int main(int argc, char** argv) {
  auto const arguments = Arguments::parse(options, argc, argv);
  if (!arguments) return fail(arguments.error().message());
  if (arguments->has("--help")) {
    std::cout << programs::help_text("mini_engine", purpose, options);
    return 0;
  }
  std::string const where = arguments->text("--backend", "host");
  if (where != "host" && where != "cuda") {
    return fail("--backend: got " + programs::quoted(where) + ", expected host or cuda");
  }
  std::string const cache = arguments->text("--cache", "bf16");
  if (cache != "bf16" && cache != "e4m3") {
    return fail("--cache: got " + programs::quoted(cache) + ", expected bf16 or e4m3");
  }
  auto const format = cache == "bf16" ? CacheFormat::bf16 : CacheFormat::e4m3;
  auto const settings = read_settings(*arguments, where == "cuda");
  if (!settings) return fail(settings.error().message());
  try {
    programs::ThreadPool pool(static_cast<int>(settings->threads));
    Platform platform = where == "cuda" ? cuda_platform(format) : host_platform(pool, format);
    if (!platform.refusal.empty()) return fail("--backend: " + platform.refusal);
    return run(*settings, platform);
  } catch (ScratchTooSmall const& error) {
    return fail("--scratch: a layer needs " + std::to_string((error.least + (1 << 20) - 1) >> 20) +
                " MiB at least; less with fewer --threads");
  } catch (std::bad_alloc const&) {
    return fail("out of memory: fewer --pages, a smaller --budget, a shorter --document need less");
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}
