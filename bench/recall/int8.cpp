// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

/// @file The share of an exact bf16 selection that indexers with 1-byte keys find, on data of
/// several kinds. Prints the table of docs/policies.md; the figures are means over the rows.

namespace {

using namespace indexshare;
constexpr Space host = Space::host;
constexpr index_t heads = 32, lanes = 128, rows = 8, top_k = 2048;

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

struct Kind {
  char const* name;
  bool shared_directions;  ///< queries and keys are near a few topics; some heads dominate
  bool heavy_tails;        ///< x * |x| for each lane
};

class Data {
 public:
  Data(Kind kind, index_t keys) : kind_(kind), topics_(at(topics * lanes)), scale_(at(lanes), 1) {
    for (float& x : topics_) x = normal();
    if (kind.shared_directions) {
      for (float& x : scale_) x = std::exp(0.5f * normal());
    }
    for (index_t i = 0; i < rows * heads; ++i) add_vector(q);
    for (index_t i = 0; i < rows * heads; ++i) w.push_back(weight());
    for (index_t i = 0; i < keys; ++i) add_vector(k);
  }
  std::vector<float> q, w, k;

 private:
  static constexpr index_t topics = 24;
  float normal() { return distribution_(generator_); }
  index_t topic() { return static_cast<index_t>(generator_() % topics) * lanes; }
  float weight() {
    if (!kind_.shared_directions) return normal();
    return std::exp(1.5f * normal()) * (generator_() % 5 == 0 ? -0.3f : 1.0f);
  }
  void add_vector(std::vector<float>& out) {
    index_t const a = topic(), b = topic();
    float const x = 1.0f + 0.5f * normal(), y = 0.5f * normal();
    for (index_t i = 0; i < lanes; ++i) {
      float value = normal();
      if (kind_.shared_directions) {
        value = (value + x * topics_[at(a + i)] + y * topics_[at(b + i)]) * scale_[at(i)];
      }
      out.push_back(kind_.heavy_tails ? value * std::abs(value) : value);
    }
  }

  Kind kind_;
  std::mt19937 generator_{7};
  std::normal_distribution<float> distribution_;
  std::vector<float> topics_;
  std::vector<float> scale_;
};

template <class T>
std::vector<T> rounded(std::vector<float> const& values) {
  std::vector<T> result;
  for (float const value : values) result.push_back(from_float<T>(value));
  return result;
}

void require(bool ok) {
  if (!ok) std::exit(1);
}

using Selection = std::vector<std::vector<position_t>>;

template <class Policy, class Cache>
Selection select_all(Data const& data, index_t keys, Cache const& cache) {
  auto const q = rounded<bf16>(data.q);
  std::vector<position_t> const lengths(at(rows), static_cast<position_t>(keys));
  std::vector<position_t> const requests(at(rows), 0);
  std::vector<position_t> indices(at(rows * top_k));
  std::vector<position_t> counts(at(rows));
  auto const table = make_contiguous_table<host>(Keys{keys});
  RowBatch<host> const batch{make_lengths<host>(lengths.data(), Rows{rows}),
                             make_lengths<host>(requests.data(), Rows{rows}), table, table};
  Shape const shape{
      .rows = rows, .keys = keys, .top_k = top_k, .index_heads = heads, .index_dim = lanes};
  HostExec<> const x;
  HostMemory const memory(
      select_workspace(x, Policy{}, RadixTopK{}, shape, std::size_t{1} << 28).value());
  typename Policy::template inputs<host> const in{
      make_query<host>(q.data(), Rows{rows}, Heads{heads}, HeadDim{lanes}),
      make_head_weights<host>(data.w.data(), Rows{rows}, Heads{heads}), cache};
  auto const out = make_selection<host>(indices.data(), counts.data(), Rows{rows}, TopK{top_k});
  require(select(x, Policy{}, RadixTopK{}, in, batch, shape, out, memory.view()).ok());
  Selection result;
  for (index_t row = 0; row < rows; ++row) {
    result.emplace_back(indices.begin() + row * top_k, indices.begin() + (row + 1) * top_k);
  }
  return result;
}

double recall(Selection const& want, Selection const& got) {
  double found = 0;
  for (std::size_t row = 0; row < want.size(); ++row) {
    std::vector<position_t> both;
    std::set_intersection(want[row].begin(), want[row].end(), got[row].begin(), got[row].end(),
                          std::back_inserter(both));
    found += static_cast<double>(both.size());
  }
  return found / static_cast<double>(rows * top_k);
}

/// Key codes in e4m3 with a scale that maps the largest lane to 448.
std::vector<std::byte> e4m3_keys(std::vector<float> const& k, index_t keys) {
  std::vector<std::byte> bytes(at(keys * (lanes + 4)));
  for (index_t s = 0; s < keys; ++s) {
    float largest = 0;
    for (index_t i = 0; i < lanes; ++i) largest = std::max(largest, std::abs(k[at(s * lanes + i)]));
    float const scale = largest / 448;
    for (index_t i = 0; i < lanes; ++i) {
      bytes[at(s * lanes + i)] = std::byte{from_float<e4m3>(k[at(s * lanes + i)] / scale).bits};
    }
    std::memcpy(bytes.data() + keys * lanes + 4 * s, &scale, sizeof(scale));
  }
  return bytes;
}

std::vector<std::byte> int8_keys(std::vector<float> const& k, index_t keys) {
  std::vector<std::byte> bytes(at(keys * (lanes + 4)));
  std::vector<position_t> positions(at(keys));
  std::iota(positions.begin(), positions.end(), position_t{0});
  std::vector<position_t> const requests(at(keys), 0);
  require(
      append_rows(
          HostExec<>{}, make_dense<host, float const, 2>(k.data(), {keys, lanes}),
          make_lengths<host>(positions.data(), Rows{keys}),
          make_lengths<host>(requests.data(), Rows{keys}), make_contiguous_table<host>(Keys{keys}),
          make_index_key_int8_cache<host>(bytes.data(), Pages{1}, PageSize{keys}, HeadDim{lanes}))
          .ok());
  return bytes;
}

void print_row(Kind kind, index_t keys) {
  Data const data(kind, keys);
  auto const plain = rounded<bf16>(data.k);
  auto const e4m3_bytes = e4m3_keys(data.k, keys);
  auto const int8_bytes = int8_keys(data.k, keys);
  HeadDim const dim{lanes};
  auto const int8 =
      make_index_key_int8_cache<host>(int8_bytes.data(), Pages{1}, PageSize{keys}, dim);
  auto const want = select_all<ReluDotIndexer<bf16, format::Plain<bf16>>>(
      data, keys, make_contiguous_cache<host>(plain.data(), Requests{1}, Keys{keys}, dim));
  std::printf(
      "| %s | %lldK | %.4f | %.4f | %.4f |\n", kind.name, static_cast<long long>(keys / 1024),
      recall(want, select_all<ApproximateInt8Indexer<bf16>>(data, keys, int8)),
      recall(want, select_all<ReluDotIndexer<bf16, format::IndexKeyInt8>>(data, keys, int8)),
      recall(want, select_all<ReluDotIndexer<bf16, format::IndexKeyE4m3>>(
                       data, keys,
                       make_index_key_e4m3_cache<host>(e4m3_bytes.data(), Pages{1}, PageSize{keys},
                                                       dim))));
  std::fflush(stdout);
}

}  // namespace

int main() {
  std::printf(
      "| data | keys | ApproximateInt8Indexer | exact, int8 keys | exact, e4m3 keys |\n"
      "|---|---|---|---|---|\n");
  for (Kind const kind :
       {Kind{"normal", false, false}, Kind{"heavy tails", false, true},
        Kind{"shared directions, dominant heads", true, false}, Kind{"both", true, true}}) {
    for (index_t const keys : {8192, 65536, 262144}) print_row(kind, keys);
  }
}
