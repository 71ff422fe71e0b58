// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cases.cuh"

#include <string>
#include <vector>

/// @file What `scripts/bench.sh cuda-sim` counts: every tuned kernel at GLM-5.2's widths, at
/// lengths that an emulator runs in a fraction of a second.

namespace bench {

template <class Query, class Format>
Case score_case(std::string const& types, index_t rows, index_t keys, index_t heads) {
  Shape shape = glm52(rows, keys);
  shape.index_heads = heads;
  return {"score",
          "score " + types + " heads " + std::to_string(heads) + ", rows " + std::to_string(rows) +
              ", keys " + std::to_string(keys),
          [shape](DeviceLimits const& limits) {
            return score_call<Query, Format>(limits, shape, shape.rows);
          }};
}

inline Case topk_case(index_t rows, index_t keys) {
  return {"topk", "topk " + std::to_string(rows) + " x " + std::to_string(keys),
          [rows, keys](DeviceLimits const& limits) { return topk_call(limits, rows, keys, 2048); }};
}

template <class Query, class Format>
Case attend_case(std::string const& types, index_t rows, index_t heads) {
  Shape shape = glm52(rows, 4096);
  shape.heads = heads;
  return {
      "attend",
      "attend " + types + " heads " + std::to_string(heads) + ", rows " + std::to_string(rows),
      [shape](DeviceLimits const& limits) { return attend_call<Query, Format>(limits, shape); }};
}

inline std::vector<Case> counted_cases() {
  using PlainKeys = format::Plain<bf16>;
  using Keys8 = format::IndexKeyE4m3;
  using Latent8 = format::LatentE4m3;
  std::vector<Case> cases;
  for (index_t const rows : {1, 2, 3, 4, 8}) {
    cases.push_back(score_case<bf16, PlainKeys>("bf16 x bf16", rows, 4096, 32));
    cases.push_back(score_case<bf16, Keys8>("bf16 x e4m3", rows, 4096, 32));
    cases.push_back(score_case<e4m3, Keys8>("e4m3 x e4m3", rows, 4096, 32));
  }
  // a prefill chunk: here each block of the grid has as many rows as it takes
  cases.push_back(score_case<bf16, PlainKeys>("bf16 x bf16", 64, 4096, 32));
  cases.push_back(score_case<bf16, Keys8>("bf16 x e4m3", 64, 4096, 32));
  cases.push_back(score_case<e4m3, Keys8>("e4m3 x e4m3", 64, 4096, 32));
  for (index_t const heads : {8, 16, 64}) {
    for (index_t const rows : {1, 64}) {
      cases.push_back(score_case<bf16, PlainKeys>("bf16 x bf16", rows, 4096, heads));
      cases.push_back(score_case<e4m3, Keys8>("e4m3 x e4m3", rows, 4096, heads));
    }
  }
  cases.push_back(topk_case(1, 131072));
  cases.push_back(topk_case(8, 131072));
  cases.push_back(topk_case(1, 1048576));
  cases.push_back(topk_case(64, 8192));
  for (index_t const heads : {8, 16, 32, 64, 128}) {
    for (index_t const rows : {1, 128}) {
      cases.push_back(attend_case<bf16, PlainKeys>("bf16 KV", rows, heads));
      cases.push_back(attend_case<bf16, Latent8>("e4m3 KV", rows, heads));
    }
  }
  return cases;
}

}  // namespace bench
