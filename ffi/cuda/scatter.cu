#include "ffi/cuda/protocol.cuh"
#include "ffi/cuda/rows.cuh"
#include "ffi/cuda/scatter.h"

namespace jax_ep {
namespace {

constexpr int32_t kPadRows = 1024;  // rows of the result that one work item pads
enum Phase : int32_t { kSend, kReceive };

struct Shared {
  Operation operation;
  uint32_t answers[kMaxTeams];
  int32_t rows[kMaxTeams][kMaxTopK];
  float sums[kMaxTeams][32];
};

// The counts that a team keeps of all (token, k) before the token it works on.
struct Prefix {
  int32_t* experts;  // [num_experts]: pairs that name the expert
  int32_t* ranks;    // [num_ranks]: tokens with an expert on the rank
};

__host__ __device__ constexpr int64_t prefix_words(int32_t num_experts, int32_t num_ranks) {
  return num_experts + num_ranks;
}

// One launch of one rank.
template <typename X>
struct Scatter {
  const Peers& peers;
  const ScatterArgs& args;
  const CallId& call;
  Shared& shared;
  int32_t* scratch;  // dynamic shared memory: the teams' prefixes, then the places
  Team team;

  __device__ Operation& operation() const { return shared.operation; }
  __device__ int32_t experts_per_rank() const { return peers.experts_per_rank; }
  __device__ int32_t num_experts() const { return peers.num_ranks * peers.experts_per_rank; }
  __device__ bool new_route() const { return args.topk_idx != nullptr; }

  // --- send ---------------------------------------------------------------------------------------------------------

  // Items: the announcement, then one per token. A done whose start has sent the rows only makes the route anew.
  __device__ void send() {
    if (!operation().sends && !(new_route() && args.place)) return;
    const Prefix prefix = clear_prefix();
    int32_t counted = 0;  // tokens in `prefix`
    for (;;) {
      const uint32_t item = claim(peers, operation(), team, shared.answers, kSend);
      if (item > args.num_tokens) return;
      if (item == 0) {
        if (operation().sends) announce_counts();
      } else {
        const int32_t token = static_cast<int32_t>(item) - 1;
        if (new_route()) count_tokens(prefix, counted, token);
        counted = token;
        send_token(token, prefix);
      }
    }
  }

  __device__ Prefix clear_prefix() const {
    team.sync();  // everyone has read what was there
    int32_t* words = scratch + team.index * prefix_words(num_experts(), peers.num_ranks);
    for (int32_t i = team.lane; i < prefix_words(num_experts(), peers.num_ranks); i += team.size) words[i] = 0;
    team.sync();
    return {words, words + num_experts()};
  }

  // Adds the tokens [first, last) to the prefix.
  __device__ void count_tokens(const Prefix& prefix, int32_t first, int32_t last) const {
    for (int32_t token = first + team.lane; token < last; token += team.size) {
      uint64_t seen_ranks = 0;
      for (int32_t k = 0; k < args.top_k; ++k) {
        const int32_t expert = args.topk_idx[int64_t{token} * args.top_k + k];
        if (!is_expert(expert, num_experts())) continue;
        const int32_t rank = rank_of_expert(expert, experts_per_rank());
        atomicAdd(&prefix.experts[expert], 1);
        if (!(seen_ranks >> rank & 1)) atomicAdd(&prefix.ranks[rank], 1);
        seen_ranks |= uint64_t{1} << rank;
      }
    }
    team.sync();
  }

  // Tells every rank which operation this is and, where it cannot know, how many rows it gets for each expert.
  __device__ void announce_counts() const {
    Prefix totals = clear_prefix();
    if (new_route()) {
      count_tokens(totals, 0, args.num_tokens);
    } else if (args.splits) {
      for (int32_t expert = team.lane; expert < num_experts(); expert += team.size) {
        totals.experts[expert] = args.splits[expert];
        atomicAdd(&totals.ranks[rank_of_expert(expert, experts_per_rank())], args.splits[expert]);
      }
      team.sync();
    }
    const uint32_t epoch = operation().epoch;
    const int32_t slot = operation().slot;
    for (int32_t peer = team.lane; peer < peers.num_ranks; peer += team.size) {
      announce(peers, call, operation(), peer);
      store_relaxed(&peers.control[peer]->num_rows[slot][peers.rank], tagged(epoch, totals.ranks[peer]));
    }
    if (new_route() || args.splits) {
      for (int32_t expert = team.lane; expert < num_experts(); expert += team.size) {
        unsigned long long* counts = counts_of(peers, expert / experts_per_rank(), slot, peers.rank);
        store_relaxed(&counts[local_expert(expert, experts_per_rank())], tagged(epoch, totals.experts[expert]));
      }
    }
    clear_prefix();
  }

  // Sends a token to every rank that holds one of its experts, beginning behind this rank: were all to begin with rank
  // 0, they would share one link.
  __device__ void send_token(int32_t token, const Prefix& prefix) const {
    for (int32_t step = 1; step <= peers.num_ranks; ++step) {
      const int32_t peer = (peers.rank + step) % peers.num_ranks;
      const int32_t index = index_at(token, peer, prefix);
      if (args.place && team.lane == 0) args.place[int64_t{token} * peers.num_ranks + peer] = index;
      if (index < 0 || !operation().sends) continue;
      const RowPlace place = row_place(peers, operation(), peer, peers.rank, index);
      if (new_route()) write_header(place.header, token, peer, prefix);
      write_payload(place.payload, token);
      publish_row(operation(), team, place.flag);
    }
  }

  // The token's place among the rows that go to `peer`, or -1.
  __device__ int32_t index_at(int32_t token, int32_t peer, const Prefix& prefix) const {
    if (!new_route()) return args.known_place[int64_t{token} * peers.num_ranks + peer];
    for (int32_t k = 0; k < args.top_k; ++k) {
      const int32_t expert = args.topk_idx[int64_t{token} * args.top_k + k];
      if (is_expert(expert, num_experts()) && rank_of_expert(expert, experts_per_rank()) == peer) {
        return prefix.ranks[peer];
      }
    }
    return -1;
  }

  __device__ void write_header(RowHeader* header, int32_t token, int32_t peer, const Prefix& prefix) const {
    const int32_t* ids = args.topk_idx + int64_t{token} * args.top_k;
    for (int32_t k = team.lane; k < args.top_k; k += team.size) {
      RowHeader entry = {-1, 0, 0};
      if (is_expert(ids[k], num_experts()) && rank_of_expert(ids[k], experts_per_rank()) == peer) {
        entry.expert = local_expert(ids[k], experts_per_rank());
        entry.position = prefix.experts[ids[k]];
        for (int32_t earlier = 0; earlier < k; ++earlier) entry.position += ids[earlier] == ids[k];
        entry.weight = args.topk_weights ? args.topk_weights[int64_t{token} * args.top_k + k] : 1.0f;
      }
      header[k] = entry;
    }
  }

  __device__ void write_payload(uint8_t* payload, int32_t token) const {
    const uint8_t* row = static_cast<const uint8_t*>(args.x) + token * args.row_bytes;
    const int64_t num_vectors = args.row_bytes / 16;
    const Cast cast = static_cast<Cast>(args.cast);
    if (cast == Cast::kNone) {
      for (int64_t i = team.lane; i < num_vectors; i += team.size) {
        reinterpret_cast<uint4*>(payload)[i] = reinterpret_cast<const uint4*>(row)[i];
      }
      float* scales = reinterpret_cast<float*>(payload + args.row_bytes);
      for (int32_t i = team.lane; i < args.num_scales; i += team.size) {
        scales[i] = args.x_scales[int64_t{token} * args.num_scales + i];
      }
    } else {
      constexpr int kSize = Vector<X>::kSize;
      float* scales = reinterpret_cast<float*>(payload + num_vectors * kSize);
      for (int64_t i = team.lane; i < num_vectors; i += team.size) {
        union {
          __nv_fp8_storage_t q[kSize];
          uint32_t words[kSize / 4];
        };
        const float scale = cast_to_fp8(load_vector<X>(row, i), cast, q);
        for (int w = 0; w < kSize / 4; ++w) reinterpret_cast<uint32_t*>(payload)[i * (kSize / 4) + w] = words[w];
        if (i * kSize % kChannelsPerScale == 0) scales[i * kSize / kChannelsPerScale] = scale;
      }
    }
  }

  // --- receive ------------------------------------------------------------------------------------------------------

  // Items: the small results, then one per possible row, interleaving the sources as they send, then the padding.
  __device__ void receive() {
    expect_peers();
    const Places places = place_rows();
    const int64_t num_candidates = int64_t{peers.num_ranks} * args.num_tokens;
    const int64_t num_pad_items = args.blocks ? 0 : (args.num_rows + kPadRows - 1) / kPadRows;
    for (;;) {
      const uint32_t item = claim(peers, operation(), team, shared.answers, kReceive);
      if (item > num_candidates + num_pad_items) return;
      if (item == 0) {
        write_counts(places);
      } else if (item <= num_candidates) {
        const int32_t source = static_cast<int32_t>((peers.rank + item) % peers.num_ranks);
        receive_row(source, static_cast<int32_t>((item - 1) / peers.num_ranks), places);
      } else {
        pad(item - num_candidates - 1, places);
      }
    }
  }

  // Where arriving rows go; in shared memory.
  struct Places {
    int32_t* need;         // [R, E_local]: rows from each source, then the first place of each source's rows
    int32_t* first_row;    // [E_local]
    int32_t* counts;       // [E_local]
    int32_t* group_sizes;  // [E_local]
    int32_t* num_arrived;  // [R]
    int32_t* dropped;      // [1]
  };

  __device__ void expect_peers() const {
    __syncthreads();  // all teams have sent; the scratch is free
    for (int32_t peer = threadIdx.x; peer < peers.num_ranks; peer += blockDim.x) {
      expect_same_call(peers, call, operation(), peer);
    }
    __syncthreads();
  }

  __device__ Places place_rows() const {
    const int32_t experts = experts_per_rank();
    int32_t* words = scratch;
    Places p;
    p.need = words;
    p.first_row = p.need + peers.num_ranks * experts;
    p.counts = p.first_row + experts;
    p.group_sizes = p.counts + experts;
    p.num_arrived = p.group_sizes + experts;
    p.dropped = p.num_arrived + peers.num_ranks;
    const Control& control = own_control(peers);
    for (int32_t peer = threadIdx.x; peer < peers.num_ranks; peer += blockDim.x) {
      p.num_arrived[peer] = new_route() || args.splits ? expect_number(peers, call, operation(), peer,
                                                                       &control.num_rows[operation().slot][peer])
                                                       : args.known_num_arrived[peer];
    }
    if (new_route() || args.splits) {
      for (int32_t i = threadIdx.x; i < peers.num_ranks * experts; i += blockDim.x) {
        const int32_t peer = i / experts;
        const unsigned long long* word = counts_of(peers, peers.rank, operation().slot, peer) + i % experts;
        p.need[i] = expect_number(peers, call, operation(), peer, word);
      }
    }
    __syncthreads();
    if (new_route()) {
      place_groups(p);
    } else if (!args.blocks) {
      recall_groups(p);
    }
    __syncthreads();
    return p;
  }

  __device__ void place_groups(const Places& p) const {
    const int32_t experts = experts_per_rank();
    for (int32_t expert = threadIdx.x; expert < experts; expert += blockDim.x) {
      int32_t total = 0;
      for (int32_t source = 0; source < peers.num_ranks; ++source) {
        const int32_t need = p.need[source * experts + expert];
        p.need[source * experts + expert] = total;
        total += need;
      }
      p.counts[expert] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t rows_before = 0;
      int32_t dropped = 0;
      for (int32_t expert = 0; expert < experts; ++expert) {
        const int32_t need = p.counts[expert];
        const Placement group = place_group(args.layout, expert, rows_before, need, args.capacity, args.alignment);
        rows_before += align_up(need, args.alignment);
        dropped += need - group.count;
        p.first_row[expert] = static_cast<int32_t>(group.first_row);
        p.counts[expert] = group.count;
        p.group_sizes[expert] = group.group_size;
      }
      *p.dropped = dropped;
    }
  }

  // The same from an old route.
  __device__ void recall_groups(const Places& p) const {
    if (threadIdx.x != 0) return;
    int32_t first_row = 0;
    for (int32_t expert = 0; expert < experts_per_rank(); ++expert) {
      p.counts[expert] = args.known_counts[expert];
      p.group_sizes[expert] = args.known_group_sizes[expert];
      p.first_row[expert] = args.layout == Layout::kExpert ? static_cast<int32_t>(expert * args.capacity) : first_row;
      first_row += p.group_sizes[expert];
    }
  }

  __device__ void write_counts(const Places& p) const {
    if (args.blocks) {
      for (int32_t i = team.lane; i < peers.num_ranks * experts_per_rank(); i += team.size) args.counts[i] = p.need[i];
    }
    if (!new_route()) return;
    for (int32_t expert = team.lane; expert < experts_per_rank(); expert += team.size) {
      args.counts[expert] = p.counts[expert];
      args.group_sizes[expert] = p.group_sizes[expert];
    }
    for (int32_t peer = team.lane; peer < peers.num_ranks; peer += team.size) {
      args.num_arrived[peer] = p.num_arrived[peer];
    }
    if (team.lane == 0) *args.num_dropped = *p.dropped;
  }

  __device__ void receive_row(int32_t source, int32_t index, const Places& places) const {
    const int64_t candidate = int64_t{source} * args.num_tokens + index;
    if (index >= places.num_arrived[source]) {
      if (args.blocks && args.zero_pad) zero_row(candidate, team.lane, team.size);
      if (new_route()) {
        for (int32_t k = team.lane; k < args.top_k; k += team.size) args.rows[candidate * args.top_k + k] = -1;
      }
      return;
    }
    const RowPlace place = row_place(peers, operation(), peers.rank, source, index);
    if (!ask_leader(team, shared.answers, [&] { return wait_row(peers, call, operation(), source, place.flag); })) {
      return;
    }
    int32_t* rows = shared.rows[team.index];
    const int32_t num_rows = args.blocks ? 1 : args.top_k;
    for (int32_t k = team.lane; k < num_rows; k += team.size) rows[k] = row_of(source, index, k, place, places);
    team.sync();
    switch (args.arrival) {
      case Arrival::kCopy:
        copy_row(place.payload, rows, num_rows);
        break;
      case Arrival::kDequantize:
        dequantize_row(place.payload, rows, num_rows);
        break;
      case Arrival::kCombineBack:
        combine_back_row(place.payload, rows, num_rows);
        break;
    }
  }

  // The row of the result for one k of an arrived row, or -1. Writes what a new route remembers of it.
  __device__ int32_t row_of(int32_t source, int32_t index, int32_t k, const RowPlace& place,
                            const Places& places) const {
    if (args.blocks) return source * args.num_tokens + index;
    const int64_t entry = (int64_t{source} * args.num_tokens + index) * args.top_k + k;
    if (!new_route()) return args.known_rows[entry];
    const int32_t expert = load_arrived(&place.header[k].expert);
    int32_t row = -1;
    if (expert >= 0) {
      const int32_t position =
          places.need[source * experts_per_rank() + expert] + load_arrived(&place.header[k].position);
      if (position < places.counts[expert]) {
        row = places.first_row[expert] + position;
        args.weights[row] = load_arrived(&place.header[k].weight);
      }
    }
    args.rows[entry] = row;
    return row;
  }

  __device__ void* out_row(int64_t row) const { return static_cast<uint8_t*>(args.out) + row * args.out_row_bytes; }

  __device__ void copy_row(const uint8_t* payload, const int32_t* rows, int32_t num_rows) const {
    for (int64_t i = team.lane; i < args.out_row_bytes / 16; i += team.size) {
      const uint4 bits = load_arrived(reinterpret_cast<const uint4*>(payload) + i);
      for (int32_t k = 0; k < num_rows; ++k) {
        if (rows[k] >= 0) static_cast<uint4*>(out_row(rows[k]))[i] = bits;
      }
    }
    const float* scales = reinterpret_cast<const float*>(payload + args.out_row_bytes);
    for (int32_t i = team.lane; i < args.num_scales; i += team.size) {
      const float scale = load_arrived(scales + i);
      for (int32_t k = 0; k < num_rows; ++k) {
        if (rows[k] >= 0) args.out_scales[int64_t{rows[k]} * args.num_scales + i] = scale;
      }
    }
  }

  __device__ void dequantize_row(const uint8_t* payload, const int32_t* rows, int32_t num_rows) const {
    constexpr int kSize = Vector<X>::kSize;
    const int64_t num_vectors = args.out_row_bytes / 16;
    const float* scales = reinterpret_cast<const float*>(payload + num_vectors * kSize);
    for (int64_t i = team.lane; i < num_vectors; i += team.size) {
      union {
        uint32_t words[kSize / 4];
        __nv_fp8_storage_t q[kSize];
      };
      for (int w = 0; w < kSize / 4; ++w) {
        words[w] = load_arrived(reinterpret_cast<const uint32_t*>(payload) + i * (kSize / 4) + w);
      }
      const float scale = load_arrived(scales + i * kSize / kChannelsPerScale);
      Vector<X> v;
      for (int e = 0; e < kSize; ++e) v.element[e] = from_float<X>(__fmul_rn(fp8_to_float(q[e]), scale));
      for (int32_t k = 0; k < num_rows; ++k) {
        if (rows[k] >= 0) static_cast<uint4*>(out_row(rows[k]))[i] = v.bits;
      }
    }
  }

  __device__ void combine_back_row(const uint8_t* payload, const int32_t* rows, int32_t num_rows) const {
    for (int32_t k = 0; k < num_rows; ++k) {
      if (rows[k] < 0) continue;
      const float weight = args.row_weights[rows[k]];
      const void* y = args.y ? static_cast<const uint8_t*>(args.y) + rows[k] * args.out_row_bytes : nullptr;
      float product = 0;
      for (int64_t i = team.lane; i < args.out_row_bytes / 16; i += team.size) {
        const Vector<X> g = load_arrived_vector<X>(payload, i);
        Vector<X> cotangent;
        for (int e = 0; e < Vector<X>::kSize; ++e)
          cotangent.element[e] = from_float<X>(weight * to_float(g.element[e]));
        static_cast<uint4*>(out_row(rows[k]))[i] = cotangent.bits;
        if (!y) continue;
        const Vector<X> outputs = load_vector<X>(y, i);
        for (int e = 0; e < Vector<X>::kSize; ++e) product += to_float(g.element[e]) * to_float(outputs.element[e]);
      }
      if (!y) continue;
      product = team_sum(team, product, shared.sums[team.index]);
      if (team.lane == 0) args.weights_cotangent[rows[k]] = product;
    }
  }

  // Of kPadRows rows, zeroes what holds no token: weights always; the rows that alignment adds; all with zero_pad.
  __device__ void pad(int64_t item, const Places& places) const {
    const int64_t first = item * kPadRows;
    for (int64_t base = first; base < min(first + kPadRows, args.num_rows); base += team.size) {
      const int64_t row = base + team.lane;
      bool is_empty = false, is_zero = false;
      if (row < args.num_rows) {
        const int32_t expert = expert_of_row(row, places);
        const int64_t place = row - (expert < 0 ? 0 : places.first_row[expert]);
        is_empty = expert < 0 || place >= places.counts[expert];
        is_zero = is_empty && (args.zero_pad || (expert >= 0 && place < places.group_sizes[expert]));
        if (is_empty && args.weights) args.weights[row] = 0;
        if (is_empty && args.weights_cotangent) args.weights_cotangent[row] = 0;
      }
      uint32_t to_zero = __ballot_sync(0xffffffff, is_zero);
      const int64_t warp_base = base + team.lane / 32 * 32;
      for (; to_zero != 0; to_zero &= to_zero - 1) zero_row(warp_base + __ffs(to_zero) - 1, threadIdx.x % 32, 32);
    }
  }

  // The local expert whose group holds the row, or -1 behind the last group.
  __device__ int32_t expert_of_row(int64_t row, const Places& places) const {
    if (args.layout == Layout::kExpert) return static_cast<int32_t>(row / args.capacity);
    for (int32_t expert = 0; expert < experts_per_rank(); ++expert) {
      if (row < places.first_row[expert] + places.group_sizes[expert]) return expert;
    }
    return -1;
  }

  __device__ void zero_row(int64_t row, int32_t lane, int32_t lanes) const {
    uint4* out = static_cast<uint4*>(out_row(row));
    for (int64_t i = lane; i < args.out_row_bytes / 16; i += lanes) out[i] = make_uint4(0, 0, 0, 0);
    if (!args.out_scales) return;
    for (int32_t i = lane; i < args.num_scales; i += lanes) args.out_scales[row * args.num_scales + i] = 0;
  }

  // --- failure ------------------------------------------------------------------------------------------------------

  __device__ void poison() const {
    fill_bytes(args.out, args.num_rows * args.out_row_bytes, 0xff);
    fill_bytes(args.out_scales, args.num_rows * args.num_scales * 4, 0xff);
    fill_bytes(args.weights, args.num_rows * 4, 0xff);
    fill_bytes(args.weights_cotangent, args.num_rows * 4, 0xff);
    fill_bytes(args.counts, int64_t{4} * experts_per_rank() * (args.blocks ? peers.num_ranks : 1), 0);
    fill_bytes(args.group_sizes, int64_t{4} * experts_per_rank(), 0);
    fill_bytes(args.num_dropped, 4, 0xff);
    fill_bytes(args.rows, int64_t{4} * peers.num_ranks * args.num_tokens * args.top_k, 0xff);
    fill_bytes(args.num_arrived, int64_t{4} * peers.num_ranks, 0);
    fill_bytes(args.place, int64_t{4} * args.num_tokens * peers.num_ranks, 0xff);
  }
};

template <typename X>
__global__ void __launch_bounds__(kBlockThreads)
    scatter_kernel(const __grid_constant__ Peers peers, const __grid_constant__ ScatterArgs args,
                   int32_t team_threads) {
  extern __shared__ int32_t scratch[];
  __shared__ Shared shared;
  const void* result = args.half == Half::kStart ? args.ticket : args.out;
  const CallId call = {args.op,         args.half,  args.hash, reinterpret_cast<unsigned long long>(result),
                       args.axis_index, args.ticket};
  Scatter<X> scatter = {peers, args, call, shared, scratch, Team::of_size(team_threads)};
  begin(peers, call, shared.operation);
  if (!shared.operation.failed) scatter.send();
  __syncthreads();
  if (!shared.operation.failed && args.half != Half::kStart) scatter.receive();
  end(peers, call, shared.operation, [&] { scatter.poison(); });
}

using Kernel = void (*)(Peers, ScatterArgs, int32_t);

Kernel kernel_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return scatter_kernel<float>;
    case ElementType::kFloat16:
      return scatter_kernel<__half>;
    default:
      return scatter_kernel<__nv_bfloat16>;
  }
}

constexpr int32_t kMaxScratch = 96 * 1024;

int64_t scratch_bytes(const Peers& peers, int32_t num_teams) {
  const int32_t num_experts = peers.num_ranks * peers.experts_per_rank;
  const int64_t prefixes = num_teams * prefix_words(num_experts, peers.num_ranks);
  const int64_t places = num_experts + 3 * peers.experts_per_rank + peers.num_ranks + 1;
  return 4 * std::max(prefixes, places);
}

}  // namespace

cudaError_t launch_scatter(const Peers& peers, const ScatterArgs& args, ElementType type, int32_t num_sms,
                           cudaStream_t stream) {
  const LaunchPlan plan = plan_launch(args.num_tokens, peers.num_ranks, num_sms);
  const int64_t scratch = scratch_bytes(peers, kBlockThreads / plan.team_threads);
  if (scratch > kMaxScratch) return cudaErrorInvalidConfiguration;
  kernel_of(type)<<<plan.num_blocks, kBlockThreads, scratch, stream>>>(peers, args, plan.team_threads);
  return cudaGetLastError();
}

cudaError_t load_scatter() {
  for (ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    const void* kernel = reinterpret_cast<const void*>(kernel_of(type));
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaSuccess) {
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxScratch);
    }
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace jax_ep
