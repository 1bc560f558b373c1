// What the parts of a dispatch kernel share: the operands, facts that follow from them, and access to rows of x and of
// the result. The parts are layers, each in a file of its own, on top of this one:
//   routing.cuh, result_rows.cuh, dispatch_send.cuh, padding.cuh, dispatch_arrival.cuh, combine_backward.cuh,
//   dispatch_receive.cuh, node_forward.cuh.
// dispatch.cu has the kernel, in which their order is visible.
#pragma once

#include <type_traits>

#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/ll_units.cuh"
#include "ffi/cuda/network_rows.cuh"
#include "ffi/cuda/rounds.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {

inline constexpr int32_t kDestinationsBarrier = kFirstBarrier, kWarpGroupsBarrier = kFirstBarrier + 1;  // and up

struct DispatchShared {
  State state;
  float products[kMaxBlockWarps][kMaxTopK];
  // The experts (top_k per token) of the tokens that the block's warp groups send in one step; and the newest step in
  // which one of these tokens names an expert twice.
  int32_t experts[kMaxBlockWarps * kMaxTopK];
  int32_t step_with_repeats;
  int32_t dropped;
  // The indices of the rows that each source sends here: they begin with first_index_from, which is 0 without rounds.
  int32_t first_index_from[kMaxRanksOfKernels], end_index_from[kMaxRanksOfKernels];
  int32_t gives_up;                  // a warp has seen the failure before kDestinationsBarrier
  uint32_t claimed[kMaxBlockWarps];  // the newest item that each warp group has claimed
};

// What a block has counted of this rank's tokens so far; in dynamic shared memory. The block that notifies counts all
// tokens. A sender counts the tokens before those that it sends. For each expert and each rank, a sender also has a
// word with one bit per warp group.
struct SendCounts {
  int32_t* experts;  // [num_experts]: pairs (token, k) that name the expert
  int32_t* ranks;    // [num_ranks]: tokens with an expert on the rank
  // Arrays of num_experts and of num_ranks words. Bit g is set if the token that warp group g sends in this step names
  // the expert, or has an expert on the rank.
  uint32_t *groups_of_expert, *groups_of_rank;
};

// The destinations of arriving rows; in dynamic shared memory.
struct Destinations {
  // [R + 1, E_local]: the position, in the expert's group, of each source's first row. Row R is `counts`, the next
  // array in memory. A source's rows have the positions from its first_position up to, but not including, that of the
  // next source. A row of the source that would have a later position is dropped.
  int32_t* first_position;
  int32_t* counts;       // [E_local]
  int32_t* first_row;    // [E_local]
  int32_t* group_sizes;  // [E_local]

  __device__ Destinations(void* memory, int32_t num_ranks, int32_t experts_per_rank) {
    first_position = static_cast<int32_t*>(memory);
    counts = first_position + num_ranks * experts_per_rank;
    first_row = counts + experts_per_rank;
    group_sizes = first_row + experts_per_rank;
  }
};

// The chunks of an arriving row that a warp processes at once.
constexpr int receive_batch(Delivery delivery, Variant variant, bool casts) {
  if (is_low_latency(variant)) return 2;
  return delivery == Delivery::kDequantize || (delivery == Delivery::kCombineBack && casts) ? 2 : 4;
}

// The number of units of x or y with the channels of one unit in transit.
constexpr int units_per_unit_in_transit(bool casts) { return casts ? 2 : 1; }

// Backward pass of combine: the rows of y that a warp prefetches, and their bytes in shared memory, per warp.
constexpr int kRowsAhead = 3;
constexpr int prefetched_y_bytes(Delivery delivery, Variant variant, bool casts) {
  if (delivery != Delivery::kCombineBack) return 0;
  return kRowsAhead * receive_batch(delivery, variant, casts) * units_per_unit_in_transit(casts) * kChunkBytes;
}

constexpr bool prefetched_y_fits(bool casts) {
  return max_dispatch_scratch(kHasNetwork) +
             kMaxBlockWarps * prefetched_y_bytes(Delivery::kCombineBack, Variant::kThroughput, casts) +
             sizeof(DispatchShared) <=
         kMaxBlockSharedBytes;
}
static_assert(prefetched_y_fits(false) && prefetched_y_fits(true));

// True if a row is sent once to each other node: to this rank's rail peer there (Nodes, in ffi/layout.h), which
// forwards it to the ranks of that node. (A row of all_to_all has one destination, and needs no forwarding.)
constexpr bool needs_rail_peers(const Peers& peers, const DispatchArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && !args.is_all_to_all &&
         !has_few_tokens(args.num_tokens);
}

// The compile-time parameters of a dispatch kernel. X is the element type of rows. With kCasts, senders cast rows of
// bfloat16 to fp8. If kMayHaveScales is false, rows in transit never have scales. With kSendersWriteOwn, the route is
// new, and senders write most own rows (LaunchPlan::tokens_with_own_items).
template <typename X_, bool kCasts_, Delivery kDelivery_, Variant kVariant_, bool kMayHaveScales_,
          bool kSendersWriteOwn_>
struct DispatchConfig {
  using X = X_;
  static constexpr bool kCasts = kCasts_;
  static constexpr Delivery kDelivery = kDelivery_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kMayHaveScales = kMayHaveScales_;
  static constexpr bool kSendersWriteOwn = kSendersWriteOwn_;
};

template <typename Config>
struct DispatchOperands {
  using X = typename Config::X;
  static constexpr bool kCasts = Config::kCasts;
  static constexpr Delivery kDelivery = Config::kDelivery;
  static constexpr Variant kVariant = Config::kVariant;
  static constexpr bool kMayHaveScales = Config::kMayHaveScales;
  static constexpr bool kSendersWriteOwn = Config::kSendersWriteOwn;
  static constexpr bool kIsLowLatency = is_low_latency(kVariant);
  // The chunks that a sender's warp packs at once: its batch. (With a cast, combine's backward pass would spill
  // registers if the batch had two chunks.)
  static constexpr int kSendBatch =
      kIsLowLatency || (kCasts && kVariant != Variant::kThroughput) || (kCasts && kDelivery == Delivery::kCombineBack)
          ? 1
          : 2;
  static constexpr int kReceiveBatch = receive_batch(kDelivery, kVariant, kCasts);
  // Work stealing (DispatchReceiver::sync_and_decide_to_steal): warp groups claim rows and padding.
  static constexpr bool kStealsRows = kVariant == Variant::kThroughput;
  // True if copy() stores results with the hint that the L2 cache evicts them first. Then they evict fewer rows in
  // transit.
  static constexpr bool kEvictsResultsFirst = kVariant == Variant::kThroughput;
  static constexpr bool kHasRounds = has_rounds(kVariant);
  static constexpr int kUnitsRead = units_per_unit_in_transit(kCasts);
  // The number of units of the result that a unit in transit becomes: two if receivers convert fp8.
  static constexpr int kResultUnits =
      kDelivery == Delivery::kDequantize || (kDelivery == Delivery::kCombineBack && kCasts) ? 2 : 1;
  static constexpr bool kClearsBeforeEntry = kIsLowLatency;  // prepare() runs before the block has entered
  static_assert(std::is_same_v<X, __nv_bfloat16> || (!kCasts && kDelivery != Delivery::kDequantize));

  const Peers& peers;
  const DispatchArgs& args;
  const LaunchPlan& plan;
  Operation op;
  DispatchShared& shared;
  void* scratch;          // dynamic shared memory
  int32_t payload_bytes;  // of a row in transit, without its scales

  __device__ int32_t experts_per_rank() const { return peers.experts_per_rank; }
  __device__ int32_t num_experts() const { return peers.num_ranks * peers.experts_per_rank; }
  __device__ bool new_route() const {
    return kSendersWriteOwn || (kDelivery != Delivery::kCombineBack && args.topk_idx != nullptr);
  }
  __device__ bool sends_numbers() const { return new_route() || args.splits; }
  __device__ bool uses_rail_peers() const { return !kIsLowLatency && needs_rail_peers(peers, args); }
  // True if rows in transit have scales. In kernels that cast, this is a compile-time constant, except in combine's
  // backward pass: there, the constant would make the compiler spill more registers.
  __device__ bool has_scales() const {
    return (kCasts && kDelivery != Delivery::kCombineBack) || (kMayHaveScales && args.num_scales > 0);
  }
  __device__ int32_t chunks() const { return num_chunks(payload_bytes); }
  // The bytes of a row in transit, with its header and its scales.
  __device__ int32_t bytes_in_transit() const {
    return payload_bytes + kUnitBytes * ((new_route() ? args.top_k : 0) + (has_scales() ? chunks() : 0));
  }
  // True if rows of a source are this rank's own tokens. They are read from x, and a row's index is the number of its
  // token. (Rows of all_to_all are packed: own rows go through the arena like a peer's.)
  __device__ bool is_own(int32_t source) const { return source == peers.rank && !args.is_all_to_all; }
  // The tokens [first_token(), end_token()) of each rank are those of this round.
  __device__ bool in_rounds() const { return kHasRounds && !args.round.is_only(); }
  __device__ bool is_last_round() const { return !kHasRounds || args.round.is_last(); }
  __device__ int32_t first_token() const { return kHasRounds ? args.round.first_token : 0; }
  __device__ int32_t end_token() const { return kHasRounds ? args.end_token() : args.num_tokens; }
  __device__ int32_t place_of(int32_t index) const { return kHasRounds ? args.round.place_of(index) : index; }
  // True if this lane has a unit in the chunk.
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < payload_bytes; }

  // `row` is at least 0. A product of unsigned 32-bit numbers takes one instruction.
  __device__ uint4* out_row(int32_t row) const {
    const uint64_t offset = uint64_t{static_cast<uint32_t>(row)} * static_cast<uint32_t>(args.out_row_bytes);
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(args.out) + offset);
  }
  // The number, in a row of the result or of y, of the lane's v-th unit of `chunk`. If receivers convert fp8, the lane
  // has the units that pair_channels() gives it.
  __device__ static int32_t result_unit(int32_t chunk, int v) {
    return chunk * kResultUnits * kChunkUnits + (kResultUnits == 2 ? paired_unit(v) : lane_id());
  }
  __device__ bool has_result_unit(int32_t unit) const { return unit * kUnitBytes < args.out_row_bytes; }
  // The i-th chunk of a batch, whose chunks are first, first + num_warps, ...
  __device__ static int32_t chunk_of(int32_t first, int32_t i, const WarpGroup& warp_group) {
    return first + i * warp_group.num_warps;
  }

  // The addresses of a row that arrives here.
  __device__ RowAddress row_here(int32_t source, int32_t index) const {
    return {op, peers.layout.row_number(op.state.slot, source, place_of(index))};
  }

  __device__ bool has_header() const { return new_route() && lane_id() < args.top_k; }

  __device__ int32_t num_recv_from(int32_t source) const {
    return sends_numbers() ? op.wait_num_rows(source) : __ldg(args.known_num_recv_per_rank + source);
  }

  // Waits for the indices of the rows that another rank sends here in this round.
  __device__ IndexRange rows_from(int32_t source) const {
    if (in_rounds()) return wait_range_of(op.state, source);
    return {0, num_recv_from(source)};
  }

  // A barrier of a warp group whose warps are in one block.
  __device__ static void sync_warp_group(const WarpGroup& warp_group) {
    if (warp_group.num_warps == 1) {
      __syncwarp();  // a block has fewer barrier ids than it may have warps
    } else {
      named_barrier(kWarpGroupsBarrier + warp_id() / warp_group.num_warps, warp_group.num_warps * 32);
    }
  }

  // Casts N units per lane of a row of x to the wire format, and writes them to `units`. The units are of N different
  // chunks. If x is fp8 already, scales_of_x[i] is the scale of the i-th unit's block. If rows have scales, lane i < N
  // gets the unit with the scales of the i-th chunk, in `unit_of_scales`. In the other lanes, `unit_of_scales` is
  // unspecified. Its words for blocks behind the end of the row are unspecified, too.
  template <int N>
  __device__ void cast_batch(const uint4 (&read)[N][kUnitsRead], const float (&scales_of_x)[N], uint4* units,
                             uint4* unit_of_scales) const {
    static_assert(N <= kLanesOfBlock);
    float scale_of_chunk = 0;  // of the i-th chunk, in the i-th lane of each block
    if constexpr (kCasts) {
      ChannelsOfUnit x[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int v = 0; v < kUnitsRead; ++v) x[i][v].bits = read[i][v];
      }
      cast_to_fp8(x, wire_cast(), units, scale_of_chunk);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        units[i] = read[i][0];
        if (i == 0 || lane_id() % kLanesOfBlock == i) scale_of_chunk = scales_of_x[i];
      }
    }
    if (kMayHaveScales && has_scales()) *unit_of_scales = scales_unit(scale_of_chunk);
  }

  // Returns the cast of rows in transit. Only the backward pass of combine uses E5M2. The comparison lets the compiler
  // drop the code for E5M2 in all other dispatch kernels.
  __device__ Cast wire_cast() const {
    if constexpr (kDelivery == Delivery::kCombineBack) return static_cast<Cast>(args.cast);
    return args.cast == static_cast<int32_t>(Cast::kPowerOfTwo) ? Cast::kPowerOfTwo : Cast::kAmax;
  }

  // The addresses of a row of x and of its scales. send_row() computes them before its loop over batches.
  struct RowOfX {
    const uint8_t* begin;
    const float* scales;  // if x is fp8 already
  };
  __device__ RowOfX row_of_x(int32_t token) const {
    return {keep(static_cast<const uint8_t*>(args.x) + token * args.row_bytes),
            args.x_scales + token * args.num_scales};
  }

  // Loads the part of a row of x that this lane needs for its unit of a chunk, and the scale of the unit's block. A
  // lane without a unit in the chunk loads the row's last unit. (If only some lanes of a block have a unit, the row's
  // last unit is in this block. So the copies do not change block_amax(), which reads the units of all lanes.)
  __device__ void load_chunk(const RowOfX& row, int32_t chunk, uint4 (&units)[kUnitsRead], float& scale) const {
    const int32_t offset = min(chunk * kChunkBytes + lane_id() * kUnitBytes, payload_bytes - kUnitBytes);
    if (!kCasts && has_scales()) scale = __ldg(row.scales + offset / (kLanesOfBlock * kUnitBytes));
    const auto* const from = reinterpret_cast<const uint4*>(row.begin + static_cast<uint32_t>(offset * kUnitsRead));
#pragma unroll
    for (int v = 0; v < kUnitsRead; ++v) units[v] = __ldg(from + v);
  }

  __device__ void poison() const {
    fill_bytes(args.out, args.num_rows * args.out_row_bytes, 0xff);
    fill_bytes(args.out_scales, args.out_scales_bytes(), 0xff);
    fill_bytes(args.weights, args.num_rows * args.weights_per_row() * 4, 0xff);
    fill_bytes(args.recv_topk_idx, args.num_rows * args.weights_per_row() * 4, 0xff);
    fill_bytes(args.num_rows_per_rank, int64_t{4} * peers.num_ranks, 0);
    fill_bytes(args.weights_cotangent, args.num_rows * 4, 0xff);
    fill_bytes(args.counts, int64_t{4} * experts_per_rank() * (args.is_all_to_all ? peers.num_ranks : 1), 0);
    fill_bytes(args.group_sizes, int64_t{4} * experts_per_rank(), 0);
    fill_bytes(args.num_dropped, 4, 0xff);
    fill_bytes(args.recv_row, int64_t{4} * peers.num_ranks * args.num_tokens * args.top_k, 0xff);
    fill_bytes(args.num_recv_per_rank, int64_t{4} * peers.num_ranks, 0);
    fill_bytes(args.send_index, int64_t{4} * args.num_tokens * peers.num_ranks * (kHasNetwork ? 2 : 1), 0xff);
  }
};

}  // namespace jax_ep
