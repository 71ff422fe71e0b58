// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <cstdint>
#include <cstdio>
#include <vector>

static_assert(__cplusplus < 202002L, "this file shows that an engine may be C++17");

namespace engine {
namespace {

namespace boundary = indexshare::boundary;
using indexshare::position_t;

/// The engine's own bf16: the upper half of a float.
using Bf16 = std::uint16_t;
constexpr Bf16 one = 0x3F80;

/// Whole numbers below 256 are exact in bf16.
Bf16 bf16_of(int number) {
  if (number == 0) return 0;
  int exponent = 0;
  while (number >> (exponent + 1) != 0) ++exponent;
  int const mantissa = (number << 7 >> exponent) - 128;
  return static_cast<Bf16>(((127 + exponent) << 7) + mantissa);
}

template <class T>
T* upload(Device& device, std::vector<T> const& values) {
  void* const memory = device.allocate(values.size() * sizeof(T));
  device.upload(memory, values.data(), values.size() * sizeof(T));
  return static_cast<T*>(memory);
}

bool good(indexshare::Status const& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "layer %d: %s (expected %lld, got %lld)\n", status.layer, status.what,
                 static_cast<long long>(status.expected), static_cast<long long>(status.got));
  }
  return status.ok();
}

constexpr int rows = 2, page_size = 4, pages = 3, lanes = 32, latent = 16, index_lanes = 16;

/// A cache of three pages, of which request 0 has the last two, in that order. Lane 0 of token i is
/// values[i]; the rest is zero.
boundary::Cache cache_of(Device& device, std::vector<int> const& values, int width) {
  std::vector<Bf16> rows_of_lanes(static_cast<std::size_t>(pages * page_size * width));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::size_t const slot = page_size + i;
    rows_of_lanes[slot * static_cast<std::size_t>(width)] = bf16_of(values[i]);
  }
  return boundary::dense_cache(upload(device, rows_of_lanes), pages, page_size, width);
}

}  // namespace

SparseStack::Config config() {
  SparseStack::Config config;
  config.layers = 4;
  config.share_every = 2;
  config.shape.rows = rows;
  config.shape.keys = 2 * page_size;
  config.shape.top_k = 3;
  config.shape.index_heads = 8;
  config.shape.index_dim = index_lanes;
  config.shape.heads = 8;
  config.shape.key_dim = lanes;
  config.shape.value_dim = latent;
  return config;
}

int run(Device& device, SparseStack& stack) {
  SparseStack::Sizes bytes;
  if (!good(stack.sizes(std::size_t{1} << 20, bytes))) return 1;
  if (!good(stack.bind({device.allocate(bytes.state), bytes.state},
                       {device.allocate(bytes.scratch), bytes.scratch}))) {
    return 1;
  }

  // Two query rows, tokens 4 and 5 of request 0, which see 5 and 6 keys.
  boundary::LayerCall call;
  call.forward = 1;
  call.batch.lengths = boundary::dense<position_t const>(upload<position_t>(device, {5, 6}), rows);
  call.batch.requests = boundary::dense<position_t const>(upload<position_t>(device, {0, 0}), rows);
  auto* const table = upload<position_t>(device, {1, 2});
  call.batch.kv_pages = {boundary::dense<position_t const>(table, 1, 2), page_size};
  call.batch.index_pages = call.batch.kv_pages;

  // The score of a token is its index key: head 0 has weight 1, the others 0. The queries of the
  // attention are zero, so an output is the mean of the selected tokens' values.
  auto const shape = config().shape;
  std::vector<Bf16> const index_q(static_cast<std::size_t>(rows * shape.index_heads * index_lanes),
                                  one);
  std::vector<float> head_weights(static_cast<std::size_t>(rows * shape.index_heads));
  for (int row = 0; row < rows; ++row) {
    head_weights[static_cast<std::size_t>(row * shape.index_heads)] = 1;
  }
  std::size_t const outputs = static_cast<std::size_t>(rows * shape.heads * latent);
  std::vector<Bf16> const q(static_cast<std::size_t>(rows * shape.heads * lanes));
  std::vector<float> out(outputs);
  call.q = boundary::dense<void const>(upload(device, q), rows, shape.heads, lanes);
  call.scale = 1;
  call.out =
      boundary::dense<void>(device.allocate(outputs * sizeof(float)), rows, shape.heads, latent);
  auto const index_queries =
      boundary::dense<void const>(upload(device, index_q), rows, shape.index_heads, index_lanes);
  call.head_weights =
      boundary::dense<float const>(upload(device, head_weights), rows, shape.index_heads);

  std::vector<std::vector<int>> const index_keys{{3, 9, 1, 7, 5, 8}, {}, {1, 2, 3, 9, 9, 9}, {}};
  for (std::int32_t layer = 0; layer < config().layers; ++layer) {
    call.index_q = {};  // absent on a shared layer
    if (stack.is_full(layer)) {
      call.index_q = index_queries;
      call.index_keys = cache_of(device, index_keys[static_cast<std::size_t>(layer)], index_lanes);
    }
    int const unit = layer + 1;  // each layer has its own KV
    call.kv = cache_of(device, {0, unit, 2 * unit, 3 * unit, 4 * unit, 5 * unit}, lanes);
    if (!good(stack.run(layer, call))) return 1;
    device.download(out.data(), call.out.data, outputs * sizeof(float));
    std::printf("layer %d, %s: outputs %.3f %.3f\n", layer,
                stack.is_full(layer) ? "full  " : "shared", static_cast<double>(out[0]),
                static_cast<double>(out[outputs / rows]));
  }

  call.forward = 2;  // the last layer again, but the state holds the selection of forward 1
  indexshare::Status const stale = stack.run(3, call);
  std::printf("forward 2: %s\n", stale.what);
  return stale.code == indexshare::Errc::stale_selection ? 0 : 1;
}

}  // namespace engine
