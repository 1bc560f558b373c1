// Stands in for NVSHMEM's header: the functions that ffi/cuda calls.
#pragma once

#include "ffi/emulator/machine.h"
#include "ffi/emulator/network.h"

enum : int { NVSHMEM_SIGNAL_SET = 9, NVSHMEM_CMP_EQ = 0 };

// --- what the host calls -------------------------------------------------------------------------------------------

inline void* nvshmem_calloc(size_t count, size_t bytes) {
  return emulator::allocate_symmetric(static_cast<int64_t>(count * bytes));
}
inline void nvshmem_free(void* memory) { emulator::free_symmetric(static_cast<uint8_t*>(memory)); }
inline void* nvshmem_ptr(const void* memory, int pe) { return emulator::symmetric_address(memory, pe); }

// --- what kernels call ---------------------------------------------------------------------------------------------

inline void nvshmem_uint32_atomic_set(uint32_t* word, uint32_t value, int pe) {
  emulator::put_word({word, value, sizeof(value)}, pe);
}
inline void nvshmemx_signal_op(uint64_t* signal, uint64_t value, int, int pe) {
  emulator::put_word({signal, value, sizeof(value)}, pe);
}
// All lanes call it, and the first one sends. The data has the stores of another lane only if that lane has
// synchronized with the first one before.
inline void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value,
                                            int, int pe) {
  if (emulator::current->lane != 0) return;
  emulator::put(to, from, static_cast<uint32_t>(bytes), {signal, value, sizeof(value)}, pe);
}
inline int nvshmem_uint64_test(uint64_t* signal, int, uint64_t value) {
  return emulator::load(signal, emulator::Order::kAcquire) == value;
}
inline void nvshmem_fence() { emulator::fence_puts(); }
