#include "ffi/cuda/gather.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/rows.cuh"
#include "ffi/cuda/units.cuh"

namespace jax_ep {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kRowsAtOnce = 4;   // of a token's rows here, that a lane loads before it adds them
constexpr int kRanksAtOnce = 4;  // of the ranks' sums

__device__ __forceinline__ int32_t warp_id() { return static_cast<int32_t>(threadIdx.x / 32); }

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

// One launch of one rank. `row_warps` warps share a row that is summed, by chunks.
template <typename X, bool kFew>
struct Gather {
  static constexpr int kSize = Vector<X>::kSize;
  // Chunks of a row that a warp sums at once. With more, many rows would take more registers than there are.
  static constexpr int kSumsAtOnce = kFew ? 2 : 1;

  const Peers& peers;
  const GatherArgs& args;
  const LaunchPlan& plan;
  Operation op;

  __device__ bool blocks() const { return args.rows == nullptr; }
  __device__ int32_t row_bytes() const { return static_cast<int32_t>(args.row_bytes); }
  __device__ int32_t chunks() const { return num_chunks(row_bytes()); }
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < row_bytes(); }

  // --- senders: the experts' side -----------------------------------------------------------------------------------

  __device__ void announce() const {
    op.await_entry();
    if (op.state.sends && !op.state.failed) {
      for (int32_t peer = threadIdx.x; peer < peers.num_ranks; peer += op.num_workers) {
        if (args.num_sent) {
          op.send_number(peer, &op.control_of(peer).num_rows[op.state.slot][peers.rank], args.num_sent[peer]);
        }
        op.announce(peer);
      }
    }
    op.tell_former_finished();
  }

  // The possible rows, interleaving the ranks they go to, beginning behind this rank. Where there are many, what is
  // added next is asked for before what has been added is sent, and which rows it is in, a row earlier: a load waits
  // for the stores before it to get on their way. The first is summed while the block is `entering`.
  __device__ void send(bool entering) const {
    const Team team = Team::of_senders(plan, blockIdx.x, warp_id());
    const uint32_t num_candidates = team.index < team.num_teams ? peers.num_ranks * most_rows() : 0;
    if ((kHasNetwork || blocks()) && entering) {  // num_rows_of() waits for the peers
      op.await_entry();
      entering = false;
    }
    // Warps that meet at a barrier for a far rank's rows must agree: they go on to the end, or do not begin.
    if (kHasNetwork && any_of_team(team, kFirstBarrier, !op.state.sends || op.state.failed)) return;
    uint32_t item = team.index;  // of `next`
    SourceRow row = {}, next = {}, ahead = {};
    if (item < num_candidates) next = source_row(item);
    if (!kFew && item + team.num_teams < num_candidates) ahead = source_row(item + team.num_teams);
    int32_t first = team.warp, first_sent = chunks();  // of the chunks that are added, and sent, now
    bool ends = false;                                 // the row, with these
    Sums sums = {};
#pragma unroll 1
    while (true) {
      Addends addends = {};
      if (!kFew) addends = load(next, next.rows, first, team);
      if (row.present) send_chunks(row, sums, first_sent, team);
      if (ends && is_far(peers, row.peer)) put_staged(row, team);
      if (next.present) sums = sum(next, addends, first, team);
      if (entering) op.await_entry();
      entering = false;
      op.stamp(1);
      if (item >= num_candidates || (!kHasNetwork && (!op.state.sends || op.state.failed))) return;
      row = next;
      first_sent = first;
      first += kSumsAtOnce * team.num_warps;
      ends = !(next.present && first < chunks());
      if (!ends) continue;
      first = team.warp;
      item += team.num_teams;
      next = {};
      if (item < num_candidates) next = kFew ? source_row(item) : ahead;
      if (!kFew && item + team.num_teams < num_candidates) ahead = source_row(item + team.num_teams);
    }
  }

  // Units of the sum over a token's rows here, in the order of k, each rounded once; as they are sent. (Made here, as
  // what makes them may be a call, for which loads under way would have to be waited for.)
  struct Sums {
    Chunk chunk[kSumsAtOnce];
  };

  // A row that goes back: what this lane knows of it.
  struct SourceRow {
    int32_t peer, index;
    bool present;
    uint32_t rows;  // the k that have a row here
    int32_t row;    // here, for k = lane
    float weight, weight_to_send;
  };

  __device__ SourceRow source_row(uint32_t item) const {
    SourceRow source = {};
    source.peer = peers.rank + 1 + peers.by_ranks.remainder(item);
    if (source.peer >= peers.num_ranks) source.peer -= peers.num_ranks;
    source.index = peers.by_ranks.quotient(item);
    const int32_t candidate = source.peer * args.num_tokens + source.index;
    source.row = -1;
    if (blocks()) {
      if (lane_id() == 0) source.row = candidate;
    } else if (lane_id() < args.top_k) {
      source.row = __ldg(args.rows + int64_t{candidate} * args.top_k + lane_id());
    }
    source.present = source.index < num_rows_of(source.peer);
    if (!source.present) source.row = -1;
    source.rows = __ballot_sync(kAllLanes, source.row >= 0);
    const bool here = source.row >= 0;
    source.weight = here && args.row_weights ? __ldg(args.row_weights + source.row) : 1.0f;
    source.weight_to_send = here && args.weights_to_send ? __ldg(args.weights_to_send + source.row) : 0.0f;
    return source;
  }

  // Of any rank, at most.
  __device__ uint32_t most_rows() const {
    if (blocks()) return args.num_tokens;
    return __reduce_max_sync(kAllLanes, lane_id() < peers.num_ranks ? __ldg(args.num_arrived + lane_id()) : 0);
  }

  // Rows that came from `peer`, and so go back. (all_to_all_back has no route: it waits for the peer's word, which
  // leaves before any row.)
  __device__ int32_t num_rows_of(int32_t peer) const {
    if (!blocks()) return __ldg(args.num_arrived + peer);
    return op.expect_number(peer, &op.own().num_rows[op.state.slot][peer]);
  }

  // Chunks first, first + num_warps, ...
  __device__ void send_chunks(const SourceRow& row, const Sums& sums, int32_t first, const Team& team) const {
    const RowPlace place(op, row.peer, peers.rank, row.index);
    if (args.weights_to_send && first == 0 && lane_id() < args.top_k) {
      send_header(op, place.header(lane_id()), {0, 0, row.weight_to_send, 0});
    }
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      const int32_t chunk = first + i * team.num_warps;
      sums.chunk[i].send(op, row.peer, place.unit(op, chunk), place.marks + chunk, has_unit(chunk));
    }
  }

  // When the team has staged a row for a far rank, its first warp puts it.
  __device__ void put_staged(const SourceRow& row, const Team& team) const {
    if (any_of_team(team, kFirstBarrier, !row.present || op.state.failed) || team.warp != 0) return;
    const int32_t begin = args.weights_to_send ? 0 : peers.layout.header_bytes;
    put_row(op, row.peer, row.index, begin, peers.layout.header_bytes - begin + row_bytes());
  }

  // What is added at once.
  struct Addends {
    Vector<X> y[kRowsAtOnce][kSumsAtOnce];
  };

  // Chunks first, first + num_warps, ... of the first few of `rows`.
  __device__ Addends load(const SourceRow& source, uint32_t rows, int32_t first, const Team& team) const {
    Addends addends;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t row = __shfl_sync(kAllLanes, source.row, rows ? __ffs(rows) - 1 : 0);
      const auto* base = static_cast<const uint8_t*>(args.y) + row * args.row_bytes;
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) {
        const int32_t chunk = first + c * team.num_warps;
        addends.y[i][c].bits = uint4{};
        if (rows && has_unit(chunk)) addends.y[i][c] = load_vector<X>(base, chunk * kChunkUnits + lane_id());
      }
      rows &= rows - 1;
    }
    return addends;
  }

  __device__ __forceinline__ void add(float (&total)[kSumsAtOnce][kSize], const SourceRow& source, uint32_t& rows,
                                      const Addends& addends) const {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      float weight = __shfl_sync(kAllLanes, source.weight, rows ? __ffs(rows) - 1 : 0);
      if (!rows) weight = 0;
      rows &= rows - 1;
#pragma unroll
      for (int c = 0; c < kSumsAtOnce; ++c) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) total[c][e] += weight * to_float(addends.y[i][c].element[e]);
      }
    }
  }

  // `addends`: of the first few rows, where they were asked for before.
  __device__ Sums sum(const SourceRow& source, const Addends& addends, int32_t first, const Team& team) const {
    float total[kSumsAtOnce][kSize] = {};
    uint32_t rows = source.rows;
    if (!kFew) add(total, source, rows, addends);
#pragma unroll 1
    while (rows) add(total, source, rows, load(source, rows, first, team));
    Sums sums;
#pragma unroll
    for (int c = 0; c < kSumsAtOnce; ++c) {
      Vector<X> sum;
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum.element[e] = from_float<X>(total[c][e]);
      sums.chunk[c] = Chunk::of(sum.bits, has_unit(first + c * team.num_warps));
    }
    return sums;
  }

  // --- receivers: the source side -----------------------------------------------------------------------------------

  __device__ void receive(bool entering) const {
    const Team team = Team::of_receivers(plan, blockIdx.x, warp_id());
    const bool takes_tokens = plan.row_receiver(blockIdx.x) >= 0 && team.index < team.num_teams;
    if (entering) op.await_entry();
    op.stamp(1);
    if (op.state.failed) return;
#pragma unroll 1
    for (int32_t token = team.index; takes_tokens && token < args.num_tokens; token += team.num_teams) {
      receive_token(token, team);
    }
    if (blockIdx.x == plan.first_receiver && threadIdx.x < peers.num_ranks) op.expect_same_call(threadIdx.x);
  }

  __device__ void receive_token(int32_t token, const Team& team) const {
    const int32_t source = lane_id();
    const int32_t index = source < peers.num_ranks ? __ldg(args.place + int64_t{token} * peers.num_ranks + source) : -1;
    RowPlace row = {};  // of this lane's rank
    if (index >= 0) {
      row = RowPlace(op, peers.rank, source, index);
      if constexpr (kHasNetwork) await_signal(op, source, index);
    }
    const uint32_t sources = __ballot_sync(kAllLanes, index >= 0);
    if (args.topk_weights && team.warp == 0) receive_weights(token, row, sources);
#pragma unroll 1
    for (int32_t chunk = team.warp; chunk < chunks(); chunk += team.num_warps) {
      float total[kSize] = {};
#pragma unroll 1
      for (uint32_t left = sources; left;) add_ranks(row, left, chunk, total);
      if (has_unit(chunk)) store_sum(token, chunk, total);
    }
  }

  // Each (token, k) has its row on one rank at most; the others send zero.
  __device__ void receive_weights(int32_t token, const RowPlace& row, uint32_t sources) const {
    float total = 0;
#pragma unroll 1
    for (; sources; sources &= sources - 1) {
      const int32_t source = __ffs(sources) - 1;
      const RowPlace place = row.of_lane(source);
      RowHeader header = {};
      const bool came = op.wait_for(source, op.state.epoch, [&] {
        return lane_id() >= args.top_k || look_at_header(op, place.header(lane_id()), header) ? op.state.epoch : 0;
      });
      if (came) total += header.weight;
      __syncwarp();
    }
    if (lane_id() < args.top_k) args.topk_weights[int64_t{token} * args.top_k + lane_id()] = total;
  }

  // Adds a unit of the next few ranks' partial sums, in the order of ranks.
  __device__ __forceinline__ void add_ranks(const RowPlace& row, uint32_t& left, int32_t chunk,
                                            float (&total)[kSize]) const {
    const auto source = [now = left](int i) {
      uint32_t behind = now;
      for (; i > 0; --i) behind &= behind - 1;
      return __ffs(behind) - 1;
    };
    RowPlace rows[kRanksAtOnce];
    bool present[kRanksAtOnce];
    uint4 units[kRanksAtOnce];
#pragma unroll
    for (int i = 0; i < kRanksAtOnce; ++i) {
      rows[i] = row.of_lane(__ffs(left) - 1);
      present[i] = left != 0 && has_unit(chunk);
      left &= left - 1;
    }
    const auto place = [&](int i) { return present[i] ? rows[i].unit(op, chunk) : nullptr; };
    look_at_units(units, place);
    take_units(
        op, source, units, place, [&](int i) { return true_unit(op, source(i), rows[i].marks + chunk, lane_id()); },
        [] { return true; });
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRanksAtOnce; ++i) {
      Vector<X> part;
      part.bits = units[i];
#pragma unroll
      for (int e = 0; e < kSize; ++e) total[e] += present[i] ? to_float(part.element[e]) : 0;
    }
  }

  __device__ void store_sum(int32_t token, int32_t chunk, const float (&total)[kSize]) const {
    const int64_t index =
        int64_t{token} * (row_bytes() / static_cast<int32_t>(sizeof(X))) + (chunk * kChunkUnits + lane_id()) * kSize;
    if (args.out_type == ElementType::kFloat32) {
      store_elements(static_cast<float*>(args.out) + index, total);
    } else if (args.out_type == ElementType::kFloat16) {
      store_elements(static_cast<__half*>(args.out) + index, total);
    } else {
      store_elements(static_cast<__nv_bfloat16*>(args.out) + index, total);
    }
  }

  // --- failure ------------------------------------------------------------------------------------------------------

  __device__ void poison() const {
    const int64_t elements = args.num_tokens * args.row_bytes / static_cast<int64_t>(sizeof(X));
    fill_bytes(args.out, elements * (args.out_type == ElementType::kFloat32 ? 4 : 2), 0xff);
    fill_bytes(args.topk_weights, int64_t{4} * args.num_tokens * args.top_k, 0xff);
  }
};

template <typename X, bool kFew>
__global__ void __launch_bounds__(most_threads(kFew), kFew ? 2 : 1)
    gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherArgs args,
                  const __grid_constant__ LaunchPlan plan) {
  __shared__ State state;
  const void* result = args.half == Half::kStart ? args.ticket : args.out ? args.out : args.topk_weights;
  const int32_t num_workers = static_cast<int32_t>(blockDim.x) - (kFew ? 32 : 0);
  const Gather<X, kFew> gather = {peers, args, plan, {peers, args, result, state, num_workers}};
  const int32_t block = blockIdx.x;
  const bool is_sender = block < plan.num_senders;
  uint32_t blocks_before = 0;
  fetch_arguments(peers);
  fetch_arguments(args);
  wait_for_dependencies();
  gather.op.stamp(0);
  if (gather.op.is_control_warp()) blocks_before = gather.op.begin(is_sender);
  if (gather.op.is_worker()) {
    if (block == 0) gather.announce();
    if (is_sender && (block > 0 || plan.num_senders == 1)) gather.send(block > 0);
    if (block >= plan.first_receiver && args.half != Half::kStart) gather.receive(!is_sender);
  }
  gather.op.end(blocks_before, [&] { gather.poison(); });
}

template <typename X>
auto kernel_of(bool few) {
  return few ? gather_kernel<X, true> : gather_kernel<X, false>;
}

}  // namespace

cudaError_t launch_gather(const Peers& peers, const GatherArgs& args, ElementType type, const LaunchPlan& best,
                          cudaStream_t stream) {
  const LaunchPlan plan = kHasNetwork ? sending_in_blocks(best) : best;
  const int32_t num_blocks = args.half == Half::kStart ? plan.num_senders : plan.num_blocks;
  with_element_type(type, [&](auto element) {
    const auto kernel = kernel_of<decltype(element)>(plan.few);
    kernel<<<num_blocks, plan.block_threads(), 0, stream>>>(peers, args, plan);
  });
  return cudaGetLastError();
}

cudaError_t load_gather() {
  cudaError_t status = cudaSuccess;
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    with_element_type(type, [&](auto element) {
      for (bool few : {false, true}) {
        if (status == cudaSuccess) status = load_kernel(kernel_of<decltype(element)>(few), 0);
      }
    });
  }
  return status;
}

}  // namespace jax_ep
