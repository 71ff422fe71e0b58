// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/checkpoint_error.hpp>
#include <indexshare/io/detail/checkpoint_index.hpp>
#include <indexshare/io/safetensors.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

/// A tensor of a checkpoint and the path of the file that holds it. `entry.data` is valid while the
/// Checkpoint lives.
struct CheckpointTensor {
  SafetensorsEntry entry;
  std::string file;
};

/// The safetensors files of a model's directory as one set of tensors. Moves, but does not copy;
/// moving leaves the data of tensors where they are.
///
/// With an index, a file is opened (mapped) when a tensor of it is first asked for, so that some
/// layers of a large model can be had without the rest being opened, or even there. Const calls may
/// come from several threads. The files must stay as they are meanwhile, see SafetensorsFile.
class Checkpoint {
 public:
  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;

  /// Takes `model.safetensors.index.json` if there is one; else `model.safetensors`; else the only
  /// `*.safetensors` file.
  /// Errors: no such directory; none of these; several files without an index; an index that
  /// does not name the `model.safetensors` beside it; an index or a single file that cannot be
  /// read, see `find`.
  static CheckpointResult<Checkpoint> open(std::string const& directory) {
    std::error_code error;
    if (!std::filesystem::is_directory(directory, error)) {
      return detail::refuse({directory, -1, "", "no directory", "a checkpoint's directory"});
    }
    std::filesystem::path const root(directory);
    bool const has_single = std::filesystem::exists(root / single_name, error);
    // an index that is a link into nothing is an index that cannot be read
    if (std::filesystem::exists(
            std::filesystem::symlink_status(root / detail::checkpoint_index_name, error))) {
      return open_index(root, has_single);
    }
    if (has_single) return open_single(directory, (root / single_name).string());
    auto const files = list_files(root);
    if (!files) return detail::refuse(files.error());
    if (files->size() == 1) return open_single(directory, files->front());
    if (files->empty()) {
      return detail::refuse({directory, -1, "", "no safetensors file", "model.safetensors"});
    }
    return detail::refuse({directory, -1, "",
                           std::to_string(files->size()) + " safetensors files and no index",
                           detail::checkpoint_index_name});
  }

  std::string const& directory() const noexcept { return directory_; }

  bool has(std::string const& tensor) const { return index_.tensor.contains(tensor); }

  /// Whether the name of any tensor begins with `prefix`.
  bool has_any(std::string const& prefix) const {
    auto const first = index_.tensor.lower_bound(prefix);
    return first != index_.tensor.end() && first->first.starts_with(prefix);
  }

  /// Names of the tensors that begin with `prefix`, ascending. Opens no file.
  std::vector<std::string> names(std::string const& prefix = {}) const {
    std::vector<std::string> found;
    for (auto it = index_.tensor.lower_bound(prefix);
         it != index_.tensor.end() && it->first.starts_with(prefix); ++it) {
      found.push_back(it->first);
    }
    return found;
  }

  /// Errors: no such tensor; a file that is missing or cannot be read as safetensors; a file that
  /// lacks a tensor the index places in it, or has one that the index does not place there.
  CheckpointResult<CheckpointTensor> find(std::string const& tensor) const {
    auto const found = index_.tensor.find(tensor);
    if (found == index_.tensor.end()) {
      return detail::refuse({directory_, -1, tensor, "no such tensor", "it in the checkpoint"});
    }
    auto file = opened(found->second);
    if (!file) {
      CheckpointError error = std::move(file.error());
      if (error.tensor.empty()) error.tensor = tensor;  // why the file was needed
      return detail::refuse(std::move(error));
    }
    return CheckpointTensor{(*file)->tensors().at(tensor), path_of(found->second)};
  }

  /// Opens every file that is not open yet. Errors: as for `find`.
  CheckpointResult<void> open_all() const {
    for (std::size_t number = 0; number < index_.files.size(); ++number) {
      if (auto const file = opened(number); !file) return detail::refuse(file.error());
    }
    return {};
  }

  /// How many of the checkpoint's files are open.
  std::size_t open_files() const {
    std::lock_guard const lock(shards_->mutex);
    return static_cast<std::size_t>(
        std::count_if(shards_->files.begin(), shards_->files.end(),
                      [](auto const& file) { return file.has_value(); }));
  }

 private:
  static constexpr char const* single_name = "model.safetensors";

  /// Grows under the lock, never shrinks; the files stay where they are.
  struct Shards {
    std::mutex mutex;
    std::vector<std::optional<SafetensorsFile>> files;
  };

  Checkpoint(std::string directory, detail::CheckpointIndex index)
      : directory_(std::move(directory)),
        index_(std::move(index)),
        shards_(std::make_unique<Shards>()) {
    shards_->files.resize(index_.files.size());
  }

  static CheckpointResult<Checkpoint> open_index(std::filesystem::path const& root,
                                                 bool has_single) {
    std::string const path = (root / detail::checkpoint_index_name).string();
    auto index = detail::read_checkpoint_index(path);
    if (!index) return detail::refuse(std::move(index.error()));
    auto const& files = index->files;
    if (has_single && std::find(files.begin(), files.end(), single_name) == files.end()) {
      return detail::refuse({path, -1, "", "an index of other files than model.safetensors",
                             "one of the two: the directory holds two checkpoints"});
    }
    return Checkpoint(root.string(), std::move(*index));
  }

  static CheckpointResult<Checkpoint> open_single(std::string const& directory,
                                                  std::string const& path) {
    auto file = SafetensorsFile::open(path);
    if (!file) return detail::refuse(detail::checkpoint_error(file.error()));
    detail::CheckpointIndex index;
    index.files.push_back(std::filesystem::path(path).filename().string());
    for (auto const& [tensor, entry] : file->tensors()) index.tensor.emplace(tensor, 0);
    Checkpoint checkpoint(directory, std::move(index));
    checkpoint.shards_->files[0] = std::move(*file);
    return checkpoint;
  }

  static CheckpointResult<std::vector<std::string>> list_files(std::filesystem::path const& root) {
    std::error_code error;
    std::vector<std::string> files;
    std::filesystem::directory_iterator it(root, error);
    for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
      if (it->path().extension() == ".safetensors") files.push_back(it->path().string());
    }
    if (error) {
      return detail::refuse(
          {root.string(), -1, "", "a directory that cannot be listed", "a readable directory"});
    }
    return files;
  }

  std::string path_of(std::size_t number) const {
    return (std::filesystem::path(directory_) / index_.files[number]).string();
  }

  CheckpointResult<SafetensorsFile const*> opened(std::size_t number) const {
    std::lock_guard const lock(shards_->mutex);
    std::optional<SafetensorsFile>& slot = shards_->files[number];
    if (slot) return &*slot;
    auto file = SafetensorsFile::open(path_of(number));
    if (!file) return detail::refuse(detail::checkpoint_error(file.error()));
    if (auto const fits = check_shard(number, *file); !fits) return detail::refuse(fits.error());
    slot = std::move(*file);
    return &*slot;
  }

  /// The index places in a file what the file holds, neither more nor less.
  CheckpointResult<void> check_shard(std::size_t number, SafetensorsFile const& file) const {
    for (auto const& [tensor, entry] : file.tensors()) {
      auto const found = index_.tensor.find(tensor);
      if (found == index_.tensor.end() || found->second != number) {
        return detail::refuse({path_of(number), -1, tensor,
                               "a tensor that the index does not place in this file",
                               "file and index of the same checkpoint"});
      }
    }
    for (auto const& [tensor, place] : index_.tensor) {
      if (place == number && !file.has(tensor)) {
        return detail::refuse({path_of(number), -1, tensor, "no such tensor",
                               "it in this file, where the index places it"});
      }
    }
    return {};
  }

  std::string directory_;
  detail::CheckpointIndex index_;
  std::unique_ptr<Shards> shards_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
