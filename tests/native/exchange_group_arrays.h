// The kernel that computes the arrays of the grouped GEMM, compared with a plain loop.
#pragma once

#include <algorithm>
#include <numeric>

#include "exchange.h"
#include "ffi/cuda/grouped_matmul/groups.h"

namespace {

// The first row of a group, its number of rows, and the end of the rows behind it.
struct RowsOfGroup {
  int64_t first, size, end;
};

std::vector<RowsOfGroup> rows_of_groups(const std::vector<int32_t>& sizes, int64_t capacity, int64_t num_rows) {
  std::vector<RowsOfGroup> groups;
  int64_t next = 0;
  for (size_t g = 0; g < sizes.size(); ++g) {
    const int64_t size = std::max(sizes[g], 0);
    if (capacity > 0) {
      const int64_t first = static_cast<int64_t>(g) * capacity;
      groups.push_back({first, std::min(size, capacity), first + capacity});
      continue;
    }
    const int64_t first = std::min(next, num_rows), end = std::min(next += size, num_rows);
    groups.push_back({first, end - first, g + 1 == sizes.size() ? num_rows : end});
  }
  return groups;
}

// The weights of the last num_copies groups are in the second array.
void run_group_arrays(GroupedProduct product, const std::vector<int32_t>& sizes, int32_t num_copies,
                      bool leaves_empty_copies, int64_t capacity, int64_t num_rows) {
  must(cudaSetDevice(0));
  const int64_t k = 8, n = 16;
  const auto num_groups = static_cast<int32_t>(sizes.size());
  const int32_t num_home_groups = num_groups - num_copies;
  const bool is_weights = product == GroupedProduct::kWeightsGradient;
  const int64_t columns = product == GroupedProduct::kForward ? n : k;
  Array<int32_t> group_sizes(sizes.size());
  Array<uint16_t> rows(num_rows * n), out(is_weights ? num_home_groups * k * n : num_rows * columns);
  Array<uint16_t> copies(num_copies * k * n), out_copies(num_copies * k * n);
  GroupArrays host = {};
  GroupedMatmulArgs args = {product, GroupedDtype::kBfloat16, num_groups, num_home_groups, capacity, num_rows, k, n};
  args.leaves_empty_copies = leaves_empty_copies;
  args.workspace_bytes = static_cast<char*>(group_arrays(args).gemm_workspace) - static_cast<char*>(nullptr);
  Array<char> workspace(args.workspace_bytes);
  group_sizes.host = sizes;
  group_sizes.upload();
  for (Array<uint16_t>* array : {&out, &out_copies}) {
    std::fill(array->host.begin(), array->host.end(), 0x1111);
    array->upload();
  }
  args.lhs = args.rhs = rows.device, args.copies = copies.device, args.group_sizes = group_sizes.device;
  args.out = out.device, args.out_copies = out_copies.device, args.workspace = workspace.device;
  must(write_group_arrays(args, group_arrays(args), 3, nullptr));
  must(cudaDeviceSynchronize());
  workspace.download(), out.download(), out_copies.download();
  args.workspace = workspace.host.data();
  host = group_arrays(args);

  std::vector<uint16_t> expected(out.host.size(), 0x1111), expected_copies(out_copies.host.size(), 0x1111);
  const auto groups = rows_of_groups(sizes, capacity, num_rows);
  for (int32_t g = 0; g < num_groups; ++g) {
    const auto [first, size, end] = groups[g];
    const auto m = static_cast<int32_t>(size);
    const bool is_home = g < num_home_groups;
    const int64_t weights = (is_home ? g : g - num_home_groups) * k * n;
    const uint16_t* b = is_home || is_weights ? rows.device : copies.device;
    const uint16_t* d = is_home || !is_weights ? out.device : out_copies.device;
    const auto offset = [](const void* at, const uint16_t* array) { return static_cast<const uint16_t*>(at) - array; };
    const GroupShape& shape = host.shapes[g];
    const std::vector<int64_t> found = {
        shape.m, shape.n, shape.k, offset(host.a[g], rows.device), offset(host.b[g], b), offset(host.d[g], d)};
    switch (product) {
      case GroupedProduct::kForward:
        EXPECT_EQ(found, (std::vector<int64_t>{m, n, k, first * k, weights, first * n}));
        break;
      case GroupedProduct::kRowsGradient:
        EXPECT_EQ(found, (std::vector<int64_t>{m, k, n, first * n, weights, first * k}));
        std::fill(expected.begin() + (first + size) * k, expected.begin() + end * k, 0);
        break;
      default:
        EXPECT_EQ(found, (std::vector<int64_t>{m > 0 ? k : 0, n, m, first * k, first * n, weights}));
        if (size == 0 && (is_home || !leaves_empty_copies)) {
          std::fill_n((is_home ? expected : expected_copies).begin() + weights, k * n, 0);
        }
    }
  }
  EXPECT_EQ(out.host == expected, true);
  EXPECT_EQ(out_copies.host == expected_copies, true);
}

// Sizes of groups: empty ones, negative ones, and in some cases more than there are rows. In half of the cases, all
// groups are home groups; otherwise, any number of groups are copies.
void run_group_arrays_of(std::mt19937& random, int32_t num_groups) {
  std::vector<int32_t> sizes(num_groups);
  for (int32_t& size : sizes) size = std::max<int32_t>(random() % 12, 3) - 4;
  const int64_t capacity = random() % 2 ? 0 : 1 + random() % 8;
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) + 1;
  const int64_t num_rows = capacity > 0 ? num_groups * capacity : std::max<int64_t>(total + random() % 9 - 4, 1);
  const auto product = static_cast<GroupedProduct>(random() % kNumGroupedProducts);
  const auto num_copies = static_cast<int32_t>(random() % 2 ? random() % (num_groups + 1) : 0);
  run_group_arrays(product, sizes, num_copies, random() % 2, capacity, num_rows);
}

void run_all_group_arrays() {
  std::mt19937 random(0);
  for (int32_t num_groups : {1, 2, 16, 300, 1024, 1025, 2500}) {
    for (int i = 0; i < 12; ++i) run_group_arrays_of(random, num_groups);
  }
}

}  // namespace
