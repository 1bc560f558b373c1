// The emulator's implementation of ffi/cuda/ptx.cuh, which says what each function does.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/machine.h"

namespace jax_ep {

// --- memory that other blocks, devices or the host see -------------------------------------------------------------

inline void store_release(uint32_t* p, uint32_t v) { emulator::store(p, v, emulator::Order::kRelease); }
inline uint32_t load_acquire(const uint32_t* p) { return emulator::load(p, emulator::Order::kAcquire); }
inline uint32_t load_acquire_gpu(const uint32_t* p) { return emulator::load(p, emulator::Order::kAcquire); }
inline void store_relaxed(uint32_t* p, uint32_t v) { emulator::store(p, v, emulator::Order::kRelaxed); }
inline void store_relaxed(unsigned long long* p, unsigned long long v) {
  emulator::store(p, v, emulator::Order::kRelaxed);
}
template <typename T>
T load_relaxed(const T* p) {
  return emulator::load(p, emulator::Order::kRelaxed);
}
inline void store_unit(void* p, uint4 v) { emulator::store(static_cast<uint4*>(p), v, emulator::Order::kRelaxed); }
inline uint4 load_unit(const void* p) {
  return emulator::load(static_cast<const uint4*>(p), emulator::Order::kRelaxed);
}

template <typename T>
T atomic_cas_relaxed_sys(T* p, T expected, T v) {
  return emulator::atomic(p, [=](T before) { return before == expected ? v : before; });
}
template <typename T>
T atomic_cas_relaxed_gpu(T* p, T expected, T v) {
  return atomic_cas_relaxed_sys(p, expected, v);
}
template <typename T>
T atomic_exchange_relaxed_gpu(T* p, T v) {
  return emulator::atomic(p, [=](T) { return v; });
}
inline uint32_t atomic_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  return emulator::atomic(p, [=](uint32_t before) { return before + v; });
}
inline uint32_t atomic_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
  return emulator::atomic(p, [=](uint32_t before) { return before + v; }, emulator::Order::kAcquireRelease);
}
inline void red_add_relaxed_gpu(unsigned long long* p, unsigned long long v) {
  emulator::atomic(p, [=](unsigned long long before) { return before + v; });
}
inline unsigned long long atomic_add_relaxed_gpu(unsigned long long* p, unsigned long long v) {
  return emulator::atomic(p, [=](unsigned long long before) { return before + v; });
}

// --- copies to shared memory ---------------------------------------------------------------------------------------

// An address in shared memory is its offset from the block's first byte.
inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(shared) - emulator::dynamic_shared());
}
inline uint8_t* at_shared_address(uint32_t address) { return emulator::dynamic_shared() + address; }
inline uint64_t* landed_at_address(uint32_t address) { return reinterpret_cast<uint64_t*>(at_shared_address(address)); }

inline void copy_unit_async(void* shared, const void* p) { emulator::copy_unit_async(shared, p); }
inline void end_copies() { emulator::commit_copies(); }
template <int kLeft>
void await_copies() {
  emulator::await_copies(kLeft);
}

inline void init_landed(uint32_t landed) { emulator::init_landed(landed_at_address(landed)); }
inline void publish_landed() {}
template <bool kEvictsFirst>
inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t landed) {
  emulator::expect_bytes(landed_at_address(landed), bytes);
  emulator::start_bulk_copy(at_shared_address(to), static_cast<const uint8_t*>(from), bytes, landed_at_address(landed));
}
inline void await_landed(uint32_t landed, uint32_t phase) {
  while (!emulator::has_landed(landed_at_address(landed), phase)) emulator::poll_pause();
  // This is an access, too. Other lanes may read what has landed and go on before this lane reads it.
  emulator::maybe_preempt();
}
inline uint4 load_shared_unit(uint32_t from) {
  uint4 v;
  std::memcpy(&v, at_shared_address(from), sizeof(v));
  return v;
}
inline void store_shared_unit(uint32_t to, uint4 v) { std::memcpy(at_shared_address(to), &v, sizeof(v)); }

// --- threads -------------------------------------------------------------------------------------------------------

inline void fence_system() { emulator::fence(); }
inline void compiler_barrier() {}
inline void keep_alive(uint32_t) {}
template <typename T>
T keep(T value) {
  return value;
}
template <typename T>
T* address_in_lane_0(T* p) {
  return p;
}
inline void wait_for_dependencies() {}
inline void named_barrier(int32_t id, int32_t num_threads) { emulator::barrier(id, num_threads, true); }
inline void named_barrier_arrive(int32_t id, int32_t num_threads) { emulator::barrier(id, num_threads, false); }
inline bool named_barrier_or(int32_t id, int32_t num_threads, bool predicate) {
  return emulator::barrier(id, num_threads, true, predicate);
}
inline void poll_pause() { emulator::poll_pause(); }
inline uint64_t globaltimer_ns() { return emulator::now_ns(); }

}  // namespace jax_ep

// A variable of a thread block, and the block's dynamic shared memory.
#define JAX_EP_SHARED(Type, name)   \
  struct name##_tag {};             \
  Type& name = *static_cast<Type*>( \
      ::emulator::shared_variable(&::emulator::shared_tag<name##_tag>, sizeof(Type), alignof(Type)))
#define JAX_EP_DYNAMIC_SHARED(alignment, name) uint8_t* const name = ::emulator::dynamic_shared()
