#include "ffi/cuda/expand.h"
#include "ffi/cuda/pair_rows.cuh"

namespace jax_ep {
namespace {

enum class RowKind : int32_t { kPair, kPadding, kNoGroup };

__device__ RowKind row_kind(const ExpandArgs& args, int32_t row) {
  int32_t begin = 0;
#pragma unroll 4
  for (int32_t group = 0; group < args.num_groups; ++group) {
    const int32_t end = begin + __ldg(args.group_sizes + group);
    if (row < end) return row < begin + __ldg(args.counts + group) ? RowKind::kPair : RowKind::kPadding;
    begin = end;
  }
  return RowKind::kNoGroup;
}

__device__ void write_rows_without_pair(const ExpandArgs& args) {
  const RowOfLane mine(args.pairs);
  // A lane without a row must write nothing. So it gets kPair: the block of the token writes a row with a pair, and
  // this function does not.
  const RowKind kind = mine.exists ? row_kind(args, mine.row) : RowKind::kPair;
  if (kind != RowKind::kPair) args.pairs.pair_of_row[mine.row] = args.pairs.num_tokens * args.pairs.top_k;
  mine.zero(args.pairs, kind == RowKind::kPadding || (kind == RowKind::kNoGroup && args.zero_pad), args.out);
}

__global__ void __launch_bounds__(kMaxThreadsPerBlock, kMinBlocksPerSm)
    expand_kernel(const __grid_constant__ ExpandArgs args) {
  wait_for_dependencies();
  if (has_no_token(args.pairs)) return write_rows_without_pair(args);
  const PairsOfToken token(args.pairs, blockIdx.x);
  if (token.present == 0) return;
  if (warp_id() == 0 && token.has_row()) {
    args.pairs.pair_of_row[token.row] = static_cast<int32_t>(blockIdx.x) * args.pairs.top_k + lane_id();
  }
  const int64_t row_bytes = args.pairs.row_bytes;
  for_units<Block>(args.pairs, [&](int32_t first, int32_t num_units) {
    Units<Block> x;
    x.load(args.x + blockIdx.x * row_bytes, first, num_units);
    token.for_each([&](int, int32_t row) { x.store(args.out + row * row_bytes, first, num_units); });
  });
}

}  // namespace

cudaError_t launch_expand(const ExpandArgs& args, cudaStream_t stream) {
  const Grid grid = grid_of_tokens(args.pairs, true);
  return grid.num_blocks == 0 ? cudaSuccess : launch(expand_kernel, grid, stream, args);
}

cudaError_t load_expand() { return load_kernel(expand_kernel, 0); }

}  // namespace jax_ep
