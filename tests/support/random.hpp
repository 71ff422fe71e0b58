// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

/// @file Seeded numbers that are the same on every platform (std distributions are not).

namespace test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  std::uint64_t bits() noexcept {  // splitmix64
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) noexcept { return static_cast<std::size_t>(bits() % n); }
  double unit() noexcept { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  float uniform(float low, float high) noexcept {
    return static_cast<float>(low + (high - low) * unit());
  }
  float normal() noexcept {
    double const radius = std::sqrt(-2 * std::log(1 - unit()));
    return static_cast<float>(radius * std::cos(2 * std::numbers::pi * unit()));
  }
  std::vector<float> normals(std::size_t n) {
    std::vector<float> values(n);
    for (float& value : values) value = normal();
    return values;
  }

  template <class T>
  void shuffle(std::vector<T>& values) noexcept {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }
  template <class T>
  std::vector<T> permutation(std::size_t n) {
    std::vector<T> order(n);
    for (std::size_t i = 0; i < n; ++i) order[i] = static_cast<T>(i);
    shuffle(order);
    return order;
  }

 private:
  std::uint64_t state_;
};

}  // namespace test
