// What the link itself needs for an exchange: the yardstick of jax_ep.bench.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ep {

// Microseconds for a push of rows[from][to] rows of `row_bytes` bytes (a multiple of 16) between all devices at once
// and a barrier of them: two kernels in a CUDA graph, the best of several ways to write and numbers of thread blocks.
// `devices` are the CUDA ordinals of 2 to 16 devices of this process; rows[i][i] is ignored. Throws
// std::invalid_argument, or std::runtime_error if CUDA fails or a device waits for another for seconds.
double link_floor(const std::vector<int32_t>& devices, const std::vector<std::vector<int32_t>>& rows,
                  int64_t row_bytes);

}  // namespace jax_ep
