// What kernels do for remote ranks. The kernels are compiled twice: for _cuda without a network, where all ranks are
// local, and for _nvshmem with a network (JAX_EP_NETWORK). nvshmem/device.cu defines the functions that are called only
// with a network.
#pragma once

#include "ffi/cuda/network.h"
#include "ffi/cuda/ptx.cuh"
#include "ffi/cuda/warp.cuh"

namespace jax_ep {

#ifdef JAX_EP_NETWORK
inline constexpr bool kHasNetwork = true;
#else
inline constexpr bool kHasNetwork = false;
#endif

__device__ __forceinline__ const NetworkTable& network_of(const Peers& peers) {
  return *static_cast<const NetworkTable*>(peers.table);
}
__device__ __forceinline__ int32_t pe_of(const Peers& peers, int32_t rank) { return network_of(peers).pe[rank]; }
__device__ __forceinline__ bool is_remote(const Peers& peers, int32_t rank) {
  return kHasNetwork && pe_of(peers, rank) != kLocal;
}

__device__ __forceinline__ const Nodes& nodes_of(const Peers& peers) { return network_of(peers).nodes; }

// Only with a network: stores a word at a remote rank.
__device__ void put_word(uint32_t* word, uint32_t value, int32_t pe);
__device__ void put_word(unsigned long long* word, unsigned long long value, int32_t pe);
// Sends data to a remote rank, then sets the signal there. One warp calls it.
__device__ void put_with_signal(uint8_t* to, const uint8_t* from, int32_t bytes, unsigned long long* signal,
                                uint32_t value, int32_t pe);
// True if the signal has arrived; then the data has arrived, too.
__device__ bool signal_arrived(unsigned long long* signal, unsigned long long value);
// Orders words: words sent after this call arrive after the words that this rank has sent before it.
__device__ void order_words();

// Stores a word at any rank. It has no order with other memory.
template <typename Word>
__device__ __forceinline__ void store_word(const Peers& peers, int32_t rank, Word* word, Word value) {
  if constexpr (kHasNetwork) {
    if (is_remote(peers, rank)) return put_word(word, value, pe_of(peers, rank));
  }
  store_relaxed(word, value);
}

}  // namespace jax_ep
