// The destinations of rows. Each rank counts its rows per expert, and sends each rank the counts of that rank's
// experts. Each rank computes prefix sums over the counts that arrive.
#pragma once

#include "ffi/cuda/share_room.cuh"

namespace jax_ep {

template <typename Config>
struct Routing : DispatchOperands<Config> {
  using Base = DispatchOperands<Config>;
  using Base::args, Base::experts_per_rank, Base::kClearsBeforeEntry, Base::kIsLowLatency, Base::kStealsRows,
      Base::end_token, Base::first_token, Base::in_rounds, Base::kHasRounds, Base::new_route, Base::num_recv_from,
      Base::num_experts, Base::op, Base::peers, Base::plan, Base::rows_from, Base::scratch, Base::sends_numbers,
      Base::shared;

  // The expert ids that this lane counts at once.
  static constexpr int kCountsAtOnce = kStealsRows ? 4 : 1;
  struct Ids {
    int32_t expert[kCountsAtOnce];
  };

  // Notifies every rank of the operation. With a new route or with splits, first sends every rank the number of rows
  // for each expert of that rank. In rounds, tells every rank which indices its rows have.
  __device__ void notify(const Ids& ids) const {
    const SendCounts counts = this->send_counts();
    if (new_route()) {
      count_all_tokens(counts, ids);
    } else if (args.splits) {
      op.sync_workers();
      count_splits(counts);
    }
    if (!op.state.failed) {
      if (sends_numbers()) {
#pragma unroll 1
        for (int32_t expert = threadIdx.x; expert < num_experts(); expert += op.num_worker_threads) {
          const int32_t peer = peers.rank_of(expert);
          op.send_number(peer, op.counts_at(peer, peers.rank) + expert - peer * experts_per_rank(),
                         counts.experts[expert]);
        }
        if (!in_rounds()) op.send_num_rows(counts.ranks);
      }
      if (in_rounds() && args.splits) send_ranges_of_splits(op.state, args.splits, experts_per_rank());
      if (in_rounds() && !sends_numbers()) send_ranges_of_route(op.state, args.known_send_index);
      for_rank_of_thread(peers, op.num_worker_threads, [&](int32_t peer) { op.notify(peer); });
    }
    op.stamp(Stamp::kRouted);
    op.tell_former_finished();
  }

  __device__ SendCounts send_counts() const {
    auto* const counts = static_cast<int32_t*>(scratch);
    auto* const groups = reinterpret_cast<uint32_t*>(counts + num_experts() + peers.num_ranks);
    return {counts, counts + num_experts(), groups, groups + num_experts()};
  }

  // Zeroes the counts. The workers may count after their next barrier.
  __device__ void clear(const SendCounts& counts) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < num_experts() + peers.num_ranks; i += op.num_worker_threads)
      counts.experts[i] = 0;
  }
  // Zeroes the bits of experts and of ranks, which are adjacent. publish_route() may set bits after the next barrier.
  __device__ void clear_groups(const SendCounts& counts) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < num_experts() + peers.num_ranks; i += op.num_worker_threads)
      counts.groups_of_expert[i] = 0;
  }

  __device__ void count_splits(const SendCounts& counts) const {
#pragma unroll 1
    for (int32_t expert = threadIdx.x; expert < num_experts(); expert += op.num_worker_threads) {
      counts.experts[expert] = args.splits[expert];
      atomicAdd(&counts.ranks[peers.rank_of(expert)], args.splits[expert]);
    }
    op.sync_workers();
  }

  // Counts the tokens of all rounds. In rounds, also sends each rank two numbers: its rows in all rounds before this
  // one, and in all rounds to the end of this one. `ids`: the first ids, from ids_to_count(); not used in rounds.
  __device__ void count_all_tokens(const SendCounts& counts, const Ids& ids) const {
    if constexpr (!kHasRounds) {
      count_tokens(counts, 0, args.num_tokens, ids, kClearsBeforeEntry, [] {});
    } else {
      int32_t begin = 0;
#pragma unroll 1
      for (int32_t part = in_rounds() ? 0 : 2; part < 3; ++part) {  // earlier rounds, this round, all others
        const int32_t end = part == 0 ? first_token() : part == 1 ? end_token() : args.num_tokens;
        count_tokens(counts, begin, end, in_rounds() ? ids_to_count(begin, end) : ids, kClearsBeforeEntry, [] {});
        // The next count_tokens() begins with a barrier, after which it may change the counts.
        if (part < 2 && !op.state.failed) op.send_num_rows(counts.ranks, part == 0 ? kSlotsWithRounds : 0);
        begin = end;
      }
    }
  }

  // Loads the first expert ids of tokens [first, last) that this lane counts. A warp loads kCountsAtOnce times as many
  // tokens as fit in its lanes.
  __device__ Ids ids_to_count(int32_t first, int32_t last) const {
    const int32_t tokens = peers.by_top_k.quotient(32), token = peers.by_top_k.quotient(lane_id());
    Ids ids;
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      const int32_t at = first + (warp_id() + i * plan.block_warps()) * tokens;
      const bool present = token < tokens && at + token < last;
      ids.expert[i] = present ? __ldg(args.topk_idx + int64_t{at} * args.top_k + lane_id()) : -1;
    }
    return ids;
  }

  // Counts tokens [first, last). `ids` are their first ids, from ids_to_count(). The workers meet at a barrier before
  // they count, and at another one at the end. `skips_first_barrier`: they have already met since the counts were
  // zeroed, or there are no tokens to count and between_barriers() does nothing. Each thread calls between_barriers()
  // after the first barrier and before the last.
  template <typename BetweenBarriers>
  __device__ void count_tokens(const SendCounts& counts, int32_t first, int32_t last, Ids ids, bool skips_first_barrier,
                               BetweenBarriers between_barriers) const {
    const int32_t stride = peers.by_top_k.quotient(32) * plan.block_warps() * kCountsAtOnce;
    const int32_t k = lane_id() - peers.by_top_k.quotient(lane_id()) * args.top_k;
    Pair pairs[kCountsAtOnce];
    const auto look_at = [&] {
#pragma unroll
      for (int i = 0; i < kCountsAtOnce; ++i) pairs[i] = pair(ids.expert[i], k);
    };
    look_at();
    if (!skips_first_barrier) op.sync_workers();
    op.stamp(Stamp::kEntered);
    between_barriers();
#pragma unroll 1
    while (first < last) {
      first += stride;
      ids = ids_to_count(first, last);  // the loads overlap the counting of `pairs`
#pragma unroll
      for (int i = 0; i < kCountsAtOnce; ++i) count(counts, pairs[i]);
      if (first < last) look_at();
    }
    op.sync_workers();
  }

  // A pair (token, k) of this lane: the token names the expert.
  struct Pair {
    int32_t expert, rank;  // -1 if there is none
    bool is_first;         // the token's first expert on the rank: a token counts once per rank
  };

  __device__ Pair pair(int32_t expert, int32_t k) const {
    if (!is_expert(expert, num_experts())) expert = -1;
    const int32_t rank = expert >= 0 ? peers.rank_of(expert) : -1;
    return {expert, rank, count_earlier(rank, k) == 0};
  }

  __device__ void count(const SendCounts& counts, const Pair& pair) const {
    if (pair.expert < 0) return;
    atomicAdd(&counts.experts[pair.expert], 1);
    if (pair.is_first) atomicAdd(&counts.ranks[pair.rank], 1);
  }

  // How many of the k lanes before this one have the same value.
  __device__ static int32_t count_earlier(int32_t value, int32_t k) {
    const uint32_t earlier = ((1u << k) - 1) << (lane_id() - k);
    return __popc(__match_any_sync(kAllLanes, value) & earlier);
  }

  // Prepares the data that the block needs to write rows. In the throughput and the balanced variant, all warps call
  // it: the control warp computes the destinations, and the first warps load the number of rows from each source. In
  // the low-latency variant, only the control warp calls it, and each warp loads the numbers of rows itself.
  __device__ void learn_destinations() const {
    if (op.is_control_warp()) compute_destinations(Destinations(scratch, peers.num_ranks, experts_per_rank()));
    if (!kIsLowLatency) {
      for_rank_of_thread(peers, op.num_worker_threads, [&](int32_t source) {
        const IndexRange rows = rows_from(source);
        if (kHasRounds) shared.first_index_from[source] = rows.begin;
        shared.end_index_from[source] = rows.end;
      });
    }
    __syncwarp();
    // Workers wait at the barrier in await_destinations(). The extra control warp of the low-latency variant only
    // arrives at it. In other variants, the control warp is a worker, too.
    if (op.is_worker()) return;
    if (op.state.failed) give_up();
    named_barrier_arrive(kDestinationsBarrier, blockDim.x);
  }
  // Waits until learn_destinations() is done. All workers of the block call it. Returns false if the operation has
  // failed. All workers get the same answer, because the warps of a warp group must agree whether they have a row.
  __device__ bool await_destinations() const {
    if (op.state.failed) give_up();
    named_barrier(kDestinationsBarrier, blockDim.x);
    return !shared.gives_up;
  }
  __device__ void give_up() const { atomicExch(&shared.gives_up, 1); }

  // Computes the first row of each expert's group, by a prefix sum over the sizes of the groups. For a known
  // route, the sizes are an operand, already rounded up. One warp calls it; a lane computes two experts. If rows do not
  // fit, share_room() then decides which are kept.
  __device__ void compute_destinations(const Destinations& destinations) const {
    if (args.is_all_to_all) return;
    int64_t rows_before_batch = 0;  // of the experts before the 64 that the warp computes at once
    bool fits = true;
#pragma unroll 1
    for (int32_t base = 0; base < experts_per_rank(); base += 64) {
      const int32_t first = base + 2 * lane_id(), end = min(first + 2, experts_per_rank());
      int32_t need[2] = {};
      int64_t size[2] = {};
      if (new_route()) {
        if (first < end) sum_sources(destinations, first, need);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (first + i < end) need[i] = __ldg(args.known_group_sizes + first + i);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) size[i] = align_up(need[i], args.alignment);
      const int64_t through = rows_before_batch + sum_through(size[0] + size[1]);
      int64_t rows_before = through - size[0] - size[1];
      rows_before_batch = __shfl_sync(kAllLanes, through, 31);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t expert = first + i;
        if (expert >= end) break;
        const ExpertGroup group = place_group(args.layout, expert, rows_before, need[i], args.capacity, args.alignment);
        destinations.first_row[expert] = static_cast<int32_t>(group.first_row);
        destinations.counts[expert] = new_route() ? need[i] : __ldg(args.known_counts + expert);
        destinations.group_sizes[expert] = group.group_size;
        fits &= group.fits;
        rows_before += size[i];
      }
    }
    const bool overflows = __any_sync(kAllLanes, !fits) && new_route();
    const int32_t dropped = overflows ? share_room(op.state, destinations.first_position) : 0;
    if (lane_id() == 0) shared.dropped = dropped;
  }

  // Sums the rows that `expert` and the next expert get from all sources. Stores the position of each source's first
  // row in p.first_position.
  __device__ void sum_sources(const Destinations& p, int32_t expert, int32_t (&total)[2]) const {
    constexpr int kAtOnce = 4;
    const bool has_next = expert + 1 < experts_per_rank();
#pragma unroll 1
    for (int32_t first = 0; first < peers.num_ranks; first += kAtOnce) {
      uint4 words[kAtOnce];
      int32_t missing = first;
      const auto all_arrived = [&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          words[i] = load_unit(op.counts_at(peers.rank, min(first + i, peers.num_ranks - 1)) + expert);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (words[i].y == op.state.epoch && (words[i].w == op.state.epoch || !has_next)) continue;
          all = false;
          missing = min(first + i, peers.num_ranks - 1);
        }
        return all;
      };
      op.wait_until([&] { return missing; }, all_arrived);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= peers.num_ranks) break;
        int32_t* const begin = p.first_position + (first + i) * experts_per_rank() + expert;
        begin[0] = total[0];
        total[0] += static_cast<int32_t>(words[i].x);
        if (!has_next) continue;
        begin[1] = total[1];
        total[1] += static_cast<int32_t>(words[i].z);
      }
    }
  }

  __device__ void write_counts(const Destinations& p) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; args.is_all_to_all && i < num_experts(); i += op.num_worker_threads) {
      const int32_t source = peers.rank_of(i);
      args.counts[i] = op.wait_number(source, op.counts_at(peers.rank, source) + i - source * experts_per_rank());
    }
    if (!new_route()) return;
#pragma unroll 1
    for (int32_t expert = threadIdx.x; expert < experts_per_rank(); expert += op.num_worker_threads) {
      args.counts[expert] = p.counts[expert];
      args.group_sizes[expert] = p.group_sizes[expert];
    }
    for_rank_of_thread(peers, op.num_worker_threads, [&](int32_t source) {
      args.num_recv_per_rank[source] = num_recv_from(source);
      const int32_t* const first = p.first_position + source * experts_per_rank();
      if (args.num_rows_per_rank) args.num_rows_per_rank[source] = first[experts_per_rank()] - first[0];
    });
    if (threadIdx.x != 0) return;
    *args.num_dropped = shared.dropped;
    if (shared.dropped) red_add_relaxed_gpu(&op.own_control().counters.dropped, shared.dropped);
  }

  // The row of the result for a row of a new route, for k = lane: the group's first row, plus the row's position in the
  // group. -1 if the expert is not here, or if the row is dropped. In the layout "token", the first expert's group has
  // all rows, and only the first k that names this rank has the position.
  __device__ int32_t new_row(int32_t source, const RowHeader& header, const Destinations& destinations) const {
    if (header.expert < 0 || header.position_in_source < 0) return -1;
    const int32_t expert = args.has_token_rows() ? 0 : header.expert;
    const int32_t* const first = destinations.first_position + source * experts_per_rank() + expert;
    const int32_t position = first[0] + header.position_in_source;
    const int32_t end = first[experts_per_rank()];  // where the next source's rows begin; or the end of the group
    return position < end ? destinations.first_row[expert] + position : -1;
  }
};

}  // namespace jax_ep
