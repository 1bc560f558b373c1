// What every call of a kernel says, whatever the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/arena.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };

struct Call {
  OpKind op;
  Half half;
  uint32_t hash;              // of all that must be equal on all ranks
  const int32_t* axis_index;  // the rank that XLA runs here
  uint32_t* epoch;            // of halves: what the start tells the done
  int32_t num_tokens, top_k;
};

}  // namespace jax_ep
