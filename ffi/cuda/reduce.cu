#include "ffi/cuda/pair_rows.cuh"
#include "ffi/cuda/reduce.h"

namespace jax_ep {
namespace {

template <typename X>
using Channels = float[Vector<X>::kSize];  // the channels of a unit

template <typename X>
__device__ __forceinline__ void channels_of(const uint4& unit, Channels<X>& channels) {
  Vector<X> vector;
  vector.bits = unit;
  to_floats(vector, channels);
}

template <typename X>
__device__ __forceinline__ uint4 unit_of(const Channels<X>& channels) {
  Vector<X> vector;
#pragma unroll
  for (int e = 0; e < Vector<X>::kSize; ++e) vector.element[e] = from_float<X>(channels[e]);
  return vector.bits;
}

// Every product is rounded before it is added, so that the sums have the same bits as those of the other backends.
template <typename X>
__global__ void __launch_bounds__(kMaxThreadsPerBlock, kMinBlocksPerSm)
    reduce_kernel(const __grid_constant__ ReduceArgs args) {
  wait_for_dependencies();
  const PairsOfToken token(args.pairs, blockIdx.x);
  const float weight = args.weights ? token.element_of(args.weights) : 1.0f;
  const int64_t row_bytes = args.pairs.row_bytes;
  for_units<Block>(args.pairs, [&](int32_t first, int32_t num_units) {
    Channels<X> total[kUnitsPerThread] = {};
    token.for_each([&](int k, int32_t row) {
      const float factor = __shfl_sync(kAllLanes, weight, k);
      Units<Block> y;
      y.load(args.y + row * row_bytes, first, num_units);
#pragma unroll
      for (int i = 0; i < kUnitsPerThread; ++i) {
        Channels<X> channels;
        channels_of<X>(y.unit[i], channels);
#pragma unroll
        for (int e = 0; e < Vector<X>::kSize; ++e) total[i][e] = __fadd_rn(total[i][e], __fmul_rn(factor, channels[e]));
      }
    });
    Units<Block> out;
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) out.unit[i] = unit_of<X>(total[i]);
    out.store(args.out + blockIdx.x * row_bytes, first, num_units);
  });
}

// Writes factor * g to `row` of y_cotangent. Returns this thread's part of the dot product of g and that row of y.
template <typename X>
__device__ __forceinline__ float back_to_row(const ReduceBackArgs& args, const Units<Block>& g, float factor,
                                             int32_t row, int32_t first, int32_t num_units) {
  const int64_t row_bytes = args.pairs.row_bytes;
  Units<Block> y = {}, cotangent;
  if (args.y) y.load(args.y + row * row_bytes, first, num_units);
  float product = 0;
#pragma unroll
  for (int i = 0; i < kUnitsPerThread; ++i) {
    Channels<X> of_g, of_y, scaled;
    channels_of<X>(g.unit[i], of_g);
    channels_of<X>(y.unit[i], of_y);
#pragma unroll
    for (int e = 0; e < Vector<X>::kSize; ++e) {
      product += of_g[e] * of_y[e];
      scaled[e] = factor * of_g[e];
    }
    cotangent.unit[i] = unit_of<X>(scaled);
  }
  cotangent.store(args.y_cotangent + row * row_bytes, first, num_units);
  return product;
}

__device__ void zero_rows_without_pair(const ReduceBackArgs& args) {
  const RowOfLane mine(args.pairs);
  const int32_t num_pairs = args.pairs.num_tokens * args.pairs.top_k;
  const bool is_zeroed = mine.exists && args.pairs.pair_of_row[mine.row] >= num_pairs;
  if (is_zeroed && args.weights_cotangent) args.weights_cotangent[mine.row] = 0;
  mine.zero(args.pairs, is_zeroed, args.y_cotangent);
}

// One block fewer per SM than the other kernels: otherwise, registers would spill.
template <typename X>
__global__ void __launch_bounds__(kMaxThreadsPerBlock, kMinBlocksPerSm - 1)
    reduce_back_kernel(const __grid_constant__ ReduceBackArgs args) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  auto* const products = reinterpret_cast<float*>(scratch);  // [top_k, warps]: each warp's part of each product
  wait_for_dependencies();
  if (has_no_token(args.pairs)) return zero_rows_without_pair(args);
  const PairsOfToken token(args.pairs, blockIdx.x);
  if (token.present == 0) return;
  const float weight = token.element_of(args.weights);
  const int64_t row_bytes = args.pairs.row_bytes;
  const auto num_warps = static_cast<int32_t>(blockDim.x / 32);
  for_units<Block>(args.pairs, [&](int32_t first, int32_t num_units) {
    Units<Block> g;
    g.load(args.g + blockIdx.x * row_bytes, first, num_units);
    token.for_each([&](int k, int32_t row) {
      const float product = back_to_row<X>(args, g, __shfl_sync(kAllLanes, weight, k), row, first, num_units);
      if (!args.weights_cotangent) return;
      const float of_warp = warp_sum(product);
      float& sum = products[k * num_warps + warp_id()];
      if (lane_id() == 0) sum = first == 0 ? of_warp : sum + of_warp;
    });
  });
  if (!args.weights_cotangent) return;
  __syncthreads();
  if (warp_id() == 0 && token.has_row()) {
    float total = 0;
    for (int32_t w = 0; w < num_warps; ++w) total += products[lane_id() * num_warps + w];
    args.weights_cotangent[token.row] = total;
  }
}

constexpr int64_t products_bytes_per_warp(int64_t top_k) { return top_k * static_cast<int64_t>(sizeof(float)); }

template <typename X>
cudaError_t load_for_type() {
  const cudaError_t status = load_kernel(reduce_kernel<X>, 0);
  if (status != cudaSuccess) return status;
  return load_kernel(reduce_back_kernel<X>, products_bytes_per_warp(32) * kMaxThreadsPerBlock / 32);
}

}  // namespace

cudaError_t launch_reduce(ElementType type, const ReduceArgs& args, cudaStream_t stream) {
  const Grid grid = grid_of_tokens(args.pairs, false);
  if (grid.num_blocks == 0) return cudaSuccess;
  return with_element_type(type, [&](auto x) { return launch(reduce_kernel<decltype(x)>, grid, stream, args); });
}

cudaError_t launch_reduce_back(ElementType type, const ReduceBackArgs& args, cudaStream_t stream) {
  const Grid grid = grid_of_tokens(args.pairs, true, products_bytes_per_warp(args.pairs.top_k));
  if (grid.num_blocks == 0) return cudaSuccess;
  return with_element_type(type, [&](auto x) { return launch(reduce_back_kernel<decltype(x)>, grid, stream, args); });
}

cudaError_t load_reduce() {
  cudaError_t status = load_for_type<float>();
  if (status == cudaSuccess) status = load_for_type<__half>();
  return status == cudaSuccess ? load_for_type<__nv_bfloat16>() : status;
}

}  // namespace jax_ep
