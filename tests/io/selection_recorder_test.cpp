// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/selection_file.hpp>
#include <indexshare/io/selection_recorder.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"
#include "memory.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace indexshare;
using io::SelectionFile;
using io::SelectionRecorder;

namespace {

SelectionRecorder recorder(std::int32_t layers, index_t top_k) {
  auto made = SelectionRecorder::make(layers, TopK{top_k});
  REQUIRE(made.has_value());
  return *made;
}

/// A state whose selection the test fills.
struct State {
  State(index_t rows, index_t top_k)
      : memory(SelectionState<Space::host>::size(Rows{rows}, TopK{top_k})),
        state(*SelectionState<Space::host>::make(memory.get(), Rows{rows}, TopK{top_k})) {}

  /// As a layer may leave it. @param rows  the picks of each
  void fill(std::int32_t layer, std::vector<std::vector<position_t>> const& rows) {
    auto const count = static_cast<index_t>(rows.size());
    auto const view = state.selection(count);
    for (index_t row = 0; row < count; ++row) {
      auto const& picks = rows[static_cast<std::size_t>(row)];
      view.counts(row) = static_cast<position_t>(picks.size());
      for (index_t i = 0; i < view.indices.extent(1); ++i) {
        bool const counts = i < view.counts(row);  // what lies behind is not to be read
        view.indices(row, i) = counts ? picks[static_cast<std::size_t>(i)] : 77;
      }
    }
    state.set_tag({{0, 0}, static_cast<std::int32_t>(rows.size()), layer});
  }

  test::Scratch memory;
  SelectionState<Space::host> state;
};

LengthView<Space::host> lengths_of(std::vector<position_t> const& lengths) {
  return make_lengths<Space::host>(lengths.data(), Rows{static_cast<index_t>(lengths.size())});
}

std::vector<position_t> entries_of(io::SelectionRows const& rows, index_t layer) {
  std::vector<position_t> entries;
  auto const view = rows.view();
  for (index_t row = 0; row < view.positions.extent(1); ++row) {
    for (index_t i = 0; i < view.positions.extent(2); ++i) {
      entries.push_back(view.positions(layer, row, i));
    }
  }
  return entries;
}

}  // namespace

TEST_CASE("Selection recorder: several forwards, full and shared layers, make one file") {
  SelectionRecorder out = recorder(4, 3);
  State state(5, 3);  // room for more rows than a forward has
  std::vector<position_t> const first{2, 6};
  REQUIRE(out.begin_forward(lengths_of(first)).ok());
  state.fill(0, {{0, 1}, {1, 2, 5}});
  REQUIRE(out.add(0, state.state).ok());
  REQUIRE(out.add(1, state.state).ok());  // reads layer 0's
  state.fill(3, {{0, 1}, {0, 3, 4}});
  REQUIRE(out.add(3, state.state).ok());
  REQUIRE(out.begin_forward(lengths_of({7})).ok());
  state.fill(3, {{0, 2, 6}});
  REQUIRE(out.add(3, state.state).ok());  // in any order
  state.fill(0, {{1, 5, 6}});
  REQUIRE(out.add(0, state.state).ok());
  REQUIRE(out.add(1, state.state).ok());
  CHECK(out.rows() == 3);
  CHECK(out.complete().ok());

  test::TempDirectory const directory;
  std::string const path = directory.file("s.safetensors");
  REQUIRE(out.write(path, "a test").has_value());
  auto const file = SelectionFile::open(path);
  INFO((file ? "" : file.error().message()));
  REQUIRE(file.has_value());
  CHECK(file->model_layers() == 4);
  CHECK(file->layers() == std::vector<std::int32_t>{0, 1, 3});
  CHECK(file->top_k() == 3);
  REQUIRE(file->rows() == 3);
  io::SelectionRows rows;
  REQUIRE(file->read_rows(0, 3, rows).has_value());
  CHECK(entries_of(rows, 0) == std::vector<position_t>{0, 1, -1, 1, 2, 5, 1, 5, 6});
  CHECK(entries_of(rows, 1) == entries_of(rows, 0));
  CHECK(entries_of(rows, 2) == std::vector<position_t>{0, 1, -1, 0, 3, 4, 0, 2, 6});
  CHECK(rows.view().lengths(0) == 2);
  CHECK(rows.view().lengths(2) == 7);
  CHECK_FALSE(std::filesystem::exists(path + ".part"));
}

TEST_CASE("Selection recorder: what does not fit is refused with its layer, and not recorded") {
  CHECK(SelectionRecorder::make(0, TopK{3}).error().code == Errc::bad_value);
  CHECK(SelectionRecorder::make(513, TopK{3}).error().code == Errc::bad_value);
  CHECK(SelectionRecorder::make(4, TopK{0}).error().code == Errc::bad_value);
  SelectionRecorder out = recorder(4, 3);
  State state(2, 3);
  CHECK(out.begin_forward(lengths_of({5, -1})).code == Errc::bad_value);
  REQUIRE(out.begin_forward(lengths_of({5, 9})).ok());

  Status const empty = out.add(2, state.state);
  CHECK(empty.code == Errc::stale_selection);
  CHECK(empty.layer == 2);
  state.fill(0, {{0, 1, 2}});
  Status const rows = out.add(2, state.state);
  CHECK(rows.code == Errc::bad_shape);
  CHECK(rows.layer == 2);
  CHECK(rows.expected == 2);
  CHECK(rows.got == 1);
  state.fill(0, {{0, 1, 2}, {3, 4, 8}});
  CHECK(out.add(4, state.state).code == Errc::bad_value);
  CHECK(out.add(-1, state.state).code == Errc::bad_value);
  state.state.selection(2).counts(1) = 4;
  CHECK(out.add(0, state.state).code == Errc::bad_value);
  State wide(2, 4);
  wide.fill(0, {{0, 1, 2}, {3, 4, 8}});
  Status const top_k = out.add(1, wide.state);
  CHECK(top_k.code == Errc::bad_shape);
  CHECK(top_k.got == 4);

  state.fill(0, {{0, 1, 2}, {3, 4, 8}});
  REQUIRE(out.add(0, state.state).ok());
  CHECK(out.add(0, state.state).code == Errc::bad_value);  // twice in a forward
  REQUIRE(out.add(1, state.state).ok());
  CHECK(out.complete().ok());
}

TEST_CASE("Selection recorder: every forward records the same layers") {
  SelectionRecorder out = recorder(3, 2);
  State state(1, 2);
  state.fill(0, {{0, 1}});
  REQUIRE(out.begin_forward(lengths_of({2})).ok());
  CHECK(out.begin_forward(lengths_of({2})).code == Errc::bad_shape);  // no layer at all
  REQUIRE(out.add(0, state.state).ok());
  REQUIRE(out.add(1, state.state).ok());
  REQUIRE(out.begin_forward(lengths_of({2})).ok());
  REQUIRE(out.add(0, state.state).ok());
  CHECK(out.add(2, state.state).code == Errc::bad_value);  // not in the first forward

  Status const missing = out.begin_forward(lengths_of({2}));
  CHECK(missing.code == Errc::bad_shape);
  CHECK(missing.layer == 1);
  CHECK(missing.expected == 2);
  CHECK(missing.got == 1);
  CHECK(out.rows() == 2);
  test::TempDirectory const directory;
  std::string const path = directory.file("s.safetensors");
  CHECK_THAT(out.write(path).error().message(),
             ContainsSubstring("s.safetensors: tensor selection.layer.1: got 1 rows, expected 2"));
  CHECK_FALSE(std::filesystem::exists(path));
  REQUIRE(out.add(1, state.state).ok());
  CHECK(out.write(path).has_value());
  CHECK_THAT(out.write(directory.file("no/such/file")).error().message(),
             ContainsSubstring("no/such/file"));
  CHECK_THAT(recorder(3, 2).write(path).error().message(), ContainsSubstring("no layer"));
}
