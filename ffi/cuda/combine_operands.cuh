// What the parts of a combine kernel share: the operands, facts that follow from them, and sums of rows. The warps of a
// warp group share a row that is summed, by chunks. The parts are layers, each in a file of its own, on top of this
// one:
//   combine_sums.cuh, combine_send.cuh, combine_receive.cuh, node_sum.cuh.
// combine.cu has the kernel, in which their order is visible.
#pragma once

#include "ffi/cuda/combine.h"
#include "ffi/cuda/ll_units.cuh"
#include "ffi/cuda/ring.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {

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
constexpr bool goes_by_node(const Peers& peers, const CombineArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && args.rows != nullptr &&
         !are_few(args.num_tokens);
}

// Whether y comes ahead, by a ring of each warp: where latency does not count, but what is under way, and how many
// instructions it takes. Chunks of a row that a warp sums at once, a part; a piece in the ring is one of a row of y.
constexpr bool has_prefetch_ring(Variant variant) { return variant == Variant::kThroughput; }
constexpr int sums_at_once(Variant variant) { return has_prefetch_ring(variant) ? 4 : 2; }
constexpr int32_t kPartBytes = sums_at_once(Variant::kThroughput) * kChunkBytes;
using PrefetchRingOfY = PrefetchRing<kPartBytes>;
constexpr int32_t ring_bytes(Variant variant) { return has_prefetch_ring(variant) ? PrefetchRingOfY::kBytes : 0; }

static_assert(kMaxBlockWarps * (ring_bytes(Variant::kThroughput) + sizeof(PrefetchRingOfY::Landed)) + sizeof(State) <=
              kMaxBlockSharedBytes);

// The pieces that a lane asks for: those of one row, but for the parts of the warp group's other warps.
struct Pieces {
  int32_t number;      // of the next one in the ring
  int32_t bytes_left;  // of the row, from there on
  const uint8_t* from;
};

// What a combine kernel is compiled for. Rows are of X.
template <typename X_, Variant kVariant_>
struct CombineConfig {
  using X = X_;
  static constexpr Variant kVariant = kVariant_;
};

// This lane's units of N chunks of a sum over a token's rows here, in the order of k, each rounded once. What a lane
// without a unit sums, nobody stores.
template <int N>
struct UnitSums {
  uint4 unit[N];
};

template <typename Config>
struct CombineOperands {
  using X = typename Config::X;
  static constexpr Variant kVariant = Config::kVariant;
  static constexpr bool kHasRing = has_prefetch_ring(kVariant);
  static constexpr int kSumsAtOnce = sums_at_once(kVariant);
  // Whether a warp group asks what there is of its next row while it sends one: few rows take one turn, mostly, and of
  // many, other warps use the time.
  static constexpr bool kAsksAhead = kVariant == Variant::kBalanced;
  static constexpr int kRanksAtOnce = 4;  // whose sums a lane awaits at once, mostly
  static constexpr int kSize = Vector<X>::kSize;
  static constexpr int kRowsAtOnce = 4;  // of a token's rows here, that a lane loads before it adds them
  // Where y does not fit into the L2 cache together with rows under way, it must not drive them out: it is read once.
  // (The ring always reads so.)
  static constexpr bool kReadsOnce = kVariant == Variant::kBalanced;

  const Peers& peers;
  const CombineArgs& args;
  const LaunchPlan& plan;
  Operation op;
  PrefetchRingOfY& ring;
  Pieces& to_come;

  __device__ bool is_all_to_all() const { return args.rows == nullptr; }
  __device__ bool by_node() const { return !is_low_latency(kVariant) && goes_by_node(peers, args); }
  __device__ int32_t row_bytes() const { return static_cast<int32_t>(args.row_bytes); }
  __device__ int32_t chunks() const { return num_chunks(row_bytes()); }
  __device__ bool has_unit(int32_t chunk) const { return chunk * kChunkBytes + lane_id() * kUnitBytes < row_bytes(); }

  using Sums = UnitSums<kSumsAtOnce>;

  // At zero; but all_to_all_back moves one row as it is, if there is one, and 0 + -0 would not be -0.
  __device__ void start_sum(float (&total)[kSize], bool any = true) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] = is_all_to_all() && any ? -0.0f : 0.0f;
  }

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

  // Whether own tokens' rows are summed by whoever adds the other ranks' sums. Else they go through the arena like a
  // peer's.
  __device__ bool sums_own() const { return !is_low_latency(kVariant) && plan.sums_own && !is_all_to_all(); }
  __device__ int32_t num_destinations() const { return peers.num_ranks - sums_own(); }

  // What a warp sums of a row at once, a part: where pieces of y come ahead, chunks that lie side by side; else one of
  // each of the warp group's rounds, so that all of its warps have a chunk if there are as many. Parts go from warp
  // group.warp to end_of_parts(), in steps.
  template <int N = kSumsAtOnce>
  __device__ int32_t end_of_parts() const {
    return kHasRing ? (chunks() + N - 1) / N : chunks();
  }
  template <int N = kSumsAtOnce>
  __device__ static int32_t step(const WarpGroup& warp_group) {
    return kHasRing ? warp_group.num_warps : N * warp_group.num_warps;
  }
  template <int N = kSumsAtOnce>
  __device__ static int32_t chunk_of(int32_t part, int i, const WarpGroup& warp_group) {
    return kHasRing ? part * N + i : part + i * warp_group.num_warps;
  }

  __device__ int32_t row_number(int32_t source, int32_t index) const {
    return peers.layout.row_number(op.state.slot, source, index);
  }

  __device__ static void add_weighted(const Vector<X>& y, float weight, float (&total)[kSize]) {
    float values[kSize];
    to_floats(y, values);
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] += weight * values[e];
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

  __device__ void poison() const {
    const int64_t elements = args.num_tokens * args.row_bytes / static_cast<int64_t>(sizeof(X));
    fill_bytes(args.out, elements * (args.out_type == ElementType::kFloat32 ? 4 : 2), 0xff);
    fill_bytes(args.topk_weights, int64_t{4} * args.num_tokens * args.top_k, 0xff);
  }
};

}  // namespace jax_ep
