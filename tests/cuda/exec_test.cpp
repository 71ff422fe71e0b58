// SPDX-License-Identifier: Apache-2.0
//
// The executor: how it is made, that refusals come before any work, and who is blamed for a fault.
#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/frontend.cuh>

#include "../layer/session.hpp"
#include "graph.hpp"

#include <array>
#include <cstdio>
#include <string>
#include <type_traits>

#include <unistd.h>

INDEXSHARE_KERNEL void fill_shared(std::byte* out) {
  extern __shared__ std::byte memory[];
  memory[threadIdx.x] = std::byte{1};
  __syncthreads();
  if (threadIdx.x == 0) *out = memory[blockDim.x - 1];
}

namespace {
using namespace layer_test;

// ---- how it is made

struct EngineStream {
  cudaStream_t get() const { return stream; }
  cudaStream_t stream = nullptr;
};
struct NoStream {
  int (*get)() = nullptr;
};

static_assert(std::is_constructible_v<CudaExec, cudaStream_t, DeviceLimits>);
static_assert(std::is_constructible_v<CudaExec, EngineStream, DeviceLimits>);
// There is no default stream, under any name.
static_assert(!std::is_default_constructible_v<CudaExec>);
static_assert(!std::is_constructible_v<CudaExec, int, DeviceLimits>);
static_assert(!std::is_constructible_v<CudaExec, long, DeviceLimits>);
static_assert(!std::is_constructible_v<CudaExec, bool, DeviceLimits>);
static_assert(!std::is_constructible_v<CudaExec, std::nullptr_t, DeviceLimits>);
static_assert(!std::is_constructible_v<CudaExec, NoStream, DeviceLimits>);
// The limits are not guessed.
static_assert(!std::is_constructible_v<CudaExec, cudaStream_t>);

// Memory of the host does not enter a call of a device.
template <class X, Space S>
concept Hadamards = requires(X const& x, Tensor<S, float, 3> const& view) {
  hadamard(x, view);
};
static_assert(Hadamards<CudaExec, Space::device>);
static_assert(!Hadamards<CudaExec, Space::host>);

TEST_CASE("CUDA executor: runs on the stream that it was given", "[exec]") {
  test::Cuda const x;
  EngineStream const engine{x.stream()};
  CHECK(CudaExec(engine, x.limits()).stream() == x.stream());
  CHECK(CudaExec(engine, x.limits()).limits() == x.limits());
  CHECK_FALSE(x.checks_each_kernel());
  CHECK(x.checking_each_kernel().checks_each_kernel());
  CHECK(x.checking_each_kernel().stream() == x.stream());
}

TEST_CASE("CUDA executor: the limits are the device's, and a device that is not there is named",
          "[exec]") {
  auto const limits = test::cuda_limits();
  CHECK(limits.compute_capability >= 80);
  CHECK(limits.multiprocessors > 0);
  CHECK(limits.shared_memory_bytes >= 99 * 1024);
  auto const none = device_limits(1000);
  REQUIRE_FALSE(none.has_value());
  CHECK(none.error().code == Errc::backend_error);
  CHECK(none.error().cuda_error == static_cast<int>(cudaErrorInvalidDevice));
  CHECK(cudaGetLastError() == cudaSuccess);  // nobody else's launch is blamed for it
}

// The opt-in is the kernel's, for all threads of the process: a launch with less must not lower it
// between another thread's opt-in and its launch.
TEST_CASE("CUDA executor: a kernel's opt-in to shared memory is the same for every launch",
          "[exec]") {
  test::Cuda const x;
  test::Guarded<std::byte> out(1);
  for (int const bytes : {96 * 1024, 64 * 1024, 80 * 1024}) {
    REQUIRE(detail::launch(x, "fill_shared", fill_shared, {dim3(1), 32, bytes}, out.data()).ok());
    test::finish(x);
    cudaFuncAttributes attributes{};
    test::require(cudaFuncGetAttributes(&attributes, fill_shared));
    CHECK(attributes.maxDynamicSharedSizeBytes == x.limits().shared_memory_bytes);
  }
  CHECK(out[0] == std::byte{1});
}

// ---- refusals

using SmallModel = Model<>;
using SmallSession = Session<test::Cuda, SmallModel, Schedule>;

TEST_CASE("CUDA refusals: come before any work", "[exec][refusals]") {
  test::Cuda const x;
  Schedule const share("FS");
  SmallModel model(share, 2);
  SmallSession session(x, model, share, mixed_rows());
  struct Mistake {
    char const* name;
    std::int32_t layer;
    Errc code;
    void (*make)(SmallSession::Inputs&, SmallSession::Outputs&, Workspace&);
  };
  Mistake const mistakes[]{
      {"no indexer inputs", 0, Errc::missing_input,
       [](auto& in, auto&, auto&) { in.indexer = cuda::std::nullopt; }},
      {"no scale", 0, Errc::bad_value, [](auto& in, auto&, auto&) { in.attention.scale = 0; }},
      {"no forward", 0, Errc::bad_value, [](auto& in, auto&, auto&) { in.id = {}; }},
      {"no lengths", 0, Errc::missing_input,
       [](auto& in, auto&, auto&) {
         in.batch.lengths = make_lengths<space>(nullptr, Rows{in.batch.count()});
       }},
      {"output of another width", 0, Errc::bad_shape,
       [](auto&, auto& out, auto&) {
         out.out = make_output<space>(out.out.data_handle(), Rows{10}, Heads{3}, HeadDim{7});
       }},
      {"half a workspace", 0, Errc::workspace_too_small,
       [](auto&, auto&, auto& ws) { ws.bytes = 1; }},
      {"workspace off its alignment", 0, Errc::bad_value,
       [](auto&, auto&, auto& ws) { ws.data = static_cast<std::byte*>(ws.data) + 4; }},
      {"a shared layer with indexer inputs", 1, Errc::bad_value, [](auto&, auto&, auto&) {}},
      {"a shared layer before its full layer", 1, Errc::stale_selection,
       [](auto& in, auto&, auto&) { in.indexer = cuda::std::nullopt; }},
  };
  for (Mistake const& mistake : mistakes) {
    CAPTURE(mistake.name);
    auto in = session.inputs(0);
    if (mistake.layer == 1) in.attention = session.attention_inputs(1);
    auto out = session.outputs(mistake.layer);
    auto ws = session.workspace();
    mistake.make(in, out, ws);
    Status status;
    CHECK(cuda_test::enqueued_by(x, [&] {
            status = session.layer(mistake.layer).run(x, in, session.state(), out, ws);
          }) == 0);
    CHECK(status.code == mistake.code);
    CHECK(status.layer == mistake.layer);
  }
  test::finish(x);
  CHECK((session.untouched_outputs(0) && session.untouched_outputs(1)));
  CHECK(session.state().tag() == SelectionTag{});
}

// ---- faults

struct FaultyCalls {
  CudaExec x;
  test::Guarded<float> values{test::guarded<float>({1, 2, 3, 4})};
  test::Guarded<position_t> zero{test::guarded<position_t>({0})};

  /// Into a cache outside of everything.
  Status append_nowhere() {
    auto* const nowhere = reinterpret_cast<float*>(std::uintptr_t{0x400});
    return append_rows(x, make_dense<space, float const, 2>(values.data(), {1, 4}), numbers(zero),
                       numbers(zero), make_contiguous_table<space>(Keys{1}),
                       make_contiguous_cache<space>(nowhere, Requests{1}, Keys{1}, HeadDim{4}));
  }
  Status double_values() {
    auto const view = make_dense<space, float, 3>(values.data(), {1, 1, 4});
    return scale(x, view, 2.0f, view);
  }
};

// A fault of the device stays for the rest of a process, so it happens in one of its own.
TEST_CASE("faulty kernel checked", "[.fault]") {
  FaultyCalls calls{test::Cuda().checking_each_kernel()};
  Status const before = calls.double_values();
  Status const faulty = calls.append_nowhere();
  std::printf("before: %s; faulty: %s %s %d\n", name(before.code), name(faulty.code), faulty.what,
              faulty.cuda_error);
}
TEST_CASE("faulty kernel unchecked", "[.fault]") {
  FaultyCalls calls{test::Cuda()};
  Status const faulty = calls.append_nowhere();
  cudaError_t const later = cudaStreamSynchronize(calls.x.stream());
  std::printf("faulty: %s; later: %d\n", name(faulty.code), later != cudaSuccess ? 1 : 0);
}

/// What this program prints when it runs one of its hidden tests.
std::string output_of(std::string const& test_name) {
  std::array<char, 4096> path{};
  REQUIRE(readlink("/proc/self/exe", path.data(), path.size() - 1) > 0);
  std::string const command = "'" + std::string(path.data()) + "' '" + test_name + "' 2>&1";
  std::FILE* const pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  pclose(pipe);  // the status of a process with a broken device means nothing
  return text;
}

TEST_CASE("DIAG R145: the debug executor blames the kernel that faults, not what comes next",
          "[exec][fault]") {
  test::need_device();
  std::string const checked = output_of("faulty kernel checked");
  INFO(checked);
  CHECK(checked.find("before: ok; faulty: backend_error append_rows ") != std::string::npos);
  std::string const unchecked = output_of("faulty kernel unchecked");
  INFO(unchecked);
  CHECK(unchecked.find("faulty: ") != std::string::npos);
  CHECK(unchecked.find("later: 1") != std::string::npos);
}

}  // namespace
