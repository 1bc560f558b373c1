// The extension module jax_ep._grouped_matmul: the XLA FFI target of the grouped GEMM.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/cuda/grouped_matmul/grouped_matmul.h"
#include "ffi/cuda/xla.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;

using GroupSizes = ffi::Buffer<ffi::S32, 1>;
using Workspace = ffi::Buffer<ffi::U8, 1>;

struct GroupedMatmulAttrs {
  int32_t product;
  bool leaves_empty_copies;
};

}  // namespace
}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::GroupedMatmulAttrs, StructMember<int32_t>("product"),
                                      StructMember<bool>("leaves_empty_copies"));

namespace jax_ep {
namespace {

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("grouped_matmul: " + what); }

std::vector<int64_t> dimensions(const ffi::AnyBuffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

int64_t product_of(const std::vector<int64_t>& dims) {
  int64_t result = 1;
  for (int64_t dim : dims) result *= dim;
  return result;
}

// lhs, rhs and out as GroupedProduct says, of one dtype. Ragged operands are [M, .] or, padded, [G, C, .]. If the
// weights are in two arrays, kForward and kRowsGradient have the operand copies, and kWeightsGradient has the result
// out_copies.
ffi::Error grouped_matmul(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, GroupSizes group_sizes,
                          std::optional<ffi::AnyBuffer> copies, GroupedMatmulAttrs attrs,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<Workspace> workspace,
                          std::optional<ffi::Result<ffi::AnyBuffer>> out_copies) {
  if (attrs.product < 0 || attrs.product >= kNumGroupedProducts) {
    return invalid("product is " + std::to_string(attrs.product) + "; it must be 0 to 2");
  }
  GroupedMatmulArgs args{};
  args.product = static_cast<GroupedProduct>(attrs.product);
  const bool is_weights = args.product == GroupedProduct::kWeightsGradient;
  if (is_weights ? copies.has_value() : out_copies.has_value()) {
    return invalid("copies must be an operand of the products 0 and 1, and a result of the product 2");
  }
  std::optional<ffi::AnyBuffer> second_weights = copies;
  if (out_copies) second_weights = **out_copies;
  if (lhs.element_type() != rhs.element_type() || lhs.element_type() != out->element_type() ||
      (second_weights && lhs.element_type() != second_weights->element_type())) {
    return invalid("the operands and the results must have one dtype");
  }
  if (lhs.element_type() != ffi::BF16 && lhs.element_type() != ffi::F16) {
    return invalid("the dtype must be bfloat16 or float16");
  }
  args.dtype = lhs.element_type() == ffi::BF16 ? GroupedDtype::kBfloat16 : GroupedDtype::kFloat16;
  args.num_groups = static_cast<int32_t>(group_sizes.dimensions()[0]);

  const std::vector<int64_t> ragged = dimensions(lhs);
  const std::vector<int64_t> weights = dimensions(is_weights ? *out : rhs);
  const std::vector<int64_t> other = dimensions(is_weights ? rhs : *out);
  const bool is_padded = ragged.size() == 3;
  if (weights.size() != 3 || (ragged.size() != 2 && !is_padded) || other.size() != ragged.size() ||
      (is_padded && ragged[0] != args.num_groups)) {
    return invalid("rows must be [M, K] or [G, C, K], weights [G, K, N], and group_sizes [G]");
  }
  const std::vector<int64_t> no_copies = {0, weights[1], weights[2]};
  if ((second_weights ? dimensions(*second_weights) : no_copies) !=
      std::vector<int64_t>{args.num_groups - weights[0], weights[1], weights[2]}) {
    return invalid("weights must be [G1, K, N], copies [G2, K, N], and group_sizes [G1 + G2]; without copies, G2 is 0");
  }
  if (args.num_groups == 0) return invalid("there are no groups; there must be at least one");
  args.num_home_groups = static_cast<int32_t>(weights[0]);
  args.k = weights[1];
  args.n = weights[2];
  args.capacity = is_padded ? ragged[1] : 0;
  args.num_rows = product_of(ragged) / std::max<int64_t>(ragged.back(), 1);
  const bool is_rows_gradient = args.product == GroupedProduct::kRowsGradient;
  if (ragged.back() != (is_rows_gradient ? args.n : args.k) || other.back() != (is_rows_gradient ? args.k : args.n) ||
      product_of(other) != args.num_rows * other.back()) {
    return invalid("the dimensions of rows and weights do not fit");
  }
  if (args.k == 0 || args.n == 0 || args.k % kChannelAlignment != 0 || args.n % kChannelAlignment != 0) {
    return invalid("K is " + std::to_string(args.k) + " and N is " + std::to_string(args.n) +
                   "; both must be multiples of " + std::to_string(kChannelAlignment));
  }
  if (workspace->size_bytes() < grouped_workspace_bytes(args.num_groups)) {
    return invalid("the workspace has " + std::to_string(workspace->size_bytes()) + " bytes; it must have " +
                   std::to_string(grouped_workspace_bytes(args.num_groups)));
  }
  args.lhs = lhs.untyped_data();
  args.rhs = rhs.untyped_data();
  if (copies) args.copies = copies->untyped_data();
  args.group_sizes = group_sizes.typed_data();
  args.out = out->untyped_data();
  if (out_copies) args.out_copies = (*out_copies)->untyped_data();
  args.leaves_empty_copies = attrs.leaves_empty_copies;
  args.workspace = workspace->typed_data();
  args.workspace_bytes = workspace->size_bytes();
  const std::string error = grouped_matmul_on_device(args, stream);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("grouped_matmul: " + error);
}

XLA_FFI_DEFINE_HANDLER(kGroupedMatmul, grouped_matmul,
                       ffi::Ffi::Bind()
                           .Ctx<DeviceStream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<GroupSizes>()
                           .OptionalArg<ffi::AnyBuffer>()
                           .Attrs<GroupedMatmulAttrs>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<Workspace>()
                           .OptionalRet<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

NB_MODULE(_grouped_matmul, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["jax_ep_grouped_matmul"] = nb::capsule(reinterpret_cast<void*>(kGroupedMatmul));
    return targets;
  });
  m.def(
      "load",
      [](int32_t device) {
        int32_t before = 0;
        cudaError_t status = cudaGetDevice(&before);
        if (status == cudaSuccess) status = cudaSetDevice(device);
        if (status == cudaSuccess) status = load_grouped_matmul();
        if (status != cudaSuccess)
          throw std::runtime_error(std::string("grouped_matmul: ") + cudaGetErrorString(status));
        cudaSetDevice(before);
      },
      nb::arg("device"), "Loads the kernels on a device of compute capability 9.0, given as a CUDA ordinal.");
  m.def("workspace_bytes", grouped_workspace_bytes, nb::arg("num_groups"));
}

}  // namespace
}  // namespace jax_ep
