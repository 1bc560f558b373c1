// What the GEMM kernel reads about each group. The host knows no group size, so a kernel writes these arrays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/cuda/grouped_matmul/grouped_matmul.h"

namespace jax_ep {

// The most SMs that the GEMM's workspace serves.
inline constexpr int32_t kMaxSms = 256;

// CUTLASS computes D = A * B for each group, A [m, k], B [k, n], D [m, n].
struct GroupShape {
  int32_t m, n, k;
};

// Arrays in the workspace, one element per group.
struct GroupArrays {
  GroupShape* shapes;
  const void** a;
  const void** b;
  void** d;
  int64_t* a_stride;  // elements between two consecutive rows (or columns) of A in memory
  int64_t* b_stride;
  int64_t* d_stride;
  void* gemm_workspace;  // the rest: TMA descriptors
  size_t gemm_workspace_bytes;
};

inline constexpr size_t kWorkspaceAlignment = 256;

inline GroupArrays group_arrays(const GroupedMatmulArgs& args) {
  char* next = static_cast<char*>(args.workspace);
  const auto take = [&](size_t element_bytes) {
    char* array = next;
    const size_t bytes = element_bytes * args.num_groups;
    next += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return array;
  };
  GroupArrays arrays;
  arrays.shapes = reinterpret_cast<GroupShape*>(take(sizeof(GroupShape)));
  arrays.a = reinterpret_cast<const void**>(take(sizeof(void*)));
  arrays.b = reinterpret_cast<const void**>(take(sizeof(void*)));
  arrays.d = reinterpret_cast<void**>(take(sizeof(void*)));
  arrays.a_stride = reinterpret_cast<int64_t*>(take(sizeof(int64_t)));
  arrays.b_stride = reinterpret_cast<int64_t*>(take(sizeof(int64_t)));
  arrays.d_stride = reinterpret_cast<int64_t*>(take(sizeof(int64_t)));
  arrays.gemm_workspace = next;
  arrays.gemm_workspace_bytes = args.workspace_bytes - (next - static_cast<char*>(args.workspace));
  return arrays;
}

// Enqueues the kernel that writes `arrays`. It also writes zeros to the part of the result that the GEMM skips: for
// kWeightsGradient the weights of empty groups, for kRowsGradient the rows beyond the groups.
cudaError_t write_group_arrays(const GroupedMatmulArgs& args, const GroupArrays& arrays, int32_t num_sms,
                               cudaStream_t stream);

// Loads that kernel on the current device.
cudaError_t load_group_arrays();

}  // namespace jax_ep
