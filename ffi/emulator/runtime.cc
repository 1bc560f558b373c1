// The functions of CUDA's runtime and driver that ffi/cuda calls, except those for memory (memory.cc).
#include "ffi/emulator/runtime.h"

#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <thread>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/scheduler.h"

namespace emulator {
namespace {

using Clock = std::chrono::steady_clock;

// One lock for everything; whoever runs fibers holds it. Never destroyed: fibers may run while the process ends.
struct Host {
  std::recursive_mutex mutex;
  std::condition_variable_any changed;  // work has come, or is done
  std::atomic<int> waiting{0};          // threads of the host that want the lock
  bool runs_in_background = false;
  double patience_seconds = 20;
  Clock::time_point newest_work = Clock::now();
  std::map<int, cudaStream_t> streams;  // of devices, on which XLA's calls run
};
Host& host() {
  static auto* host = new Host;
  return *host;
}

void add_work(Stream& stream, Work work) {
  scheduler().add_work(stream, std::move(work));
  host().newest_work = Clock::now();
  host().changed.notify_all();
}

// The thread that runs all fibers.
void run_for_ever() {
  constexpr int kStepsWithLock = 2000;
  constexpr uint64_t kNsPerWait = 100'000;  // of virtual time: a tenth of what passes
  std::unique_lock lock(host().mutex);
  while (true) {
    bool can_go_on = true;
    for (int i = 0; i < kStepsWithLock && can_go_on && host().waiting == 0; ++i) can_go_on = scheduler().step();
    host().changed.notify_all();
    if (host().waiting > 0) {
      lock.unlock();
      while (host().waiting > 0) std::this_thread::yield();
      lock.lock();
    }
    if (can_go_on) continue;
    if (scheduler().is_idle()) {
      host().changed.wait(lock, [] { return !scheduler().is_idle(); });
    } else if (std::chrono::duration<double>(Clock::now() - host().newest_work).count() > host().patience_seconds ||
               scheduler().has_late_launch()) {
      scheduler().skip_time();
    } else {  // gives the host time to launch more work; time advances slowly, so that short waits end
      host().changed.wait_for(lock, std::chrono::milliseconds(1));
      scheduler().advance_time(kNsPerWait);
    }
  }
}

// Runs fibers, or waits for the thread that does, until `is_done` holds.
template <typename Predicate>
void run_until(Predicate is_done) {
  Lock lock;
  if (host().runs_in_background) {
    host().changed.wait(lock.get(), is_done);
    return;
  }
  while (!is_done()) {
    if (!scheduler().step()) scheduler().skip_time();
  }
}

thread_local int ordinal_here = 0;
thread_local cudaError_t newest_error = cudaSuccess;

Stream& stream_or_default(cudaStream_t stream) { return stream ? *stream : *stream_of_device(ordinal_here); }

}  // namespace

cudaError_t failed(cudaError_t status) { return newest_error = status; }

Lock::Lock() {
  ++host().waiting;
  lock_ = std::unique_lock(host().mutex);
  --host().waiting;
}

void set_num_sms(int num_sms) {
  const Lock lock;
  scheduler().set_num_sms(num_sms);
}

static DeviceReport device_report;

void set_device_report(const DeviceReport& report) {
  const Lock lock;
  device_report = report;
}

void set_patience(double patience_seconds) {
  const Lock lock;
  host().patience_seconds = patience_seconds;
}

void set_adversary(uint64_t seed, const std::string& settings) {
  const Lock lock;
  adversary = adversary_of(seed, settings);
}

void reset_scheduler() {
  const Lock lock;
  scheduler().reset();
}

void run_in_background() {
  const Lock lock;
  if (host().runs_in_background) return;
  host().runs_in_background = true;
  std::thread(run_for_ever).detach();
}

void run_for(uint64_t ns) {
  const Lock lock;
  for (const uint64_t end = scheduler().now_ns() + ns; scheduler().now_ns() < end;) {
    constexpr uint64_t kStepNs = 20'000'000;
    if (!scheduler().step()) scheduler().advance_time(std::min(kStepNs, end - scheduler().now_ns()));
  }
}

void acquire_on_host(const void* word) {
  const Lock lock;
  acquire(word);
}

cudaStream_t stream_of_device(int ordinal) {
  const Lock lock;
  cudaStream_t& stream = host().streams[ordinal];
  if (stream == nullptr) stream = scheduler().add_stream(ordinal);
  return stream;
}

void when_done(cudaStream_t stream, std::function<void()> then) {
  const Lock lock;
  Work work;
  // XLA goes on in the thread that tells it, and may wait for another device there.
  work.call = [then = std::move(then)] {
    constexpr uint32_t kMicroseconds = 30'000;
    const std::chrono::microseconds delay(adversary.delays_launches ? adversary.random.below(kMicroseconds) : 0);
    std::thread([=] {
      std::this_thread::sleep_for(delay);
      then();
    }).detach();
  };
  add_work(*stream, std::move(work));
}

// Kernel -> its limit of dynamic shared memory, as cudaFuncSetAttribute has set it. A kernel that is not in the map has
// CUDA's default.
std::map<const void*, size_t> shared_limits;
constexpr size_t kDefaultSharedLimit = size_t{48} << 10;

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> run) {
  const Lock lock;
  if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > 1024) {
    return failed(cudaErrorInvalidConfiguration);
  }
  const auto limit = shared_limits.find(kernel);
  if (config.dynamicSmemBytes > (limit == shared_limits.end() ? kDefaultSharedLimit : limit->second)) {
    return failed(cudaErrorInvalidValue);
  }
  Work work;
  work.launch = std::make_unique<Launch>();
  Launch& made = *work.launch;
  made.num_blocks = config.gridDim.x;
  made.block_threads = config.blockDim.x;
  made.shared_bytes = config.dynamicSmemBytes;
  made.kernel = std::move(run);
  for (uint32_t i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) made.cluster = config.attrs[i].val.clusterDim.x;
  }
  add_work(stream_or_default(config.stream), std::move(work));
  return cudaSuccess;
}

}  // namespace emulator

using namespace emulator;

// --- errors and devices --------------------------------------------------------------------------------------------

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorPeerAccessUnsupported:
      return "peer access is not supported between these two devices";
    case cudaErrorSymbolNotFound:
      return "named symbol not found";
    default:
      return "an error of the emulated CUDA runtime";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(newest_error, cudaSuccess); }

// XLA:CPU numbers the devices of process p from 2048 p on.
constexpr int kMaxOrdinal = 1 << 20;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 256;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = ordinal_here;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxOrdinal) return failed(cudaErrorInvalidDevice);
  ordinal_here = ordinal;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const int ordinal = ordinal_here;
  run_until([=] { return scheduler().is_idle(ordinal); });
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  *properties = {};
  std::strcpy(properties->name, "emulated");
  const int32_t process = getpid();
  std::memcpy(properties->uuid.bytes, &process, sizeof(process));
  std::memcpy(properties->uuid.bytes + sizeof(process), &ordinal, sizeof(ordinal));
  const Lock lock;
  properties->major = device_report.major;
  properties->sharedMemPerBlockOptin = device_report.shared_bytes;
  properties->multiProcessorCount = scheduler().device(ordinal)->num_sms;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  const Lock lock;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = scheduler().device(ordinal)->num_sms;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = device_report.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(device_report.shared_bytes);
      return cudaSuccess;
  }
  return failed(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  const Lock lock;
  *can = device_report.can_access_peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int, int) {
  if (attribute != cudaDevP2PAttrNativeAtomicSupported) return failed(cudaErrorInvalidValue);
  const Lock lock;
  *value = device_report.has_native_atomics;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

// --- streams and events --------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const Lock lock;
  *stream = scheduler().add_stream(ordinal_here);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock;
  stream->is_closed = true;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Stream& of = stream_or_default(stream);
  run_until([&] { return of.work.empty(); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock;
  if (!event->recorded) return cudaSuccess;
  Work work;
  work.waits_for = event->recorded;
  add_work(stream_or_default(stream), std::move(work));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const Lock lock;
  Work work;
  work.call = [=] { std::memcpy(to, from, bytes); };
  add_work(stream_or_default(stream), std::move(work));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock;
  Work work;
  work.call = [=] { std::memset(memory, value, bytes); };
  add_work(stream_or_default(stream), std::move(work));
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock;
  event->recorded = std::make_shared<bool>(false);
  Work work;
  work.sets = event->recorded;
  add_work(stream_or_default(stream), std::move(work));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

// --- kernels -------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > static_cast<int>(kSharedBytes)) return failed(cudaErrorInvalidValue);
  const Lock lock;
  shared_limits[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

// --- the driver ----------------------------------------------------------------------------------------------------

CUresult cuGetErrorString(CUresult status, const char** text) {
  *text = status == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the emulated CUDA driver";
  return CUDA_SUCCESS;
}

// A context is the device's ordinal plus 1, because null means no context.
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(ordinal_here) + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) ordinal_here = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string, void*> functions = {
#define JAX_EP_DRIVER_FUNCTION(name) {#name, reinterpret_cast<void*>(&name)}
      JAX_EP_DRIVER_FUNCTION(cuGetErrorString),
      JAX_EP_DRIVER_FUNCTION(cuCtxGetCurrent),
      JAX_EP_DRIVER_FUNCTION(cuCtxSetCurrent),
      JAX_EP_DRIVER_FUNCTION(cuMemGetAllocationGranularity),
      JAX_EP_DRIVER_FUNCTION(cuMemCreate),
      JAX_EP_DRIVER_FUNCTION(cuMemRelease),
      JAX_EP_DRIVER_FUNCTION(cuMemAddressReserve),
      JAX_EP_DRIVER_FUNCTION(cuMemAddressFree),
      JAX_EP_DRIVER_FUNCTION(cuMemMap),
      JAX_EP_DRIVER_FUNCTION(cuMemUnmap),
      JAX_EP_DRIVER_FUNCTION(cuMemSetAccess),
      JAX_EP_DRIVER_FUNCTION(cuMemRetainAllocationHandle),
      JAX_EP_DRIVER_FUNCTION(cuMemExportToShareableHandle),
      JAX_EP_DRIVER_FUNCTION(cuMemImportFromShareableHandle),
#undef JAX_EP_DRIVER_FUNCTION
  };
  const auto entry = functions.find(name);
  *found = entry == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = entry == functions.end() ? nullptr : entry->second;
  return cudaSuccess;
}
