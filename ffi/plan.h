// The shape of a launch, from the shape of the call. The one place to tune it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_ep {

inline constexpr int32_t kBlockThreads = 512;
inline constexpr int32_t kMaxTeams = 4;  // of a thread block
inline constexpr int32_t kDefaultSms = 64;

struct LaunchPlan {
  int32_t num_blocks;
  int32_t team_threads;  // threads that work on a row together
};

// Few tokens: many threads on a row, for its latency. Many tokens: more rows under way.
constexpr LaunchPlan plan_launch(int64_t num_tokens, int32_t num_ranks, int32_t num_sms) {
  const int32_t team_threads = num_tokens <= 16 ? 512 : num_tokens <= 64 ? 256 : 128;
  const int64_t rows = std::max<int64_t>(num_tokens * num_ranks, 1);
  const int64_t teams = kBlockThreads / team_threads;
  const int64_t wanted = (rows + teams - 1) / teams;
  return {static_cast<int32_t>(std::min<int64_t>(wanted, num_sms > 0 ? num_sms : kDefaultSms)), team_threads};
}

}  // namespace jax_ep
