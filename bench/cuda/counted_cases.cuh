// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cases.cuh"

#include <string>
#include <vector>

/// @file What `scripts/bench.sh cuda-sim` counts: every tuned kernel at GLM-5.2's widths, at
/// lengths that an emulator runs in a fraction of a second.

namespace bench {

/// `rows` rows of `requests` requests, as many of each.
template <class Query, class Format>
Case score_case(std::string const& types, index_t rows, index_t requests, index_t heads) {
  Shape shape = glm52(rows, 4096);
  shape.index_heads = heads;
  return {"score",
          "score " + types + " heads " + std::to_string(heads) + ", rows " + std::to_string(rows) +
              ", requests " + std::to_string(requests),
          [=](DeviceLimits const& limits) {
            return score_call<Query, Format>(limits, shape, rows / requests);
          }};
}

template <class Score, class Kind>
Case topk_case(std::string const& scores, index_t rows, index_t keys, Kind kind) {
  return {
      "topk", "topk " + scores + ", " + std::to_string(rows) + " x " + std::to_string(keys),
      [=](DeviceLimits const& limits) { return topk_call<Score>(limits, rows, keys, 2048, kind); }};
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
  auto const add_scores = [&](index_t rows, index_t requests, index_t heads) {
    cases.push_back(score_case<bf16, PlainKeys>("bf16 x bf16", rows, requests, heads));
    cases.push_back(score_case<bf16, Keys8>("bf16 x e4m3", rows, requests, heads));
    cases.push_back(score_case<e4m3, Keys8>("e4m3 x e4m3", rows, requests, heads));
  };
  for (index_t const rows : {2, 3, 4}) add_scores(rows, 1, 32);  // a token and its drafts
  add_scores(8, 4, 32);
  for (index_t const heads : {8, 16, 32, 64}) {
    add_scores(1, 1, heads);
    add_scores(256, 1, heads);  // a small prefill chunk
  }
  Normal const random{4};
  cases.push_back(topk_case<float>("fp32", 1, 131072, random));
  cases.push_back(topk_case<float>("fp32", 8, 131072, random));
  cases.push_back(topk_case<float>("fp32", 1, 1048576, random));
  cases.push_back(topk_case<float>("fp32", 64, 8192, random));
  cases.push_back(topk_case<bf16>("bf16", 1, 131072, random));
  cases.push_back(topk_case<bf16>("bf16", 1, 1048576, random));
  cases.push_back(topk_case<float>("half zeros", 1, 1048576, HalfZeros{}));
  cases.push_back(topk_case<float>("ascending", 1, 1048576, Ascending{}));
  auto const add_attention = [&](index_t rows, index_t heads) {
    cases.push_back(attend_case<bf16, PlainKeys>("bf16 KV", rows, heads));
    cases.push_back(attend_case<bf16, Latent8>("e4m3 KV", rows, heads));
  };
  for (index_t const heads : {8, 16, 32, 64, 128}) {
    for (index_t const rows : {1, 128}) add_attention(rows, heads);
  }
  for (index_t const rows : {8, 32}) add_attention(rows, 64);  // decode of a batch
  return cases;
}

}  // namespace bench
