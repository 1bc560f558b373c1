// What the buffers of a call must be: their types, and their shapes in a group. The handlers check all buffers before
// they enqueue a kernel. jax_ep/_backends/targets.py declares the same shapes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>

#include "ffi/buffers.h"
#include "ffi/cuda/call.h"
#include "ffi/cuda/enqueue.h"
#include "ffi/cuda/group.h"

namespace jax_ep {

// The sizes of the buffers of a group's calls.
struct Sizes {
  int64_t num_ranks, experts_per_rank, replicas, top_k;
  bool has_network;

  explicit Sizes(const Member& member)
      : num_ranks(member.peers.num_ranks),
        experts_per_rank(member.peers.experts_per_rank),
        replicas(member.peers.replicas),
        top_k(member.peers.layout.top_k),
        has_network(member.is_over_network()) {}

  int64_t num_home_experts() const { return experts_per_rank - replicas; }
  Dims topk(int64_t num_tokens) const { return {num_tokens, top_k}; }
  Dims send_index(int64_t num_tokens) const { return {has_network ? 2 * num_tokens : num_tokens, num_ranks}; }
  Dims recv_row(int64_t num_tokens) const { return {num_ranks, num_tokens, top_k}; }
  // The leading dimensions of received rows.
  Dims rows(int64_t layout, int64_t capacity) const {
    return has_buffer_per_expert(static_cast<Layout>(layout)) ? Dims{experts_per_rank, capacity} : Dims{capacity};
  }
};

inline ffi::Error check_axis_index(const char* op, const Operand& axis_index) {
  return check_buffers(op, {{"axis_index", axis_index, ffi::S32, {}}});
}

inline ffi::Error check_route(const char* op, const Sizes& sizes, int64_t num_tokens, const Operand& send_index,
                              const Operand& recv_row, const Operand& num_recv_per_rank) {
  return check_buffers(op, {{"send_index", send_index, ffi::S32, sizes.send_index(num_tokens)},
                            {"recv_row", recv_row, ffi::S32, sizes.recv_row(num_tokens)},
                            {"num_recv_per_rank", num_recv_per_rank, ffi::S32, {sizes.num_ranks}}});
}

inline ffi::Error check_counts(const char* op, const Sizes& sizes, const Operand& counts, const Operand& group_sizes) {
  return check_buffers(op, {{"counts", counts, ffi::S32, {sizes.experts_per_rank}},
                            {"group_sizes", group_sizes, ffi::S32, {sizes.experts_per_rank}}});
}

inline ffi::Error check_layout(const char* op, int64_t layout, int64_t capacity, int64_t alignment) {
  const bool is_layout = layout >= 0 && layout < static_cast<int64_t>(std::size(kLayoutNames));
  if (is_layout && capacity >= 0 && alignment >= 1) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": layout is " + std::to_string(layout) + ", capacity is " +
                                     std::to_string(capacity) + " and alignment is " + std::to_string(alignment) +
                                     "; they must be a number of Layout, at least 0, and at least 1");
}

inline ffi::Error check_cast(const char* op, int64_t cast, int64_t channels) {
  if (cast == 0 || channels % kUnitBytes == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": the rows have " + std::to_string(channels) +
                                     " channels; rows that travel in fp8 must have a multiple of " +
                                     std::to_string(kUnitBytes));
}

inline Expected expected_scales(ScalesFormat format, const Dims& rows, int64_t num_scales, const Operand& scales) {
  switch (format) {
    case ScalesFormat::kFloat32Columns:
      return {"out_scales", scales, ffi::F32, rows.with_columns(num_scales)};
    case ScalesFormat::kUe8m0:
      return {"out_scales", scales, ffi::F8E8M0FNU, rows.then(num_scales)};
    case ScalesFormat::kUe8m0Columns:
      return {"out_scales", scales, ffi::S32, rows.with_columns(divide_up(num_scales, 4))};
    default:
      return {"out_scales", scales, ffi::F32, rows.then(num_scales)};
  }
}

inline ffi::Error check_scales_format(const char* op, int64_t format, int64_t capacity) {
  const bool is_format = format >= 0 && format <= static_cast<int64_t>(ScalesFormat::kUe8m0Columns);
  const bool is_plain = format == static_cast<int64_t>(ScalesFormat::kFloat32);
  if (is_format && (is_plain || capacity % 4 == 0)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": scales_format is " + std::to_string(format) +
                                     " and capacity is " + std::to_string(capacity) +
                                     "; scales_format must be a number of ScalesFormat, and capacity a multiple of 4 " +
                                     "unless scales_format is 0");
}

// Checks the rows that are sent, and the rows that arrive in `rows` of the result. The kernels cast rows of bfloat16
// only, to fp8 and back. Rows that are fp8 already have scales.
inline ffi::Error check_wire(const char* op, int64_t cast, bool dequantize, const Operand& x, const Operand& x_scales,
                             const Dims& rows, const Operand& out, const Operand& out_scales,
                             ScalesFormat scales_format = ScalesFormat::kFloat32) {
  const int64_t num_tokens = size(x, 0), channels = last_size(x), num_scales = divide_up(channels, kChannelsPerScale);
  const bool is_quantized = x.element_type() == ffi::F8E4M3FN, is_cast = cast != 0, is_fp8 = is_quantized || is_cast;
  if (const ffi::Error error = check_cast(op, is_fp8, channels); error.failure()) return error;
  const bool returns_fp8 = is_fp8 && !dequantize;
  const Types x_types = is_cast ? Types(ffi::BF16) : is_quantized ? Types(ffi::F8E4M3FN) : Types::floats();
  const Types out_types = returns_fp8 ? Types(ffi::F8E4M3FN) : is_fp8 ? Types(ffi::BF16) : Types(x.element_type());
  return check_buffers(
      op,
      {{"x", x, x_types, {num_tokens, channels}},
       is_quantized ? Expected{"x_scales", x_scales, ffi::F32, {num_tokens, num_scales}} : none("x_scales", x_scales),
       {"out", out, out_types, rows.then(channels)},
       returns_fp8 ? expected_scales(scales_format, rows, num_scales, out_scales) : none("out_scales", out_scales)});
}

// The first error of several checks.
inline ffi::Error first_error(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& error : errors) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

template <typename Attrs>
ffi::Error check_dispatch(const char* op, const Member& member, const Attrs& attrs, const Operand& axis_index,
                          const Operand& x, const Operand& x_scales, const Operand& topk_idx, const Operand& named_slot,
                          const Operand& topk_weights, const Operand& out, const Operand& out_scales,
                          const Operand& weights, const Operand& counts, const Operand& group_sizes,
                          const Operand& num_dropped, const Operand& recv_topk_idx, const Operand& num_rows_per_rank,
                          const Operand& send_index, const Operand& recv_row, const Operand& num_recv_per_rank) {
  const Sizes sizes(member);
  const int64_t num_tokens = size(x, 0);
  const Dims rows = sizes.rows(attrs.layout, attrs.capacity);
  const bool is_token = static_cast<Layout>(attrs.layout) == Layout::kToken;
  const Dims pairs = is_token ? rows.then(sizes.top_k) : rows;
  return first_error(
      {check_axis_index(op, axis_index), check_layout(op, attrs.layout, attrs.capacity, attrs.alignment),
       check_scales_format(op, attrs.scales_format, attrs.capacity),
       check_wire(op, attrs.cast, attrs.dequantize, x, x_scales, rows, out, out_scales,
                  static_cast<ScalesFormat>(attrs.scales_format)),
       check_buffers(op, {{"topk_idx", topk_idx, ffi::S32, sizes.topk(num_tokens)},
                          is_token ? Expected{"named_slot", named_slot, ffi::S32, sizes.topk(num_tokens)}
                                   : none("named_slot", named_slot),
                          {"topk_weights", topk_weights, ffi::F32, sizes.topk(num_tokens), true},
                          {"weights", weights, ffi::F32, pairs},
                          is_token ? Expected{"recv_topk_idx", recv_topk_idx, ffi::S32, pairs}
                                   : none("recv_topk_idx", recv_topk_idx),
                          is_token ? Expected{"num_rows_per_rank", num_rows_per_rank, ffi::S32, {sizes.num_ranks}}
                                   : none("num_rows_per_rank", num_rows_per_rank),
                          {"num_dropped", num_dropped, ffi::S32, {}}}),
       check_counts(op, sizes, counts, group_sizes),
       check_route(op, sizes, num_tokens, send_index, recv_row, num_recv_per_rank)});
}

inline ffi::Error check_pending(const char* op, const Operand& pending) {
  static_assert(sizeof(PendingCall) == 2 * sizeof(int32_t));
  return check_buffers(op, {{"pending", pending, ffi::F32, {2}}});
}

// row_weights may be empty: all weights are then 1. The check cannot restrict this to the layout "token", because
// combine has no attribute for the layout.
inline ffi::Error check_combine(const char* op, const Member& member, int64_t cast, const Operand& axis_index,
                                const Operand& y, const Operand& row_weights, const Operand& send_index,
                                const Operand& recv_row, const Operand& num_recv_per_rank, const Operand& out) {
  const int64_t num_tokens = size(recv_row, 1), channels = last_size(y);
  const Dims rows = Dims::of_rows(y);
  return first_error({check_axis_index(op, axis_index), check_cast(op, cast, channels),
                      check_buffers(op, {{"y", y, Types::floats(), rows.then(channels)},
                                         {"row_weights", row_weights, ffi::F32, rows, true}}),
                      check_route(op, Sizes(member), num_tokens, send_index, recv_row, num_recv_per_rank),
                      check_buffers(op, {{"out", out, Types::floats(), {num_tokens, channels}}})});
}

template <typename Attrs>
ffi::Error check_combine_back(const char* op, const Member& member, const Attrs& attrs, const Operand& axis_index,
                              const Operand& g, const Operand& send_index, const Operand& recv_row,
                              const Operand& num_recv_per_rank, const Operand& counts, const Operand& group_sizes,
                              const Operand& y, const Operand& row_weights, const Operand& y_cotangent,
                              const Operand& weights_cotangent) {
  const Sizes sizes(member);
  const int64_t num_tokens = size(g, 0), channels = last_size(g);
  const Dims rows = sizes.rows(attrs.layout, attrs.capacity);
  const bool lacks_y = !has_elements(y);
  return first_error(
      {check_axis_index(op, axis_index), check_layout(op, attrs.layout, attrs.capacity, attrs.alignment),
       check_cast(op, attrs.cast, channels),
       check_buffers(op, {{"g", g, attrs.cast ? Types(ffi::BF16) : Types::floats(), {num_tokens, channels}},
                          {"y", y, g.element_type(), rows.then(channels), true},
                          {"row_weights", row_weights, ffi::F32, rows},
                          {"y_cotangent", y_cotangent, g.element_type(), rows.then(channels)},
                          lacks_y ? none("weights_cotangent", weights_cotangent)
                                  : Expected{"weights_cotangent", weights_cotangent, ffi::F32, rows}}),
       check_route(op, sizes, num_tokens, send_index, recv_row, num_recv_per_rank),
       check_counts(op, sizes, counts, group_sizes)});
}

template <typename Attrs>
ffi::Error check_dispatch_back(const char* op, const Member& member, const Attrs& attrs, const Operand& axis_index,
                               const Operand& y, const Operand& weights, const Operand& send_index,
                               const Operand& recv_row, const Operand& num_recv_per_rank, const Operand& out,
                               const Operand& topk_weights) {
  const Sizes sizes(member);
  const int64_t num_tokens = size(recv_row, 1), channels = last_size(y);
  const bool lacks_y = !has_elements(y), lacks_weights = !has_elements(weights);
  const bool has_token_weights = !lacks_weights && static_cast<Layout>(attrs.layout) == Layout::kToken;
  const int64_t num_rows = lacks_weights       ? size(y, 0)
                           : has_token_weights ? size(weights, 0)
                                               : static_cast<int64_t>(weights.element_count());
  return first_error(
      {check_axis_index(op, axis_index), check_route(op, sizes, num_tokens, send_index, recv_row, num_recv_per_rank),
       check_cast(op, attrs.cast, channels),
       check_buffers(op,
                     {{"y", y, Types::floats(), {num_rows, channels}, true},
                      {"weights", weights, ffi::F32, has_token_weights ? sizes.topk(num_rows) : Dims(weights), true},
                      lacks_y ? none("out", out) : Expected{"out", out, Types::floats(), {num_tokens, channels}},
                      lacks_weights ? none("topk_weights", topk_weights)
                                    : Expected{"topk_weights", topk_weights, ffi::F32, sizes.topk(num_tokens)}})});
}

}  // namespace jax_ep
