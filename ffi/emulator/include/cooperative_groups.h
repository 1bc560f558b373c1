// Stands in for CUDA's header of this name: clusters of blocks.
#pragma once

#include <cuda_runtime_api.h>

namespace cooperative_groups {

struct cluster_group {
  static unsigned size() { return emulator::current->warp->block->launch->cluster; }
  static unsigned block_rank() { return blockIdx.x % size(); }
  static unsigned thread_rank() { return block_rank() * blockDim.x + threadIdx.x; }
  static unsigned num_threads() { return size() * blockDim.x; }
  static void sync() { emulator::sync_cluster(); }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
