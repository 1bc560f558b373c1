// The rounds of an operation (Round in call.h): which indices the rows of a round have. In each round, a rank with
// tokens tells every rank the range of their indices. In a dispatch, these rows come from the rank with tokens. In a
// combine, they go back to it.
#pragma once

#include "ffi/cuda/control_words.cuh"

namespace jax_ep {

// The indices [begin, end) of rows from one rank to another.
struct IndexRange {
  int32_t begin, end;
};
struct RangesOfRanks {
  IndexRange of_rank[kMaxRanksOfKernels];
};

// Sends `peer` the range of indices that the rows between this rank's tokens and `peer` have in this round. One warp
// calls it.
__device__ __forceinline__ void send_range(const Operation& op, int32_t peer, const IndexRange& rows) {
  const int32_t copies = kHasNetwork && is_remote(op.peers, peer) ? 1 : op.num_copies();
  if (lane_id() >= copies) return;
  const int32_t at = num_rows_index(lane_id(), op.peers.rank);
  op.send_number(peer, &op.control_of(peer).num_rows[op.state.slot + kSlotsWithRounds][at], rows.begin);
  op.send_number(peer, &op.control_of(peer).num_rows[op.state.slot][at], rows.end);
}

// Waits for the two words in which `source` sends the range of indices of this round's rows. The returned range is
// never longer than the round, even if the source is in another call and sends other numbers. After a failure, the
// range is empty.
__device__ __forceinline__ IndexRange wait_range(const Operation& op, int32_t source) {
  const Round& round = op.call.round;
  const int32_t begin = min(max(op.wait_num_rows(source, kSlotsWithRounds), 0), round.first_token);
  const int32_t end = min(op.wait_num_rows(source), begin + op.call.end_token() - round.first_token);
  return {begin, max(end, begin)};
}
__device__ __noinline__ static IndexRange wait_range_of(State& state, int32_t source) {
  return wait_range(operation_of<Operation>(state), source);
}

// Calls send_range() for each rank, in one warp per rank. range_of(rank) returns the range, in all lanes.
template <typename RangeOf>
__device__ __forceinline__ void send_ranges(const Operation& op, RangeOf range_of) {
#pragma unroll 1
  for (int32_t rank = warp_id(); rank < op.peers.num_ranks; rank += op.num_worker_threads / 32) {
    const IndexRange rows = range_of(rank);
    send_range(op, rank, rows);
  }
}

// Tells all ranks the ranges of a known route. The workers of one block call it. (In the column of this rank itself,
// send_index has the numbers of tokens, and no indices. This rank does not use that range.)
__device__ __noinline__ static void send_ranges_of_route(State& state, const int32_t* send_index) {
  const auto op = operation_of<Operation>(state);
  send_ranges(op, [&](int32_t rank) -> IndexRange {
    int32_t end = 0, number = 0;
#pragma unroll 1
    for (int32_t token = op.call.round.first_token + lane_id(); token < op.call.end_token(); token += 32) {
      const int32_t index = __ldg(send_index + int64_t{token} * op.peers.num_ranks + rank);
      end = max(end, index + 1);
      number += index >= 0;
    }
    end = __reduce_max_sync(kAllLanes, end);
    return {end - __reduce_add_sync(kAllLanes, number), end};
  });
}

// The same for all_to_all and all_to_all_back, in which the rows for a rank follow those for the rank before it.
// `sizes` has `per_rank` numbers for each rank, which sum up to its rows.
__device__ __noinline__ static void send_ranges_of_splits(State& state, const int32_t* sizes, int32_t per_rank) {
  const auto op = operation_of<Operation>(state);
  send_ranges(op, [&](int32_t rank) -> IndexRange {
    int32_t first_row = 0, size = 0;
#pragma unroll 1
    for (int32_t i = lane_id(); i < (rank + 1) * per_rank; i += 32) {
      (i < rank * per_rank ? first_row : size) += __ldg(sizes + i);
    }
    first_row = __reduce_add_sync(kAllLanes, first_row), size = __reduce_add_sync(kAllLanes, size);
    const auto index_at = [&](int32_t token) { return min(max(token - first_row, 0), size); };
    return {index_at(op.call.round.first_token), index_at(op.call.end_token())};
  });
}

}  // namespace jax_ep
