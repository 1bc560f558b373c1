// The buffers of one rank of a group, and the arguments of its operations.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <vector>

#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/group.h"

using namespace jax_ep;

namespace {

// A row is more than two pieces of y in shared memory (combine.cu), and the last one is not whole.
constexpr int32_t kHidden = 1104, kAlignment = 4;
constexpr int64_t kRowBytes = kHidden * sizeof(float);
constexpr int32_t kStreams = 4, kPending = 3;
// The same for all ranks. The tests change them.
int32_t experts_per_rank = 3, num_tokens = 12, top_k = 4;

// All ranks share GPU 0. An emulated rank has its own device.
#ifdef JAX_EP_EMULATOR
constexpr bool kOneDevice = false;
#else
constexpr bool kOneDevice = true;
#endif
int32_t device_of(int32_t rank) { return kOneDevice ? 0 : rank; }

template <typename T>
T pick(std::mt19937& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << cudaGetErrorString(status) << "\n";
  std::exit(1);
}

// Waits for all work of the ranks' devices.
void synchronize(int32_t num_ranks) {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    must(cudaSetDevice(device_of(rank)));
    must(cudaDeviceSynchronize());
  }
}

// Device memory with a host copy.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(size_t size) : host(size) { must(cudaMalloc(&device, size * sizeof(T))); }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void upload() { must(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  const std::vector<T>& download() {
    must(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

// Rows of channels. The host has floats. In device memory, a row has floats or, where an operation casts to fp8,
// bfloat16, which takes the first half of the memory.
struct Activations : Array<float> {
  bool is_bfloat16 = false;

  using Array::Array;
  int64_t row_bytes() const { return is_bfloat16 ? kRowBytes / 2 : kRowBytes; }
  const std::vector<float>& download() {
    Array::download();
    if (!is_bfloat16) return host;
    std::vector<uint16_t> upper(host.size());  // a bfloat16 is the upper half of a float
    std::memcpy(upper.data(), host.data(), upper.size() * sizeof(uint16_t));
    for (size_t i = 0; i < host.size(); ++i) {
      const uint32_t bits = uint32_t{upper[i]} << 16;
      std::memcpy(&host[i], &bits, sizeof(bits));
    }
    return host;
  }
};

// Overwrites some units with the sentinel, the escape, or a value close to it (ll_units.cuh).
void look_like_sentinels(std::vector<float>& rows, std::mt19937& random) {
  uint8_t bytes[kUnitBytes];
  std::memset(bytes, kSentinelByte, sizeof(bytes));
  for (size_t unit = 0; unit < rows.size() / 4; ++unit) {
    const uint32_t choice = random() % 16;
    if (choice > 2) continue;
    bytes[12] = choice == 0 ? kSentinelByte : kSentinelByte ^ 1;
    if (choice == 2) bytes[15] ^= 1;
    std::memcpy(&rows[unit * 4], bytes, sizeof(bytes));
    bytes[15] = kSentinelByte;
  }
}

std::vector<uint16_t> truncate_to_bfloat16(const std::vector<float>& values) {
  std::vector<uint16_t> upper(values.size());
  std::transform(values.begin(), values.end(), upper.begin(), [](float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
  });
  return upper;
}

// The layout of the rows of a rank's experts.
struct Rows {
  Layout layout = Layout::kRagged;
  int64_t capacity = 0;  // rows per expert, or per rank in the ragged layout; 0, only ragged: no row is dropped
};

// The buffers of one rank.
struct Rank {
  int32_t ranks;
  Rows shape;
  int32_t cast_after_dispatch = 0;  // the Cast of combines and of the backward passes
  int32_t experts = ranks * experts_per_rank;
  int64_t most_rows = align_up(int64_t{ranks} * num_tokens * top_k + experts_per_rank * (kAlignment - 1), kAlignment);
  int64_t capacity = shape.capacity > 0 ? shape.capacity : most_rows;
  int64_t num_rows = shape.layout == Layout::kExpert ? experts_per_rank * capacity : capacity;
  cudaStream_t streams[kStreams];
  Array<int32_t> axis_index{1}, ids{size_t(num_tokens) * top_k},
      send_index{size_t(2) * num_tokens * ranks},  // without a network, only the first half is used
      recv_row{size_t(ranks) * num_tokens * top_k}, num_recv_per_rank{size_t(ranks)}, counts{size_t(experts_per_rank)},
      group_sizes{size_t(experts_per_rank)}, num_dropped{1};
  Array<PendingCall> pending_dispatches{kPending}, pending_combines{kPending};
  // x and y in bfloat16, for operations that cast to fp8.
  Array<uint16_t> x_bfloat16{size_t(num_tokens) * kHidden}, y_bfloat16{size_t(num_rows) * kHidden};
  Activations recv{size_t(num_rows) * kHidden}, cotangent{size_t(num_rows) * kHidden};
  Array<float> x{size_t(num_tokens) * kHidden}, topk_weights{size_t(num_tokens) * top_k}, weights{size_t(num_rows)},
      like{size_t(num_rows) * kHidden}, out{size_t(num_tokens) * kHidden}, y{size_t(num_rows) * kHidden},
      weights_cotangent{size_t(num_rows)}, x_cotangent{size_t(num_tokens) * kHidden},
      topk_cotangent{size_t(num_tokens) * top_k};

  Rank(int32_t ranks, int32_t rank, Rows shape = {}) : ranks(ranks), shape(shape) {
    must(cudaSetDevice(device_of(rank)));
    for (cudaStream_t& stream : streams) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    axis_index.host[0] = rank;
    axis_index.upload();
  }
  ~Rank() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }

  void randomize(std::mt19937& random) {
    for (size_t i = 0; i < x.host.size(); ++i) {
      const bool is_small = i % kHidden / kChunkBytes % 2;  // so that the chunks of a cast row have different scales
      x.host[i] = std::uniform_real_distribution<float>(-1, 1)(random) * (is_small ? 0.125f : 1);
    }
    for (float& value : topk_weights.host) value = std::uniform_real_distribution<float>(0, 1)(random);
    const auto first = static_cast<uint32_t>(random());
    for (size_t i = 0; i < y.host.size(); ++i)
      y.host[i] = static_cast<uint32_t>(first + i * 2654435761u) / 4294967296.0f;
    for (int32_t& id : ids.host) id = std::uniform_int_distribution<int32_t>(-2, experts + 1)(random);
    x_bfloat16.host = truncate_to_bfloat16(x.host), y_bfloat16.host = truncate_to_bfloat16(y.host);
    x.upload(), x_bfloat16.upload(), topk_weights.upload(), y.upload(), y_bfloat16.upload(), ids.upload();
  }

  DispatchArgs dispatch_args(OpKind op) {
    DispatchArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = num_tokens, args.top_k = top_k;
    args.x = x.device, args.row_bytes = args.out_row_bytes = kRowBytes;
    args.layout = shape.layout, args.capacity = capacity, args.num_rows = num_rows;
    args.alignment = shape.layout == Layout::kExpert ? 1 : kAlignment;
    args.zero_pad = true;
    return args;
  }
  // Sets how the rows of x travel, and the element type of `result`.
  void set_wire(DispatchArgs& args, int32_t cast, Activations& result) {
    args.cast = cast, args.num_scales = cast ? divide_up(kHidden, kChannelsPerScale) : 0;
    result.is_bfloat16 = cast != 0;
    if (cast) args.x = x_bfloat16.device;
    args.row_bytes = args.out_row_bytes = result.row_bytes();
  }
  DispatchArgs dispatch(int32_t cast) {
    DispatchArgs args = dispatch_args(OpKind::kDispatch);
    args.delivery = cast ? Delivery::kDequantize : Delivery::kCopy;
    set_wire(args, cast, recv);
    args.topk_idx = ids.device, args.topk_weights = topk_weights.device, args.send_index = send_index.device;
    args.out = recv.device, args.weights = weights.device, args.counts = counts.device;
    args.group_sizes = group_sizes.device, args.num_dropped = num_dropped.device, args.recv_row = recv_row.device;
    args.num_recv_per_rank = num_recv_per_rank.device;
    return args;
  }
  DispatchArgs dispatch_split(int32_t cast, int32_t pending = 0) {
    DispatchArgs args = dispatch(cast);
    args.phase = Phase::kDone, args.pending = pending_dispatches.device + pending;
    return args;
  }
  DispatchArgs dispatch_with_route(OpKind op, Array<float>& result) {
    DispatchArgs args = dispatch_args(op);
    args.known_send_index = send_index.device, args.known_recv_row = recv_row.device,
    args.known_num_recv_per_rank = num_recv_per_rank.device;
    args.known_counts = counts.device, args.known_group_sizes = group_sizes.device, args.out = result.device;
    return args;
  }
  DispatchArgs combine_back() {
    DispatchArgs args = dispatch_with_route(OpKind::kCombineBack, cotangent);
    args.delivery = Delivery::kCombineBack;
    set_wire(args, cast_after_dispatch, cotangent);
    args.row_weights = weights.device, args.weights_cotangent = weights_cotangent.device;
    args.y = cast_after_dispatch ? static_cast<const void*>(y_bfloat16.device) : y.device;
    return args;
  }
  CombineArgs combine_args(OpKind op, Array<float>& result) {
    CombineArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = num_tokens, args.top_k = top_k;
    args.y = recv.device, args.row_bytes = recv.row_bytes();
    args.recv_row = recv_row.device, args.num_recv_per_rank = num_recv_per_rank.device,
    args.send_index = send_index.device;
    args.out = result.device, args.out_type = ElementType::kFloat32;
    args.cast = cast_after_dispatch;
    return args;
  }
  CombineArgs combine() {
    CombineArgs args = combine_args(OpKind::kCombine, out);
    args.row_weights = weights.device;
    return args;
  }
  CombineArgs combine_split(int32_t pending = 0) {
    CombineArgs args = combine();
    args.phase = Phase::kDone, args.pending = pending_combines.device + pending;
    return args;
  }
  CombineArgs dispatch_back() {
    CombineArgs args = combine_args(OpKind::kDispatchBack, x_cotangent);
    args.weights_cotangent = weights.device, args.topk_weights_cotangent = topk_cotangent.device;
    return args;
  }
};

// Buffers that must be the same for a start and its done.
Buffers buffers_of(const DispatchArgs& args) { return {args.x, args.out, args.pending}; }
Buffers buffers_of(const CombineArgs& args) { return {args.y, args.out, args.pending}; }

}  // namespace
