// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"
#include "config_text.hpp"
#include "demo_backend.hpp"
#include "demo_report.hpp"
#include "glm52.hpp"
#include "machine_memory.hpp"
#include "weights_mode.hpp"

#include <indexshare/io/config.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <string>
#include <string_view>
#include <thread>

#if !defined(INDEXSHARE_GOLDEN_DIR)
#define INDEXSHARE_GOLDEN_DIR "tests/golden"
#endif

namespace {

using namespace programs;

constexpr OptionSpec options[] = {
    {"--backend", "host|cuda", "where the layers run (default host; not with --weights)"},
    {"--config", "FILE", "config.json of a model (default: GLM-5.2's published values)"},
    {"--layers", "A:B",
     "layers A to B - 1 (default: two share groups, 2:10 for GLM-5.2); MTP with --weights only"},
    {"--context", "L",
     "tokens of the longer of two requests, e.g. 32K (default 16K; on cuda 4K, with --weights 2 * "
     "top-k)"},
    {"--decode", "N", "decode steps (default 4)"},
    {"--draft", "N", "steps of the MTP draft round, 0 for none (default 3)"},
    {"--share", "on|off|both",
     "with sharing, without, or both to compare (default both; with --weights on, and no both)"},
    {"--threads", "N", "threads (default: the machine's)"},
    {"--seed", "N", "of the synthetic data (default 1)"},
    {"--golden", "DIR", "fixtures made with transformers (default: those of the source tree)"},
    {"--json", "FILE", "writes the report as JSON too"},
    {"--weights", "DIR",
     "runs modules of a checkpoint instead: config.json and safetensors in DIR"},
    {"--input", "FILE", "with --weights: hidden states and tokens of a recording"},
    {"--record", "FILE", "with --weights: writes a recording, see indexshare-compare"},
    {"--rows", "N", "with --weights: synthetic query rows (default 32)"},
    {"--latent-eps", "X", "with --weights: of the latent norms (default rms_norm_eps)"},
    {"--index-key-eps", "X", "with --weights: of the indexer's k_norm (default 1e-6)"},
    {"--hadamard", "", "with --weights: index queries and keys in the Hadamard basis"},
    {"--attend-recorded", "", "with --input: attends over the input's selections, records its own"},
    {"--help", "", "this text"},
};

constexpr char const* purpose =
    "Runs a stack of sparse-attention layers with a model's own full/shared schedule on synthetic\n"
    "data, without and with sharing, and checks it against the reference. With --weights it runs\n"
    "whole self-attention modules of a checkpoint, hidden states in, module output out, and "
    "checks\n"
    "them likewise. Exit status 0: the check passed, 1: it failed, 2: an error, in one line on "
    "stderr.";

/// Options that need --weights.
constexpr std::string_view weights_options[] = {"--input",          "--record",        "--rows",
                                                "--latent-eps",     "--index-key-eps", "--hadamard",
                                                "--attend-recorded"};

constexpr int check_failed = 1;
constexpr int error_status = 2;
constexpr char const* golden_fixture = "prefill64_fp32";

int fail(std::string const& message) {
  std::cerr << "error: " << message << "\n";
  return error_status;
}

/// The first run of layers with two share groups of more than one layer; else the first layers.
NumberRange default_layers(indexshare::SharePlan const& plan) {
  std::int32_t first = indexshare::no_source;
  std::int32_t groups = 0;
  for (std::int32_t layer = 1; layer <= plan.num_layers(); ++layer) {
    bool const ends_group = layer == plan.num_layers() || plan.is_full(layer);
    if (!ends_group || plan.is_full(layer - 1)) continue;
    if (groups == 0) first = share_source(plan, layer - 1);
    if (++groups == 2) return {first, layer};
  }
  return {0, std::min(4, plan.num_layers())};
}

/// Whether the layers are to run on CUDA.
Parsed<bool> wants_cuda(Arguments const& arguments) {
  std::string const backend = arguments.text("--backend", "host");
  if (backend == "host" || backend == "cuda") return backend == "cuda";
  return reject("--backend", "got " + programs::quoted(backend) + ", expected host or cuda");
}

/// The command line's numbers. Errors name the option.
Parsed<DemoSettings> read_settings(Arguments const& arguments, indexshare::SharePlan const& plan,
                                   bool on_cuda) {
  DemoSettings settings;
  Parsed<NumberRange> const layers =
      arguments.range("--layers", default_layers(plan), plan.num_layers());
  if (!layers) return cuda::std::unexpected(layers.error());
  settings.first_layer = static_cast<std::int32_t>(layers->first);
  settings.last_layer = static_cast<std::int32_t>(layers->last);
  if (auto const stage =
          plan.stage(settings.first_layer, settings.last_layer, indexshare::StageStart::own);
      !stage) {
    return reject("--layers", std::string(stage.error().what) + " (layer " +
                                  std::to_string(stage.error().layer) + ")");
  }

  std::int64_t threads = 0;
  std::int64_t seed = 0;
  NumberOption const numbers[] = {
      {"--context", on_cuda ? 4096 : 16384, 32, 1 << 24, &settings.context},
      {"--decode", 4, 0, 4096, &settings.decode_steps},
      {"--draft", 3, 0, 64, &settings.draft_steps},
      {"--threads", std::max(1u, std::thread::hardware_concurrency()), 1, 1024, &threads},
      {"--seed", 1, 0, std::numeric_limits<std::int64_t>::max(), &seed}};
  if (auto const read = read_numbers(arguments, numbers); !read) {
    return cuda::std::unexpected(read.error());
  }
  settings.threads = static_cast<int>(threads);
  settings.seed = static_cast<std::uint64_t>(seed);

  std::string const share = arguments.text("--share", "both");
  if (share != "on" && share != "off" && share != "both") {
    return reject("--share", "got " + programs::quoted(share) + ", expected on, off or both");
  }
  settings.share_on = share != "off";
  settings.share_off = share != "on";
  return settings;
}

/// Refuses a run whose caches this machine cannot hold.
Parsed<bool> check_memory(DemoSettings const& settings, indexshare::ModelConfig const& model) {
  double const per_token =
      2.0 * static_cast<double>(model.index_head_dim + model.kv_lora_rank + model.qk_rope_head_dim);
  double const layers = settings.last_layer - settings.first_layer + 1;
  double const need = 2 * static_cast<double>(settings.context) * per_token * layers * 1.1;
  if (need <= machine_memory()) return true;
  return reject("--context", "the caches would take " + gib_text(need) + " and this machine has " +
                                 gib_text(machine_memory()) + "; lower it or take fewer --layers");
}

/// Progress on stderr: one changing line on a terminal, a line each elsewhere.
void show_progress(std::string const& step) {
  if (isatty(STDERR_FILENO) != 0) {
    std::fprintf(stderr, "\r\033[K%s", step.c_str());
  } else {
    std::fprintf(stderr, "%s\n", step.c_str());
  }
}
void end_progress() {
  if (isatty(STDERR_FILENO) != 0) std::fprintf(stderr, "\r\033[K");
}

bool has_fixture(std::string const& directory) {
  return std::ifstream(directory + "/" + golden_fixture + ".safetensors").good();
}

void replay_fixture(std::string const& directory, ThreadPool& pool, DemoOutcome& outcome) {
  outcome.golden_name = golden_fixture;
  if (has_fixture(directory)) {
    indexshare::HostExec<PoolFor> const exec{{&pool}};
    outcome.golden = replay_golden(exec, directory, golden_fixture);
  } else {
    outcome.golden_note = "no " + std::string(golden_fixture) + ".safetensors in " + directory;
  }
}

/// The exit status, once all output is out.
int flush_output(bool passed) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return fail("output: could not be written");
  }
  return passed ? 0 : check_failed;
}

int run_weights(Arguments const& arguments) {
  auto const on_cuda = wants_cuda(arguments);
  if (!on_cuda) return fail(on_cuda.error().message());
  if (*on_cuda) {
    return fail(
        "--backend: cuda runs layers on synthetic data; modules of a checkpoint run on the "
        "host");
  }
  auto const passed = run_weights_mode(arguments, default_layers, show_progress, end_progress);
  if (!passed) return fail(passed.error().message());
  return flush_output(*passed);
}

int run_synthetic(Arguments const& arguments) {
  for (std::string_view const option : weights_options) {
    if (arguments.has(option)) return fail(std::string(option) + ": needs --weights DIR");
  }
  indexshare::io::LoadedConfig config{glm52_model(), glm52_plan()};
  std::string const file = arguments.text("--config");
  if (arguments.has("--config")) {
    auto const loaded = indexshare::io::read_config_file(file);
    if (!loaded) return fail("--config: " + config_error_text(loaded.error(), file));
    config = *loaded;
  }
  if (auto const status = can_run(config.model); !status.ok()) {
    return fail("--config: " + std::string(status.what) + " (in " + file + ")");
  }
  auto const on_cuda = wants_cuda(arguments);
  if (!on_cuda) return fail(on_cuda.error().message());
  auto const settings = read_settings(arguments, config.plan, *on_cuda);
  if (!settings) return fail(settings.error().message());
  if (auto const fits = check_memory(*settings, config.model); !fits) {
    return fail(fits.error().message());
  }
  ThreadPool pool(settings->threads);
  DemoBackend const backend = *on_cuda ? cuda_backend(pool) : host_backend(pool);
  if (!backend.refusal.empty()) return fail("--backend: " + backend.refusal);
  if (*on_cuda && arguments.has("--golden")) return fail("--golden: needs --backend host");
  std::string const golden = arguments.text("--golden", INDEXSHARE_GOLDEN_DIR);
  if (arguments.has("--golden") && !has_fixture(golden)) {
    return fail("--golden: no " + std::string(golden_fixture) + ".safetensors in " + golden);
  }
  std::ofstream json;
  if (arguments.has("--json")) {
    json.open(arguments.text("--json"));
    if (!json) return fail("--json: cannot write " + arguments.text("--json"));
  }

  std::string const name = arguments.has("--config") ? file : "GLM-5.2, published values";
  std::printf(
      "%s: layers %d:%d of %d, top-k %lld at a context of %lld, %lld heads, latent %lld + "
      "rope %lld, indexer %lld x %lld, %s\n",
      name.c_str(), settings->first_layer, settings->last_layer, config.plan.num_layers(),
      static_cast<long long>(config.model.index_topk), static_cast<long long>(settings->context),
      static_cast<long long>(config.model.num_attention_heads),
      static_cast<long long>(config.model.kv_lora_rank),
      static_cast<long long>(config.model.qk_rope_head_dim),
      static_cast<long long>(config.model.index_n_heads),
      static_cast<long long>(config.model.index_head_dim), backend.where.c_str());
  std::fflush(stdout);

  DemoOutcome outcome{name, config.model, config.plan, *settings, backend, {}, "", {}, ""};
  outcome.result = backend.run(config.model, config.plan, *settings, show_progress);
  if (*on_cuda) {
    outcome.golden_note = "that is for the host back end";
  } else {
    replay_fixture(golden, pool, outcome);
  }
  end_progress();
  print_report(outcome);
  if (json.is_open() && !(json << json_report(outcome).dump(2) << "\n" << std::flush)) {
    return fail("--json: could not write " + arguments.text("--json"));
  }
  return flush_output(outcome.passed());
}

int run(Arguments const& arguments) {
  return arguments.has("--weights") ? run_weights(arguments) : run_synthetic(arguments);
}

}  // namespace

int main(int argc, char** argv) {
  auto const arguments = Arguments::parse(options, argc, argv);
  if (!arguments) return fail(arguments.error().message());
  if (arguments->has("--help")) {
    std::cout << help_text("indexshare-demo", purpose, options);
    return 0;
  }
  try {
    return run(*arguments);
  } catch (std::exception const& error) {
    end_progress();
    return fail(error.what());
  }
}
