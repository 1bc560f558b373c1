// A group of ranks, and launches on all of them. exchange_test.cu runs them on one GPU, or on emulated GPUs.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "check.h"
#include "exchange_checks.h"
#include "exchange_ranks.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/launch.cuh"

namespace {

// The changes that a test makes to the plans of plan.h.
struct PlanOverrides {
  int32_t number;  // the SMs per rank, so few that the blocks of all ranks fit on one GPU; 0 leaves the plan's number
  // The kernels' variant, if `number` is positive or has_one_warp is true. kLowLatency leaves the plan's variant.
  Variant variant;
  // If sums_own is false, the senders of a combine also sum the rows of own tokens. has_one_warp: a row has one warp.
  bool sums_own = true, has_one_warp = false;

  // `casts`: the plan is for a combine that casts. `in_rounds`: the plan is for a round of an operation.
  LaunchPlan adjust(LaunchPlan plan, bool casts = false, bool in_rounds = false) const {
    // Only plan.h chooses the low-latency variant: rows of more tokens may need rail peers, and all_to_all_back must
    // not have it.
    if (number == 0 && (!has_one_warp || !has_few_tokens(num_tokens))) return plan;
    if (!in_rounds && !is_low_latency(variant))
      plan.variant = combine_has(variant, casts) ? variant : Variant::kThroughput;
    // plan.h sets this only for more tokens than the tests have. Here, about half of the cases with a throughput kernel
    // have it.
    plan.senders_enter_first = plan.variant == Variant::kThroughput && num_tokens != 12;
    plan.sums_own &= sums_own;
    if (has_one_warp) plan.log_send_warps = plan.log_receive_warps = 0;
    return plan;
  }
};

// In plan.h, the senders of a dispatch write own rows only with more tokens than the tests have, and after two steps.
// Here, senders write own rows after one step. About half of the throughput plans get small blocks with one warp per
// sent row: a step then has few tokens, so that senders reach later steps even in a small test.
inline LaunchPlan with_own_rows_of_senders(LaunchPlan plan) {
  if (plan.variant != Variant::kThroughput) return plan;
  if (num_tokens % 2 == 0) {
    plan.log_block_warps = 2, plan.log_send_warps = 0;
    plan.log_receive_warps = std::min(plan.log_receive_warps, plan.log_block_warps);
  }
  if (plan.log_send_warps == 0) {
    plan.tokens_with_own_items = WarpGroup::of_senders(plan, 0, 0).num_groups;
  }
  return plan;
}

// The ranks of a group, and launches on all of them.
class Session {
 public:
  Session(int32_t num_ranks, int32_t cast, PlanOverrides blocks, double timeout_seconds = 60.0,
          uint32_t newest_epoch = 0, int32_t max_tokens = num_tokens, Rows shape = {}, int32_t node_size = 0,
          int32_t replicas = 0, int32_t round_tokens = 0)
      : num_ranks_(num_ranks),
        cast_(cast),
        blocks_(blocks),
        config_{num_ranks * experts_per_rank, top_k, max_tokens, kRowBytes, blocks.number, timeout_seconds,
                {devices(num_ranks)}} {
    config_.replicas = replicas;
    if (node_size > 0) span_nodes(node_size);
    if (round_tokens > 0) limit_arena(round_tokens);
    open_group();
    for (const Member& member : group().members()) {
      Control control = initial_control(member.peers.layout.num_slots, newest_epoch);
      for (auto* claimed : {&control.claimed_items, &control.claimed_padding}) {
        std::fill(std::begin(*claimed), std::end(*claimed), uint64_t{newest_epoch} << 32);
      }
      must(cudaMemcpy(member.peers.control, &control, sizeof(control), cudaMemcpyHostToDevice));
    }
    for (int32_t rank = 0; rank < num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank>(num_ranks, rank, shape));
  }

  ~Session() { close_group(); }

  int32_t num_ranks() const { return num_ranks_; }
  // Returns true if the two ranks are in one node. Then each sees the counters of the other.
  bool are_local(size_t rank, size_t other) const {
    return config_.network == nullptr || rank / config_.node_size == other / config_.node_size;
  }
  int32_t cast() const { return cast_; }
  // Sets the Cast of combines and of the backward passes. (Dispatches use cast_.)
  void set_cast_after_dispatch(int32_t cast) {
    for (auto& rank : ranks_) rank->cast_after_dispatch = cast;
  }
  Group& group() { return *group_; }
  const Group& group() const { return *group_; }
  int32_t round_tokens() const { return group().round_tokens(); }
  int32_t num_slots() const { return group().members()[0].peers.layout.num_slots; }
  // Replaces the group by a new one.
  void open_group() {
    close_group();
    group_ = std::make_unique<Group>(config_);
  }
  std::vector<std::unique_ptr<Rank>>& ranks() { return ranks_; }
  void wait() const { synchronize(num_ranks_); }

  // `args` gives a rank's arguments of the operation.
  template <typename Args>
  void whole(Args args, int32_t missing_rank = -1, int32_t stream = 0) {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      if (r != missing_rank) whole_of(r, args, stream);
    }
  }
  // The same on one rank only.
  template <typename Args>
  void whole_of(int32_t r, Args args, int32_t stream = 0) {
    whole_on(r, args, ranks_[r]->streams[stream]);
  }
  template <typename Args>
  void whole_on(int32_t r, Args args, cudaStream_t stream) {
    must(body_of(group().members()[r], args(*ranks_[r])).launch(stream));
  }
  template <typename Args>
  void start(Args args) {
    for (int32_t r = 0; r < num_ranks_; ++r) start_on(r, args);
  }
  template <typename Args>
  void start_on(int32_t r, Args args) {
    const Member& member = group().members()[r];
    const auto call = args(*ranks_[r]);
    member.split_phase->start(call, buffers_of(call), body_of(member, call), ranks_[r]->streams[0]);
  }
  template <typename Args>
  void done(Args args) {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      group().members()[r].split_phase->done(buffers_of(args(*ranks_[r])), ranks_[r]->streams[0]);
    }
  }

  // Later launches on the stream `then` run after all earlier launches on the stream `first`.
  void order_streams(int32_t first, int32_t then) {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      must(cudaSetDevice(device_of(r)));
      cudaEvent_t event;
      must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      must(cudaEventRecord(event, ranks_[r]->streams[first]));
      must(cudaStreamWaitEvent(ranks_[r]->streams[then], event));
      must(cudaEventDestroy(event));
    }
  }

  // Gives all ranks new random inputs.
  void randomize(std::mt19937& random) {
    for (auto& rank : ranks_) rank->randomize(random);
    wait();
  }

  // Runs each operation once and checks its results.
  void run_whole() {
    whole([&](Rank& rank) { return rank.dispatch(cast_); });
    whole([&](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
    whole([&](Rank& rank) { return rank.combine_back(); });
    whole([&](Rank& rank) { return rank.combine(); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    check_results();
  }

  // Runs dispatch and combine as split-phase calls: with another operation between a start and its done, and with two
  // starts in flight. (Results of other operations are those of run_whole().)
  void run_split_phase() {
    for (auto& rank : ranks_) must(cudaMemset(rank->recv.device, 0xff, rank->recv.host.size() * sizeof(float)));
    wait();  // the ranks' streams have no order with the stream that fills memory
    const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(cast_); };
    const auto combine = [&](Rank& rank) { return rank.combine_split(); };
    start(dispatch);
    whole([&](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
    done(dispatch);
    start(combine);
    start(dispatch);
    done(combine);
    done(dispatch);
    check_results();
  }

  // Sends rows with units that look like the sentinel.
  void run_look_like_sentinels(std::mt19937& random) {
    for (auto& rank : ranks_) look_like_sentinels(rank->x.host, random), rank->x.upload();
    wait();
    const int32_t cast_after_dispatch = ranks_[0]->cast_after_dispatch;
    set_cast_after_dispatch(0);
    whole([&](Rank& rank) { return rank.dispatch(0); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    wait();
    set_cast_after_dispatch(cast_after_dispatch);
    expect_no_failure();
    check_bits(ranks_);
  }

  void check_results() {
    wait();
    expect_no_failure();
    const float tolerance = (cast_ ? 0.1f : 3e-6f) * std::max(top_k, 3);  // as many rows are summed
    // A value of E5M2 is off by an eighth at most. Over a network, some sums are cast twice.
    for (auto& rank : ranks_) check_rank(*rank, tolerance, rank->cast_after_dispatch ? 0.26f : 0);
  }
  void expect_no_failure() const {
    const std::optional<FailureRecord> failure = group().failure();
    EXPECT_EQ(failure ? summary(*failure) : "", std::string());
  }

 private:
  static std::vector<int32_t> devices(int32_t num_ranks) {
    std::vector<int32_t> devices;
    for (int32_t rank = 0; rank < num_ranks; ++rank) devices.push_back(device_of(rank));
    return devices;
  }

  void close_group() {
    if (!group_) return;
    group_->close();
    group_->free_arenas();
  }

  // Limits the arena to the rows of `round_tokens` tokens.
  void limit_arena(int32_t round_tokens) {
    const bool has_nodes = config_.network && has_levels(config_.node_size, num_ranks_);
    const int32_t num_sources = num_ranks_ + (has_nodes ? num_ranks_ / config_.node_size : 0);
    const ArenaLayout layout(num_sources, top_k, round_tokens, kRowBytes, kSlotsWithRounds);
    config_.max_arena_bytes = config_.network ? NetworkLayout(layout, num_ranks_).bytes : layout.bytes;
  }

  // Has the group use a network: each rank is a processing element, which has its device's number.
  void span_nodes(int32_t node_size) {
#ifdef JAX_EP_EMULATOR
    config_.network = static_cast<const Network*>(jax_ep_network_table());
    config_.exchange = [](const ProcessHandle&) { return std::vector<ProcessHandle>(); };
    config_.pes = config_.devices;
    config_.node_size = node_size;
#else
    throw std::logic_error("one GPU has no network");
#endif
  }

  SplitPhaseCalls::Body body_of(const Member& member, const BalanceArgs& call) const {
    const Kernels kernels = group().kernels();
    const Peers& peers = member.peers;
    const BalancePlan plan = plan_balance(int64_t{call.num_tokens} * call.top_k,
                                          peers.num_ranks * peers.num_home_experts(), blocks_.number, member.num_sms);
    const auto launch = [&peers, kernels, call, plan](cudaStream_t stream) {
      return kernels.launch_balance(peers, call, plan, stream);
    };
    return {launch, 1};
  }
  SplitPhaseCalls::Body body_of(const Member& member, const ReplicateArgs& call) const {
    const Kernels kernels = group().kernels();
    const Peers& peers = member.peers;
    const CopyPlan plan = plan_replicate(peers.layout.round_tokens, call.clears_slots, blocks_.number, member.num_sms);
    const auto launch = [&peers, kernels, call, plan](cudaStream_t stream) {
      return kernels.launch_replicate(peers, call, ElementType::kFloat32, plan, stream);
    };
    return {launch, plan.num_blocks};
  }
  template <typename Args>
  SplitPhaseCalls::Body body_of(const Member& member, const Args& call) const {
    const Peers& peers = member.peers;
    const int32_t round_tokens = peers.layout.round_tokens;
    const bool in_rounds = call.num_tokens > round_tokens;
    const Kernels kernels = group().kernels();
    const ElementType type = call.row_bytes == kRowBytes ? ElementType::kFloat32 : ElementType::kBFloat16;
    const bool is_done = call.phase == Phase::kDone;  // as the handlers plan it: never with the low-latency variant
    const int32_t num_sms = is_done ? usable_sms_beside_others(blocks_.number, member.num_sms) : blocks_.number;
    const auto adjust = [&](const LaunchPlan& plan, bool casts = false) {
      return is_done ? plan : blocks_.adjust(plan, casts, in_rounds);
    };
    if constexpr (std::is_same_v<Args, DispatchArgs>) {
      const LaunchPlan best =
          adjust(plan_dispatch(planned_tokens(call.num_tokens, round_tokens), num_ranks_, call.top_k,
                               num_chunks(call.num_scales ? kHidden : kRowBytes), num_sms, member.num_sms,
                               call.delivery == Delivery::kCombineBack, call.casts_new_rows()));
      const LaunchPlan plan = kernels.adapt_dispatch_plan(peers, call, with_own_rows_of_senders(best));
      const auto launch = [&peers, kernels, call, type, plan, round_tokens](cudaStream_t stream) {
        return launch_rounds(call, round_tokens, [&](const DispatchArgs& round) {
          return kernels.launch_dispatch(peers, round, type, plan, stream);
        });
      };
      return {launch, plan.num_blocks};
    } else {
      const LaunchPlan best =
          adjust(plan_combine(planned_tokens(call.num_tokens, round_tokens), num_ranks_, call.recv_row ? call.top_k : 0,
                              num_chunks(static_cast<int32_t>(call.row_bytes)), call.units_read(size_of(type)), num_sms,
                              member.num_sms, call.holds_token_once()),
                 call.cast != 0);
      const LaunchPlan plan = kernels.adapt_combine_plan(peers, call, best);
      const auto launch = [&peers, kernels, call, type, plan, round_tokens](cudaStream_t stream) {
        return launch_rounds(call, round_tokens, [&](const CombineArgs& round) {
          return kernels.launch_combine(peers, round, type, plan, stream);
        });
      };
      return {launch, plan.num_blocks};
    }
  }

  const int32_t num_ranks_, cast_;
  const PlanOverrides blocks_;
  GroupConfig config_;
  std::unique_ptr<Group> group_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace
