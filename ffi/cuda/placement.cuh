// Exactly balanced placement of a group's rows, computed by one block. jax_ep/_placement.py explains the algorithm and
// has the same steps. In this file, a slot is a replica slot.
//
// The limit is the number of rows that a rank may compute. A donor is a rank whose home experts have more rows. The
// rows above the limit are its excess. The queue of a rank has the rows of its home experts; the rows of the expert
// with most rows come first. The axis is the excess of all donors, one donor after the other, the largest excess first.
#pragma once

#include "ffi/cuda/balance.h"
#include "ffi/cuda/control_words.cuh"

namespace jax_ep {

// The plan for each rank.
struct RankPlacements {
  int32_t load[kMaxLocalRanks];        // rows of its home experts
  int32_t num_rows[kMaxLocalRanks];    // rows that it computes
  int32_t source[kMaxLocalRanks];      // the rank from which it takes rows; -1 for none
  int32_t begin[kMaxLocalRanks];       // the first row that it takes, in the queue of `source`
  int32_t end[kMaxLocalRanks];         // the row behind the last one
  int32_t first_copy[kMaxLocalRanks];  // the place, in the queue of `source`, of the first expert that it copies
  int32_t num_copies[kMaxLocalRanks];
  uint32_t receivers[kMaxLocalRanks];  // bits of the ranks that take rows from it
  // By the number of the donor, largest excess first:
  int32_t donor[kMaxLocalRanks], excess_end[kMaxLocalRanks], served[kMaxLocalRanks];
  bool has_donors;
};

// Arrays [E] in shared memory. E is the number of home experts of all ranks.
struct ExpertPlacements {
  int32_t* needs;   // the rows of the whole group that name the expert
  int32_t* offset;  // the place of this rank's first row: among the expert's rows or, if there are donors, in the queue
  int32_t* start;   // where the expert begins in the queue
  int32_t* place;   // the expert's place in the queue
  int32_t* queue;   // [R, L]: the expert at each place of each queue
};

constexpr int64_t limit_of(int64_t rows, int64_t tolerance_units) {
  return rows + rows * tolerance_units / kToleranceUnitsPerOne;
}

struct Placing {
  const Operation& op;
  RankPlacements& ranks;
  const ExpertPlacements experts;
  const Divisor by_home_experts;
  const int32_t num_ranks, experts_per_rank, num_slots, tolerance_units;

  __device__ int32_t num_experts() const { return num_ranks * experts_per_rank; }

  // Places the rows. The workers call it when `needs` is complete. When it returns, all workers may read the placement.
  __device__ void place() const {
    sum_loads();
    op.sync_workers();
    if (warp_id() == 0) find_intervals();
    op.sync_workers();
    if (!ranks.has_donors) return;
    sort_queues();
    op.sync_workers();
    fill_slots();
    op.sync_workers();
    if (warp_id() == 0) finish();
    op.sync_workers();
  }

  // The expert in replica slot `slot` of a rank; -1 for none.
  __device__ int32_t expert_in_slot(int32_t rank, int32_t slot) const {
    if (slot >= ranks.num_copies[rank]) return -1;
    return experts.queue[ranks.source[rank] * experts_per_rank + ranks.first_copy[rank] + slot];
  }

 private:
  __device__ int32_t num_warps() const { return op.num_worker_threads / 32; }

  __device__ void sum_loads() const {
    for (int32_t rank = warp_id(); rank < num_ranks; rank += num_warps()) {
      int32_t load = 0;
      for (int32_t i = lane_id(); i < experts_per_rank; i += 32) load += experts.needs[rank * experts_per_rank + i];
      load = __reduce_add_sync(kAllLanes, load);
      if (lane_id() == 0) ranks.load[rank] = load;
    }
  }

  // Finds the rank from which each rank takes rows, and the interval of that rank's queue. A warp calls it, with a lane
  // per rank.
  __device__ void find_intervals() const {
    const int32_t rank = lane_id();
    const bool is_rank = rank < num_ranks;
    const int32_t load = is_rank ? ranks.load[rank] : 0, total = __reduce_add_sync(kAllLanes, load);
    const auto limit = static_cast<int32_t>(limit_of((total + num_ranks - 1) / num_ranks, tolerance_units));
    const int32_t excess = max(load - limit, 0), room = is_rank ? max(limit - load, 0) : 0;
    const uint32_t donors = __ballot_sync(kAllLanes, excess > 0);
    if (is_rank) {
      ranks.source[rank] = -1;
      ranks.begin[rank] = ranks.end[rank] = ranks.num_copies[rank] = 0;
      ranks.receivers[rank] = 0;
      ranks.num_rows[rank] = load;
    }
    if (rank == 0) ranks.has_donors = donors != 0;
    if (donors == 0) return;

    // The running sums of the donors' excess and of the receivers' room. The largest comes first.
    int32_t number = 0, excess_end = excess, room_end = room;
    for (int32_t other = 0; other < num_ranks; ++other) {
      const int32_t its_excess = __shfl_sync(kAllLanes, excess, other), its_room = __shfl_sync(kAllLanes, room, other);
      const bool gives_before = precedes(its_excess, other, excess, rank);
      number += gives_before;
      excess_end += gives_before ? its_excess : 0;
      room_end += precedes(its_room, other, room, rank) ? its_room : 0;
    }
    if (is_rank) {
      ranks.donor[number] = rank;
      ranks.excess_end[number] = excess_end;
    }
    __syncwarp();

    const int32_t all_excess = ranks.excess_end[num_ranks - 1];
    const int32_t last = min(room_end, all_excess), first = min(room_end - room, all_excess);
    const bool takes = is_rank && last > first;
    int32_t from = 0;  // the number of this receiver's donor
    for (int32_t donor = 0; donor < num_ranks; ++donor) from += ranks.excess_end[donor] < last;

    const int32_t donor = lane_id();  // from here on, a lane is also a donor's number
    int32_t served = 0;               // the end of the last interval that this donor or an earlier one serves
    for (int32_t other = 0; other < num_ranks; ++other) {
      const int32_t its_last = __shfl_sync(kAllLanes, takes ? last : 0, other);
      if (__shfl_sync(kAllLanes, from, other) <= donor) served = max(served, its_last);
    }
    if (is_rank) ranks.served[donor] = served;
    __syncwarp();
    if (takes) set_interval(rank, from, first, last);
    // If the receivers have no room for all of a donor's excess, the next donor takes the rest.
    if (donor + 1 < __popc(donors) && ranks.excess_end[donor] > served) {
      set_interval(ranks.donor[donor + 1], donor, served, ranks.excess_end[donor]);
    }
  }

  __device__ static bool precedes(int32_t amount, int32_t index, int32_t than, int32_t than_index) {
    return amount > than || (amount == than && index < than_index);
  }

  // Rank `to` takes [first, last) of the axis from donor number `from`: an interval of that donor's queue.
  __device__ void set_interval(int32_t to, int32_t from, int32_t first, int32_t last) const {
    const int32_t before = from > 0 ? ranks.served[from - 1] : 0;  // where the donor's queue begins
    ranks.source[to] = ranks.donor[from];
    ranks.begin[to] = first - before;
    ranks.end[to] = last - before;
  }

  // Sorts each rank's home experts, those with most rows first. One to 32 threads per expert, a power of two, share its
  // comparisons.
  __device__ void sort_queues() const {
    const int32_t log_threads = min(31 - __clz(max(op.num_worker_threads / num_experts(), 1)), 5);
    const int32_t part = lane_id() & ((1 << log_threads) - 1);
    for (int32_t begin = warp_id() * 32; begin < num_experts() << log_threads; begin += op.num_worker_threads) {
      const int32_t expert = (begin + lane_id()) >> log_threads;
      const bool is_expert = expert < num_experts();
      const int32_t first = is_expert ? by_home_experts.quotient(expert) * experts_per_rank : 0;
      const int32_t need = is_expert ? experts.needs[expert] : 0;
      int32_t place = 0, start = 0;
      for (int32_t other = first + part; other < first + experts_per_rank; other += 1 << log_threads) {
        const int32_t its_need = experts.needs[other];
        const bool before = precedes(its_need, other, need, expert);
        place += before;
        start += before ? its_need : 0;
      }
      for (int32_t other_part = 1; other_part < 1 << log_threads; other_part *= 2) {
        place += __shfl_xor_sync(kAllLanes, place, other_part);
        start += __shfl_xor_sync(kAllLanes, start, other_part);
      }
      if (!is_expert || part != 0) continue;
      experts.place[expert] = place;
      experts.start[expert] = start;
      experts.queue[first + place] = expert;
      experts.offset[expert] += start;
    }
  }

  // Finds the experts that each rank copies. If a rank has too few slots, its interval ends earlier. A warp handles a
  // rank.
  __device__ void fill_slots() const {
    for (int32_t rank = warp_id(); rank < num_ranks; rank += num_warps()) {
      const int32_t source = ranks.source[rank];
      if (source < 0) continue;
      const int32_t* const queue = experts.queue + source * experts_per_rank;
      const int32_t begin = ranks.begin[rank], end = ranks.end[rank];
      int32_t first = 0, count = 0;  // the experts of an interval follow one another in the queue
      for (int32_t place = lane_id(); place - lane_id() < experts_per_rank; place += 32) {
        const int32_t expert = queue[min(place, experts_per_rank - 1)];
        const int32_t start = experts.start[expert];
        const bool overlaps = place < experts_per_rank && start < end && start + experts.needs[expert] > begin;
        const uint32_t found = __ballot_sync(kAllLanes, overlaps);
        if (count == 0 && found != 0) first = place - lane_id() + __ffs(static_cast<int>(found)) - 1;
        count += __popc(found);
      }
      const int32_t num_copies = min(count, num_slots);
      __syncwarp();  // all lanes have read the interval
      if (lane_id() != 0) continue;
      const int32_t last = num_copies > 0 ? queue[first + num_copies - 1] : 0;
      ranks.first_copy[rank] = first;
      ranks.num_copies[rank] = num_copies;
      ranks.end[rank] = num_copies > 0 ? min(end, experts.start[last] + experts.needs[last]) : begin;
    }
  }

  // Computes the number of rows of each rank. If the largest number would exceed the largest home load, no row moves. A
  // warp calls it, with a lane per rank.
  __device__ void finish() const {
    const int32_t rank = lane_id();
    const bool is_rank = rank < num_ranks;
    const int32_t load = is_rank ? ranks.load[rank] : 0, source = is_rank ? ranks.source[rank] : -1;
    const int32_t taken = source >= 0 ? ranks.end[rank] - ranks.begin[rank] : 0;
    int32_t num_rows = load + taken;
    uint32_t receivers = 0;
    for (int32_t other = 0; other < num_ranks; ++other) {
      const int32_t its_taken = __shfl_sync(kAllLanes, taken, other);
      if (__shfl_sync(kAllLanes, source, other) != rank) continue;
      num_rows -= its_taken;
      receivers |= 1u << other;
    }
    const bool moves = __reduce_max_sync(kAllLanes, num_rows) <= __reduce_max_sync(kAllLanes, load);
    if (!is_rank) return;
    ranks.num_rows[rank] = moves ? num_rows : load;
    ranks.receivers[rank] = moves ? receivers : 0;
    if (!moves) ranks.num_copies[rank] = 0;
  }
};

}  // namespace jax_ep
