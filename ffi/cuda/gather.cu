#include "ffi/cuda/gather.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/ring.cuh"
#include "ffi/cuda/rows.cuh"
#include "ffi/cuda/units.cuh"

namespace jax_ep {
namespace {

// Writes a lane's elements of a row.
template <typename Out, int N>
__device__ __forceinline__ void store_elements(Out* out, const float (&values)[N]) {
#pragma unroll
  for (int first = 0; first < N; first += Vector<Out>::kSize) {
    if constexpr (N >= Vector<Out>::kSize) {
      Vector<Out> vector;
#pragma unroll
      for (int e = 0; e < Vector<Out>::kSize; ++e) vector.element[e] = from_float<Out>(values[first + e]);
      *reinterpret_cast<uint4*>(out + first) = vector.bits;
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) out[e] = from_float<Out>(values[e]);
    }
  }
}

// Whether, over a network, a node's ranks add up what they have of another node's token, and send the sum. (For
// all_to_all_back, one has it all.)
constexpr bool goes_by_node(const Peers& peers, const GatherArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && args.rows != nullptr &&
         !are_few(args.num_tokens);
}

// Whether y comes ahead, by a ring of each warp: where latency does not count, but what is under way, and how many
// instructions it takes. Chunks of a row that a warp sums at once, a part; a piece in the ring is one of a row of y.
constexpr bool has_ring(Form form) { return form == Form::kManyRows; }
constexpr int sums_at_once(Form form) { return has_ring(form) ? 4 : 2; }
constexpr int32_t kPartBytes = sums_at_once(Form::kManyRows) * kChunkBytes;
using RingOfY = Ring<kPartBytes>;
constexpr int32_t ring_bytes(Form form) { return has_ring(form) ? RingOfY::kBytes : 0; }

static_assert(kMaxBlockWarps * (ring_bytes(Form::kManyRows) + sizeof(RingOfY::Landed)) + sizeof(State) <=
              kMaxBlockSharedBytes);

// The pieces that a lane asks for: those of one row, but for the parts of the team's other warps.
struct Pieces {
  int32_t number;      // of the next one in the ring
  int32_t bytes_left;  // of the row, from there on
  const uint8_t* from;
};

// One launch of one rank. The warps of a team share a row that is summed, by chunks.
template <typename X, Form kForm>
struct Gather {
  static constexpr bool kHasRing = has_ring(kForm);
  static constexpr int kSumsAtOnce = sums_at_once(kForm);
  // Whether a team asks what there is of its next row while it sends one: few rows take one turn, mostly, and of many,
  // other warps use the time.
  static constexpr bool kAsksAhead = kForm == Form::kUsual;
  static constexpr int kRanksAtOnce = 4;  // whose sums a lane awaits at once, mostly
  static constexpr int kSize = Vector<X>::kSize;
  static constexpr int kRowsAtOnce = 4;  // of a token's rows here, that a lane loads before it adds them
  // Where y does not fit into the L2 cache together with rows under way, it must not drive them out: it is read once.
  // (The ring always reads so.)
  static constexpr bool kReadsOnce = kForm == Form::kUsual;

  const Peers& peers;
  const GatherArgs& args;
  const LaunchPlan& plan;
  Operation op;
  RingOfY& ring;
  Pieces& to_come;

  __device__ bool blocks() const { return args.rows == nullptr; }
  __device__ bool by_node() const { return !has_few_rows(kForm) && goes_by_node(peers, args); }
  __device__ int32_t row_bytes() const { return static_cast<int32_t>(args.row_bytes); }
  __device__ int32_t chunks() const { return num_chunks(row_bytes()); }
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < row_bytes(); }

  // --- senders: the experts' side -----------------------------------------------------------------------------------

  __device__ void announce() const {
    if (!op.state.failed) {
      if (args.num_sent) send_num_rows(op, args.num_sent);
      if (threadIdx.x < peers.num_ranks) op.announce(threadIdx.x);
    }
    op.tell_former_finished();
  }

  // The possible rows, interleaving the ranks they go to, beginning behind this rank.
  __device__ void send() const {
    const Team team = Team::of_senders(plan, op.state.ticket, warp_id());
    const uint32_t num_candidates = team.index < team.num_teams ? num_destinations() * args.num_tokens : 0;
    uint32_t item = team.index;
    SourceRow row = {}, next = {};
    Sums<> sums = {};
    const auto sum_row = [&](SourceRow asked) {
      const uint32_t next_item = item + team.num_teams;
      if (kAsksAhead && !blocks() && next_item < num_candidates) next = ask_for_row(next_item);
      row = resolved(asked);
      sums = partial_sums(row, team.warp, team);
    };
    if (item < num_candidates && !blocks()) sum_row(ask_for_row(item));
    op.stamp(1);
    bool gives_up = op.warp_has_failed();
    // Warps that meet at a barrier for a far rank's rows must agree: they go on to the end, or do not begin.
    if (kHasNetwork) gives_up = any_of_team(team, kFirstBarrier, gives_up);
    if (gives_up) {
      if constexpr (kHasRing) take_rest(row);
      return;
    }
#pragma unroll 1
    for (; item < num_candidates; item += team.num_teams) {
      if (item >= team.num_teams || blocks()) sum_row(kAsksAhead && !blocks() ? next : ask_for_row(item));
      if (kReadsOnce && !blocks() && args.y && team.warp == 0 && item + team.num_teams < num_candidates)
        fetch_ahead(next);
      if (row.present) send_row(row, sums, team);
      if (is_far(peers, row.peer) && !by_node()) put_staged(row.peer, peers.rank, row.index, row.present, team);
    }
  }

  // At zero; but all_to_all_back moves one row as it is, if there is one, and 0 + -0 would not be -0.
  __device__ void start_sum(float (&total)[kSize], bool any = true) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] = blocks() && any ? -0.0f : 0.0f;
  }

  // Units of the sum over a token's rows here, in the order of k, each rounded once. What a lane without a unit sums,
  // nobody stores.
  template <int N = kSumsAtOnce>
  struct Sums {
    uint4 unit[N];
  };

  __device__ static uint4 rounded(const float (&total)[kSize]) {
    Vector<X> sum;
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum.element[e] = from_float<X>(total[e]);
    return sum.bits;
  }

  // A row that goes back: what this lane knows of it.
  struct SourceRow {
    int32_t peer, index;
    int32_t seen;  // whether it is present: more than `index` rows from the peer; of an own one, a place that is not -1
    bool present;
    uint32_t rows;  // the k that have a row here
    int32_t row;    // here, for k = lane
    float weight;
  };

  // For all_to_all_back: calls, so that other operations need no registers for it.
  __device__ __noinline__ static void send_num_rows(Operation op, const int32_t* num_rows) {
    op.send_num_rows(num_rows);
  }
  __device__ __noinline__ static int32_t expect_num_rows(Operation op, int32_t source) {
    return op.expect_num_rows(source);
  }

  // Whether own tokens' rows are summed by whoever adds the other ranks' sums. Else they go through the arena like a
  // peer's.
  __device__ bool sums_own() const { return !has_few_rows(kForm) && plan.sums_own && !blocks(); }
  __device__ int32_t num_destinations() const { return peers.num_ranks - sums_own(); }

  // Asks for what there is of it; use it when that is resolved(). Whether it is present is judged there if it is asked
  // for ahead: a compare would wait for what was loaded. Else here, which takes less time.
  __device__ SourceRow ask_for_row(uint32_t item) const {
    const Divisor& by_destinations = sums_own() ? peers.by_others : peers.by_ranks;
    int32_t peer = peers.rank + 1 + by_destinations.remainder(item);
    if (peer >= peers.num_ranks) peer -= peers.num_ranks;
    return ask_for_row(peer, by_destinations.quotient(item));
  }

  // An own token's row has the token's number.
  __device__ SourceRow ask_for_row(int32_t peer, int32_t index) const {
    SourceRow source = {};
    source.peer = peer;
    source.index = index;
    const int32_t candidate = source.peer * args.num_tokens + source.index;
    source.row = -1;
    if (blocks()) {
      if (lane_id() == 0) source.row = candidate;
    } else if (lane_id() < args.top_k) {
      source.row = __ldg(args.rows + int64_t{candidate} * args.top_k + lane_id());
    }
    if (peer != peers.rank || blocks()) {
      source.seen = num_rows_of(source.peer);
      if (!kAsksAhead) source.present = source.index < source.seen;
    } else {
      source.seen = sums_own() ? index : __ldg(args.place + int64_t{index} * peers.num_ranks + peer);
      if (!kAsksAhead) source.present = source.seen >= 0;
    }
    return source;
  }

  __device__ SourceRow resolved(SourceRow source) const {
    if (kAsksAhead) source.present = is_present(source);
    if (!source.present) source.row = -1;
    source.weight = args.row_weights && source.row >= 0 ? __ldg(args.row_weights + source.row) : 1.0f;
    source.rows = __ballot_sync(kAllLanes, source.row >= 0);
    return source;
  }

  __device__ bool is_present(const SourceRow& source) const {
    return source.peer != peers.rank || blocks() ? source.index < source.seen : source.seen >= 0;
  }

  // Has y of a row that was asked for brought into the L2 cache, with a warp, if the row has as many there as are
  // loaded at once, or more: where many of all tokens go to this rank, y is too large for the cache, and who waits for
  // that much from memory keeps the link waiting.
  __device__ void fetch_ahead(const SourceRow& source) const {
    const bool present = source.row >= 0 && is_present(source);
    if (__popc(__ballot_sync(kAllLanes, present)) < kRowsAtOnce) return;
    if (present) fetch_to_l2(static_cast<const uint8_t*>(args.y) + int64_t{source.row} * args.row_bytes, row_bytes());
    __syncwarp();
  }

  // Rows that came from `peer`, and so go back. (all_to_all_back has no route: it waits for the peer's word, which
  // leaves before any row. One lane does, so that all go on alike, whatever fails.)
  __device__ int32_t num_rows_of(int32_t peer) const {
    if (!blocks()) return __ldg(args.num_arrived + peer);
    int32_t number = 0;
    if (lane_id() == 0) number = expect_num_rows(op, peer);
    return __shfl_sync(kAllLanes, number, 0);
  }

  // `sums`: of the first chunks that this warp sends.
  __device__ void send_row(const SourceRow& row, Sums<> sums, const Team& team) const {
    const Hop to = next_hop(row.peer);
    const RowPlace place(op, to.rank, to.source, row.index);
    if (args.weights_to_send && team.warp == 0 && lane_id() < args.top_k) {
      send_header(op, place.header(lane_id()), {0, 0, row.row < 0 ? 0 : __ldg(args.weights_to_send + row.row), 0});
    }
#pragma unroll 1
    for (int32_t part = team.warp; part < end_of_parts(); part += step(team)) {
      if (part != team.warp) sums = partial_sums(row, part, team);
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) {
        const int32_t chunk = chunk_of(part, i, team);
        const bool present = has_unit(chunk);
        Chunk::of(sums.unit[i], present)
            .send(op, to.rank, place.unit(op, chunk), [&] { return place.marks + chunk; }, present);
      }
    }
  }

  // The rank that a sum for `peer` is sent to, and what it is kept as there.
  struct Hop {
    int32_t rank, source;
  };

  // By node, the far rank's counterpart here, and as if from this rank's counterpart there, whose own rows never come
  // this way.
  __device__ Hop next_hop(int32_t peer) const {
    if (!by_node() || !is_far(peers, peer)) return {peer, peers.rank};
    const Nodes& nodes = nodes_of(peers);
    return {nodes.counterpart(peer, nodes.own), nodes.counterpart(peers.rank, peer / nodes.size)};
  }

  // When the team has staged a row for a far rank, its first warp puts it.
  __device__ void put_staged(int32_t peer, int32_t source, int32_t index, bool present, const Team& team) const {
    if (any_of_team(team, kFirstBarrier, !present || op.state.failed) || team.warp != 0) return;
    const int32_t begin = args.weights_to_send ? 0 : peers.layout.header_bytes;
    put_row(op, peer, source, index, begin, peers.layout.header_bytes - begin + row_bytes());
  }

  // What a warp sums of a row at once, a part: where pieces of y come ahead, chunks that lie side by side; else one of
  // each of the team's rounds, so that all of its warps have a chunk if there are as many. Parts go from team.warp to
  // end_of_parts(), in steps.
  template <int N = kSumsAtOnce>
  __device__ int32_t end_of_parts() const {
    return kHasRing ? (chunks() + N - 1) / N : chunks();
  }
  template <int N = kSumsAtOnce>
  __device__ static int32_t step(const Team& team) {
    return kHasRing ? team.num_warps : N * team.num_warps;
  }
  template <int N = kSumsAtOnce>
  __device__ static int32_t chunk_of(int32_t part, int i, const Team& team) {
    return kHasRing ? part * N + i : part + i * team.num_warps;
  }

  // Of a part; call it for all of a row's, in their order. Without a ring, N is 1 for who receives, of an own row.
  template <int N = kSumsAtOnce>
  __device__ Sums<N> partial_sums(const SourceRow& source, int32_t part, const Team& team) const {
    float total[N][kSize];
#pragma unroll
    for (int c = 0; c < N; ++c) start_sum(total[c]);
    if constexpr (kHasRing) {
      add_pieces(source, part, team, total);
    } else if constexpr (N > 1) {
      add_rows(source, part, team, total);
    } else {
      add_own_rows(source, part, total[0]);
    }
    Sums<N> sums;
#pragma unroll
    for (int c = 0; c < N; ++c) sums.unit[c] = rounded(total[c]);
    return sums;
  }

  // A sender's warps wait for one another's instructions, more than for y: here each row takes few. What all have in
  // common is worked out once, and kept; and a lane that has no unit of its chunk reads the row's last one.
  template <int N>
  __device__ void add_rows(const SourceRow& source, int32_t part, const Team& team, float (&total)[N][kSize]) const {
    const auto bytes = static_cast<uint32_t>(row_bytes());
    const uint8_t* of_first_row[N];
    bool has_chunk[N];
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int32_t chunk = chunk_of<N>(part, c, team);
      const auto offset = static_cast<uint32_t>(chunk * kChunkBytes + lane_id() * kUnitBytes);
      of_first_row[c] = keep_address(static_cast<const uint8_t*>(args.y) + min(offset, bytes - kUnitBytes));
      has_chunk[c] = chunk < chunks();
    }
#pragma unroll 1
    for (uint32_t rows = source.rows; rows;) {
      Vector<X> y[kRowsAtOnce][N];
      uint32_t weighted = rows;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!rows) break;
        const uint32_t row = __shfl_sync(kAllLanes, source.row, __ffs(rows) - 1);
        rows &= rows - 1;
#pragma unroll
        for (int c = 0; c < N; ++c) {
          if (has_chunk[c]) y[i][c].bits = load_unit_of_y<kReadsOnce>(of_first_row[c] + uint64_t{row} * bytes);
        }
      }
      // Only now, since the weights are asked for when the rows are known: y need not wait for them.
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!weighted) break;
        const float weight = weight_of_first(source, weighted);
        weighted &= weighted - 1;
#pragma unroll
        for (int c = 0; c < N; ++c) {
          if (has_chunk[c]) add_weighted(y[i][c], weight, total[c]);
        }
      }
    }
  }

  // The same for one chunk of an own row. Who receives has time until the peers' sums come, but their places take its
  // registers: what is kept above is worked out again here, as ptxas would spill it, or load the rows one by one.
  __device__ void add_own_rows(const SourceRow& source, int32_t chunk, float (&total)[kSize]) const {
#pragma unroll 1
    for (uint32_t rows = source.rows; rows;) {
      Vector<X> y[kRowsAtOnce];
      uint32_t weighted = rows;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const uint8_t* const row = row_of_y(source, rows);
        y[i].bits = uint4{};
        if (rows && has_unit(chunk)) {
          y[i].bits = load_unit_of_y<kReadsOnce>(row + (chunk * kChunkBytes + lane_id() * kUnitBytes));
        }
        rows &= rows - 1;
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!weighted) break;
        add_weighted(y[i], weight_of_first(source, weighted), total);
        weighted &= weighted - 1;
      }
    }
  }

  // The first of these `rows`.
  __device__ const uint8_t* row_of_y(const SourceRow& source, uint32_t rows) const {
    const auto row = static_cast<uint32_t>(__shfl_sync(kAllLanes, source.row, __ffs(rows) - 1));
    return static_cast<const uint8_t*>(args.y) + uint64_t{row} * static_cast<uint32_t>(row_bytes());
  }

  __device__ static float weight_of_first(const SourceRow& source, uint32_t rows) {
    return __shfl_sync(kAllLanes, source.weight, __ffs(rows) - 1);
  }

  __device__ static void add_weighted(const Vector<X>& y, float weight, float (&total)[kSize]) {
    float values[kSize];
    to_floats(y, values);
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] += weight * values[e];
  }

  // The pieces of a part come one row after the other; each row's lane asks for its own, as far ahead as the ring has
  // room. (What lies behind the end of a row's last piece is added, too, and nobody stores it.)
  template <int N>
  __device__ void add_pieces(const SourceRow& source, int32_t part, const Team& team, float (&total)[N][kSize]) const {
    static_assert(N == kSumsAtOnce);
    const int32_t begin = part * kPartBytes;
    if (part == team.warp) {
      const uint32_t rows_before = source.rows & ((1u << lane_id()) - 1);
      const auto* const row = static_cast<const uint8_t*>(args.y) + int64_t{source.row} * args.row_bytes;
      to_come = {ring.num_taken() + __popc(rows_before), source.row >= 0 ? row_bytes() - begin : 0,
                 keep_address(row + begin)};
      ask_for_pieces(source, team);
    }
#pragma unroll 1
    for (uint32_t rows = begin < row_bytes() ? source.rows : 0; rows; rows &= rows - 1) {
      const float weight = weight_of_first(source, rows);
      const uint32_t piece = ring.next() + lane_id() * kUnitBytes;
      Vector<X> y[N];
#pragma unroll
      for (int c = 0; c < N; ++c) y[c].bits = load_shared_unit(piece + c * kChunkBytes);
#pragma unroll
      for (int c = 0; c < N; ++c) add_weighted(y[c], weight, total[c]);
      ring.drop();
      ask_for_pieces(source, team);
    }
  }

  __device__ void ask_for_pieces(const SourceRow& source, const Team& team) const {
#pragma unroll 1
    while (to_come.bytes_left > 0 && ring.has_room_for(to_come.number)) {
      ring.ask(to_come.number, to_come.from, min(to_come.bytes_left, kPartBytes));
      to_come.number += __popc(source.rows);
      to_come.from += team.num_warps * kPartBytes;
      to_come.bytes_left -= team.num_warps * kPartBytes;
    }
  }

  // A block must not end before what it has asked for has come.
  __device__ void take_rest(const SourceRow& source) const {
    if (!source.rows) return;
    const int32_t end = __reduce_min_sync(kAllLanes, source.row >= 0 ? to_come.number : INT32_MAX);
#pragma unroll 1
    while (ring.num_taken() < end) ring.next(), ring.drop();
  }

  // --- between senders and receivers, over a network ----------------------------------------------------------------

  // Adds up what this node's ranks have of the tokens of this rank's counterparts, and sends the sums there. The team's
  // warps meet at a barrier for each, so that none of them leaves the others, whatever fails.
  __device__ void pass_on() const {
    const Team team = Team::of_forwarders(plan, op.state.ticket, warp_id());
    if (any_of_team(team, kFirstBarrier, op.state.failed)) return;
    const Nodes& nodes = nodes_of(peers);
    const int32_t as = nodes.source_of(nodes.own);
    const int32_t num_candidates = team.index < team.num_teams ? nodes.num_others() * args.num_tokens : 0;
#pragma unroll 1
    for (int32_t item = team.index; item < num_candidates; item += team.num_teams) {
      const int32_t token = item / nodes.num_others(), node = nodes.other(item - token * nodes.num_others());
      const int32_t source = nodes.counterpart(lane_id(), node);  // what this lane's rank sends as
      const int64_t kept = (int64_t{args.num_tokens} + token) * peers.num_ranks + source;
      const int32_t index = nodes.is_own(lane_id()) ? __ldg(args.place + kept) : -1;
      const uint32_t sources = __ballot_sync(kAllLanes, index >= 0);
      if (sources == 0) continue;
      const int32_t row = row_number(source, index);  // of this lane's rank
      const int32_t peer = nodes.counterpart_in(node);
      const RowPlace to(op, peer, as, token);
      if (args.weights_to_send && team.warp == 0) {
        const float weight = weight_of(row, sources);
        if (lane_id() < args.top_k) send_header(op, to.header(lane_id()), {0, 0, weight, 0});
      }
#pragma unroll 1
      for (int32_t chunk = team.warp; chunk < chunks(); chunk += team.num_warps) {
        const int32_t chunks_added[] = {chunk};
        float total[1][kSize];
        start_sum(total[0]);
        add_all<1, kRanksAtOnce>(row, sources, 0, chunks_added, total, [](int) { return uint4{}; });
        const bool present = has_unit(chunk);
        Chunk::of(rounded(total[0]), present)
            .send(op, peer, to.unit(op, chunk), [&] { return to.marks + chunk; }, present);
      }
      put_staged(peer, as, token, true, team);
    }
  }

  // --- receivers: the source side -----------------------------------------------------------------------------------

  __device__ void receive() const {
    const Team team = Team::of_receivers(plan, op.state.ticket, warp_id());
    const bool takes_tokens = plan.row_receiver(op.state.ticket) >= 0 && team.index < team.num_teams;
    int32_t token = takes_tokens ? team.index : args.num_tokens;
    Returning asked = {};
    if (kAsksAhead && token < args.num_tokens) asked = ask_for_token(token);
    op.stamp(1);
    if (op.warp_has_failed()) return;
    if (op.state.ticket == plan.first_receiver && op.meets_peers()) {
      const int32_t header_bytes = args.weights_to_send ? args.top_k * kUnitBytes : 0;
      op.meet_peers(op, &PeerCounters::returned, args.num_arrived, row_bytes() + header_bytes);
    }
#pragma unroll 1
    for (; token < args.num_tokens; token += team.num_teams) {
      const Returning now = kAsksAhead ? asked : ask_for_token(token);
      const int32_t next = token + team.num_teams;
      if (kAsksAhead && next < args.num_tokens) asked = ask_for_token(next);
      receive_token(token, now, team);
    }
  }

  // A token whose sums come back.
  struct Returning {
    int32_t index;  // of its row among those that this lane's rank got
    SourceRow own;  // what it has here, to be resolved()
  };

  __device__ Returning ask_for_token(int32_t token) const {
    Returning asked = {-1};
    if (lane_id() < peers.num_ranks) asked.index = __ldg(args.place + int64_t{token} * peers.num_ranks + lane_id());
    if (sums_own()) asked.own = ask_for_row(peers.rank, token);
    return asked;
  }

  __device__ void receive_token(int32_t token, const Returning& asked, const Team& team) const {
    const SourceRow own = sums_own() ? resolved(asked.own) : SourceRow{};
    const int32_t rank = lane_id();
    int32_t index = asked.index, source = rank;
    if (by_node()) {
      const Nodes& nodes = nodes_of(peers);
      index = index_by_node(nodes, index, token);
      if (!nodes.is_own(rank)) source = nodes.source_of(rank / nodes.size);
    }
    if (kHasNetwork && index >= 0) await_signal(op, rank, source, index);
    __syncwarp();                                   // all lanes read what some have waited for
    const int32_t row = row_number(source, index);  // of this lane's rank
    const uint32_t sources = __ballot_sync(kAllLanes, index >= 0), here = sums_own() ? 1u << peers.rank : 0;
    if (args.topk_weights && team.warp == team.num_warps - 1) {  // which has least to do
      float weight = weight_of(row, sources & ~here);
      if (here && own.row >= 0) weight += __ldg(args.weights_to_send + own.row);
      if (lane_id() < args.top_k) args.topk_weights[int64_t{token} * args.top_k + lane_id()] = weight;
    }
    if constexpr (kForm == Form::kUsual) {
      // What comes from few ranks leaves room for more chunks.
      if (!(sources & here) && __popc(sources) <= kRanksAtOnce / 2) {
        return add_parts<2, kRanksAtOnce / 2>(token, row, sources, 0, own, team);
      }
    }
    if constexpr (kHasRing) {
      add_parts_of_ring(token, row, sources, here & sources, own, team);
    } else {
      add_parts<1, kRanksAtOnce>(token, row, sources, here, own, team);
    }
  }

  // Where y comes ahead: own rows are summed first, and those sums wait in shared memory for their turn among all
  // ranks'. Few instructions are what counts.
  __device__ void add_parts_of_ring(int32_t token, int32_t row, uint32_t sources, uint32_t here, const SourceRow& own,
                                    const Team& team) const {
    const uint32_t kept = ring.spare() + lane_id() * kUnitBytes;
#pragma unroll 1
    for (int32_t part = team.warp; part < end_of_parts(); part += step(team)) {
      if (here) {
        const Sums<> sums = partial_sums(own, part, team);
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) store_shared_unit(kept + c * kChunkBytes, sums.unit[c]);
      }
      float total[kSumsAtOnce][kSize];
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) start_sum(total[c], sources != 0);
#pragma unroll 1
      for (uint32_t left = sources; left; left &= left - 1) {
        Sums<> sums;
        if (left & -left & here) {
#pragma unroll
          for (int c = 0; c < kSumsAtOnce; ++c) sums.unit[c] = load_shared_unit(kept + c * kChunkBytes);
        } else {
          sums = take_sums(__ffs(left) - 1, row, part);
        }
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) {
          Vector<X> unit;
          unit.bits = sums.unit[c];
          add_weighted(unit, 1.0f, total[c]);
        }
      }
      store_sums(token, part, total);
    }
  }

  // Chunks that lie side by side, as they arrive: this lane's units.
  struct PartPlace {
    uint8_t* units;
    int32_t bytes_left;
    __device__ __forceinline__ bool has(int i) const { return i * kChunkBytes < bytes_left; }
    __device__ __forceinline__ uint8_t* at(int i) const { return units + i * kChunkBytes; }
  };

  // A part of what `source` has summed.
  __device__ Sums<> take_sums(int32_t source, int32_t row, int32_t part) const {
    const RowPlace from(op, __shfl_sync(kAllLanes, row, source));
    const int32_t first = part * kSumsAtOnce;
    const PartPlace place = {from.unit(op, first), row_bytes() - (first * kChunkBytes + lane_id() * kUnitBytes)};
    const auto resolve = [&](int i) { return true_unit(op, source, from.marks + first + i, lane_id()); };
    Sums<> sums;
    look_at_units(sums.unit, place);
    take_units(op, [=](int) { return source; }, sums.unit, place, resolve, [] { return true; });
    __syncwarp();
    return sums;
  }

  __device__ void store_sums(int32_t token, int32_t part, const float (&total)[kSumsAtOnce][kSize]) const {
    const int32_t first = part * kSumsAtOnce * kChunkUnits + lane_id();  // unit of the row
    const int32_t units = row_bytes() / kUnitBytes;
    const int64_t index = (int64_t{token} * units + first) * kSize;
    const auto store = [&](auto* out) {
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) {
        if (first + c * kChunkUnits < units) store_elements(out + index + c * kChunkUnits * kSize, total[c]);
      }
    };
    with_out_type(store);
  }

  // Parts of `kChunks` chunks, in which a lane awaits units of `kRanks` ranks at once. Own rows are summed while the
  // other ranks' sums are on their way.
  template <int kChunks, int kRanks>
  __device__ __forceinline__ void add_parts(int32_t token, int32_t row, uint32_t sources, uint32_t here,
                                            const SourceRow& own, const Team& team) const {
#pragma unroll 1
    for (int32_t part = team.warp; part < end_of_parts<kChunks>(); part += step<kChunks>(team)) {
      float total[kChunks][kSize];
      int32_t chunk[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        chunk[i] = chunk_of<kChunks>(part, i, team);
        start_sum(total[i], sources != 0);
      }
      add_all<kChunks, kRanks>(row, sources, here, chunk, total, [&](int i) {
        return partial_sums<1>(own, chunk[i], team).unit[0];  // of one chunk, a part has the chunk's number
      });
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (has_unit(chunk[i])) store_sum(token, chunk[i], total[i]);
      }
    }
  }

  __device__ int32_t row_number(int32_t source, int32_t index) const {
    return peers.layout.row_number(op.state.slot, source, index);
  }

  // For k = lane. Each (token, k) has its row on one rank at most; the others send zero.
  __device__ float weight_of(int32_t row, uint32_t sources) const {
    float total = 0;
#pragma unroll 1
    for (; sources; sources &= sources - 1) {
      const int32_t source = __ffs(sources) - 1;
      const RowPlace place(op, __shfl_sync(kAllLanes, row, source));
      RowHeader header = no_header(op);
      const bool came = op.wait_until(
          source, [&] { return lane_id() >= args.top_k || look_at_header(op, place.header(lane_id()), header); });
      if (came) total += header.weight;
      __syncwarp();
    }
    return total;
  }

  // Adds, for each of some chunks, a unit of all ranks' partial sums; own(i) gives that of the rank that is `here`.
  template <int N, int kRanks, typename Own>
  __device__ __forceinline__ void add_all(int32_t row, uint32_t sources, uint32_t here, const int32_t (&chunk)[N],
                                          float (&total)[N][kSize], Own own) const {
#pragma unroll 1
    while (sources) add_ranks<N, kRanks>(row, sources, here, chunk, total, own);
  }

  // Where this lane's units of some chunks arrive from each of some ranks.
  template <int N, int kRanks>
  struct UnitOfRanks {
    const ArenaLayout& layout;
    uint8_t* of_first_row[N];  // of the arena
    int32_t row[kRanks];
    bool comes[kRanks], has_unit[N];
    __device__ __forceinline__ bool has(int i) const { return comes[i % kRanks] && has_unit[i / kRanks]; }
    __device__ __forceinline__ uint8_t* at(int i) const {
      return of_first_row[i / kRanks] + layout.row_offset(row[i % kRanks]);
    }
  };

  // Adds those of the next few ranks, in the order of ranks.
  template <int N, int kRanks, typename Own>
  __device__ __forceinline__ void add_ranks(int32_t row, uint32_t& left, uint32_t here, const int32_t (&chunk)[N],
                                            float (&total)[N][kSize], Own own) const {
    const auto source = [now = left](int i) {
      uint32_t behind = now;
      for (i %= kRanks; i > 0; --i) behind &= behind - 1;
      return __ffs(behind) - 1;
    };
    UnitOfRanks<N, kRanks> place = {peers.layout};
#pragma unroll
    for (int c = 0; c < N; ++c) {
      place.of_first_row[c] = RowPlace(op, 0).unit(op, chunk[c]);
      place.has_unit[c] = has_unit(chunk[c]);
    }
    bool is_here[kRanks], any_is_here = false;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      place.row[i] = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      is_here[i] = left & -left & here;
      any_is_here |= is_here[i];
      place.comes[i] = left != 0 && !is_here[i];
      left &= left - 1;
    }
    uint4 units[N * kRanks];
    look_at_units(units, place);
    uint4 unit_here[N] = {};
    if (any_is_here) {
#pragma unroll
      for (int c = 0; c < N; ++c) unit_here[c] = own(c);
    }
    const auto resolve = [&](int i) {
      const RowPlace from(op, place.row[i % kRanks]);
      return true_unit(op, source(i), from.marks + chunk[i / kRanks], lane_id());
    };
    take_units(op, source, units, place, resolve, [] { return true; });
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N * kRanks; ++i) {
      const int c = i / kRanks, rank = i % kRanks;
      Vector<X> part;
      part.bits = is_here[rank] ? unit_here[c] : units[i];
      float values[kSize];
      to_floats(part, values);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (place.has(i) || is_here[rank]) total[c][e] += values[e];
      }
    }
  }

  __device__ void store_sum(int32_t token, int32_t chunk, const float (&total)[kSize]) const {
    const int64_t index =
        int64_t{token} * (row_bytes() / static_cast<int32_t>(sizeof(X))) + (chunk * kChunkUnits + lane_id()) * kSize;
    with_out_type([&](auto* out) { store_elements(out + index, total); });
  }

  template <typename F>
  __device__ __forceinline__ void with_out_type(F f) const {
    if (args.out_type == ElementType::kFloat32) {
      f(static_cast<float*>(args.out));
    } else if (args.out_type == ElementType::kFloat16) {
      f(static_cast<__half*>(args.out));
    } else {
      f(static_cast<__nv_bfloat16*>(args.out));
    }
  }

  // --- failure ------------------------------------------------------------------------------------------------------

  __device__ void poison() const {
    const int64_t elements = args.num_tokens * args.row_bytes / static_cast<int64_t>(sizeof(X));
    fill_bytes(args.out, elements * (args.out_type == ElementType::kFloat32 ? 4 : 2), 0xff);
    fill_bytes(args.topk_weights, int64_t{4} * args.num_tokens * args.top_k, 0xff);
  }
};

template <typename X, Form kForm>
__global__ void __launch_bounds__(most_threads(kForm), least_blocks_per_sm(kForm))
    gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherArgs args,
                  const __grid_constant__ LaunchPlan plan) {
  JAX_EP_SHARED(State, state);
  RingOfY ring;
  Pieces to_come = {};
  if constexpr (has_ring(kForm)) {
    JAX_EP_DYNAMIC_SHARED(128, pieces);
    JAX_EP_SHARED(RingOfY::LandedOfWarps, landed);
    ring.open(pieces + warp_id() * ring.kBytes, landed[warp_id()]);
  }
  const void* result = args.out ? args.out : args.topk_weights;
  const int32_t num_workers = static_cast<int32_t>(blockDim.x) - (has_control_warp(kForm) ? 32 : 0);
  const Gather<X, kForm> gather = {peers, args, plan, {peers, args, result, state, num_workers}, ring, to_come};
  fetch_arguments(peers);
  fetch_arguments(args);
  wait_for_dependencies();
  gather.op.stamp(0);
  const auto forwards = [&](int32_t ticket) { return gather.by_node() && plan.forwards(ticket); };
  if (gather.op.is_control_warp()) {
    gather.op.enter([&](int32_t ticket) { return ticket < plan.num_senders || forwards(ticket); });
  }
  __syncthreads();  // the block has entered
  const int32_t ticket = state.ticket;
  if (gather.op.is_worker()) {
    if (ticket == 0) gather.announce();
    if (plan.sends_rows(ticket)) gather.send();
    if (forwards(ticket)) {
      if (plan.sends_rows(ticket)) gather.op.sync_workers();  // the teams' barriers are those of the teams that send
      gather.pass_on();
    }
    if (ticket >= plan.first_receiver) gather.receive();
  }
  gather.op.end([&] { gather.poison(); });
}

template <typename X>
auto kernel_of(Form form) {
  switch (form) {
    case Form::kFewRows:
      return gather_kernel<X, Form::kFewRows>;
    case Form::kFewRowsDense:
      return gather_kernel<X, Form::kFewRowsDense>;
    case Form::kUsual:
      return gather_kernel<X, Form::kUsual>;
    default:
      return gather_kernel<X, Form::kManyRows>;
  }
}

}  // namespace

cudaError_t launch_gather(const Peers& peers, const GatherArgs& args, ElementType type, const LaunchPlan& best,
                          cudaStream_t stream) {
  const LaunchPlan plan = kHasNetwork ? over_network(best, goes_by_node(peers, args)) : best;
  return with_element_type(type, [&](auto element) {
    const auto kernel = kernel_of<decltype(element)>(plan.form);
    const int32_t scratch = plan.block_warps() * ring_bytes(plan.form);
    return launch(kernel, {plan.num_blocks, plan.block_threads(), scratch}, stream, peers, args, plan);
  });
}

cudaError_t load_gather() {
  cudaError_t status = cudaSuccess;
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    with_element_type(type, [&](auto element) {
      for (Form form : kForms) {
        if (status != cudaSuccess) return;
        status = load_kernel(kernel_of<decltype(element)>(form), kMaxBlockWarps * ring_bytes(form));
      }
    });
  }
  return status;
}

}  // namespace jax_ep
