// The roles of the blocks in the low-latency variant. A block's first role is its index. So the block can load its
// first rows while it enters, and saves a round trip to memory.
//
// CUDA may start the blocks of a launch in any order, and few at a time. A receiver that waits for rows keeps its SM,
// and could starve a sender of its own launch. So a receiver waits for rows only when all senders have entered:
//   - A sender that has entered counts itself in Control::role_counts (count_sender).
//   - A receiver waits until all senders are counted (await_senders). If this takes long, the receiver gives its role
//     away and leaves, so that a sender can have its SM.
//   - The sender that is counted last learns how many roles have been given away (learn_roles_to_take). After it has
//     sent its rows, it takes these roles, one after another (take_given_role).
//
// In a combine, a block may have two roles: it sends and then receives. Its control warp waits for the senders while
// its workers send. If the control warp gives the receiver's role away, the block leaves only after its workers have
// sent.
#pragma once

#include "ffi/cuda/wait.cuh"

namespace jax_ep {

struct Roles : Waiting {
  // A word of Control::role_counts: the number of roles that receivers have given away, and the number of senders that
  // have entered. No receiver gives its role away when all senders have entered.
  static constexpr unsigned long long kOneGivenAway = 1ull << 32;
  __device__ static int32_t num_senders_entered(unsigned long long word) { return static_cast<int32_t>(word); }
  __device__ static int32_t num_given_away(unsigned long long word) { return static_cast<int32_t>(word >> 32); }
  __device__ unsigned long long* role_counts() const { return &own_control().role_counts[state.epoch & 1]; }

  // Blocks that have not entered after this time may have no free SM.
  static constexpr uint64_t kBlocksEnterNs = 20'000;

  // Counts this sender, which has entered: it has an SM, and waits for no rows, so receivers may wait for its rows. The
  // first lane of the control warp calls it after enter(). The caller passes the result to learn_roles_to_take() after
  // the barrier at entry, so that the barrier does not wait for the atomic addition.
  __device__ __forceinline__ unsigned long long count_sender() const {
    return state.entered ? atomic_add_relaxed_gpu(address_in_lane_0(role_counts()), 1ull) : 0;
  }
  // If this sender was counted last: learns how many roles it must take. `counts_before`: from count_sender().
  __device__ __forceinline__ void learn_roles_to_take(unsigned long long counts_before, int32_t num_senders) const {
    if (state.entered && num_senders_entered(counts_before) + 1 == num_senders)
      state.roles_to_take = num_given_away(counts_before);
  }

  // Waits until all senders have entered, or the operation has failed. If the senders have not entered after
  // kBlocksEnterNs, gives the receiver's role away, and returns false. One thread of the receiver calls it.
  __device__ __noinline__ static bool await_senders(State& state, int32_t num_senders) {
    const auto op = operation_of<Roles>(state);
    const uint64_t start_ns = globaltimer_ns();
    while (!state.failed) {
      const unsigned long long word = load_relaxed(op.role_counts());
      if (num_senders_entered(word) == num_senders) break;
      poll_pause();
      if (globaltimer_ns() - start_ns < kBlocksEnterNs) continue;
      if (atomic_cas_relaxed_gpu(op.role_counts(), word, word + kOneGivenAway) != word) continue;
      // The line above counts the role as given away, and the next line records it. Nothing may wait or return between
      // them: next_given_role() waits for the record without a time-out.
      atomic_exchange_relaxed_gpu(&op.own_control().given_away[state.role], 1u);
      return false;
    }
    return true;
  }

  // Returns a role that a receiver has given away, or kNoRole. All threads of a sender call it, when they have no other
  // role left.
  __device__ __forceinline__ int32_t take_given_role() const {
    __syncthreads();  // roles_to_take has been written, and the block's memory is free again
    if (state.roles_to_take == 0) return kNoRole;
    __syncthreads();
    if (threadIdx.x >= blockDim.x - 32) {  // the control warp
      const int32_t role = __shfl_sync(kAllLanes, lane_id() == 0 ? next_given_role(state) : 0, 0);
      if (lane_id() == 0) --state.roles_to_take, state.role = role;
      __syncwarp();
    }
    __syncthreads();
    return state.role;
  }

  // Takes a role from given_away. If none is recorded yet, waits: a receiver has counted its role as given away, and
  // records it soon. The search begins behind the block's former role, because the roles of neighbours are often given
  // away together.
  __device__ __noinline__ static int32_t next_given_role(State& state) {
    uint32_t* const given_away = operation_of<Roles>(state).own_control().given_away;
    const uint32_t former = state.role;
    for (uint32_t role = former;;) {
      if (++role == gridDim.x) role = 0;
      if (load_relaxed(&given_away[role]) != 0) {
        store_relaxed(&given_away[role], 0);
        return static_cast<int32_t>(role);
      }
      if (role == former) poll_pause();
    }
  }
};

}  // namespace jax_ep
