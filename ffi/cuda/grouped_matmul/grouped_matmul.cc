#include "ffi/cuda/grouped_matmul/grouped_matmul.h"

#include <algorithm>

#include "ffi/cuda/grouped_matmul/gemms.h"

namespace jax_ep {
namespace {

// True if the forward product uses small tiles, which waste less of a group's last tile. It does if the operand has
// room for at most 64 rows per group on average, or for at most 256 if n is a multiple of kSmallTileColumns. The host
// knows only the room, not the number of rows.
bool has_few_rows(const GroupedMatmulArgs& args) {
  const int64_t few_rows = args.n % kSmallTileColumns == 0 ? 256 : 64;
  return args.num_rows <= few_rows * args.num_groups;
}

using GemmOfDtype = GroupedGemmFunctions (*)(GroupedDtype);

GemmOfDtype gemm_of(const GroupedMatmulArgs& args) {
  switch (args.product) {
    case GroupedProduct::kForward:
      return has_few_rows(args) ? forward_few_rows_gemm : forward_gemm;
    case GroupedProduct::kRowsGradient:
      return rows_gradient_gemm;
    default:
      return weights_gradient_gemm;
  }
}

// TMA descriptors that CUTLASS keeps per SM: of A, of B, and of D for each consumer warp group. Four are enough for all
// products; the launch checks it.
constexpr size_t kGemmWorkspaceBytes = 4 * 128 * kMaxSms + kWorkspaceAlignment;

}  // namespace

size_t grouped_workspace_bytes(int32_t num_groups) {
  GroupedMatmulArgs args{};
  args.num_groups = num_groups;
  const char* start = nullptr;
  return static_cast<const char*>(group_arrays(args).gemm_workspace) - start + kGemmWorkspaceBytes;
}

cudaError_t load_grouped_matmul() {
  cudaError_t status = load_group_arrays();
  for (GemmOfDtype gemm : {forward_gemm, forward_few_rows_gemm, rows_gradient_gemm, weights_gradient_gemm}) {
    for (auto dtype : {GroupedDtype::kBfloat16, GroupedDtype::kFloat16}) {
      if (status == cudaSuccess) status = gemm(dtype).load();
    }
  }
  return status;
}

std::string grouped_matmul_on_device(const GroupedMatmulArgs& args, cudaStream_t stream) {
  int32_t device = 0, major = 0, minor = 0, num_sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  const auto read = [&](int32_t& value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  };
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(minor, cudaDevAttrComputeCapabilityMinor);
  read(num_sms, cudaDevAttrMultiProcessorCount);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (major != 9 || minor != 0) {
    return "the GPU has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
           "; the grouped GEMM needs 9.0 (use another implementation)";
  }
  const GroupArrays arrays = group_arrays(args);
  status = write_group_arrays(args, arrays, num_sms, stream);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (args.num_rows == 0) return "";
  const char* error =
      gemm_of(args)(args.dtype).run(arrays, args.num_groups, device, std::min(num_sms, kMaxSms), stream);
  return error ? std::string("CUTLASS: ") + error : "";
}

}  // namespace jax_ep
