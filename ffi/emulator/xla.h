// XLA FFI handlers for emulated GPUs: XLA's CPU platform calls them, with the number of a virtual device.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "ffi/emulator/runtime.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// In place of the stream that XLA has for a GPU.
struct CallStream {};

namespace emulator {

inline constexpr int kMostWaitingDevices = 8;

// A handler that enqueues a call on a device's stream, and tells XLA when the stream has come to its end.
//
// XLA:CPU goes on with what does not need the call's results, in an order that depends on when calls end: it may differ
// from device to device, as the order of a GPU's stream does not. So the handler waits, which gives XLA's own order. It
// cannot where a process has more devices than XLA has threads that may wait: there, programs have to order their
// calls.
template <typename... Args>
auto on_stream(xla::ffi::Error (*handler)(cudaStream_t, Args...)) {
  return [handler](cudaStream_t stream, Args... args) -> xla::ffi::Future {
    auto promise = std::make_shared<xla::ffi::Promise>();
    xla::ffi::Future future(*promise);
    const xla::ffi::Error error = handler(stream, std::move(args)...);
    if (error.failure()) {
      promise->SetError(error);
    } else {
      when_done(stream, [promise] { promise->SetAvailable(); });
      if (num_streams_of_devices() <= kMostWaitingDevices) wait_for(stream);
    }
    return future;
  };
}

}  // namespace emulator
}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::CallStream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!ordinal) return std::nullopt;
    return jax_ep::emulator::stream_of_device(*ordinal);
  }
};

}  // namespace xla::ffi

#define JAX_EP_DEFINE_HANDLER(name, handler, binding, ...) \
  XLA_FFI_DEFINE_HANDLER(name, ::jax_ep::emulator::on_stream(handler), binding)
