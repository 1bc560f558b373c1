// Times dispatch and combine between this machine's GPUs, below XLA: CUDA graphs of many operations, and what the
// thread blocks of one operation did when. For tuning ffi/plan.h; `python -m jax_ep.bench` measures what users get.
// The CMake target `timeline` defines JAX_EP_TIMELINE. The target `op_times` does not: its kernels record no times, and
// it prints no times of blocks. Recording adds at most 0.5 microseconds per operation. The added time differs between
// versions. So compare versions with op_times.
//
//   timeline [tokens] [cast: 0 none, 1 fp8] [blocks that send and that receive, warps per block, per row sent and per
//   row received, of dispatch] [of combine]
//
// 0 stands for what plan.h says. RANKS=4 in the environment starts four ranks, several per GPU if necessary;
// DEVICE_SMS=66 plans for 66 SMs per rank, so that several ranks fit on a GPU at the same time; HIDDEN=7168,
// TOP_K=8, EXPERTS=256, NUM_SMS=0, GRAD=0 (1: the operations' backward passes) and SKEWED=0 (1: half of a token's
// experts are the first rank's) are as the bench's options; REMOTE=1: all experts of a token are the next rank's, so
// that all rows travel (with two ranks or more, and in place of SKEWED); TOKEN=1: the layout "token" (not for GRAD=1);
// OWN_STEPS=n: the senders of a dispatch write own rows after n steps, 0: never; without it, as plan.h says;
// CAST_BACK=1 sends the sums back as fp8, for which there is no VARIANT=1; VARIANT=2 takes a Variant by its number,
// SUMS_OWN=0 a plan's flag; SHARED=1 is memory that other processes could map. bfloat16; routing is uniform otherwise.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/group.h"

using namespace jax_ep;

namespace {

int32_t setting(const char* name, int32_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

constexpr int32_t kOps = 40, kReplays = 7;
const int32_t kHidden = setting("HIDDEN", 7168), kTopK = setting("TOP_K", 8), kExperts = setting("EXPERTS", 256);
const int32_t kNumSms = setting("NUM_SMS", 0), kCastBack = setting("CAST_BACK", 0);
const bool kToken = setting("TOKEN", 0) != 0;
const int64_t kRowBytes = kHidden * 2;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
T* device_array(int64_t size) {
  void* memory = nullptr;
  must(cudaMalloc(&memory, size * sizeof(T)));
  must(cudaMemset(memory, 0, size * sizeof(T)));
  return static_cast<T*>(memory);
}

// The buffers of one rank, on the current device.
struct Rank {
  int32_t device, rank, num_ranks, tokens, cast;
  int64_t capacity = int64_t{num_ranks} * tokens * kTopK;
  Peers peers;
  cudaStream_t stream;
  int32_t *axis_index = device_array<int32_t>(1), *ids = device_array<int32_t>(tokens * kTopK),
          *slots = device_array<int32_t>(tokens * kTopK), *recv_topk_idx = device_array<int32_t>(capacity),
          *num_rows_per_rank = device_array<int32_t>(num_ranks),
          *send_index = device_array<int32_t>(int64_t{tokens} * num_ranks),
          *recv_row = device_array<int32_t>(int64_t{num_ranks} * tokens * kTopK),
          *num_recv_per_rank = device_array<int32_t>(num_ranks), *counts = device_array<int32_t>(kExperts),
          *group_sizes = device_array<int32_t>(kExperts), *num_dropped = device_array<int32_t>(1);
  float *topk_weights = device_array<float>(tokens * kTopK), *weights = device_array<float>(capacity),
        *weights_cotangent = device_array<float>(capacity),
        *scales = device_array<float>(capacity * divide_up(kHidden, kChannelsPerScale));
  uint8_t *x = device_array<uint8_t>(tokens * kRowBytes), *recv = device_array<uint8_t>(capacity * kRowBytes),
          *y = device_array<uint8_t>(capacity * kRowBytes), *out = device_array<uint8_t>(tokens * kRowBytes);

  Rank(const Member& member, int32_t rank, int32_t num_ranks, int32_t tokens, int32_t cast)
      : device(member.ordinal), rank(rank), num_ranks(num_ranks), tokens(tokens), cast(cast), peers(member.peers) {
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
#ifdef JAX_EP_TIMELINE
    peers.timeline = device_array<uint64_t>(int64_t{kTimelineOps} * kTimelineBlocks * kTimelinePhases);
#endif
    must(cudaMemcpy(axis_index, &rank, 4, cudaMemcpyHostToDevice));
    std::mt19937 random(rank);
    std::vector<int32_t> host, host_slots, experts(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) experts[e] = e;
    const bool is_skewed = setting("SKEWED", 0) != 0, is_remote = setting("REMOTE", 0) != 0;
    const int32_t num_hot = is_skewed ? std::min(kTopK / 2, kExperts / num_ranks) : 0;
    for (int32_t t = 0; t < tokens; ++t) {
      std::shuffle(experts.begin(), experts.end(), random);
      if (is_skewed) {
        std::partition(experts.begin(), experts.end(), [&](int32_t e) { return e < kExperts / num_ranks; });
        std::rotate(experts.begin(), experts.begin() + kExperts / num_ranks - num_hot, experts.end());
      }
      if (is_remote) {
        const int32_t next = (rank + 1) % num_ranks;
        std::partition(experts.begin(), experts.end(), [&](int32_t e) { return e / (kExperts / num_ranks) == next; });
      }
      std::vector<int32_t> named(experts.begin(), experts.begin() + kTopK);
      host_slots.insert(host_slots.end(), named.begin(), named.end());
      if (kToken) {
        const int32_t per_rank = kExperts / num_ranks;
        std::set<int32_t> ranks;
        for (int32_t& e : named) e = ranks.insert(e / per_rank).second ? e / per_rank * per_rank : -1;
      }
      host.insert(host.end(), named.begin(), named.end());
    }
    must(cudaMemcpy(ids, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    must(cudaMemcpy(slots, host_slots.data(), host_slots.size() * 4, cudaMemcpyHostToDevice));
  }

  void dispatch(const LaunchPlan& plan) const {
    DispatchArgs args = {};
    args.op = OpKind::kDispatch, args.hash = 1, args.axis_index = axis_index;
    args.num_tokens = tokens, args.top_k = kTopK;
    args.x = x, args.row_bytes = kRowBytes, args.cast = cast;
    args.num_scales = cast ? divide_up(kHidden, kChannelsPerScale) : 0;
    args.topk_idx = ids, args.topk_weights = topk_weights, args.send_index = send_index;
    args.layout = Layout::kRagged, args.capacity = args.num_rows = capacity, args.alignment = 1;
    args.out = recv, args.out_row_bytes = cast ? kHidden : kRowBytes, args.out_scales = cast ? scales : nullptr;
    args.weights = weights, args.counts = counts, args.group_sizes = group_sizes, args.num_dropped = num_dropped;
    args.recv_row = recv_row, args.num_recv_per_rank = num_recv_per_rank;
    if (kToken) {
      args.layout = Layout::kToken, args.capacity = args.num_rows = int64_t{num_ranks} * tokens;
      args.named_slot = slots, args.recv_topk_idx = recv_topk_idx, args.num_rows_per_rank = num_rows_per_rank;
    }
    must(launch_dispatch(peers, args, ElementType::kBFloat16, plan, stream));
  }

  void combine(const LaunchPlan& plan) const {
    CombineArgs args = {};
    args.op = OpKind::kCombine, args.hash = 2, args.axis_index = axis_index;
    args.num_tokens = tokens, args.top_k = kTopK;
    args.y = y, args.row_bytes = kRowBytes, args.row_weights = kToken ? nullptr : weights, args.cast = kCastBack;
    args.recv_row = recv_row, args.num_recv_per_rank = num_recv_per_rank, args.send_index = send_index;
    args.out = out, args.out_type = ElementType::kBFloat16;
    must(launch_combine(peers, args, ElementType::kBFloat16, plan, stream));
  }

  // Along the route of a dispatch.
  void combine_back(const LaunchPlan& plan) const {
    DispatchArgs args = {};
    args.op = OpKind::kCombineBack, args.hash = 3, args.axis_index = axis_index;
    args.num_tokens = tokens, args.top_k = kTopK;
    args.x = x, args.row_bytes = kRowBytes, args.delivery = Delivery::kCombineBack;
    args.cast = cast, args.num_scales = cast ? divide_up(kHidden, kChannelsPerScale) : 0;
    args.known_send_index = send_index, args.known_recv_row = recv_row,
    args.known_num_recv_per_rank = num_recv_per_rank;
    args.known_counts = counts, args.known_group_sizes = group_sizes;
    args.layout = Layout::kRagged, args.capacity = args.num_rows = capacity, args.alignment = 1;
    args.zero_pad = setting("ZERO_PAD", 1) != 0;
    args.out = recv, args.out_row_bytes = kRowBytes;
    args.y = y, args.row_weights = weights, args.weights_cotangent = weights_cotangent;
    must(launch_dispatch(peers, args, ElementType::kBFloat16, plan, stream));
  }

  void dispatch_back(const LaunchPlan& plan) const {
    CombineArgs args = {};
    args.op = OpKind::kDispatchBack, args.hash = 4, args.axis_index = axis_index;
    args.num_tokens = tokens, args.top_k = kTopK;
    args.y = recv, args.row_bytes = kRowBytes, args.weights_cotangent = weights_cotangent, args.cast = kCastBack;
    args.recv_row = recv_row, args.num_recv_per_rank = num_recv_per_rank, args.send_index = send_index;
    args.out = out, args.out_type = ElementType::kBFloat16, args.topk_weights_cotangent = topk_weights;
    must(launch_combine(peers, args, ElementType::kBFloat16, plan, stream));
  }
};

// Microseconds of one of the operations that `enqueue` puts into a graph: the slowest rank, the median of some replays.
// A measurement is one range of profilers: 2 * kOps * kReplays operations per rank, of which half are timed.
float measure(const std::vector<std::unique_ptr<Rank>>& ranks, const std::function<void(Rank&)>& enqueue) {
  const size_t n = ranks.size();
  std::vector<cudaGraphExec_t> graphs(n);
  std::vector<cudaEvent_t> begin(n), end(n);
  for (size_t r = 0; r < n; ++r) {
    must(cudaSetDevice(ranks[r]->device));
    must(cudaEventCreate(&begin[r])), must(cudaEventCreate(&end[r]));
    cudaGraph_t graph;
    must(cudaStreamBeginCapture(ranks[r]->stream, cudaStreamCaptureModeThreadLocal));
    for (int32_t i = 0; i < kOps; ++i) enqueue(*ranks[r]);
    must(cudaStreamEndCapture(ranks[r]->stream, &graph));
    must(cudaGraphInstantiate(&graphs[r], graph, 0));
    must(cudaGraphUpload(graphs[r], ranks[r]->stream));
    must(cudaGraphDestroy(graph));
  }
  std::vector<float> times;
  must(cudaProfilerStart());
  for (int32_t replay = 0; replay < kReplays; ++replay) {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < n; ++r) {
      threads.emplace_back([&, r] {
        must(cudaSetDevice(ranks[r]->device));
        must(cudaGraphLaunch(graphs[r], ranks[r]->stream));  // the ranks meet here
        must(cudaEventRecord(begin[r], ranks[r]->stream));
        must(cudaGraphLaunch(graphs[r], ranks[r]->stream));
        must(cudaEventRecord(end[r], ranks[r]->stream));
        must(cudaStreamSynchronize(ranks[r]->stream));
      });
    }
    for (auto& thread : threads) thread.join();
    float slowest = 0;
    for (size_t r = 0; r < n; ++r) {
      float ms;
      must(cudaEventElapsedTime(&ms, begin[r], end[r]));
      slowest = std::max(slowest, ms);
    }
    times.push_back(slowest * 1e3f / kOps);
  }
  must(cudaProfilerStop());
  for (cudaGraphExec_t graph : graphs) must(cudaGraphExecDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

#ifdef JAX_EP_TIMELINE
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}

// What blocks did when, in microseconds since the first of them began: the first, the median and the last of them,
// means over the last operations and the ranks. And what passes from the last block's end to the next operation's
// first.
void print_timeline(const std::vector<std::unique_ptr<Rank>>& ranks, const LaunchPlan& plan) {
  struct Role {
    const char* name;
    int32_t first, last;
    std::vector<double> at[kTimelinePhases][3] = {};
  };
  Role roles[] = {
      {"announcer", 0, 1}, {"senders", 1, plan.num_senders}, {"receivers", plan.first_receiver, plan.num_blocks}};
  std::vector<double> gaps;
  for (const auto& rank : ranks) {
    std::vector<uint64_t> stamps(size_t{kTimelineOps} * kTimelineBlocks * kTimelinePhases);
    must(cudaSetDevice(rank->device));
    must(cudaMemcpy(stamps.data(), rank->peers.timeline, stamps.size() * 8, cudaMemcpyDeviceToHost));
    std::map<uint64_t, uint64_t> spans;
    for (int32_t op = 0; op < kTimelineOps; ++op) {
      const uint64_t* of_op = &stamps[size_t(op) * kTimelineBlocks * kTimelinePhases];
      uint64_t begin = ~uint64_t{0}, end = 0;
      for (int32_t block = 0; block < plan.num_blocks; ++block) {
        begin = std::min(begin, of_op[block * kTimelinePhases]);
        end = std::max(end, of_op[block * kTimelinePhases + 5]);
      }
      spans[begin] = end;
      for (Role& role : roles) {
        for (int32_t phase = 0; phase < kTimelinePhases; ++phase) {
          std::vector<double> at;
          for (int32_t block = role.first; block < role.last; ++block) {
            const uint64_t stamp = of_op[block * kTimelinePhases + phase];
            if (stamp >= begin) at.push_back((stamp - begin) * 1e-3);
          }
          if (at.empty()) continue;
          std::sort(at.begin(), at.end());
          role.at[phase][0].push_back(at.front());
          role.at[phase][1].push_back(at[at.size() / 2]);
          role.at[phase][2].push_back(at.back());
        }
      }
    }
    for (auto span = spans.begin(); std::next(span) != spans.end(); ++span)
      gaps.push_back((std::next(span)->first - span->second) * 1e-3);
  }
  for (const Role& role : roles) {
    std::printf("    %-9s", role.name);
    for (int32_t phase = 0; phase < kTimelinePhases; ++phase) {
      const auto& at = role.at[phase];
      if (!at[0].empty()) std::printf("  [%d] %5.2f %5.2f %5.2f", phase, mean(at[0]), mean(at[1]), mean(at[2]));
    }
    std::printf("\n");
  }
  std::printf("    gap %.2f\n", mean(gaps));
}
#else
void print_timeline(const std::vector<std::unique_ptr<Rank>>&, const LaunchPlan&) {}
#endif

}  // namespace

int main(int argc, char** argv) {
  const auto arg = [&](int i, int32_t otherwise) {
    return argc > i && std::atoi(argv[i]) > 0 ? std::atoi(argv[i]) : otherwise;
  };
  int num_devices = 0;
  must(cudaGetDeviceCount(&num_devices));
  const int32_t num_ranks = setting("RANKS", num_devices);
  const int32_t tokens = arg(1, 128), cast = arg(2, 0);
  const bool grad = setting("GRAD", 0) != 0;
  int device_sms = 0;
  must(cudaDeviceGetAttribute(&device_sms, cudaDevAttrMultiProcessorCount, 0));
  device_sms = setting("DEVICE_SMS", device_sms);
  const auto log_of = [](int32_t n) { return n < 2 ? 0 : n < 4 ? 1 : n < 8 ? 2 : n < 16 ? 3 : n < 32 ? 4 : 5; };
  const auto adjusted = [&](LaunchPlan plan, int first) {
    const int32_t senders = arg(first, plan.num_senders), receivers = arg(first + 1, plan.num_receivers());
    // A low-latency combine has at most one block per SM; some blocks may send and then receive.
    const int32_t most = first == 8 && is_low_latency(plan.variant) ? device_sms : senders + receivers;
    plan.num_senders = std::min(senders, most);
    plan.num_blocks = std::min(senders + receivers, most);
    plan.first_receiver = plan.num_blocks - std::min(receivers, most);
    plan.log_block_warps = log_of(arg(first + 2, plan.block_warps()));
    plan.log_send_warps = log_of(arg(first + 3, 1 << plan.log_send_warps));
    plan.log_receive_warps = log_of(arg(first + 4, 1 << plan.log_receive_warps));
    if (plan.block_warps() <= kLowLatencyBlockWarps) {
      plan.variant = Variant::kLowLatency;
    }
    if (setting("VARIANT", -1) >= 0) plan.variant = static_cast<Variant>(setting("VARIANT", 0));
    plan.sums_own = setting("SUMS_OWN", plan.sums_own);
    const int32_t steps = setting("OWN_STEPS", plan.senders_write_own() ? 2 : 0);
    plan.tokens_with_own_items =
        steps > 0 ? steps * WarpGroup::of_senders(plan, 0, 0).num_groups : LaunchPlan::kAllTokens;
    return plan;
  };
  const int32_t out_chunks = num_chunks(cast ? kHidden : kRowBytes);
  const LaunchPlan out =
      adjusted(plan_dispatch(tokens, num_ranks, kTopK, out_chunks, kNumSms, device_sms, grad, cast != 0), 3);
  const LaunchPlan back = adjusted(
      plan_combine(tokens, num_ranks, kTopK, num_chunks(kRowBytes), kCastBack ? 2 : 1, kNumSms, device_sms, kToken), 8);
  std::vector<int32_t> devices(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) devices[r] = r % num_devices;
  GroupConfig config = {kExperts, kTopK, tokens, kRowBytes, kNumSms, 5.0, {devices}};
  if (setting("SHARED", 0)) {
    config.sharing = Sharing::kFileDescriptor;
    config.exchange = [](const ProcessHandle&) { return std::vector<ProcessHandle>(); };
  }
  Group group(config);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t r = 0; r < num_ranks; ++r) {
    must(cudaSetDevice(devices[r]));
    ranks.push_back(std::make_unique<Rank>(group.members()[r], r, num_ranks, tokens, cast));
    must(cudaDeviceSynchronize());
  }
  const auto run_out = [&](Rank& rank) { grad ? rank.combine_back(out) : rank.dispatch(out); };
  const auto run_back = [&](Rank& rank) { grad ? rank.dispatch_back(back) : rank.combine(back); };
  if (grad) measure(ranks, [&](Rank& rank) { rank.dispatch(out); });
  const float out_us = measure(ranks, run_out);
  std::vector<std::vector<uint64_t>> stamps;
  const auto print_plan = [](const char* name, const LaunchPlan& plan) {
    std::printf(" %s %d+%d blocks of %d warps, %d, %d a row;", name, plan.num_senders, plan.num_receivers(),
                plan.block_warps(), 1 << plan.log_send_warps, 1 << plan.log_receive_warps);
  };
  std::printf("T %d cast %d:", tokens, cast);
  print_plan(grad ? "combine_back" : "dispatch", out), print_plan(grad ? "dispatch_back" : "combine", back);
  std::printf("\n");
  print_timeline(ranks, out);
  const float back_us = measure(ranks, run_back);
  print_timeline(ranks, back);
  const float pair = measure(ranks, [&](Rank& rank) { run_out(rank), run_back(rank); });
  std::printf("  %s %.2f %s %.2f pair %.2f us%s\n", grad ? "combine_back" : "dispatch", out_us,
              grad ? "dispatch_back" : "combine", back_us, pair, group.failure() ? " FAILED" : "");
  return group.failure() ? 1 : 0;
}
