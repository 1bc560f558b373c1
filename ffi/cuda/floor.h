// The time that the link itself needs for an exchange. jax_ep.bench compares operations with it.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ep {

// Returns the microseconds of a push and a barrier, two kernels in a CUDA graph. In the push, all devices at once write
// rows[from][to] rows of `row_bytes` bytes (a multiple of 16) to one another. The result is the best over two ways to
// write and several numbers of thread blocks. `devices` are the CUDA ordinals of 2 to 16 devices of this process;
// rows[i][i] is ignored. Throws std::invalid_argument, or std::runtime_error if CUDA fails or a device waits for
// another for seconds.
double link_floor(const std::vector<int32_t>& devices, const std::vector<std::vector<int32_t>>& rows,
                  int64_t row_bytes);

}  // namespace jax_ep
