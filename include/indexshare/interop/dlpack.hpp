// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

/// @file Views from DLPack tensors, and DLPack tensors from views, without a copy. The structs are
/// those of the caller's dlpack.h, of any version: this header needs none, and takes their types as
/// template parameters.
/// @source the DLPack C ABI, versions 0.6 to 1.1

namespace indexshare {
inline namespace v0 {

/// The type code and width of an element in DLPack. Specialise it for an element type of your own.
struct DlpackType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;  ///< 0: the type has no name in DLPack
};
template <class T>
inline constexpr DlpackType dlpack_type{};
template <>
inline constexpr DlpackType dlpack_type<float>{2, 32};
template <>
inline constexpr DlpackType dlpack_type<fp16>{2, 16};
template <>
inline constexpr DlpackType dlpack_type<bf16>{4, 16};
template <>
inline constexpr DlpackType dlpack_type<e4m3>{10, 8};
template <>
inline constexpr DlpackType dlpack_type<position_t>{0, 32};
template <>
inline constexpr DlpackType dlpack_type<std::byte>{1, 8};

namespace detail {

inline constexpr std::int64_t dlpack_cpu = 1;
inline constexpr std::int64_t dlpack_cuda = 2;
inline constexpr std::int64_t dlpack_cuda_host = 3;
inline constexpr std::int64_t dlpack_cuda_managed = 13;
inline constexpr std::uint64_t dlpack_read_only = 1;
inline constexpr std::uint8_t dlpack_first_small_float = 7;  // codes since version 1.1

constexpr bool dlpack_reaches(Space space, std::int64_t device) noexcept {
  if (device == dlpack_cuda_managed) return true;
  return space == Space::host ? device == dlpack_cpu || device == dlpack_cuda_host
                              : device == dlpack_cuda;
}

/// Whether the last element's end is a number of bytes that an address can be off by.
template <std::size_t N>
constexpr bool dlpack_addressable(cuda::std::array<index_t, N> const& extents,
                                  cuda::std::array<index_t, N> const& strides,
                                  std::size_t element) noexcept {
  index_t room = std::numeric_limits<index_t>::max() / static_cast<index_t>(element) - 1;
  for (std::size_t i = 0; i < N; ++i) {
    index_t const steps = extents[i] - 1;
    if (steps > 0 && strides[i] > room / steps) return false;
    room -= steps * strides[i];
  }
  return true;
}

template <class DLTensor>
concept DlpackTensor = requires(DLTensor const& tensor) {
  tensor.data;
  tensor.device.device_type;
  tensor.ndim;
  tensor.dtype.lanes;
  tensor.byte_offset;
};
template <class Managed>
concept DlpackManaged = requires(Managed const& managed) {
  managed.dl_tensor;
  managed.deleter;
};

}  // namespace detail

/// A view of a DLTensor's memory: rank N, elements T, in space S. Owns nothing; the tensor's owner
/// must outlive it.
///
/// @tparam T  const for a reader. Strides are taken as they are: a view whose innermost stride is
///            not 1 is refused by the call that reads it, not here
/// Errors: unsupported (memory that S cannot reach), bad_shape (rank; an extent that is
/// negative or past all memory), bad_stride
/// (negative), bad_value (element type, lanes per element, alignment, a byte offset past all
/// memory),
/// missing_input (null data of a tensor that has elements, null shape).
template <Space S, class T, std::size_t N, detail::DlpackTensor DLTensor>
Result<Tensor<S, T, N>> from_dlpack(DLTensor const& tensor) noexcept {
  using namespace detail;
  constexpr DlpackType type = dlpack_type<std::remove_const_t<T>>;
  static_assert(type.bits != 0, "specialise dlpack_type for this element type");
  auto const device = static_cast<std::int64_t>(tensor.device.device_type);
  if (!dlpack_reaches(S, device)) {
    return refuse(failure(Errc::unsupported,
                          "device type of a DLPack tensor (1 CPU, 2 CUDA, 3 CUDA host)",
                          S == Space::host ? dlpack_cpu : dlpack_cuda, device));
  }
  if (tensor.ndim != static_cast<std::int32_t>(N)) {
    return refuse(failure(Errc::bad_shape, "rank of a DLPack tensor", static_cast<std::int64_t>(N),
                          tensor.ndim));
  }
  if (tensor.dtype.code != type.code) {
    return refuse(failure(Errc::bad_value, "element type code of a DLPack tensor", type.code,
                          tensor.dtype.code));
  }
  if (tensor.dtype.bits != type.bits || tensor.dtype.lanes != 1) {
    return refuse(failure(Errc::bad_value, "bits of a DLPack tensor's element, all lanes",
                          type.bits, std::int64_t{tensor.dtype.bits} * tensor.dtype.lanes));
  }
  if (N > 0 && tensor.shape == nullptr) {
    return refuse(failure(Errc::missing_input, "shape of a DLPack tensor"));
  }
  cuda::std::array<index_t, N> extents{};
  cuda::std::array<index_t, N> strides{};  // dense until others are stated
  index_t span = 1;
  bool empty = false;
  for (std::size_t i = N; i-- > 0;) {
    extents[i] = tensor.shape[i];
    strides[i] = span;
    if (extents[i] < 0 || extents[i] > std::numeric_limits<index_t>::max() / span) {
      return refuse(failure(Errc::bad_shape, "extent of a DLPack tensor", 0, extents[i]));
    }
    empty = empty || extents[i] == 0;
    span *= extents[i] > 0 ? extents[i] : 1;
  }
  if (empty) return make_strided<S, T, N>(nullptr, extents, strides);
  for (std::size_t i = 0; i < N && tensor.strides != nullptr; ++i) {
    if (extents[i] == 1) continue;  // never stepped over; producers write anything there
    strides[i] = tensor.strides[i];
    if (strides[i] < 0) {
      return refuse(failure(Errc::bad_stride, "stride of a DLPack tensor", 0, strides[i]));
    }
  }
  if (!dlpack_addressable(extents, strides, sizeof(T))) {
    return refuse(
        failure(Errc::bad_shape, "extents and strides of a DLPack tensor: past all memory"));
  }
  if (tensor.data == nullptr) {
    return refuse(failure(Errc::missing_input, "data of a DLPack tensor"));
  }
  auto const base = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (tensor.byte_offset > std::numeric_limits<std::uintptr_t>::max() - base) {
    return refuse(failure(Errc::bad_value, "byte_offset of a DLPack tensor, past all memory"));
  }
  auto const address = static_cast<std::uintptr_t>(base + tensor.byte_offset);
  if (address % alignof(T) != 0) {
    return refuse(failure(
        Errc::bad_value, "alignment of a DLPack tensor's data (got: bytes past a multiple)",
        static_cast<std::int64_t>(alignof(T)), static_cast<std::int64_t>(address % alignof(T))));
  }
  return make_strided<S, T, N>(reinterpret_cast<T*>(address), extents, strides);
}

/// The same for a DLManagedTensor or DLManagedTensorVersioned, which stays its producer's: call its
/// deleter when the view is no longer used. Errors: also bad_value for a writable view of a tensor
/// that is flagged read-only, unsupported for a major version other than 1.
template <Space S, class T, std::size_t N, detail::DlpackManaged Managed>
Result<Tensor<S, T, N>> from_dlpack(Managed const& managed) noexcept {
  if constexpr (requires { managed.version.major; }) {
    if (managed.version.major != 1) {
      return refuse(failure(Errc::unsupported, "major version of a DLPack tensor", 1,
                            static_cast<std::int64_t>(managed.version.major)));
    }
    if (!std::is_const_v<T> && (managed.flags & detail::dlpack_read_only) != 0) {
      return refuse(failure(Errc::bad_value, "a writable view of a read-only DLPack tensor"));
    }
  }
  return from_dlpack<S, T, N>(managed.dl_tensor);
}

namespace detail {

/// What a DLTensor points at besides the data.
template <std::size_t N, class Owner>
struct DlpackContext {
  std::array<std::int64_t, N> shape;
  std::array<std::int64_t, N> strides;
  Owner owner;
};

}  // namespace detail

/// A managed DLPack tensor over a view's memory, for a consumer that takes ownership: it calls
/// `deleter` once, which destroys `owner` and the struct. Returns null if memory runs out, and then
/// destroys `owner` at once.
///
/// @tparam Managed  DLManagedTensor or DLManagedTensorVersioned of the caller's dlpack.h. Only the
///                  latter can say that a view of const elements must not be written
/// @param owner      keeps the view's memory alive: a shared_ptr, an allocation, or anything that
///                   moves; an `int` where the memory outlives every consumer
/// @param device_id  number of the device; 0 for the host
template <detail::DlpackManaged Managed, class View, class Owner>
Managed* to_dlpack(View const& view, Owner owner, std::int32_t device_id) {
  constexpr std::size_t rank = View::rank();
  using T = std::remove_const_t<typename View::element_type>;
  using Context = detail::DlpackContext<rank, Owner>;
  static_assert(dlpack_type<T>.bits != 0, "specialise dlpack_type for this element type");
  constexpr bool versioned = requires(Managed managed) { managed.flags; };
  static_assert(versioned || !std::is_const_v<typename View::element_type>,
                "a DLManagedTensor cannot say that it is read-only: use DLManagedTensorVersioned");

  std::unique_ptr<Context> context(new (std::nothrow) Context{{}, {}, std::move(owner)});
  std::unique_ptr<Managed> managed(new (std::nothrow) Managed{});
  if (!context || !managed) return nullptr;
  for (std::size_t i = 0; i < rank; ++i) {
    context->shape[i] = view.extent(i);
    context->strides[i] = view.stride(i);
  }
  auto& tensor = managed->dl_tensor;
  tensor.data = const_cast<T*>(view.data_handle());
  tensor.device.device_type = static_cast<decltype(tensor.device.device_type)>(
      View::accessor_type::space == Space::host ? detail::dlpack_cpu : detail::dlpack_cuda);
  tensor.device.device_id = device_id;
  tensor.ndim = static_cast<std::int32_t>(rank);
  tensor.dtype.code = dlpack_type<T>.code;
  tensor.dtype.bits = dlpack_type<T>.bits;
  tensor.dtype.lanes = 1;
  tensor.shape = context->shape.data();
  tensor.strides = context->strides.data();
  tensor.byte_offset = 0;
  if constexpr (versioned) {
    managed->version.major = 1;
    managed->version.minor = dlpack_type<T>.code >= detail::dlpack_first_small_float ? 1 : 0;
    managed->flags = std::is_const_v<typename View::element_type> ? detail::dlpack_read_only : 0;
  }
  managed->manager_ctx = context.release();
  managed->deleter = [](Managed* self) {
    delete static_cast<Context*>(self->manager_ctx);
    delete self;
  };
  return managed.release();
}

}  // namespace v0
}  // namespace indexshare
