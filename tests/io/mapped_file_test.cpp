// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/detail/mapped_file.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"

#include <filesystem>
#include <string>
#include <type_traits>
#include <utility>

#if __has_include(<sys/stat.h>)
#include <sys/stat.h>
#endif

using Catch::Matchers::ContainsSubstring;
using indexshare::io::detail::MappedFile;

TEST_CASE("Mapped file: content, and its address when the object moves") {
  static_assert(!std::is_copy_constructible_v<MappedFile>);
  test::TempDirectory const directory;
  directory.write("file", "some text");
  auto file = MappedFile::open(directory.file("file")).value();
#if __has_include(<sys/mman.h>)
  CHECK(file.is_mapped());
#endif
  CHECK(file.text() == "some text");
  auto const* const data = file.bytes().data();
  MappedFile const moved = std::move(file);
  CHECK(moved.bytes().data() == data);
  CHECK(moved.text() == "some text");

  auto in_memory = MappedFile::of("other");
  auto const* const before = in_memory.bytes().data();
  MappedFile const kept = std::move(in_memory);
  CHECK(kept.bytes().data() == before);
  CHECK(kept.text() == "other");
  CHECK_FALSE(kept.is_mapped());
}

TEST_CASE("Mapped file: what cannot be mapped is read") {
  test::TempDirectory const directory;
  directory.write("empty", "");
  auto const empty = MappedFile::open(directory.file("empty")).value();
  CHECK(empty.bytes().empty());
  CHECK_FALSE(empty.is_mapped());
  std::string const made_up = "/proc/self/status";  // a regular file that states a size of 0
  if (!std::filesystem::exists(made_up)) SKIP("no /proc");
  auto const file = MappedFile::open(made_up).value();
  CHECK_FALSE(file.is_mapped());
  CHECK_THAT(std::string(file.text()), ContainsSubstring("Pid:"));
}

TEST_CASE("Mapped file: what is no regular file is refused without being opened") {
  test::TempDirectory const directory;
  CHECK_THAT(MappedFile::open(directory.file("missing")).error(), ContainsSubstring("no readable"));
  CHECK_THAT(MappedFile::open(directory.string()).error(), ContainsSubstring("a directory"));
#if __has_include(<sys/stat.h>)
  REQUIRE(::mkfifo(directory.file("pipe").c_str(), 0600) == 0);  // without a writer: would block
  CHECK_THAT(MappedFile::open(directory.file("pipe")).error(), ContainsSubstring("a pipe"));
#endif
  if (std::filesystem::exists("/dev/zero")) {
    CHECK_THAT(MappedFile::open("/dev/zero").error(), ContainsSubstring("device"));
  }
}
