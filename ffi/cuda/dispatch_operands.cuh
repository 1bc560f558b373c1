// What the parts of a dispatch kernel share: the operands, facts that follow from them, and access to rows of x and of
// the result. The parts are layers, each in a file of its own, on top of this one:
//   routing.cuh, dispatch_send.cuh, padding.cuh, combine_backward.cuh, dispatch_receive.cuh, node_forward.cuh.
// dispatch.cu has the kernel, in which their order is visible.
#pragma once

#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/ll_units.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {

inline constexpr int32_t kPlacesBarrier = kFirstBarrier, kWarpGroupsBarrier = kFirstBarrier + 1;  // and those behind

struct DispatchShared {
  State state;
  float products[kMaxBlockWarps][kMaxTopK];
  // Of the tokens that a block's warp groups send at once, and of those that they sent before: the experts, top_k of
  // each, and their ranks.
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
constexpr int receive_batch(Arrival arrival, Variant variant) {
  if (is_low_latency(variant)) return 2;
  return arrival == Arrival::kDequantize ? 2 : 4;
}

// Rows of y that a warp has asked for, for combine's cotangents, and their bytes in shared memory.
constexpr int kRowsAhead = 3;
constexpr int y_bytes(Arrival arrival, Variant variant) {
  return arrival == Arrival::kCombineBack ? kRowsAhead * receive_batch(arrival, variant) * kChunkBytes : 0;
}

static_assert(kMaxScratch + kMaxBlockWarps * y_bytes(Arrival::kCombineBack, Variant::kThroughput) +
                  sizeof(DispatchShared) <=
              kMaxBlockSharedBytes);

// Whether, over a network, a row goes to another node once, and from there on to its ranks. (For all_to_all, once is
// what it needs.)
constexpr bool goes_by_node(const Peers& peers, const DispatchArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && !args.is_all_to_all &&
         !are_few(args.num_tokens);
}

// Of a row under way, without its scales.
__device__ __forceinline__ int32_t payload_of(const DispatchArgs& args) {
  return args.num_scales ? args.num_scales * static_cast<int32_t>(kChannelsPerScale)
                         : static_cast<int32_t>(args.row_bytes);
}

// What a dispatch kernel is compiled for. Rows are of X; the senders cast them to fp8, or not.
template <typename X_, bool kCasts_, Arrival kArrival_, Variant kVariant_>
struct DispatchConfig {
  using X = X_;
  static constexpr bool kCasts = kCasts_;
  static constexpr Arrival kArrival = kArrival_;
  static constexpr Variant kVariant = kVariant_;
};

template <typename Config>
struct DispatchOperands {
  using X = typename Config::X;
  static constexpr bool kCasts = Config::kCasts;
  static constexpr Arrival kArrival = Config::kArrival;
  static constexpr Variant kVariant = Config::kVariant;
  // Chunks that a warp has under way.
  static constexpr bool kIsLowLatency = is_low_latency(kVariant);
  static constexpr int kSendBatch = kIsLowLatency || (kCasts && kVariant != Variant::kThroughput) ? 1 : 2;
  static constexpr int kReceiveBatch = receive_batch(kArrival, kVariant);
  static constexpr bool kStealsRows =
      kVariant == Variant::kThroughput;  // blocks take rows and padding as they come to it
  static constexpr int kUnroll = kStealsRows ? 2 : 1;
  static constexpr int kUnitsRead = kCasts ? sizeof(X) : 1;  // for one that is sent

  const Peers& peers;
  const DispatchArgs& args;
  const LaunchPlan& plan;
  Operation op;
  DispatchShared& shared;
  void* scratch;          // dynamic shared memory
  int32_t payload_bytes;  // of a row under way, without its scales

  __device__ int32_t experts_per_rank() const { return peers.experts_per_rank; }
  __device__ int32_t num_experts() const { return peers.num_ranks * peers.experts_per_rank; }
  __device__ bool new_route() const { return kArrival != Arrival::kCombineBack && args.topk_idx != nullptr; }
  __device__ bool sends_numbers() const { return new_route() || args.splits; }
  __device__ bool by_node() const { return !kIsLowLatency && goes_by_node(peers, args); }
  __device__ int32_t chunks() const { return num_chunks(payload_bytes); }
  // With its header and its scales.
  __device__ int32_t bytes_under_way() const {
    return payload_bytes + kUnitBytes * ((new_route() ? args.top_k : 0) + (args.num_scales ? chunks() : 0));
  }
  // Whether rows of a source are this rank's own, which are read where they lie, in x, and have their tokens' numbers.
  // (all_to_all's, which are packed, go through the arena like a peer's.)
  __device__ bool is_own(int32_t source) const { return source == peers.rank && !args.is_all_to_all; }
  // Whether this lane has a unit in a chunk.
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < payload_bytes; }

  __device__ uint4* out_row(int64_t row) const {
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(args.out) + row * args.out_row_bytes);
  }
  // The i-th chunk of a batch, whose chunks are first, first + num_warps, ...
  __device__ static int32_t chunk_of(int32_t first, int32_t i, const WarpGroup& warp_group) {
    return first + i * warp_group.num_warps;
  }

  // Of a row that arrives.
  __device__ RowPlace place_here(int32_t source, int32_t index) const {
    return {op, peers.layout.row_number(op.state.slot, source, index)};
  }

  __device__ bool has_header() const { return new_route() && lane_id() < args.top_k; }

  __device__ int32_t num_arrived(int32_t source) const {
    return sends_numbers() ? op.expect_num_rows(source) : __ldg(args.known_num_arrived + source);
  }

  // A warp group of one block.
  __device__ static void sync_warp_group(const WarpGroup& warp_group) {
    if (warp_group.num_warps == 1) {
      __syncwarp();  // there are not barriers for as many warp groups
    } else {
      named_barrier(kWarpGroupsBarrier + warp_id() / warp_group.num_warps, warp_group.num_warps * 32);
    }
  }

  // The four scales of a chunk, which its lanes have, eight the same one.
  __device__ uint4 scales_unit(float scale) const {
    const uint32_t bits = __float_as_uint(scale);
    return make_uint4(__shfl_sync(kAllLanes, bits, 0), __shfl_sync(kAllLanes, bits, 8),
                      __shfl_sync(kAllLanes, bits, 16), __shfl_sync(kAllLanes, bits, 24));
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

  __device__ void poison() const {
    fill_bytes(args.out, args.num_rows * args.out_row_bytes, 0xff);
    fill_bytes(args.out_scales, args.num_rows * args.num_scales * 4, 0xff);
    fill_bytes(args.weights, args.num_rows * 4, 0xff);
    fill_bytes(args.weights_cotangent, args.num_rows * 4, 0xff);
    fill_bytes(args.counts, int64_t{4} * experts_per_rank() * (args.is_all_to_all ? peers.num_ranks : 1), 0);
    fill_bytes(args.group_sizes, int64_t{4} * experts_per_rank(), 0);
    fill_bytes(args.num_dropped, 4, 0xff);
    fill_bytes(args.rows, int64_t{4} * peers.num_ranks * args.num_tokens * args.top_k, 0xff);
    fill_bytes(args.num_arrived, int64_t{4} * peers.num_ranks, 0);
    fill_bytes(args.place, int64_t{4} * args.num_tokens * peers.num_ranks * (kHasNetwork ? 2 : 1), 0xff);
  }
};

}  // namespace jax_ep
