// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/distillation.hpp>
#include <indexshare/io/safetensors.hpp>

#include "executors.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Catch::Matchers::WithinAbs;
using indexshare::Errc;
using indexshare::HostExec;
using indexshare::index_t;
using indexshare::make_dense;
using indexshare::make_strided;
using indexshare::no_position;
using indexshare::position_t;
using indexshare::Space;
using indexshare::Status;
using indexshare::indexcache::AttentionColumns;
using indexshare::indexcache::DenseDistillation;
using indexshare::indexcache::DistillationLoss;
using indexshare::indexcache::DistillationOutput;
using indexshare::indexcache::SelectedDistillation;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

template <class To, class From>
std::vector<To> cast(std::vector<From> const& from) {
  std::vector<To> to;
  for (From const& value : from) to.push_back(static_cast<To>(value));
  return to;
}

/// Inputs and outputs of one call in dense memory. `top_k` 0: every visible key.
template <class T>
struct Problem {
  index_t layers = 0;
  index_t rows = 0;
  index_t keys = 0;
  index_t top_k = 0;
  std::vector<T> scores{};
  std::vector<T> attention{};
  std::vector<position_t> lengths{};
  std::vector<position_t> indices{};
  AttentionColumns columns = AttentionColumns::positions;

  std::vector<DistillationLoss> losses{};
  std::vector<T> gradient{};

  index_t width() const { return top_k > 0 ? top_k : keys; }
  index_t attention_width() const {
    return top_k > 0 && columns == AttentionColumns::entries ? top_k : keys;
  }

  DenseDistillation<T, T> dense() const {
    return {make_dense<Space::host, T const, 2>(scores.data(), {rows, keys}),
            make_dense<Space::host, position_t const, 1>(lengths.data(), {rows}),
            make_dense<Space::host, T const, 3>(attention.data(), {layers, rows, keys})};
  }
  SelectedDistillation<T, T> selected() const {
    return {
        make_dense<Space::host, T const, 2>(scores.data(), {rows, keys}),
        make_dense<Space::host, position_t const, 2>(indices.data(), {rows, top_k}),
        make_dense<Space::host, T const, 3>(attention.data(), {layers, rows, attention_width()}),
        columns};
  }
  DistillationOutput<T> output() {
    losses.assign(size(rows), {not_a_number, not_a_number, -1});
    gradient.assign(size(rows * width()), static_cast<T>(not_a_number));
    return {make_dense<Space::host, DistillationLoss, 1>(losses.data(), {rows}),
            make_dense<Space::host, T, 2>(gradient.data(), {rows, width()})};
  }

  template <class X = HostExec<>>
  Problem& solve(X const& x = {}) {
    auto const out = output();
    Status const status = top_k > 0 ? distill(x, selected(), out) : distill(x, dense(), out);
    REQUIRE_THAT(status, test::succeeded());
    return *this;
  }
};

/// Random attention, not normalised, and scores; a selection skips every third position and has
/// `no_position` at its end.
Problem<double> random_problem(index_t layers, index_t top_k, std::uint64_t seed) {
  test::Random random(seed);
  Problem<double> p{layers, 4, 12, top_k, {}, {}, {12, 5, 0, 9}, {}};
  p.scores = cast<double>(random.normals(size(p.rows * p.keys)));
  for (index_t i = 0; i < layers * p.rows * p.keys; ++i) p.attention.push_back(random.unit());
  for (index_t row = 0; row < p.rows; ++row) {
    position_t const length = p.lengths[size(row)];
    position_t next = 0;
    for (index_t j = 0; j < top_k; ++j, ++next) {
      if (next % 3 == 1) ++next;
      p.indices.push_back(next < length ? next : no_position);
    }
  }
  return p;
}

/// The positions of a row, from the definition.
std::vector<index_t> positions_of(Problem<double> const& p, index_t row) {
  std::vector<index_t> positions;
  for (index_t i = 0; i < p.width(); ++i) {
    if (p.top_k == 0 && i < p.lengths[size(row)]) positions.push_back(i);
    if (p.top_k > 0 && p.indices[size(row * p.top_k + i)] >= 0) {
      positions.push_back(p.indices[size(row * p.top_k + i)]);
    }
  }
  return positions;
}

double sum(std::vector<double> const& values) {
  double total = 0;
  for (double value : values) total += value;
  return total;
}

void normalise(std::vector<double>& values) {
  double const total = sum(values);
  for (double& value : values) value /= total;
}

/// Each served layer's distribution over the row's positions.
std::vector<std::vector<double>> distributions(Problem<double> const& p, index_t row) {
  std::vector<std::vector<double>> all(size(p.layers));
  for (index_t layer = 0; layer < p.layers; ++layer) {
    for (index_t s : positions_of(p, row)) {
      all[size(layer)].push_back(p.attention[size((layer * p.rows + row) * p.keys + s)]);
    }
    normalise(all[size(layer)]);
  }
  return all;
}

std::vector<double> mean_of(std::vector<std::vector<double>> const& all) {
  std::vector<double> mean(all[0].size());
  for (auto const& one : all) {
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += one[i] / static_cast<double>(all.size());
  }
  return mean;
}

double entropy(std::vector<double> const& p) {
  double h = 0;
  for (double x : p) h -= x * std::log(x);
  return h;
}

/// d loss(row) / d score by central differences, in the order of the row's positions.
template <class Value>
std::vector<double> differences(Problem<double> p, index_t row, Value const& value) {
  constexpr double step = 1e-5;
  std::vector<double> gradient;
  for (index_t s : positions_of(p, row)) {
    double& score = p.scores[size(row * p.keys + s)];
    double const before = score;
    score = before + step;
    double const above = value(p.solve().losses[size(row)]);
    score = before - step;
    double const below = value(p.solve().losses[size(row)]);
    score = before;
    gradient.push_back((above - below) / (2 * step));
  }
  return gradient;
}

double multi(DistillationLoss const& loss) { return loss.multi; }
double average(DistillationLoss const& loss) { return loss.average(); }

/// The row's gradient in the order of its positions; checks that the rest of it is 0.
std::vector<double> gradient_of(Problem<double> const& p, index_t row) {
  std::size_t const n = positions_of(p, row).size();
  auto const begin = p.gradient.begin() + row * p.width();
  CHECK(std::all_of(begin + static_cast<index_t>(n), begin + p.width(),
                    [](double g) { return g == 0; }));
  return {begin, begin + static_cast<index_t>(n)};
}

void check_close(std::vector<double> const& got, std::vector<double> const& expected,
                 double tolerance) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i);
    CHECK_THAT(got[i], WithinAbs(expected[i], tolerance));
  }
}

// ---- torch

class Fixtures {
 public:
  Fixtures() {
    auto file = indexshare::io::SafetensorsFile::open(std::string(INDEXSHARE_TEST_DATA_DIR) +
                                                      "/indexcache/distillation.safetensors");
    REQUIRE(file.has_value());
    for (auto const& [name, entry] : file->tensors()) shapes_.emplace(name, entry.shape);
    file_.push_back(std::move(*file));
  }

  std::vector<std::string> cases() const {
    std::vector<std::string> names;
    for (auto const& [name, shape] : shapes_) {
      if (name.ends_with(".scores")) names.push_back(name.substr(0, name.find('.')));
    }
    return names;
  }
  bool has(std::string const& tensor) const { return shapes_.contains(tensor); }
  template <class T>
  std::vector<T> read(std::string const& tensor) const {
    auto values = file_[0].read<T>(tensor);
    REQUIRE(values.has_value());
    return *values;
  }

  template <class T>
  Problem<T> problem(std::string const& name) const {
    auto const& shape = shapes_.at(name + ".attention");
    Problem<T> p{shape[0], shape[1], shape[2]};
    p.scores = cast<T>(read<double>(name + ".scores"));
    p.attention = cast<T>(read<double>(name + ".attention"));
    p.lengths = read<position_t>(name + ".lengths");
    if (has(name + ".indices")) {
      p.top_k = shapes_.at(name + ".indices")[1];
      p.indices = read<position_t>(name + ".indices");
    }
    return p;
  }

 private:
  std::vector<indexshare::io::SafetensorsFile> file_{};  // one; has no default constructor
  std::map<std::string, std::vector<index_t>> shapes_{};
};

/// The largest magnitude; infinity if there is a NaN.
template <class T>
double largest(std::vector<T> const& values) {
  double result = 0;
  for (T value : values) {
    double const magnitude = std::abs(static_cast<double>(value));
    result = std::isnan(magnitude) ? infinity : std::max(result, magnitude);
  }
  return result;
}

}  // namespace

TEMPLATE_TEST_CASE("Distillation: loss and gradient are those of torch's autograd", "", double,
                   float) {
  Fixtures const fixtures;
  auto const cases = fixtures.cases();
  CHECK(cases.size() == 9);
  for (auto const& name : cases) {
    INFO(name);
    auto p = fixtures.problem<TestType>(name);
    p.solve();
    // Scores enter the loss with weights whose magnitudes sum to 2, in differences that rounding
    // of the inputs moves by half a unit each; the rest is of the size of a few terms of order 1.
    double const unit = std::numeric_limits<TestType>::epsilon();
    double const tolerance = 4 * unit * (4 + largest(p.scores));
    auto const losses = fixtures.read<double>(name + ".losses");
    auto const averages = fixtures.read<double>(name + ".averages");
    for (std::size_t row = 0; row < size(p.rows); ++row) {
      INFO("row " << row);
      CHECK_THAT(p.losses[row].multi, WithinAbs(losses[row], tolerance));
      CHECK_THAT(p.losses[row].average(), WithinAbs(averages[row], tolerance));
    }
    check_close(cast<double>(p.gradient), fixtures.read<double>(name + ".gradient"), tolerance);
  }
}

TEST_CASE("Distillation: on a selection each layer is normalised before the mean") {
  Fixtures const fixtures;
  int seen = 0;
  for (auto const& name : fixtures.cases()) {
    if (!fixtures.has(name + ".indices")) continue;
    INFO(name);
    auto p = fixtures.problem<double>(name);
    p.solve();
    auto const wrong = fixtures.read<double>(name + ".renormalised_mean");
    std::vector<double> apart;
    for (std::size_t i = 0; i < wrong.size(); ++i) apart.push_back(p.gradient[i] - wrong[i]);
    if (p.layers == 1) {
      CHECK(largest(apart) < 1e-12);
    } else {
      CHECK(largest(apart) > 0.01);
      ++seen;
    }
  }
  CHECK(seen == 3);
}

// ---- the definition, in other words

TEST_CASE("Distillation: the gradient is the difference quotient of the loss") {
  for (index_t top_k : {0, 5}) {
    for (index_t layers : {1, 3}) {
      INFO("top_k " << top_k << ", layers " << layers);
      auto p = random_problem(layers, top_k, 7);
      p.solve();
      for (index_t row = 0; row < p.rows; ++row) {
        INFO("row " << row);
        check_close(gradient_of(p, row), differences(p, row, multi), 1e-9);
      }
    }
  }
}

TEST_CASE("Distillation: the loss from the mean attention has the same gradient (Proposition 1)") {
  for (index_t top_k : {0, 5}) {
    auto p = random_problem(4, top_k, 8);
    p.solve();
    for (index_t row = 0; row < p.rows; ++row) {
      check_close(gradient_of(p, row), differences(p, row, average), 1e-9);
    }
  }
}

TEST_CASE("Distillation: the divergence is that of Jensen and Shannon, whatever the scores") {
  for (index_t top_k : {0, 5}) {
    auto p = random_problem(3, top_k, 9);
    p.solve();
    auto other = p;
    for (double& score : other.scores) score = 3 - 2 * score;
    other.solve();
    for (index_t row : {0, 1, 3}) {
      INFO("row " << row);
      auto const all = distributions(p, row);
      double expected = entropy(mean_of(all));
      for (auto const& one : all) expected -= entropy(one) / 3;
      CHECK(expected > 0.01);
      CHECK_THAT(p.losses[size(row)].divergence, WithinAbs(expected, 1e-13));
      CHECK(p.losses[size(row)].multi != other.losses[size(row)].multi);
      CHECK(p.losses[size(row)].divergence == other.losses[size(row)].divergence);
    }
  }
}

TEST_CASE("Distillation: scores that equal the mean attention leave the divergence alone") {
  auto p = random_problem(3, 0, 10);
  auto const all = distributions(p, 1);
  auto const mean = mean_of(all);
  for (std::size_t s = 0; s < mean.size(); ++s) p.scores[12 + s] = std::log(mean[s]) + 5;
  p.solve();
  CHECK_THAT(p.losses[1].average(), WithinAbs(0, 1e-14));
  CHECK_THAT(p.losses[1].multi, WithinAbs(p.losses[1].divergence, 1e-14));
  CHECK(largest(gradient_of(p, 1)) < 1e-15);
}

TEST_CASE("Distillation: sums over heads do as well as means") {
  auto p = random_problem(2, 5, 11);
  auto scaled = p;
  for (std::size_t i = 0; i < scaled.attention.size(); ++i)
    scaled.attention[i] *= i % 48 < 12 ? 4 : 64;
  p.solve();
  scaled.solve();
  check_close(scaled.gradient, p.gradient, 1e-15);
}

// ---- edges

TEST_CASE("Distillation: keys without a score or without attention") {
  Problem<double> p{2, 5, 3, 0};
  p.lengths = {3, 3, 3, 3, 3};
  p.scores = {1,         -infinity,
              2,  // no attention at the key without a score
              1,         -infinity,
              2,  // attention there
              -infinity, -infinity,
              -infinity,  // no score at all
              1,         not_a_number,
              2,  //
              0,         0,
              0};  // one layer attends to one key
  p.attention = {.4, 0, .6, .4, .5, .1, .2, .3, .5, .2, .3, .5, 0, 1, 0,  //
                 .5, 0, .5, .4, .5, .1, .2, .3, .5, .2, .3, .5, 1, 0, 0};
  p.solve();
  double const q = 1 / (1 + std::exp(1.0));
  double const expected = (.4 * std::log(.4 / q) + .6 * std::log(.6 / (1 - q)) +
                           .5 * std::log(.5 / q) + .5 * std::log(.5 / (1 - q))) /
                          2;
  CHECK_THAT(p.losses[0].multi, WithinAbs(expected, 1e-15));
  check_close({p.gradient.begin(), p.gradient.begin() + 3}, {q - .45, 0, 1 - q - .55}, 1e-15);

  CHECK(p.losses[1].multi == infinity);
  CHECK(p.losses[1].divergence == 0);
  check_close({p.gradient.begin() + 3, p.gradient.begin() + 6}, {q - .4, -.5, 1 - q - .1}, 1e-15);

  CHECK(p.losses[2].multi == infinity);
  check_close({p.gradient.begin() + 6, p.gradient.begin() + 9}, {-.2, -.3, -.5}, 1e-15);

  CHECK(std::isnan(p.losses[3].multi));

  CHECK_THAT(p.losses[4].multi, WithinAbs(std::log(3.0), 1e-15));
  CHECK_THAT(p.losses[4].divergence, WithinAbs(std::log(2.0), 1e-15));
  check_close({p.gradient.begin() + 12, p.gradient.end()}, {1. / 3 - .5, 1. / 3 - .5, 1. / 3},
              1e-15);
}

TEST_CASE("Distillation: NaN attention does not pass for no attention") {
  Problem<double> p{1, 2, 2, 0};
  p.lengths = {2, 2};
  p.scores = {0, 1, 0, 1};
  p.attention = {not_a_number, 1, .5, .5};
  p.solve();
  CHECK(std::isnan(p.losses[0].multi));
  CHECK(p.losses[0].layers_without_mass == 0);
  CHECK(p.losses[1].multi > 0);
}

TEST_CASE(
    "Distillation: a layer without attention on the row's positions is left out and counted") {
  for (index_t top_k : {0, 5}) {
    INFO("top_k " << top_k);
    auto two = random_problem(2, top_k, 12);
    auto three = two;
    three.layers = 3;
    three.attention.insert(three.attention.begin(), 48, 0.0);
    two.solve();
    three.solve();
    check_close(three.gradient, two.gradient, 1e-15);
    for (std::size_t row : {0U, 1U, 3U}) {
      CHECK_THAT(three.losses[row].multi, WithinAbs(two.losses[row].multi, 1e-15));
      CHECK(three.losses[row].layers_without_mass == 1);
      CHECK(two.losses[row].layers_without_mass == 0);
    }
    std::fill(two.attention.begin(), two.attention.end(), 0.0);
    two.solve();
    CHECK(largest(two.gradient) == 0);
    CHECK(two.losses[0].multi == 0);
    CHECK(two.losses[0].layers_without_mass == 2);
  }
}

TEST_CASE("Distillation: rows without positions have loss 0") {
  for (index_t top_k : {0, 5}) {
    auto p = random_problem(2, top_k, 13);
    p.solve();
    CHECK(p.losses[2].multi == 0);
    CHECK(p.losses[2].divergence == 0);
    CHECK(gradient_of(p, 2).empty());
  }
}

TEST_CASE("Distillation: only the row's positions are read") {
  for (index_t top_k : {0, 5}) {
    INFO("top_k " << top_k);
    auto p = random_problem(2, top_k, 14);
    auto poisoned = p;
    for (index_t row = 0; row < p.rows; ++row) {
      auto const positions = positions_of(p, row);
      for (index_t s = 0; s < p.keys; ++s) {
        if (std::find(positions.begin(), positions.end(), s) != positions.end()) continue;
        poisoned.scores[size(row * p.keys + s)] = not_a_number;
        for (index_t layer : {0, 1}) {
          poisoned.attention[size((layer * p.rows + row) * p.keys + s)] = not_a_number;
        }
      }
    }
    p.solve();
    poisoned.solve();
    CHECK(poisoned.gradient == p.gradient);
    for (std::size_t row = 0; row < 4; ++row)
      CHECK(poisoned.losses[row].multi == p.losses[row].multi);
  }
}

TEST_CASE("Distillation: lengths and positions outside the keys") {
  auto p = random_problem(2, 0, 15);
  auto outside = p;
  outside.lengths = {1000, 5, -3, 9};
  p.solve();
  outside.solve();
  CHECK(outside.gradient == p.gradient);

  auto chosen = random_problem(2, 5, 15);
  auto stray = chosen;
  stray.indices[5 + 4] = 12;  // row 1 has an empty entry there
  REQUIRE(chosen.indices[5 + 4] == no_position);
  chosen.solve();
  stray.solve();
  CHECK(stray.gradient == chosen.gradient);
}

// ---- forms of one input

TEST_CASE("Distillation: attention in columns of positions, beside entries, and all gathered") {
  auto const wide = random_problem(3, 5, 16).solve();

  auto beside = wide;
  beside.columns = AttentionColumns::entries;
  beside.attention.assign(size(3 * 4 * 5), not_a_number);  // of empty entries
  Problem<double> gathered{3, 4, 5, 0};
  gathered.scores.assign(size(4 * 5), not_a_number);
  for (index_t row = 0; row < 4; ++row) {
    auto const positions = positions_of(wide, row);
    gathered.lengths.push_back(static_cast<position_t>(positions.size()));
    for (std::size_t j = 0; j < positions.size(); ++j) {
      std::size_t const entry = size(row * 5) + j;
      gathered.scores[entry] = wide.scores[size(row * 12 + positions[j])];
      for (index_t layer = 0; layer < 3; ++layer) {
        beside.attention[size(layer * 20) + entry] =
            wide.attention[size((layer * 4 + row) * 12 + positions[j])];
      }
    }
  }
  gathered.attention = beside.attention;
  beside.solve();
  gathered.solve();
  CHECK(beside.gradient == wide.gradient);
  CHECK(gathered.gradient == wide.gradient);
  for (std::size_t row = 0; row < 4; ++row) {
    CHECK(beside.losses[row].multi == wide.losses[row].multi);
    CHECK(gathered.losses[row].multi == wide.losses[row].multi);
  }
}

TEST_CASE("Distillation: strided views") {
  auto const p = random_problem(2, 0, 17).solve();
  std::vector<double> scores(4 * 20, not_a_number), attention(4 * 2 * 15, not_a_number),
      gradient(4 * 13, 7.0);
  std::vector<DistillationLoss> losses(8);
  for (std::size_t row = 0; row < 4; ++row) {
    for (std::size_t s = 0; s < 12; ++s) {
      scores[row * 20 + s] = p.scores[row * 12 + s];
      for (std::size_t layer : {0U, 1U}) {  // rows of layers, as an engine may record them
        attention[(row * 2 + layer) * 15 + s] = p.attention[(layer * 4 + row) * 12 + s];
      }
    }
  }
  Status const status = distill(
      HostExec<>{},
      DenseDistillation<double, double>{
          make_strided<Space::host, double const, 2>(scores.data(), {4, 12}, {20, 1}),
          p.dense().lengths,
          make_strided<Space::host, double const, 3>(attention.data(), {2, 4, 12}, {15, 30, 1})},
      DistillationOutput<double>{
          make_strided<Space::host, DistillationLoss, 1>(losses.data(), {4}, {2}),
          make_strided<Space::host, double, 2>(gradient.data(), {4, 12}, {13, 1})});
  REQUIRE_THAT(status, test::succeeded());
  for (std::size_t row = 0; row < 4; ++row) {
    CHECK(losses[2 * row].multi == p.losses[row].multi);
    CHECK(gradient[row * 13 + 12] == 7);
    for (std::size_t s = 0; s < 12; ++s) CHECK(gradient[row * 13 + s] == p.gradient[row * 12 + s]);
  }
}

using OtherExecutors = std::tuple<indexshare::ReferenceExec, test::Threads, test::Backward>;

TEMPLATE_LIST_TEST_CASE("Distillation: every executor of host memory, the same bits", "",
                        OtherExecutors) {
  for (index_t top_k : {0, 5}) {
    auto p = random_problem(3, top_k, 18);
    auto other = p;
    p.solve();
    other.solve(TestType{});
    CHECK(other.gradient == p.gradient);
    for (std::size_t row = 0; row < 4; ++row) {
      CHECK(other.losses[row].multi == p.losses[row].multi);
      CHECK(other.losses[row].divergence == p.losses[row].divergence);
    }
  }
}

// ---- refusals

namespace {

/// What a call with `in` says after `change(in, output)`, with nothing written.
template <class Inputs, class Change>
Status refusal(Problem<double>& p, Inputs in, Change const& change) {
  auto out = p.output();
  change(in, out);
  Status const status = distill(HostExec<>{}, in, out);
  CHECK(std::all_of(p.gradient.begin(), p.gradient.end(), [](double g) { return std::isnan(g); }));
  CHECK(std::isnan(p.losses[0].multi));
  return status;
}

}  // namespace

TEST_CASE("Distillation: refusals name the extent") {
  auto dense = random_problem(2, 0, 19);
  auto chosen = random_problem(2, 5, 19);
  double const* const a = dense.attention.data();
  using test::refused;

  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) {
                       in.attention = make_dense<Space::host, double const, 3>(a, {0, 4, 12});
                     }),
             refused(Errc::bad_shape, "served layers of the attention").naming(1, 0));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) {
                       in.attention = make_dense<Space::host, double const, 3>(a, {513, 4, 12});
                     }),
             refused(Errc::bad_shape, "served layers of the attention").naming(512, 513));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) {
                       in.attention = make_dense<Space::host, double const, 3>(a, {2, 3, 12});
                     }),
             refused(Errc::bad_shape, "rows of the attention").naming(4, 3));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) {
                       in.attention = make_dense<Space::host, double const, 3>(a, {2, 4, 11});
                     }),
             refused(Errc::bad_shape, "columns of the attention").naming(12, 11));
  CHECK_THAT(refusal(chosen, chosen.selected(),
                     [&](auto& in, auto&) { in.columns = AttentionColumns::entries; }),
             refused(Errc::bad_shape, "columns of the attention").naming(5, 12));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) { in.lengths = rows_of(in.lengths, 0, 3); }),
             refused(Errc::bad_shape, "lengths of the index scores").naming(4, 3));
  CHECK_THAT(refusal(chosen, chosen.selected(),
                     [&](auto& in, auto&) { in.indices = rows_of(in.indices, 0, 3); }),
             refused(Errc::bad_shape, "rows of the selection's indices").naming(4, 3));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto&, auto& out) { out.losses = rows_of(out.losses, 0, 3); }),
             refused(Errc::bad_shape, "rows of the losses").naming(4, 3));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto&, auto& out) { out.gradient = rows_of(out.gradient, 0, 3); }),
             refused(Errc::bad_shape, "rows of the gradient").naming(4, 3));
  CHECK_THAT(
      refusal(chosen, chosen.selected(),
              [&](auto&, auto& out) {
                out.gradient = make_dense<Space::host, double, 2>(chosen.gradient.data(), {4, 4});
              }),
      refused(Errc::bad_shape, "columns of the gradient").naming(5, 4));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto& in, auto&) {
                       in.scores = make_dense<Space::host, double const, 2>(
                           static_cast<double const*>(nullptr), {4, 12});
                     }),
             refused(Errc::missing_input, "index scores"));
  CHECK_THAT(refusal(dense, dense.dense(),
                     [&](auto&, auto& out) {
                       out.gradient = make_strided<Space::host, double, 2>(dense.gradient.data(),
                                                                           {4, 12}, {24, 2});
                     }),
             refused(Errc::bad_stride, "gradient"));
}

// ---- heads

TEST_CASE("Distillation: the mean over heads is normalised over the visible keys") {
  std::vector<float> const weights{.5F, .25F, 9, .5F, .75F, 9,  // row 0: two visible keys
                                   0,   0,    0, 0,   0,    0};
  std::vector<position_t> const lengths{2, 3};
  std::vector<double> attention(6, not_a_number);
  auto const in = make_dense<Space::host, float const, 3>(weights.data(), {2, 2, 3});
  auto const visible = make_dense<Space::host, position_t const, 1>(lengths.data(), {2});
  auto const out = make_dense<Space::host, double, 2>(attention.data(), {2, 3});
  REQUIRE_THAT(indexshare::indexcache::average_heads(HostExec<>{}, in, visible, out),
               test::succeeded());
  CHECK(attention == std::vector<double>{.5, .5, 0, 0, 0, 0});
  CHECK_THAT(indexshare::indexcache::average_heads(HostExec<>{}, in, visible, rows_of(out, 0, 1)),
             test::refused(Errc::bad_shape, "rows of the averaged attention").naming(2, 1));
}
