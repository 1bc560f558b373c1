// Reads FFI buffers, and checks the operands and results of a call against the types and shapes that its handler
// expects. A buffer without elements stands for "none".
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

template <typename T>
T* data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}
template <typename T>
T* data(ffi::Result<ffi::AnyBuffer> buffer) {
  return data<T>(*buffer);
}

inline bool has_elements(const ffi::AnyBuffer& buffer) { return buffer.element_count() != 0; }

// The size of an axis; 0 if the buffer has no such axis.
inline int64_t size(const ffi::AnyBuffer& buffer, size_t axis) {
  return axis < buffer.dimensions().size() ? buffer.dimensions()[axis] : 0;
}
inline int64_t last_size(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 0 ? 0 : buffer.dimensions().back();
}

inline int64_t row_bytes(const ffi::AnyBuffer& buffer) {
  return last_size(buffer) * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}
inline int64_t num_rows(const ffi::AnyBuffer& buffer) {
  return last_size(buffer) == 0 ? 0 : static_cast<int64_t>(buffer.element_count()) / last_size(buffer);
}

// The dimensions of a buffer: at most four. Allocates nothing, because each call checks all its buffers.
class Dims {
 public:
  Dims(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) append(size);
  }
  explicit Dims(const ffi::AnyBuffer& buffer) {
    for (size_t axis = 0; axis < std::min(buffer.dimensions().size(), kMost); ++axis) append(size(buffer, axis));
  }
  // The dimensions of the rows in `buffer`: all but the last one, of which there must be one or two.
  static Dims of_rows(const ffi::AnyBuffer& buffer) {
    const size_t num_axes = buffer.dimensions().size();
    if (num_axes == 3) return {size(buffer, 0), size(buffer, 1)};
    return {size(buffer, 0)};
  }
  Dims then(int64_t size) const {
    Dims result = *this;
    result.append(size);
    return result;
  }
  // [..., N] -> [..., size, N]
  Dims with_columns(int64_t size) const {
    Dims result = *this;
    result.append(sizes_[count_ - 1]);
    result.sizes_[count_ - 1] = size;
    return result;
  }

  const int64_t* begin() const { return sizes_; }
  const int64_t* end() const { return sizes_ + count_; }

 private:
  void append(int64_t size) { sizes_[count_++] = size; }

  static constexpr size_t kMost = 4;
  int64_t sizes_[kMost] = {};
  size_t count_ = 0;
};

// The element types that a buffer may have: at most three, or any.
class Types {
 public:
  Types(ffi::DataType type) : types_{type}, count_(1) {}
  static Types floats() { return Types({ffi::F32, ffi::F16, ffi::BF16}, 3); }
  static Types any() { return Types({}, 0); }

  bool has(ffi::DataType type) const {
    return count_ == 0 || std::find(types_.begin(), types_.begin() + count_, type) != types_.begin() + count_;
  }
  std::string names() const;

 private:
  Types(std::array<ffi::DataType, 3> types, size_t count) : types_(types), count_(count) {}

  std::array<ffi::DataType, 3> types_;
  size_t count_;
};

// One operand or result of a call, and what it must be.
struct Expected {
  const char* name;
  const ffi::AnyBuffer& buffer;
  Types types;
  Dims dims;
  bool is_optional = false;  // the buffer may have no elements
};
inline Expected none(const char* name, const ffi::AnyBuffer& buffer) { return {name, buffer, Types::any(), {0}, true}; }

inline std::string name_of(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
      return "bool";
    case ffi::S8:
      return "int8";
    case ffi::S16:
      return "int16";
    case ffi::S32:
      return "int32";
    case ffi::S64:
      return "int64";
    case ffi::U8:
      return "uint8";
    case ffi::U16:
      return "uint16";
    case ffi::U32:
      return "uint32";
    case ffi::U64:
      return "uint64";
    case ffi::F16:
      return "float16";
    case ffi::BF16:
      return "bfloat16";
    case ffi::F32:
      return "float32";
    case ffi::F64:
      return "float64";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::F8E8M0FNU:
      return "float8_e8m0fnu";
    default:
      return "XLA's type " + std::to_string(static_cast<int>(type));
  }
}

inline std::string Types::names() const {
  if (count_ == 0) return "any type";
  std::string text;
  for (size_t i = 0; i < count_; ++i) {
    if (i > 0) text += i + 1 == count_ ? " or " : ", ";
    text += name_of(types_[i]);
  }
  return text;
}

template <typename Sizes>
std::string shape_string(const Sizes& sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// Returns an error for the first buffer that is not as expected. It names the buffer, its type and shape, and what they
// must be.
inline ffi::Error check_buffers(const char* op, std::initializer_list<Expected> all) {
  for (const Expected& expected : all) {
    const ffi::AnyBuffer& buffer = expected.buffer;
    if (expected.is_optional && !has_elements(buffer)) continue;
    const auto dims = buffer.dimensions();
    const bool has_shape = std::equal(dims.begin(), dims.end(), expected.dims.begin(), expected.dims.end());
    if (has_shape && expected.types.has(buffer.element_type())) continue;
    return ffi::Error::InvalidArgument(std::string(op) + ": " + expected.name + " is " +
                                       name_of(buffer.element_type()) + " " + shape_string(dims) + "; it must be " +
                                       expected.types.names() + " " + shape_string(expected.dims));
  }
  return ffi::Error::Success();
}

}  // namespace jax_ep
