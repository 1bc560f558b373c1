// What the dispatch_layout handlers of all platforms share: the buffers' types, the attributes, and the checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/buffers.h"
#include "ffi/dispatch_layout.h"
#include "ffi/handler_error.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct DispatchLayoutAttrs {
  int32_t num_experts, num_ranks, num_nodes;
};

using TopkIdx = xla::ffi::Buffer<xla::ffi::S32, 2>;
using Counts = xla::ffi::Buffer<xla::ffi::S32, 1>;
using Membership = xla::ffi::Buffer<xla::ffi::PRED, 2>;

inline xla::ffi::Error invalid_dispatch_layout(const std::string& what) {
  return xla::ffi::Error::InvalidArgument("dispatch_layout: " + what);
}

template <typename Buffer>
xla::ffi::Error check_shape(const char* name, const Buffer& buffer, std::vector<int64_t> expected) {
  const auto dims = buffer.dimensions();
  if (std::equal(dims.begin(), dims.end(), expected.begin(), expected.end())) {
    return xla::ffi::Error::Success();
  }
  return invalid_dispatch_layout(std::string(name) + " has shape " + shape_string(dims) + " but must have " +
                                 shape_string(expected));
}

inline xla::ffi::Error check_divides(const char* divisor_name, int32_t divisor, const char* number_name,
                                     int32_t number) {
  if (divisor > 0 && number > 0 && number % divisor == 0) return xla::ffi::Error::Success();
  return invalid_dispatch_layout(std::string(divisor_name) + " = " + std::to_string(divisor) + " must divide " +
                                 number_name + " = " + std::to_string(number) + ", and both be positive");
}

// The operation's arguments, once attributes and shapes are known to fit each other.
inline xla::ffi::ErrorOr<DispatchLayoutArgs> checked_dispatch_layout(TopkIdx topk_idx, const DispatchLayoutAttrs& attrs,
                                                                     xla::ffi::Result<Counts> num_tokens_per_rank,
                                                                     xla::ffi::Result<Counts> num_tokens_per_node,
                                                                     xla::ffi::Result<Counts> num_tokens_per_expert,
                                                                     xla::ffi::Result<Membership> is_token_in_rank) {
  const auto [num_experts, num_ranks, num_nodes] = attrs;
  const int64_t num_tokens = topk_idx.dimensions()[0];
  for (xla::ffi::Error error : {
           check_divides("num_ranks", num_ranks, "num_experts", num_experts),
           check_divides("num_nodes", num_nodes, "num_ranks", num_ranks),
           check_shape("num_tokens_per_rank", *num_tokens_per_rank, {num_ranks}),
           check_shape("num_tokens_per_node", *num_tokens_per_node, {num_nodes}),
           check_shape("num_tokens_per_expert", *num_tokens_per_expert, {num_experts}),
           check_shape("is_token_in_rank", *is_token_in_rank, {num_tokens, num_ranks}),
       }) {
    if (error.failure()) return xla::ffi::Unexpected(std::move(error));
  }
  return DispatchLayoutArgs{num_tokens,
                            static_cast<int32_t>(topk_idx.dimensions()[1]),
                            num_experts,
                            num_ranks,
                            num_nodes,
                            topk_idx.typed_data(),
                            num_tokens_per_rank->typed_data(),
                            num_tokens_per_node->typed_data(),
                            num_tokens_per_expert->typed_data(),
                            is_token_in_rank->typed_data()};
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::DispatchLayoutAttrs, StructMember<int32_t>("num_experts"),
                                      StructMember<int32_t>("num_ranks"), StructMember<int32_t>("num_nodes"));
