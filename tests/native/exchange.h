// A group of 1 to 8 ranks, the buffers of their operations, and what results must be: for exchange_test.cu, which runs
// them on a GPU, or emulated.
#pragma once

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
#include "ffi/cuda/combine.h"
#include "ffi/cuda/dispatch.h"
#include "ffi/cuda/group.h"
#include "ffi/cuda/launch.cuh"

using namespace jax_ep;

namespace {

// A row is more than two pieces of y in shared memory (combine.cu), and the last one is not whole.
constexpr int32_t kHidden = 1152, kAlignment = 4;
constexpr int64_t kRowBytes = kHidden * sizeof(float);
constexpr int32_t kStreams = 4, kPending = 3;
// Of every rank, as the program chooses them.
int32_t experts_per_rank = 3, num_tokens = 12, top_k = 4;

// The ranks share GPU 0; an emulated rank has a device of its own.
#ifdef JAX_EP_EMULATOR
constexpr bool kOneDevice = false;
#else
constexpr bool kOneDevice = true;
#endif
int32_t device_of(int32_t rank) { return kOneDevice ? 0 : rank; }

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << cudaGetErrorString(status) << "\n";
  std::exit(1);
}

// Waits for all that the ranks' devices have to do.
void synchronize(int32_t num_ranks) {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    must(cudaSetDevice(device_of(rank)));
    must(cudaDeviceSynchronize());
  }
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

// Rows of channels. The host has floats. In device memory, a row has floats or, where an operation casts to fp8,
// bfloat16, which takes the first half of the memory.
struct Activations : Array<float> {
  bool is_bfloat16 = false;

  using Array::Array;
  int64_t row_bytes() const { return is_bfloat16 ? kRowBytes / 2 : kRowBytes; }
  const std::vector<float>& download() {
    Array::download();
    if (!is_bfloat16) return host;
    std::vector<uint16_t> upper(host.size());  // a bfloat16 is the upper half of a float
    std::memcpy(upper.data(), host.data(), upper.size() * sizeof(uint16_t));
    for (size_t i = 0; i < host.size(); ++i) {
      const uint32_t bits = uint32_t{upper[i]} << 16;
      std::memcpy(&host[i], &bits, sizeof(bits));
    }
    return host;
  }
};

// Makes some units look like ones that have not arrived, and like their escapes (ll_units.cuh).
void look_like_sentinels(std::vector<float>& rows, std::mt19937& random) {
  uint8_t bytes[kUnitBytes];
  std::memset(bytes, kSentinelByte, sizeof(bytes));
  for (size_t unit = 0; unit < rows.size() / 4; ++unit) {
    const uint32_t choice = random() % 16;
    if (choice > 2) continue;
    bytes[12] = choice == 0 ? kSentinelByte : kSentinelByte ^ 1;
    if (choice == 2) bytes[15] ^= 1;
    std::memcpy(&rows[unit * 4], bytes, sizeof(bytes));
    bytes[15] = kSentinelByte;
  }
}

// How the rows of a rank's experts are laid out.
struct Rows {
  Layout layout = Layout::kRagged;
  int64_t capacity = 0;  // of an expert, or of all in the ragged layout; 0: the ragged one that drops no row
};

// The buffers of one rank.
struct Rank {
  int32_t ranks;
  Rows shape;
  int32_t experts = ranks * experts_per_rank;
  int64_t most_rows = align_up(int64_t{ranks} * num_tokens * top_k + experts_per_rank * (kAlignment - 1), kAlignment);
  int64_t capacity = shape.capacity > 0 ? shape.capacity : most_rows;
  int64_t num_rows = shape.layout == Layout::kExpert ? experts_per_rank * capacity : capacity;
  cudaStream_t streams[kStreams];
  Array<int32_t> axis_index{1}, ids{size_t(num_tokens) * top_k},
      send_slot{size_t(2) * num_tokens * ranks},  // half of it without a network
      recv_row{size_t(ranks) * num_tokens * top_k}, num_recv_per_rank{size_t(ranks)}, counts{size_t(experts_per_rank)},
      group_sizes{size_t(experts_per_rank)}, num_dropped{1};
  Array<PendingCall> pending_dispatches{kPending}, pending_combines{kPending};
  Array<uint16_t> x_bfloat16{size_t(num_tokens) * kHidden};  // x, for operations that cast to fp8
  Activations recv{size_t(num_rows) * kHidden};
  Array<float> x{size_t(num_tokens) * kHidden}, topk_weights{size_t(num_tokens) * top_k}, weights{size_t(num_rows)},
      like{size_t(num_rows) * kHidden}, out{size_t(num_tokens) * kHidden}, y{size_t(num_rows) * kHidden},
      cotangent{size_t(num_rows) * kHidden}, weights_cotangent{size_t(num_rows)},
      x_cotangent{size_t(num_tokens) * kHidden}, topk_cotangent{size_t(num_tokens) * top_k};

  Rank(int32_t ranks, int32_t rank, Rows shape = {}) : ranks(ranks), shape(shape) {
    must(cudaSetDevice(device_of(rank)));
    for (cudaStream_t& stream : streams) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    axis_index.host[0] = rank;
    axis_index.upload();
  }
  ~Rank() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }

  void randomize(std::mt19937& random) {
    for (float& value : x.host) value = std::uniform_real_distribution<float>(-1, 1)(random);
    for (float& value : topk_weights.host) value = std::uniform_real_distribution<float>(0, 1)(random);
    const auto first = static_cast<uint32_t>(random());
    for (size_t i = 0; i < y.host.size(); ++i)
      y.host[i] = static_cast<uint32_t>(first + i * 2654435761u) / 4294967296.0f;
    for (int32_t& id : ids.host) id = std::uniform_int_distribution<int32_t>(-2, experts + 1)(random);
    std::transform(x.host.begin(), x.host.end(), x_bfloat16.host.begin(), [](float value) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      return static_cast<uint16_t>(bits >> 16);
    });
    x.upload(), x_bfloat16.upload(), topk_weights.upload(), y.upload(), ids.upload();
  }

  DispatchArgs dispatch_args(OpKind op) {
    DispatchArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = num_tokens, args.top_k = top_k;
    args.x = x.device, args.row_bytes = args.out_row_bytes = kRowBytes;
    args.layout = shape.layout, args.capacity = capacity, args.num_rows = num_rows;
    args.alignment = shape.layout == Layout::kExpert ? 1 : kAlignment;
    args.zero_pad = true;
    return args;
  }
  DispatchArgs dispatch(int32_t cast) {
    DispatchArgs args = dispatch_args(OpKind::kDispatch);
    args.cast = cast, args.num_scales = cast ? kHidden / kChannelsPerScale : 0;
    args.arrival = cast ? Arrival::kDequantize : Arrival::kCopy;
    recv.is_bfloat16 = cast != 0;
    if (cast) args.x = x_bfloat16.device;
    args.row_bytes = args.out_row_bytes = recv.row_bytes();
    args.topk_idx = ids.device, args.topk_weights = topk_weights.device, args.send_slot = send_slot.device;
    args.out = recv.device, args.weights = weights.device, args.counts = counts.device;
    args.group_sizes = group_sizes.device, args.num_dropped = num_dropped.device, args.recv_row = recv_row.device;
    args.num_recv_per_rank = num_recv_per_rank.device;
    return args;
  }
  DispatchArgs dispatch_split(int32_t cast, int32_t pending = 0) {
    DispatchArgs args = dispatch(cast);
    args.phase = Phase::kDone, args.pending = pending_dispatches.device + pending;
    return args;
  }
  DispatchArgs along_route(OpKind op, Array<float>& result) {
    DispatchArgs args = dispatch_args(op);
    args.known_send_slot = send_slot.device, args.known_recv_row = recv_row.device,
    args.known_num_recv_per_rank = num_recv_per_rank.device;
    args.known_counts = counts.device, args.known_group_sizes = group_sizes.device, args.out = result.device;
    return args;
  }
  DispatchArgs combine_back() {
    DispatchArgs args = along_route(OpKind::kCombineBack, cotangent);
    args.arrival = Arrival::kCombineBack;
    args.row_weights = weights.device, args.y = y.device, args.weights_cotangent = weights_cotangent.device;
    return args;
  }
  CombineArgs combine_args(OpKind op, Array<float>& result) {
    CombineArgs args = {};
    args.op = op;
    args.hash = static_cast<uint32_t>(op);
    args.axis_index = axis_index.device;
    args.num_tokens = num_tokens, args.top_k = top_k;
    args.y = recv.device, args.row_bytes = recv.row_bytes();
    args.recv_row = recv_row.device, args.num_recv_per_rank = num_recv_per_rank.device,
    args.send_slot = send_slot.device;
    args.out = result.device, args.out_type = ElementType::kFloat32;
    return args;
  }
  CombineArgs combine() {
    CombineArgs args = combine_args(OpKind::kCombine, out);
    args.row_weights = weights.device;
    return args;
  }
  CombineArgs combine_split(int32_t pending = 0) {
    CombineArgs args = combine();
    args.phase = Phase::kDone, args.pending = pending_combines.device + pending;
    return args;
  }
  CombineArgs dispatch_back() {
    CombineArgs args = combine_args(OpKind::kDispatchBack, x_cotangent);
    args.weights_to_send = weights.device, args.topk_weights = topk_cotangent.device;
    return args;
  }
};

// Some of what a start and its done must have in common.
Buffers buffers_of(const DispatchArgs& args) { return {args.x, args.out, args.pending}; }
Buffers buffers_of(const CombineArgs& args) { return {args.y, args.out, args.pending}; }

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
  for (auto& rank : ranks) rank->send_slot.download(), rank->recv_row.download(), rank->recv.download();
  for (size_t s = 0; s < ranks.size(); ++s) {
    Rank& source = *ranks[s];
    source.x_cotangent.download();
    for (int32_t token = 0; token < num_tokens; ++token) {
      const float* x = &source.x.host[token * kHidden];
      int32_t num_rows = 0;
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t expert = source.ids.host[token * top_k + k];
        if (!is_expert(expert, source.experts)) continue;
        Rank& target = *ranks[rank_of_expert(expert, experts_per_rank)];
        const int32_t index = source.send_slot.host[token * ranks.size() + rank_of_expert(expert, experts_per_rank)];
        const int32_t row = target.recv_row.host[(s * num_tokens + index) * top_k + k];
        EXPECT_EQ(same_bits(&target.recv.host[int64_t{row} * kHidden], x), true);
        ++num_rows;
      }
      if (num_rows == 1) EXPECT_EQ(same_bits(&source.x_cotangent.host[token * kHidden], x), true);
    }
  }
}

void check_rank(Rank& rank, float tolerance) {
  std::vector<float> combined(num_tokens * kHidden), summed(num_tokens * kHidden), returned(num_tokens * top_k);
  for (int32_t token = 0; token < num_tokens; ++token) {
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t entry = token * top_k + k;
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
    products[i / kHidden] += rank.y.host[i] * rank.like.host[i];
  }
  expect_near(rank.cotangent.download(), weighted, tolerance, "combine (backward), y");
  expect_near(rank.weights_cotangent.download(), products, 1e-3f, "combine (backward), weights");
  EXPECT_EQ(rank.num_dropped.download()[0], 0);
}

// How often each operation has run: in the order of OpKind.
using Times = std::vector<uint64_t>;
const Times kOneEach = {1, 1, 1, 1, 1, 0, 0};  // no all_to_all

// Whether the group's counters are those of so many operations.
void check_stats(const Group& group, const std::vector<std::unique_ptr<Rank>>& ranks, int32_t cast,
                 const Times& times = kOneEach) {
  const auto tokens_to = [&](size_t source, size_t target) {
    uint64_t tokens = 0;
    for (int32_t token = 0; token < num_tokens; ++token) {
      bool is_sent = false;
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t expert = ranks[source]->ids.host[token * top_k + k];
        is_sent |= is_expert(expert, ranks[source]->experts) &&
                   rank_of_expert(expert, experts_per_rank) == static_cast<int32_t>(target);
      }
      tokens += is_sent;
    }
    return tokens;
  };
  const uint64_t header = top_k * kUnitBytes;
  const uint64_t dispatched = header + (cast ? kHidden + kUnitBytes * num_chunks(kHidden) : kRowBytes);
  const auto times_of = [&](OpKind op) { return times[static_cast<size_t>(op)]; };
  const uint64_t dispatches = times_of(OpKind::kDispatch), backs = times_of(OpKind::kDispatchBack);
  const uint64_t rows_out = dispatches + times_of(OpKind::kDispatchLike) + times_of(OpKind::kCombineBack);
  const uint64_t rows_back = backs + times_of(OpKind::kCombine);
  const uint64_t bytes_out = dispatched * dispatches + kRowBytes * (rows_out - dispatches);
  const uint64_t bytes_back = ranks[0]->recv.row_bytes() * rows_back + header * backs;
  const std::vector<RankStats> stats = group.stats();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_EQ(stats[rank].operations, times);
    EXPECT_EQ(stats[rank].dropped, uint64_t{0});
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      const uint64_t out = tokens_to(rank, peer), back = tokens_to(peer, rank);
      const PeerStats& with_peer = stats[rank].peers[peer];
      EXPECT_EQ(with_peer.sent.rows, rows_out * out + rows_back * back);
      EXPECT_EQ(with_peer.sent.bytes, bytes_out * out + bytes_back * back);
      EXPECT_EQ(with_peer.received.rows, rows_out * back + rows_back * out);
      EXPECT_EQ(with_peer.received.bytes, bytes_out * back + bytes_back * out);
      EXPECT_EQ(with_peer.waited_ns < uint64_t{60'000'000'000}, true);
    }
  }
}

// Thread blocks of each rank, few enough for all ranks to be on the GPU at once, and the kernels' variant; 0 for what
// plan.h likes. And whether own rows may be summed where other ranks' sums come, and whether one warp has all of a row.
struct Blocks {
  int32_t number;
  Variant variant;
  bool sums_own = true, has_one_warp = false;

  LaunchPlan adjust(LaunchPlan plan) const {
    // plan.h gives no variant for few rows to an operation of more tokens, whose rows may go by node.
    if (number == 0 && (!has_one_warp || !are_few(num_tokens))) return plan;
    plan.variant = variant;
    plan.sums_own &= sums_own;
    if (has_one_warp) plan.log_send_warps = plan.log_receive_warps = 0;
    return plan;
  }
};

// The ranks of a group, and launches on all of them.
class Session {
 public:
  Session(int32_t num_ranks, int32_t cast, Blocks blocks, double timeout_seconds = 60.0, uint32_t newest_epoch = 0,
          int32_t max_tokens = num_tokens, Rows shape = {}, int32_t node_size = 0)
      : num_ranks_(num_ranks),
        cast_(cast),
        blocks_(blocks),
        config_{num_ranks * experts_per_rank, top_k, max_tokens, kRowBytes, blocks.number, timeout_seconds,
                {devices(num_ranks)}} {
    if (node_size > 0) span_nodes(node_size);
    open_group();
    for (const Member& member : group().members()) {
      Control control = initial_control(member.peers.layout.num_slots, newest_epoch);
      std::fill(std::begin(control.claimed), std::end(control.claimed), uint64_t{newest_epoch} << 32);
      must(cudaMemcpy(member.peers.control, &control, sizeof(control), cudaMemcpyHostToDevice));
    }
    for (int32_t rank = 0; rank < num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank>(num_ranks, rank, shape));
  }

  ~Session() { close_group(); }

  int32_t num_ranks() const { return num_ranks_; }
  // Whether a rank sees what another one has counted.
  bool are_local(size_t rank, size_t other) const {
    return config_.network == nullptr || rank / config_.node_size == other / config_.node_size;
  }
  int32_t cast() const { return cast_; }
  Group& group() { return *group_; }
  const Group& group() const { return *group_; }
  int32_t num_slots() const { return group().members()[0].peers.layout.num_slots; }
  // In place of the one that there was.
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
  // On one rank only.
  template <typename Args>
  void whole_of(int32_t r, Args args, int32_t stream = 0) {
    must(body_of(group().members()[r], args(*ranks_[r])).launch(ranks_[r]->streams[stream]));
  }
  template <typename Args>
  void start(Args args) {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      const Member& member = group().members()[r];
      const auto call = args(*ranks_[r]);
      member.split_phase->start(call, buffers_of(call), body_of(member, call), ranks_[r]->streams[0]);
    }
  }
  template <typename Args>
  void done(Args args) {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      group().members()[r].split_phase->done(buffers_of(args(*ranks_[r])), ranks_[r]->streams[0]);
    }
  }

  // What is launched on the stream `then` from here on runs behind all that has been launched on `first`.
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

  // Other inputs on all ranks.
  void randomize(std::mt19937& random) {
    for (auto& rank : ranks_) rank->randomize(random);
    wait();
  }

  // Every operation once, and a check of its results.
  void run_whole() {
    whole([&](Rank& rank) { return rank.dispatch(cast_); });
    whole([&](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    whole([&](Rank& rank) { return rank.combine_back(); });
    whole([&](Rank& rank) { return rank.combine(); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    check_results();
  }

  // Dispatch and combine as split-phase calls, with another operation between a start and its done, and two starts
  // under way. (The other results are those of run_whole().)
  void run_split_phase() {
    for (auto& rank : ranks_) must(cudaMemset(rank->recv.device, 0xff, rank->recv.host.size() * sizeof(float)));
    const auto dispatch = [&](Rank& rank) { return rank.dispatch_split(cast_); };
    const auto combine = [&](Rank& rank) { return rank.combine_split(); };
    start(dispatch);
    whole([&](Rank& rank) { return rank.along_route(OpKind::kDispatchLike, rank.like); });
    done(dispatch);
    start(combine);
    start(dispatch);
    done(combine);
    done(dispatch);
    check_results();
  }

  // Rows of which parts look as if they had not arrived.
  void run_look_like_sentinels(std::mt19937& random) {
    for (auto& rank : ranks_) look_like_sentinels(rank->x.host, random), rank->x.upload();
    wait();
    whole([&](Rank& rank) { return rank.dispatch(0); });
    whole([&](Rank& rank) { return rank.dispatch_back(); });
    wait();
    expect_no_failure();
    check_bits(ranks_);
  }

  void check_results() {
    wait();
    expect_no_failure();
    const float tolerance = (cast_ ? 0.1f : 3e-6f) * std::max(top_k, 3);  // as many rows are summed
    for (auto& rank : ranks_) check_rank(*rank, tolerance);
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

  template <typename Args>
  SplitPhaseCalls::Body body_of(const Member& member, const Args& call) const {
    const Peers& peers = member.peers;
    const Kernels kernels = group().kernels();
    const ElementType type = call.row_bytes == kRowBytes ? ElementType::kFloat32 : ElementType::kBFloat16;
    const bool is_done = call.phase == Phase::kDone;  // as the handlers plan it: never with the low-latency variant
    const int32_t num_sms = is_done ? usable_sms_beside_others(blocks_.number, member.num_sms) : blocks_.number;
    const auto adjust = [&](const LaunchPlan& plan) { return is_done ? plan : blocks_.adjust(plan); };
    if constexpr (std::is_same_v<Args, DispatchArgs>) {
      const LaunchPlan best = adjust(plan_dispatch(call.num_tokens, num_ranks_, call.top_k,
                                                   num_chunks(call.num_scales ? kHidden : kRowBytes), num_sms,
                                                   member.num_sms, call.arrival == Arrival::kCombineBack));
      const LaunchPlan plan = kernels.adapt_dispatch_plan(peers, call, best);
      const auto launch = [&peers, kernels, call, type, plan](cudaStream_t stream) {
        return kernels.launch_dispatch(peers, call, type, plan, stream);
      };
      return {launch, plan.num_blocks};
    } else {
      const LaunchPlan best =
          adjust(plan_combine(call.num_tokens, num_ranks_, call.recv_row ? call.top_k : 0,
                              num_chunks(static_cast<int32_t>(call.row_bytes)), num_sms, member.num_sms));
      const LaunchPlan plan = kernels.adapt_combine_plan(peers, call, best);
      const auto launch = [&peers, kernels, call, type, plan](cudaStream_t stream) {
        return kernels.launch_combine(peers, call, type, plan, stream);
      };
      return {launch, plan.num_blocks};
    }
  }

  const int32_t num_ranks_, cast_;
  const Blocks blocks_;
  GroupConfig config_;
  std::unique_ptr<Group> group_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace
