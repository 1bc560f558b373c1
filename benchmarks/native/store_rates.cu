// Times copies by few SMs, from a GPU's memory to its own memory and to a peer's: the rate that an SM can reach when it
// sends or writes rows. Warps copy rows with 16-byte loads and stores, or one thread per warp copies parts of rows
// through shared memory by bulk copies. All GPUs of the machine copy at the same time, each to the next one.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -I. benchmarks/native/store_rates.cu -o store_rates && ./store_rates
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "ffi/cuda/ptx.cuh"

namespace {

using namespace jax_ep;

constexpr int64_t kBytes = 64 << 20;
constexpr int32_t kRowBytes = 14336, kRowUnits = kRowBytes / 16;
constexpr int32_t kStoreThreads = 512, kBulkWarps = 4, kRepetitions = 5;
constexpr int32_t kLoadsAhead = 2;  // bulk copies of a warp: parts that are loaded ahead, and as many that are stored
constexpr int32_t kPartBytes = 4096;
constexpr int32_t kStages = 2 * kLoadsAhead;
constexpr int32_t kBulkSharedBytes = kBulkWarps * kStages * kPartBytes;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(status));
  std::exit(1);
}

// A warp copies one row at a time, `kAtOnce` units per lane at once. `relaxed`: stores at system scope, as rows in
// transit need them.
template <int kAtOnce, bool relaxed>
__global__ void __launch_bounds__(kStoreThreads) store_rows(const uint4* from, uint4* to) {
  const int64_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
  for (int64_t row = warp; row < kBytes / kRowBytes; row += num_warps) {
    for (int32_t first = threadIdx.x % 32; first < kRowUnits; first += 32 * kAtOnce) {
      uint4 units[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < kRowUnits) units[i] = __ldg(from + row * kRowUnits + first + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i >= kRowUnits) break;
        uint4* const unit = to + row * kRowUnits + first + 32 * i;
        if (relaxed) {
          store_unit(unit, units[i]);
        } else {
          *unit = units[i];
        }
      }
    }
  }
}

// Waits until all bulk stores except the newest kLoadsAhead - 1 have read their shared memory.
__device__ void await_oldest_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLoadsAhead - 1) : "memory");
}

__global__ void copy_parts(const uint8_t* from, uint8_t* to) {
  extern __shared__ __align__(128) uint8_t parts[];
  __shared__ __align__(8) uint64_t landed_of_stage[kBulkWarps][kStages];
  if (threadIdx.x % 32 != 0) return;
  const int32_t warp = threadIdx.x / 32;
  const uint32_t stages = shared_address(parts) + warp * kStages * kPartBytes;
  const uint32_t landed = shared_address(landed_of_stage[warp]);
  for (int32_t stage = 0; stage < kStages; ++stage) init_landed(landed + 8 * stage);
  publish_landed();
  const int64_t first = blockIdx.x * kBulkWarps + warp, step = int64_t{gridDim.x} * kBulkWarps;
  const int64_t num_parts = std::max<int64_t>((kBytes / kPartBytes - first + step - 1) / step, 0);  // of this warp
  for (int64_t i = 0; i < num_parts + kLoadsAhead; ++i) {
    if (i < num_parts) {
      const auto stage = static_cast<uint32_t>(i % kStages);
      await_oldest_read();
      copy_bulk<false>(stages + stage * kPartBytes, from + (first + i * step) * kPartBytes, kPartBytes,
                       landed + 8 * stage);
    }
    const int64_t stored = i - kLoadsAhead;
    if (stored < 0) continue;
    const auto stage = static_cast<uint32_t>(stored % kStages);
    while (!has_landed(landed + 8 * stage, stored / kStages % 2)) {
    }
    copy_bulk_out(to + (first + stored * step) * kPartBytes, stages + stage * kPartBytes, kPartBytes);
  }
  await_bulk_stores();
}

struct Device {
  uint8_t *from, *to;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

Device open(int32_t device, int32_t num_devices) {
  must(cudaSetDevice(device));
  for (int32_t peer = 0; peer < num_devices; ++peer) {
    if (peer != device) must(cudaDeviceEnablePeerAccess(peer, 0));
  }
  must(cudaFuncSetAttribute(copy_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkSharedBytes));
  Device opened;
  must(cudaMalloc(&opened.from, kBytes));
  must(cudaMalloc(&opened.to, kBytes));
  must(cudaMemset(opened.from, 1, kBytes));
  must(cudaStreamCreate(&opened.stream));
  must(cudaEventCreate(&opened.begin));
  must(cudaEventCreate(&opened.end));
  return opened;
}

}  // namespace

int main() {
  int num_devices = 0;
  must(cudaGetDeviceCount(&num_devices));
  std::vector<Device> devices;
  for (int32_t d = 0; d < num_devices; ++d) devices.push_back(open(d, num_devices));
  // Prints the rate of the slowest device, in bytes per nanosecond.
  const auto time = [&](const char* name, int32_t blocks, bool to_peer, auto launch) {
    std::vector<float> best_ms(num_devices, 1e9f);
    for (int32_t i = 0; i < kRepetitions; ++i) {
      std::vector<std::thread> threads;
      for (int32_t d = 0; d < num_devices; ++d) {
        threads.emplace_back([&, d] {
          const Device& device = devices[d];
          must(cudaSetDevice(d));
          must(cudaEventRecord(device.begin, device.stream));
          launch(device.from, devices[to_peer ? (d + 1) % num_devices : d].to, device.stream);
          must(cudaGetLastError());
          must(cudaEventRecord(device.end, device.stream));
          must(cudaStreamSynchronize(device.stream));
          float ms;
          must(cudaEventElapsedTime(&ms, device.begin, device.end));
          best_ms[d] = std::min(best_ms[d], ms);
        });
      }
      for (auto& thread : threads) thread.join();
    }
    const double rate = kBytes / (*std::max_element(best_ms.begin(), best_ms.end()) * 1e6);
    std::printf("%2d SMs to %s: %-24s %7.1f, per SM %5.1f\n", blocks, to_peer ? "a peer" : "itself", name, rate,
                rate / blocks);
  };
  const auto store = [](auto kernel, int32_t blocks) {
    return [=](const uint8_t* from, uint8_t* to, cudaStream_t stream) {
      kernel<<<blocks, kStoreThreads, 0, stream>>>(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to));
    };
  };
  for (const bool to_peer : {false, true}) {
    if (to_peer && num_devices < 2) continue;
    for (const int32_t blocks : {1, 4, 12, 24, 48}) {
      time("stores", blocks, to_peer, store(store_rows<4, false>, blocks));
      time("stores at system scope", blocks, to_peer, store(store_rows<4, true>, blocks));
      time("bulk copies", blocks, to_peer, [&](const uint8_t* from, uint8_t* to, cudaStream_t stream) {
        copy_parts<<<blocks, kBulkWarps * 32, kBulkSharedBytes, stream>>>(from, to);
      });
    }
  }
}
