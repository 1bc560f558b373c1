// The size of a group's arena: the number of slots, and whether a slot has room for all tokens of an operation.
#pragma once

#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

// What the arena of a rank must hold.
struct ArenaNeeds {
  int32_t num_ranks;
  int32_t num_nodes;  // 0 if a rank does not keep rows of whole nodes
  int32_t top_k, max_tokens, max_payload;

  constexpr ArenaLayout layout(int32_t round_tokens, int32_t num_slots) const {
    return {num_ranks + num_nodes, top_k, round_tokens, max_payload, num_slots};
  }
  // True if the rows of all ranks fit in a small arena with kMaxSlots slots.
  constexpr bool has_most_slots() const {
    return ArenaLayout(num_ranks, top_k, max_tokens, max_payload, kMaxSlots).bytes <= kSmallArena;
  }
};

// Limits, in bytes, of the memory whose size depends on the arena.
struct ArenaBounds {
  int64_t one_round;  // the limit without rounds
  int64_t rounds;     // the limit if all tokens in one round would exceed the first one
};
inline constexpr ArenaBounds kDefaultArenaBounds = {int64_t{2} << 30, int64_t{512} << 20};

// Chooses an arena within `bounds`. bytes_of(layout) returns the bytes of all memory whose size depends on
// the arena. If a slot for all tokens is too large, operations have as few rounds as fit in `bounds`, and round_tokens
// is as small as this number of rounds allows. The last round may have fewer tokens. If not even one token per round
// fits, the arena has room for one and exceeds `bounds`. The caller checks this.
template <typename BytesOf>
constexpr ArenaLayout choose_arena(const ArenaNeeds& needs, const ArenaBounds& bounds, BytesOf bytes_of) {
  const ArenaLayout most = needs.layout(needs.max_tokens, kMaxSlots);
  if (needs.has_most_slots() && bytes_of(most) <= bounds.one_round) return most;
  const ArenaLayout one_round = needs.layout(needs.max_tokens, 2);
  if (bytes_of(one_round) <= bounds.one_round) return one_round;
  // The kernels divide numbers of tokens by round_tokens with a Divisor, which has this limit.
  const auto is_possible = [&](int64_t round_tokens) {
    return round_tokens * needs.max_tokens < int64_t{1} << 32 &&
           bytes_of(needs.layout(static_cast<int32_t>(round_tokens), kSlotsWithRounds)) <= bounds.rounds;
  };
  int32_t round_tokens = 1;  // the largest possible number is at least this, and less than `too_many`
  for (int32_t too_many = needs.max_tokens; too_many - round_tokens > 1;) {
    const int32_t middle = round_tokens + (too_many - round_tokens) / 2;
    (is_possible(middle) ? round_tokens : too_many) = middle;
  }
  const int32_t num_rounds = (needs.max_tokens - 1) / round_tokens + 1;
  return needs.layout((needs.max_tokens - 1) / num_rounds + 1, kSlotsWithRounds);
}

}  // namespace jax_ep
