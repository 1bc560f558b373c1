// Rows under way: 16-byte units that show by themselves that they have arrived.
//
// A receiver keeps its memory filled with one pattern, "empty". A sender writes a unit in one store, which arrives
// whole; the receiver polls the unit itself until it is not empty any more, takes it, and leaves the place empty for
// the next operation. No flag, and so no fence behind the data: what has arrived can be used while the rest is on its
// way.
//
// Data may look like "empty". A sender that meets such a unit sends a stand-in, and a mark for the chunk (a word with
// the epoch) that says which stand-ins are in truth empty units; the receiver of a stand-in waits for the mark. Both
// sides' code for it is never on the way of other data.
//
// Headers need no such care: they hold their epoch.
#pragma once

#include "ffi/cuda/control_words.cuh"

namespace jax_ep {

inline constexpr uint32_t kEmptyWord = kEmptyByte * 0x01010101u;

__device__ __forceinline__ uint4 empty_unit() { return make_uint4(kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord); }
__device__ __forceinline__ bool is_empty_but_last(uint4 u) {
  return u.x == kEmptyWord && u.y == kEmptyWord && u.z == kEmptyWord;
}
__device__ __forceinline__ bool is_empty(uint4 u) { return is_empty_but_last(u) && u.w == kEmptyWord; }
__device__ __forceinline__ bool is_stand_in(uint4 u) { return is_empty_but_last(u) && u.w == (kEmptyWord ^ 1); }
__device__ __forceinline__ uint4 stand_in() { return make_uint4(kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord ^ 1); }

// Where a row for a far rank waits to be put. It is free when the row's place at that rank is.
__device__ __forceinline__ uint8_t* staged_row(const Operation& op, int32_t peer, int32_t index) {
  const NetworkLayout network(op.peers.layout, op.peers.num_ranks);
  return op.state.table.arena[op.peers.rank] + network.staged_row(op.state.slot, peer, index);
}

// A row in the memory of rank `at`; for a far one, `row` is where it is staged.
struct RowPlace {
  uint8_t* row;
  unsigned long long* marks;  // one per chunk of the payload, then one per unit of scales

  RowPlace() = default;
  __device__ __forceinline__ RowPlace(const Operation& op, int32_t at, int32_t from, int32_t index) {
    const ArenaLayout& layout = op.peers.layout;
    const int32_t number = layout.row_number(op.state.slot, from, index);
    uint8_t* arena = op.state.table.arena[at];
    row = is_far(op.peers, at) ? staged_row(op, at, index) : arena + layout.row_offset(number);
    marks = reinterpret_cast<unsigned long long*>(arena + layout.marks_offset(number));
  }
  // One that arrives here, by its number.
  __device__ __forceinline__ RowPlace(const Operation& op, int32_t number) {
    uint8_t* const arena = op.state.table.arena[op.peers.rank];
    row = arena + op.peers.layout.row_offset(number);
    marks = reinterpret_cast<unsigned long long*>(arena + op.peers.layout.marks_offset(number));
  }
  // What another lane of the warp has.
  __device__ __forceinline__ uint8_t* row_of_lane(int32_t lane) const { return of_lane(row, lane); }
  __device__ __forceinline__ unsigned long long* marks_of_lane(int32_t lane) const { return of_lane(marks, lane); }
  template <typename T>
  __device__ __forceinline__ static T* of_lane(T* mine, int32_t lane) {
    return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), lane));
  }

  __device__ __forceinline__ RowHeader* header(int32_t k) const { return reinterpret_cast<RowHeader*>(row) + k; }
  // This lane's unit of a chunk of the payload, and the unit of scales of the chunk, which follow `payload_bytes`.
  __device__ __forceinline__ uint8_t* unit(const Operation& op, int32_t chunk) const {
    return row + static_cast<uint32_t>(op.peers.layout.header_bytes + chunk * kChunkBytes + lane_id() * kUnitBytes);
  }
  __device__ __forceinline__ uint8_t* scales(const Operation& op, int32_t payload_bytes, int32_t chunk) const {
    return row + static_cast<uint32_t>(op.peers.layout.header_bytes + payload_bytes + chunk * kUnitBytes);
  }
};

// What a warp sends at once: a unit of each lane, or of some.
struct Chunk {
  uint4 unit;
  uint32_t empties;  // of a marked chunk, the lanes whose unit is empty
  bool marked;

  __device__ __forceinline__ static Chunk of(uint4 unit, bool present) {
    if (__any_sync(kAllLanes, present && unit.x == kEmptyWord)) return with_mark(unit, present);
    return {unit, 0, false};
  }

  // mark() gives where its mark goes. With a whole warp.
  template <typename Mark>
  __device__ __forceinline__ void send(const Operation& op, int32_t peer, uint8_t* place, Mark mark,
                                       bool present) const {
    if (present) store_unit(place, unit);
    if (!marked) return;
    unsigned long long* const word = mark();
    if (lane_id() == 0) store_word(op.peers, peer, word, tagged(op.state.epoch, empties));
  }

 private:
  __device__ __noinline__ static Chunk with_mark(uint4 unit, bool present) {
    const bool empty = present && is_empty(unit);
    const bool ambiguous = empty || (present && is_stand_in(unit));
    return {ambiguous ? stand_in() : unit, __ballot_sync(kAllLanes, empty), __any_sync(kAllLanes, ambiguous) != 0};
  }
};

// What a stand-in that lane `bit` has sent stands for.
__device__ __noinline__ static uint4 true_unit(Operation op, int32_t peer, const unsigned long long* mark,
                                               int32_t bit) {
  return op.expect_word(peer, mark) >> bit & 1 ? empty_unit() : stand_in();
}

// Looks whether `N` units of this lane have arrived, where place.has(i), at place.at(i); the others are zero.
template <int N, typename Place>
__device__ __forceinline__ void look_at_units(uint4 (&units)[N], const Place& place) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    units[i] = uint4{};
    if (place.has(i)) units[i] = load_unit(place.at(i));
  }
}

// Waits for those that had not, from peer(i), and takes all. resolve(i) gives the true_unit of a stand-in. also() looks
// for what else has to arrive, and says whether it has.
//
// A receiver has hundreds of warps, and most of what they do is here: where all has arrived, it must take few
// instructions, and few between two looks at what has not.
template <int N, typename Peer, typename Place, typename Resolve, typename Also>
__device__ __forceinline__ void take_units(const Operation& op, Peer peer, uint4 (&units)[N], const Place& place,
                                           Resolve resolve, Also also) {
  const auto any_is_odd = [&] {  // or may be
    bool any = false;
#pragma unroll
    for (int i = 0; i < N; ++i) any |= units[i].x == kEmptyWord;
    return any;
  };
  if (!also() || any_is_odd()) {
    int awaited = 0;
    const auto have_come = [&] {
      bool missing = !also();
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!is_empty(units[i])) continue;
        units[i] = load_unit(place.at(i));
        missing = true;
        awaited = i;
      }
      return !missing;
    };
    op.wait_until([&] { return peer(awaited); }, have_come);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (place.has(i)) store_unit(place.at(i), empty_unit());
  }
  if (!any_is_odd()) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (place.has(i) && is_stand_in(units[i])) units[i] = resolve(i);
  }
}

__device__ __forceinline__ void send_header(const Operation& op, RowHeader* place, RowHeader header) {
  header.epoch = op.state.epoch;
  store_unit(place, *reinterpret_cast<const uint4*>(&header));
}

__device__ __forceinline__ RowHeader load_header(const RowHeader* place) {
  const uint4 unit = load_unit(place);
  return {static_cast<int32_t>(unit.x), static_cast<int32_t>(unit.y), __uint_as_float(unit.z), unit.w};
}
// One that has not arrived.
__device__ __forceinline__ RowHeader no_header(const Operation& op) { return {0, 0, 0, op.state.epoch - 1}; }
// Looks once more for a header that had not arrived, and says whether it had.
__device__ __forceinline__ bool look_at_header(const Operation& op, const RowHeader* place, RowHeader& header) {
  if (header.epoch == op.state.epoch) return true;
  header = load_header(place);
  return false;
}

// The rest is for far ranks only.

inline constexpr uint32_t kNoRow = 1;  // beside the epoch, in a signal that comes alone

// Of row `index` from a source, in the memory of whoever waits for it.
__device__ __forceinline__ unsigned long long* signal_of(const Operation& op, int32_t from, int32_t index) {
  const ArenaLayout& layout = op.peers.layout;
  uint8_t* signals = op.state.table.arena[op.peers.rank] + NetworkLayout(layout, op.peers.num_ranks).signals_begin;
  return reinterpret_cast<unsigned long long*>(signals) + layout.row_number(op.state.slot, from, index);
}

// Sends `bytes` of a staged row, from `begin` on, to a far rank, where it is row `index` of source `from`. With one
// warp, when the whole row is staged.
__device__ __forceinline__ void put_row(const Operation& op, int32_t peer, int32_t from, int32_t index, int32_t begin,
                                        int32_t bytes) {
  const ArenaLayout& layout = op.peers.layout;
  uint8_t* const arena = op.state.table.arena[op.peers.rank];
  const int64_t offset = layout.row_offset(layout.row_number(op.state.slot, from, index)) + begin;
  put_with_signal(arena + offset, staged_row(op, peer, index) + begin, bytes, signal_of(op, from, index),
                  op.state.epoch, pe_of(op.peers, peer));
  if (lane_id() != 0) return;
  auto* traffic = reinterpret_cast<Traffic*>(arena + NetworkLayout(layout, op.peers.num_ranks).traffic_begin);
  add(&traffic->rows, 1);
  add(&traffic->bytes, bytes);
}

// Instead: there is none.
__device__ __forceinline__ void put_no_row(const Operation& op, int32_t peer, int32_t from, int32_t index) {
  put_word(signal_of(op, from, index), tagged(kNoRow, op.state.epoch), pe_of(op.peers, peer));
}

// Waits for row `index` of source `from`, which `peer` sends. False if there is none, or the operation fails. One of a
// near rank shows by itself that it has arrived.
__device__ __forceinline__ bool await_signal(const Operation& op, int32_t peer, int32_t from, int32_t index) {
  if (!is_far(op.peers, peer)) return true;
  unsigned long long* const signal = signal_of(op, from, index);
  bool is_there = false;
  op.wait_until(peer, [&] {
    is_there = has_come(signal, op.state.epoch);
    return is_there || has_come(signal, tagged(kNoRow, op.state.epoch));
  });
  return is_there;
}

}  // namespace jax_ep
