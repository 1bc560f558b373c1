// What device code calls without a header on a GPU: the position of a thread, warp collectives, atomics, arithmetic. A
// part of the emulator's replacement for cuda_runtime_api.h.
#pragma once

#include "ffi/emulator/machine.h"

namespace emulator {

// A variable such as threadIdx.x: each read computes its value for the running thread.
template <typename Read>
struct Coordinate {
  operator uint32_t() const { return Read()(); }
};
template <typename Read>
struct Coordinates {
  Coordinate<Read> x;
};
struct ReadThread {
  uint32_t operator()() const { return current->index; }
};
struct ReadBlock {
  uint32_t operator()() const { return current->warp->block->index; }
};
struct ReadBlockSize {
  uint32_t operator()() const { return current->warp->block->launch->block_threads; }
};
struct ReadGridSize {
  uint32_t operator()() const { return current->warp->block->launch->num_blocks; }
};

}  // namespace emulator

// One dimension is all that ffi/cuda uses.
inline constexpr emulator::Coordinates<emulator::ReadThread> threadIdx;
inline constexpr emulator::Coordinates<emulator::ReadBlock> blockIdx;
inline constexpr emulator::Coordinates<emulator::ReadBlockSize> blockDim;
inline constexpr emulator::Coordinates<emulator::ReadGridSize> gridDim;
inline constexpr int warpSize = 32;

// --- warp collectives: all 32 lanes take part, as everywhere in ffi/cuda -------------------------------------------

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulator::exchange(mask, value, [=](int self) { return (self & -width) | (lane & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulator::exchange(mask, value, [=](int self) { return self ^ lane_mask; });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  return emulator::exchange(mask, value,
                            [=](int self) { return self < static_cast<int>(delta) ? self : self - delta; });
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const auto lane = emulator::current->lane;
  return emulator::reduce(mask, static_cast<unsigned>(predicate) << lane, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emulator::reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulator::reduce(mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulator::reduce(mask, value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulator::reduce(mask, value, [](T a, T b) { return std::min(a, b); });
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return emulator::match_any(mask, static_cast<uint64_t>(value));
}
inline void __syncwarp() { emulator::sync_warp(); }
inline void __syncthreads() { emulator::barrier(0, emulator::current->warp->block->num_running, true); }
inline int __syncthreads_or(int predicate) {
  return emulator::barrier(0, emulator::current->warp->block->num_running, true, predicate != 0);
}

// --- memory --------------------------------------------------------------------------------------------------------

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
T __ldca(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T value) {
  *p = value;
}
template <typename T>
T atomicAdd(T* p, T value) {
  return emulator::atomic(p, [=](T before) { return before + value; });
}
template <typename T>
T atomicAnd(T* p, T value) {
  return emulator::atomic(p, [=](T before) { return before & value; });
}
template <typename T>
T atomicOr(T* p, T value) {
  return emulator::atomic(p, [=](T before) { return before | value; });
}
template <typename T>
T atomicExch(T* p, T value) {
  return emulator::atomic(p, [=](T) { return value; });
}

// --- arithmetic ----------------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
// The build does not contract products and sums to fused operations. A NaN has the bits that a GPU gives it.
inline float __fmul_rn(float a, float b) {
  const float product = a * b;
  return std::isnan(product) ? __uint_as_float(0x7fffffffu) : product;
}
inline float __fadd_rn(float a, float b) {
  const float sum = a + b;
  return std::isnan(sum) ? __uint_as_float(0x7fffffffu) : sum;
}
// Of the two 16-bit halves of each word: the larger as unsigned numbers, and the smaller as signed numbers.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline uint32_t __vmins2(uint32_t a, uint32_t b) {
  const auto smaller = [](uint32_t x, uint32_t y) {
    return static_cast<uint16_t>(std::min(static_cast<int16_t>(x), static_cast<int16_t>(y)));
  };
  return uint32_t{smaller(a >> 16, b >> 16)} << 16 | smaller(a & 0xffff, b & 0xffff);
}
using std::isfinite;
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return static_cast<std::common_type_t<A, B>>(b) < static_cast<std::common_type_t<A, B>>(a) ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}

// --- launches ------------------------------------------------------------------------------------------------------

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const std::tuple<std::decay_t<Params>...> copies(std::forward<Args>(args)...);
  return emulator::launch(*config, reinterpret_cast<const void*>(kernel),
                          [kernel, copies] { std::apply(kernel, copies); });
}
