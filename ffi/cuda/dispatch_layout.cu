#include <cooperative_groups.h>

#include "ffi/cuda/dispatch_layout.h"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocksPerCluster = 8;

// The share of one cluster of blocks, for a rank or a node. The cluster counts the tokens that name an expert of
// [first, first + size). For a rank, it also writes num_tokens_per_expert and is_token_in_rank. The counts are unsigned
// here, because the atomic additions of ptx.cuh take unsigned words.
struct Share {
  bool is_rank;  // false: a node
  int32_t first, size;
  uint32_t* num_tokens;
  uint32_t* num_tokens_per_expert;  // [size], only for a rank
  bool* is_token_in_rank;           // a column, only for a rank
};

// The first clusters take a rank each, the others a node.
__device__ Share share_of_cluster(const DispatchLayoutArgs& args, int32_t cluster) {
  if (cluster < args.num_ranks) {
    const int32_t size = args.num_experts / args.num_ranks;
    const int32_t first = cluster * size;
    return {true,
            first,
            size,
            reinterpret_cast<uint32_t*>(args.num_tokens_per_rank) + cluster,
            reinterpret_cast<uint32_t*>(args.num_tokens_per_expert) + first,
            args.is_token_in_rank + cluster};
  }
  const int32_t node = cluster - args.num_ranks;
  const int32_t size = args.num_experts / args.num_nodes;
  auto* const num_tokens = reinterpret_cast<uint32_t*>(args.num_tokens_per_node) + node;
  return {false, node * size, size, num_tokens, nullptr, nullptr};
}

// Every cluster scans all ids, and no other cluster writes its share of the results. So it can zero its results itself,
// and no cluster waits for another. The order of the additions does not matter: they add integers.
__global__ void __launch_bounds__(kThreads) dispatch_layout_kernel(const DispatchLayoutArgs args) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  // The counts of a rank's experts. Adding to global memory directly is far slower.
  auto* const block_counts = reinterpret_cast<int32_t*>(scratch);
  const auto cluster = cooperative_groups::this_cluster();
  const Share share = share_of_cluster(args, blockIdx.x / kBlocksPerCluster);
  const int32_t num_counts = share.is_rank ? share.size : 0;
  wait_for_dependencies();

  if (cluster.thread_rank() == 0) store_relaxed(share.num_tokens, 0);
  for (int32_t i = threadIdx.x; i < num_counts; i += kThreads) {
    block_counts[i] = 0;
    if (cluster.block_rank() == 0) store_relaxed(share.num_tokens_per_expert + i, 0);
  }
  cluster.sync();

  int32_t count = 0;
  for (int64_t token = cluster.thread_rank(); token < args.num_tokens; token += cluster.num_threads()) {
    bool is_here = false;
    for (int32_t k = 0; k < args.top_k; ++k) {
      const int64_t local = int64_t{__ldg(args.topk_idx + token * args.top_k + k)} - share.first;
      if (local < 0 || local >= share.size) continue;
      is_here = true;
      if (share.is_rank) atomicAdd(block_counts + local, 1);
    }
    count += is_here;
    if (share.is_rank) share.is_token_in_rank[token * args.num_ranks] = is_here;
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane_id() == 0 && count > 0) atomic_add_relaxed_gpu(share.num_tokens, count);

  __syncthreads();
  for (int32_t i = threadIdx.x; i < num_counts; i += kThreads) {
    if (block_counts[i] > 0) atomic_add_relaxed_gpu(share.num_tokens_per_expert + i, block_counts[i]);
  }
}

}  // namespace

cudaError_t dispatch_layout_on_device(const DispatchLayoutArgs& args, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = (args.num_ranks + args.num_nodes) * kBlocksPerCluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = args.num_experts / args.num_ranks * sizeof(int32_t);
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kBlocksPerCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, dispatch_layout_kernel, args);
}

cudaError_t load_dispatch_layout() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(dispatch_layout_kernel));
}

}  // namespace jax_ep
