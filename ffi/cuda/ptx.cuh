// All PTX that kernels use, and every access to memory that another block, another rank or the host touches: loads,
// stores and atomics by order and scope, copies to shared memory, barriers, the clock. ffi/emulator/ptx.h implements
// the same functions for tests on CPUs.
//
// Some kernels also use plain CUDA: atomics on shared memory, the cluster barrier of dispatch_layout.cu, and plain
// stores of floor.cu to the memory of peers. CUTLASS has PTX of its own.
#pragma once

#include <cstdint>

#ifdef JAX_EP_EMULATOR
#include "ffi/emulator/ptx.h"
#else

// JAX_EP_SHARED: a variable in a block's static shared memory. JAX_EP_DYNAMIC_SHARED: the block's dynamic shared
// memory, as bytes at `name`.
#define JAX_EP_SHARED(Type, name) __shared__ Type name
#define JAX_EP_DYNAMIC_SHARED(alignment, name) \
  extern __shared__ __align__(alignment)       \
  uint8_t name[]

namespace jax_ep {

// Makes all that this thread has written, or has seen written through a barrier of its block, visible to whoever reads
// the new value with load_acquire, on any device.
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Relaxed accesses have no order with other memory. They are for words that need none, since they carry all their
// information themselves.
__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(unsigned long long* p, unsigned long long v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Stores and loads a unit of 16 bytes as a whole: a reader never sees a part of it. Relaxed: no order with other
// memory.
__device__ __forceinline__ void store_unit(void* p, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 unit;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 unit, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], unit;\n"
      "}" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ uint4 load_unit(const void* p) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 unit;\n"
      "ld.relaxed.sys.global.b128 unit, [%4];\n"
      "mov.b128 {low, high}, unit;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts an asynchronous copy of a unit to shared memory. Only this thread may read it, after await_copies().
__device__ __forceinline__ void copy_unit_async(void* shared, const void* p) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(p) : "memory");
}
// end_copies commits a group of copies, which may be empty. await_copies waits for all groups but the last `kLeft`.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Bulk copies (TMA) to shared memory, and the mbarriers (`landed`) that count their bytes. A phase of an mbarrier ends
// when all expected bytes have landed. `phase` is 0 and 1 alternately. All arguments except `from` are addresses in
// shared memory.
__device__ __forceinline__ void init_landed(uint32_t landed) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(landed) : "memory");
}
// Makes the mbarriers that this thread has initialized visible to bulk copies.
__device__ __forceinline__ void publish_landed() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Starts a bulk copy. `from` and `bytes` are multiples of 16. No thread may still read the former contents of `to`.
// With kEvictsFirst, the L2 cache evicts the data first, since they are read once.
template <bool kEvictsFirst>
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t landed) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(landed), "r"(bytes) : "memory");
  if constexpr (kEvictsFirst) {
    asm volatile(
        "{\n"
        ".reg .b64 once;\n"
        "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;\n"
        "}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(landed)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(landed)
                 : "memory");
  }
}
__device__ __forceinline__ bool has_landed(uint32_t landed, uint32_t phase) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}"
      : "=r"(is_over)
      : "r"(landed), "r"(phase)
      : "memory");
  return is_over;
}
// Waits until a phase has ended. A whole warp calls it.
__device__ __forceinline__ void await_landed(uint32_t landed, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n"
      "}" ::"r"(landed),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ uint4 load_shared_unit(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ __forceinline__ void store_shared_unit(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// Bulk copies from shared memory. `to` and `bytes` are multiples of 16. After await_bulk_reads(), the shared memory
// that this thread has copied from may be overwritten. After await_bulk_stores(), the copies have also been written.
__device__ __forceinline__ void copy_bulk_out(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void await_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Adds `v` and returns the former value.
__device__ __forceinline__ uint32_t atomic_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// Adds `v` and returns the former value. The last caller sees all writes that the other callers made before, or saw
// through a barrier of their block. So does a thread that loads the sum with load_acquire_gpu.
__device__ __forceinline__ uint32_t atomic_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}

// Stores `v` if the word is `expected`, and returns the former value. The system scope is for a word that other devices
// write, too.
__device__ __forceinline__ uint32_t atomic_cas_relaxed_sys(uint32_t* p, uint32_t expected, uint32_t v) {
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(p), "r"(expected), "r"(v)
               : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long atomic_cas_relaxed_sys(unsigned long long* p, unsigned long long expected,
                                                                     unsigned long long v) {
  unsigned long long before;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(expected), "l"(v)
               : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long atomic_cas_relaxed_gpu(unsigned long long* p, unsigned long long expected,
                                                                     unsigned long long v) {
  unsigned long long before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(expected), "l"(v)
               : "memory");
  return before;
}
__device__ __forceinline__ uint32_t atomic_exchange_relaxed_gpu(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long atomic_add_relaxed_gpu(unsigned long long* p, unsigned long long v) {
  unsigned long long before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(v) : "memory");
  return before;
}

// Returns `p` in lane 0, and another address in the other lanes. Only lane 0 may use the result. This hides from the
// compiler that all lanes have the same address. Otherwise, for an atomic addition, it first adds up the values of all
// lanes, which is slow if only one lane adds.
template <typename T>
__device__ __forceinline__ T* address_in_lane_0(T* p) {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return p + lane;
}

// Adds `v`. The thread waits for no result.
__device__ __forceinline__ void red_add_relaxed_gpu(unsigned long long* p, unsigned long long v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Orders this thread's earlier memory accesses before its later ones, for all devices and the host.
__device__ __forceinline__ void fence_system() { __threadfence_system(); }

// Keeps the compiler from moving memory accesses across this point.
__device__ __forceinline__ void compiler_barrier() { asm volatile("" ::: "memory"); }

// Makes the compiler load a value that the program does not use.
__device__ __forceinline__ void keep_alive(uint32_t v) {
  asm volatile("{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0x9e3779b9;\n@never nanosleep.u32 0;\n}" ::"r"(v));
}

// Makes the compiler keep a value in registers instead of computing it again where it is used. The compiler no longer
// knows in which address space a pointer is.
__device__ __forceinline__ const uint8_t* keep(const uint8_t* p) {
  asm volatile("" : "+l"(p));
  return p;
}
__device__ __forceinline__ uint32_t keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ uint4 keep(uint4 unit) {
  asm volatile("" : "+r"(unit.x), "+r"(unit.y), "+r"(unit.z), "+r"(unit.w));
  return unit;
}

// Waits for the kernels that this kernel depends on. XLA (jax 0.11) lets a kernel in a CUDA graph start when those are
// about to end. Before this call, the kernel must not read its operands or write its results.
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A barrier of `num_threads` threads (whole warps) of a block. Id 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(int32_t id, int32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Arrives at a barrier, and does not wait for the other threads.
__device__ __forceinline__ void named_barrier_arrive(int32_t id, int32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// A barrier that returns true if the predicate holds for any thread.
__device__ __forceinline__ bool named_barrier_or(int32_t id, int32_t num_threads, bool predicate) {
  int32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(num_threads), "r"(static_cast<int32_t>(predicate))
      : "memory");
  return any != 0;
}

// Every polling loop calls it, except in floor.cu, which is not emulated. On a GPU, it does nothing; the emulator runs
// other threads between two polls.
__device__ __forceinline__ void poll_pause() {}

__device__ __forceinline__ uint64_t globaltimer_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

}  // namespace jax_ep

#endif
