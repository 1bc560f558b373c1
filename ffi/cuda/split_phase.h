// Operations as split-phase calls: a start takes its turn on XLA's stream; all else, the body, runs on a stream beside
// that, from there on, and XLA's stream waits for it at the done.
//
// It is launched when the done is enqueued, which is soon: XLA enqueues far ahead. What it reads and writes is XLA's to
// use again, but for the done, which has all of it as operands: without one, whatever the reason, it must not run.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/cuda/call.h"
#include "ffi/cuda/start.h"

namespace jax_ep {

// The addresses of all that an operation reads and writes, and last that of its ticket.
using Buffers = std::vector<const void*>;

// The split-phase calls of one group on one device. XLA may call from any thread, in the order in which it enqueues.
class SplitPhaseCalls {
 public:
  struct Body {
    std::function<cudaError_t(cudaStream_t)> launch;
    int32_t num_blocks;
  };
  using LaunchStart = decltype(&jax_ep::launch_start);
  using LaunchHold = decltype(&jax_ep::launch_hold);
  // On the current device, which `peers` are of. All functions throw std::runtime_error if CUDA fails.
  SplitPhaseCalls(const Peers& peers, LaunchStart launch_start, LaunchHold launch_hold);
  // Behind all that has been launched.
  void close();

  // Takes the turn of `call`. What comes next on the stream is held until the body has begun, for a while.
  void start(Call call, Buffers buffers, Body body, cudaStream_t stream);
  // Launches the body, and has `stream` wait for it. Throws std::invalid_argument if no start that was not done has had
  // these buffers.
  void done(const Buffers& buffers, cudaStream_t stream);

 private:
  struct Event {
    cudaEvent_t event;
    Event();
    Event(const Event&) = delete;
    ~Event() { cudaEventDestroy(event); }  // what waits for it already does so still
  };
  struct Started {
    std::unique_ptr<Event> turn_taken;
    Buffers buffers;
    Body body;
  };

  void check_open() const;

  const Peers peers_;
  const LaunchStart launch_start_;
  const LaunchHold launch_hold_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  // By the address of the ticket, which an older start that was never done loses to the next one.
  std::map<const void*, Started> started_;
};

}  // namespace jax_ep
