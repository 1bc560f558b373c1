#include "ffi/cuda/grouped_matmul/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

namespace jax_ep {
namespace {

// What cublasLt.h of cuBLAS 13.4 declares. The toolkit's header may be older than the library that is loaded.
constexpr auto kIntegerWidthOfRowsAndCols = static_cast<cublasLtMatrixLayoutAttribute_t>(12);
constexpr auto kIntegerWidthOfLd = static_cast<cublasLtMatrixLayoutAttribute_t>(13);
constexpr int32_t kInteger32 = 0, kInteger64 = 1;
constexpr auto kAverageReductionDim = static_cast<cublasLtMatmulPreferenceAttributes_t>(13);
constexpr auto kAverageRowsOfD = static_cast<cublasLtMatmulPreferenceAttributes_t>(14);
constexpr auto kAverageColsOfD = static_cast<cublasLtMatmulPreferenceAttributes_t>(15);
constexpr size_t kFirstVersionForHopper = 130400;
// Grouped GEMMs of these versions can corrupt data.
constexpr size_t kFirstBadVersion = 130700, kFirstGoodVersion = 130801;

using GroupedMatrixLayoutCreate = cublasStatus_t (*)(cublasLtMatrixLayout_t*, cudaDataType, int, const void*,
                                                     const void*, const void*);

struct Library {
  size_t version;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  GroupedMatrixLayoutCreate layout_create;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmul) matmul;
};

Library library;
bool is_loaded = false;

// An object of cuBLASLt that is destroyed at the end of the scope.
template <typename T>
struct Owned {
  T object = nullptr;
  cublasStatus_t (*destroy)(T);
  ~Owned() {
    if (object != nullptr) destroy(object);
  }
};

cublasLtHandle_t handle_of(int32_t device) {
  static std::mutex mutex;
  static std::unordered_map<int32_t, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr && library.create(&handle) != CUBLAS_STATUS_SUCCESS) handle = nullptr;
  return handle;
}

}  // namespace

std::string load_cublaslt(const std::string& path) {
  if (is_loaded) return "";
  // cuBLAS must call its own functions, also where XLA has loaded another version of it.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (handle == nullptr) return dlerror();
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
  size_t (*get_version)() = nullptr;
  find("cublasLtGetVersion", get_version);
  find("cublasLtCreate", library.create);
  find("cublasLtMatmulDescCreate", library.desc_create);
  find("cublasLtMatmulDescSetAttribute", library.desc_set);
  find("cublasLtMatmulDescDestroy", library.desc_destroy);
  find("cublasLtGroupedMatrixLayoutCreate", library.layout_create);
  find("cublasLtMatrixLayoutSetAttribute", library.layout_set);
  find("cublasLtMatrixLayoutDestroy", library.layout_destroy);
  find("cublasLtMatmulPreferenceCreate", library.preference_create);
  find("cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  find("cublasLtMatmulPreferenceDestroy", library.preference_destroy);
  find("cublasLtMatmulAlgoGetHeuristic", library.get_heuristic);
  find("cublasLtMatmul", library.matmul);
  const size_t version = get_version != nullptr ? get_version() : 0;
  if (!missing.empty() || version < kFirstVersionForHopper ||
      (version >= kFirstBadVersion && version < kFirstGoodVersion)) {
    return "cuBLASLt " + std::to_string(version) + " has no grouped GEMM for Hopper that is safe; it needs " +
           std::to_string(kFirstGoodVersion) + (missing.empty() ? "" : "; missing: " + missing);
  }
  library.version = version;
  is_loaded = true;
  return "";
}

// cuBLAS's matrices are column-major: it computes transpose(D) = transpose(B) * transpose(A), so that its first operand
// is this file's B, with n rows after its transposition.
std::string run_cublaslt(const GroupedMatmulArgs& args, const GroupArrays& arrays, int32_t device,
                         cudaStream_t stream) {
  if (!is_loaded) return "cuBLASLt is not loaded";
  const cublasLtHandle_t handle = handle_of(device);
  if (handle == nullptr) return "cublasLtCreate failed";
  std::string error;
  const auto check = [&](const char* what, cublasStatus_t status) {
    if (error.empty() && status != CUBLAS_STATUS_SUCCESS) error = std::string(what) + ": " + std::to_string(status);
  };
  const cudaDataType type = args.dtype == GroupedDtype::kBfloat16 ? CUDA_R_16BF : CUDA_R_16F;

  Owned<cublasLtMatmulDesc_t> desc{nullptr, library.desc_destroy};
  check("cublasLtMatmulDescCreate", library.desc_create(&desc.object, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    if (error.empty()) {
      check("cublasLtMatmulDescSetAttribute", library.desc_set(desc.object, attribute, &value, sizeof(value)));
    }
  };
  const bool transposes_b = args.product == GroupedProduct::kRowsGradient;
  const bool transposes_a = args.product == GroupedProduct::kWeightsGradient;
  set(CUBLASLT_MATMUL_DESC_TRANSA, transposes_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, transposes_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);

  const auto make_layout = [&](Owned<cublasLtMatrixLayout_t>& layout, const int32_t* rows, const int32_t* cols,
                               const int64_t* ld) {
    if (!error.empty()) return;
    check("cublasLtGroupedMatrixLayoutCreate",
          library.layout_create(&layout.object, type, args.num_groups, rows, cols, ld));
    if (!error.empty()) return;
    check("the width of rows and cols",
          library.layout_set(layout.object, kIntegerWidthOfRowsAndCols, &kInteger32, sizeof(kInteger32)));
    check("the width of ld", library.layout_set(layout.object, kIntegerWidthOfLd, &kInteger64, sizeof(kInteger64)));
  };
  Owned<cublasLtMatrixLayout_t> first{nullptr, library.layout_destroy}, second{nullptr, library.layout_destroy},
      result{nullptr, library.layout_destroy};
  make_layout(first, transposes_b ? arrays.k : arrays.n, transposes_b ? arrays.n : arrays.k, arrays.b_stride);
  make_layout(second, transposes_a ? arrays.m : arrays.k, transposes_a ? arrays.k : arrays.m, arrays.a_stride);
  make_layout(result, arrays.n, arrays.m, arrays.d_stride);

  Owned<cublasLtMatmulPreference_t> preference{nullptr, library.preference_destroy};
  check("cublasLtMatmulPreferenceCreate", library.preference_create(&preference.object));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (error.empty()) {
      check("cublasLtMatmulPreferenceSetAttribute",
            library.preference_set(preference.object, attribute, &value, sizeof(value)));
    }
  };
  const int64_t average_rows = std::max<int64_t>(args.num_rows / args.num_groups, 1);
  const bool is_weights = args.product == GroupedProduct::kWeightsGradient;
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(arrays.gemm_workspace_bytes));
  prefer(kAverageRowsOfD, args.product == GroupedProduct::kRowsGradient ? args.k : args.n);
  prefer(kAverageColsOfD, is_weights ? args.k : average_rows);
  prefer(kAverageReductionDim, is_weights                                      ? average_rows
                               : args.product == GroupedProduct::kRowsGradient ? args.n
                                                                               : args.k);
  if (!error.empty()) return error;

  cublasLtMatmulHeuristicResult_t heuristic{};
  int num_found = 0;
  check("cublasLtMatmulAlgoGetHeuristic",
        library.get_heuristic(handle, desc.object, first.object, second.object, result.object, result.object,
                              preference.object, 1, &heuristic, &num_found));
  if (error.empty() && num_found == 0) error = "cuBLASLt has no algorithm for this product";
  if (!error.empty()) return error;
  check("cublasLtMatmul",
        library.matmul(handle, desc.object, arrays.scalars, arrays.b, first.object, arrays.a, second.object,
                       arrays.scalars + 1, arrays.d, result.object, arrays.d, result.object, &heuristic.algo,
                       arrays.gemm_workspace, arrays.gemm_workspace_bytes, stream));
  return error;
}

}  // namespace jax_ep
