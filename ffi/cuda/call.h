// The arguments that all kernels have.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ffi/arena.h"

namespace jax_ep {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };
constexpr int32_t size_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// What a start leaves for its done. XLA allocates the memory, because several starts can be in flight.
struct PendingCall {
  uint32_t epoch;
  uint32_t num_entered;  // the blocks of the done's kernel that have entered
};

// Says which tokens of each rank a launch moves. Usually, a launch moves the rows of all tokens. If the arena has
// too little room for them, an operation runs as several launches on one stream, its rounds. Each round is a whole
// operation with an epoch of its own, so the words by which ranks free the slots of the arena also order the rounds. A
// round moves the rows of `round_tokens` tokens. The last round may have fewer.
//
// In each round of a new route, senders count the tokens of all rounds, and the ranks exchange counts of all rounds. So
// a row has the same index, and the same row of the result, as in a single launch. A rank also tells each rank which
// indices the rows of the round have (rounds.cuh).
struct Round {
  int32_t first_token = 0;
  int32_t num_tokens_after = 0;           // the tokens of later rounds
  Divisor by_tokens = Divisor(1u << 31);  // divides by round_tokens; in a single launch, by more than any index

  constexpr bool is_only() const { return first_token == 0 && num_tokens_after == 0; }
  constexpr bool is_last() const { return num_tokens_after == 0; }
  // The place of a row in the arena. The rows of a round from one rank to another rank have consecutive indices, and
  // there are at most as many as tokens. So their places differ.
  constexpr int32_t place_of(int32_t index) const { return by_tokens.remainder(static_cast<uint32_t>(index)); }
};

struct Call {
  OpKind op;
  Phase phase;
  uint32_t hash;              // a hash of everything that must be equal on all ranks
  const int32_t* axis_index;  // the rank that XLA runs here
  PendingCall* pending;       // null for whole operations
  int32_t num_tokens, top_k;
  Round round;

  constexpr int32_t end_token() const { return num_tokens - round.num_tokens_after; }  // the end of the round's tokens
};

// Calls launch(args) for each round of an operation. `round_tokens`: the tokens for which a slot of the arena has room.
// Returns the first error.
template <typename Args, typename Launch>
cudaError_t launch_rounds(Args args, int32_t round_tokens, Launch launch) {
  if (args.num_tokens <= round_tokens) return launch(args);
  args.round.by_tokens = Divisor(static_cast<uint32_t>(round_tokens));
  cudaError_t status = cudaSuccess;
  for (int32_t first = 0; first < args.num_tokens && status == cudaSuccess; first += round_tokens) {
    args.round.first_token = first;
    args.round.num_tokens_after = std::max(args.num_tokens - first - round_tokens, 0);
    status = launch(args);
  }
  return status;
}

}  // namespace jax_ep
