// The grouped GEMM of cuBLASLt, which reads the groups' sizes on the device. The library is loaded at run time.
#pragma once

#include <string>

#include "ffi/cuda/grouped_matmul/groups.h"

namespace jax_ep {

inline constexpr size_t kCublasltWorkspaceBytes = 32 << 20;

// Loads the library. Returns "", or why it cannot be used.
std::string load_cublaslt(const std::string& path);

// Enqueues the GEMM. Returns "", or why it could not.
std::string run_cublaslt(const GroupedMatmulArgs& args, const GroupArrays& arrays, int32_t device, cudaStream_t stream);

}  // namespace jax_ep
