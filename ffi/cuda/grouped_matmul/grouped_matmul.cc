#include "ffi/cuda/grouped_matmul/grouped_matmul.h"

#include <algorithm>

#include "ffi/cuda/grouped_matmul/configs.h"
#include "ffi/cuda/grouped_matmul/cublaslt.h"

namespace jax_ep {
namespace {

const std::vector<GroupedConfig>& configs_of(GroupedProduct product) {
  switch (product) {
    case GroupedProduct::kForward:
      return forward_configs();
    case GroupedProduct::kRowsGradient:
      return rows_gradient_configs();
    default:
      return weights_gradient_configs();
  }
}

// TMA descriptors that CUTLASS keeps per SM: of A, of B, and of D for each consumer warp group. Four are enough for all
// configurations; the launch checks it.
constexpr size_t kGemmWorkspaceBytes = 4 * 128 * kMaxSms + kWorkspaceAlignment;

}  // namespace

std::vector<std::string> grouped_config_names(GroupedProduct product) {
  std::vector<std::string> names;
  for (const GroupedConfig& config : configs_of(product)) names.push_back(config.name);
#ifdef JAX_EP_CUBLASLT
  names.push_back("cublaslt");
#endif
  return names;
}

size_t grouped_workspace_bytes(int32_t num_groups) {
  GroupedMatmulArgs args{};
  args.num_groups = num_groups;
  const char* start = nullptr;
  return static_cast<const char*>(group_arrays(args).gemm_workspace) - start +
         std::max(kGemmWorkspaceBytes, kCublasltWorkspaceBytes);
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
  const std::vector<GroupedConfig>& configs = configs_of(args.product);
  const auto num_configs = static_cast<int32_t>(configs.size());
#ifdef JAX_EP_CUBLASLT
  if (args.config == num_configs && args.num_groups > 0) {
    const GroupArrays arrays = group_arrays(args);
    status = write_group_arrays(args, arrays, num_sms, stream);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    return args.num_rows == 0 ? "" : run_cublaslt(args, arrays, device, stream);
  }
#endif
  if (args.config < 0 || args.config >= num_configs) {
    return "config is " + std::to_string(args.config) + "; it must be less than " + std::to_string(configs.size());
  }
  const GroupedConfig& config = configs[args.config];
  const RunGroupedGemm run = args.dtype == GroupedDtype::kBfloat16 ? config.bfloat16 : config.float16;
  if (run == nullptr) return std::string(config.name) + " was not built for this dtype";
  if (args.num_groups == 0) return "";
  const GroupArrays arrays = group_arrays(args);
  status = write_group_arrays(args, arrays, num_sms, stream);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (args.num_rows == 0) return "";
  const char* error = run(arrays, args.num_groups, device, std::min(num_sms, kMaxSms), stream);
  return error ? std::string(config.name) + ": " + error : "";
}

}  // namespace jax_ep
