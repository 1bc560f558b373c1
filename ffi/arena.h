// Where things lie in a rank's symmetric memory: the arena, which holds rows under way, and the control memory, which
// holds epochs, counts and acknowledgements. Every rank of a group has the same layout, so that an offset names the
// same thing on all of them.
#pragma once

#include <cstdint>

#include "ffi/layout.h"

namespace jax_ep {

inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxTopK = 32;
// Operations of a group take turns in its slots, by their epoch. Two are enough for whole operations; a small arena has
// four, for as many halves under way.
inline constexpr int kMaxSlots = 4;
inline constexpr int64_t kSmallArena = int64_t{64} << 20;  // bytes

// A row under way: a header of one entry per k, then the payload.
//
// A dispatch fills all three parts of the header; the way back uses `weight` alone, for the cotangents of the router's
// weights.
struct RowHeader {
  int32_t expert;    // local expert on the receiving rank, or -1 where this k goes to another rank
  int32_t position;  // among the rows of the same source for the same expert
  float weight;
};

struct ArenaLayout {
  int32_t num_ranks, top_k, max_tokens;
  int64_t max_payload;    // bytes, a multiple of 16
  int32_t num_slots = 2;  // a power of two, so that epochs may wrap

  // As many slots as fit in a small arena, and at least two.
  static constexpr ArenaLayout fitting(int32_t num_ranks, int32_t top_k, int32_t max_tokens, int64_t max_payload) {
    const ArenaLayout most = {num_ranks, top_k, max_tokens, max_payload, kMaxSlots};
    return most.bytes() <= kSmallArena ? most : ArenaLayout{num_ranks, top_k, max_tokens, max_payload};
  }

  constexpr int64_t header_bytes() const { return align_up(top_k * static_cast<int64_t>(sizeof(RowHeader)), 16); }
  constexpr int64_t row_stride() const { return header_bytes() + max_payload; }
  constexpr int64_t num_rows() const { return int64_t{num_slots} * num_ranks * max_tokens; }

  // Row `index` of what `peer` sends in the operations of `slot`.
  constexpr int64_t row_number(int32_t slot, int32_t peer, int32_t index) const {
    return (int64_t{slot} * num_ranks + peer) * max_tokens + index;
  }
  constexpr int64_t row_offset(int64_t number) const { return number * row_stride(); }
  // The word that holds the epoch of a row that has arrived.
  constexpr int64_t flag_offset(int64_t number) const { return num_rows() * row_stride() + number * 4; }
  constexpr int64_t bytes() const { return align_up(flag_offset(num_rows()), 256); }
};

// Control memory of one rank; the counts of arriving rows follow it. It outlives the group, so that an executable that
// still runs after close() finds `failed` set and ends. Every word that a peer writes carries the epoch it belongs to.
struct Control {
  // Written by this rank's own kernels.
  unsigned long long owner;  // the launch that runs, 0 if none does
  uint32_t newest_epoch;     // of the operation that was begun last
  uint32_t epoch;            // of the launch that runs, and
  uint32_t sends;            // whether it sends
  uint32_t next_item[2];     // work that it has claimed: to send, to receive
  uint32_t exited;           // thread blocks of it that have ended
  // Written by peers, too.
  uint32_t failed;                                    // 0, or 1 + the rank that failed first; kClosed after close()
  uint32_t finished[kMaxSlots][kMaxRanks];            // the epoch whose rows each rank has read last in its own memory
  unsigned long long op[kMaxSlots][kMaxRanks];        // {epoch, hash of the call} of each rank
  unsigned long long num_rows[kMaxSlots][kMaxRanks];  // {epoch, rows that each rank sends here}
};
inline constexpr uint32_t kClosed = 0xffffffffu;

constexpr int64_t counts_offset(int32_t slot, int32_t peer, int32_t num_ranks, int32_t experts_per_rank) {
  return static_cast<int64_t>(sizeof(Control)) + (int64_t{slot} * num_ranks + peer) * experts_per_rank * 8;
}
constexpr int64_t control_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  return counts_offset(kMaxSlots, 0, num_ranks, experts_per_rank);
}

// What a kernel that gave up leaves in pinned host memory.
struct FailureRecord {
  uint32_t valid;
  uint32_t reason;  // FailureReason
  uint32_t op;      // OpKind
  uint32_t epoch;
  int32_t rank, peer;
  uint32_t expected, seen;
};
enum class FailureReason : uint32_t {
  kTimeout,
  kOtherOp,    // a peer is in another call
  kWrongRank,  // XLA runs another rank on this device than the group's mesh says
  kSlotTaken,  // the operation that had the slot before was started and never done
  kNotStarted  // a done without a start of its own, or out of turn
};
enum class OpKind : uint32_t {
  kDispatch,
  kDispatchLike,
  kDispatchBack,
  kCombine,
  kCombineBack,
  kAllToAll,
  kAllToAllBack
};

// An operation runs in one launch or in two, start and done.
enum class Half : int32_t { kWhole, kStart, kDone };

// What `start` tells `done`: {epoch, whether the rows were sent}.
inline constexpr int kTicketWords = 2;

// The kernel ABI: all that a kernel knows of its peers. Who fills it (ffi/cuda/group.cc) decides the transport.
struct Peers {
  int32_t rank, num_ranks, experts_per_rank;
  ArenaLayout layout;
  uint64_t timeout_ns;
  FailureRecord* failure;  // pinned host memory
  uint8_t* arena[kMaxRanks];
  Control* control[kMaxRanks];
};

}  // namespace jax_ep
