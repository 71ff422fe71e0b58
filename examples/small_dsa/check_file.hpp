// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "choices.hpp"
#include "model.hpp"

#include <indexshare/io/safetensors.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// @file What the program that trained a model computed with it: train.py writes it beside the
/// weights, as check.safetensors.

namespace small_dsa {

struct CheckFile {
  std::vector<Sequence> sequences;
  std::vector<std::pair<Choices, std::vector<float>>> losses;  ///< [sequences, queries]
};

/// Errors: a file that cannot be read; a tensor of another type or shape than the model's task
/// asks for; losses of none, or of something that is no pattern of the model's layers.
inline Expected<CheckFile> read_check_file(Model const& model, std::string const& path) {
  auto const file = indexshare::io::SafetensorsFile::open(path);
  if (!file) return refuse(file.error().message());
  auto const key = file->tensors().find("key");
  index_t const count =
      key == file->tensors().end() || key->second.shape.empty() ? 1 : key->second.shape[0];
  auto const tokens = static_cast<std::size_t>(model.task().tokens());
  CheckFile check;
  check.sequences.resize(static_cast<std::size_t>(count));
  std::pair<char const*, std::vector<std::int32_t> Sequence::*> const lanes[] = {
      {"key", &Sequence::key},
      {"value", &Sequence::value},
      {"hops", &Sequence::hops},
      {"target", &Sequence::target}};
  for (auto const& [name, lane] : lanes) {
    auto const ids = file->read<std::int32_t>(name, {count, model.task().tokens()});
    if (!ids) return refuse(ids.error().message());
    for (std::size_t i = 0; i < check.sequences.size(); ++i) {
      auto const first = ids->begin() + static_cast<std::ptrdiff_t>(i * tokens);
      (check.sequences[i].*lane).assign(first, first + static_cast<std::ptrdiff_t>(tokens));
    }
  }
  constexpr std::string_view prefix = "loss.";
  for (auto const& [name, entry] : file->tensors()) {
    if (!name.starts_with(prefix)) continue;
    auto loss = file->read<float>(name, {count, model.task().queries});
    if (!loss) return refuse(loss.error().message());
    auto const choices = parse_choices(name.substr(prefix.size()));
    if (!choices || choices->size() != static_cast<std::size_t>(model.layers())) {
      return refuse(path + ": tensor " + name + ": expected a pattern of " +
                    std::to_string(model.layers()) + " layers behind " + std::string(prefix));
    }
    check.losses.emplace_back(*choices, std::move(*loss));
  }
  if (check.losses.empty()) return refuse(path + ": no tensor loss.PATTERN");
  return check;
}

}  // namespace small_dsa
