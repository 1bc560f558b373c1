// The kernels of expand and reduce, compared with plain loops. Rows have small whole numbers, so all sums are exact.
#pragma once

#include <algorithm>
#include <numeric>

#include "exchange.h"
#include "ffi/cuda/expand.h"
#include "ffi/cuda/reduce.h"

namespace {

// Random pairs in random rows of three groups. The first rows of a group have pairs.
struct RandomPairs {
  int32_t num_tokens, top_k, capacity, channels;
  Array<int32_t> row_of_pair, pair_of_row, counts{3}, group_sizes{3};

  RandomPairs(int32_t num_tokens, int32_t top_k, int32_t capacity, int32_t channels, std::mt19937& random)
      : num_tokens(num_tokens),
        top_k(top_k),
        capacity(capacity),
        channels(channels),
        row_of_pair(size_t(num_tokens) * top_k),
        pair_of_row(capacity) {
    std::vector<int32_t> pairs(num_pairs());
    std::iota(pairs.begin(), pairs.end(), 0);
    std::shuffle(pairs.begin(), pairs.end(), random);
    std::fill(row_of_pair.host.begin(), row_of_pair.host.end(), capacity);
    std::fill(pair_of_row.host.begin(), pair_of_row.host.end(), num_pairs());
    int32_t first = 0;
    for (size_t group = 0; group < group_sizes.host.size(); ++group) {
      group_sizes.host[group] = random() % (capacity / 3 + 1);
      const size_t most = std::min<size_t>(group_sizes.host[group], pairs.size());
      counts.host[group] = static_cast<int32_t>(random() % (most + 1));
      for (int32_t row = first; row < first + counts.host[group]; ++row) {
        row_of_pair.host[pairs.back()] = row;
        pair_of_row.host[row] = pairs.back();
        pairs.pop_back();
      }
      first += group_sizes.host[group];
    }
    row_of_pair.upload(), pair_of_row.upload(), counts.upload(), group_sizes.upload();
  }

  PairRows on_device(int32_t* pair_of_row) const {
    return {num_tokens, top_k, capacity, channels * int64_t{sizeof(float)}, row_of_pair.device, pair_of_row};
  }
  int32_t num_pairs() const { return num_tokens * top_k; }
  int32_t num_rows_of_groups() const { return std::accumulate(group_sizes.host.begin(), group_sizes.host.end(), 0); }
  bool has_pair(int32_t row) const { return pair_of_row.host[row] < num_pairs(); }
  int32_t token_of(int32_t row) const { return pair_of_row.host[row] / top_k; }
};

constexpr float kUntouched = 99;

void set_random(Array<float>& array, std::mt19937& random) {
  for (float& value : array.host) value = static_cast<float>(random() % 17) - 8;
  array.upload();
}
void set_untouched(Array<float>& array) {
  std::fill(array.host.begin(), array.host.end(), kUntouched);
  array.upload();
}
template <typename T>
uint8_t* bytes(const Array<T>& array) {
  return reinterpret_cast<uint8_t*>(array.device);
}

void run_expand(const RandomPairs& pairs, bool zero_pad, std::mt19937& random) {
  const size_t channels = pairs.channels;
  Array<float> x(pairs.num_tokens * channels), out(pairs.capacity * channels);
  set_random(x, random), set_untouched(out);
  std::vector<float> expected = out.host;
  const int32_t end = zero_pad ? pairs.capacity : pairs.num_rows_of_groups();
  Array<int32_t> pair_of_row(pairs.capacity);
  for (int32_t row = 0; row < pairs.capacity; ++row) {
    for (size_t c = 0; c < channels; ++c) {
      if (pairs.has_pair(row)) {
        expected[row * channels + c] = x.host[pairs.token_of(row) * channels + c];
      } else if (row < end) {
        expected[row * channels + c] = 0;
      }
    }
  }
  must(launch_expand({pairs.on_device(pair_of_row.device), 3, zero_pad, bytes(x), pairs.counts.device,
                      pairs.group_sizes.device, bytes(out)},
                     nullptr));
  must(cudaDeviceSynchronize());
  EXPECT_EQ(out.download() == expected, true);
  EXPECT_EQ(pair_of_row.download(), pairs.pair_of_row.host);
}

void run_reduce(const RandomPairs& pairs, bool has_weights, std::mt19937& random) {
  const size_t channels = pairs.channels;
  Array<float> y(pairs.capacity * channels), weights(pairs.capacity), out(pairs.num_tokens * channels);
  set_random(y, random), set_random(weights, random), set_untouched(out);
  std::vector<float> expected(out.host.size());
  for (int32_t row = 0; row < pairs.capacity; ++row) {
    if (!pairs.has_pair(row)) continue;
    for (size_t c = 0; c < channels; ++c) {
      const float weight = has_weights ? weights.host[row] : 1;
      expected[pairs.token_of(row) * channels + c] += weight * y.host[row * channels + c];
    }
  }
  must(launch_reduce(ElementType::kFloat32,
                     {pairs.on_device(nullptr), bytes(y), has_weights ? weights.device : nullptr, bytes(out)},
                     nullptr));
  must(cudaDeviceSynchronize());
  EXPECT_EQ(out.download() == expected, true);
}

void run_reduce_back(const RandomPairs& pairs, bool has_y, std::mt19937& random) {
  const size_t channels = pairs.channels;
  Array<float> g(pairs.num_tokens * channels), y(pairs.capacity * channels), weights(pairs.capacity);
  Array<float> y_cotangent(pairs.capacity * channels), weights_cotangent(pairs.capacity);
  set_random(g, random), set_random(y, random), set_random(weights, random);
  set_untouched(y_cotangent), set_untouched(weights_cotangent);
  std::vector<float> expected(y.host.size()), products(pairs.capacity, has_y ? 0 : kUntouched);
  for (int32_t row = 0; row < pairs.capacity; ++row) {
    if (!pairs.has_pair(row)) continue;
    for (size_t c = 0; c < channels; ++c) {
      const float of_g = g.host[pairs.token_of(row) * channels + c];
      expected[row * channels + c] = weights.host[row] * of_g;
      if (has_y) products[row] += of_g * y.host[row * channels + c];
    }
  }
  must(launch_reduce_back(ElementType::kFloat32,
                          {pairs.on_device(pairs.pair_of_row.device), bytes(g), has_y ? bytes(y) : nullptr,
                           weights.device, bytes(y_cotangent), has_y ? weights_cotangent.device : nullptr},
                          nullptr));
  must(cudaDeviceSynchronize());
  EXPECT_EQ(y_cotangent.download() == expected, true);
  EXPECT_EQ(weights_cotangent.download(), products);
}

// Some rows need several passes of a block's threads.
void run_expand_and_reduce(std::mt19937& random) {
  must(cudaSetDevice(0));
  const int32_t units = random() % 3 == 0 ? 1000 + random() % 1200 : 1 + random() % 200;
  const int32_t most_k = random() % 4 == 0 ? 32 : 8;
  const int32_t top_k = 1 + random() % most_k, num_tokens = random() % 20, capacity = 1 + random() % 100;
  const RandomPairs pairs(num_tokens, top_k, capacity, 4 * units, random);
  const bool zero_pad = random() % 2, has_weights = random() % 2, has_y = random() % 2;
  run_expand(pairs, zero_pad, random);
  run_reduce(pairs, has_weights, random);
  run_reduce_back(pairs, has_y, random);
}

void run_expand_and_reduce_of_all_sizes() {
  std::mt19937 random(0);
  for (int i = 0; i < 60; ++i) run_expand_and_reduce(random);
}

}  // namespace
