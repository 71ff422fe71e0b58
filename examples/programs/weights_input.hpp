// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "recording.hpp"

#include <indexshare/model_config.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// @file What `indexshare-demo --input` needs of a recording. All of it is looked at before a
/// weight is loaded.

namespace programs {

namespace weights_detail {

inline std::string wrong_input(Recording const& input, std::int32_t layer, Quantity id,
                               std::string const& found, std::string const& expected) {
  return input.name() + ": tensor " + tensor_name(layer, id) + ": got " + found + ", expected " +
         expected;
}

inline std::optional<std::string> check_hidden(Recording const& input,
                                               indexshare::ModelConfig const& model,
                                               std::int32_t layer) {
  constexpr Quantity id = Quantity::hidden;
  if (!input.has(layer, id)) {
    return wrong_input(input, layer, id, "no such tensor",
                       "the hidden states of every layer to run");
  }
  auto const hidden = input.tensor(layer, id);
  if (hidden.shape().back() != model.hidden_size) {
    return wrong_input(input, layer, id, std::to_string(hidden.shape().back()) + " lanes",
                       std::to_string(model.hidden_size) + ", the model's hidden_size");
  }
  std::vector<double> token(hidden.slice_size());
  for (std::size_t number = 0; number < hidden.slices(); ++number) {
    hidden.read_slice(number, token);
    auto const is_number = [](double x) { return std::isfinite(static_cast<float>(x)); };
    if (!std::all_of(token.begin(), token.end(), is_number)) {
      return wrong_input(input, layer, id, "no fp32 number in token " + std::to_string(number),
                         "numbers: nothing made of NaN or infinity could be compared");
    }
  }
  return std::nullopt;
}

inline std::optional<std::string> check_selections(Recording const& input,
                                                   indexshare::ModelConfig const& model,
                                                   std::int32_t layer) {
  constexpr Quantity id = Quantity::selection;
  if (!input.has(layer, id)) {
    return wrong_input(input, layer, id, "no such tensor",
                       "the selections to attend over (--attend-recorded)");
  }
  for (std::size_t row = 0; row < input.rows(); ++row) {
    std::size_t const count = input.selection(layer, row).size();
    if (count > static_cast<std::size_t>(model.index_topk)) {
      return wrong_input(
          input, layer, id, std::to_string(count) + " positions in row " + std::to_string(row),
          "at most " + std::to_string(model.index_topk) + ", the model's index_topk");
    }
  }
  return std::nullopt;
}

}  // namespace weights_detail

/// What is wrong with an input for these layers: hidden states that are absent, of another width,
/// or no numbers; selections, if they are asked for, that are absent or wider than the model's.
inline std::optional<std::string> check_input(Recording const& input,
                                              indexshare::ModelConfig const& model,
                                              std::vector<std::int32_t> const& layers,
                                              bool selections) {
  if (selections && input.attends_recorded()) {
    return input.name() + ": its attention is over the selections of another recording " +
           "(attention_selection); attend over those of that one";
  }
  for (std::int32_t const layer : layers) {
    auto wrong = weights_detail::check_hidden(input, model, layer);
    if (!wrong && selections) wrong = weights_detail::check_selections(input, model, layer);
    if (wrong) return wrong;
  }
  return std::nullopt;
}

}  // namespace programs
