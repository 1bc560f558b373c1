// What every call of a kernel says, whatever the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "ffi/arena.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };

// Addresses of all that a send reads.
using Reads = std::array<const void*, 4>;

struct Call {
  OpKind op;
  Half half;
  uint32_t hash;              // of all that must be equal on all ranks
  const int32_t* axis_index;  // the rank that XLA runs here
  Ticket* ticket;             // of halves
  uint32_t* pending;          // of a start and its done: the epoch, as XLA hands it from one to the other
  int32_t num_tokens, top_k;
};

}  // namespace jax_ep
