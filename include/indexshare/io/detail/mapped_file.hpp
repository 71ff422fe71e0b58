// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda/std/expected>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#if __has_include(<sys/mman.h>)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// The content of a regular file, read-only: mapped where the system can, else read into memory.
/// Moves without changing its address.
///
/// A mapped file must stay as it is while this object lives. If somebody truncates it, touching
/// what is gone raises SIGBUS, which ends the program; if somebody writes into it, the content may
/// change under the reader. Replacing the file under its name (rename) or deleting it does no harm.
class MappedFile {
 public:
  /// Errors: what was found instead of a readable regular file. Pipes and devices are refused: they
  /// can block, or never end.
  static cuda::std::expected<MappedFile, std::string> open(std::string const& path) {
    std::error_code error;
    auto const status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) return refuse("no readable file");
    if (std::filesystem::is_directory(status)) return refuse("no readable file, but a directory");
    if (!std::filesystem::is_regular_file(status)) {
      return refuse("no readable file, but a pipe or device");
    }
    if (MappedFile file; file.map(path)) return file;
    return read(path);
  }

  /// A content that is in memory already.
  static MappedFile of(std::string_view content) {
    MappedFile file;
    auto const* const begin = reinterpret_cast<std::byte const*>(content.data());
    file.owned_.assign(begin, begin + content.size());
    return file;
  }

  std::span<std::byte const> bytes() const noexcept {
    if (mapping_) return {mapping_.get(), mapping_.get_deleter().bytes};
    return owned_;
  }
  std::string_view text() const noexcept {
    return {reinterpret_cast<char const*>(bytes().data()), bytes().size()};
  }
  bool is_mapped() const noexcept { return mapping_ != nullptr; }

 private:
  struct Unmap {
    std::size_t bytes;  // of the mapping
    void operator()([[maybe_unused]] std::byte* data) const noexcept {
#if __has_include(<sys/mman.h>)
      ::munmap(data, bytes);
#endif
    }
  };

  MappedFile() = default;

  static cuda::std::unexpected<std::string> refuse(std::string found) {
    return cuda::std::unexpected<std::string>(std::move(found));
  }

  /// Whether the file could be mapped. An empty file, some network file systems and those that
  /// make their content up (/proc) cannot.
  bool map([[maybe_unused]] std::string const& path) {
#if __has_include(<sys/mman.h>)
    int const descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return false;
    struct stat status {};
    if (::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0 &&
        static_cast<std::uintmax_t>(status.st_size) <= std::numeric_limits<std::size_t>::max()) {
      auto const size = static_cast<std::size_t>(status.st_size);
      void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
      if (data != MAP_FAILED) mapping_ = {static_cast<std::byte*>(data), Unmap{size}};
    }
    ::close(descriptor);  // the mapping stays
#endif
    return mapping_ != nullptr;
  }

  static cuda::std::expected<MappedFile, std::string> read(std::string const& path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) return refuse("no readable file");
    MappedFile file;
    char block[1 << 16];
    while (stream.read(block, sizeof block), stream.gcount() > 0) {
      auto const* const begin = reinterpret_cast<std::byte const*>(block);
      file.owned_.insert(file.owned_.end(), begin, begin + stream.gcount());
    }
    if (stream.bad()) return refuse("a read error");
    return file;
  }

  std::unique_ptr<std::byte, Unmap> mapping_;  // null: the content is in owned_
  std::vector<std::byte> owned_;
};

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
