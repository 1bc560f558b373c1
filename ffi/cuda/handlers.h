#pragma once

#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// The XLA FFI targets of the CUDA backend: name -> handler. backend_targets() are the operations that move rows.
std::vector<std::pair<const char*, XLA_FFI_Handler*>> backend_targets();
std::vector<std::pair<const char*, XLA_FFI_Handler*>> balance_targets();
std::vector<std::pair<const char*, XLA_FFI_Handler*>> expand_targets();

}  // namespace jax_ep
