// Matrix multiplication for ragged groups whose sizes are on the device, by CUTLASS's grouped GEMM.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_ep {

// The three matrix products of one grouped matmul and its gradients. Rows of group g are consecutive. The weights of
// the first num_home_groups groups are in one array, w; those of the other groups are in a second array, copies. In the
// formulas, w[g] is the matrix of group g in either array. kWeightsGradient writes two arrays in the same way.
//
//   kForward          out[rows of g, n] = rows[rows of g, k] * w[g, k, n]
//   kRowsGradient     out[rows of g, k] = dy[rows of g, n] * transpose(w[g, k, n])
//   kWeightsGradient  out[g, k, n]      = transpose(rows[rows of g, k]) * dy[rows of g, n]
enum class GroupedProduct : int32_t { kForward, kRowsGradient, kWeightsGradient };
inline constexpr int kNumGroupedProducts = 3;
inline constexpr int64_t kChannelAlignment = 8;  // elements: TMA needs 16 bytes

enum class GroupedDtype : int32_t { kBfloat16, kFloat16 };

struct GroupedMatmulArgs {
  GroupedProduct product;
  GroupedDtype dtype;
  int32_t num_groups;       // at least 1
  int32_t num_home_groups;  // at most num_groups: the groups of w; the groups of copies follow
  int64_t capacity;         // 0: each group follows the one before it. Otherwise group g begins at row g * capacity.
  int64_t num_rows;         // rows of the ragged operands, those beyond the groups too
  int64_t k, n;             // dimensions of a group's weights [k, n]; both multiples of kChannelAlignment
  const void* lhs;          // kForward, kWeightsGradient: rows; kRowsGradient: dy
  const void* rhs;          // kForward, kRowsGradient: w; kWeightsGradient: dy
  const void* copies;       // kForward, kRowsGradient: the second array of weights
  const int32_t* group_sizes;
  void* out;                 // kWeightsGradient: the gradient of w
  void* out_copies;          // kWeightsGradient: the gradient of copies
  bool leaves_empty_copies;  // kWeightsGradient: out_copies need no zeros in groups without rows
  void* workspace;
  size_t workspace_bytes;
};

// The size of the workspace that every product needs.
size_t grouped_workspace_bytes(int32_t num_groups);

// Loads all kernels on the current device. A kernel that is loaded at its first launch can deadlock while a kernel of a
// peer waits for this device.
cudaError_t load_grouped_matmul();

// Enqueues the kernel that writes the groups' shapes and pointers, and the GEMM. Rows beyond the groups are neither
// read nor written, except that kRowsGradient writes zeros to them. Returns "", or why it could not.
std::string grouped_matmul_on_device(const GroupedMatmulArgs& args, cudaStream_t stream);

}  // namespace jax_ep
