// How XLA calls a handler: with the device's stream. ffi/emulator/xla.h does the same for emulated GPUs.
#pragma once

#ifdef JAX_EP_EMULATOR
#include "ffi/emulator/xla.h"
#else

#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {
using CallStream = xla::ffi::PlatformStream<cudaStream_t>;
}

// JAX_EP_DEFINE_HANDLER(name, handler, binding[, traits]) for a handler whose first parameter is the stream.
#define JAX_EP_DEFINE_HANDLER XLA_FFI_DEFINE_HANDLER

#endif
