// XLA FFI handlers of expand, reduce and its backward pass. These calls are local to one rank, and need no group. So
// the handlers take no order token and no axis index.
#include "ffi/cuda/bindings.h"
#include "ffi/cuda/checks.h"
#include "ffi/cuda/expand.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/reduce.h"

namespace jax_ep {

struct ExpandAttrs {
  bool zero_pad;
};

namespace {

constexpr const char* kReduceBackName = "reduce (backward)";

// The pairs of a call. `tokens` has a row for each token.
PairRows pairs_of(const Operand& tokens, const Operand& row_of_pair, int64_t capacity, int32_t* pair_of_row) {
  return {static_cast<int32_t>(size(row_of_pair, 0)),
          static_cast<int32_t>(last_size(row_of_pair)),
          static_cast<int32_t>(capacity),
          row_bytes(tokens),
          data<int32_t>(row_of_pair),
          pair_of_row};
}

// Checks row_of_pair, and the bytes of a row. There may be at most 32 columns, because a warp has a lane for each k.
ffi::Error check_pairs(const char* op, const Operand& tokens, int64_t num_tokens, const Operand& row_of_pair) {
  const int64_t top_k = std::min<int64_t>(last_size(row_of_pair), 32);
  return first_error({check_buffers(op, {{"row_of_pair", row_of_pair, ffi::S32, {num_tokens, top_k}}}),
                      check_units(op, row_bytes(tokens))});
}

ffi::Error launched(cudaError_t status) {
  check(status, "the kernel was not launched");
  return ffi::Error::Success();
}

ffi::Error expand(CallStream stream, ExpandAttrs attrs, Operand x, Operand row_of_pair, Operand counts,
                  Operand group_sizes, Result out, Result pair_of_row) {
  const int64_t num_tokens = size(x, 0), capacity = size(*pair_of_row, 0), num_groups = size(group_sizes, 0);
  const ffi::Error error =
      first_error({check_buffers("expand", {{"x", x, Types::any(), {num_tokens, last_size(x)}},
                                            {"counts", counts, ffi::S32, {num_groups}},
                                            {"group_sizes", group_sizes, ffi::S32, {num_groups}},
                                            {"out", *out, x.element_type(), {capacity, last_size(x)}},
                                            {"pair_of_row", *pair_of_row, ffi::S32, {capacity}}}),
                   check_pairs("expand", x, num_tokens, row_of_pair)});
  if (error.failure()) return error;
  return launched(launch_expand(
      {pairs_of(x, row_of_pair, capacity, data<int32_t>(pair_of_row)), static_cast<int32_t>(num_groups), attrs.zero_pad,
       data<uint8_t>(x), data<int32_t>(counts), data<int32_t>(group_sizes), data<uint8_t>(out)},
      stream));
}

// If `weights` has no elements, every weight is 1.
ffi::Error reduce(CallStream stream, Operand y, Operand weights, Operand row_of_pair, Result out) {
  const int64_t num_tokens = size(row_of_pair, 0), capacity = size(y, 0);
  const ffi::Error error =
      first_error({check_buffers("reduce", {{"y", y, Types::floats(), {capacity, last_size(y)}},
                                            {"weights", weights, ffi::F32, {capacity}, true},
                                            {"out", *out, y.element_type(), {num_tokens, last_size(y)}}}),
                   check_pairs("reduce", y, num_tokens, row_of_pair)});
  if (error.failure()) return error;
  return launched(launch_reduce(
      element_type(y),
      {pairs_of(*out, row_of_pair, capacity, nullptr), data<uint8_t>(y), data<float>(weights), data<uint8_t>(out)},
      stream));
}

// Without y, there is no weights_cotangent.
ffi::Error reduce_back(CallStream stream, Operand g, Operand y, Operand weights, Operand row_of_pair,
                       Operand pair_of_row, Result y_cotangent, Result weights_cotangent) {
  const int64_t num_tokens = size(g, 0), capacity = size(pair_of_row, 0);
  const Dims rows = {capacity, last_size(g)};
  const ffi::Error error = first_error(
      {check_buffers(kReduceBackName,
                     {{"g", g, Types::floats(), {num_tokens, last_size(g)}},
                      {"y", y, g.element_type(), rows, true},
                      {"weights", weights, ffi::F32, {capacity}},
                      {"pair_of_row", pair_of_row, ffi::S32, {capacity}},
                      {"y_cotangent", *y_cotangent, g.element_type(), rows},
                      has_elements(y) ? Expected{"weights_cotangent", *weights_cotangent, ffi::F32, {capacity}}
                                      : none("weights_cotangent", *weights_cotangent)}),
       check_pairs(kReduceBackName, g, num_tokens, row_of_pair)});
  if (error.failure()) return error;
  return launched(launch_reduce_back(
      element_type(g),
      {pairs_of(g, row_of_pair, capacity, data<int32_t>(pair_of_row)), data<uint8_t>(g), data<uint8_t>(y),
       data<float>(weights), data<uint8_t>(y_cotangent), data<float>(weights_cotangent)},
      stream));
}

// Wraps a handler, so that its exceptions become errors.
template <typename... Parameters>
auto local(ffi::Error (*handler)(CallStream, Parameters...), const char* op) {
  return [op, handler](CallStream stream, Parameters... parameters) {
    return without_exceptions(op, [&] { return handler(stream, parameters...); });
  };
}
auto bind_stream() { return ffi::Ffi::Bind().Ctx<CallStream>(); }

JAX_EP_DEFINE_HANDLER(kExpand, local(expand, "expand"), (with_buffers<4, 2>(bind_stream().Attrs<ExpandAttrs>())),
                      kTraits);
JAX_EP_DEFINE_HANDLER(kReduce, local(reduce, "reduce"), (with_buffers<3, 1>(bind_stream())), kTraits);
JAX_EP_DEFINE_HANDLER(kReduceBack, local(reduce_back, kReduceBackName), (with_buffers<5, 2>(bind_stream())), kTraits);

}  // namespace

std::vector<std::pair<const char*, XLA_FFI_Handler*>> expand_targets() {
  return {{"jax_ep_expand", kExpand}, {"jax_ep_reduce", kReduce}, {"jax_ep_reduce_back", kReduceBack}};
}

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::ExpandAttrs, StructMember<bool>("zero_pad"));
