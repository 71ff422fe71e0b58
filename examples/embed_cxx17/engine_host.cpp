// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <cstring>
#include <memory>
#include <vector>

namespace {

class HostDevice : public engine::Device {
 public:
  void* allocate(std::size_t bytes) override {
    std::size_t space = bytes + alignment;
    blocks_.push_back(std::make_unique<unsigned char[]>(space));
    void* memory = blocks_.back().get();
    return std::align(alignment, bytes, memory, space);
  }
  void upload(void* to, void const* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void* to, void const* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }

 private:
  static constexpr std::size_t alignment = indexshare::workspace_alignment;
  std::vector<std::unique_ptr<unsigned char[]>> blocks_;
};

}  // namespace

int main() {
  HostDevice device;
  return engine::run(device, *engine::host_stack(engine::config()));
}
