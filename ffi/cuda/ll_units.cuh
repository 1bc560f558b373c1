// The in-band (LL) protocol for rows in transit: a 16-byte unit shows by itself that it has arrived.
//
// A receiver keeps its memory filled with one pattern, the sentinel. A sender writes a unit with one store, which
// arrives whole. The receiver polls the unit until it differs from the sentinel, copies it to registers, and stores the
// sentinel again for the next operation. There is no flag, and so no fence between data and flag: the receiver uses the
// units that have arrived while the others are in transit.
//
// Data may equal the sentinel or a second pattern, the escape. In place of either, the sender sends the escape. For the
// chunk, it also sends an escape mask: a word with the epoch, and a bit per lane that is set if the lane's unit is the
// sentinel. A receiver that finds an escape waits for the escape mask. On both sides, escapes have separate code, which
// data without escapes does not run.
//
// Headers need no escapes: they hold their epoch. (Headers for a forwarder do not: a signal follows them.)
#pragma once

#include "ffi/cuda/network_rows.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {

inline constexpr uint32_t kSentinelWord = kSentinelByte * 0x01010101u;

__device__ __forceinline__ uint4 sentinel_unit() {
  return make_uint4(kSentinelWord, kSentinelWord, kSentinelWord, kSentinelWord);
}
// True for the sentinel, the escape, and a few other units. Most other units take one comparison.
__device__ __forceinline__ bool begins_like_sentinel(uint4 u) { return u.x == kSentinelWord; }
__device__ __forceinline__ bool is_sentinel_but_last(uint4 u) {
  return u.x == kSentinelWord && u.y == kSentinelWord && u.z == kSentinelWord;
}
__device__ __forceinline__ bool is_sentinel(uint4 u) { return is_sentinel_but_last(u) && u.w == kSentinelWord; }
__device__ __forceinline__ bool is_escape(uint4 u) { return is_sentinel_but_last(u) && u.w == (kSentinelWord ^ 1); }
__device__ __forceinline__ uint4 escape() {
  return make_uint4(kSentinelWord, kSentinelWord, kSentinelWord, kSentinelWord ^ 1);
}

// The addresses of a row in the memory of rank `at`. For a remote rank, `begin` is in the staging memory on this
// rank, and `escape_masks` is a symmetric address, which store_word() translates (docs/network.md).
struct RowAddress {
  uint8_t* begin;
  unsigned long long* escape_masks;  // one per chunk of the payload, then one per unit of scales

  RowAddress() = default;
  __device__ __forceinline__ RowAddress(const Operation& op, int32_t at, int32_t from, int32_t place) {
    const ArenaLayout& layout = op.peers.layout;
    const int32_t number = layout.row_number(op.state.slot, from, place);
    uint8_t* arena = op.state.table.arena[at];
    begin = is_remote(op.peers, at) ? staged_row(op, at, place) : arena + layout.row_offset(number);
    escape_masks = reinterpret_cast<unsigned long long*>(arena + layout.escape_masks_offset(number));
  }
  // A row that arrives here, by its number in the arena.
  __device__ __forceinline__ RowAddress(const Operation& op, int32_t number) {
    uint8_t* const arena = op.state.table.arena[op.peers.rank];
    begin = arena + op.peers.layout.row_offset(number);
    escape_masks = reinterpret_cast<unsigned long long*>(arena + op.peers.layout.escape_masks_offset(number));
  }
  // The addresses that another lane of the warp holds.
  __device__ __forceinline__ uint8_t* begin_of_lane(int32_t lane) const { return of_lane(begin, lane); }
  __device__ __forceinline__ unsigned long long* escape_masks_of_lane(int32_t lane) const {
    return of_lane(escape_masks, lane);
  }
  template <typename T>
  __device__ __forceinline__ static T* of_lane(T* mine, int32_t lane) {
    return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), lane));
  }

  __device__ __forceinline__ RowHeader* header(int32_t k) const { return reinterpret_cast<RowHeader*>(begin) + k; }
  // unit: this lane's unit of a chunk of the payload. scales: the unit of a chunk's scales, behind the payload of
  // `payload_bytes`.
  __device__ __forceinline__ uint8_t* unit(const Operation& op, int32_t chunk) const {
    return begin + static_cast<uint32_t>(op.peers.layout.header_bytes + chunk * kChunkBytes + lane_id() * kUnitBytes);
  }
  __device__ __forceinline__ uint8_t* scales(const Operation& op, int32_t payload_bytes, int32_t chunk) const {
    return begin + static_cast<uint32_t>(op.peers.layout.header_bytes + payload_bytes + chunk * kUnitBytes);
  }
};

// The addresses of a row at all ranks at which it has an index of at least 0.
struct RowAtRanks {
  RowAddress of_word[kRankWords] = {};  // at this lane's rank

  // source_at(rank) returns the source under which the rank keeps the row. place_of(index) returns the row's place.
  template <typename SourceAt, typename PlaceOf>
  __device__ __forceinline__ RowAtRanks(const Operation& op, const PerRank& index, SourceAt source_at,
                                        PlaceOf place_of) {
    for_rank_of_lane(op.peers, [&](int w, int32_t rank) {
      if (index.of_word[w] >= 0) of_word[w] = RowAddress(op, rank, source_at(rank), place_of(index.of_word[w]));
    });
  }
  // All lanes pass the same rank.
  __device__ __forceinline__ uint8_t* begin_at(int32_t rank) const {
    return of_word[word_of(rank)].begin_of_lane(rank);
  }
  __device__ __forceinline__ unsigned long long* escape_masks_at(int32_t rank) const {
    return of_word[word_of(rank)].escape_masks_of_lane(rank);
  }

 private:
  __device__ __forceinline__ static int word_of(int32_t rank) { return kRankWords == 1 ? 0 : rank / 32; }
};

// The units of a chunk, or the scales of several chunks, as a warp sends them: one unit per lane. For a lane without a
// unit, `present` is false in of() and send().
struct Chunk {
  uint4 unit;
  uint32_t sentinels;  // if has_escapes: a bit for each lane whose unit equals the sentinel
  bool has_escapes;

  __device__ __forceinline__ static Chunk of(uint4 unit, bool present) {
    if (__any_sync(kAllLanes, present && begins_like_sentinel(unit))) return with_escape_mask(unit, present);
    return {unit, 0, false};
  }

  // Stores the units and, if the chunk has escapes, the escape mask. escape_mask() returns the mask's address. All
  // lanes call it, because it may shuffle. A whole warp calls send().
  template <typename EscapeMask>
  __device__ __forceinline__ void send(const Operation& op, int32_t peer, uint8_t* to, EscapeMask escape_mask,
                                       bool present) const {
    if (present) store_unit(to, unit);
    if (has_escapes) send_escape_mask(op, peer, escape_mask());
  }
  // Stores the escape mask at `word`.
  __device__ __forceinline__ void send_escape_mask(const Operation& op, int32_t peer, unsigned long long* word) const {
    if (lane_id() == 0) store_word(op.peers, peer, word, tagged(op.state.epoch, sentinels));
  }
  // Stores the escape masks of scales: each lane's unit has one of its own, at the lane's `word`. Bit 0 is set if the
  // unit is the sentinel.
  __device__ __forceinline__ void send_own_escape_mask(const Operation& op, int32_t peer, unsigned long long* word,
                                                       bool present) const {
    if (present) store_word(op.peers, peer, word, tagged(op.state.epoch, sentinels >> lane_id() & 1));
  }

 private:
  __device__ __noinline__ static Chunk with_escape_mask(uint4 unit, bool present) {
    const bool equals_sentinel = present && is_sentinel(unit);
    const bool ambiguous = equals_sentinel || (present && is_escape(unit));
    return {ambiguous ? escape() : unit, __ballot_sync(kAllLanes, equals_sentinel),
            __any_sync(kAllLanes, ambiguous) != 0};
  }
};

// Packs the four scales of a chunk of fp8 into a unit. Lane i gets the scales that lane i % 8 of each block passes.
// So a warp can pack the scales of eight chunks at once. Whole warps call it.
__device__ __forceinline__ uint4 scales_unit(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  const int32_t first = lane_id() % kLanesOfBlock;
  return make_uint4(__shfl_sync(kAllLanes, bits, first), __shfl_sync(kAllLanes, bits, first + kLanesOfBlock),
                    __shfl_sync(kAllLanes, bits, first + 2 * kLanesOfBlock),
                    __shfl_sync(kAllLanes, bits, first + 3 * kLanesOfBlock));
}
// The scale of this lane's block, from the unit that lane `from` has. Whole warps call it.
__device__ __forceinline__ float scale_of_block(const uint4& unit, int32_t from) {
  const uint32_t scales[] = {__shfl_sync(kAllLanes, unit.x, from), __shfl_sync(kAllLanes, unit.y, from),
                             __shfl_sync(kAllLanes, unit.z, from), __shfl_sync(kAllLanes, unit.w, from)};
  const int32_t block = lane_id() / kLanesOfBlock;
  return __uint_as_float(block < 2 ? (block == 0 ? scales[0] : scales[1]) : (block == 2 ? scales[2] : scales[3]));
}

// Waits for the escape mask, and returns the unit for which the escape of the sender's lane `bit` stands.
__device__ __noinline__ static uint4 true_unit(State& state, int32_t peer, const unsigned long long* escape_mask,
                                               int32_t bit) {
  return operation_of<Operation>(state).wait_word(peer, escape_mask) >> bit & 1 ? sentinel_unit() : escape();
}

// Loads `N` units of this lane, which may or may not have arrived: unit i from addresses.at(i) if addresses.has(i). All
// others are zero.
template <int N, typename Addresses>
__device__ __forceinline__ void look_at_units(uint4 (&units)[N], const Addresses& addresses) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    units[i] = uint4{};
    if (addresses.has(i)) units[i] = load_unit(addresses.at(i));
  }
}

// Waits until all `units` have arrived, and stores the sentinel in their place. look_at_units has loaded them; this
// function loads only the missing units again. peer(i) is the rank that sends unit i. resolve(i) returns the true_unit
// of an escape. poll_more() polls for other data that must arrive, and returns true if it has arrived.
//
// A receiver has hundreds of warps, which spend most of their time here. So this function takes few instructions if all
// units have arrived, and few instructions between two polls.
template <int N, typename Peer, typename Addresses, typename Resolve, typename PollMore>
__device__ __forceinline__ void take_units(const Operation& op, Peer peer, uint4 (&units)[N],
                                           const Addresses& addresses, Resolve resolve, PollMore poll_more) {
  const auto any_needs_check = [&] {  // a sentinel or an escape, or data that begins like them
    bool any = false;
#pragma unroll
    for (int i = 0; i < N; ++i) any |= begins_like_sentinel(units[i]);
    return any;
  };
  const bool needs_check = !poll_more() || any_needs_check();
  if (needs_check) {
    int awaited = 0;
    const auto all_arrived = [&] {
      bool missing = !poll_more();
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!is_sentinel(units[i])) continue;
        units[i] = load_unit(addresses.at(i));
        missing = true;
        awaited = i;
      }
      return !missing;
    };
    op.wait_until([&] { return peer(awaited); }, all_arrived);
  }
  const uint4 sentinel = keep(sentinel_unit());
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (addresses.has(i)) store_unit(addresses.at(i), sentinel);
  }
  if (!needs_check) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (addresses.has(i) && is_escape(units[i])) units[i] = resolve(i);
  }
}

__device__ __forceinline__ void send_header(const Operation& op, RowHeader* to, RowHeader header) {
  header.epoch = op.state.epoch;
  store_unit(to, *reinterpret_cast<const uint4*>(&header));
}

__device__ __forceinline__ RowHeader load_header(const RowHeader* from) {
  const uint4 unit = load_unit(from);
  return {static_cast<int32_t>(unit.x), static_cast<int32_t>(unit.y), __uint_as_float(unit.z), unit.w};
}
// A header that has not arrived.
__device__ __forceinline__ RowHeader no_header(const Operation& op) { return {0, 0, 0, op.state.epoch - 1}; }
// Returns true if `header` has arrived. Otherwise loads it again, and returns false.
__device__ __forceinline__ bool look_at_header(const Operation& op, const RowHeader* from, RowHeader& header) {
  if (header.epoch == op.state.epoch) return true;
  header = load_header(from);
  return false;
}

}  // namespace jax_ep
