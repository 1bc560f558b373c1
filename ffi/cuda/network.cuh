// What kernels do for remote ranks. They are compiled twice: for _cuda, without a network, where all ranks are near,
// and for _nvshmem, with one (JAX_EP_NETWORK). What is only called there is in nvshmem/device.cu.
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

// Where a token has, at each rank = lane, an `index` (or -1): its index there when it travels by node. The same for
// local ranks; the token for the rail_peer in each node where it has one; -1 for all others. With a whole warp.
__device__ __forceinline__ int32_t index_by_node(const Nodes& nodes, int32_t index, int32_t token) {
  const int32_t rank = lane_id();
  const uint32_t ranks = __ballot_sync(kAllLanes, index >= 0);
  if (nodes.is_own(rank)) return index;
  return nodes.forwards(rank, ranks) ? token : -1;
}

// Only with a network: stores a word at a remote rank.
__device__ void put_word(uint32_t* word, uint32_t value, int32_t pe);
__device__ void put_word(unsigned long long* word, unsigned long long value, int32_t pe);
// Sends data to a remote rank, then sets the signal there. With one warp.
__device__ void put_with_signal(uint8_t* to, const uint8_t* from, int32_t bytes, unsigned long long* signal,
                                uint32_t value, int32_t pe);
// Whether the signal has come; if it has, so has the data.
__device__ bool has_come(unsigned long long* signal, unsigned long long value);
// Words that are sent from here on arrive behind those that this rank has sent before.
__device__ void order_words();

// Stores a word that carries all its meaning in itself, on any rank: no order with other memory.
template <typename Word>
__device__ __forceinline__ void store_word(const Peers& peers, int32_t rank, Word* word, Word value) {
  if constexpr (kHasNetwork) {
    if (is_remote(peers, rank)) return put_word(word, value, pe_of(peers, rank));
  }
  store_relaxed(word, value);
}

}  // namespace jax_ep
