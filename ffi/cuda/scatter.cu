#include <algorithm>

#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/rows.cuh"
#include "ffi/cuda/scatter.h"
#include "ffi/cuda/units.cuh"

namespace jax_ep {
namespace {

constexpr int32_t kPlacesBarrier = kFirstBarrier, kTeamsBarrier = kFirstBarrier + 1;  // and those behind

struct Shared {
  State state;
  float products[kMaxBlockWarps][kMaxTopK];
  // Of the tokens that a block's teams send at once, and of those that they sent before: the experts, top_k of each,
  // and their ranks.
  int32_t experts[2][kMaxBlockWarps * kMaxTopK];
  uint32_t ranks[2][kMaxBlockWarps];
  int32_t dropped;
  int32_t arrived[kMaxRanks];  // from each source
  int32_t gives_up;            // a warp knows that the operation has failed, before the block's warps meet
  uint32_t claimed[kMaxBlockWarps];
};

// What a sender has counted of the tokens before the one it sends; in dynamic shared memory.
struct Lookup {
  int32_t* experts;  // [num_experts]: pairs (token, k) that name the expert
  int32_t* ranks;    // [num_ranks]: tokens with an expert on the rank
};

// Where arriving rows go; in dynamic shared memory.
struct Places {
  int32_t* first;        // [R, E_local]: the first place, within the expert's group, of each source's rows
  int32_t* first_row;    // [E_local]
  int32_t* counts;       // [E_local]
  int32_t* group_sizes;  // [E_local]

  __device__ Places(void* memory, int32_t num_ranks, int32_t experts_per_rank) {
    first = static_cast<int32_t*>(memory);
    first_row = first + num_ranks * experts_per_rank;
    counts = first_row + experts_per_rank;
    group_sizes = counts + experts_per_rank;
  }
};

// Chunks that a warp has under way of a row that arrives.
constexpr int receive_batch(Arrival arrival, Form form) {
  if (has_few_rows(form)) return 2;
  return arrival == Arrival::kDequantize ? 2 : 4;
}

// Rows of y that a warp has asked for, for combine's cotangents, and their bytes in shared memory.
constexpr int kRowsAhead = 3;
constexpr int y_bytes(Arrival arrival, Form form) {
  return arrival == Arrival::kCombineBack ? kRowsAhead * receive_batch(arrival, form) * kChunkBytes : 0;
}

static_assert(kMaxScratch + kMaxBlockWarps * y_bytes(Arrival::kCombineBack, Form::kManyRows) + sizeof(Shared) <=
              kMaxBlockSharedBytes);

// Whether, over a network, a row goes to another node once, and from there on to its ranks. (For all_to_all, once is
// what it needs.)
constexpr bool goes_by_node(const Peers& peers, const ScatterArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && !args.blocks && !are_few(args.num_tokens);
}

// Of a row under way, without its scales.
__device__ __forceinline__ int32_t payload_of(const ScatterArgs& args) {
  return args.num_scales ? args.num_scales * static_cast<int32_t>(kChannelsPerScale)
                         : static_cast<int32_t>(args.row_bytes);
}

// One launch of one rank. Rows are of X; they are cast to fp8 on their way out, or not.
template <typename X, bool kCasts, Arrival kArrival, Form kForm>
struct Scatter {
  // Chunks that a warp has under way.
  static constexpr bool kFew = has_few_rows(kForm);
  static constexpr int kSendBatch = kFew || (kCasts && kForm != Form::kManyRows) ? 1 : 2;
  static constexpr int kReceiveBatch = receive_batch(kArrival, kForm);
  static constexpr bool kShares = kForm == Form::kManyRows;  // blocks take rows and padding as they come to it
  static constexpr int kUnroll = kShares ? 2 : 1;
  static constexpr int kUnitsRead = kCasts ? sizeof(X) : 1;  // for one that is sent

  const Peers& peers;
  const ScatterArgs& args;
  const LaunchPlan& plan;
  Operation op;
  Shared& shared;
  void* scratch;          // dynamic shared memory
  int32_t payload_bytes;  // of a row under way, without its scales

  __device__ int32_t experts_per_rank() const { return peers.experts_per_rank; }
  __device__ int32_t num_experts() const { return peers.num_ranks * peers.experts_per_rank; }
  __device__ bool new_route() const { return kArrival != Arrival::kCombineBack && args.topk_idx != nullptr; }
  __device__ bool sends_numbers() const { return new_route() || args.splits; }
  __device__ bool by_node() const { return !kFew && goes_by_node(peers, args); }
  __device__ int32_t chunks() const { return num_chunks(payload_bytes); }
  // With its header and its scales.
  __device__ int32_t bytes_under_way() const {
    return payload_bytes + kUnitBytes * ((new_route() ? args.top_k : 0) + (args.num_scales ? chunks() : 0));
  }
  // Whether rows of a source are this rank's own, which are read where they lie, in x, and have their tokens' numbers.
  // (all_to_all's, which are packed, go through the arena like a peer's.)
  __device__ bool is_own(int32_t source) const { return source == peers.rank && !args.blocks; }
  // Whether this lane has a unit in a chunk.
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < payload_bytes; }

  // --- the first sender ---------------------------------------------------------------------------------------------

  // Tells every rank which operation this is and, where it cannot know, how many rows it gets for each expert.
  __device__ void announce() const {
    const Lookup lookup = this->lookup();
    clear(lookup);
    if (new_route()) {
      count_tokens(lookup, 0, args.num_tokens, ids_to_count(0, args.num_tokens));
    } else if (args.splits) {
      op.sync_workers();
      count_splits(lookup);
    }
    if (!op.state.failed) {
      if (sends_numbers()) {
#pragma unroll 1
        for (int32_t expert = threadIdx.x; expert < num_experts(); expert += op.num_workers) {
          const int32_t peer = peers.by_experts.quotient(expert);
          op.send_number(peer, op.counts_at(peer, peers.rank) + expert - peer * experts_per_rank(),
                         lookup.experts[expert]);
        }
        op.send_num_rows(lookup.ranks);
      }
      if (threadIdx.x < peers.num_ranks) op.announce(threadIdx.x);
    }
    op.stamp(2);
    op.tell_former_finished();
  }

  __device__ Lookup lookup() const {
    return {static_cast<int32_t*>(scratch), static_cast<int32_t*>(scratch) + num_experts()};
  }

  // The workers may count behind their next barrier.
  __device__ void clear(const Lookup& lookup) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < num_experts() + peers.num_ranks; i += op.num_workers) lookup.experts[i] = 0;
  }

  __device__ void count_splits(const Lookup& lookup) const {
#pragma unroll 1
    for (int32_t expert = threadIdx.x; expert < num_experts(); expert += op.num_workers) {
      lookup.experts[expert] = args.splits[expert];
      atomicAdd(&lookup.ranks[peers.by_experts.quotient(expert)], args.splits[expert]);
    }
    op.sync_workers();
  }

  // Of some tokens, what this lane counts at once.
  static constexpr int kCountsAtOnce = kShares ? 4 : 1;
  struct Ids {
    int32_t expert[kCountsAtOnce];
  };

  // Asks for the first that are counted of tokens [first, last): by a warp, kCountsAtOnce times as many as have lanes.
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

  // Counts tokens [first, last), whose first ids have been asked for. The workers meet at a barrier before they count, and
  // at another one at the end.
  __device__ void count_tokens(const Lookup& lookup, int32_t first, int32_t last, Ids ids) const {
    const int32_t stride = peers.by_top_k.quotient(32) * plan.block_warps() * kCountsAtOnce;
    const int32_t k = lane_id() - peers.by_top_k.quotient(lane_id()) * args.top_k;
    Pair pairs[kCountsAtOnce];
    const auto look_at = [&] {
#pragma unroll
      for (int i = 0; i < kCountsAtOnce; ++i) pairs[i] = pair(ids.expert[i], k);
    };
    look_at();
    op.sync_workers();
    op.stamp(1);
#pragma unroll 1
    while (first < last) {
      first += stride;
      ids = ids_to_count(first, last);  // the next ones, which are on their way while these are counted
#pragma unroll
      for (int i = 0; i < kCountsAtOnce; ++i) count(lookup, pairs[i]);
      if (first < last) look_at();
    }
    op.sync_workers();
  }

  // A token and an expert that it names: this lane's.
  struct Pair {
    int32_t expert, rank;  // -1 if there is none
    bool is_first;         // of the token's on the rank: a token counts once for a rank
  };

  __device__ Pair pair(int32_t expert, int32_t k) const {
    if (!is_expert(expert, num_experts())) expert = -1;
    const int32_t rank = expert >= 0 ? peers.by_experts.quotient(expert) : -1;
    return {expert, rank, count_earlier(rank, k) == 0};
  }

  __device__ void count(const Lookup& lookup, const Pair& pair) const {
    if (pair.expert < 0) return;
    atomicAdd(&lookup.experts[pair.expert], 1);
    if (pair.is_first) atomicAdd(&lookup.ranks[pair.rank], 1);
  }

  // How many of the k lanes before this one have the same value.
  __device__ static int32_t count_earlier(int32_t value, int32_t k) {
    const uint32_t earlier = ((1u << k) - 1) << (lane_id() - k);
    return __popc(__match_any_sync(kAllLanes, value) & earlier);
  }

  // --- the other senders --------------------------------------------------------------------------------------------

  // What a warp reads of x at once, to send it.
  struct Batch {
    uint4 units[kSendBatch][kUnitsRead];
    float scales[kSendBatch];  // of x that is fp8 already
  };

  // A batch as it is sent.
  struct Packed {
    Chunk units[kSendBatch], scales[kSendBatch];
  };

  // Where a token goes.
  struct Route {
    int32_t index;  // for rank = lane: among the rows that go there, -1 if it does not
    // For k = lane; `position` and `weight` are known to the team's first warp, which writes the headers.
    int32_t expert, position;  // expert: -1 for none
    float weight;
    uint32_t ranks;  // that it goes to, of a new route
  };

  // A block's teams send as many tokens at once, which follow one another. The next token's row is on its way while one
  // is counted and sent.
  __device__ void send() const {
    const Lookup lookup = this->lookup();
    const Team team = Team::of_senders(plan, op.state.ticket, warp_id(), true);
    if (team.index >= team.num_teams) return;
    const int32_t place = warp_id() >> plan.log_send_warps;  // of the team in the block
    int32_t token = team.index, counted = 0;
    Route route = load_route(token, team);
    Batch batch = load(token, team.warp);
    Ids ids = ids_ahead(counted, token - place);
    clear(lookup);
#pragma unroll 1
    for (int32_t turn = 0; token - place < args.num_tokens; ++turn) {
      const int32_t next = token + team.num_teams;
      const Route next_route = load_route(next, team);
      const Batch next_batch = load(next, team.warp);
      const Ids next_ids = ids_ahead(token - place, next - place);
      const Packed packed = pack(batch, team.warp);
      if (new_route()) {
        const Companions companions = {place, shared.experts[turn % 2], shared.ranks[turn % 2]};
        begin_route(route, companions, team);
        if (!kCountsAhead) ids = ids_to_count(counted, token - place);
        count_tokens(lookup, counted, token - place, ids);
        place_route(lookup, route, companions, team);
        if (is_own(lane_id()) && route.index >= 0) route.index = token;
      }
      counted = token - place;
      op.stamp(2);
      if (args.place && team.warp == 0 && token < args.num_tokens && lane_id() < peers.num_ranks) {
        int32_t* const kept = args.place + int64_t{token} * peers.num_ranks + lane_id();
        *kept = route.index;
        const bool passed_on = by_node() && is_far(peers, lane_id());
        if (kHasNetwork && !passed_on) kept[args.num_tokens * peers.num_ranks] = -1;
      }
      const bool sends = !op.warp_has_failed();
      const int32_t index = index_to_send(route, token);
      if (sends) send_row(token, packed, route, index, team);
      if constexpr (kHasNetwork) put_rows(token, index, team, sends);
      op.stamp(3);
      token = next;
      route = next_route;
      batch = next_batch;
      ids = next_ids;
    }
  }

  // With few rows, there is one turn, and no register to spare.
  static constexpr bool kCountsAhead = !kFew;
  __device__ Ids ids_ahead(int32_t first, int32_t last) const {
    return kCountsAhead && new_route() ? ids_to_count(first, min(last, args.num_tokens)) : Ids{};
  }

  // Batches of a row.
  __device__ int32_t parts() const { return (chunks() + kSendBatch - 1) / kSendBatch; }

  // Of the row, at each rank = lane that it is sent to; else -1.
  __device__ int32_t index_to_send(const Route& route, int32_t token) const {
    const int32_t index = by_node() ? index_by_node(nodes_of(peers), route.index, token) : route.index;
    return is_own(lane_id()) ? -1 : index;
  }

  // `packed`: what this warp sends first. What comes next is asked for before, as a load waits for the stores before it
  // to get on their way.
  __device__ void send_row(int32_t token, Packed packed, const Route& route, int32_t index, const Team& team) const {
    RowPlace row = {};  // on this lane's rank
    if (index >= 0) row = RowPlace(op, lane_id(), source_at(lane_id()), index);
    const int32_t end = __any_sync(kAllLanes, index >= 0) ? parts() : 1;  // if it is sent nowhere, it has a header here
#pragma unroll 1
    for (int32_t part = team.warp; part < end; part += team.num_warps) {
      const int32_t next = part + team.num_warps;
      Batch ahead = {};
      if (next < end) ahead = load(token, next);
      send_batch(packed, part, route, index, row);
      if (part == 0 && new_route() && token < args.num_tokens) {  // all tokens have one here
        write_header(place_here(peers.rank, token), route, peers.rank);
      }
      if (next < end) packed = pack(ahead, next);
    }
  }

  // What this rank's rows are kept as in the memory of another.
  __device__ int32_t source_at(int32_t rank) const {
    return by_node() && is_far(peers, rank) ? nodes_of(peers).source_of(nodes_of(peers).own) : peers.rank;
  }

  // Of a token that there is not, one that goes nowhere.
  __device__ Route load_route(int32_t token, const Team& team) const {
    Route route = {-1, -1, 0, 1.0f};
    if (token >= args.num_tokens) return route;
    if (new_route()) {
      if (lane_id() >= args.top_k) return route;
      const int64_t pair = int64_t{token} * args.top_k + lane_id();
      route.expert = __ldg(args.topk_idx + pair);
      if (args.topk_weights && team.warp == 0) route.weight = __ldg(args.topk_weights + pair);
    } else if (lane_id() < peers.num_ranks) {
      route.index = __ldg(args.known_place + int64_t{token} * peers.num_ranks + lane_id());
    }
    return route;
  }

  // The tokens of a block's teams.
  struct Companions {
    int32_t place;  // of this team among them
    int32_t* experts;
    uint32_t* ranks;
  };

  // Tells the block's other teams, behind the next barrier, where the token goes.
  __device__ void begin_route(Route& route, const Companions& companions, const Team& team) const {
    const bool present = is_expert(route.expert, num_experts());
    if (!present) route.expert = -1;
    route.ranks = __reduce_or_sync(kAllLanes, present ? 1u << peers.by_experts.quotient(route.expert) : 0);
    if (team.warp != 0) return;
    route.position = count_earlier(route.expert, lane_id());
    if (team.num_warps >= plan.block_warps()) return;
    if (lane_id() < args.top_k) companions.experts[companions.place * args.top_k + lane_id()] = route.expert;
    if (lane_id() == 0) companions.ranks[companions.place] = route.ranks;
  }

  // Adds those before the token: of `lookup`, and the block's.
  __device__ void place_route(const Lookup& lookup, Route& route, const Companions& companions,
                              const Team& team) const {
    if (route.ranks >> lane_id() & 1) route.index = lookup.ranks[lane_id()];
    if (team.warp == 0 && route.expert >= 0) route.position += lookup.experts[route.expert];
    if (companions.place == 0) return;
    // With a lane for each: the block's tokens, and all pairs of them.
    const uint32_t ranks = lane_id() < companions.place ? companions.ranks[lane_id()] : 0;
#pragma unroll 1
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      const int32_t number = __popc(__ballot_sync(kAllLanes, ranks >> rank & 1));
      if (lane_id() == rank && route.index >= 0) route.index += number;
    }
    const int32_t num_pairs = team.warp == 0 ? companions.place * args.top_k : 0;
#pragma unroll 1
    for (int32_t first = 0; first < num_pairs; first += 32) {
      const int32_t pair = first + lane_id(), expert = pair < num_pairs ? companions.experts[pair] : -1;
#pragma unroll 1
      for (int32_t k = 0; k < args.top_k; ++k) {
        const int32_t number = __popc(__ballot_sync(kAllLanes, expert == __shfl_sync(kAllLanes, route.expert, k)));
        if (lane_id() == k) route.position += number;
      }
    }
  }

  __device__ Batch load(int32_t token, int32_t part) const {
    Batch batch = {};
#pragma unroll
    for (int i = 0; i < kSendBatch; ++i) {
      if (token < args.num_tokens) load_chunk(token, part * kSendBatch + i, batch.units[i], batch.scales[i]);
    }
    return batch;
  }

  // What this lane needs of x for its unit of a chunk, if it has one.
  __device__ void load_chunk(int32_t token, int32_t chunk, uint4 (&units)[kUnitsRead], float& scale) const {
    if (!has_unit(chunk)) return;
    const auto* row = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(args.x) + token * args.row_bytes);
#pragma unroll
    for (int v = 0; v < kUnitsRead; ++v) units[v] = __ldg(row + (chunk * kChunkUnits + lane_id()) * kUnitsRead + v);
    if (!kCasts && args.num_scales) {
      scale = __ldg(args.x_scales + token * args.num_scales + chunk * 4 + lane_id() / 8);
    }
  }

  __device__ Packed pack(const Batch& batch, int32_t part) const {
    Packed packed;
#pragma unroll
    for (int i = 0; i < kSendBatch; ++i) {
      const int32_t chunk = part * kSendBatch + i;
      float scale = batch.scales[i];
      packed.units[i] = Chunk::of(kCasts ? cast(batch.units[i], scale) : batch.units[i][0], has_unit(chunk));
      if (args.num_scales) packed.scales[i] = Chunk::of(scales_unit(has_unit(chunk) ? scale : 0), lane_id() == 0);
    }
    return packed;
  }

  __device__ void send_batch(const Packed& packed, int32_t part, const Route& route, int32_t index,
                             const RowPlace& row) const {
    send_chunks(packed.units, packed.scales, [=](int i) { return part * kSendBatch + i; }, route, index, row);
  }

  // Of `N` chunks, the number of the i-th is chunk_at(i). The header goes with the first of all.
  template <int N, typename ChunkAt>
  __device__ __forceinline__ void send_chunks(const Chunk (&units)[N], const Chunk (&scales)[N], ChunkAt chunk_at,
                                              const Route& route, int32_t index, const RowPlace& row) const {
    for_each_rank(index, [&](int32_t peer) {
      RowPlace place;
      place.row = row.row_of_lane(peer);
      if (chunk_at(0) == 0 && new_route()) write_header(place, route, peer);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int32_t chunk = chunk_at(i);
        const auto mark = [&](int32_t number) { return row.marks_of_lane(peer) + number; };
        units[i].send(op, peer, place.unit(op, chunk), [&] { return mark(chunk); }, has_unit(chunk));
        if (args.num_scales) {
          const bool present = lane_id() == 0 && chunk < chunks();
          uint8_t* const at = place.scales(op, payload_bytes, chunk);
          scales[i].send(op, peer, at, [&] { return mark(chunks() + chunk); }, present);
        }
      }
    });
  }

  // When the team has staged a row, its warps put it to the far ranks that it is sent to, in turn. Who passes rows of a
  // new route on cannot know which tokens come, and is told of those that do not.
  __device__ void put_rows(int32_t token, int32_t index, const Team& team, bool staged) const {
    if (any_of_team(team, kTeamsBarrier, !staged)) return;
    const int32_t begin = new_route() ? 0 : peers.layout.header_bytes;
    const int32_t scales = args.num_scales ? chunks() * kUnitBytes : 0;
    const int32_t bytes = peers.layout.header_bytes - begin + payload_bytes + scales;
    int32_t turn = 0;
    for_each_rank(index, [&](int32_t peer) {
      if (!is_far(peers, peer) || turn++ % team.num_warps != team.warp) return;
      put_row(op, peer, source_at(peer), __shfl_sync(kAllLanes, index, peer), begin, bytes);
    });
    const int32_t rank = lane_id();
    if (by_node() && new_route() && token < args.num_tokens && team.warp == 0 && rank < peers.num_ranks && index < 0 &&
        nodes_of(peers).is_counterpart(rank)) {
      put_no_row(op, rank, source_at(rank), token);
    }
  }

  // Calls f for every rank where the token has an index, beginning behind this one: were all to begin with rank 0, they
  // would share its link.
  template <typename F>
  __device__ void for_each_rank(int32_t index, F f) const {
    const uint32_t ranks = __ballot_sync(kAllLanes, index >= 0);
    const int32_t num_behind = peers.num_ranks - peers.rank - 1;
    const uint32_t behind = ranks >> peers.rank >> 1, others = ranks & ((2u << peers.rank) - 1);
#pragma unroll(kUnroll)
    for (uint32_t left = behind | others << num_behind; left; left &= left - 1) {
      const int32_t step = __ffs(left) - 1;
      f(step < num_behind ? peers.rank + 1 + step : step - num_behind);
    }
  }

  __device__ uint4 cast(const uint4 (&units)[kUnitsRead], float& scale) const {
    if constexpr (kCasts) {
      Vector<X> x[kUnitsRead];
#pragma unroll
      for (int v = 0; v < kUnitsRead; ++v) x[v].bits = units[v];
      return cast_to_fp8(x, static_cast<Cast>(args.cast), scale);
    }
    return units[0];
  }

  // The four scales of a chunk, which its lanes have, eight the same one.
  __device__ uint4 scales_unit(float scale) const {
    const uint32_t bits = __float_as_uint(scale);
    return make_uint4(__shfl_sync(kAllLanes, bits, 0), __shfl_sync(kAllLanes, bits, 8),
                      __shfl_sync(kAllLanes, bits, 16), __shfl_sync(kAllLanes, bits, 24));
  }

  __device__ void write_header(const RowPlace& place, const Route& route, int32_t peer) const {
    if (by_node() && is_far(peers, peer)) return write_header_to_pass_on(place, route);
    if (lane_id() >= args.top_k) return;
    const int32_t expert = route.expert - peer * experts_per_rank();
    const bool is_there = route.expert >= 0 && expert >= 0 && expert < experts_per_rank();
    send_header(op, place.header(lane_id()), {is_there ? expert : -1, route.position, route.weight, 0});
  }

  // With the expert's number among all and, in place of the epoch, which the row's signal has, the index at its rank.
  __device__ void write_header_to_pass_on(const RowPlace& place, const Route& route) const {
    const int32_t rank = route.expert >= 0 ? peers.by_experts.quotient(route.expert) : 0;
    const auto index = static_cast<uint32_t>(__shfl_sync(kAllLanes, route.index, rank));
    const RowHeader header = {route.expert, route.position, route.weight, index};
    if (lane_id() < args.top_k) store_unit(place.header(lane_id()), *reinterpret_cast<const uint4*>(&header));
  }

  // --- receivers ----------------------------------------------------------------------------------------------------

  // A unit of this lane in each of some chunks and, last, but for cotangents, the scales of the one with this lane's
  // number.
  static constexpr int kUnitsTaken = kReceiveBatch + (kArrival != Arrival::kCombineBack);
  struct Taken {
    uint4 units[kUnitsTaken];
  };

  // A row that may come.
  struct Arriving {
    int32_t source, index;
    bool is_own;  // and so is there, but for its header
    bool comes;
    RowPlace place;
    RowHeader header;  // of a new route, for k = lane
    int32_t row;       // of an old one, for k = lane
    float weight;      // of that, for combine's cotangents
    Taken first;       // this warp's first batch
  };

  // Rows that may come, as find_candidate() deals them, a team of warps for each. The first row of a team is asked for
  // while the block finds out where rows go.
  __device__ void receive() const {
    op.stamp(1);
    const Team team = Team::of_receivers(plan, op.state.ticket, warp_id());
    const bool takes_rows = plan.row_receiver(op.state.ticket) >= 0 && team.index < team.num_teams;
    const Places places(scratch, peers.num_ranks, experts_per_rank());
    if (op.state.ticket == plan.first_receiver && op.meets_peers()) {
      const int32_t* num_rows = sends_numbers() ? nullptr : args.known_num_arrived;
      op.meet_peers(op, &PeerCounters::arrived, num_rows, bytes_under_way());
    }
    const uint32_t end = takes_rows ? num_candidates() : 0;
    uint32_t item = team.index;
    Arriving arriving = {};
    const bool looks = !op.warp_has_failed() && item < end;  // after close(), there is no row
    if (looks) arriving = look_for_row(item, team, [&](int32_t source) { return num_arrived(source); });
    if (kShares && lane_id() == 0 && !op.state.failed) op.open_claims(first_shared_row());
    if (!kFew) learn_places();
    if (kFew && arriving.comes) await_row(arriving, team);  // all have come at about the same time
    op.stamp(8);
    if (!places_are_known()) return;
    op.stamp(2);
    if (op.state.ticket == plan.first_receiver) write_counts(places);
    if constexpr (kShares) {
      if (!args.blocks) pad(places);
      if (!takes_rows) item = shared_row(claim_row(team), team);
      take_shared_rows(item, arriving, looks, places, team);
    } else {
      // Where there are some rows, before them: they are on their way meanwhile.
      if (!kFew && !args.blocks) pad(places);
#pragma unroll 1
      while (item < end) {
        if (!kFew && arriving.comes) await_row(arriving, team);
        deliver_row(arriving, places, team);
        item += team.num_teams;
        if (item >= end) break;
        arriving = look_for_row(item, team,
                                [&](int32_t source) { return kFew ? num_arrived(source) : shared.arrived[source]; });
        if (kFew && arriving.comes) await_row(arriving, team);
      }
      if (kFew && !args.blocks) pad(places);
    }
  }

  // What a sender does then: it takes rows, and padding, that no receiver has come to. Not where blocks are yet to
  // begin: they may be those that send what it would wait for.
  __device__ void help() const {
    const bool judges = op.is_control_warp() && lane_id() == 0;  // which has begun, if nobody else has waited for that
    if (named_barrier_or(kWorkersBarrier, op.num_workers, judges && !op.all_have_begun())) return;
    const Places places(scratch, peers.num_ranks, experts_per_rank());
    if (lane_id() == 0 && !op.state.failed) op.open_claims(first_shared_row());
    learn_places();
    if (!places_are_known()) return;
    const Team team = Team::of_receivers(plan, plan.num_blocks - 1, warp_id());
    Arriving arriving = {};
    take_shared_rows(shared_row(claim_row(team), team), arriving, false, places, team);
  }

  __device__ uint32_t num_candidates() const { return peers.num_ranks * args.num_tokens; }
  // Those before are the receivers' first ones.
  __device__ uint32_t first_shared_row() const { return Team::of_receivers(plan, plan.num_blocks - 1, 0).num_teams; }

  // The item, if it was looked for already, and those that the team claims then. While a row is on its way, padding is
  // zeroed; what is left of that, in the end. (A far row must not be looked at before its signal is there.)
  __device__ void take_shared_rows(uint32_t item, Arriving& arriving, bool looked, const Places& places,
                                   const Team& team) const {
    bool has_padding = args.zero_pad && !args.blocks;
#pragma unroll 1
    while (true) {
      const bool has_row = item < num_candidates();
      if (has_row && !looked) {
        arriving = look_for_row(item, team, [&](int32_t source) { return shared.arrived[source]; });
      }
      looked = false;
#pragma unroll 1
      while (has_padding && !(has_row && (!arriving.comes || has_come(arriving) || comes_by_signal(arriving.source)))) {
        has_padding = pad_some(places);
        if (has_row) look_at_batch(arriving.place, team.warp, team, arriving.first);
      }
      if (!has_row) return;
      if (arriving.comes) await_row(arriving, team);
      const uint32_t claimed = claim_row(team);  // comes while this one is written
      deliver_row(arriving, places, team);
      item = shared_row(claimed, team);
    }
  }

  // With the first thread of a team; then all of it know.
  __device__ uint32_t claim_row(const Team& team) const {
    return team.warp == 0 && lane_id() == 0 ? op.claim(Work::kRows) : 0;
  }
  __device__ uint32_t shared_row(uint32_t claimed, const Team& team) const {
    if (team.num_warps == 1) return __shfl_sync(kAllLanes, claimed, 0);
    uint32_t& item = shared.claimed[warp_id() / team.num_warps];
    sync_team(team);  // all have read what it was before
    if (team.warp == 0 && lane_id() == 0) item = claimed;
    sync_team(team);
    return item;
  }

  // As senders send them; but first, every other one is an own one: who has such a row to begin with is free for
  // another when that comes.
  __device__ void find_candidate(uint32_t item, Arriving& arriving) const {
    const uint32_t tokens = args.num_tokens;
    if (kForm == Form::kUsual && peers.num_ranks > 2 && !args.blocks) {
      const uint32_t other = item < 2 * tokens ? item / 2 : item - tokens;
      const bool own = item < 2 * tokens && item % 2;
      arriving.source = own ? peers.rank : peers.rank + 1 + peers.by_others.remainder(other);
      arriving.index = own ? other : peers.by_others.quotient(other);
    } else {
      arriving.source = peers.rank + 1 + peers.by_ranks.remainder(item);
      arriving.index = peers.by_ranks.quotient(item);
    }
    if (arriving.source >= peers.num_ranks) arriving.source -= peers.num_ranks;
  }

  // Asks for what there is of it; rows_from() tells how many come from a source.
  template <typename RowsFrom>
  __device__ Arriving look_for_row(uint32_t item, const Team& team, RowsFrom rows_from) const {
    Arriving arriving = {};
    find_candidate(item, arriving);
    arriving.is_own = is_own(arriving.source);
    // Of lanes that give up one by one, some may have heard how many come.
    arriving.comes = arriving.is_own || __any_sync(kAllLanes, arriving.index < rows_from(arriving.source));
    if (!arriving.comes) return arriving;
    arriving.place = place_here(arriving.source, arriving.index);
    if (!new_route() && !args.blocks) {
      const int64_t candidate = int64_t{arriving.source} * args.num_tokens + arriving.index;
      arriving.row = lane_id() < args.top_k ? __ldg(args.known_rows + candidate * args.top_k + lane_id()) : -1;
    }
    if (arriving.is_own) {
      read_own(arriving, team.warp, team);
      if (has_header()) arriving.header = load_header(arriving.place.header(lane_id()));
      if (!new_route()) arriving.comes = __any_sync(kAllLanes, arriving.row >= 0);
    } else if (comes_by_signal(arriving.source)) {  // units may be there in part before the row's signal is
      const BatchPlace place = place_of(arriving.place, team.warp, team);
      for (int i = 0; i < kUnitsTaken; ++i) arriving.first.units[i] = place.has(i) ? empty_unit() : uint4{};
      arriving.header = no_header(op);
    } else {
      look_at_batch(arriving.place, team.warp, team, arriving.first);
      if (has_header()) arriving.header = load_header(arriving.place.header(lane_id()));
    }
    if constexpr (kArrival == Arrival::kCombineBack) {
      if (arriving.row >= 0) arriving.weight = __ldg(args.row_weights + arriving.row);
      ask_for_y(arriving.row, team.warp, team);
    }
    return arriving;
  }

  // A batch of an own row, as it would arrive.
  __device__ void read_own(Arriving& arriving, int32_t first, const Team& team) const {
    uint4 read[kReceiveBatch][kUnitsRead] = {};
    float scales[kReceiveBatch] = {};
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) load_chunk(arriving.index, chunk_of(first, i, team), read[i], scales[i]);
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) {
      arriving.first.units[i] = kCasts ? cast(read[i], scales[i]) : read[i][0];
      if constexpr (kArrival != Arrival::kCombineBack) {
        if (!args.num_scales) continue;
        const uint4 unit = scales_unit(has_unit(chunk_of(first, i, team)) ? scales[i] : 0);
        if (lane_id() == i) arriving.first.units[kReceiveBatch] = unit;
      }
    }
  }

  // Of a row that arrives.
  __device__ RowPlace place_here(int32_t source, int32_t index) const {
    return {op, peers.layout.row_number(op.state.slot, source, index)};
  }

  // Over the network; by node, a near rank passes rows on.
  __device__ bool comes_by_signal(int32_t source) const { return is_far(peers, source) && !by_node(); }

  // As far as this warp has looked.
  __device__ bool has_come(const Arriving& arriving) const {
    if (arriving.is_own) return true;
    bool missing = false;
#pragma unroll
    for (const uint4& unit : arriving.first.units) missing = missing || is_empty(unit);
    return !__any_sync(kAllLanes, missing);
  }

  __device__ bool has_header() const { return new_route() && lane_id() < args.top_k; }

  // Waits for the rest.
  __device__ void await_row(Arriving& arriving, const Team& team) const {
    const bool has_header = this->has_header();
    const auto header_has_come = [&] {
      return !has_header || look_at_header(op, arriving.place.header(lane_id()), arriving.header);
    };
    if (arriving.is_own) {
      op.wait_until(peers.rank, header_has_come);
      __syncwarp();
    } else {
      if constexpr (kHasNetwork) {
        if (lane_id() == 0 && !by_node()) await_signal(op, arriving.source, arriving.source, arriving.index);
        __syncwarp();
      }
      take_batch(arriving.source, arriving.place, team.warp, team, arriving.first, header_has_come);
    }
    if (op.state.failed) arriving.header.expert = -1;  // what came may be anything
  }

  __device__ int32_t num_arrived(int32_t source) const {
    return sends_numbers() ? op.expect_num_rows(source) : __ldg(args.known_num_arrived + source);
  }

  // What a block must know to write rows, found out by two of its warps. (In the forms for few rows only the control
  // warp comes here, and does not wait for the others; and each of those asks for itself how many come.)
  __device__ void learn_places() const {
    if (op.is_control_warp()) place_rows(Places(scratch, peers.num_ranks, experts_per_rank()));
    if (!kFew && threadIdx.x < peers.num_ranks) shared.arrived[threadIdx.x] = num_arrived(threadIdx.x);
    __syncwarp();
    if (op.is_worker()) return;
    if (op.state.failed) give_up();
    named_barrier_arrive(kPlacesBarrier, blockDim.x);
  }
  // For all workers of a block: waits until that is known. False if the operation failed; all hear the same, as the
  // warps of a team must agree whether they have a row.
  __device__ bool places_are_known() const {
    if (op.state.failed) give_up();
    named_barrier(kPlacesBarrier, blockDim.x);
    return !shared.gives_up;
  }
  __device__ void give_up() const { atomicExch(&shared.gives_up, 1); }

  // Finds out where the experts' groups lie, from a prefix sum over their sizes; of an old route, from what it kept.
  // With one warp, a lane for two experts.
  __device__ void place_rows(const Places& p) const {
    if (args.blocks) return;
    int64_t rows_before = 0;
    int32_t dropped = 0;
#pragma unroll 1
    for (int32_t base = 0; base < experts_per_rank(); base += 64) {
      const int32_t first = base + 2 * lane_id(), end = min(first + 2, experts_per_rank());
      int32_t need[2] = {};
      int64_t size[2] = {};
      if (new_route()) {
        if (first < end) sum_sources(p, first, need);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (first + i < end) need[i] = __ldg(args.known_group_sizes + first + i);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) size[i] = align_up(need[i], args.alignment);
      const int64_t through = rows_before + sum_through(size[0] + size[1]);
      int64_t begin = through - size[0] - size[1];
      rows_before = __shfl_sync(kAllLanes, through, 31);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t expert = first + i;
        if (expert >= end) break;
        const Placement group = place_group(args.layout, expert, begin, need[i], args.capacity, args.alignment);
        p.first_row[expert] = static_cast<int32_t>(group.first_row);
        p.counts[expert] = new_route() ? group.count : __ldg(args.known_counts + expert);
        p.group_sizes[expert] = new_route() ? group.group_size : need[i];
        dropped += need[i] - group.count;
        begin += size[i];
      }
    }
    dropped = __reduce_add_sync(kAllLanes, dropped);
    if (lane_id() == 0) shared.dropped = dropped;
  }

  // The rows that an expert and the next one get; notes where each source's begin.
  __device__ void sum_sources(const Places& p, int32_t expert, int32_t (&total)[2]) const {
    constexpr int kAtOnce = 4;
    const bool has_next = expert + 1 < experts_per_rank();
#pragma unroll 1
    for (int32_t first = 0; first < peers.num_ranks; first += kAtOnce) {
      uint4 words[kAtOnce];
      int32_t missing = first;
      const auto have_come = [&] {
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
      op.wait_until([&] { return missing; }, have_come);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= peers.num_ranks) break;
        int32_t* const begin = p.first + (first + i) * experts_per_rank() + expert;
        begin[0] = total[0];
        total[0] += static_cast<int32_t>(words[i].x);
        if (!has_next) continue;
        begin[1] = total[1];
        total[1] += static_cast<int32_t>(words[i].z);
      }
    }
  }

  // The sum over this lane and those before.
  __device__ static int64_t sum_through(int64_t value) {
#pragma unroll
    for (int32_t offset = 1; offset < 32; offset *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, value, offset);
      if (lane_id() >= offset) value += before;
    }
    return value;
  }

  __device__ void write_counts(const Places& p) const {
#pragma unroll 1
    for (int32_t i = threadIdx.x; args.blocks && i < num_experts(); i += op.num_workers) {
      const int32_t source = peers.by_experts.quotient(i);
      args.counts[i] = op.expect_number(source, op.counts_at(peers.rank, source) + i - source * experts_per_rank());
    }
    if (!new_route()) return;
#pragma unroll 1
    for (int32_t expert = threadIdx.x; expert < experts_per_rank(); expert += op.num_workers) {
      args.counts[expert] = p.counts[expert];
      args.group_sizes[expert] = p.group_sizes[expert];
    }
    if (threadIdx.x < peers.num_ranks) args.num_arrived[threadIdx.x] = num_arrived(threadIdx.x);
    if (threadIdx.x != 0) return;
    *args.num_dropped = shared.dropped;
    if (shared.dropped) add(&op.own().counters.dropped, shared.dropped);
  }

  __device__ void deliver_row(Arriving& arriving, const Places& places, const Team& team) const {
    const int32_t source = arriving.source;
    const int64_t candidate = int64_t{source} * args.num_tokens + arriving.index;
    const bool keeps_route = new_route() && team.warp == team.num_warps - 1 && lane_id() < args.top_k;
    if (!arriving.comes) {
      if (keeps_route) args.rows[candidate * args.top_k + lane_id()] = -1;
      if (args.blocks && args.zero_pad && team.warp == 0) zero_row(candidate);
      return;
    }
    int32_t row = -1;  // of the result, for k = lane
    if (args.blocks) {
      if (lane_id() == 0) row = static_cast<int32_t>(candidate);
    } else if (lane_id() < args.top_k) {
      row = new_route() ? new_row(source, arriving.header, places) : arriving.row;
    }
    if (keeps_route) {
      args.rows[candidate * args.top_k + lane_id()] = row;
      if (row >= 0) args.weights[row] = arriving.header.weight;
    }
    const uint32_t targets = __ballot_sync(kAllLanes, row >= 0);
    op.stamp(3);
    if (args.weights_cotangent) shared.products[warp_id()][lane_id()] = 0;
    const int32_t end = arriving.is_own && !targets ? 0 : chunks();  // what has come is taken
#pragma unroll 1
    for (int32_t first = team.warp; first < end; first += kReceiveBatch * team.num_warps) {
      if (first != team.warp) {
        if (arriving.is_own) {
          read_own(arriving, first, team);
        } else {
          look_at_batch(arriving.place, first, team, arriving.first);
        }
        if constexpr (kArrival == Arrival::kCombineBack) ask_for_y(row, first, team);
        if (!arriving.is_own) take_batch(source, arriving.place, first, team, arriving.first, [] { return true; });
      }
      op.stamp(6);
      if constexpr (kArrival == Arrival::kCopy) copy(arriving.first, first, row, targets, team);
      if constexpr (kArrival == Arrival::kDequantize) dequantize(arriving.first, first, row, targets, team);
      if constexpr (kArrival == Arrival::kCombineBack) combine_back(arriving, first, targets, team);
      op.stamp(7);
    }
    if constexpr (kArrival == Arrival::kCombineBack) sum_products(row, team);
  }

  __device__ int32_t new_row(int32_t source, const RowHeader& header, const Places& places) const {
    if (header.expert < 0) return -1;
    const int32_t position = places.first[source * experts_per_rank() + header.expert] + header.position;
    return position < places.counts[header.expert] ? places.first_row[header.expert] + position : -1;
  }

  __device__ uint4* out_row(int64_t row) const {
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(args.out) + row * args.out_row_bytes);
  }
  // The i-th chunk of a batch, whose chunks are first, first + num_warps, ...
  __device__ static int32_t chunk_of(int32_t first, int32_t i, const Team& team) { return first + i * team.num_warps; }

  // Where a batch arrives.
  struct BatchPlace {
    uint8_t *units, *scales;  // this lane's of the first chunk, and of the one with its number
    int32_t step;             // between chunks, in bytes
    int32_t bytes_left;       // of the payload, from the first unit on
    bool has_scales;
    __device__ __forceinline__ bool has(int i) const { return i < kReceiveBatch ? i * step < bytes_left : has_scales; }
    __device__ __forceinline__ uint8_t* at(int i) const { return i < kReceiveBatch ? units + i * step : scales; }
  };

  __device__ BatchPlace place_of(const RowPlace& place, int32_t first, const Team& team) const {
    const int32_t chunk = chunk_of(first, lane_id(), team);
    return {place.unit(op, first), place.scales(op, payload_bytes, chunk), team.num_warps * kChunkBytes,
            payload_bytes - (first * kChunkBytes + lane_id() * kUnitBytes),
            args.num_scales && lane_id() < kReceiveBatch && chunk < chunks()};
  }

  __device__ void look_at_batch(const RowPlace& place, int32_t first, const Team& team, Taken& taken) const {
    look_at_units(taken.units, place_of(place, first, team));
  }

  template <typename Also>
  __device__ void take_batch(int32_t source, const RowPlace& place, int32_t first, const Team& team, Taken& taken,
                             Also also) const {
    const auto resolve = [&](int i) {
      const bool is_unit = i < kReceiveBatch;
      const int32_t mark = is_unit ? chunk_of(first, i, team) : chunks() + chunk_of(first, lane_id(), team);
      return true_unit(op, source, place.marks + mark, is_unit ? lane_id() : 0);
    };
    take_units(op, [=](int) { return source; }, taken.units, place_of(place, first, team), resolve, also);
    __syncwarp();
  }

  // To each expert's row, as it came.
  __device__ void copy(const Taken& taken, int32_t first, int32_t row, uint32_t targets, const Team& team) const {
    const auto own = reinterpret_cast<unsigned long long>(out_row(row));
#pragma unroll(kUnroll)
    for (uint32_t left = targets; left; left &= left - 1) {
      auto* out = reinterpret_cast<uint4*>(__shfl_sync(kAllLanes, own, __ffs(left) - 1)) + lane_id();
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
        const int32_t chunk = chunk_of(first, i, team);
        if (has_unit(chunk)) out[chunk * kChunkUnits] = taken.units[i];
      }
    }
    if (!args.num_scales) return;
#pragma unroll 1
    for (uint32_t left = targets; left; left &= left - 1) {
      write_scales(taken.units[kReceiveBatch], chunk_of(first, lane_id(), team), row, __ffs(left) - 1);
    }
  }

  __device__ void write_scales(const uint4& unit, int32_t chunk, int32_t row, int32_t k) const {
    float* out = args.out_scales + int64_t{__shfl_sync(kAllLanes, row, k)} * args.num_scales;
    const uint32_t scales[] = {unit.x, unit.y, unit.z, unit.w};
    if (args.num_scales % 4 == 0) {  // rows of them begin at whole units
      if (lane_id() < kReceiveBatch && chunk < chunks()) reinterpret_cast<uint4*>(out)[chunk] = unit;
      return;
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (lane_id() < kReceiveBatch && chunk * 4 + i < args.num_scales) out[chunk * 4 + i] = __uint_as_float(scales[i]);
    }
  }

  // To each expert's row, in the group's dtype.
  __device__ void dequantize(const Taken& taken, int32_t first, int32_t row, uint32_t targets, const Team& team) const {
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) {
      const uint4& unit = taken.units[kReceiveBatch];
      const uint32_t scales[] = {__shfl_sync(kAllLanes, unit.x, i), __shfl_sync(kAllLanes, unit.y, i),
                                 __shfl_sync(kAllLanes, unit.z, i), __shfl_sync(kAllLanes, unit.w, i)};
      const int32_t block = lane_id() / 8;
      const uint32_t scale = block < 2 ? (block == 0 ? scales[0] : scales[1]) : (block == 2 ? scales[2] : scales[3]);
      Vector<X> x[sizeof(X)];
      cast_from_fp8(taken.units[i], __uint_as_float(scale), x);
#pragma unroll 1
      for (uint32_t left = targets; left; left &= left - 1) {
        uint4* out = out_row(__shfl_sync(kAllLanes, row, __ffs(left) - 1)) +
                     (chunk_of(first, i, team) * kChunkUnits + lane_id()) * static_cast<int32_t>(sizeof(X));
#pragma unroll
        for (int v = 0; v < sizeof(X); ++v) {
          if (has_unit(chunk_of(first, i, team))) out[v] = x[v].bits;
        }
      }
    }
  }

  // combine's cotangents: weight * row to each expert's row, and the row's product with y.
  __device__ void combine_back(const Arriving& arriving, int32_t first, uint32_t targets, const Team& team) const {
    uint32_t ahead = targets;  // rows of y that were not asked for
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) ahead &= ahead - 1;
    int32_t slot = 0;
#pragma unroll 1
    for (uint32_t left = targets; left; left &= left - 1) {
      const int32_t k = __ffs(left) - 1;
      const int64_t target = __shfl_sync(kAllLanes, arriving.row, k);
      const float weight = __shfl_sync(kAllLanes, arriving.weight, k);
      await_copies<kRowsAhead - 1>();
      float product = 0;
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
        const int32_t chunk = chunk_of(first, i, team);
        if (!has_unit(chunk)) continue;
        product +=
            combine_back_unit(arriving.first.units[i], args.y ? *y_unit(slot, i) : uint4{}, target, chunk, weight);
      }
      __syncwarp();
      if (!args.y) continue;
      product = warp_sum(product);
      if (lane_id() == 0) shared.products[warp_id()][k] += product;
      ahead = ask_for_row_of_y(ahead, slot, arriving.row, first, team);  // has been used
      slot = slot + 1 == kRowsAhead ? 0 : slot + 1;
    }
  }

  // y is asked for before the row is there that it is multiplied with: it comes to shared memory, where a lane's units
  // have places of their own, which it alone fills and reads. (Not by a Ring, whose pieces lie side by side: here a
  // warp's chunks are of its team's rounds.) The first of y's rows; the others follow as these are used.
  __device__ void ask_for_y(int32_t row, int32_t first, const Team& team) const {
    uint32_t left = args.y ? __ballot_sync(kAllLanes, row >= 0) : 0;
#pragma unroll 1
    for (int32_t slot = 0; slot < kRowsAhead; ++slot) left = ask_for_row_of_y(left, slot, row, first, team);
  }

  // The first that is left; gives the others. Where none is, something ends all the same: they are counted.
  __device__ uint32_t ask_for_row_of_y(uint32_t left, int32_t slot, int32_t row, int32_t first,
                                       const Team& team) const {
    if (left) {
      const int64_t target = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      const auto* row_of_y = static_cast<const uint8_t*>(args.y) + target * args.out_row_bytes;
#pragma unroll
      for (int i = 0; i < kReceiveBatch; ++i) {
        const int32_t chunk = chunk_of(first, i, team);
        if (has_unit(chunk))
          copy_unit_async(y_unit(slot, i), row_of_y + (chunk * kChunkUnits + lane_id()) * kUnitBytes);
      }
    }
    end_copies();
    return left & (left - 1);
  }

  __device__ uint4* y_unit(int32_t slot, int i) const {
    auto* y = static_cast<uint8_t*>(scratch) + scatter_scratch_bytes(peers.num_ranks, experts_per_rank());
    return reinterpret_cast<uint4*>(y) + ((warp_id() * kRowsAhead + slot) * kReceiveBatch + i) * kChunkUnits +
           lane_id();
  }

  __device__ float combine_back_unit(const uint4& unit, const uint4& unit_of_y, int64_t row, int32_t chunk,
                                     float weight) const {
    Vector<X> g, y, cotangent;
    g.bits = unit, y.bits = unit_of_y;
    float product = 0;
#pragma unroll
    for (int e = 0; e < Vector<X>::kSize; ++e) {
      cotangent.element[e] = from_float<X>(weight * to_float(g.element[e]));
      product += to_float(g.element[e]) * to_float(y.element[e]);
    }
    out_row(row)[chunk * kChunkUnits + lane_id()] = cotangent.bits;
    return product;
  }

  // Adds what the warps that share a row, all of one block, have of its products, in their order.
  __device__ void sum_products(int32_t row, const Team& team) const {
    if (!args.y) return;
    sync_team(team);
    if (team.warp == 0 && row >= 0) {
      float total = 0;
#pragma unroll 1
      for (int32_t w = 0; w < team.num_warps; ++w) total += shared.products[warp_id() + w][lane_id()];
      args.weights_cotangent[row] = total;
    }
    sync_team(team);
  }

  // A team of one block.
  __device__ static void sync_team(const Team& team) {
    if (team.num_warps == 1) {
      __syncwarp();  // there are not barriers for as many teams
    } else {
      named_barrier(kTeamsBarrier + warp_id() / team.num_warps, team.num_warps * 32);
    }
  }

  // --- between senders and receivers, over a network ----------------------------------------------------------------

  // Passes the rows that come from this rank's counterparts on to the ranks of its node that they go to, as if those
  // had sent them there.
  __device__ void pass_on() const {
    const Team team = Team::of_forwarders(plan, op.state.ticket, warp_id());
    const Nodes& nodes = nodes_of(peers);
    const int32_t num_candidates = team.index < team.num_teams ? nodes.num_others() * args.num_tokens : 0;
#pragma unroll 1
    for (int32_t item = team.index; item < num_candidates; item += team.num_teams) {
      const int32_t token = item / nodes.num_others(), node = nodes.other(item - token * nodes.num_others());
      const int32_t source = nodes.counterpart_in(node);
      const RowPlace from = place_here(nodes.source_of(node), token);
      const Route route = route_passed_on(nodes, node, token, from, team);
      if (__any_sync(kAllLanes, op.state.failed)) return;
      if (!__any_sync(kAllLanes, route.index >= 0)) continue;
      RowPlace to = {};  // on this lane's rank
      if (route.index >= 0) to = RowPlace(op, lane_id(), source, route.index);
#pragma unroll 1
      for (int32_t first = team.warp; first < chunks(); first += kReceiveBatch * team.num_warps) {
        Taken taken;
        look_at_batch(from, first, team, taken);
        take_batch(source, from, first, team, taken, [] { return true; });
        if (__any_sync(kAllLanes, op.state.failed)) return;  // what came may be anything
        send_taken(taken, first, route, to, team);
      }
    }
  }

  // Where a token of another node's rank goes in this node, once its row has come: for lane = rank. The first time it
  // is in the row's header, from which the route keeps it, in the columns of that node's ranks.
  __device__ Route route_passed_on(const Nodes& nodes, int32_t node, int32_t token, const RowPlace& from,
                                   const Team& team) const {
    Route route = {-1, -1, 0, 1.0f};
    const bool is_near = nodes.is_own(lane_id());
    const int64_t kept = (int64_t{args.num_tokens} + token) * peers.num_ranks + nodes.counterpart(lane_id(), node);
    if (!new_route() && is_near) route.index = __ldg(args.known_place + kept);
    bool comes = new_route() || __any_sync(kAllLanes, route.index >= 0);
    if (comes && lane_id() == 0) {
      comes = await_signal(op, nodes.counterpart_in(node), nodes.source_of(node), token);
    }
    comes = __shfl_sync(kAllLanes, comes, 0);
    __syncwarp();  // all lanes read what one has waited for
    if (!comes) route.index = -1;
    if (!new_route()) return route;
    RowHeader header = {-1, 0, 0, 0};
    if (comes && lane_id() < args.top_k) header = load_header(from.header(lane_id()));
    const int32_t rank = is_expert(header.expert, num_experts()) ? peers.by_experts.quotient(header.expert) : -1;
    if (rank >= 0 && nodes.is_own(rank)) route.expert = header.expert;
    route.position = header.position;
    route.weight = header.weight;
#pragma unroll 1
    for (int32_t k = 0; k < args.top_k; ++k) {
      const uint32_t index = __shfl_sync(kAllLanes, header.epoch, k);
      const bool is_here = __shfl_sync(kAllLanes, rank, k) == lane_id() && is_near;
      // (A rank in another call may send anything.)
      if (is_here && index < args.num_tokens) route.index = static_cast<int32_t>(index);
    }
    if (team.warp == 0 && is_near) args.place[kept] = route.index;
    return route;
  }

  __device__ void send_taken(const Taken& taken, int32_t first, const Route& route, const RowPlace& to,
                             const Team& team) const {
    Chunk units[kReceiveBatch], scales[kReceiveBatch];
#pragma unroll
    for (int i = 0; i < kReceiveBatch; ++i) {
      units[i] = Chunk::of(taken.units[i], has_unit(chunk_of(first, i, team)));
      if constexpr (kArrival != Arrival::kCombineBack) {
        const uint4& own = taken.units[kReceiveBatch];
        const uint4 unit = make_uint4(__shfl_sync(kAllLanes, own.x, i), __shfl_sync(kAllLanes, own.y, i),
                                      __shfl_sync(kAllLanes, own.z, i), __shfl_sync(kAllLanes, own.w, i));
        if (args.num_scales) scales[i] = Chunk::of(unit, lane_id() == 0);
      }
    }
    send_chunks(units, scales, [=](int i) { return chunk_of(first, i, team); }, route, route.index, to);
  }

  // --- padding ------------------------------------------------------------------------------------------------------

  // Rows that hold no token: behind each group, and behind the last one. Their weights are zero; they are themselves,
  // where alignment has added them or with zero_pad, which all receivers share; else the first one does it. What blocks
  // take as they come to it, pad_some() does.
  __device__ void pad(const Places& places) const {
    const bool is_ragged = args.layout == Layout::kRagged, zeroes = args.zero_pad && !kShares;
    const bool is_first = op.state.ticket == plan.first_receiver;
    if (!zeroes && !is_first) return;
    const int32_t worker = (zeroes ? op.state.ticket - plan.first_receiver : 0) * plan.block_warps() + warp_id();
    const int32_t workers = (zeroes ? plan.num_receivers() : 1) * plan.block_warps();
    int32_t last = 0;
#pragma unroll 1
    for (int32_t base = 0; base < experts_per_rank(); base += 32) {
      const int32_t expert = base + lane_id();
      int32_t begin = 0, end = 0;  // of the gap behind this lane's expert
      if (expert < experts_per_rank()) {
        begin = places.first_row[expert] + places.counts[expert];
        end = places.first_row[expert] + (is_ragged ? places.group_sizes[expert] : static_cast<int32_t>(args.capacity));
      }
      last = __reduce_max_sync(kAllLanes, max(last, end));
#pragma unroll 1
      for (uint32_t gaps = __ballot_sync(kAllLanes, begin < end); gaps; gaps &= gaps - 1) {
        const int32_t lane = __ffs(gaps) - 1;
        pad_rows(__shfl_sync(kAllLanes, begin, lane), __shfl_sync(kAllLanes, end, lane),
                 zeroes || (is_ragged && !args.zero_pad), worker, workers);
      }
    }
    pad_rows(last, static_cast<int32_t>(args.num_rows), zeroes, worker, workers);
  }

  __device__ void pad_rows(int32_t begin, int32_t end, bool zero, int32_t worker, int32_t workers) const {
#pragma unroll 1
    for (int32_t row = begin + worker * 32 + lane_id(); row < end; row += workers * 32) {
      if (args.weights) args.weights[row] = 0;
      if (args.weights_cotangent) args.weights_cotangent[row] = 0;
    }
#pragma unroll 1
    for (int32_t row = begin + worker; zero && row < end; row += workers) zero_row(row);
  }

  // Zeroes what hold no token of the next rows of the result; a warp does not claim few of many. False if none are
  // left.
  __device__ bool pad_some(const Places& places) const {
    const int32_t num_rows = static_cast<int32_t>(args.num_rows);
    const int32_t size = min(max(num_rows / 4096, 1), 8);
    uint32_t claimed = 0;
    if (lane_id() == 0) claimed = op.claim(Work::kPadding);
    claimed = __shfl_sync(kAllLanes, claimed, 0);
    if (claimed * static_cast<uint64_t>(size) >= num_rows) return false;
    const int32_t row = claimed * size + lane_id();
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, lane_id() < size && row < num_rows && holds_none(places, row)); left;
         left &= left - 1) {
      zero_row(claimed * size + __ffs(left) - 1);
    }
    return true;
  }

  // It lies in the group of the last expert whose first row is not behind it, or in the gap behind that.
  __device__ bool holds_none(const Places& places, int32_t row) const {
    int32_t expert = 0;
#pragma unroll 1
    for (int32_t behind = experts_per_rank(); behind - expert > 1;) {
      const int32_t middle = (expert + behind) / 2;
      (places.first_row[middle] <= row ? expert : behind) = middle;
    }
    return row >= places.first_row[expert] + places.counts[expert];
  }

  __device__ void zero_row(int64_t row) const {
#pragma unroll 1
    for (int32_t i = lane_id(); i < args.out_row_bytes / kUnitBytes; i += 32) out_row(row)[i] = uint4{};
    if (!args.out_scales) return;
#pragma unroll 1
    for (int32_t i = lane_id(); i < args.num_scales; i += 32) args.out_scales[row * args.num_scales + i] = 0;
  }

  // --- failure ------------------------------------------------------------------------------------------------------

  __device__ void poison() const {
    fill_bytes(args.out, args.num_rows * args.out_row_bytes, 0xff);
    fill_bytes(args.out_scales, args.num_rows * args.num_scales * 4, 0xff);
    fill_bytes(args.weights, args.num_rows * 4, 0xff);
    fill_bytes(args.weights_cotangent, args.num_rows * 4, 0xff);
    fill_bytes(args.counts, int64_t{4} * experts_per_rank() * (args.blocks ? peers.num_ranks : 1), 0);
    fill_bytes(args.group_sizes, int64_t{4} * experts_per_rank(), 0);
    fill_bytes(args.num_dropped, 4, 0xff);
    fill_bytes(args.rows, int64_t{4} * peers.num_ranks * args.num_tokens * args.top_k, 0xff);
    fill_bytes(args.num_arrived, int64_t{4} * peers.num_ranks, 0);
    fill_bytes(args.place, int64_t{4} * args.num_tokens * peers.num_ranks * (kHasNetwork ? 2 : 1), 0xff);
  }
};

template <typename X, bool kCasts, Arrival kArrival, Form kForm>
__global__ void __launch_bounds__(most_threads(kForm), least_blocks_per_sm(kForm))
    scatter_kernel(const __grid_constant__ Peers peers, const __grid_constant__ ScatterArgs args,
                   const __grid_constant__ LaunchPlan plan) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  JAX_EP_SHARED(Shared, shared);
  const int32_t num_workers = static_cast<int32_t>(blockDim.x) - (has_control_warp(kForm) ? 32 : 0);
  const Scatter<X, kCasts, kArrival, kForm> scatter = {
      peers, args, plan, {peers, args, args.out, shared.state, num_workers}, shared, scratch, payload_of(args)};
  fetch_arguments(peers);
  fetch_arguments(args);
  wait_for_dependencies();
  scatter.op.stamp(0);
  const auto forwards = [&](int32_t ticket) { return scatter.by_node() && plan.forwards(ticket); };
  if (scatter.op.is_control_warp()) {
    if (lane_id() == 0) shared.gives_up = 0;
    scatter.op.enter([&](int32_t ticket) { return ticket < plan.num_senders || forwards(ticket); });
  }
  __syncthreads();  // the block has entered
  const int32_t ticket = shared.state.ticket;
  if (scatter.op.is_worker()) {
    if (ticket == 0) scatter.announce();
    if (ticket == 0 && plan.sends_rows(0)) scatter.op.sync_workers();  // the scratch memory is free again
    if (plan.sends_rows(ticket)) scatter.send();
    if constexpr (kHasNetwork) {
      if (forwards(ticket)) scatter.pass_on();
    }
    if (ticket >= plan.first_receiver) {
      if (ticket < plan.num_senders) scatter.op.sync_workers();  // and again
      scatter.receive();
    } else if constexpr (Scatter<X, kCasts, kArrival, kForm>::kShares) {
      scatter.help();
    }
  } else if (ticket >= plan.first_receiver) {
    scatter.learn_places();
  }
  scatter.op.end([&] { scatter.poison(); });
}

using Kernel = void (*)(Peers, ScatterArgs, LaunchPlan);

// A kernel of its own for whatever is done to the elements of a row: each is small, and an instruction costs a kernel
// of a few microseconds most when it is fetched.
template <Form kForm>
Kernel kernel_of(ElementType type, bool casts, Arrival arrival) {
  Kernel kernel = scatter_kernel<float, false, Arrival::kCopy, kForm>;  // of any element
  if (!casts && arrival == Arrival::kCopy) return kernel;
  with_element_type(type, [&](auto element) {
    using X = decltype(element);
    if (arrival == Arrival::kCombineBack) {
      kernel = scatter_kernel<X, false, Arrival::kCombineBack, kForm>;
    } else if (arrival == Arrival::kCopy) {
      kernel = scatter_kernel<X, true, Arrival::kCopy, kForm>;
    } else {
      kernel = casts ? scatter_kernel<X, true, Arrival::kDequantize, kForm>
                     : scatter_kernel<X, false, Arrival::kDequantize, kForm>;
    }
  });
  return kernel;
}

Kernel kernel_of(ElementType type, bool casts, Arrival arrival, Form form) {
  switch (form) {
    case Form::kFewRows:
      return kernel_of<Form::kFewRows>(type, casts, arrival);
    case Form::kFewRowsDense:
      return kernel_of<Form::kFewRowsDense>(type, casts, arrival);
    case Form::kUsual:
      return kernel_of<Form::kUsual>(type, casts, arrival);
    default:
      return kernel_of<Form::kManyRows>(type, casts, arrival);
  }
}

}  // namespace

cudaError_t launch_scatter(const Peers& peers, const ScatterArgs& args, ElementType type, const LaunchPlan& best,
                           cudaStream_t stream) {
  const LaunchPlan plan = kHasNetwork ? over_network(best, goes_by_node(peers, args)) : best;
  const int64_t scratch = scatter_scratch_bytes(peers.num_ranks, peers.experts_per_rank) +
                          int64_t{plan.block_warps()} * y_bytes(args.arrival, plan.form);
  const Kernel kernel = kernel_of(type, args.cast != 0, args.arrival, plan.form);
  return launch(kernel, {plan.num_blocks, plan.block_threads(), scratch}, stream, peers, args, plan);
}

cudaError_t load_scatter() {
  cudaError_t status = cudaSuccess;
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (Arrival arrival : {Arrival::kCopy, Arrival::kDequantize, Arrival::kCombineBack}) {
      for (bool casts : {false, true}) {
        for (Form form : kForms) {
          if (status != cudaSuccess) return status;
          status =
              load_kernel(kernel_of(type, casts, arrival, form), kMaxScratch + kMaxBlockWarps * y_bytes(arrival, form));
        }
      }
    }
  }
  return status;
}

}  // namespace jax_ep
