// The ranks of a group, spread over the lanes of a warp: lane l has the ranks l, l + 32, l + 64, and so on. Word w is
// the set of the ranks 32 * w to 32 * w + 31, one per lane. Without a network, a group has at most 32 ranks, so there
// is one word. In the build with a network, the compiler does not unroll loops over words: code for eight words would
// be too large.
#pragma once

#include "ffi/cuda/network.cuh"

namespace jax_ep {

inline constexpr int32_t kMaxRanksOfKernels = kHasNetwork ? kMaxRanks : kMaxLocalRanks;  // the most ranks of a group
inline constexpr int kRankWords = kMaxRanksOfKernels / 32;

// This lane's rank of a word. It may be behind the last rank.
__device__ __forceinline__ int32_t rank_of_lane(int word) { return 32 * word + lane_id(); }

// Calls f(w) for each word that has ranks.
template <typename F>
__device__ __forceinline__ void for_each_word(const Peers& peers, F f) {
  const int num_words = kRankWords == 1 ? 1 : (peers.num_ranks + 31) / 32;
#pragma unroll 1
  for (int w = 0; w < num_words; ++w) f(w);
}
// Calls f(w, rank) in each lane that has a rank of word w, for each word.
template <typename F>
__device__ __forceinline__ void for_rank_of_lane(const Peers& peers, F f) {
  for_each_word(peers, [&](int w) {
    if (rank_of_lane(w) < peers.num_ranks) f(w, rank_of_lane(w));
  });
}
// Calls f(rank) for every rank, in one of the first `num_threads` threads of the block, which are at least 32.
template <typename F>
__device__ __forceinline__ void for_rank_of_thread(const Peers& peers, int32_t num_threads, F f) {
  if constexpr (kRankWords == 1) {
    if (threadIdx.x < peers.num_ranks) f(static_cast<int32_t>(threadIdx.x));
  } else {
    const auto first = static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
    for (int32_t rank = first; first < num_threads && rank < peers.num_ranks; rank += num_threads) f(rank);
  }
}

// A number for each rank.
struct PerRank {
  int32_t of_word[kRankWords];  // of this lane's rank

  __device__ __forceinline__ static PerRank all(int32_t value) {
    PerRank numbers;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) numbers.of_word[w] = value;
    return numbers;
  }
  // The number of `rank`. A whole warp calls it, with the same rank.
  __device__ __forceinline__ int32_t at(int32_t rank) const {
    return __shfl_sync(kAllLanes, of_word[kRankWords == 1 ? 0 : rank / 32], rank);
  }
  // The number of `rank`, which may differ between lanes. A whole warp calls it.
  __device__ __forceinline__ int32_t at_rank_of_lane(int32_t rank) const {
    int32_t number = 0;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) {
      const int32_t of_this_word = __shfl_sync(kAllLanes, of_word[w], rank);
      if (kRankWords == 1 || rank / 32 == w) number = of_this_word;
    }
    return number;
  }
};

// A set of ranks. All lanes have the same set.
struct RankSet {
  uint32_t words[kRankWords];  // a bit per rank

  // The ranks for which the numbers are at least 0. A whole warp calls it.
  __device__ __forceinline__ static RankSet of(const PerRank& numbers) {
    RankSet ranks;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) ranks.words[w] = __ballot_sync(kAllLanes, numbers.of_word[w] >= 0);
    return ranks;
  }
  // The ranks that the lanes pass. A lane passes none if its rank is not `present`. A whole warp calls it.
  __device__ __forceinline__ static RankSet of_lanes(bool present, int32_t rank) {
    RankSet ranks;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) {
      const bool is_in_word = present && (kRankWords == 1 || rank / 32 == w);
      ranks.words[w] = __reduce_or_sync(kAllLanes, is_in_word ? 1u << (kRankWords == 1 ? rank : rank % 32) : 0);
    }
    return ranks;
  }

  __device__ __forceinline__ static RankSet only(int32_t rank) {
    RankSet ranks;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) {
      ranks.words[w] = kRankWords == 1 ? 1u << rank : rank / 32 == w ? 1u << rank % 32 : 0;
    }
    return ranks;
  }
  __device__ __forceinline__ RankSet intersection(const RankSet& others) const {
    RankSet ranks;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) ranks.words[w] = words[w] & others.words[w];
    return ranks;
  }
  __device__ __forceinline__ RankSet without(const RankSet& others) const {
    RankSet ranks;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) ranks.words[w] = words[w] & ~others.words[w];
    return ranks;
  }

  __device__ __forceinline__ bool any() const {
    uint32_t bits = words[0];
#pragma unroll 1
    for (int w = 1; w < kRankWords; ++w) bits |= words[w];
    return bits != 0;
  }
  __device__ __forceinline__ int32_t size() const {
    int32_t size = __popc(words[0]);
#pragma unroll 1
    for (int w = 1; w < kRankWords; ++w) size += __popc(words[w]);
    return size;
  }
  // True if the set has one of `count` ranks from `first` on.
  __device__ __forceinline__ bool has_any_of(int32_t first, int32_t count) const {
    bool has = false;
#pragma unroll 1
    for (int w = 0; w < kRankWords; ++w) {
      const int32_t begin = max(first - 32 * w, 0), end = min(first + count - 32 * w, 32);
      if (begin < end) has |= (words[w] >> begin << begin & 0xffffffffu >> (32 - end)) != 0;
    }
    return has;
  }
};

// A set of ranks in cyclic order: first the ranks above this rank, then the ranks from 0 to this rank. If all senders
// began with rank 0, they would share its link.
class OrderedRanks {
 public:
  __device__ __forceinline__ OrderedRanks(const Peers& peers, const RankSet& ranks) : bits_(ranks) {
    if constexpr (kRankWords == 1) {
      const uint32_t above = ranks.words[0] >> peers.rank >> 1, others = ranks.words[0] & ((2u << peers.rank) - 1);
      bits_.words[0] = above | others << (peers.num_ranks - peers.rank - 1);
    }
  }

  __device__ __forceinline__ bool any() const { return bits_.any(); }

  // Calls f(rank) for each rank of the set.
  template <typename F>
  __device__ __forceinline__ void for_each(const Peers& peers, F f) const {
    if constexpr (kRankWords == 1) {
      const int32_t num_above = peers.num_ranks - peers.rank - 1;
#pragma unroll 1
      for (uint32_t left = bits_.words[0]; left; left &= left - 1) {
        const int32_t i = __ffs(left) - 1;
        f(i < num_above ? peers.rank + 1 + i : i - num_above);
      }
    } else {
      const int32_t rank = peers.rank;
      const uint32_t not_above = 0xffffffffu >> (31 - rank % 32);  // in the word of `rank`, which comes first and last
#pragma unroll 1
      for (int i = 0; i <= kRankWords; ++i) {
        const int w = (rank / 32 + i) % kRankWords;
        const uint32_t bits = i == 0 ? ~not_above : i == kRankWords ? not_above : 0xffffffffu;
#pragma unroll 1
        for (uint32_t left = bits_.words[w] & bits; left; left &= left - 1) f(32 * w + __ffs(left) - 1);
      }
    }
  }

 private:
  RankSet bits_;  // with one word, bit i is the i-th rank of the order; with several words, a bit per rank
};

// Converts a token's indices for transport through rail peers. `index` has the token's index at each rank, or -1. Local
// ranks keep their index. If the token has an index at any rank of another node, the rail peer in that node gets the
// number of the token. All other ranks get -1. A whole warp calls it.
__device__ __forceinline__ PerRank rail_index(const Nodes& nodes, const PerRank& index, int32_t token) {
  const RankSet ranks = RankSet::of(index);
  PerRank of_rails;
#pragma unroll 1
  for (int w = 0; w < kRankWords; ++w) {
    const int32_t rank = rank_of_lane(w), node = rank / nodes.size;
    const bool forwards = nodes.is_rail_peer(rank) && ranks.has_any_of(node * nodes.size, nodes.size);
    of_rails.of_word[w] = nodes.is_in_own_node(rank) ? index.of_word[w] : forwards ? token : -1;
  }
  return of_rails;
}

}  // namespace jax_ep
