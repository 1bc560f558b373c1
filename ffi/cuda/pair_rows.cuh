// The code that the kernels of expand and reduce share. Each of the first num_tokens blocks takes one token. Its
// threads take 16-byte units of the token's row. expand and the gradient of reduce have more blocks, with a lane for
// each of the `capacity` rows: these blocks handle the rows without a pair.
#pragma once

#include <algorithm>

#include "ffi/arena.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/pair_rows.h"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/rows.cuh"
#include "ffi/cuda/warp.cuh"
#include "ffi/layout.h"

namespace jax_ep {

constexpr int kUnitsPerThread = 4;  // that a thread holds in registers
constexpr int kMaxThreadsPerBlock = 256;
constexpr int kMinBlocksPerSm = 4;

// The threads that share a row: a block, or a warp.
struct Block {
  __device__ static int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
  __device__ static int32_t num_threads() { return static_cast<int32_t>(blockDim.x); }
};
struct Warp {
  __device__ static int32_t thread() { return lane_id(); }
  __device__ static int32_t num_threads() { return 32; }
};

// Calls f(first, num_units) for each pass over a row. In a pass, each thread takes kUnitsPerThread units, beginning at
// unit `first`. num_units is the number of units of the whole row.
template <typename Threads, typename F>
__device__ __forceinline__ void for_units(const PairRows& pairs, F f) {
  const auto num_units = static_cast<int32_t>(pairs.row_bytes / kUnitBytes);
#pragma unroll 1
  for (int32_t first = 0; first < num_units; first += kUnitsPerThread * Threads::num_threads()) f(first, num_units);
}

// A thread's units of a row.
template <typename Threads>
struct Units {
  uint4 unit[kUnitsPerThread];

  // Uses streaming loads, because no other block reads these units.
  __device__ __forceinline__ void load(const uint8_t* row, int32_t first, int32_t num_units) {
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const int32_t at = unit_of(first, i);
      unit[i] = at < num_units ? __ldcs(reinterpret_cast<const uint4*>(row) + at) : uint4{};
    }
  }
  // Uses streaming stores. With many tokens, the result is larger than the L2 cache, so the next kernel would not find
  // these units there.
  __device__ __forceinline__ void store(uint8_t* row, int32_t first, int32_t num_units) const {
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const int32_t at = unit_of(first, i);
      if (at < num_units) __stcs(reinterpret_cast<uint4*>(row) + at, unit[i]);
    }
  }
  __device__ static int32_t unit_of(int32_t first, int i) {
    return first + i * Threads::num_threads() + Threads::thread();
  }
};

// The pairs of a block's token. All warps of the block hold the same values.
struct PairsOfToken {
  int32_t row;       // of this lane's k
  uint32_t present;  // bit k: the k-th pair has a row

  __device__ PairsOfToken(const PairRows& pairs, int32_t token) : row(pairs.capacity) {
    if (lane_id() < pairs.top_k) row = __ldg(pairs.row_of_pair + int64_t{token} * pairs.top_k + lane_id());
    present = __ballot_sync(kAllLanes, row >= 0 && row < pairs.capacity);
  }
  // Whether this lane's k has a row.
  __device__ bool has_row() const { return present >> lane_id() & 1; }
  // This lane's element of an array with an element for each row; 0 if the lane's k has no row.
  __device__ float element_of(const float* of_rows) const { return has_row() ? __ldg(of_rows + row) : 0.0f; }
  // Calls f(k, row) for the pairs that have a row, in the order of k.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) const {
#pragma unroll 1
    for (uint32_t left = present; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      f(k, __shfl_sync(kAllLanes, row, k));
    }
  }
};

// True if this block has no token. Such a block handles rows without a pair.
__device__ __forceinline__ bool has_no_token(const PairRows& pairs) {
  return static_cast<int32_t>(blockIdx.x) >= pairs.num_tokens;
}

// The row of this lane, in a block without a token. `exists` is false for lanes after the last row.
struct RowOfLane {
  int32_t row;
  bool exists;

  __device__ explicit RowOfLane(const PairRows& pairs)
      : row(static_cast<int32_t>((blockIdx.x - pairs.num_tokens) * blockDim.x + threadIdx.x)),
        exists(static_cast<uint32_t>(row) < static_cast<uint32_t>(pairs.capacity)) {}

  // Zeroes the rows of all lanes that pass is_zeroed. All lanes of the warp must call it: they write each row together.
  __device__ void zero(const PairRows& pairs, bool is_zeroed, uint8_t* rows) const {
    const Units<Warp> zeros = {};
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, is_zeroed); left != 0; left &= left - 1) {
      const int64_t zeroed = __shfl_sync(kAllLanes, row, __ffs(static_cast<int>(left)) - 1);
      for_units<Warp>(pairs, [&](int32_t first, int32_t num_units) {
        zeros.store(rows + zeroed * pairs.row_bytes, first, num_units);
      });
    }
  }
};

// The grid has a block for each token. With writes_rows_without_pair, it also has enough blocks for one lane per row. A
// block has as few warps as possible without another pass over the row.
inline Grid grid_of_tokens(const PairRows& pairs, bool writes_rows_without_pair, int64_t shared_bytes_per_warp = 0) {
  const int64_t num_units = pairs.row_bytes / kUnitBytes;
  const int64_t passes = std::max<int64_t>(divide_up(num_units, int64_t{kUnitsPerThread} * kMaxThreadsPerBlock), 1);
  const int64_t warps = std::max<int64_t>(divide_up(num_units, passes * kUnitsPerThread * 32), 1);
  const int64_t more_blocks = writes_rows_without_pair ? divide_up(pairs.capacity, warps * 32) : 0;
  return {static_cast<int32_t>(pairs.num_tokens + more_blocks), static_cast<int32_t>(warps * 32),
          shared_bytes_per_warp * warps};
}

}  // namespace jax_ep
