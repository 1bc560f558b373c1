// How XLA calls the handlers of the CUDA backend: the parameters that every handler has, and its buffers.
#pragma once

#include <utility>

#include "ffi/cuda/enqueue.h"
#include "ffi/handler_error.h"

namespace jax_ep {

inline constexpr auto kTraits = {ffi::Traits::kCmdBufferCompatible};

// Attributes that every call has.
struct CallAttrs {
  int64_t group, hash;
};

// Wraps a handler. XLA passes one more operand and one more result, the order token (jax_ep/_ordered_calls.py). The
// handler neither reads nor writes it. An exception of the handler becomes an error.
template <typename Attrs, typename... Buffers>
auto with_order_token(ffi::Error (*handler)(CallStream, int32_t, Attrs, Buffers...), const char* op) {
  return [op, handler](CallStream stream, int32_t ordinal, Attrs attrs, Operand, Result, Buffers... buffers) {
    return without_exceptions(op, [&] { return handler(stream, ordinal, attrs, buffers...); });
  };
}

// A binding of `operands` operands and `results` results, after the parameters that every handler has.
template <typename Attrs>
auto bind_call() {
  return ffi::Ffi::Bind()
      .Ctx<CallStream>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attrs<Attrs>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}
template <int operands, int results, typename Binding>
auto with_buffers(Binding binding) {
  if constexpr (operands > 0) {
    return with_buffers<operands - 1, results>(std::move(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (results > 1) {
    return with_buffers<0, results - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
}

inline auto bind_done() {
  return ffi::Ffi::Bind()
      .Ctx<CallStream>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<int64_t>("group")
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::CallAttrs, StructMember<int64_t>("group"), StructMember<int64_t>("hash"));
