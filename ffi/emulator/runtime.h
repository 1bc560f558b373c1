// The host's side of the emulated GPUs: devices, streams, events, and who runs the fibers.
#pragma once

#include <functional>
#include <mutex>

#include "ffi/emulator/cuda_api.h"

namespace emulator {

// Keeps fibers from running while a thread of the host changes what is theirs.
class Lock {
 public:
  Lock();
  std::unique_lock<std::recursive_mutex>& get() { return lock_; }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Notes the error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t status);

// How many SMs each device has, if it runs no kernel, and those that are made from here on: few, so that plans are
// small.
void set_num_sms(int num_sms);

// What may go wrong from here on; adversary.h says what a seed decides.
void set_adversary(uint64_t seed, const std::string& settings = "");

// Fibers run when the host waits (cudaDeviceSynchronize and the like): the same seed gives the same run. Or, after this
// call, on a thread of their own, as a program of XLA's needs it. Virtual time then advances past a wait only when all
// fibers have waited, and nothing has been launched, for `patience_seconds`.
void run_in_background();
// Runs fibers, where the host does, until so much virtual time has passed.
void run_for(uint64_t ns);
void set_patience(double patience_seconds);

// A stream of the device on which XLA's calls run one after the other.
cudaStream_t stream_of_device(int ordinal);
// Calls `then` on a thread of its own when all that is in the stream now has run.
void when_done(cudaStream_t stream, std::function<void()> then);

}  // namespace emulator
