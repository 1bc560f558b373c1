#pragma once

#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// The XLA FFI targets of the CUDA backend: name -> handler. backend_targets() has the operations between ranks,
// balance_targets() has balanced placement, and expand_targets() has the local operations.
std::vector<std::pair<const char*, XLA_FFI_Handler*>> backend_targets();
std::vector<std::pair<const char*, XLA_FFI_Handler*>> balance_targets();
std::vector<std::pair<const char*, XLA_FFI_Handler*>> expand_targets();

}  // namespace jax_ep
