#include "ffi/cuda/copy_lists.cuh"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/replicate.h"
#include "ffi/cuda/row_ring.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {
namespace {

struct ReplicateShared {
  State state;
  CopyCounts counts;
};

// The steps of both directions. A row is a part of an expert, as long as the payload of an arena row. In this file, a
// slot is a replica slot.
struct Replicate {
  const Peers& peers;
  const ReplicateArgs& args;
  const Operation& op;
  const CopyLists& lists;
  const RowRing ring;

  __device__ int32_t row_bytes() const { return peers.layout.max_payload; }
  __device__ int32_t rows_per_expert() const {
    return static_cast<int32_t>((args.expert_bytes + row_bytes() - 1) / row_bytes());
  }

  // A row of an expert.
  struct Row {
    int32_t exported_number;  // the expert's number among the exported experts of its home rank
    int64_t offset;
    int32_t bytes;
  };
  __device__ Row row_at(int32_t track, int32_t n) const {
    const int64_t index = ring.index(track, n);
    const auto exported_number = static_cast<int32_t>(index / rows_per_expert());
    const int64_t offset = (index - int64_t{exported_number} * rows_per_expert()) * row_bytes();
    return {exported_number, offset, static_cast<int32_t>(min(int64_t{row_bytes()}, args.expert_bytes - offset))};
  }
  __device__ uint8_t* expert(int32_t local) const { return args.home + local * args.expert_bytes; }
  __device__ uint8_t* copy_in(int32_t slot) const { return args.copies + slot * args.expert_bytes; }

  __device__ int32_t rows_exported(int32_t track) const {
    return ring.rows_of_track(track, int64_t{lists.counts.num_exported} * rows_per_expert());
  }
  __device__ int32_t rows_of_source(int32_t track) const {
    return ring.rows_of_track(track, int64_t{lists.counts.num_exported_by_source} * rows_per_expert());
  }

  // Copies the rows of a track: sends the rows of this rank's experts to their receivers, and writes the rows that come
  // from the source to the slots here.
  __device__ void copy(int32_t track) const {
    int32_t first_row = -1;
    const int32_t num_taken = rows_of_source(track);
    const auto send = [&](int32_t n) {
      const Row row = row_at(track, n);
      const uint32_t ranks = lists.receivers[row.exported_number];
      ring.await_credits(track, n, ranks, first_row);
      if (op.warp_has_failed()) return;
      ring.send(track, n, ranks, expert(lists.exported[row.exported_number]) + row.offset, row.bytes);
    };
    const auto take = [&](int32_t n) {
      const Row row = row_at(track, n);
      const int32_t slot = lists.slot_here[row.exported_number];
      if (slot >= 0) {
        uint8_t* const to = copy_in(slot) + row.offset;
        for (int32_t chunk = 0; chunk < num_chunks(row.bytes); chunk += RowRing::kBatch) {
          uint4 units[RowRing::kBatch];
          ring.take(track, n, lists.counts.source, chunk, row.bytes, units);
#pragma unroll
          for (int i = 0; i < RowRing::kBatch; ++i) {
            const int32_t at = RowRing::unit_in_row(chunk + i);
            if (at < row.bytes) *reinterpret_cast<uint4*>(to + at) = units[i];
          }
        }
      }
      if (num_taken > ring.depth) ring.give_credit(track, n, 1u << lists.counts.source);
    };
    ring.run_track(rows_exported(track), num_taken, send, take);
  }

  // The rows of one track: sends the gradients in this rank's slots home to the source, and adds the gradients that the
  // receivers of this rank's experts send to the gradients here. The sums are in float32, in the order of slots; for
  // equal slots, in the order of ranks.
  template <typename X>
  __device__ void add(int32_t track) const {
    int32_t first_row = -1;
    const int32_t num_taken = rows_exported(track);
    const auto send = [&](int32_t n) {
      const Row row = row_at(track, n);
      const int32_t slot = lists.slot_here[row.exported_number];
      const uint32_t ranks = slot >= 0 ? 1u << lists.counts.source : 0;
      ring.await_credits(track, n, ranks, first_row);
      if (ranks == 0 || op.warp_has_failed()) return;
      ring.send(track, n, ranks, copy_in(slot) + row.offset, row.bytes);
    };
    const auto take = [&](int32_t n) {
      const Row row = row_at(track, n);
      uint8_t* const at = expert(lists.exported[row.exported_number]) + row.offset;
      for (int32_t chunk = 0; chunk < num_chunks(row.bytes); chunk += RowRing::kBatch) {
        add_batch<X>(track, n, row, chunk, at);
      }
      if (num_taken > ring.depth) ring.give_credit(track, n, lists.counts.all_receivers);
    };
    ring.run_track(rows_of_source(track), num_taken, send, take);
  }

  template <typename X>
  __device__ void add_batch(int32_t track, int32_t n, const Row& row, int32_t chunk, uint8_t* home) const {
    constexpr int kSize = Vector<X>::kSize;
    float sum[RowRing::kBatch][kSize] = {};
#pragma unroll
    for (int i = 0; i < RowRing::kBatch; ++i) {
      const int32_t at = RowRing::unit_in_row(chunk + i);
      Vector<X> values;
      if (at >= row.bytes) continue;
      values.bits = *reinterpret_cast<const uint4*>(home + at);
      to_floats(values, sum[i]);
    }
    for (uint32_t left = lists.receivers[row.exported_number]; left != 0;) {
      const int32_t rank = next_receiver(row.exported_number, left);
      left &= ~(1u << rank);
      uint4 units[RowRing::kBatch];
      ring.take(track, n, rank, chunk, row.bytes, units);
#pragma unroll
      for (int i = 0; i < RowRing::kBatch; ++i) {
        Vector<X> values;
        values.bits = units[i];
        float terms[kSize];
        to_floats(values, terms);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum[i][e] += terms[e];
      }
    }
#pragma unroll
    for (int i = 0; i < RowRing::kBatch; ++i) {
      const int32_t at = RowRing::unit_in_row(chunk + i);
      if (at >= row.bytes) continue;
      Vector<X> values;
#pragma unroll
      for (int e = 0; e < kSize; ++e) values.element[e] = from_float<X>(sum[i][e]);
      *reinterpret_cast<uint4*>(home + at) = values.bits;
    }
  }

  // The rank in `left` whose copy is in the lowest slot; of several, the lowest rank.
  __device__ int32_t next_receiver(int32_t exported_number, uint32_t left) const {
    const bool is_left = left >> lane_id() & 1;
    const int32_t slot = is_left ? lists.slot_of(exported_number, lane_id()) : INT32_MAX;
    const int32_t lowest = __reduce_min_sync(kAllLanes, slot);
    return __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_left && slot == lowest))) - 1;
  }

  // Whether this rank sends rows or takes some.
  __device__ bool has_rows() const { return lists.counts.num_exported > 0 || lists.counts.num_exported_by_source > 0; }

  // The parts of slots that warps claim, to zero those without a copy.
  static constexpr int64_t kPartBytes = 64 * 1024;
  __device__ int64_t parts_per_slot() const { return (args.expert_bytes + kPartBytes - 1) / kPartBytes; }
  __device__ int64_t num_parts() const { return args.clears_slots ? peers.replicas * parts_per_slot() : 0; }

  __device__ void clear_part(int64_t part) const {
    const auto slot = static_cast<int32_t>(part / parts_per_slot());
    if (args.slots[peers.rank * peers.replicas + slot] >= 0) return;
    const int64_t begin = (part - slot * parts_per_slot()) * kPartBytes;
    const int64_t end = min(begin + kPartBytes, args.expert_bytes);
    for (int64_t at = begin + lane_id() * kUnitBytes; at < end; at += 32 * kUnitBytes) {
      *reinterpret_cast<uint4*>(copy_in(slot) + at) = uint4{};
    }
  }

  // The same for a rank without rows: all threads share a slot, and claim nothing. Claims take microseconds.
  __device__ void clear_slots() const {
    if (!args.clears_slots) return;
    const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kUnitBytes;
    const int64_t step = int64_t{gridDim.x} * blockDim.x * kUnitBytes;
    for (int32_t slot = 0; slot < peers.replicas; ++slot) {
      if (args.slots[peers.rank * peers.replicas + slot] >= 0) continue;
      for (int64_t at = first; at < args.expert_bytes; at += step) {
        *reinterpret_cast<uint4*>(copy_in(slot) + at) = uint4{};
      }
    }
  }

  // Poisons the results of a failed operation: the copies, or all gradients, become NaN.
  __device__ void poison() const {
    const bool is_back = args.op == OpKind::kReplicateBack;
    const int64_t num_experts = is_back ? peers.num_home_experts() : peers.replicas;
    fill_bytes(is_back ? args.home : args.copies, num_experts * args.expert_bytes, 0xff);
  }
};

// kBack: the gradients of copies travel home. X: the type of elements, for the backward pass.
template <bool kBack, typename X>
__global__ void __launch_bounds__(kCopyWarps * 32, 1)
    replicate_kernel(const __grid_constant__ Peers peers, const __grid_constant__ ReplicateArgs args,
                     const __grid_constant__ CopyPlan plan) {
  JAX_EP_DYNAMIC_SHARED(16, scratch);
  JAX_EP_SHARED(ReplicateShared, shared);
  const Operation op = {peers, args, kBack ? args.home : args.copies, shared.state, static_cast<int32_t>(blockDim.x)};
  const CopyLists lists(op, args, shared.counts, reinterpret_cast<int32_t*>(scratch));
  const Replicate replicate = {peers, args, op, lists, RowRing(op, plan)};
  wait_for_dependencies();
  op.stamp(Stamp::kBegun);
  if (op.is_control_warp()) op.enter([](int32_t) { return true; });
  __syncthreads();  // the block has entered
  if (shared.state.role == 0) {
    if (threadIdx.x < peers.num_ranks && !op.state.failed) op.notify(threadIdx.x);
    op.tell_former_finished();
  }
  lists.build();
  op.stamp(Stamp::kRouted);
  if (!replicate.has_rows()) {
    replicate.clear_slots();
  } else if (!op.warp_has_failed()) {
    if (lane_id() == 0) op.open_claims(&Control::claimed_items, 0);
    while (true) {  // a warp claims tracks, and then parts of slots to clear
      const int64_t claimed = __shfl_sync(kAllLanes, lane_id() == 0 ? op.claim(&Control::claimed_items) : 0, 0),
                    part = claimed - plan.num_tracks;
      if (part >= replicate.num_parts() || op.warp_has_failed()) break;
      const auto track = static_cast<int32_t>(claimed);
      if (part >= 0) {
        replicate.clear_part(part);
      } else if constexpr (kBack) {
        replicate.template add<X>(track);
      } else {
        replicate.copy(track);
      }
    }
  }
  if (shared.state.role == 0 && op.is_control_warp()) Operation::wait_peers(shared.state);
  op.end([&] { replicate.poison(); });
}

using Kernel = void (*)(Peers, ReplicateArgs, CopyPlan);

Kernel kernel_of(OpKind op, ElementType type) {
  if (op == OpKind::kReplicate) return replicate_kernel<false, float>;
  return with_element_type(type, [](auto element) -> Kernel { return replicate_kernel<true, decltype(element)>; });
}

int32_t scratch_bytes(int32_t num_home_experts, int32_t num_ranks) {
  return static_cast<int32_t>(align_up(4 * CopyLists::words(num_home_experts, num_ranks), 16));
}

}  // namespace

cudaError_t launch_replicate(const Peers& peers, const ReplicateArgs& args, ElementType type, const CopyPlan& plan,
                             cudaStream_t stream) {
  if (peers.num_ranks > kMaxLocalRanks) return cudaErrorInvalidConfiguration;  // a lane per rank
  const int32_t scratch = scratch_bytes(peers.num_home_experts(), peers.num_ranks);
  return launch(kernel_of(args.op, type), {plan.num_blocks, kCopyWarps * 32, scratch}, stream, peers, args, plan);
}

cudaError_t load_replicate() {
  cudaError_t status = load_kernel(kernel_of(OpKind::kReplicate, {}), scratch_bytes(kMaxBalancedExperts, 1));
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    if (status != cudaSuccess) break;
    status = load_kernel(kernel_of(OpKind::kReplicateBack, type), scratch_bytes(kMaxBalancedExperts, 1));
  }
  return status;
}

}  // namespace jax_ep
