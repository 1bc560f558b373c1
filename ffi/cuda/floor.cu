#include <cuda_runtime.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "ffi/cuda/floor.h"
#include "ffi/cuda/ptx.cuh"

namespace jax_ep {
namespace {

constexpr int kMaxDevices = 16;
constexpr int kStoreThreads = 512;
constexpr int kStoresInFlight = 4;  // of a thread
constexpr int kMaxBulkWarps = 8;    // of a block, each with a row in shared memory
constexpr int64_t kSharedBytes = (227 << 10) - 1024;
constexpr int kPushesPerGraph = 20;
constexpr int kReplays = 4;
constexpr uint64_t kTimeoutNs = 5'000'000'000;
constexpr uint32_t kPollsPerClock = 1024;  // the clock is slow to read

// The barrier words of one device, in its own memory.
struct Signals {
  uint32_t arrived[kMaxDevices];  // the newest barrier that each device has reached; the devices write it
  struct alignas(8) State {
    uint32_t epoch;   // the newest barrier that is over
    uint32_t failed;  // whether a wait has timed out
  } state;            // read at once: a second read would cost time
};

struct Barrier {
  Signals* of[kMaxDevices];
  int32_t self, num_devices;
};

// The rows that a device sends. Peer 0 is the next device, peer 1 the one after it, and so on. If all devices began
// with the same device, they would share its link.
struct Push {
  const uint8_t* source;  // every row sent has its own memory
  uint8_t* to[kMaxDevices];
  int32_t rows[kMaxDevices];
  int32_t num_peers;
  int32_t max_rows;
  int64_t total_rows;
  int64_t row_bytes;
};

class Deadline {
 public:
  __device__ bool has_passed() {
    if (++polls_ % kPollsPerClock != 0) return false;
    const uint64_t now = globaltimer_ns();
    if (begun_ == 0) begun_ = now;
    return now - begun_ > kTimeoutNs;
  }

 private:
  uint32_t polls_ = 0;
  uint64_t begun_ = 0;
};

// A barrier of all devices. It has one warp. After a time-out, the device does not wait again: all later barriers end
// at once.
__global__ void barrier_kernel(const __grid_constant__ Barrier barrier) {
  Signals* own = barrier.of[barrier.self];
  const Signals::State state = own->state;
  if (state.failed) return;
  const uint32_t epoch = state.epoch + 1;
  const int32_t peer = threadIdx.x;
  if (peer < barrier.num_devices) {
    store_release(&barrier.of[peer]->arrived[barrier.self], epoch);
    Deadline deadline;
    while (load_acquire(&own->arrived[peer]) < epoch) {
      if (deadline.has_passed()) {
        own->state.failed = 1;
        break;
      }
    }
  }
  __syncwarp();
  if (threadIdx.x == 0) own->state.epoch = epoch;
}

__global__ void __launch_bounds__(kStoreThreads) store_kernel(const __grid_constant__ Push push) {
  const int64_t units_per_row = push.row_bytes / sizeof(uint4);
  const int64_t total = push.total_rows * units_per_row;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const auto* source = reinterpret_cast<const uint4*>(push.source);
  for (int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; first < total;
       first += stride * kStoresInFlight) {
    uint4 units[kStoresInFlight];
#pragma unroll
    for (int i = 0; i < kStoresInFlight; ++i) {
      if (first + i * stride < total) units[i] = source[first + i * stride];
    }
#pragma unroll
    for (int i = 0; i < kStoresInFlight; ++i) {
      int64_t unit = first + i * stride;
      if (unit >= total) break;
      int32_t peer = 0;
      for (; unit >= push.rows[peer] * units_per_row; ++peer) unit -= push.rows[peer] * units_per_row;
      reinterpret_cast<uint4*>(push.to[peer])[unit] = units[i];
    }
  }
}

// Sends rows by bulk copies through shared memory. A warp copies one whole row at a time.
__global__ void bulk_kernel(const __grid_constant__ Push push, uint32_t* failed) {
  extern __shared__ __align__(128) uint8_t buffers[];
  __shared__ __align__(8) uint64_t landed_of_warp[kMaxBulkWarps];
  if (threadIdx.x % warpSize != 0) return;
  const int32_t warp = threadIdx.x / warpSize;
  const int32_t num_warps = blockDim.x / warpSize;
  const uint32_t landed = shared_address(&landed_of_warp[warp]);
  const uint32_t buffer = shared_address(buffers + warp * push.row_bytes);
  const auto row_bytes = static_cast<uint32_t>(push.row_bytes);
  init_landed(landed);
  publish_landed();
  uint32_t phase = 0;
  // An item is a pair (row, peer). Consecutive items are for different peers, so that a device gets rows from all other
  // devices at once.
  const int64_t num_items = static_cast<int64_t>(push.max_rows) * push.num_peers;
  for (int64_t item = blockIdx.x * num_warps + warp; item < num_items;
       item += static_cast<int64_t>(gridDim.x) * num_warps) {
    const auto peer = static_cast<int32_t>(item % push.num_peers);
    const int64_t row = item / push.num_peers;
    if (row >= push.rows[peer]) continue;
    await_bulk_reads();  // the former row has left the buffer
    int64_t source_row = row;
    for (int32_t before = 0; before < peer; ++before) source_row += push.rows[before];
    copy_bulk<false>(buffer, push.source + source_row * row_bytes, row_bytes, landed);
    Deadline deadline;
    while (!has_landed(landed, phase)) {
      if (deadline.has_passed()) {
        *failed = 1;
        return;
      }
    }
    phase ^= 1;
    copy_bulk_out(push.to[peer] + row * row_bytes, buffer, row_bytes);
  }
  await_bulk_stores();
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error would stay and be reported to whoever asks next
  throw std::runtime_error(std::string("link_floor: ") + what + ": " + cudaGetErrorString(status));
}

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
template <typename T>
using DeviceMemory = std::unique_ptr<T, Destroy<cudaFree>>;
using Stream = std::unique_ptr<CUstream_st, Destroy<cudaStreamDestroy>>;
using Event = std::unique_ptr<CUevent_st, Destroy<cudaEventDestroy>>;
using Graph = std::unique_ptr<CUgraph_st, Destroy<cudaGraphDestroy>>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroy<cudaGraphExecDestroy>>;

template <typename T>
DeviceMemory<T> allocate(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<int64_t>(bytes, 16)), "cudaMalloc");
  DeviceMemory<T> owner(static_cast<T*>(memory));
  check(cudaMemset(memory, 0, std::max<int64_t>(bytes, 16)), "cudaMemset");
  return owner;
}

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return Event(event);
}

// How the bytes are moved, and by how many blocks.
struct Variant {
  bool bulk;
  int32_t num_blocks;
};

class Exchange {
 public:
  Exchange(const std::vector<int32_t>& devices, const std::vector<std::vector<int32_t>>& rows, int64_t row_bytes)
      : devices_(devices), rows_(rows), row_bytes_(row_bytes), sides_(devices.size()) {
    on_each_device([this](int32_t self) { allocate_side(self); });
    for (int32_t self = 0; self < num_devices(); ++self) address(self);
  }

  // Waits for all devices: no device may free its memory while a peer still writes to it.
  ~Exchange() {
    for (const Side& side : sides_) cudaStreamSynchronize(side.stream.get());
  }

  double best_us() {
    double best = std::numeric_limits<double>::infinity();
    for (int32_t num_blocks : {32, 64, 132, 264}) {
      best = std::min(best, time_us({false, num_blocks}));
      if (bulk_warps() > 0) best = std::min(best, time_us({true, num_blocks}));
    }
    return best;
  }

 private:
  struct Side {
    DeviceMemory<uint8_t> source, arrived;
    DeviceMemory<Signals> signals;
    Stream stream;
    Event before, after;
    Push push = {};
    Barrier barrier = {};
    GraphExec graph;
  };

  int32_t num_devices() const { return static_cast<int32_t>(devices_.size()); }

  int32_t bulk_warps() const {
    return static_cast<int32_t>(std::min<int64_t>(kMaxBulkWarps, kSharedBytes / row_bytes_));
  }

  // Runs fn(device) on a thread per device. Rethrows the exception of the first device that has one.
  void on_each_device(const std::function<void(int32_t)>& fn) const {
    std::vector<std::exception_ptr> errors(devices_.size());
    std::vector<std::thread> threads;
    for (int32_t self = 0; self < num_devices(); ++self) {
      threads.emplace_back([&, self] {
        try {
          check(cudaSetDevice(devices_[self]), "cudaSetDevice");
          fn(self);
        } catch (...) {
          errors[self] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

  void allocate_side(int32_t self) {
    for (int32_t peer = 0; peer < num_devices(); ++peer) {
      if (peer == self) continue;
      const cudaError_t status = cudaDeviceEnablePeerAccess(devices_[peer], 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check(status, "cudaDeviceEnablePeerAccess");
      }
    }
    Side& side = sides_[self];
    int64_t sent = 0, received = 0;
    for (int32_t peer = 0; peer < num_devices(); ++peer) {
      if (peer == self) continue;
      sent += rows_[self][peer];
      received += rows_[peer][self];
    }
    side.source = allocate<uint8_t>(sent * row_bytes_);
    side.arrived = allocate<uint8_t>(received * row_bytes_);
    side.signals = allocate<Signals>(sizeof(Signals));
    side.before = make_event();
    side.after = make_event();
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    side.stream.reset(stream);
    check(cudaFuncSetAttribute(bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bulk_warps() * row_bytes_)),
          "cudaFuncSetAttribute");
    // Load the kernels now: loading a kernel while a peer waits can deadlock.
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, store_kernel), "cudaFuncGetAttributes");
    check(cudaFuncGetAttributes(&attributes, barrier_kernel), "cudaFuncGetAttributes");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  // Sets the addresses to which device `self` writes. All devices have allocated their memory.
  void address(int32_t self) {
    Side& side = sides_[self];
    side.push.source = side.source.get();
    side.push.row_bytes = row_bytes_;
    side.push.num_peers = num_devices() - 1;
    for (int32_t i = 0; i < side.push.num_peers; ++i) {
      const int32_t peer = (self + 1 + i) % num_devices();
      int64_t first_row = 0;
      for (int32_t from = 0; from < self; ++from) first_row += from == peer ? 0 : rows_[from][peer];
      side.push.to[i] = sides_[peer].arrived.get() + first_row * row_bytes_;
      side.push.rows[i] = rows_[self][peer];
      side.push.max_rows = std::max(side.push.max_rows, side.push.rows[i]);
      side.push.total_rows += side.push.rows[i];
    }
    side.barrier.self = self;
    side.barrier.num_devices = num_devices();
    for (int32_t peer = 0; peer < num_devices(); ++peer) side.barrier.of[peer] = sides_[peer].signals.get();
  }

  void enqueue_push(const Side& side, const Variant& variant) const {
    if (variant.bulk) {
      bulk_kernel<<<variant.num_blocks, bulk_warps() * 32, bulk_warps() * row_bytes_, side.stream.get()>>>(
          side.push, &side.signals->state.failed);
    } else {
      store_kernel<<<variant.num_blocks, kStoreThreads, 0, side.stream.get()>>>(side.push);
    }
    check(cudaGetLastError(), "launching a push");
    barrier_kernel<<<1, 32, 0, side.stream.get()>>>(side.barrier);
    check(cudaGetLastError(), "launching a barrier");
  }

  void record(Side& side, const Variant& variant) const {
    check(cudaStreamBeginCapture(side.stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < kPushesPerGraph; ++i) enqueue_push(side, variant);
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(side.stream.get(), &captured), "cudaStreamEndCapture");
    const Graph graph(captured);
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
    side.graph.reset(executable);
    check(cudaGraphUpload(executable, side.stream.get()), "cudaGraphUpload");
    check(cudaStreamSynchronize(side.stream.get()), "cudaStreamSynchronize");
  }

  // Replays the graph twice, and returns the time of the second run. The barriers of the first run make the devices
  // begin the second run together.
  float replay_ms(int32_t self) const {
    const Side& side = sides_[self];
    cudaStream_t stream = side.stream.get();
    check(cudaGraphLaunch(side.graph.get(), stream), "cudaGraphLaunch");
    check(cudaEventRecord(side.before.get(), stream), "cudaEventRecord");
    check(cudaGraphLaunch(side.graph.get(), stream), "cudaGraphLaunch");
    check(cudaEventRecord(side.after.get(), stream), "cudaEventRecord");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    uint32_t failed = 0;
    check(cudaMemcpy(&failed, &side.signals->state.failed, sizeof(failed), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (failed)
      throw std::runtime_error("link_floor: CUDA device " + std::to_string(devices_[self]) + " waited in vain");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, side.before.get(), side.after.get()), "cudaEventElapsedTime");
    return ms;
  }

  double time_us(const Variant& variant) {
    on_each_device([&](int32_t self) { record(sides_[self], variant); });
    float best_ms = std::numeric_limits<float>::infinity();
    for (int i = 0; i < kReplays; ++i) {
      std::vector<float> ms(devices_.size());
      on_each_device([&](int32_t self) { ms[self] = replay_ms(self); });
      best_ms = std::min(best_ms, *std::max_element(ms.begin(), ms.end()));
    }
    return best_ms * 1e3 / kPushesPerGraph;
  }

  const std::vector<int32_t>& devices_;
  const std::vector<std::vector<int32_t>>& rows_;
  const int64_t row_bytes_;
  std::vector<Side> sides_;
};

void check_arguments(size_t num_devices, const std::vector<std::vector<int32_t>>& rows, int64_t row_bytes) {
  if (num_devices < 2 || num_devices > kMaxDevices) {
    throw std::invalid_argument("devices has " + std::to_string(num_devices) + " entries; it must have 2 to " +
                                std::to_string(kMaxDevices));
  }
  const bool is_square =
      rows.size() == num_devices &&
      std::all_of(rows.begin(), rows.end(), [&](const auto& of_device) { return of_device.size() == num_devices; });
  if (!is_square) throw std::invalid_argument("rows must have one row and one column per device");
  if (row_bytes <= 0 || row_bytes % 16 != 0) {
    throw std::invalid_argument("row_bytes is " + std::to_string(row_bytes) + "; it must be a multiple of 16");
  }
}

}  // namespace

double link_floor(const std::vector<int32_t>& devices, const std::vector<std::vector<int32_t>>& rows,
                  int64_t row_bytes) {
  check_arguments(devices.size(), rows, row_bytes);
  return Exchange(devices, rows, row_bytes).best_us();
}

}  // namespace jax_ep
