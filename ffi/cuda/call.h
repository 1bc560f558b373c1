// What every call of a kernel says, whatever the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/arena.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };

// What a start leaves for its done, in memory of XLA's: of a slot there can be several starts.
struct PendingCall {
  uint32_t epoch;
  uint32_t blocks_begun;  // of the body
};

struct Call {
  OpKind op;
  Phase phase;
  uint32_t hash;              // of all that must be equal on all ranks
  const int32_t* axis_index;  // the rank that XLA runs here
  PendingCall* pending;       // of split-phase calls
  int32_t num_tokens, top_k;
};

}  // namespace jax_ep
