#include "ffi/plan.h"

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "check.h"
#include "ffi/arena_size.h"
#include "ffi/plan_balance.h"

using namespace jax_ep;

constexpr int32_t kDeviceSms = 132;  // of an H100 SXM or H200

// Plans for a device of kDeviceSms.
LaunchPlan plan_dispatch(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks, int32_t num_sms,
                         bool is_combine_back) {
  return plan_dispatch(num_tokens, num_ranks, top_k, num_chunks, num_sms, kDeviceSms, is_combine_back);
}
LaunchPlan plan_combine(int64_t num_tokens, int32_t num_ranks, int32_t top_k, int32_t num_chunks, int32_t num_sms,
                        int32_t units_read = 1) {
  return plan_combine(num_tokens, num_ranks, top_k, num_chunks, units_read, num_sms, kDeviceSms);
}

// Checks that each warp group has each of its warps exactly once. Warps that are left over are in no group.
void expect_whole_warp_groups(const LaunchPlan& plan, int32_t num_blocks, int32_t log_warps, bool by_block) {
  const int32_t num_groups = WarpGroup(plan, 0, num_blocks, 0, log_warps, by_block).num_groups;
  EXPECT_EQ(num_groups >= 1, true);
  std::vector<char> taken(static_cast<size_t>(num_groups) << log_warps);
  for (int32_t block = 0; block < num_blocks; ++block) {
    for (int32_t warp = 0; warp < plan.block_warps(); ++warp) {
      const WarpGroup warp_group(plan, block, num_blocks, warp, log_warps, by_block);
      if (warp_group.index < num_groups) ++taken.at((size_t(warp_group.index) << log_warps) + warp_group.warp);
    }
  }
  EXPECT_EQ(static_cast<size_t>(std::count(taken.begin(), taken.end(), 1)), taken.size());
}

void expect_valid(const LaunchPlan& plan, int32_t num_sms, int32_t device_sms, bool is_combine) {
  const int32_t most_sms = num_sms == 0 || num_sms > device_sms ? device_sms : num_sms;
  const bool may_share_blocks = is_combine && is_low_latency(plan.variant);  // a block may have both roles
  EXPECT_EQ(plan.num_blocks <= (may_share_blocks ? most_sms : most_sms * kMaxBlockWarps / plan.block_warps()), true);
  EXPECT_EQ(plan.block_warps() <= most_block_warps(plan.variant), true);
  EXPECT_EQ(plan.num_senders >= 1 && plan.num_receivers() >= 1, true);
  if (may_share_blocks && plan.num_blocks == most_sms) {
    EXPECT_EQ(plan.first_receiver >= 0 && plan.first_receiver <= plan.num_senders, true);
  } else if (plan.num_blocks > 1) {
    EXPECT_EQ(plan.first_receiver, plan.num_senders);
  }
  EXPECT_EQ(is_combine ? plan.is_possible(Phase::kWhole) : plan.is_possible_dispatch(Phase::kWhole), true);
  std::set<int32_t> senders, receivers;
  for (int32_t block = 0; block < plan.num_senders; ++block) senders.insert(plan.row_sender(block));
  for (int32_t block = plan.first_receiver; block < plan.num_blocks; ++block) {
    receivers.insert(plan.row_receiver(block));
  }
  // A block that moves no rows computes its warp groups, too.
  for (int32_t block = plan.first_receiver; block < plan.num_blocks; ++block) {
    const WarpGroup warp_group = WarpGroup::of_receivers(plan, block, 0);
    EXPECT_EQ(warp_group.index >= 0, plan.row_receiver(block) >= 0);
  }
  for (int32_t i = 0; i < plan.row_senders(); ++i) EXPECT_EQ(senders.count(i), size_t{1});
  for (int32_t i = 0; i < plan.row_receivers(); ++i) EXPECT_EQ(receivers.count(i), size_t{1});
  for (bool by_block : {false, true}) {
    expect_whole_warp_groups(plan, plan.row_senders(), plan.log_send_warps, by_block);
    expect_whole_warp_groups(plan, plan.row_receivers(), plan.log_receive_warps, by_block);
  }
}

void test_plans(int32_t device_sms, const std::vector<int32_t>& choices_of_num_sms) {
  for (int64_t tokens : {0, 1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 132, 512, 1024, 2048, 4096, 8192}) {
    for (int32_t ranks : {1, 2, 4, 8, 32}) {
      for (int32_t num_sms : choices_of_num_sms) {
        for (int32_t chunks : {1, 4, 8, 14, 28, 32, 100}) {
          for (int32_t top_k : {1, 8}) {
            for (bool is_combine_back : {false, true}) {
              const LaunchPlan plan = plan_dispatch(tokens, ranks, top_k, chunks, num_sms, device_sms, is_combine_back);
              expect_valid(plan, num_sms, device_sms, false);
              if (!is_combine_back && is_low_latency(plan.variant)) continue;
              EXPECT_EQ(plan.log_receive_warps <= plan.log_block_warps, true);
            }
            const LaunchPlan casts = plan_dispatch(tokens, ranks, top_k, chunks, num_sms, device_sms, false, true);
            expect_valid(casts, num_sms, device_sms, false);
            EXPECT_EQ(casts.is_possible_dispatch(Phase::kWhole), true);
            EXPECT_EQ(over_network(casts, !has_few_tokens(tokens)).is_possible_dispatch(Phase::kWhole), true);
          }
          for (int32_t top_k : {0, 1, 2, 8}) {
            for (int32_t units_read : {1, 2, 4}) {
              const LaunchPlan plan = plan_combine(tokens, ranks, top_k, chunks, units_read, num_sms, device_sms);
              expect_valid(plan, num_sms, device_sms, true);
              if (units_read == 1) continue;
              const int32_t most = log2_ceil(static_cast<int32_t>(divide_up(chunks, units_read)));  // a warp per chunk
              EXPECT_EQ(plan.log_send_warps <= most && plan.log_receive_warps <= most, true);
            }
          }
        }
      }
    }
  }
}

// One block has both roles, except in a low-latency dispatch.
void test_plans_of_one_block() {
  LaunchPlan plan = plan_dispatch(4096, 2, 8, 28, 1, false);
  EXPECT_EQ(plan.num_blocks, 1);
  EXPECT_EQ(plan.is_possible_dispatch(Phase::kWhole), true);
  plan.variant = Variant::kLowLatency;
  EXPECT_EQ(plan.is_possible_dispatch(Phase::kWhole), false);
  EXPECT_EQ(plan.is_possible(Phase::kWhole), true);
  EXPECT_EQ(plan_dispatch(8, 2, 8, 28, 0, false).is_possible_dispatch(Phase::kDone), false);
  LaunchPlan combine = plan_combine(8, 2, 8, 28, 0);
  EXPECT_EQ(combine.is_possible(Phase::kDone), false);
  combine.num_blocks = kMaxLowLatencyBlocks + 1;
  EXPECT_EQ(combine.is_possible(Phase::kWhole), false);
  EXPECT_EQ(plan_combine(32, 32, 8, 28, 1, 0, 1000).num_blocks, kMaxLowLatencyBlocks);
}

// In a low-latency combine, the last senders also receive, if the two roles need more blocks than there are SMs.
void test_blocks_with_both_roles() {
  const LaunchPlan separate = plan_combine(4, 4, 8, 28, 0), shared = plan_combine(8, 4, 8, 28, 0);
  EXPECT_EQ(separate.first_receiver, separate.num_senders);
  EXPECT_EQ(shared.first_receiver, kDeviceSms - shared.num_receivers());
  EXPECT_EQ(shared.num_senders, 129);
  EXPECT_EQ(shared.num_receivers(), 33);
  EXPECT_EQ(plan_combine(32, 4, 8, 28, 1, 0, 114).first_receiver, 0);
  const LaunchPlan one = plan_combine(8, 4, 8, 28, 1, 0, 1);
  EXPECT_EQ(one.num_senders == 1 && one.first_receiver == 0 && one.num_blocks == 1, true);
}

// With few SMs, as emulated devices have, for each number of ranks and of experts per token.
void test_plans_on_few_sms() {
  for (int32_t device_sms : {1, 2, 4}) {
    for (int64_t tokens = 1; tokens <= 4096; tokens += 1 + tokens / 2) {
      for (int32_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
        for (int32_t top_k = 0; top_k <= kMaxTopK; ++top_k) {
          for (int32_t num_sms : {0, 3}) {
            for (bool is_combine_back : {false, true}) {
              expect_valid(plan_dispatch(tokens, ranks, top_k, 3, num_sms, device_sms, is_combine_back), num_sms,
                           device_sms, false);
            }
            for (int32_t units_read : {1, 2}) {
              expect_valid(plan_combine(tokens, ranks, top_k, 28, units_read, num_sms, device_sms), num_sms, device_sms,
                           true);
            }
          }
        }
      }
    }
  }
}

// A launch never takes more SMs than the device has, even if the user asks for more.
void test_num_sms_is_at_most_the_devices() {
  EXPECT_EQ(plan_dispatch(4096, 4, 8, 28, 1000, 78, false).num_blocks, 78);
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 1, 1000, 78).num_blocks, 78);
  EXPECT_EQ(plan_dispatch(4096, 4, 8, 28, 0, 148, false).num_blocks, 148);
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 1, 0, 148).num_blocks, 148);
}

// A done leaves half of the device's SMs to other kernels.
void test_sms_beside_others() {
  EXPECT_EQ(usable_sms_beside_others(0, 132), 32);
  EXPECT_EQ(usable_sms_beside_others(5, 132), 5);
  EXPECT_EQ(usable_sms_beside_others(100, 132), 64);
  EXPECT_EQ(usable_sms_beside_others(0, 78), 32);
  EXPECT_EQ(usable_sms_beside_others(100, 78), 39);
  EXPECT_EQ(usable_sms_beside_others(0, 4), 2);
  EXPECT_EQ(usable_sms_beside_others(3, 1), 1);
}

// The plans for 132 SMs. All choices in plan.h were measured with so many SMs. If you change a plan, measure again.
std::vector<int32_t> numbers(const LaunchPlan& plan) {
  return {static_cast<int32_t>(plan.variant),
          plan.num_senders,
          plan.num_blocks,
          plan.log_block_warps,
          plan.log_send_warps,
          plan.log_receive_warps};
}
void test_plans_on_132_sms() {
  constexpr int32_t kLowLatency = 0, kBalanced = 1, kThroughput = 2;  // enum Variant
  const struct {
    int32_t tokens, ranks, top_k, chunks, num_sms;
    bool is_combine_back;
    std::vector<int32_t> expected;
  } dispatches[] = {
      {1, 2, 8, 28, 0, false, {kLowLatency, 3, 12, 3, 4, 5}},
      {1, 4, 8, 28, 0, false, {kLowLatency, 3, 12, 3, 4, 4}},
      {1, 4, 8, 14, 0, false, {kLowLatency, 3, 8, 3, 4, 3}},
      {8, 2, 8, 28, 0, false, {kLowLatency, 17, 50, 3, 4, 4}},
      {8, 4, 8, 14, 0, false, {kLowLatency, 17, 50, 3, 4, 3}},
      {8, 4, 8, 28, 0, false, {kLowLatency, 17, 82, 3, 4, 4}},
      {32, 4, 8, 14, 0, false, {kLowLatency, 33, 162, 3, 3, 3}},
      {32, 8, 8, 28, 0, true, {kLowLatency, 33, 264, 3, 3, 3}},
      {64, 2, 8, 14, 0, false, {kBalanced, 65, 130, 4, 4, 3}},
      {128, 4, 8, 4, 0, false, {kBalanced, 33, 98, 4, 2, 1}},
      {128, 4, 8, 14, 0, false, {kBalanced, 44, 132, 4, 4, 2}},
      {128, 4, 1, 14, 0, false, {kBalanced, 65, 130, 4, 3, 1}},
      {128, 8, 8, 28, 0, true, {kThroughput, 17, 132, 4, 2, 3}},
      {256, 8, 8, 28, 0, false, {kBalanced, 44, 132, 4, 4, 2}},
      {512, 2, 8, 28, 0, false, {kThroughput, 45, 132, 4, 2, 2}},
      {4096, 2, 8, 14, 0, false, {kThroughput, 52, 132, 4, 2, 2}},
      {4096, 2, 8, 28, 0, false, {kThroughput, 45, 132, 4, 2, 1}},
      {4096, 4, 8, 28, 0, false, {kThroughput, 67, 132, 4, 2, 2}},
      {512, 2, 8, 28, 0, true, {kThroughput, 17, 132, 4, 2, 3}},
      {4096, 2, 8, 28, 0, true, {kThroughput, 33, 132, 4, 2, 2}},
      {4096, 32, 8, 14, 0, true, {kThroughput, 17, 132, 4, 2, 2}},
      {32, 4, 8, 28, 24, false, {kThroughput, 9, 24, 4, 2, 1}},
      {128, 4, 8, 28, 24, false, {kThroughput, 9, 24, 4, 0, 1}},
      {4096, 2, 8, 28, 24, false, {kThroughput, 11, 24, 4, 0, 0}},
      {4096, 2, 8, 28, 12, false, {kThroughput, 6, 12, 4, 0, 0}},
      {128, 4, 8, 4, 24, false, {kThroughput, 9, 24, 4, 0, 0}},    // a warp per short row
      {288, 2, 8, 28, 24, false, {kThroughput, 11, 24, 4, 0, 1}},  // 24 rows per SM
      {289, 2, 8, 28, 24, false, {kThroughput, 13, 24, 4, 0, 0}},
      {2000, 2, 8, 28, 1000, false, {kThroughput, 68, 132, 4, 0, 0}},  // more SMs than the device has
      {4096, 8, 8, 28, 24, true, {kThroughput, 11, 24, 4, 0, 0}},
      {4096, 4, 8, 28, 2, false, {kThroughput, 1, 2, 4, 0, 0}},
      {4096, 4, 8, 28, 1, false, {kThroughput, 1, 1, 4, 0, 0}},
  };
  for (const auto& call : dispatches) {
    const LaunchPlan plan =
        plan_dispatch(call.tokens, call.ranks, call.top_k, call.chunks, call.num_sms, call.is_combine_back);
    EXPECT_EQ(numbers(plan), call.expected);
  }
  const struct {
    int32_t tokens, ranks, top_k, chunks, num_sms;
    bool sums_own;
    std::vector<int32_t> expected;
    int32_t units_read = 1;
  } combines[] = {
      {1, 4, 8, 28, 0, false, {kLowLatency, 17, 22, 3, 5, 5}},
      {1, 32, 8, 28, 0, false, {kLowLatency, 129, 132, 3, 5, 5}},
      {8, 4, 8, 28, 0, false, {kLowLatency, 129, 132, 3, 5, 5}},
      {16, 4, 8, 28, 0, false, {kLowLatency, 129, 132, 3, 4, 5}},
      {16, 2, 8, 28, 0, false, {kLowLatency, 129, 132, 3, 5, 5}},
      {32, 2, 1, 28, 0, false, {kLowLatency, 129, 132, 3, 4, 5}},
      {32, 2, 8, 8, 0, false, {kLowLatency, 65, 98, 3, 3, 3}},
      {32, 2, 8, 28, 0, true, {kBalanced, 33, 98, 4, 4, 5}},
      {32, 4, 8, 28, 0, false, {kLowLatency, 132, 132, 3, 4, 5}},
      {8, 4, 0, 28, 0, false, {kBalanced, 33, 50, 4, 4, 5}},
      {32, 8, 0, 14, 0, false, {kBalanced, 99, 132, 4, 3, 4}},
      {64, 2, 8, 28, 0, false, {kBalanced, 67, 132, 4, 4, 5}},
      {128, 1, 8, 28, 0, true, {kThroughput, 1, 66, 4, 3, 3}},
      {128, 2, 8, 16, 0, false, {kBalanced, 67, 132, 4, 3, 4}},
      {128, 4, 1, 28, 0, true, {kBalanced, 67, 132, 4, 2, 3}},
      {128, 4, 8, 16, 0, false, {kBalanced, 67, 132, 4, 3, 4}},
      {128, 2, 8, 28, 0, true, {kThroughput, 65, 130, 4, 3, 3}},
      {128, 4, 8, 28, 0, true, {kBalanced, 45, 132, 4, 4, 5}},
      {128, 4, 16, 28, 0, true, {kBalanced, 67, 132, 4, 4, 5}},
      {128, 8, 0, 28, 0, false, {kBalanced, 67, 132, 4, 4, 5}},
      {512, 4, 8, 4, 0, true, {kThroughput, 97, 130, 4, 0, 0}},
      {1024, 2, 8, 28, 0, true, {kThroughput, 65, 130, 4, 0, 0}},
      {1024, 4, 8, 28, 0, true, {kThroughput, 67, 132, 4, 3, 3}},
      {4096, 2, 8, 28, 0, true, {kThroughput, 45, 132, 4, 0, 0}},
      {4096, 4, 8, 28, 0, true, {kThroughput, 67, 132, 4, 3, 3}},
      {4096, 32, 8, 28, 0, true, {kThroughput, 67, 132, 4, 3, 3}},
      {32, 2, 8, 28, 24, true, {kThroughput, 15, 24, 4, 3, 3}},
      {4096, 4, 8, 28, 24, true, {kThroughput, 12, 24, 4, 0, 0}},
      {4096, 4, 8, 28, 2, true, {kThroughput, 1, 2, 4, 0, 0}},
      {4096, 4, 8, 28, 1, true, {kThroughput, 1, 1, 4, 0, 0}},
      // Sums that are cast have 14 chunks, or one.
      {8, 4, 8, 28, 0, true, {kLowLatency, 49, 66, 3, 4, 4}, 2},
      {8, 4, 0, 28, 0, false, {kThroughput, 17, 22, 4, 3, 3}, 2},
      {64, 2, 8, 28, 0, true, {kThroughput, 33, 66, 4, 3, 3}, 2},
      {128, 4, 8, 56, 0, true, {kThroughput, 67, 132, 4, 4, 4}, 4},
      {8, 4, 8, 4, 0, true, {kLowLatency, 4, 6, 3, 0, 0}, 4},
  };
  for (const auto& call : combines) {
    const LaunchPlan plan =
        plan_combine(call.tokens, call.ranks, call.top_k, call.chunks, call.num_sms, call.units_read);
    EXPECT_EQ(numbers(plan), call.expected);
    EXPECT_EQ(plan.sums_own, call.sums_own);
  }
}

// With rail peers, the blocks between the senders and the receivers forward rows. A warp group is in one block.
void test_blocks_that_forward() {
  for (int64_t tokens : {33, 128, 4096}) {
    for (int32_t num_sms : {0, 1, 2, 3, 5, 24, 132}) {
      for (const LaunchPlan& best :
           {plan_dispatch(tokens, 8, 8, 28, num_sms, false), plan_combine(tokens, 8, 8, 28, num_sms),
            plan_combine(tokens, 8, 8, 28, num_sms, 2)}) {
        const LaunchPlan plan = over_network(best, true);
        int32_t forwarders = 0;
        for (int32_t block = 0; block < plan.num_blocks; ++block) forwarders += plan.forwards(block);
        EXPECT_EQ(forwarders, plan.num_forwarders());
        EXPECT_EQ(plan.num_receivers() >= 1, true);
        EXPECT_EQ(plan.num_blocks, best.num_blocks == 2 ? 1 : best.num_blocks);
        EXPECT_EQ(plan.forwards(0), plan.num_blocks == 1);
        EXPECT_EQ(std::max(plan.log_send_warps, plan.log_receive_warps) <= plan.log_block_warps, true);
        expect_whole_warp_groups(plan, plan.num_forwarders(), plan.log_receive_warps, false);
        expect_whole_warp_groups(plan, plan.row_receivers(), plan.log_receive_warps, false);
      }
    }
  }
}

// Rows of few tokens go directly to their ranks, and rows of more tokens through rail peers. All operations of a route
// must agree, so the low-latency variant must be that of few tokens, and of no others.
void test_few_rows_go_directly() {
  for (int64_t tokens = 1; tokens <= 64; ++tokens) {
    EXPECT_EQ(is_low_latency(variant_for(tokens, 0)), has_few_tokens(tokens));
  }
}

void test_few_tokens_take_few_blocks() {
  // Blocks of 8 warps: one notifies the peers, two send the token with 16 warps, one writes the small results,
  // and two per rank receive a row with 16 warps, which take two chunks each.
  EXPECT_EQ(plan_dispatch(1, 4, 8, 28, 0, false).num_blocks, 1 + 2 + 1 + 4 * 2);
  EXPECT_EQ(plan_dispatch(1, 2, 8, 28, 0, false).log_receive_warps, 5);  // a warp per chunk
  EXPECT_EQ(plan_dispatch(8, 4, 8, 28, 0, false).log_receive_warps, 4);
  EXPECT_EQ(plan_dispatch(8, 4, 8, 14, 0, false).log_receive_warps, 3);
  EXPECT_EQ(plan_dispatch(4096, 4, 8, 28, 0, false).num_blocks, kDeviceSms);
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 24).num_blocks, 24);
}

// With few rounds, no warp group has one round more than most others.
void test_rounds_are_even() {
  const auto rounds = [](int64_t rows, int32_t blocks, int32_t block_warps, int32_t log_warps) {
    return divide_up(rows, blocks * block_warps >> log_warps);
  };
  for (int32_t ranks : {2, 4}) {
    const LaunchPlan dispatch = plan_dispatch(128, ranks, 8, 14, 0, false),
                     combine = plan_combine(128, ranks, 8, 28, 0);
    EXPECT_EQ(rounds(128, dispatch.row_senders(), 16, dispatch.log_send_warps), ranks == 2 ? 1 : 3);
    EXPECT_EQ(rounds(ranks * 128, dispatch.row_receivers(), 16, dispatch.log_receive_warps), ranks / 2);
    EXPECT_EQ(rounds(128, combine.row_receivers(), 16, combine.log_receive_warps), ranks == 2 ? 1 : 3);
    const int32_t sums = combine.sums_own ? ranks - 1 : ranks;  // for each token
    EXPECT_EQ(rounds(sums * 128, combine.row_senders(), 16, combine.log_send_warps), ranks == 2 ? 1 : 9);
  }
  const LaunchPlan few = plan_combine(32, 4, 8, 28, 0);
  EXPECT_EQ(rounds(4 * 32, few.row_senders(), 8, few.log_send_warps), 2);
  EXPECT_EQ(rounds(32, few.row_receivers(), 8, few.log_receive_warps), 1);
}

void test_senders_enter_first() {
  for (const bool is_combine_back : {false, true}) {
    EXPECT_EQ(plan_dispatch(257, 4, 8, 28, 0, is_combine_back).senders_enter_first, true);
    EXPECT_EQ(plan_dispatch(256, 4, 8, 28, 0, is_combine_back).senders_enter_first, false);
    EXPECT_EQ(plan_dispatch(4096, 2, 8, 28, 0, is_combine_back).senders_enter_first, false);
    EXPECT_EQ(plan_dispatch(4096, 4, 8, 28, 24, is_combine_back).senders_enter_first, false);
  }
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 0).senders_enter_first, true);
  EXPECT_EQ(plan_combine(512, 4, 8, 28, 0).senders_enter_first, true);
  EXPECT_EQ(plan_combine(4096, 2, 8, 28, 0).senders_enter_first, false);
}

// With a limit on SMs, senders write own rows if they cast, and if there are enough tokens.
void test_who_writes_own_rows() {
  const auto plan = [](int64_t tokens, int32_t ranks, int32_t num_sms, bool is_combine_back = false,
                       bool casts = true) {
    return plan_dispatch(tokens, ranks, 8, 14, num_sms, kDeviceSms, is_combine_back, casts);
  };
  for (const auto& [tokens, ranks, senders] :
       {std::array{4096, 2, 17}, {1536, 2, 17}, {1535, 2, 14}, {1024, 2, 14}, {480, 2, 14}, {480, 4, 11}}) {
    const LaunchPlan own = plan(tokens, ranks, 24);
    EXPECT_EQ(own.num_senders, senders);
    EXPECT_EQ(own.num_blocks, 24);
    EXPECT_EQ(own.log_send_warps, 0);
    EXPECT_EQ(own.tokens_with_own_items, 2 * 16 * (senders - 1));  // of two steps
    EXPECT_EQ(own.senders_write_own(), true);
  }
  for (const LaunchPlan& without : {plan(4096, 2, 24, false, false), plan(4096, 2, 24, true), plan(4096, 2, 0),
                                    plan(4096, 1, 24), plan(479, 2, 24)}) {
    EXPECT_EQ(without.senders_write_own(), false);
  }
  LaunchPlan own = plan(4096, 2, 1);
  EXPECT_EQ(own.tokens_with_own_items, 2 * 16);
  EXPECT_EQ(own.is_possible_dispatch(Phase::kWhole), true);
  own.log_send_warps = 1;
  EXPECT_EQ(own.is_possible_dispatch(Phase::kWhole), false);
}

// Receivers sum the rows of own tokens if a combine casts, prefetches y, or (kBalanced) has one or two experts per
// token, much to read, or 17 to 32 tokens.
void test_who_sums_own_rows() {
  EXPECT_EQ(plan_combine(32, 2, 8, 28, 0).sums_own, true);
  EXPECT_EQ(plan_combine(32, 4, 8, 28, 0).sums_own, false);
  EXPECT_EQ(plan_combine(128, 4, 8, 28, 0).sums_own, true);
  EXPECT_EQ(plan_combine(128, 4, 8, 16, 0).sums_own, false);
  EXPECT_EQ(plan_combine(128, 4, 1, 28, 0).sums_own, true);  // a token has one row
  EXPECT_EQ(plan_combine(4096, 4, 1, 4, 0).sums_own, true);
  EXPECT_EQ(plan_combine(32, 4, 8, 28, 24).sums_own, true);
  for (int64_t tokens : {32, 128, 4096}) {
    EXPECT_EQ(plan_combine(tokens, 4, 0, 28, 0).sums_own, false);  // not summed
    EXPECT_EQ(plan_combine(tokens, 4, 0, 28, 0, 2).sums_own, false);
    EXPECT_EQ(plan_combine(tokens, 4, 8, 28, 0, 2).sums_own, true);  // a cast sum of own rows is not sent
    EXPECT_EQ(plan_combine(tokens, 4, 8, 4, 0, 4).sums_own, true);
  }
}

// If y is prefetched, a warp sums a part of a row at once, which is four chunks. With many rows on two ranks or few
// SMs, a row has one warp. Otherwise it has a warp per part, rounded up to a power of two.
void test_warps_per_prefetched_row() {
  EXPECT_EQ(plan_combine(32, 2, 8, 8, 32).log_send_warps, 1);
  EXPECT_EQ(plan_combine(32, 2, 8, 28, 24).log_send_warps, 3);  // seven parts
  EXPECT_EQ(plan_combine(128, 2, 8, 28, 24).log_send_warps, 3);
  EXPECT_EQ(plan_combine(512, 2, 8, 28, 24).log_send_warps, 0);
  EXPECT_EQ(plan_combine(512, 2, 8, 28, 0).log_send_warps, 3);
  EXPECT_EQ(plan_combine(1024, 2, 8, 28, 0).log_send_warps, 0);  // one round of all warps
  EXPECT_EQ(plan_combine(8192, 4, 8, 28, 0).log_send_warps, 3);
  EXPECT_EQ(plan_combine(8192, 4, 0, 28, 0).log_send_warps, 0);     // all_to_all_back
  EXPECT_EQ(plan_combine(8192, 4, 8, 28, 0, 2).log_send_warps, 3);  // a part of y has two chunks of the cast sum
}

// With many long rows per receiving rank, few blocks send the tokens one after another, and all other blocks receive
// (kLargeBatchOfLongRows).
void test_few_blocks_send_long_rows() {
  const LaunchPlan many_rows = plan_dispatch(128, 4, 8, 14, 0, false),
                   few_rows = plan_dispatch(128, 4, 1, 14, 0, false);
  EXPECT_EQ(many_rows.log_send_warps, 4);
  EXPECT_EQ(many_rows.num_senders, 1 + 43);  // three rounds
  EXPECT_EQ(many_rows.num_blocks, kDeviceSms);
  EXPECT_EQ(few_rows.log_send_warps, 3);
  EXPECT_EQ(plan_dispatch(128, 4, 8, 8, 0, false).log_send_warps, 3);
  EXPECT_EQ(plan_dispatch(128, 2, 8, 14, 0, false).log_send_warps, 3);
}

// A combine is balanced with 33 to 256 tokens if it does not cast, and has more than two ranks or reads little. With 17
// to 32 tokens, it is balanced on two ranks, if it does not cast, if rows are long, and if top_k is 3 or more.
void test_balanced_combines() {
  const auto is_balanced = [](const LaunchPlan& plan) { return plan.variant == Variant::kBalanced; };
  EXPECT_EQ(is_balanced(plan_combine(32, 2, 8, 28, 0)), true);
  EXPECT_EQ(is_balanced(plan_combine(17, 2, 3, 9, 0)), true);
  EXPECT_EQ(is_balanced(plan_combine(16, 2, 8, 28, 0)), false);
  EXPECT_EQ(is_balanced(plan_combine(32, 1, 8, 28, 0)), false);
  EXPECT_EQ(is_balanced(plan_combine(32, 4, 8, 28, 0)), false);
  EXPECT_EQ(is_balanced(plan_combine(32, 2, 2, 28, 0)), false);
  EXPECT_EQ(is_balanced(plan_combine(32, 2, 8, 8, 0)), false);
  EXPECT_EQ(is_balanced(plan_combine(32, 2, 8, 28, 0, 2)), false);
  for (int32_t ranks : {1, 2, 4}) {
    EXPECT_EQ(plan_combine(128, ranks, 8, 28, 0).variant == Variant::kThroughput, ranks <= 2);
    EXPECT_EQ(plan_combine(128, ranks, 8, 16, 0).variant == Variant::kBalanced, true);       // short rows
    EXPECT_EQ(plan_combine(128, ranks, 8, 16, 0, 2).variant == Variant::kThroughput, true);  // cast
    EXPECT_EQ(plan_combine(512, ranks, 8, 4, 0).variant == Variant::kThroughput, true);      // short rows
  }
}

// The only rank of a group has nothing to send if receivers sum own rows. One block notifies, and all others receive.
void test_one_rank_only_receives() {
  for (int64_t tokens : {64, 128, 4096}) EXPECT_EQ(plan_combine(tokens, 1, 8, 28, 0, 2).num_senders, 1);
  for (int64_t tokens : {512, 1024, 4096}) EXPECT_EQ(plan_combine(tokens, 1, 8, 28, 0).num_blocks, kDeviceSms);
  EXPECT_EQ(plan_combine(128, 1, 1, 28, 0).num_senders, 1);  // one expert per token
}

// With two ranks, a token goes to one other rank at most. So with many rows, most blocks receive.
void test_two_ranks_send_little() {
  const auto receive_warps_back = [](int64_t tokens, int32_t ranks) {  // of combine's backward pass
    return 1 << plan_dispatch(tokens, ranks, 8, 28, 0, true).log_receive_warps;
  };
  EXPECT_EQ(receive_warps_back(1024, 2), 4);
  EXPECT_EQ(receive_warps_back(1023, 2), 8);
  EXPECT_EQ(receive_warps_back(1024, 1), 4);
  EXPECT_EQ(receive_warps_back(1024, 4), 4);
  EXPECT_EQ(receive_warps_back(1023, 4), 8);
  const LaunchPlan dispatch = plan_dispatch(4096, 2, 8, 28, 0, false);
  EXPECT_EQ(dispatch.num_senders, 45);
  EXPECT_EQ(dispatch.log_receive_warps, 1);  // at least 2048 tokens, rows longer than 8 KB
  EXPECT_EQ(plan_dispatch(1024, 2, 8, 28, 0, false).log_receive_warps, 2);
  EXPECT_EQ(plan_dispatch(4096, 2, 8, 14, 0, false).log_receive_warps, 2);
  EXPECT_EQ(plan_dispatch(4096, 2, 8, 14, 0, false).num_senders, 52);
  EXPECT_EQ(plan_dispatch(4096, 4, 8, 28, 0, false).num_senders, 67);
  EXPECT_EQ(plan_combine(4096, 2, 8, 28, 0).num_senders, 45);
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 0).num_senders, 67);
  EXPECT_EQ(plan_combine(4096, 2, 8, 28, 24).num_senders, 10);
  EXPECT_EQ(plan_combine(4096, 2, 8, 28, 12).num_senders, 5);
  EXPECT_EQ(plan_combine(4096, 4, 8, 28, 24).num_senders, 12);
}

// In the layout "token", senders of a combine only copy rows. With few SMs, this changes the shares of the roles, and
// the warps per row.
void test_token_rows_on_few_sms() {
  const auto plan = [](int64_t tokens, int32_t ranks, int32_t num_sms, int32_t units_read = 1) {
    return plan_combine(tokens, ranks, 8, 28, units_read, num_sms, kDeviceSms, true);
  };
  const auto is_same = [](const LaunchPlan& a, const LaunchPlan& b) {
    return a.num_senders == b.num_senders && a.num_blocks == b.num_blocks && a.log_send_warps == b.log_send_warps &&
           a.log_receive_warps == b.log_receive_warps;
  };
  EXPECT_EQ(plan(4096, 4, 24).num_senders, 10);
  EXPECT_EQ(plan(4096, 4, 12).num_senders, 5);
  EXPECT_EQ(plan(128, 4, 24).log_send_warps, 2);  // two parts per warp
  EXPECT_EQ(plan(4096, 2, 24).num_senders, 9);
  EXPECT_EQ(plan(4096, 2, 12).num_senders, 5);
  EXPECT_EQ(is_same(plan(128, 4, 0), plan_combine(128, 4, 8, 28, 0)), true);            // all SMs
  EXPECT_EQ(is_same(plan(4096, 4, 24, 2), plan_combine(4096, 4, 8, 28, 24, 2)), true);  // a cast is no copy
}

// With one or two experts per token, one round is enough for all rows.
void test_few_experts_take_one_round() {
  const LaunchPlan plan = plan_combine(128, 4, 1, 28, 0);
  EXPECT_EQ(plan.log_send_warps, 2);
  EXPECT_EQ(plan.row_receivers() * 16 >> plan.log_receive_warps, 128);
  const LaunchPlan dispatch = plan_dispatch(128, 4, 1, 14, 0, false);
  EXPECT_EQ(dispatch.row_receivers() * 16 >> dispatch.log_receive_warps, 4 * 128);
}

// The rows that exist are the first of each rank's possible rows. All blocks get equally many of them, or one more.
void test_first_rows_are_spread_over_blocks() {
  const LaunchPlan plan = plan_combine(128, 4, 1, 28, 0);
  const int32_t num_blocks = plan.row_senders(), num_rows = 3 * 32;
  int32_t fewest = num_rows, most = 0;
  for (int32_t block = 1; block <= num_blocks; ++block) {
    int32_t rows = 0;
    for (int32_t warp = 0; warp < plan.block_warps(); warp += 1 << plan.log_send_warps) {
      rows += WarpGroup::of_senders(plan, block, warp).index < num_rows;
    }
    fewest = std::min(fewest, rows), most = std::max(most, rows);
  }
  EXPECT_EQ(num_blocks > num_rows / 4, true);  // a block has four warp groups
  EXPECT_EQ(most - fewest <= 1, true);
  EXPECT_EQ(WarpGroup::of_senders(plan, 1, 0, true).index + 1, WarpGroup::of_senders(plan, 1, 4, true).index);
}

// Rows of 4 chunks have fewer warps each than rows of 14.
void test_short_rows_have_few_warps() {
  EXPECT_EQ(plan_dispatch(128, 4, 8, 4, 0, false).log_send_warps, 2);
  EXPECT_EQ(plan_dispatch(128, 4, 8, 4, 0, false).num_senders, 1 + 128 / 4);
  EXPECT_EQ(plan_dispatch(64, 2, 8, 14, 0, false).log_receive_warps, 3);
  EXPECT_EQ(plan_dispatch(128, 4, 8, 4, 24, false).num_blocks, 24);
  EXPECT_EQ(plan_combine(128, 4, 8, 8, 0).log_send_warps, 2);
}

ArenaLayout arena_of(const ArenaNeeds& needs, int64_t max_bytes) {
  return choose_arena(needs, ArenaBounds{max_bytes, max_bytes}, [](const ArenaLayout& layout) { return layout.bytes; });
}
ArenaLayout default_arena_of(const ArenaNeeds& needs) {
  return choose_arena(needs, kDefaultArenaBounds, [](const ArenaLayout& layout) { return layout.bytes; });
}

void test_arena() {
  const auto fitting = [](int32_t tokens) { return arena_of({8, 0, 8, tokens, 14336}, int64_t{1} << 40); };
  const ArenaLayout small = fitting(128), large = fitting(4096);
  EXPECT_EQ(small.num_slots, 4);
  EXPECT_EQ(small.bytes <= kSmallArena, true);
  EXPECT_EQ(large.num_slots, 2);
  EXPECT_EQ(large.bytes <= int64_t{1} << 30, true);
  EXPECT_EQ(small.row_offset(1) % 128, 0);
  EXPECT_EQ(small.escape_masks_offset(small.row_number(3, 7, 127)) + small.escape_masks_per_row * 8 <= small.bytes,
            true);
}

void test_arena_in_rounds() {
  // 8192 tokens of 14 KiB on 64 ranks need 14.4 GiB for two slots. With rounds, they need at most 512 MiB.
  for (int32_t num_ranks : {1, 8, 32, 64}) {
    for (int32_t tokens : {1, 100, 257, 4096, 8192, 100'000}) {
      for (int64_t max_bytes : {int64_t{1} << 20, int64_t{16} << 20, int64_t{512} << 20, int64_t{1} << 40}) {
        const ArenaNeeds needs = {num_ranks, 0, 8, tokens, 14336};
        const ArenaLayout arena = arena_of(needs, max_bytes);
        const int32_t num_rounds = static_cast<int32_t>(divide_up(tokens, arena.round_tokens));
        EXPECT_EQ(arena.round_tokens >= 1 && arena.round_tokens <= tokens, true);
        EXPECT_EQ(arena.bytes <= max_bytes || arena.round_tokens == 1, true);
        if (num_rounds == 1) continue;
        EXPECT_EQ(arena.num_slots, kSlotsWithRounds);
        // No room for one round less.
        const auto more = static_cast<int32_t>(divide_up(tokens, num_rounds - 1));
        EXPECT_EQ(needs.layout(more, kSlotsWithRounds).bytes > max_bytes, true);
        const Divisor by(static_cast<uint32_t>(arena.round_tokens));
        EXPECT_EQ(by.remainder(tokens - 1), (tokens - 1) % arena.round_tokens);
      }
    }
  }
  EXPECT_EQ(default_arena_of({64, 0, 8, 8192, 14336}).round_tokens, 283);
  EXPECT_EQ(default_arena_of({8, 0, 8, 8192, 14336}).round_tokens, 8192);  // 1.8 GiB
  // Every round is planned with a variant that has rounds.
  for (int32_t round_tokens : {1, 100, 1000}) {
    const int32_t planned = planned_tokens(1001, round_tokens);
    EXPECT_EQ(has_rounds(plan_dispatch(planned, 8, 8, 28, 0, false).variant), true);
    EXPECT_EQ(has_rounds(plan_combine(planned, 8, 8, 28, 0).variant), true);
  }
}

void test_divisor() {
  for (uint32_t divisor : {1u, 2u, 3u, 7u, 8u, 64u, 96u, 12288u}) {
    const Divisor by(divisor);
    for (uint32_t n = 0; n < 30000; n += 1 + n / 1000) {
      EXPECT_EQ(by.quotient(n), static_cast<int32_t>(n / divisor));
      EXPECT_EQ(by.remainder(n), static_cast<int32_t>(n % divisor));
    }
  }
}

void test_balance() {
  EXPECT_EQ(plan_balance(4096 * 8, 256, 0, 132).num_blocks, 16);
  EXPECT_EQ(plan_balance(4096 * 8, 256, 0, 132).num_counting_warps, 16);
  EXPECT_EQ(plan_balance(0, 1, 0, 132).num_blocks, 1);
  EXPECT_EQ(plan_balance(4096 * 8, 256, 8, 132).num_blocks, 8);
  for (int32_t num_experts = 1; num_experts <= kMaxBalancedExperts; ++num_experts) {
    for (int64_t num_pairs : {0, 8, 300, 1 << 20}) {
      const BalancePlan plan = plan_balance(num_pairs, num_experts, 0, 132);
      EXPECT_EQ(plan.num_counting_warps >= 1 && 32 * plan.num_counting_warps <= kPairThreads, true);
      EXPECT_EQ(plan.num_blocks >= 1 && plan.num_blocks <= kMaxBalanceBlocks, true);
      EXPECT_EQ(plan.counters_bytes(num_experts) <= kMaxBalanceScratch, true);
      EXPECT_EQ(plan.num_worker_threads % 32 == 0 && plan.block_threads() <= 1024, true);
      EXPECT_EQ(balance_scratch_bytes(num_experts) <= kMaxBalanceScratch, true);
    }
  }
  EXPECT_EQ(kMaxBalancedExperts, 4096);  // Group's docstring says so
}

// Both ranks of a transfer must have the same number of tracks, even if their GPUs differ.
void test_replicate() {
  for (int32_t max_tokens : {1, 3, 4, 100, 4096, 100'000}) {
    const CopyPlan plan = plan_replicate(max_tokens, false, 0, 132);
    EXPECT_EQ(plan_replicate(max_tokens, true, 1, 4).num_tracks, plan.num_tracks);
    EXPECT_EQ(plan.num_tracks >= 1 && plan.num_tracks <= std::min(max_tokens, kMaxCopyTracks), true);
    EXPECT_EQ(plan.num_blocks >= 1 && plan.num_blocks * kCopyWarps < plan.num_tracks + kCopyWarps, true);
  }
  EXPECT_EQ(plan_replicate(4096, false, 0, 132).num_blocks, 64);
  EXPECT_EQ(plan_replicate(4096, true, 0, 132).num_blocks, 132);
  EXPECT_EQ(plan_replicate(4096, false, 24, 132).num_blocks, 24);
}

int main() {
  test_plans(kDeviceSms, {0, 1, 2, 3, 5, 24, 132, 1000});
  for (int32_t device_sms : {1, 2, 4, 78, 114, 148}) test_plans(device_sms, {0, 1000});
  test_plans_of_one_block();
  test_blocks_with_both_roles();
  test_plans_on_few_sms();
  test_num_sms_is_at_most_the_devices();
  test_sms_beside_others();
  test_plans_on_132_sms();
  test_blocks_that_forward();
  test_few_rows_go_directly();
  test_few_tokens_take_few_blocks();
  test_rounds_are_even();
  test_senders_enter_first();
  test_who_writes_own_rows();
  test_who_sums_own_rows();
  test_warps_per_prefetched_row();
  test_few_blocks_send_long_rows();
  test_balanced_combines();
  test_one_rank_only_receives();
  test_two_ranks_send_little();
  test_token_rows_on_few_sms();
  test_few_experts_take_one_round();
  test_first_rows_are_spread_over_blocks();
  test_short_rows_have_few_warps();
  test_arena();
  test_arena_in_rounds();
  test_divisor();
  test_balance();
  test_replicate();
  return check::exit_status();
}
