// How XLA calls a handler: with a CallStream, which has the device's stream and XLA's run id. ffi/emulator/xla.h
// defines DeviceStream for emulated GPUs.
#pragma once

#include <cstdint>
#include <optional>

#ifdef JAX_EP_EMULATOR
#include "ffi/emulator/xla.h"
#else

#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {
using DeviceStream = xla::ffi::PlatformStream<cudaStream_t>;
}

// JAX_EP_DEFINE_HANDLER(name, handler, binding[, traits]) for a handler whose first parameter is a CallStream
// or a stream.
#define JAX_EP_DEFINE_HANDLER XLA_FFI_DEFINE_HANDLER

#endif

namespace jax_ep {

// The stream on which XLA runs a call, and the id of the program's run. In one run, all devices of a process have the
// same id. Two runs have different ids. (XLA_FFI_RunId_Get in xla/ffi/api/c_api.h)
struct CallStream {
  cudaStream_t stream;
  int64_t run_id;
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
    const auto run_id = CtxDecoding<RunId>::Decode(api, context, diagnostic);
    if (!stream || !run_id) return std::nullopt;
    return Type{*stream, run_id->run_id};
  }
};

}  // namespace xla::ffi
