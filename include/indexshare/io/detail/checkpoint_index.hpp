// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/checkpoint_error.hpp>
#include <indexshare/io/detail/json_path.hpp>
#include <indexshare/io/detail/mapped_file.hpp>
#include <indexshare/io/detail/strict_json.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

inline constexpr char const* checkpoint_index_name = "model.safetensors.index.json";

/// The index of a model with ten times the tensors of today's largest stays below.
inline constexpr std::size_t longest_checkpoint_index = 100'000'000;

/// Which file holds which tensor.
struct CheckpointIndex {
  std::vector<std::string> files;             ///< names without a directory, each once
  std::map<std::string, std::size_t> tensor;  ///< number of the file in `files`
};

/// A name that cannot lead out of the directory. Links may: caches of checkpoints consist of them.
inline bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name.find("..") == std::string_view::npos &&
         name.find_first_of(std::string_view("/\\:\0", 4)) == std::string_view::npos;
}

/// Reads the weight_map of an index file; everything else in it is metadata and not trusted.
/// Errors: no readable JSON object; a weight_map that is no object or empty; a tensor listed twice;
/// a file name that is none, or one of another directory.
inline CheckpointResult<CheckpointIndex> read_checkpoint_index(std::string const& path) {
  auto const file = MappedFile::open(path);
  if (!file) return refuse({path, -1, "", file.error(), "an index of safetensors files"});
  if (file->bytes().size() > longest_checkpoint_index) {
    return refuse({path, -1, "", std::to_string(file->bytes().size()) + " bytes",
                   "at most " + std::to_string(longest_checkpoint_index)});
  }
  auto const document = parse_object(file->text());
  if (!document) {
    ConfigError const& error = document.error();
    return refuse({path, -1, "", "at " + error.path + ", " + error.value, error.expected});
  }
  auto const map = document->find("weight_map");
  if (map == document->end() || !map->is_object() || map->empty()) {
    return refuse({path, -1, "", map == document->end() ? "no weight_map" : shown(*map),
                   "an object weight_map with a file name for each tensor"});
  }
  CheckpointIndex index;
  std::map<std::string, std::size_t> numbers;
  for (auto const& [tensor, name] : map->items()) {
    if (!name.is_string() || !is_plain_file_name(name.get_ref<std::string const&>())) {
      return refuse(
          {path, -1, tensor, shown(name), "the name of a file in the index's own directory"});
    }
    auto const [entry, is_new] = numbers.emplace(name.get<std::string>(), index.files.size());
    if (is_new) index.files.push_back(entry->first);
    index.tensor.emplace(tensor, entry->second);
  }
  return index;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
