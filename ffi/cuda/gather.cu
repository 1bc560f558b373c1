#include "ffi/cuda/gather.h"
#include "ffi/cuda/protocol.cuh"
#include "ffi/cuda/rows.cuh"

namespace jax_ep {
namespace {

enum Phase : int32_t { kSend, kReceive };

struct Shared {
  Operation operation;
  uint32_t answers[kMaxTeams];
  int32_t rows[kMaxTeams][kMaxTopK];
  int32_t places[kMaxTeams][kMaxRanks];
};

__device__ int64_t element_size(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

__device__ void store_element(void* out, ElementType type, int64_t index, float value) {
  switch (type) {
    case ElementType::kFloat32:
      static_cast<float*>(out)[index] = value;
      break;
    case ElementType::kFloat16:
      static_cast<__half*>(out)[index] = from_float<__half>(value);
      break;
    case ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[index] = from_float<__nv_bfloat16>(value);
      break;
  }
}

// One launch of one rank.
template <typename X>
struct Gather {
  static constexpr int kSize = Vector<X>::kSize;

  const Peers& peers;
  const GatherArgs& args;
  const CallId& call;
  Shared& shared;
  Team team;

  __device__ Operation& operation() const { return shared.operation; }
  __device__ bool blocks() const { return args.rows == nullptr; }

  // --- the experts' side: sum and send ------------------------------------------------------------------------------

  // Items: the announcement, then the possible rows, interleaving the ranks they go to, beginning behind this rank.
  __device__ void send() const {
    const int64_t num_candidates = int64_t{peers.num_ranks} * args.num_tokens;
    for (;;) {
      const uint32_t item = claim(peers, operation(), team, shared.answers, kSend);
      if (item > num_candidates) return;
      if (item == 0) {
        announce_all();
      } else {
        const int32_t peer = static_cast<int32_t>((peers.rank + item) % peers.num_ranks);
        send_row(peer, static_cast<int32_t>((item - 1) / peers.num_ranks));
      }
    }
  }

  __device__ void announce_all() const {
    for (int32_t peer = team.lane; peer < peers.num_ranks; peer += team.size) {
      if (args.num_sent) {
        store_relaxed(&peers.control[peer]->num_rows[operation().slot][peers.rank],
                      tagged(operation().epoch, args.num_sent[peer]));
      }
      announce(peers, call, operation(), peer);
    }
  }

  // Rows that came from `peer`, and so go back. (all_to_all_back has no route: it waits for the peer's word, which
  // leaves before any row.)
  __device__ int32_t num_rows_of(int32_t peer) const {
    if (!blocks()) return args.num_arrived[peer];
    return ask_leader(team, shared.answers, [&] {
      const unsigned long long* word = &own_control(peers).num_rows[operation().slot][peer];
      return expect_number(peers, call, operation(), peer, word);
    });
  }

  __device__ void send_row(int32_t peer, int32_t index) const {
    if (index >= num_rows_of(peer)) return;
    const int64_t first = int64_t{peer} * args.num_tokens + index;
    const int32_t num_rows = blocks() ? 1 : args.top_k;
    int32_t* rows = shared.rows[team.index];
    for (int32_t k = team.lane; k < num_rows; k += team.size) {
      rows[k] = blocks() ? static_cast<int32_t>(first) : args.rows[first * args.top_k + k];
    }
    team.sync();
    const RowPlace place = row_place(peers, operation(), peer, peers.rank, index);
    if (args.weights_to_send) {
      for (int32_t k = team.lane; k < num_rows; k += team.size) {
        place.header[k].weight = rows[k] < 0 ? 0 : args.weights_to_send[rows[k]];
      }
    }
    for (int64_t i = team.lane; i < args.row_bytes / 16; i += team.size) {
      reinterpret_cast<uint4*>(place.payload)[i] = partial_sum(rows, num_rows, i).bits;
    }
    publish_row(operation(), team, place.flag);
  }

  // 16 bytes of the sum over a token's rows here, in the order of k, rounded once.
  __device__ Vector<X> partial_sum(const int32_t* rows, int32_t num_rows, int64_t i) const {
    float total[kSize] = {};
    for (int32_t k = 0; k < num_rows; ++k) {
      if (rows[k] < 0) continue;
      const float weight = args.row_weights ? args.row_weights[rows[k]] : 1.0f;
      const Vector<X> y = load_vector<X>(static_cast<const uint8_t*>(args.y) + rows[k] * args.row_bytes, i);
      for (int e = 0; e < kSize; ++e) total[e] += weight * to_float(y.element[e]);
    }
    Vector<X> sum;
    for (int e = 0; e < kSize; ++e) sum.element[e] = from_float<X>(total[e]);
    return sum;
  }

  // --- the source side: receive and sum -----------------------------------------------------------------------------

  // One item per token.
  __device__ void receive() const {
    for (int32_t peer = threadIdx.x; peer < peers.num_ranks; peer += blockDim.x) {
      expect_same_call(peers, call, operation(), peer);
    }
    __syncthreads();
    for (;;) {
      const uint32_t item = claim(peers, operation(), team, shared.answers, kReceive);
      if (item >= args.num_tokens) return;
      receive_token(static_cast<int32_t>(item));
    }
  }

  __device__ void receive_token(int32_t token) const {
    int32_t* places = shared.places[team.index];
    for (int32_t peer = team.lane; peer < peers.num_ranks; peer += team.size) {
      places[peer] = args.place[int64_t{token} * peers.num_ranks + peer];
      if (places[peer] < 0) continue;
      const RowPlace place = row_place(peers, operation(), peers.rank, peer, places[peer]);
      wait_row(peers, call, operation(), peer, place.flag);
    }
    team.sync();
    if (args.topk_weights) {
      for (int32_t k = team.lane; k < args.top_k; k += team.size) {
        args.topk_weights[int64_t{token} * args.top_k + k] = returned_weight(places, k);
      }
    }
    if (!args.out) return;
    const int64_t elements = args.row_bytes / static_cast<int64_t>(sizeof(X));
    uint8_t* out = static_cast<uint8_t*>(args.out) + token * elements * element_size(args.out_type);
    for (int64_t i = team.lane; i < args.row_bytes / 16; i += team.size) add_ranks(places, i, out);
  }

  // Each (token, k) has its row on one rank at most; the others send zero.
  __device__ float returned_weight(const int32_t* places, int32_t k) const {
    float total = 0;
    for (int32_t peer = 0; peer < peers.num_ranks; ++peer) {
      if (places[peer] < 0) continue;
      total += load_arrived(&row_place(peers, operation(), peers.rank, peer, places[peer]).header[k].weight);
    }
    return total;
  }

  // Adds 16 bytes of the ranks' partial sums, in the order of ranks.
  __device__ void add_ranks(const int32_t* places, int64_t i, void* out) const {
    float total[kSize] = {};
    for (int32_t peer = 0; peer < peers.num_ranks; ++peer) {
      if (places[peer] < 0) continue;
      const RowPlace place = row_place(peers, operation(), peers.rank, peer, places[peer]);
      const Vector<X> part = load_arrived_vector<X>(place.payload, i);
      for (int e = 0; e < kSize; ++e) total[e] += to_float(part.element[e]);
    }
    for (int e = 0; e < kSize; ++e) store_element(out, args.out_type, i * kSize + e, total[e]);
  }

  // --- failure ------------------------------------------------------------------------------------------------------

  __device__ void poison() const {
    const int64_t elements = args.num_tokens * args.row_bytes / static_cast<int64_t>(sizeof(X));
    fill_bytes(args.out, elements * element_size(args.out_type), 0xff);
    fill_bytes(args.topk_weights, int64_t{4} * args.num_tokens * args.top_k, 0xff);
  }
};

template <typename X>
__global__ void __launch_bounds__(kBlockThreads)
    gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherArgs args, int32_t team_threads) {
  __shared__ Shared shared;
  const void* result = args.half == Half::kStart ? args.ticket : args.out ? args.out : args.topk_weights;
  const CallId call = {args.op,         args.half,  args.hash, reinterpret_cast<unsigned long long>(result),
                       args.axis_index, args.ticket};
  const Gather<X> gather = {peers, args, call, shared, Team::of_size(team_threads)};
  begin(peers, call, shared.operation);
  if (!shared.operation.failed && shared.operation.sends) gather.send();
  __syncthreads();
  if (!shared.operation.failed && args.half != Half::kStart) gather.receive();
  end(peers, call, shared.operation, [&] { gather.poison(); });
}

using Kernel = void (*)(Peers, GatherArgs, int32_t);

Kernel kernel_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return gather_kernel<float>;
    case ElementType::kFloat16:
      return gather_kernel<__half>;
    default:
      return gather_kernel<__nv_bfloat16>;
  }
}

}  // namespace

cudaError_t launch_gather(const Peers& peers, const GatherArgs& args, ElementType type, int32_t num_sms,
                          cudaStream_t stream) {
  const LaunchPlan plan = plan_launch(args.num_tokens, peers.num_ranks, num_sms);
  kernel_of(type)<<<plan.num_blocks, kBlockThreads, 0, stream>>>(peers, args, plan.team_threads);
  return cudaGetLastError();
}

cudaError_t load_gather() {
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_of(type)));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace jax_ep
