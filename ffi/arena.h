// Where things lie in a rank's symmetric memory: the arena, which holds rows under way, and the control memory, which
// holds epochs, counts and acknowledgements. Every rank of a group has the same layout, so that an offset names the
// same thing on all of them.
#pragma once

#include <cstdint>

#include "ffi/constants.h"
#include "ffi/layout.h"

namespace jax_ep {

// Operations of a group take turns in its slots, by their epoch. Two are enough for whole operations; a small arena has
// four, for as many split-phase calls under way.
inline constexpr int kMaxSlots = 4;
inline constexpr int64_t kSmallArena = int64_t{64} << 20;  // bytes

// Rows travel in units of 16 bytes, which arrive whole, 32 of them (a chunk) moved by a warp at once.
//
// A row under way is a header, one unit per k; the payload; and, if that is fp8, a unit of four scales per chunk of it.
// ffi/cuda/ll_units.cuh tells how the receiver sees that a unit has arrived, and what the escape masks are for.
inline constexpr int kUnitBytes = 16;
inline constexpr int kChunkUnits = 32;
inline constexpr int kChunkBytes = kUnitBytes * kChunkUnits;
inline constexpr uint8_t kSentinelByte = 0xfd;  // 16 of them: a unit that has not arrived

// What travels with a row for one k. A dispatch fills all; the way back uses `weight`, for the cotangents of the
// router's weights.
struct alignas(kUnitBytes) RowHeader {
  int32_t expert;    // local expert on the receiving rank, or -1 where this k goes to another rank
  int32_t position;  // among the rows of the same source for the same expert
  float weight;
  uint32_t epoch;  // of the operation: the header has arrived
};

constexpr int32_t num_chunks(int32_t row_bytes) {
  return static_cast<int32_t>((static_cast<uint32_t>(row_bytes) + kChunkBytes - 1) / kChunkBytes);  // a shift
}

struct ArenaLayout {
  int32_t num_sources = 0, top_k = 0, max_tokens = 0;  // sources: ranks and, over a network, behind them nodes
  int32_t max_payload = 0;  // bytes, a multiple of 16; scales of an fp8 row fit in what fp8 saves
  int32_t num_slots = 0;    // a power of two, so that epochs may wrap
  int32_t header_bytes = 0, row_stride = 0;
  int32_t escape_masks_per_row = 0;  // one per chunk of the payload, and one per unit of scales
  int64_t escape_masks_begin = 0;
  int64_t bytes = 0;

  constexpr ArenaLayout() = default;
  constexpr ArenaLayout(int32_t num_sources, int32_t top_k, int32_t max_tokens, int32_t max_payload, int32_t num_slots)
      : num_sources(num_sources),
        top_k(top_k),
        max_tokens(max_tokens),
        max_payload(max_payload),
        num_slots(num_slots),
        header_bytes(static_cast<int32_t>(align_up(top_k * kUnitBytes, 128))),
        row_stride(static_cast<int32_t>(align_up(header_bytes + max_payload, 128))),
        escape_masks_per_row(num_chunks(max_payload) + 1),
        escape_masks_begin(num_rows() * row_stride),
        bytes(align_up(escape_masks_begin + num_rows() * escape_masks_per_row * 8, 256)) {}

  // As many slots as fit in a small arena, and at least two.
  static constexpr ArenaLayout fitting(int32_t num_sources, int32_t top_k, int32_t max_tokens, int32_t max_payload) {
    const ArenaLayout most(num_sources, top_k, max_tokens, max_payload, kMaxSlots);
    return most.bytes <= kSmallArena ? most : ArenaLayout(num_sources, top_k, max_tokens, max_payload, 2);
  }

  constexpr int64_t num_rows() const { return int64_t{num_slots} * num_sources * max_tokens; }
  // Row `index` of what `source` sends in the operations of `slot`.
  constexpr int32_t row_number(int32_t slot, int32_t source, int32_t index) const {
    return (slot * num_sources + source) * max_tokens + index;
  }
  constexpr int64_t row_offset(int32_t number) const {  // one instruction
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
  kAllToAllBack
};
inline constexpr int kNumOpKinds = 7;
// As messages and Group.stats name them.
inline constexpr const char* kOpNames[kNumOpKinds] = {
    "dispatch",           "dispatch_like", "dispatch (backward)", "combine",
    "combine (backward)", "all_to_all",    "all_to_all_back",
};

// What a rank has done since its group was opened, for the host to look at. The experts' side of an operation knows how
// many rows there are, where the tokens' side would have to count; so it counts for both.
struct RowCounters {
  unsigned long long rows, bytes;
};
struct PeerCounters {
  RowCounters arrived, returned;  // rows from the peer to experts here, and back
  unsigned long long waited_ns;   // for the peer to begin what this rank had begun
};
struct Counters {
  unsigned long long operations[kNumOpKinds], dropped;
  PeerCounters peer[kMaxRanks];
};

inline constexpr int kNumRowsCopies = 8;

// The word by which the blocks of a launch enter a new operation. Each block adds its launch's step() with one atomic
// addition. The old value tells the block the epoch, and how many blocks of the launch have entered before it. The
// block that enters last writes the word for the next launch, when it leaves.
//
// Launches that enter operations of one group must not overlap on a device. The sum of the tags shows a block of
// another launch that has entered before: without one, the sum is as many tags of this launch as blocks have entered.
struct EntryWord {
  uint32_t num_entered;
  // The slots whose newest operation was a whole one, as bits, and kNewestIsWhole. When a whole operation has ended,
  // all peers had notified it, and so had ended the whole operations before it: nobody has to ask.
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
  // Of a word that no block of the next launch has changed.
  static constexpr unsigned long long pack(uint32_t newest_epoch, uint32_t whole_slots) {
    return static_cast<unsigned long long>(newest_epoch) << (kCountBits + kSlotBits) | whole_slots << kCountBits;
  }
  // Two launches on a device at the same time never write to the same buffer: the address of a result tells them apart.
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

// Control memory of one rank; the counts of arriving rows follow it. It outlives the group, so that an executable that
// still runs after close() finds `failed` set and ends. Every word that a peer writes carries the epoch it belongs to.
struct Control {
  alignas(16) unsigned long long entry;  // an EntryWord
  uint32_t failed;  // written by peers, too: 0, or 1 + the rank that failed first; kClosed after close()
  // One unit. Of the two newest launches that took an epoch, by the epoch's last bit: blocks that have left, and all
  // blocks, which is written when all have entered.
  alignas(16) uint32_t num_left[2];
  uint32_t num_blocks[2];
  uint32_t done_left[kMaxSlots];          // blocks of each slot's done that have left
  uint32_t poisons[2][kMaxSlots];         // 1 while a block poisons the results of a launch, of a done, in each slot
  unsigned long long claimed[kMaxSlots];  // {epoch, rows that blocks have claimed} in each slot
  // {epoch, time} of the first long wait in each slot. Index 0: of a whole operation or a start; 1: of a done.
  unsigned long long first_wait[2][kMaxSlots];
  // The epoch whose rows each rank has read last in its own memory.
  uint32_t finished[kMaxSlots][kMaxRanks];
  unsigned long long op[kMaxSlots][kMaxRanks];  // {epoch, hash of the call} of each rank
  // {epoch, rows that each rank sends here}. A thousand warps look for it again and again, each block at one of some
  // copies: what a peer writes to a word at which all of them look comes microseconds late.
  unsigned long long num_rows[kMaxSlots][kNumRowsCopies][kMaxRanks];
  Counters counters;
};
inline constexpr uint32_t kClosed = 0xffffffffu;

// Of a group that has had operations up to `newest_epoch`, and has none under way. Operation n may begin when all have
// finished n - num_slots: the next ones find that of their slot.
inline Control initial_control(int32_t num_slots, uint32_t newest_epoch = 0) {
  Control initial = {};
  initial.entry = EntryWord::pack(newest_epoch, 0);
  for (int32_t next = 1; next <= num_slots; ++next) {
    const uint32_t epoch = newest_epoch + next;
    for (uint32_t& finished : initial.finished[epoch % num_slots]) finished = epoch - num_slots;
  }
  return initial;
}

// Each source's begin at a unit: counts are loaded two by two.
constexpr int64_t counts_offset(int32_t slot, int32_t peer, int32_t num_ranks, int32_t experts_per_rank) {
  return static_cast<int64_t>(sizeof(Control)) +
         (int64_t{slot} * num_ranks + peer) * align_up(experts_per_rank * 8, kUnitBytes);
}
constexpr int64_t control_bytes(int32_t num_ranks, int32_t experts_per_rank) {
  return counts_offset(kMaxSlots, 0, num_ranks, experts_per_rank);
}

// What a kernel that gave up, or the host, leaves in pinned host memory.
struct FailureRecord {
  uint32_t valid;
  uint32_t reason;  // FailureReason
  uint32_t op;      // OpKind
  uint32_t epoch;
  uint32_t rank, peer;
  uint32_t expected, seen;
};

// An operation runs in one launch, or in two: a start, which takes its turn, and a done, beside whatever comes then.
enum class Phase : int32_t { kWhole, kStart, kDone };

// Whether many rows go once to a node, and on from there: not where each rank is one.
constexpr bool has_levels(int32_t node_size, int32_t num_ranks) { return 1 < node_size && node_size < num_ranks; }

// The kernel ABI: all that a kernel knows of its peers. Who fills it (ffi/cuda/group.cc) decides the transport. Kernels
// for groups over a network (ffi/cuda/network.h) find a NetworkTable in its place.
struct PeerTable {
  uint8_t* arena[kMaxRanks];
  Control* control[kMaxRanks];
};
struct Peers {
  int32_t rank, num_ranks, experts_per_rank;
  int32_t node_size;                                  // so many ranks in a row map each other's memory
  Divisor by_ranks, by_others, by_experts, by_top_k;  // others: ranks but this; experts: of a rank
  ArenaLayout layout;
  uint64_t timeout_ns;
  FailureRecord* failure;  // pinned host memory
  Control* control;        // this rank's own
  const PeerTable* table;  // in device memory: an argument of its size would slow down every launch
#ifdef JAX_EP_TIMELINE
  uint64_t* timeline;  // [kTimelineOps, kTimelineBlocks, kTimelinePhases], nanoseconds
#endif
};
#ifdef JAX_EP_TIMELINE
inline constexpr int kTimelineOps = 32, kTimelineBlocks = 1024, kTimelinePhases = 10;  // the last operations
#endif

}  // namespace jax_ep
