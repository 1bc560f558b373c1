// Runs the CUDA backend's operations between 1 to 8 ranks that share ONE GPU, each on a stream of its own. Meant for
// compute-sanitizer as much as for its own checks; several epochs, so that slots are used again.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "check.h"
#include "ffi/cuda/gather.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/scatter.h"

using namespace jax_ep;

namespace {

// A row is more than two pieces of y in shared memory (gather.cu), and the last one is not whole.
constexpr int32_t kTokens = 12, kTopK = 4, kHidden = 1152, kAlignment = 4, kRepeats = 40;
constexpr int64_t kRowBytes = kHidden * sizeof(float);
int32_t experts_per_rank = 3;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << cudaGetErrorString(status) << "\n";
  std::exit(1);
}

// Device memory with a host copy.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(size_t size) : host(size) { must(cudaMalloc(&device, size * sizeof(T))); }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void upload() { must(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  const std::vector<T>& download() {
    must(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

// The buffers of one rank.
struct Rank {
  int32_t ranks, experts = ranks * experts_per_rank;
  int64_t capacity = align_up(int64_t{ranks} * kTokens * kTopK + experts_per_rank * (kAlignment - 1), kAlignment);
  cudaStream_t stream;
  Array<int32_t> axis_index{1}, ids{kTokens * kTopK}, place{size_t(kTokens) * ranks},
      rows{size_t(ranks) * kTokens * kTopK}, num_arrived{size_t(ranks)}, counts{size_t(experts_per_rank)},
      group_sizes{size_t(experts_per_rank)}, num_dropped{1};
  Array<Ticket> dispatch_ticket{1}, combine_ticket{1};
  Array<float> x{kTokens * kHidden}, topk_weights{kTokens * kTopK}, recv{size_t(capacity) * kHidden},
      weights{size_t(capacity)}, like{size_t(capacity) * kHidden}, out{kTokens * kHidden},
      cotangent{size_t(capacity) * kHidden}, weights_cotangent{size_t(capacity)}, x_cotangent{kTokens * kHidden},
      topk_cotangent{kTokens * kTopK};

  Rank(int32_t ranks, int32_t rank) : ranks(ranks) {
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    axis_index.host[0] = rank;
    axis_index.upload();
  }
  ~Rank() { cudaStreamDestroy(stream); }

  void randomize(std::mt19937& random) {
    for (float& value : x.host) value = std::uniform_real_distribution<float>(-1, 1)(random);
    for (float& value : topk_weights.host) value = std::uniform_real_distribution<float>(0, 1)(random);
    for (int32_t& id : ids.host) id = std::uniform_int_distribution<int32_t>(-2, experts + 1)(random);
    x.upload(), topk_weights.upload(), ids.upload();
  }

  // Makes some units look like ones that have not arrived, and like their stand-ins (units.cuh).
  void look_empty(std::mt19937& random) {
    uint8_t bytes[kUnitBytes];
    std::memset(bytes, kEmptyByte, sizeof(bytes));
    for (int32_t unit = 0; unit < kTokens * kHidden / 4; ++unit) {
      const uint32_t choice = random() % 16;
      if (choice > 2) continue;
      bytes[12] = choice == 0 ? kEmptyByte : kEmptyByte ^ 1;
      if (choice == 2) bytes[15] ^= 1;
      std::memcpy(&x.host[unit * 4], bytes, sizeof(bytes));
      bytes[15] = kEmptyByte;
    }
    x.upload();
  }

  ScatterArgs scatter(OpKind op) {
    ScatterArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = kTokens, args.top_k = kTopK;
    args.x = x.device, args.row_bytes = args.out_row_bytes = kRowBytes;
    args.layout = Layout::kRagged, args.capacity = args.num_rows = capacity, args.alignment = kAlignment;
    args.zero_pad = true;
    return args;
  }
  ScatterArgs dispatch(int32_t cast) {
    ScatterArgs args = scatter(OpKind::kDispatch);
    args.cast = cast, args.num_scales = cast ? kHidden / kChannelsPerScale : 0;
    args.arrival = cast ? Arrival::kDequantize : Arrival::kCopy;
    args.topk_idx = ids.device, args.topk_weights = topk_weights.device, args.place = place.device;
    args.out = recv.device, args.weights = weights.device, args.counts = counts.device;
    args.group_sizes = group_sizes.device, args.num_dropped = num_dropped.device, args.rows = rows.device;
    args.num_arrived = num_arrived.device;
    return args;
  }
  ScatterArgs dispatch_in_halves(int32_t cast) {
    ScatterArgs args = dispatch(cast);
    args.half = Half::kDone, args.ticket = dispatch_ticket.device;
    return args;
  }
  ScatterArgs along_route(OpKind op, Array<float>& result) {
    ScatterArgs args = scatter(op);
    args.known_place = place.device, args.known_rows = rows.device, args.known_num_arrived = num_arrived.device;
    args.known_counts = counts.device, args.known_group_sizes = group_sizes.device, args.out = result.device;
    return args;
  }
  ScatterArgs combine_back() {
    ScatterArgs args = along_route(OpKind::kCombineBack, cotangent);
    args.arrival = Arrival::kCombineBack;
    args.row_weights = weights.device, args.y = recv.device, args.weights_cotangent = weights_cotangent.device;
    return args;
  }
  GatherArgs gather(OpKind op, Array<float>& result) {
    GatherArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = kTokens, args.top_k = kTopK;
    args.y = recv.device, args.row_bytes = kRowBytes;
    args.rows = rows.device, args.num_arrived = num_arrived.device, args.place = place.device;
    args.out = result.device, args.out_type = ElementType::kFloat32;
    return args;
  }
  GatherArgs combine() {
    GatherArgs args = gather(OpKind::kCombine, out);
    args.row_weights = weights.device;
    return args;
  }
  GatherArgs combine_in_halves() {
    GatherArgs args = combine();
    args.half = Half::kDone, args.ticket = combine_ticket.device;
    return args;
  }
  GatherArgs dispatch_back() {
    GatherArgs args = gather(OpKind::kDispatchBack, x_cotangent);
    args.weights_to_send = weights.device, args.topk_weights = topk_cotangent.device;
    return args;
  }
};

// Some of what a start and its done must have in common.
Buffers buffers_of(const ScatterArgs& args) { return {args.x, args.out, args.ticket}; }
Buffers buffers_of(const GatherArgs& args) { return {args.y, args.out, args.ticket}; }

__global__ void count_differences(const uint32_t* a, const uint32_t* b, size_t words, int32_t* differences) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(differences, 1);
  }
}

// A result, and what it must be every time.
struct Repeated {
  uint32_t *result, *expected;
  size_t words;

  template <typename T>
  explicit Repeated(const Array<T>& array)
      : result(reinterpret_cast<uint32_t*>(array.device)), words(array.host.size() * sizeof(T) / 4) {
    must(cudaMalloc(&expected, words * 4));
    must(cudaMemcpy(expected, result, words * 4, cudaMemcpyDeviceToDevice));
  }
};

// Whether |got - expected| is small against the values' size.
void expect_near(const std::vector<float>& got, const std::vector<float>& expected, float tolerance, const char* what) {
  float worst = 0;
  for (size_t i = 0; i < got.size(); ++i) worst = std::fmax(worst, std::fabs(got[i] - expected[i]));
  if (worst <= tolerance) return;  // false for NaN, too
  ++check::failures;
  std::cerr << what << " is off by " << worst << "\n";
}

bool same_bits(const float* a, const float* b) { return std::memcmp(a, b, kRowBytes) == 0; }

// Whether every row arrived as it was sent, and came back so where it was alone.
void check_bits(const std::vector<std::unique_ptr<Rank>>& ranks) {
  for (auto& rank : ranks) rank->place.download(), rank->rows.download(), rank->recv.download();
  for (size_t s = 0; s < ranks.size(); ++s) {
    Rank& source = *ranks[s];
    source.x_cotangent.download();
    for (int32_t token = 0; token < kTokens; ++token) {
      const float* x = &source.x.host[token * kHidden];
      int32_t num_rows = 0;
      for (int32_t k = 0; k < kTopK; ++k) {
        const int32_t expert = source.ids.host[token * kTopK + k];
        if (!is_expert(expert, source.experts)) continue;
        Rank& target = *ranks[rank_of_expert(expert, experts_per_rank)];
        const int32_t index = source.place.host[token * ranks.size() + rank_of_expert(expert, experts_per_rank)];
        const int32_t row = target.rows.host[(s * kTokens + index) * kTopK + k];
        EXPECT_EQ(same_bits(&target.recv.host[int64_t{row} * kHidden], x), true);
        ++num_rows;
      }
      if (num_rows == 1) EXPECT_EQ(same_bits(&source.x_cotangent.host[token * kHidden], x), true);
    }
  }
}

void check_rank(Rank& rank, float tolerance) {
  std::vector<float> combined(kTokens * kHidden), summed(kTokens * kHidden), returned(kTokens * kTopK);
  for (int32_t token = 0; token < kTokens; ++token) {
    for (int32_t k = 0; k < kTopK; ++k) {
      const int32_t entry = token * kTopK + k;
      if (!is_expert(rank.ids.host[entry], rank.experts)) continue;
      returned[entry] = rank.topk_weights.host[entry];
      for (int32_t h = 0; h < kHidden; ++h) {
        combined[token * kHidden + h] += rank.topk_weights.host[entry] * rank.x.host[token * kHidden + h];
        summed[token * kHidden + h] += rank.x.host[token * kHidden + h];
      }
    }
  }
  expect_near(rank.out.download(), combined, tolerance, "combine");
  expect_near(rank.x_cotangent.download(), summed, tolerance, "dispatch (backward), x");
  expect_near(rank.topk_cotangent.download(), returned, 0, "dispatch (backward), topk_weights");
  rank.recv.download(), rank.weights.download();
  expect_near(rank.like.download(), rank.recv.host, tolerance, "dispatch_like");
  std::vector<float> weighted(rank.recv.host.size()), products(rank.weights.host.size());
  for (size_t i = 0; i < weighted.size(); ++i) {
    weighted[i] = rank.weights.host[i / kHidden] * rank.like.host[i];
    products[i / kHidden] += rank.recv.host[i] * rank.like.host[i];
  }
  expect_near(rank.cotangent.download(), weighted, tolerance, "combine (backward), y");
  expect_near(rank.weights_cotangent.download(), products, 1e-3f, "combine (backward), weights");
  EXPECT_EQ(rank.num_dropped.download()[0], 0);
}

// Whether the group's counters are those of one operation of each kind that exchange() begins with.
void check_stats(const Group& group, const std::vector<std::unique_ptr<Rank>>& ranks, int32_t cast) {
  const auto tokens_to = [&](size_t source, size_t target) {
    uint64_t tokens = 0;
    for (int32_t token = 0; token < kTokens; ++token) {
      bool is_sent = false;
      for (int32_t k = 0; k < kTopK; ++k) {
        const int32_t expert = ranks[source]->ids.host[token * kTopK + k];
        is_sent |= is_expert(expert, ranks[source]->experts) &&
                   rank_of_expert(expert, experts_per_rank) == static_cast<int32_t>(target);
      }
      tokens += is_sent;
    }
    return tokens;
  };
  constexpr uint64_t kHeader = kTopK * kUnitBytes;
  const uint64_t dispatched = kHeader + (cast ? kHidden + kUnitBytes * num_chunks(kHidden) : kRowBytes);
  const uint64_t bytes_out = dispatched + 2 * kRowBytes, bytes_back = 2 * kRowBytes + kHeader;
  const std::vector<uint64_t> one_each = {1, 1, 1, 1, 1, 0, 0};  // no all_to_all
  const std::vector<RankStats> stats = group.stats();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_EQ(stats[rank].operations, one_each);
    EXPECT_EQ(stats[rank].dropped, uint64_t{0});
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      const uint64_t out = tokens_to(rank, peer), back = tokens_to(peer, rank);
      const PeerStats& with_peer = stats[rank].peers[peer];
      EXPECT_EQ(with_peer.sent.rows, 3 * out + 2 * back);
      EXPECT_EQ(with_peer.sent.bytes, bytes_out * out + bytes_back * back);
      EXPECT_EQ(with_peer.received.rows, 3 * back + 2 * out);
      EXPECT_EQ(with_peer.received.bytes, bytes_out * back + bytes_back * out);
      EXPECT_EQ(with_peer.waited_ns < uint64_t{60'000'000'000}, true);
    }
  }
}

// Thread blocks of each rank, few enough for all ranks to be on the GPU at once, and the kernels' form; 0 for what
// plan.h likes. And whether own rows may be summed where other ranks' sums come.
struct Blocks {
  int32_t number;
  Form form;
  bool sums_own = true;

  LaunchPlan adjust(LaunchPlan plan) const {
    if (number == 0 && form != Form::kFewRowsDense) return plan;
    plan.form = form;
    plan.sums_own &= sums_own;
    if (form == Form::kFewRowsDense) plan.log_send_warps = plan.log_receive_warps = 0;  // a warp has all of a row
    return plan;
  }
};

void exchange(int32_t num_ranks, int32_t cast, Blocks blocks, int32_t repeats, uint32_t newest_epoch = 0) {
  const int32_t num_blocks = blocks.number;
  const std::vector<int32_t> devices(num_ranks, 0);
  Group group({num_ranks * experts_per_rank, kTopK, kTokens, kRowBytes, num_blocks, 60.0, {devices}});
  for (const Member& member : group.members()) {
    Control control = initial_control(member.peers.layout.num_slots, newest_epoch);
    for (auto& words : control.claimed) std::fill(std::begin(words), std::end(words), uint64_t{newest_epoch} << 32);
    must(cudaMemcpy(member.peers.control, &control, sizeof(control), cudaMemcpyHostToDevice));
  }
  const LaunchPlan gather_plan =
      blocks.adjust(plan_gather(kTokens, num_ranks, kTopK, num_chunks(kRowBytes), num_blocks));
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t rank = 0; rank < num_ranks; ++rank) ranks.push_back(std::make_unique<Rank>(num_ranks, rank));
  const auto on_all = [&](auto launch) {
    for (int32_t r = 0; r < num_ranks; ++r) launch(group.members()[r], *ranks[r]);
  };
  const auto body_of = [&](const Member& member, const auto& call) -> Halves::Body {
    const Peers& peers = member.peers;
    if constexpr (std::is_same_v<decltype(call), const ScatterArgs&>) {
      const LaunchPlan plan =
          blocks.adjust(plan_scatter(kTokens, num_ranks, kTopK, num_chunks(call.num_scales ? kHidden : kRowBytes),
                                     num_blocks, call.arrival == Arrival::kCombineBack));
      const auto launch = [&peers, call, plan](cudaStream_t stream) {
        return launch_scatter(peers, call, ElementType::kFloat32, plan, stream);
      };
      return {launch, plan.num_blocks};
    } else {
      const auto launch = [&peers, call, gather_plan](cudaStream_t stream) {
        return launch_gather(peers, call, ElementType::kFloat32, gather_plan, stream);
      };
      return {launch, gather_plan.num_blocks};
    }
  };
  const auto whole = [&](auto args) {
    on_all([&](const Member& member, Rank& rank) { must(body_of(member, args(rank)).launch(rank.stream)); });
  };
  const auto start = [&](auto args) {
    on_all([&](const Member& member, Rank& rank) {
      const auto call = args(rank);
      member.halves->start(call, buffers_of(call), body_of(member, call), rank.stream);
    });
  };
  const auto done = [&](auto args) {
    on_all([&](const Member& member, Rank& rank) { member.halves->done(buffers_of(args(rank)), rank.stream); });
  };
  std::mt19937 random(num_ranks);
  for (int32_t round = 0; round < 3; ++round) {
    for (auto& rank : ranks) rank->randomize(random);
    must(cudaDeviceSynchronize());
    whole([&](Rank& rank) { return rank.dispatch(cast); });
    whole([&](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    whole([&](Rank& rank) { return rank.combine_back(); });
    whole([&](Rank& rank) { return rank.combine(); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    must(cudaDeviceSynchronize());
    EXPECT_EQ(group.failure().has_value(), false);
    const float tolerance = cast ? 0.3f : 1e-5f;
    for (auto& rank : ranks) check_rank(*rank, tolerance);
    if (round == 0) check_stats(group, ranks, cast);

    // The same in halves, with another operation between a start and its done, and two starts under way.
    for (auto& rank : ranks) must(cudaMemset(rank->recv.device, 0xff, rank->recv.host.size() * sizeof(float)));
    const auto dispatch = [&](Rank& rank) { return rank.dispatch_in_halves(cast); };
    const auto combine = [&](Rank& rank) { return rank.combine_in_halves(); };
    start(dispatch);
    whole([&](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    done(dispatch);
    start(combine);
    start(dispatch);
    done(combine);
    done(dispatch);
    must(cudaDeviceSynchronize());
    EXPECT_EQ(group.failure().has_value(), false);
    for (auto& rank : ranks) check_rank(*rank, tolerance);
  }
  // Again and again, the ranks as far apart as they get: always the same bits.
  std::vector<std::vector<Repeated>> results;
  std::vector<std::unique_ptr<Array<int32_t>>> differences;
  for (auto& rank : ranks) {
    results.push_back({Repeated(rank->recv), Repeated(rank->like), Repeated(rank->out), Repeated(rank->cotangent),
                       Repeated(rank->weights_cotangent), Repeated(rank->x_cotangent), Repeated(rank->topk_cotangent),
                       Repeated(rank->rows), Repeated(rank->weights)});
    differences.push_back(std::make_unique<Array<int32_t>>(1));
    differences.back()->upload();
  }
  for (int32_t round = 0; round < repeats; ++round) {
    for (int32_t r = 0; r < num_ranks; ++r) {
      for (const Repeated& repeated : results[r]) {
        must(cudaMemsetAsync(repeated.result, 0xff, repeated.words * 4, ranks[r]->stream));
      }
    }
    whole([&](Rank& rank) { return rank.dispatch(cast); });
    whole([&](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    whole([&](Rank& rank) { return rank.combine(); });
    whole([&](Rank& rank) { return rank.combine_back(); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    for (int32_t r = 0; r < num_ranks; ++r) {
      for (const Repeated& repeated : results[r]) {
        count_differences<<<8, 256, 0, ranks[r]->stream>>>(repeated.result, repeated.expected, repeated.words,
                                                           differences[r]->device);
      }
    }
  }
  must(cudaDeviceSynchronize());
  for (int32_t r = 0; r < num_ranks; ++r) {
    EXPECT_EQ(differences[r]->download()[0], 0);
    for (const Repeated& repeated : results[r]) must(cudaFree(repeated.expected));
  }
  EXPECT_EQ(group.failure().has_value(), false);
  if (cast != 0) return;
  for (auto& rank : ranks) rank->look_empty(random);
  must(cudaDeviceSynchronize());
  whole([&](Rank& rank) { return rank.dispatch(0); });
  whole([&](Rank& rank) { return rank.dispatch_back(); });
  must(cudaDeviceSynchronize());
  EXPECT_EQ(group.failure().has_value(), false);
  check_bits(ranks);
}

// What is no start and its done is refused, and does no harm to what is.
void unlike_halves() {
  Group group({experts_per_rank, kTopK, kTokens, kRowBytes, 0, 2.0, {{0}}});
  const Member& member = group.members()[0];
  const LaunchPlan plan = plan_scatter(kTokens, 1, kTopK, num_chunks(kRowBytes), 0, false);
  Rank rank(1, 0);
  std::mt19937 random(0);
  rank.randomize(random);
  const ScatterArgs call = rank.dispatch_in_halves(0);
  const Buffers buffers = buffers_of(call);
  const auto start = [&] {
    const auto launch = [&](cudaStream_t on) {
      return launch_scatter(member.peers, call, ElementType::kFloat32, plan, on);
    };
    member.halves->start(call, buffers, {launch, plan.num_blocks}, rank.stream);
  };
  const auto is_refused = [&](const Buffers& buffers) {
    try {
      member.halves->done(buffers, rank.stream);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  for (int32_t round = 0; round < 3; ++round) {
    EXPECT_EQ(is_refused(buffers), true);
    start();
    EXPECT_EQ(is_refused({call.x, call.out, rank.combine_ticket.device}), true);
    EXPECT_EQ(is_refused({call.out, call.out, call.ticket}), true);
    EXPECT_EQ(is_refused(buffers), false);
  }
  must(cudaDeviceSynchronize());
  EXPECT_EQ(group.failure().has_value(), false);
  start();
  start();  // where the first one's epoch was: its done does not come
  group.close();
}

// More blocks than the GPU holds at once: some leave before others enter.
void more_blocks_than_fit() {
  constexpr int32_t kBlocks = 1000;
  Group group({experts_per_rank, kTopK, kTokens, kRowBytes, 0, 2.0, {{0}}});
  const Peers& peers = group.members()[0].peers;
  LaunchPlan gather_plan = plan_gather(kTokens, 1, kTopK, num_chunks(kRowBytes), 0);
  LaunchPlan scatter_plans[] = {plan_scatter(kTokens, 1, kTopK, num_chunks(kRowBytes), 0, false),
                                plan_scatter(kTokens, 1, kTopK, num_chunks(kRowBytes), 5, false)};  // with shared rows
  for (LaunchPlan* plan : {&gather_plan, &scatter_plans[0], &scatter_plans[1]}) {
    plan->num_senders = plan->first_receiver = kBlocks;
    plan->num_blocks = 2 * kBlocks;
  }
  Rank rank(1, 0);
  std::mt19937 random(0);
  rank.randomize(random);
  for (int32_t round = 0; round < 3; ++round) {
    for (const LaunchPlan& plan : scatter_plans) {
      must(launch_scatter(peers, rank.dispatch(0), ElementType::kFloat32, plan, rank.stream));
    }
    must(launch_gather(peers, rank.combine(), ElementType::kFloat32, gather_plan, rank.stream));
  }
  must(cudaDeviceSynchronize());
  EXPECT_EQ(group.failure().has_value(), false);
}

}  // namespace

int main(int argc, char** argv) {
  const int32_t most_ranks = argc > 1 ? std::atoi(argv[1]) : 8;
  const bool is_quick = argc > 2;  // for the sanitizers, under which a kernel takes long
  const Blocks any = {0, Form::kFewRows};
  const Blocks long_rows = {0, Form::kFewRowsDense};
  const std::vector<Blocks> quick = {
      any, long_rows, {1, Form::kManyRows}, {5, Form::kUsual}, {5, Form::kUsual, false}, {5, Form::kManyRows}};
  const std::vector<Blocks> all = {any,
                                   long_rows,
                                   {1, Form::kUsual},
                                   {2, Form::kManyRows},
                                   {5, Form::kManyRows},
                                   {5, Form::kUsual},
                                   {5, Form::kUsual, false},
                                   {8, Form::kUsual},
                                   {8, Form::kManyRows}};
  for (int32_t num_ranks = 1; num_ranks <= most_ranks; num_ranks *= 2) {
    for (int32_t cast = 0; cast <= 2; ++cast) {
      for (Blocks blocks : is_quick ? quick : all) {
        if (blocks.number == 0 && num_ranks > 2) continue;
        exchange(num_ranks, cast, blocks, is_quick ? 1 : kRepeats);
      }
    }
    std::cerr << num_ranks << " ranks: " << check::failures << " failures\n";
  }
  unlike_halves();
  if (!is_quick) more_blocks_than_fit();
  // A lane has two experts at a time, a warp 64, a block one for each thread.
  for (int32_t number : is_quick ? std::vector{300} : std::vector{1, 257, 300, 384, 544}) {
    experts_per_rank = number;
    for (Blocks blocks : {any, Blocks{5, Form::kUsual}}) exchange(std::min(most_ranks, 2), 0, blocks, 1);
  }
  // Epoch 0 is that of each operation in turn, behind others that wrote what it waits for: it must wait as any other.
  for (uint32_t before : {10, 11, 12, 13, 14, 17, 18}) {
    for (Blocks blocks : {any, Blocks{5, Form::kManyRows}}) exchange(std::min(most_ranks, 2), 0, blocks, 1, -before);
  }
  std::cerr << "odd numbers of experts, epochs that wrap: " << check::failures << " failures\n";
  return check::exit_status();
}
