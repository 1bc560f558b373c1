// All functions that call NVSHMEM on the device. They are in one file, because NVSHMEM's headers are large and define
// inline functions.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "ffi/cuda/network.cuh"

namespace jax_ep {

__device__ void put_word(uint32_t* word, uint32_t value, int32_t pe) { nvshmem_uint32_atomic_set(word, value, pe); }
__device__ void put_word(unsigned long long* word, unsigned long long value, int32_t pe) {
  nvshmemx_signal_op(reinterpret_cast<uint64_t*>(word), value, NVSHMEM_SIGNAL_SET, pe);
}

__device__ void put_with_signal(uint8_t* to, const uint8_t* from, int32_t bytes, unsigned long long* signal,
                                uint32_t value, int32_t pe) {
  nvshmemx_putmem_signal_nbi_warp(to, from, bytes, reinterpret_cast<uint64_t*>(signal), value, NVSHMEM_SIGNAL_SET, pe);
}

__device__ bool signal_arrived(unsigned long long* signal, unsigned long long value) {
  return nvshmem_uint64_test(reinterpret_cast<uint64_t*>(signal), NVSHMEM_CMP_EQ, value) != 0;
}

__device__ void order_words() { nvshmem_fence(); }

}  // namespace jax_ep
