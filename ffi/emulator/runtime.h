// The host's side of the emulated GPUs: devices, streams, events, and who runs the fibers.
#pragma once

#include <functional>
#include <mutex>

#include "ffi/emulator/cuda_api.h"

namespace emulator {

// Locks the emulator. While a host thread holds the lock, no fiber runs.
class Lock {
 public:
  Lock();
  std::unique_lock<std::recursive_mutex>& get() { return lock_; }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Notes the error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t status);

// Sets the number of SMs of new devices, and of devices that run no kernel now. Few SMs keep launches small.
void set_num_sms(int num_sms);

inline constexpr size_t kSharedBytes = size_t{227} << 10;  // of a block, and of an SM

// What CUDA reports of all emulated devices and of the links between them.
struct DeviceReport {
  int major = 9;  // of the compute capability
  size_t shared_bytes = kSharedBytes;
  bool can_access_peer = true, has_native_atomics = true;
};
void set_device_report(const DeviceReport& report);

// Replaces the adversary. Derives its settings from `seed`, and overrides them by `settings` (adversary.h).
void set_adversary(uint64_t seed, const std::string& settings = "");

// Resets virtual time and the scheduler's counters to their values in a new process. After this call, call
// set_num_sms() and set_adversary(). A seed then gives the same run as in a new process. The function stops if a stream
// has work. The caller must destroy all Groups first; the function does not check this.
void reset_scheduler();

// Starts a thread that runs all fibers. Programs under XLA need this thread. Without it, fibers run only inside the
// host's waits, such as cudaDeviceSynchronize(), and a seed always gives the same run. With it, time jumps in two cases
// when all fibers wait: to the end of a delay that the adversary has chosen, or after the host has launched nothing for
// `patience_seconds`.
void run_in_background();
// Runs fibers, where the host does, until so much virtual time has passed.
void run_for(uint64_t ns);
void set_patience(double patience_seconds);

// A stream of the device on which XLA's calls run one after the other.
cudaStream_t stream_of_device(int ordinal);
// Calls `then` on a thread of its own when all that is in the stream now has run.
void when_done(cudaStream_t stream, std::function<void()> then);

}  // namespace emulator
