// The host side of split-phase calls. A start takes the epoch on XLA's stream. The rest of the operation, its body,
// runs on a stream of the group, which waits for the start. At the done, XLA's stream waits for the body.
//
// The handler of the done launches the body. The host enqueues far ahead, so this is usually soon after the start. The
// body reads and writes XLA's memory. XLA keeps this memory only because the done has all of it as operands. So the
// body must not run if there is no done.
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

// The addresses of all buffers that an operation reads or writes. The last one is the address of its
// PendingCall.
using Buffers = std::vector<const void*>;

// The split-phase calls of one group on one device. XLA may call the functions from any thread, in the order in which
// it enqueues. All functions throw std::runtime_error if CUDA fails.
class SplitPhaseCalls {
 public:
  struct Body {
    std::function<cudaError_t(cudaStream_t)> launch;
    int32_t num_blocks;
  };
  using LaunchStart = decltype(&jax_ep::launch_start);
  using LaunchHold = decltype(&jax_ep::launch_hold);
  // `peers` are those of the current device.
  SplitPhaseCalls(const Peers& peers, LaunchStart launch_start, LaunchHold launch_hold);
  // Destroys the stream, after the work that has been launched on it.
  void close();

  // Launches the start of `call`, and the hold: the next kernel on `stream` waits, for a limited time, until all blocks
  // of the body have entered.
  void start(Call call, Buffers buffers, Body body, cudaStream_t stream);
  // Launches the body of the start with these buffers, and makes `stream` wait for it. Throws std::invalid_argument if
  // there is no such start, or if it was done before.
  void done(const Buffers& buffers, cudaStream_t stream);

 private:
  struct Event {
    cudaEvent_t event;
    Event();
    Event(const Event&) = delete;
    ~Event() { cudaEventDestroy(event); }  // streams that wait for the event still do
  };
  struct Started {
    std::unique_ptr<Event> epoch_taken;
    Buffers buffers;
    Body body;
  };

  void check_open() const;

  const Peers peers_;
  const LaunchStart launch_start_;
  const LaunchHold launch_hold_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  // Indexed by the address of the PendingCall. A start replaces an older start with the same address, which was never
  // done.
  std::map<const void*, Started> started_;
};

}  // namespace jax_ep
