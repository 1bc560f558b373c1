#include <type_traits>

#include "ffi/cuda/grouped_matmul/groups.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/ptx.cuh"

namespace jax_ep {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kElementBytes = 2;  // of bfloat16 and float16

using NumberPerThread = int64_t[kThreads];  // in shared memory
using PointerPerThread = void* [kThreads];  // in shared memory

// Where a group's rows are. `end` is where the next group begins, or num_rows for the last group. The rows from
// first_row + size to `end` belong to no group.
struct Group {
  int64_t first_row;
  int32_t size;
  int64_t end;
};

// The group of each thread, for one batch of kThreads groups that begins at group `first`. `start` is the first row of
// the batch; the function advances it to the next batch. A negative size counts as 0, and no group reaches beyond its
// capacity or the arrays. Contains block-wide barriers.
__device__ Group group_of_thread(const GroupedMatmulArgs& args, int32_t first, int64_t& start) {
  const int32_t g = first + threadIdx.x;
  const int32_t size = g < args.num_groups ? max(args.group_sizes[g], 0) : 0;
  if (args.capacity > 0) {
    const int64_t first_row = g * args.capacity;
    return {first_row, static_cast<int32_t>(min(int64_t{size}, args.capacity)), first_row + args.capacity};
  }
  JAX_EP_SHARED(NumberPerThread, ends);
  ends[threadIdx.x] = size;
  for (int32_t distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    const int64_t before = threadIdx.x >= distance ? ends[threadIdx.x - distance] : 0;
    __syncthreads();
    ends[threadIdx.x] += before;
  }
  __syncthreads();
  const int64_t end = min(start + ends[threadIdx.x], args.num_rows);
  const int64_t first_row = min(start + ends[threadIdx.x] - size, args.num_rows);
  start += ends[kThreads - 1];
  __syncthreads();
  const bool is_last = g == args.num_groups - 1;
  return {first_row, static_cast<int32_t>(end - first_row), is_last ? args.num_rows : end};
}

// The address of an element. Void is void or const void.
template <typename Void>
__device__ Void* at(Void* array, int64_t element) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return static_cast<Byte*>(array) + element * kElementBytes;
}

__device__ bool is_home(const GroupedMatmulArgs& args, int32_t g) { return g < args.num_home_groups; }

// The address of group g's matrix [k, n]: in `home` for a home group, else in `copies`.
template <typename Void>
__device__ Void* matrix_of_group(const GroupedMatmulArgs& args, Void* home, Void* copies, int32_t g) {
  const int64_t elements = args.k * args.n;
  return is_home(args, g) ? at(home, g * elements) : at(copies, (g - args.num_home_groups) * elements);
}

__device__ void write_group(const GroupedMatmulArgs& args, const GroupArrays& arrays, int32_t g, const Group& group) {
  const auto n = static_cast<int32_t>(args.n), k = static_cast<int32_t>(args.k);
  switch (args.product) {
    case GroupedProduct::kForward:
      arrays.shapes[g] = {group.size, n, k};
      arrays.a[g] = at(args.lhs, group.first_row * k);
      arrays.b[g] = matrix_of_group(args, args.rhs, args.copies, g);
      arrays.d[g] = at(args.out, group.first_row * n);
      arrays.a_stride[g] = k;
      arrays.b_stride[g] = n;
      arrays.d_stride[g] = n;
      break;
    case GroupedProduct::kRowsGradient:
      arrays.shapes[g] = {group.size, k, n};
      arrays.a[g] = at(args.lhs, group.first_row * n);
      arrays.b[g] = matrix_of_group(args, args.rhs, args.copies, g);
      arrays.d[g] = at(args.out, group.first_row * k);
      arrays.a_stride[g] = n;
      arrays.b_stride[g] = n;
      arrays.d_stride[g] = k;
      break;
    default:
      // An empty group has no rows to multiply, and TMA cannot describe an empty operand. With m = 0, the group has no
      // tiles. write_arrays() writes its zeros.
      arrays.shapes[g] = {group.size > 0 ? k : 0, n, group.size};
      arrays.a[g] = at(args.lhs, group.first_row * k);
      arrays.b[g] = at(args.rhs, group.first_row * n);
      arrays.d[g] = matrix_of_group(args, args.out, args.out_copies, g);
      arrays.a_stride[g] = k;
      arrays.b_stride[g] = n;
      arrays.d_stride[g] = n;
      break;
  }
}

// All blocks together write zeros to `num_bytes` bytes, a multiple of 16.
__device__ void write_zeros(void* begin, int64_t num_bytes) {
  auto* vectors = static_cast<uint4*>(begin);
  const int64_t num_threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_bytes / 16; i += num_threads) {
    vectors[i] = uint4{0, 0, 0, 0};
  }
}

__global__ void __launch_bounds__(kThreads) write_arrays(GroupedMatmulArgs args, GroupArrays arrays) {
  wait_for_dependencies();  // the GEMM, which begins when this kernel has ended, needs no such wait
  JAX_EP_SHARED(PointerPerThread, zeros_begin);  // what to fill with zeros
  JAX_EP_SHARED(NumberPerThread, zeros_bytes);
  int64_t start = 0;
  for (int32_t first = 0; first < args.num_groups; first += kThreads) {
    const int32_t g = first + threadIdx.x;
    const Group group = group_of_thread(args, first, start);
    if (blockIdx.x == 0 && g < args.num_groups) write_group(args, arrays, g, group);
    if (args.product == GroupedProduct::kForward) continue;
    if (args.product == GroupedProduct::kRowsGradient) {
      zeros_begin[threadIdx.x] = at(args.out, (group.first_row + group.size) * args.k);
      zeros_bytes[threadIdx.x] = (group.end - group.first_row - group.size) * args.k * kElementBytes;
    } else {
      zeros_begin[threadIdx.x] = matrix_of_group(args, args.out, args.out_copies, g);
      const bool is_zero = group.size == 0 && (is_home(args, g) || !args.leaves_empty_copies);
      zeros_bytes[threadIdx.x] = is_zero ? args.k * args.n * kElementBytes : 0;
    }
    __syncthreads();
    for (int32_t i = 0; i < kThreads && first + i < args.num_groups; ++i) {
      if (zeros_bytes[i] > 0) write_zeros(zeros_begin[i], zeros_bytes[i]);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t write_group_arrays(const GroupedMatmulArgs& args, const GroupArrays& arrays, int32_t num_sms,
                               cudaStream_t stream) {
  const int32_t num_blocks = args.product == GroupedProduct::kForward ? 1 : num_sms;  // the others may write zeros
  return launch(write_arrays, {num_blocks, kThreads, 0}, stream, args, arrays);
}

cudaError_t load_group_arrays() { return load_kernel(write_arrays, 0); }

}  // namespace jax_ep
