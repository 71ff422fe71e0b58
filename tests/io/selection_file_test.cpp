// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/selection_file.hpp>
#include <indexshare/io/selection_overlap.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"
#include "selections.hpp"
#include "thread_pool.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
using namespace indexshare;
using io::SafetensorsWriter;
using io::SelectionFile;
using io::SelectionRows;
using test::MadeSelections;

namespace {

SelectionFile file_of(SafetensorsWriter const& writer) {
  auto file = SelectionFile::parse("sample", writer.bytes().value());
  INFO((file ? "" : file.error().message()));
  REQUIRE(file.has_value());
  return std::move(*file);
}

/// Why such a file is not opened.
std::string refusal(SafetensorsWriter const& writer) {
  auto const file = SelectionFile::parse("sample", writer.bytes().value());
  REQUIRE_FALSE(file.has_value());
  CHECK_THAT(file.error().message(), StartsWith("sample: "));
  return file.error().message();
}

/// Why its rows are not read.
std::string row_refusal(MadeSelections const& made) {
  SelectionFile const file = file_of(made.writer());
  SelectionRows rows;
  auto const read = file.read_rows(0, file.rows(), rows);
  REQUIRE_FALSE(read.has_value());
  auto const counted = io::count_overlap(file, {}, SerialFor{});
  REQUIRE_FALSE(counted.has_value());
  CHECK(counted.error().message() == read.error().message());
  return read.error().message();
}

/// Range by range from the last one, on the calling thread.
struct BackwardFor {
  static constexpr int concurrency() noexcept { return 1; }
  template <class F>
  void operator()(index_t count, F const& f) const noexcept {
    for (index_t i = count; i > 0; --i) f(i - 1, i, 0);
  }
};
static_assert(ParallelFor<BackwardFor>);

/// A file that says what is given here, with a selection of layer 1: 2 rows of 3.
SafetensorsWriter small_file(std::string const& format = "indexshare-selections-1",
                             std::string const& layers = "4", std::string const& top_k = "3") {
  SafetensorsWriter writer;
  writer.metadata("format", format);
  writer.metadata("layers", layers);
  writer.metadata("top_k", top_k);
  writer.add("selection.layer.1", {2, 3}, std::vector<std::int32_t>{0, 1, 2, 5, -1, 3});
  return writer;
}

MadeSelections const three_layers{
    3, 2, 3, {4, 0, -1, -1, -1, 1, 0, 4, 2, 1, 0, -1, 2, 4, 3, 0, -1, -1}, {5, 2},
};

}  // namespace

TEST_CASE("Selection file: what was written is read, in any blocks of rows") {
  auto const made = test::random_selections(12, 9, 4, 20, false, 1);  // names not in order: 10 < 2
  SelectionFile const file = file_of(made.writer());
  CHECK(file.model_layers() == 12);
  REQUIRE(file.layers().size() == 12);
  CHECK(file.layers()[2] == 2);
  CHECK(file.layers()[11] == 11);
  CHECK(file.top_k() == 4);
  CHECK(file.rows() == 9);
  CHECK(file.has_lengths());
  SelectionRows rows;
  for (auto const& [first, count] : {std::pair<index_t, index_t>{0, 9}, {2, 5}, {8, 1}, {3, 0}}) {
    CAPTURE(first, count);
    REQUIRE(file.read_rows(first, count, rows).has_value());
    auto const view = rows.view();
    REQUIRE(view.positions.extent(0) == 12);
    REQUIRE(view.positions.extent(1) == count);
    REQUIRE(view.positions.extent(2) == 4);
    REQUIRE(view.lengths.extent(0) == count);
    index_t wrong = 0;
    for (index_t row = 0; row < count; ++row) {
      wrong += view.lengths(row) != made.lengths[static_cast<std::size_t>(first + row)];
      for (index_t layer = 0; layer < 12; ++layer) {
        for (index_t i = 0; i < 4; ++i)
          wrong += view.positions(layer, row, i) != made.at(layer, first + row, i);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("Selection file: layers that were not recorded leave gaps") {
  auto writer = small_file();
  writer.add("selection.layer.3", {2, 3}, std::vector<std::int32_t>(6, -1));
  SelectionFile const file = file_of(writer);
  CHECK(file.model_layers() == 4);
  CHECK(file.layers() == std::vector<std::int32_t>{1, 3});
  CHECK_FALSE(file.has_lengths());
}

TEST_CASE("Selection file: what it says about itself is checked") {
  CHECK_THAT(refusal(SafetensorsWriter()), EndsWith("got no format, expected format "
                                                    "indexshare-selections-1"));
  CHECK_THAT(refusal(small_file("indexshare-selections-2")),
             ContainsSubstring("__metadata__: got format indexshare-selections-2"));
  CHECK_THAT(refusal(small_file("indexshare-selections-1", "0")),
             ContainsSubstring("got layers 0, expected layers from 1 to 512"));
  CHECK_THAT(refusal(small_file("indexshare-selections-1", "513")), ContainsSubstring("513"));
  CHECK_THAT(refusal(small_file("indexshare-selections-1", "4", "3.0")),
             ContainsSubstring("got top_k 3.0, expected top_k from 1 to"));
  CHECK_THAT(refusal(small_file("indexshare-selections-1", "4", "")), ContainsSubstring("top_k"));
  SafetensorsWriter none;
  none.metadata("format", "indexshare-selections-1");
  CHECK_THAT(refusal(none), ContainsSubstring("got no layers"));
}

TEST_CASE("Selection file: names, types and shapes of tensors are checked") {
  CHECK_THAT(refusal(small_file("indexshare-selections-1", "1")),
             ContainsSubstring("tensor selection.layer.1: got a tensor of this name, expected "
                               "selection.layer.0 to selection.layer.0 or lengths"));
  CHECK_THAT(
      refusal(small_file("indexshare-selections-1", "4", "2")),
      ContainsSubstring("tensor selection.layer.1: got shape [2, 3], expected shape [2, 2]"));
  for (std::string const name : {"selection.layer.01", "selection.layer.+1", "selection.layer.",
                                 "selections.layer.1", "layers"}) {
    auto writer = small_file();
    writer.add(name, {2, 3}, std::vector<std::int32_t>(6, -1));
    CHECK_THAT(refusal(writer), ContainsSubstring("tensor " + name + ": "));
  }
  auto writer = small_file();
  writer.add("selection.layer.2", {3, 3}, std::vector<std::int32_t>(9, -1));
  CHECK_THAT(refusal(writer), ContainsSubstring("tensor selection.layer.2: got shape [3, 3], "
                                                "expected shape [2, 3], the same rows"));
  writer = small_file();
  writer.add("selection.layer.2", {2, 3}, std::vector<std::int64_t>(6, -1));
  CHECK_THAT(refusal(writer), ContainsSubstring("selection.layer.2: got dtype I64, expected I32"));
  writer = small_file();
  writer.add("selection.layer.0", {}, std::vector<std::int32_t>(1, -1));
  CHECK_THAT(refusal(writer), ContainsSubstring("selection.layer.0: got shape [], expected shape "
                                                "[rows, 3]"));
  writer = small_file();
  writer.add("lengths", {3}, std::vector<std::int32_t>(3, 9));
  CHECK_THAT(refusal(writer), ContainsSubstring("selection.layer.1: got shape [2, 3]"));
  writer = small_file();
  writer.add("lengths", {2}, std::vector<std::int32_t>{9, -4});
  CHECK_THAT(refusal(writer), ContainsSubstring("tensor lengths: got -4 in row 1"));
  SafetensorsWriter empty;
  empty.metadata("format", "indexshare-selections-1");
  empty.metadata("layers", "2");
  empty.metadata("top_k", "3");
  CHECK_THAT(refusal(empty), ContainsSubstring("got no selection"));
  CHECK_THAT(SelectionFile::open("/no/such/file").error().message(), StartsWith("/no/such/file: "));
}

TEST_CASE("Selection file: faults in rows name tensor, row and entry") {
  REQUIRE(io::count_overlap(file_of(three_layers.writer()), {}, SerialFor{}).has_value());
  MadeSelections made = three_layers;
  made.at(1, 0, 2) = 4;  // 0, 4, 4: ascending but for the repeat
  CHECK_THAT(row_refusal(made),
             ContainsSubstring("tensor selection.layer.1: got position 4 twice in row 0, expected "
                               "distinct positions from 0 to 4, or -1 for none (the row sees 5"));
  made = three_layers;
  made.at(2, 0, 2) = 2;  // 2, 4, 2: far apart
  CHECK_THAT(row_refusal(made), ContainsSubstring("selection.layer.2: got position 2 twice"));
  made = three_layers;
  made.at(2, 1, 1) = 2;  // the row sees 2 keys
  CHECK_THAT(row_refusal(made), ContainsSubstring("selection.layer.2: got entry 2 in row 1"));
  made = three_layers;
  made.at(0, 1, 0) = -2;
  CHECK_THAT(row_refusal(made), ContainsSubstring("selection.layer.0: got entry -2 in row 1"));
  made = three_layers;
  made.lengths[1] = 0;
  CHECK_THAT(row_refusal(made), ContainsSubstring("in row 1, expected -1 alone"));
  made = three_layers;
  made.lengths.clear();
  made.at(0, 1, 2) = 1 << 26;
  CHECK_THAT(row_refusal(made), ContainsSubstring("got entry 67108864 in row 1"));
  made.at(0, 1, 2) = (1 << 26) - 1;
  CHECK(io::count_overlap(file_of(made.writer()), {}, SerialFor{}).has_value());
}

TEST_CASE("Selection file: a row that was refused does not spoil the next one") {
  MadeSelections made = three_layers;
  made.at(0, 0, 2) = 4;  // 4, 0, 4
  SelectionFile const file = file_of(made.writer());
  SelectionRows rows;
  REQUIRE_FALSE(file.read_rows(0, 1, rows).has_value());
  CHECK(file.read_rows(1, 1, rows).has_value());
}

TEST_CASE("Overlap of a file: the same on 1, 2 and 7 threads, and as in memory") {
  // A row of 90 layers with 700 picks takes a quarter of what is read at once: several blocks.
  auto const made = test::random_selections(90, 19, 700, 3000, true, 2);
  SelectionFile const file = file_of(made.writer());
  indexcache::OverlapCounter counter(90);
  REQUIRE(counter.add(made.view()).ok());
  CHECK(counter.counts().rows() > 15);
  for (int const threads : {1, 2, 7}) {
    programs::ThreadPool pool(threads);
    auto const counts = io::count_overlap(file, {}, programs::PoolFor{&pool});
    REQUIRE(counts.has_value());
    CHECK(*counts == counter.counts());
    auto const without = io::count_overlap(file, {.skip_short = true}, programs::PoolFor{&pool});
    REQUIRE(without.has_value());
    CHECK(without->rows() == counts->rows() - counts->short_rows() + counts->rows_left_out());
  }
}

TEST_CASE("Overlap of a file: of several faults the first row's is reported, on any threads") {
  auto made = test::random_selections(90, 40, 700, 3000, true, 3);
  for (index_t const row : {11, 17, 30, 38}) made.at(40, row, 5) = -7;
  SelectionFile const file = file_of(made.writer());
  std::string const first = "selection.layer.40: got entry -7 in row 11,";
  for (int const threads : {1, 2, 7}) {
    programs::ThreadPool pool(threads);
    auto const counts = io::count_overlap(file, {}, programs::PoolFor{&pool});
    REQUIRE_FALSE(counts.has_value());
    CHECK_THAT(counts.error().message(), ContainsSubstring(first));
  }
  auto const backward = io::count_overlap(file, {}, BackwardFor{});
  REQUIRE_FALSE(backward.has_value());
  CHECK_THAT(backward.error().message(), ContainsSubstring(first));
}

TEST_CASE("Overlap of a file: no rows, and data at an odd address") {
  MadeSelections none{2, 0, 3, {}, {}};
  auto const counts = io::count_overlap(file_of(none.writer()), {}, SerialFor{});
  REQUIRE(counts.has_value());
  CHECK(counts->rows() == 0);
  CHECK(counts->overlap(1, 0) == 0);

  // A header one byte longer shifts the data.
  std::string content = three_layers.writer().bytes().value();
  std::size_t const header = static_cast<unsigned char>(content[0]) +
                             256 * static_cast<std::size_t>(static_cast<unsigned char>(content[1]));
  content.insert(8 + header, " ");
  content[0] = static_cast<char>((header + 1) % 256);
  content[1] = static_cast<char>((header + 1) / 256);
  test::TempDirectory const directory;
  directory.write("odd.safetensors", content);
  auto const odd = SelectionFile::open(directory.file("odd.safetensors"));
  REQUIRE(odd.has_value());
  auto const even = io::count_overlap(file_of(three_layers.writer()), {}, SerialFor{});
  auto const shifted = io::count_overlap(*odd, {}, SerialFor{});
  REQUIRE((even.has_value() && shifted.has_value()));
  CHECK(*even == *shifted);
}
