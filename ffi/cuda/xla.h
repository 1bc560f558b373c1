// How XLA calls a handler: with the device's stream, which ffi/emulator/xla.h gives for emulated GPUs, and with the run
// of the program.
#pragma once

#ifdef JAX_EP_EMULATOR
#include "ffi/emulator/xla.h"
#else

#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {
using DeviceStream = xla::ffi::PlatformStream<cudaStream_t>;
}

// JAX_EP_DEFINE_HANDLER(name, handler, binding[, traits]) for a handler whose first parameter is the stream.
#define JAX_EP_DEFINE_HANDLER XLA_FFI_DEFINE_HANDLER

#endif

namespace jax_ep {

// The stream on which XLA runs a call, and the run of a program to which the call belongs. A run has the same number on
// all devices of a process, and another run has another number.
struct CallStream {
  cudaStream_t stream;
  int64_t run;
  operator cudaStream_t() const { return stream; }
};

}  // namespace jax_ep

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::CallStream> {
  using Type = jax_ep::CallStream;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<jax_ep::DeviceStream>::Decode(api, context, diagnostic);
    const auto run = CtxDecoding<RunId>::Decode(api, context, diagnostic);
    if (!stream || !run) return std::nullopt;
    return Type{*stream, run->run_id};
  }
};

}  // namespace xla::ffi
