// What the layers of a combine kernel share: the operands, facts that follow from them, and the parts of a row that the
// warps of a warp group sum. The other layers, each in a file of its own, are on top of this layer:
//   combine_sums.cuh, combine_send.cuh, combine_receive.cuh, node_sum.cuh.
// combine.cu has the kernel, in which their order is visible.
#pragma once

#include "ffi/cuda/combine.h"
#include "ffi/cuda/ll_units.cuh"
#include "ffi/cuda/network_rows.cuh"
#include "ffi/cuda/ring.cuh"
#include "ffi/cuda/rounds.cuh"
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

// True if a node's ranks add up their partial sums of another node's token, and one of them sends the total over the
// network. (For all_to_all_back, one rank has the whole row.)
constexpr bool needs_rail_peers(const Peers& peers, const CombineArgs& args) {
  return kHasNetwork && has_levels(peers.node_size, peers.num_ranks) && args.recv_row != nullptr &&
         !has_few_tokens(args.num_tokens);
}

// True if y is prefetched into a per-warp ring in shared memory. Used where throughput matters more than latency: it
// keeps more bytes in flight and takes fewer instructions. A piece in the ring is a part of a row of y.
constexpr bool has_prefetch_ring(Variant variant) { return variant == Variant::kThroughput; }
// The number of chunks that a warp sums at once. `units_read`: the number of units of y for one unit that is sent; more
// than one means that sums are cast. With a ring, a warp always reads a part of a row of y.
constexpr int chunks_at_once(Variant variant, int units_read) {
  if (has_prefetch_ring(variant)) return kChunksOfPart / units_read;
  return variant == Variant::kBalanced ? 2 : 1;  // kBalanced does not cast
}
// Behind its pieces, the ring has room for the own sum of a part (store_own_sum), which takes per lane 4 units for 4
// chunks or, if sums are cast, 8 units for the 16 float32 of 2 chunks.
template <bool kCasts>
using PrefetchRingOfY = PrefetchRing<kChunksOfPart * kChunkBytes, (kCasts ? 8 : 4) * kChunkBytes>;
constexpr int32_t ring_bytes(Variant variant, bool casts) {
  if (!has_prefetch_ring(variant)) return 0;
  return casts ? PrefetchRingOfY<true>::kBytes : PrefetchRingOfY<false>::kBytes;
}

static_assert(kMaxBlockWarps * (PrefetchRingOfY<true>::kBytes + sizeof(PrefetchRingOfY<true>::Landed)) + sizeof(State) +
                  sizeof(RangesOfRanks) <=
              kMaxBlockSharedBytes);

// The pieces that a lane prefetches: the parts of one row of y that this warp sums.
struct Pieces {
  int32_t number;      // the number of the next piece in the ring
  int32_t bytes_left;  // bytes of the row from the next piece on
  const uint8_t* from;
};

// The compile-time parameters of a combine kernel. X is the element type of rows. With kCasts, the sums travel as fp8.
template <typename X_, Variant kVariant_, bool kCasts_>
struct CombineConfig {
  using X = X_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kCasts = kCasts_;
};

// This lane's units of N chunks of a partial sum, in the format in which they are sent. A partial sum adds a token's
// rows on this rank in the order of k, and is rounded once. A lane without a unit in a chunk sums garbage, which is not
// stored.
template <int N>
struct UnitSums {
  uint4 unit[N];
  float scale[N];  // the scale of this lane's block; only if the sum is cast
};

template <typename Config>
struct CombineOperands {
  using X = typename Config::X;
  static constexpr Variant kVariant = Config::kVariant;
  static constexpr bool kCasts = Config::kCasts;
  static constexpr bool kHasRing = has_prefetch_ring(kVariant);
  static constexpr bool kHasRounds = has_rounds(kVariant);
  static constexpr int kUnitsRead = kCasts ? sizeof(X) : 1;  // units of y for one unit that is sent
  static constexpr int kChunksAtOnce = chunks_at_once(kVariant, kUnitsRead);
  static constexpr int32_t kPartBytes = kChunksAtOnce * kUnitsRead * kChunkBytes;  // of a row of y, with a ring
  // True if a warp group loads the metadata of its next row before it sums and sends a row. False for few rows, which
  // usually take one step.
  static constexpr bool kSenderLoadsAhead = !is_low_latency(kVariant);
  // True if a warp group loads the metadata of its next token while it receives a token. With a ring, this would take
  // too many registers.
  static constexpr bool kReceiverLoadsAhead = kVariant == Variant::kBalanced;
  static constexpr int kRanksAtOnce = 4;                       // the ranks whose sums a lane usually awaits at once
  static constexpr int kSize = kUnitsRead * Vector<X>::kSize;  // channels of a unit that is sent
  static constexpr int kRowsAtOnce =
      kUnitsRead > 2 ? 2 : 4;  // the rows of a token that a lane loads before it adds them
  // True if the L2 cache evicts y first. y is read once; if it does not fit into the L2 cache together with rows in
  // transit, it must not evict them. (The ring always reads y this way.)
  static constexpr bool kReadsOnce = kVariant == Variant::kBalanced;

  const Peers& peers;
  const CombineArgs& args;
  const LaunchPlan& plan;
  Operation op;
  using Ring = PrefetchRingOfY<kCasts>;
  Ring& ring;
  Pieces& next_piece;
  IndexRange* ranges;  // in rounds, in shared memory: the indices of the rows that go to each rank in this round

  __device__ bool is_all_to_all() const { return !is_low_latency(kVariant) && args.recv_row == nullptr; }
  __device__ bool uses_rail_peers() const { return !is_low_latency(kVariant) && needs_rail_peers(peers, args); }
  // The tokens [first_token(), end_token()) of each rank are those of this round.
  __device__ bool in_rounds() const { return kHasRounds && !args.round.is_only(); }
  __device__ int32_t first_token() const { return kHasRounds ? args.round.first_token : 0; }
  __device__ int32_t end_token() const { return kHasRounds ? args.end_token() : args.num_tokens; }
  __device__ int32_t place_of(int32_t index) const { return kHasRounds ? args.round.place_of(index) : index; }
  __device__ int32_t row_bytes() const { return static_cast<int32_t>(args.row_bytes); }
  // The bytes of a sum that is sent, without its scales.
  __device__ int32_t payload_bytes() const { return row_bytes() / kUnitsRead; }
  __device__ int32_t bytes_in_transit() const { return payload_bytes() + (kCasts ? chunks() * kUnitBytes : 0); }
  __device__ int32_t chunks() const { return num_chunks(payload_bytes()); }
  __device__ bool has_unit(int32_t chunk) const {
    return chunk * kChunkBytes + lane_id() * kUnitBytes < payload_bytes();
  }
  __device__ Cast cast() const { return static_cast<Cast>(args.cast); }

  using Sums = UnitSums<kChunksAtOnce>;

  // Starts a sum at zero. all_to_all_back moves one row unchanged: if there is a row, its sum starts at -0, because
  // 0 + -0 would be 0.
  __device__ void start_sum(float (&total)[kSize], bool any = true) const {
#pragma unroll
    for (int e = 0; e < kSize; ++e) total[e] = is_all_to_all() && any ? -0.0f : 0.0f;
  }

  // Returns a unit in the format in which it is sent. If it is cast, `scale` becomes the scale of its block. Whole
  // warps call it.
  __device__ uint4 packed(float (&total)[kSize], int32_t chunk, float& scale) const {
    if constexpr (kCasts) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) total[e] = has_unit(chunk) ? total[e] : 0;
      return cast_to_fp8(total, cast(), scale);
    } else {
      return rounded(total);
    }
  }
  __device__ static uint4 rounded(const float (&total)[kSize]) {
    static_assert(!kCasts);
    Vector<X> sum;
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum.element[e] = from_float<X>(total[e]);
    return sum.bits;
  }

  // The rows that one token has on this rank, and which this rank sums. The token belongs to rank `peer`, which may be
  // this rank. `row` and `weight` are those for k = lane. The other members are the same in all lanes. (all_to_all_back
  // moves one row per token, and treats an own row like a peer's.)
  struct RowsOfToken {
    int32_t peer, index;  // index: among the tokens that the peer has sent here; for an own token, its number
    // `present` follows from this number. For a peer's token: the number of tokens that the peer has sent here. The
    // token is present if `index` is less. For an own token: its index in args.send_index or, with sums_own(), its
    // number. The token is present if this is not negative. So with sums_own(), each own token is present, even without
    // rows here.
    int32_t num_rows_or_index;
    bool present;
    uint32_t rows;  // bits of the k that have a row here
    int32_t row;    // the row here, for k = lane
    float weight;
  };

  // True if receivers sum the rows of own tokens: never in all_to_all_back, else always if sums are cast, because the
  // own sum stays in float32. If false, own rows go through the arena like a peer's.
  __device__ bool sums_own() const {
    return !is_all_to_all() && (kCasts || (!is_low_latency(kVariant) && plan.sums_own));
  }
  __device__ int32_t num_destinations() const { return peers.num_ranks - sums_own(); }

  // A part is the N chunks of a row that a warp sums at once. A variable `part` names it. With a ring, `part` is the
  // part's number, and its chunks are contiguous. Without a ring, `part` is the part's first chunk, and its chunks are
  // num_warps apart, so that all warps of the warp group have a chunk if there are as many. In both cases, `part` goes
  // from warp_group.warp to end_of_parts(), in steps of step().
  template <int N = kChunksAtOnce>
  __device__ int32_t end_of_parts() const {
    return kHasRing ? (chunks() + N - 1) / N : chunks();
  }
  template <int N = kChunksAtOnce>
  __device__ static int32_t step(const WarpGroup& warp_group) {
    return kHasRing ? warp_group.num_warps : N * warp_group.num_warps;
  }
  template <int N = kChunksAtOnce>
  __device__ static int32_t chunk_of(int32_t part, int i, const WarpGroup& warp_group) {
    return kHasRing ? part * N + i : part + i * warp_group.num_warps;
  }

  __device__ int32_t row_number(int32_t source, int32_t index) const {
    return peers.layout.row_number(op.state.slot, source, place_of(index));
  }

  // The cotangent of a token's weight, which this rank sends back, for k = lane. `row`: the row here, for k = lane. In
  // the layout "token", only the first k that names this rank has the row, which is the row of all k.
  __device__ float weight_cotangent_to_send(int32_t row) const {
    int64_t at = row;
    if (args.has_token_weights) {
      row = __reduce_max_sync(kAllLanes, row);
      at = int64_t{row} * args.top_k + lane_id();
    }
    return row >= 0 && lane_id() < args.top_k ? __ldg(args.weights_cotangent + at) : 0;
  }

  __device__ static void add_weighted(const Vector<X> (&y)[kUnitsRead], float weight, float (&total)[kSize]) {
#pragma unroll
    for (int v = 0; v < kUnitsRead; ++v) {
      float values[Vector<X>::kSize];
      to_floats(y[v], values);
#pragma unroll
      for (int e = 0; e < Vector<X>::kSize; ++e) total[v * Vector<X>::kSize + e] += weight * values[e];
    }
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
    fill_bytes(args.topk_weights_cotangent, int64_t{4} * args.num_tokens * args.top_k, 0xff);
  }
};

}  // namespace jax_ep
