// The layout of a rank's symmetric memory. The arena holds rows in transit. The control memory holds epochs, counts and
// acknowledgements. The layout is the same on every rank of a group, so an offset names the same object on all of them.
//
// A row has these numbers on its way from its source, the sending rank, to its destination rank:
//   index               its number among the rows from this source to this destination, in the order of the source's
//                       tokens. The row of a rank's own token, which stays on the rank, has the number of the token
//                       as its index (except in all_to_all and all_to_all_back)
//   place               its number among the rows for which the destination's arena has room, per source and slot: the
//                       index modulo round_tokens (Round::place_of)
//   arena_row (number)  its number in the destination's arena, computed from slot, source and place
//                       (ArenaLayout::row_number)
//   position_in_source  its number among the rows of one source for one expert
//   position            its number in the group of an expert
//   row                 its number in the result of a dispatch, or in y
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/constants.h"
#include "ffi/layout.h"

namespace jax_ep {

// The arena is divided into slots. An operation keeps its rows in slot epoch % num_slots. Two slots are enough for
// whole operations. A small arena has four, so that four split-phase calls can be in flight. In the kernels, "slot"
// alone is a slot of the arena. A "replica slot" is room for a copy of an expert, and an "expert slot" is a home expert
// or a replica slot.
inline constexpr int kMaxSlots = 4;
inline constexpr int64_t kSmallArena = int64_t{64} << 20;  // bytes

// The arena of a rank has a bound, in bytes. If a slot for the rows of all tokens would be too large, a slot has room
// for the rows of `round_tokens` tokens per rank. An operation with more tokens then runs as several launches, its
// rounds (ffi/cuda/call.h). A group with rounds has two slots.
inline constexpr int kSlotsWithRounds = 2;

// A row travels in units of 16 bytes. A unit arrives whole: the receiver never sees a part of it. A warp moves 32 units
// at once, which are a chunk.
//
// A row in transit has room for a header of one unit per k, which only rows of a new route and weights need; then the
// payload; and, if the payload is fp8, one unit of four scales per chunk of it. ffi/cuda/ll_units.cuh explains how the
// receiver detects that a unit has arrived, and what the escape masks are for.
inline constexpr int kUnitBytes = 16;
inline constexpr int kChunkUnits = 32;
inline constexpr int kChunkBytes = kUnitBytes * kChunkUnits;
inline constexpr uint8_t kSentinelByte = 0xfd;  // a unit of 16 sentinel bytes has not arrived

// The header of a row for one k. A dispatch fills all fields. A combine fills only `weight`, for the cotangents of the
// router's weights, and `epoch`. (In a header for a forwarder, `expert` is the global number, and `epoch` is the row's
// index at its destination.)
struct alignas(kUnitBytes) RowHeader {
  int32_t expert;  // local expert on the receiving rank, or -1 if this k has none there
  // The row's position among the rows of the same source for the same expert. In the layout "token", the header of the
  // first k that names the rank has the row's position among all rows of the source, and the others have -1.
  int32_t position_in_source;
  float weight;
  uint32_t epoch;  // the operation's epoch: it shows that the header has arrived
};

constexpr int32_t num_chunks(int32_t row_bytes) {
  return static_cast<int32_t>((static_cast<uint32_t>(row_bytes) + kChunkBytes - 1) / kChunkBytes);  // unsigned: a shift
}

struct ArenaLayout {
  int32_t num_sources = 0, top_k = 0;  // sources: the ranks and, over a network, then the nodes
  int32_t round_tokens = 0;            // the most tokens per rank whose rows are in a slot at the same time
  int32_t max_payload = 0;  // bytes, a multiple of 16; the scales of an fp8 row fit in the bytes that fp8 saves
  int32_t num_slots = 0;    // a power of two, so that epochs may wrap
  int32_t header_bytes = 0, row_stride = 0;
  // One per chunk of the payload, and one per unit of scales. A row of n chunks in the group's dtype has at most
  // (n + 1) / 2 chunks in fp8, and as many units of scales. So n + 1 masks are enough.
  int32_t escape_masks_per_row = 0;
  int64_t escape_masks_begin = 0;
  int64_t bytes = 0;

  constexpr ArenaLayout() = default;
  constexpr ArenaLayout(int32_t num_sources, int32_t top_k, int32_t round_tokens, int32_t max_payload,
                        int32_t num_slots)
      : num_sources(num_sources),
        top_k(top_k),
        round_tokens(round_tokens),
        max_payload(max_payload),
        num_slots(num_slots),
        header_bytes(static_cast<int32_t>(align_up(top_k * kUnitBytes, 128))),
        row_stride(static_cast<int32_t>(align_up(header_bytes + max_payload, 128))),
        escape_masks_per_row(num_chunks(max_payload) + 1),
        escape_masks_begin(num_rows() * row_stride),
        bytes(align_up(escape_masks_begin + num_rows() * escape_masks_per_row * 8, 256)) {}

  constexpr int64_t num_rows() const { return int64_t{num_slots} * num_sources * round_tokens; }
  // The number of the row from `source` at `place` in slot `slot`.
  constexpr int32_t row_number(int32_t slot, int32_t source, int32_t place) const {
    return (slot * num_sources + source) * round_tokens + place;
  }
  constexpr int64_t row_offset(int32_t number) const {  // unsigned: one instruction
    return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(number)} * static_cast<uint32_t>(row_stride));
  }
  constexpr int64_t escape_masks_offset(int32_t number) const {
    return escape_masks_begin + int64_t{number} * escape_masks_per_row * 8;
  }
};

enum class OpKind : uint32_t {
  kDispatch,
  kDispatchLike,
  kDispatchBack,
  kCombine,
  kCombineBack,
  kAllToAll,
  kAllToAllBack,
  kBalance,
  kReplicate,
  kReplicateBack
};
inline constexpr int kNumOpKinds = static_cast<int>(OpKind::kReplicateBack) + 1;
// The names of operations in messages and in Group.stats, in the order of OpKind.
inline constexpr const char* kOpNames[kNumOpKinds] = {
    "dispatch",           "dispatch_like",        "dispatch (backward)", "combine",
    "combine (backward)", "all_to_all",           "all_to_all_back",     "balance",
    "replicate",          "replicate (backward)",
};
constexpr const char* name_of(OpKind op) { return kOpNames[static_cast<int>(op)]; }

// Counters of a rank since its group was opened; the host reads them. The rank with the experts knows how many rows it
// receives; the rank with the tokens would have to count its rows. So the rank with the experts counts both directions.
struct RowCounters {
  unsigned long long rows, bytes;
};
struct PeerCounters {
  RowCounters arrived, returned;  // rows from the peer to the experts here, and rows that went back
  unsigned long long waited_ns;   // time that this rank has waited for the peer's notifications
};
struct PlacementCounters {  // what the plans of balance say of the rank
  unsigned long long home_rows, planned_rows, copies;
};
struct Counters {
  unsigned long long operations[kNumOpKinds], dropped;
  PlacementCounters placement;
  PeerCounters peer[kMaxRanks];
};

inline constexpr int kNumRowsCopies = 8;
static_assert(kNumRowsCopies * kMaxLocalRanks <= kMaxRanks);
inline constexpr int32_t kMaxLowLatencyBlocks = 640;  // of one launch

// The word with which the blocks of a launch enter a new operation. Each block adds its launch's step() with one atomic
// addition, and has then entered. The old value tells the block the epoch, and how many blocks of the launch have
// entered before it. The block that enters last writes the word for the next launch, when it leaves.
//
// Launches of one group that take an epoch (whole operations and starts) must not overlap on a device. A done does not
// use this word: its blocks enter through PendingCall::num_entered. A block detects a block of another launch by the
// sum of the tags: if only blocks of its own launch have entered, the sum is num_entered times the launch's tag.
struct EntryWord {
  uint32_t num_entered;
  // Bit s: the newest operation of slot s was a whole operation. kNewestIsWhole: the newest operation of the group was
  // one. A whole operation ends only after every peer has notified this rank of it. A peer does so only after it has
  // ended all earlier whole operations. So if a launch finds the bit of its slot and kNewestIsWhole set, the slot is
  // free on all ranks.
  uint32_t whole_slots;
  uint32_t newest_epoch;
  uint32_t tags;

  static constexpr int kCountBits = 12, kSlotBits = kMaxSlots + 1, kTagBits = 32 - kCountBits - kSlotBits;
  static constexpr uint32_t kNewestIsWhole = 1u << kMaxSlots;

  static constexpr EntryWord unpack(unsigned long long word) {
    const auto low = static_cast<uint32_t>(word);
    return {low & ((1u << kCountBits) - 1), low >> kCountBits & ((1u << kSlotBits) - 1),
            static_cast<uint32_t>(word >> (kCountBits + kSlotBits)), static_cast<uint32_t>(word >> (64 - kTagBits))};
  }
  // The word before any block of the next launch has entered.
  static constexpr unsigned long long pack(uint32_t newest_epoch, uint32_t whole_slots) {
    return static_cast<unsigned long long>(newest_epoch) << (kCountBits + kSlotBits) | whole_slots << kCountBits;
  }
  // The tag is a hash of a result's address. Two launches that run at the same time write to different buffers, so
  // their tags differ unless the hashes collide.
  static constexpr uint32_t tag(unsigned long long result) {
    return (static_cast<uint32_t>(result >> 8) ^ static_cast<uint32_t>(result >> 20)) % (1u << kTagBits) | 1;
  }
  static constexpr unsigned long long step(uint32_t tag) {
    return static_cast<unsigned long long>(tag) << (64 - kTagBits) | 1;
  }
  constexpr bool is_alone(uint32_t tag, uint32_t num_blocks) const {
    return num_entered < num_blocks && tags == num_entered * tag % (1u << kTagBits);
  }
};

// The control memory of one rank. The counts of arriving rows follow it (counts_offset). It outlives the group: an
// executable that still runs after close() finds `failed` set and ends. Every word that a peer writes carries its
// epoch, except `failed`.
struct Control {
  alignas(16) unsigned long long entry;  // an EntryWord
  uint32_t failed;  // 0; or 1 + the rank that failed first; or kClosed after close(). Peers write it, too.
  // num_left and num_blocks are one unit: one load reads both. They describe the two newest launches that took an
  // epoch, at index epoch % 2. num_left counts the blocks that have left. The block that enters last writes the number
  // of all blocks to num_blocks, when it leaves.
  alignas(16) uint32_t num_left[2];
  uint32_t num_blocks[2];
  uint32_t done_left[kMaxSlots];   // blocks that have left the done (a split-phase call's 2nd launch) of each slot
  uint32_t poisons[2][kMaxSlots];  // 1 while a block poisons the results of a slot's operation; indexed like first_wait
  // {epoch, the next item to claim} in each slot. claimed_items: rows of a dispatch; or, of a replicate, tracks
  // (row_ring.cuh), then parts of replica slots. claimed_padding: ranges of rows of a dispatch's result.
  unsigned long long claimed_items[kMaxSlots], claimed_padding[kMaxSlots];
  // {epoch, time} of the first long wait in each slot. Index 0: of a whole operation or a start; 1: of a done.
  unsigned long long first_wait[2][kMaxSlots];
  // [slot][rank]: the epoch of the newest operation of the slot whose rows the rank has read in its own arena.
  uint32_t finished[kMaxSlots][kMaxRanks];
  unsigned long long notified[kMaxSlots][kMaxRanks];  // {epoch, hash of the call} of each rank
  // {epoch, number of rows that each rank sends here}. A thousand warps poll it. If all of them polled one word, the
  // peer's store to it would arrive microseconds late. So the peer writes several copies, and each block polls one of
  // them (num_rows_index).
  //
  // In a group with rounds, the number includes the rows of earlier rounds. The entries of slot + kSlotsWithRounds,
  // where the group has no slot, have the number of the rows of earlier rounds.
  unsigned long long num_rows[kMaxSlots][kMaxRanks];
  // For the low-latency variant (ffi/cuda/roles.cuh). role_counts: at index epoch % 2, {number of roles that receivers
  // have given away, number of senders that have entered}. given_away[role]: a receiver sets it to 1 when it gives the
  // role away, and the block that takes the role sets it to 0.
  alignas(128) unsigned long long role_counts[2];
  uint32_t given_away[kMaxLowLatencyBlocks];
  // A BlockedWord from each rank, which is in an operation of another group (ffi/cuda/other_groups.cuh); and the newest
  // word that a block of this rank has erased.
  unsigned long long blocked[kMaxLocalRanks], erased_blocked[kMaxLocalRanks];
  Counters counters;
};
inline constexpr uint32_t kClosed = 0xffffffffu;
static_assert(2 * kSlotsWithRounds <= kMaxSlots);

// The index of a copy of the word of `rank` in Control::num_rows. With more than kMaxLocalRanks ranks, there is one
// copy.
constexpr int32_t num_rows_copies(int32_t num_ranks) { return num_ranks > kMaxLocalRanks ? 1 : kNumRowsCopies; }
constexpr int32_t num_rows_index(int32_t copy, int32_t rank) { return copy * kMaxLocalRanks + rank; }

// The control memory of a group whose newest operation is `newest_epoch` and which has no operation in flight.
// Operation n may begin when all ranks have finished operation n - num_slots. So `finished` of each slot begins with
// that epoch, for the slot's next operation.
inline Control initial_control(int32_t num_slots, uint32_t newest_epoch = 0) {
  Control initial = {};
  initial.entry = EntryWord::pack(newest_epoch, 0);
  for (int32_t next = 1; next <= num_slots; ++next) {
    const uint32_t epoch = newest_epoch + next;
    for (uint32_t& finished : initial.finished[epoch % num_slots]) finished = epoch - num_slots;
  }
  return initial;
}

// How many counts a rank sends to another rank at most: one per expert there; for a balance, one per expert of the
// group. experts_per_rank includes the `replicas` replica slots.
constexpr int32_t counts_per_source(int32_t num_ranks, int32_t experts_per_rank, int32_t replicas) {
  return replicas == 0 ? experts_per_rank : std::max(experts_per_rank, num_ranks * (experts_per_rank - replicas));
}
// The offset of the counts from `peer`. Each source's counts begin at a whole unit, because a lane loads two counts at
// once.
constexpr int64_t counts_offset(int32_t slot, int32_t peer, int32_t num_ranks, int32_t counts_per_source) {
  return static_cast<int64_t>(sizeof(Control)) +
         (int64_t{slot} * num_ranks + peer) * align_up(counts_per_source * 8, kUnitBytes);
}
// The offset of the credit that `peer` gives for a track of a long transfer (ffi/cuda/row_ring.cuh): {epoch, number of
// rows that it has taken}. Credits follow the counts, in a group with replicas.
inline constexpr int32_t kMaxCopyTracks = 1024;
constexpr int64_t credits_offset(int32_t peer, int32_t track, int32_t num_ranks, int32_t counts_per_source) {
  return counts_offset(kMaxSlots, 0, num_ranks, counts_per_source) + (int64_t{peer} * kMaxCopyTracks + track) * 8;
}
constexpr int64_t control_bytes(int32_t num_ranks, int32_t counts_per_source, bool has_replicas) {
  return credits_offset(has_replicas ? num_ranks : 0, 0, num_ranks, counts_per_source);
}

// A failure record, in pinned host memory. A rank has two: a kernel that gives up writes one, and the host the other.
struct FailureRecord {
  uint32_t valid;
  uint32_t reason;  // FailureReason
  uint32_t op;      // OpKind
  uint32_t epoch;
  uint32_t rank, peer;
  uint32_t expected, seen;
};

// An operation is one launch (whole) or two (split-phase): a start, which takes the epoch, and a done, which may run
// concurrently with later launches.
enum class Phase : int32_t { kWhole, kStart, kDone };

// True if the group has several nodes of several ranks. Then large operations send a row once to each node, and a rank
// there forwards it.
constexpr bool has_levels(int32_t node_size, int32_t num_ranks) { return 1 < node_size && node_size < num_ranks; }

// PeerTable and Peers are the kernel ABI: all that a kernel knows about its peers. ffi/cuda/group.cc fills them, and so
// decides the transport. `table` points to a RankTable or, for groups over a network, to a NetworkTable
// (ffi/cuda/network.h).
struct PeerTable {
  uint8_t* arena[kMaxRanks];
  Control* control[kMaxRanks];
};
struct DeviceGroups;
struct RankTable : PeerTable {
  const DeviceGroups* device_groups;  // of this rank's device; null over a network, or if the list is full
  int32_t index_in_device;            // the index of this group in the list
};
struct Peers {
  int32_t experts_per_rank;  // home experts and replica slots
  int32_t replicas;          // replica slots of a rank
  int32_t counts_per_source;
  constexpr int32_t num_home_experts() const { return experts_per_rank - replicas; }  // of a rank
  constexpr int32_t rank_of(int32_t expert) const { return by_experts.quotient(expert); }
  int32_t node_size;  // ranks per node: they have consecutive numbers and map each other's memory
  Divisor by_ranks, by_others, by_experts, by_top_k;  // others: all ranks but this one; experts: those of one rank
  ArenaLayout layout;
  uint64_t timeout_ns;
  FailureRecord* failure;  // pinned host memory
  // These are last, because a block needs them first. Where arguments begin at byte 0x210 of the constant bank, as on
  // sm_90, they fill a line of 64 bytes together with the Call, which comes next. (Only time depends on it.)
  Control* control;        // this rank's own
  const PeerTable* table;  // in device memory: an argument of its size would slow down every launch
  int32_t rank, num_ranks;
#ifdef JAX_EP_TIMELINE
  uint64_t* timeline;  // [kTimelineOps, kTimelineBlocks, kTimelinePhases], nanoseconds
#endif
};
#ifdef JAX_EP_TIMELINE
inline constexpr int kTimelineOps = 32, kTimelineBlocks = 1024, kTimelinePhases = 10;  // the last operations
#endif

}  // namespace jax_ep
