// The arguments that all kernels have.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/arena.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };
constexpr int32_t size_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// What a start leaves for its done. XLA allocates the memory, because several starts can be in flight.
struct PendingCall {
  uint32_t epoch;
  uint32_t num_entered;  // the blocks of the done's kernel that have entered
};

struct Call {
  OpKind op;
  Phase phase;
  uint32_t hash;              // a hash of everything that must be equal on all ranks
  const int32_t* axis_index;  // the rank that XLA runs here
  PendingCall* pending;       // null for whole operations
  int32_t num_tokens, top_k;
};

}  // namespace jax_ep
