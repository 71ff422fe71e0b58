// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/status.hpp>

#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_templated.hpp>

#include "status_text.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace test {

/// CHECK_THAT(status, succeeded()).
struct Succeeded : Catch::Matchers::MatcherGenericBase {
  bool match(indexshare::Status const& status) const { return status.ok(); }
  std::string describe() const override { return "is ok"; }
};
inline Succeeded succeeded() { return {}; }

/// CHECK_THAT(status, refused(Errc::bad_shape, "part of the text").at(layer).naming(4, 5)).
class Refused : public Catch::Matchers::MatcherGenericBase {
 public:
  Refused(indexshare::Errc code, std::string part) : code_(code), part_(std::move(part)) {}

  Refused at(std::int32_t layer) && {
    layer_ = layer;
    return std::move(*this);
  }
  Refused naming(std::int64_t expected, std::int64_t got) && {
    numbers_ = std::pair(expected, got);
    return std::move(*this);
  }

  bool match(indexshare::Status const& status) const {
    return status.code == code_ && std::string(status.what).find(part_) != std::string::npos &&
           (!layer_ || *layer_ == status.layer) &&
           (!numbers_ || *numbers_ == std::pair(status.expected, status.got));
  }
  std::string describe() const override {
    std::string text = std::string("is ") + name(code_) + " about \"" + part_ + '"';
    if (layer_) text += ", layer " + std::to_string(*layer_);
    if (numbers_) {
      text += ", expected " + std::to_string(numbers_->first) + ", got " +
              std::to_string(numbers_->second);
    }
    return text;
  }

 private:
  indexshare::Errc code_;
  std::string part_;
  std::optional<std::int32_t> layer_;
  std::optional<std::pair<std::int64_t, std::int64_t>> numbers_;
};
inline Refused refused(indexshare::Errc code, std::string part = "") {
  return {code, std::move(part)};
}

}  // namespace test
