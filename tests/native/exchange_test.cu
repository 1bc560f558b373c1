// Runs the CUDA backend's operations between 1 to 8 ranks that share ONE GPU, each on a stream of its own. Meant for
// compute-sanitizer as much as for its own checks; several epochs, so that slots are used again.
//
//   exchange_test [MAX_RANKS [(quick | all) [PART]]]
//
// runs all parts, or one: "exchange", "all_to_all", "layouts", "balance", "dispatch_layout", "group_arrays", "expand".
// "quick" is for the sanitizers, under which a kernel takes long.
//
//   emulated_exchange_test (seeds | scenarios | failures | rounds | rare_orders | two_groups) FIRST COUNT [SETTINGS]
//
// runs COUNT short exchanges, or a part of each. A seed decides everything (exchange_seeds.h). exchange_test, the
// program for GPUs, has no seeds.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <tuple>

#include "exchange.h"
#include "exchange_all_to_all.h"
#include "exchange_balance.h"
#include "exchange_dispatch_layout.h"
#include "exchange_expand.h"
#include "exchange_group_arrays.h"
#include "exchange_layouts.h"
#include "exchange_token.h"
#ifdef JAX_EP_EMULATOR
#include "exchange_seeds.h"
#endif

namespace {

constexpr int32_t kRepeats = 40;

constexpr const char* kParts[] = {"exchange",        "all_to_all",   "layouts", "balance",
                                  "dispatch_layout", "group_arrays", "expand"};
bool is_part(const std::string& part) {
  return part.empty() || std::find(std::begin(kParts), std::end(kParts), part) != std::end(kParts);
}

__global__ void count_differences(const uint32_t* a, const uint32_t* b, size_t words, int32_t* differences) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(differences, 1);
  }
}

// A result, and the value that it must have each time.
struct Repeated {
  uint32_t *result, *expected;
  size_t words;

  explicit Repeated(const Activations& rows)
      : Repeated(rows, rows.host.size() * (rows.is_bfloat16 ? sizeof(uint16_t) : sizeof(float))) {}
  template <typename T>
  explicit Repeated(const Array<T>& array) : Repeated(array, array.host.size() * sizeof(T)) {}
  template <typename T>
  Repeated(const Array<T>& array, size_t bytes) : result(reinterpret_cast<uint32_t*>(array.device)), words(bytes / 4) {
    must(cudaMalloc(&expected, words * 4));
    must(cudaMemcpy(expected, result, words * 4, cudaMemcpyDeviceToDevice));
  }
};

void exchange(int32_t num_ranks, int32_t cast, PlanOverrides blocks, int32_t repeats, uint32_t newest_epoch = 0) {
  Session session(num_ranks, cast, blocks, 60.0, newest_epoch);
  const int32_t log_ranks = __builtin_ctz(num_ranks);
  session.set_cast_after_dispatch(cast ? 1 + (cast + log_ranks) % 3
                                       : 0);  // 1 to 3: two of the formats for each number of ranks
  std::mt19937 random(num_ranks);
  const int32_t rounds = std::min(repeats, 3);
  for (int32_t round = 0; round < rounds; ++round) {
    session.randomize(random);
    session.run_whole();
    if (round == 0) check_stats(session.group(), session.ranks(), cast);
    session.run_split_phase();
  }
  // Repeats all operations without synchronization of the ranks. The results must always have the same bits.
  auto& ranks = session.ranks();
  std::vector<std::vector<Repeated>> results;
  std::vector<std::unique_ptr<Array<int32_t>>> differences;
  for (auto& rank : ranks) {
    results.push_back({Repeated(rank->recv), Repeated(rank->like), Repeated(rank->out), Repeated(rank->cotangent),
                       Repeated(rank->weights_cotangent), Repeated(rank->x_cotangent), Repeated(rank->topk_cotangent),
                       Repeated(rank->recv_row), Repeated(rank->weights)});
    differences.push_back(std::make_unique<Array<int32_t>>(1));
    differences.back()->upload();
  }
  for (int32_t round = 0; round < repeats; ++round) {
    for (int32_t r = 0; r < num_ranks; ++r) {
      for (const Repeated& repeated : results[r]) {
        must(cudaMemsetAsync(repeated.result, 0xff, repeated.words * 4, ranks[r]->streams[0]));
      }
    }
    session.whole([&](Rank& rank) { return rank.dispatch(cast); });
    session.whole([&](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
    session.whole([&](Rank& rank) { return rank.combine(); });
    session.whole([&](Rank& rank) { return rank.combine_back(); });
    session.whole([&](Rank& rank) { return rank.dispatch_back(); });
    for (int32_t r = 0; r < num_ranks; ++r) {
      for (const Repeated& repeated : results[r]) {
        must(launch(count_differences, {8, 256, 0}, ranks[r]->streams[0], repeated.result, repeated.expected,
                    repeated.words, differences[r]->device));
      }
    }
  }
  session.wait();
  for (int32_t r = 0; r < num_ranks; ++r) {
    EXPECT_EQ(differences[r]->download()[0], 0);
    for (const Repeated& repeated : results[r]) must(cudaFree(repeated.expected));
  }
  session.expect_no_failure();
  if (cast == 0) session.run_look_like_sentinels(random);
}

// A done that does not belong to a start must be refused. Valid starts stay valid.
void run_unmatched_done() {
  Group group({experts_per_rank, top_k, num_tokens, kRowBytes, 0, 2.0, {{0}}});
  const Member& member = group.members()[0];
  const LaunchPlan plan = plan_dispatch(num_tokens, 1, top_k, num_chunks(kRowBytes),
                                        usable_sms_beside_others(0, member.num_sms), member.num_sms, false);
  Rank rank(1, 0);
  std::mt19937 random(0);
  rank.randomize(random);
  const DispatchArgs call = rank.dispatch_split(0);
  const Buffers buffers = buffers_of(call);
  const auto start = [&] {
    const auto launch = [&](cudaStream_t on) {
      return launch_dispatch(member.peers, call, ElementType::kFloat32, plan, on);
    };
    member.split_phase->start(call, buffers, {launch, plan.num_blocks}, rank.streams[0]);
  };
  const auto is_refused = [&](const Buffers& buffers) {
    try {
      member.split_phase->done(buffers, rank.streams[0]);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  for (int32_t round = 0; round < 3; ++round) {
    EXPECT_EQ(is_refused(buffers), true);
    start();
    EXPECT_EQ(is_refused({call.x, call.out, rank.pending_combines.device}), true);
    EXPECT_EQ(is_refused({call.out, call.out, call.pending}), true);
    EXPECT_EQ(is_refused(buffers), false);
  }
  must(cudaDeviceSynchronize());
  EXPECT_EQ(group.failure().has_value(), false);
  start();
  start();  // neither start has a done: close() must accept that
  group.close();
}

// A launch with more blocks than fit on the GPU at once: some leave before others enter.
void more_blocks_than_fit() {
  Group group({experts_per_rank, top_k, num_tokens, kRowBytes, 0, 2.0, {{0}}});
  const Peers& peers = group.members()[0].peers;
  const int32_t sms = group.members()[0].num_sms, chunks = num_chunks(kRowBytes);
  LaunchPlan combine_plan = plan_combine(num_tokens, 1, top_k, chunks, 1, 0, sms);
  LaunchPlan dispatch_plans[] = {plan_dispatch(num_tokens, 1, top_k, chunks, 0, sms, false),
                                 plan_dispatch(num_tokens, 1, top_k, chunks, 5, sms, false)};  // with work stealing
  for (LaunchPlan* plan : {&combine_plan, &dispatch_plans[0], &dispatch_plans[1]}) {
    plan->num_blocks = is_low_latency(plan->variant) ? kMaxLowLatencyBlocks : 2000;
    plan->num_senders = plan->first_receiver = plan->num_blocks / 2;
  }
  Rank rank(1, 0);
  std::mt19937 random(0);
  rank.randomize(random);
  for (int32_t round = 0; round < 3; ++round) {
    for (const LaunchPlan& plan : dispatch_plans) {
      must(launch_dispatch(peers, rank.dispatch(0), ElementType::kFloat32, plan, rank.streams[0]));
    }
    must(launch_combine(peers, rank.combine(), ElementType::kFloat32, combine_plan, rank.streams[0]));
  }
  must(cudaDeviceSynchronize());
  EXPECT_EQ(group.failure().has_value(), false);
}

const PlanOverrides kAny = {0, Variant::kLowLatency};
const PlanOverrides kLongRows = {0, Variant::kLowLatency, true, true};

void run_exchanges(int32_t most_ranks, bool is_quick) {
  const std::vector<PlanOverrides> quick = {kAny,
                                            kLongRows,
                                            {1, Variant::kThroughput},
                                            {5, Variant::kBalanced},
                                            {5, Variant::kBalanced, false},
                                            {5, Variant::kThroughput}};
  const std::vector<PlanOverrides> all = {kAny,
                                          kLongRows,
                                          {1, Variant::kBalanced},
                                          {2, Variant::kThroughput},
                                          {5, Variant::kThroughput},
                                          {5, Variant::kBalanced},
                                          {5, Variant::kBalanced, false},
                                          {8, Variant::kBalanced},
                                          {8, Variant::kThroughput}};
  for (int32_t num_ranks = 1; num_ranks <= most_ranks; num_ranks *= 2) {
    for (int32_t cast = 0; cast <= 2; ++cast) {
      for (PlanOverrides blocks : is_quick ? quick : all) {
        if (blocks.number == 0 && num_ranks > 2) continue;
        exchange(num_ranks, cast, blocks, is_quick ? 1 : kRepeats);
      }
    }
    std::cerr << num_ranks << " ranks: " << check::failures << " failures\n";
  }
  run_unmatched_done();
  if (!is_quick) more_blocks_than_fit();
  // Numbers of experts at the limits of the loops over experts: a lane has two experts at a time, a warp 64, and a
  // block one per thread.
  for (int32_t number : is_quick ? std::vector{300} : std::vector{1, 257, 300, 384, 544}) {
    experts_per_rank = number;
    for (PlanOverrides blocks : {kAny, PlanOverrides{5, Variant::kBalanced}})
      exchange(std::min(most_ranks, 2), 0, blocks, 1);
  }
  // Each operation has epoch 0 in one of the runs. Before it, other operations have written the words for which it
  // waits. It must wait for new ones.
  for (uint32_t before : {10, 11, 12, 13, 14, 17, 18}) {
    for (PlanOverrides blocks : {kAny, PlanOverrides{5, Variant::kThroughput}})
      exchange(std::min(most_ranks, 2), 0, blocks, 1, -before);
  }
  std::cerr << "odd numbers of experts, epochs that wrap: " << check::failures << " failures\n";
}

// Calls check() with each number of ranks, and with each variant of the kernels.
template <typename Check>
void for_ranks_and_variants(int32_t most_ranks, Check check) {
  const std::vector<PlanOverrides> variants = {
      kAny, kLongRows, {1, Variant::kThroughput}, {5, Variant::kBalanced}, {5, Variant::kThroughput}};
  for (int32_t num_ranks = 1; num_ranks <= most_ranks; num_ranks *= 2) {
    for (PlanOverrides blocks : variants) {
      if (blocks.number != 0 || num_ranks <= 2) check(num_ranks, blocks);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Each rank has a stream of its own, and a kernel that waits for another rank must not hold up that rank's stream.
  // With more hardware queues than streams, no two streams share one.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
#ifdef JAX_EP_EMULATOR
  if (const auto run = kPartsOfSeeds.find(argc > 3 ? argv[1] : ""); run != kPartsOfSeeds.end()) {
    return run_seeds(run->second, std::atoll(argv[2]), std::atoll(argv[3]), argc > 4 ? argv[4] : "");
  }
  if (argc > 3 && std::strcmp(argv[1], "many_ranks") == 0) {
    return run_many_ranks_of_seeds(std::atoi(argv[2]), std::atoll(argv[3]), argc > 4 ? std::atoll(argv[4]) : 1);
  }
#endif
  const int32_t most_ranks = argc > 1 ? std::atoi(argv[1]) : 8;
  const std::string repeats = argc > 2 ? argv[2] : "all", part = argc > 3 ? argv[3] : "";
  if (most_ranks < 1 || (repeats != "quick" && repeats != "all") || !is_part(part) || argc > 4) {
    std::cerr << "usage: exchange_test [MAX_RANKS [(quick | all) [PART]]], and the parts are:";
    for (const char* name : kParts) std::cerr << " " << name;
    std::cerr << "\n";
    return 2;
  }
  const bool is_quick = repeats == "quick";
  const auto runs = [&](const char* name) { return part.empty() || part == name; };
  if (runs("dispatch_layout")) {
    run_dispatch_layouts(is_quick);
    std::cerr << "dispatch_layout: " << check::failures << " failures\n";
  }
  if (runs("expand")) {
    run_expand_and_reduce_of_all_sizes();
    std::cerr << "expand: " << check::failures << " failures\n";
  }
  if (runs("group_arrays")) {
    run_all_group_arrays();
    std::cerr << "group_arrays: " << check::failures << " failures\n";
  }
  if (runs("balance")) {
    const auto [tokens, k, experts] = std::tuple(num_tokens, top_k, experts_per_rank);
    for (uint64_t seed = 1; seed <= (is_quick ? 8 : 60); ++seed) run_balance(seed, most_ranks);
    if (most_ranks == 8) run_balance_without_gain();
    num_tokens = tokens, top_k = k, experts_per_rank = experts;
    std::cerr << "balance: " << check::failures << " failures\n";
  }
  std::mt19937 random(0);
  if (runs("all_to_all")) {
    for_ranks_and_variants(most_ranks, [&](int32_t num_ranks, PlanOverrides blocks) {
      Session session(num_ranks, 0, blocks);
      run_all_to_alls(session, random);
    });
    std::cerr << "all_to_all: " << check::failures << " failures\n";
  }
  if (runs("layouts")) {
    for_ranks_and_variants(most_ranks, [&](int32_t num_ranks, PlanOverrides blocks) {
      run_layouts(num_ranks, blocks, random);
      Session session(num_ranks, 0, blocks);
      session.randomize(random);
      run_token_rows(session, random);
    });
    std::cerr << "layouts: " << check::failures << " failures\n";
  }
  if (runs("exchange")) run_exchanges(most_ranks, is_quick);
  return check::exit_status();
}
