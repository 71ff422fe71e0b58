// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/indexcache/overlap_matrix.hpp>
#include <indexshare/io/safetensors_format.hpp>
#include <indexshare/io/selection_file.hpp>
#include <indexshare/io/selection_overlap.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "thread_pool.hpp"

/// @file The overlaps of all files that a user names.

namespace programs {

/// What was counted in all files together.
struct OverlapMeasurement {
  std::vector<std::string> files;
  std::int32_t model_layers = 0;
  indexshare::index_t top_k = 0;
  indexshare::indexcache::OverlapCounts counts{0};
  indexshare::indexcache::OverlapMatrix matrix;
};

/// What all files must have in common.
struct SelectionKind {
  std::string file;
  std::int32_t model_layers = 0;
  std::vector<std::int32_t> layers;
  indexshare::index_t top_k = 0;
};

/// The named files; for a directory its *.safetensors files in the order of their names.
/// Errors: a directory without any, or one that cannot be read.
inline Parsed<std::vector<std::string>> selection_files(std::vector<std::string> const& words) {
  std::vector<std::string> files;
  for (std::string const& word : words) {
    std::error_code error;
    if (!std::filesystem::is_directory(word, error)) {
      files.push_back(word);
      continue;
    }
    std::vector<std::string> found;
    for (std::filesystem::directory_iterator entry(word, error), end; !error && entry != end;
         entry.increment(error)) {
      if (entry->path().extension() == ".safetensors") found.push_back(entry->path().string());
    }
    if (error) return reject("files", "cannot read the directory " + programs::quoted(word));
    if (found.empty())
      return reject("files", "no *.safetensors in the directory " + programs::quoted(word));
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

namespace overlap_detail {

using FileError = indexshare::io::SafetensorsError;
using indexshare::io::SelectionFile;

inline std::string list_text(std::vector<std::int32_t> const& layers) {
  std::string text;
  for (std::int32_t const layer : layers) text += (text.empty() ? "" : " ") + std::to_string(layer);
  return text;
}

/// What differs between a file and the first one, or nothing.
inline std::optional<FileError> difference(SelectionFile const& file, SelectionKind const& first) {
  std::string const as_first = ", as in " + first.file;
  auto const differs = [&](std::string const& what, std::string const& got,
                           std::string const& expected) {
    return FileError{file.name(), "", what + got, what + expected + as_first};
  };
  if (file.model_layers() != first.model_layers)
    return differs("layers ", std::to_string(file.model_layers()),
                   std::to_string(first.model_layers));
  if (file.top_k() != first.top_k)
    return differs("top_k ", std::to_string(file.top_k()), std::to_string(first.top_k));
  if (file.layers() != first.layers)
    return differs("recorded layers ", list_text(file.layers()), list_text(first.layers));
  return std::nullopt;
}

}  // namespace overlap_detail

/// Opens every file, so that a wrong one is found before any is counted.
/// @param files  at least one
/// Errors: those of SelectionFile; files with other layers or another top_k.
inline cuda::std::expected<SelectionKind, indexshare::io::SafetensorsError> check_selection_files(
    std::vector<std::string> const& files) {
  using namespace overlap_detail;
  SelectionKind first;
  for (std::string const& name : files) {
    auto const file = SelectionFile::open(name);
    if (!file) return cuda::std::unexpected<FileError>(file.error());
    if (first.file.empty())
      first = {file->name(), file->model_layers(), file->layers(), file->top_k()};
    if (auto const other = difference(*file, first))
      return cuda::std::unexpected<FileError>(*other);
  }
  return first;
}

/// Counts all rows of all files, one file after the other, on the pool's threads.
/// @param kind  what `check_selection_files` found in them
/// Errors: those of SelectionFile and count_overlap; a file that has changed since.
inline cuda::std::expected<OverlapMeasurement, indexshare::io::SafetensorsError> measure_overlap(
    std::vector<std::string> const& files, SelectionKind const& kind,
    indexshare::indexcache::OverlapOptions options, ThreadPool& pool) {
  using namespace overlap_detail;
  indexshare::indexcache::OverlapCounts total(static_cast<indexshare::index_t>(kind.layers.size()));
  for (std::string const& name : files) {
    auto const file = SelectionFile::open(name);
    if (!file) return cuda::std::unexpected<FileError>(file.error());
    if (auto const changed = difference(*file, kind))
      return cuda::std::unexpected<FileError>(*changed);
    auto const counts = indexshare::io::count_overlap(*file, options, PoolFor{&pool});
    if (!counts) return cuda::std::unexpected<FileError>(counts.error());
    [[maybe_unused]] auto const merged = total.merge(*counts);  // of as many layers
  }
  auto matrix = indexshare::indexcache::overlap_matrix(total, kind.layers);
  if (!matrix)
    return cuda::std::unexpected<FileError>(
        FileError{kind.file, "", matrix.error().what, "overlaps of ascending layers"});
  return OverlapMeasurement{files, kind.model_layers, kind.top_k, total, std::move(*matrix)};
}

}  // namespace programs
