// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda/std/expected>

#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

/// Kinds of refusal. docs/errors.md says for each what a caller can do.
enum class Errc : std::uint8_t {
  ok,
  bad_shape,            ///< an extent does not fit the others or the planned Shape
  bad_stride,           ///< the innermost stride is not 1, or a stride makes elements overlap
  bad_value,            ///< a scalar is outside its range
  missing_input,        ///< a full layer without indexer inputs, a null pointer, ...
  bad_schedule,         ///< a share policy or a stage cut without a source for some layer
  stale_selection,      ///< the selection in the state belongs to another forward, batch or layer
  workspace_too_small,  ///< `expected` is the minimum in bytes
  unsupported,          ///< this back end cannot run this shape; `what` says why
  backend_error,        ///< the back end's own launch failed; `cuda_error` holds its code
};

/// The kind as it is spelled in code, for messages.
constexpr char const* name(Errc code) noexcept {
  switch (code) {
    case Errc::ok:
      return "ok";
    case Errc::bad_shape:
      return "bad_shape";
    case Errc::bad_stride:
      return "bad_stride";
    case Errc::bad_value:
      return "bad_value";
    case Errc::missing_input:
      return "missing_input";
    case Errc::bad_schedule:
      return "bad_schedule";
    case Errc::stale_selection:
      return "stale_selection";
    case Errc::workspace_too_small:
      return "workspace_too_small";
    case Errc::unsupported:
      return "unsupported";
    case Errc::backend_error:
      return "backend_error";
  }
  return "unknown";
}

/// Outcome of a call. Trivially copyable; `what` has static storage and names the extent, field
/// or policy at fault. `expected` and `got` are numbers whose meaning `what` states.
struct [[nodiscard]] Status {
  Errc code = Errc::ok;
  int cuda_error = 0;
  char const* what = "";
  std::int32_t layer = -1;  ///< -1: not tied to a layer
  std::int64_t expected = 0;
  std::int64_t got = 0;

  constexpr bool ok() const noexcept { return code == Errc::ok; }

  constexpr Status at_layer(std::int32_t number) const noexcept {
    Status status = *this;
    status.layer = number;
    return status;
  }
};
static_assert(std::is_trivially_copyable_v<Status>);

constexpr Status failure(Errc code, char const* what, std::int64_t expected = 0,
                         std::int64_t got = 0) noexcept {
  return Status{code, 0, what, -1, expected, got};
}

/// A value or the reason why there is none.
template <class T>
using Result = cuda::std::expected<T, Status>;

/// Turns a failure into any Result.
constexpr cuda::std::unexpected<Status> refuse(Status status) noexcept {
  return cuda::std::unexpected<Status>(status);
}

}  // namespace v0
}  // namespace indexshare
