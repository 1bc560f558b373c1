// XLA FFI handlers for emulated GPUs: XLA's CPU platform calls them, with the number of a virtual device.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "ffi/emulator/runtime.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// A handler argument: the emulated device's stream. It replaces XLA's GPU stream.
struct DeviceStream {};

}  // namespace jax_ep

namespace emulator {

// Wraps a handler. The handler enqueues a call on a device's stream. XLA learns that the call is done when all work
// that is in the stream now has run. The handler does not wait, because XLA may have fewer threads than devices.
template <typename Handler>
auto on_stream(Handler handler) {
  return [handler](auto stream, auto&&... args) -> xla::ffi::Future {
    auto promise = std::make_shared<xla::ffi::Promise>();
    xla::ffi::Future future(*promise);
    const xla::ffi::Error error = handler(stream, std::forward<decltype(args)>(args)...);
    if (error.failure()) {
      promise->SetError(error);
    } else {
      when_done(stream, [promise] { promise->SetAvailable(); });
    }
    return future;
  };
}

}  // namespace emulator

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::DeviceStream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!ordinal) return std::nullopt;
    return emulator::stream_of_device(*ordinal);
  }
};

}  // namespace xla::ffi

#define JAX_EP_DEFINE_HANDLER(name, handler, binding, ...) \
  XLA_FFI_DEFINE_HANDLER(name, ::emulator::on_stream(handler), binding)
