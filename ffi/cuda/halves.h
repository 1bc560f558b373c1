// Operations in halves: a start takes its turn on XLA's stream, its rows are sent on a stream beside that, and its done
// comes behind both. XLA believes that a start has ended when its turn is taken. So what a send reads must stay where
// it is, which holds where the done has the same operands: here that is checked, or else wrong rows might be sent.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <vector>

#include "ffi/cuda/call.h"
#include "ffi/cuda/runtime.h"
#include "ffi/cuda/start.h"

namespace jax_ep {

// The halves of one group on one device. XLA may call from any thread, in the order in which it enqueues.
class Halves {
 public:
  using LaunchStart = decltype(&jax_ep::launch_start);
  // On the current device, which `peers` are of. Throws std::runtime_error, as all functions do if CUDA fails.
  Halves(const Peers& peers, LaunchStart launch_start);
  // Behind all that has been launched.
  void close();

  // Launches args.half, whole operations included, on `stream`; a start also launches its send beside it. Throws
  // std::invalid_argument for a start if too many are under way, and for a done if args.pending is of no start, or what
  // that reads is not where it was.
  template <typename Args, typename Launch>
  void launch(Args args, cudaStream_t stream, Launch launch) {
    if (args.half == Half::kWhole) return check(launch(args, stream), kNotLaunched);
    const auto launch_half = [&](Half half, Ticket* ticket, cudaStream_t on) {
      args.half = half;
      args.ticket = ticket;
      check(launch(args, on), kNotLaunched);
    };
    if (args.half == Half::kStart) {
      start(args, args.reads(), stream, launch_half);
    } else {
      done(args, args.reads(), stream, launch_half);
    }
  }

 private:
  using LaunchHalf = std::function<void(Half, Ticket*, cudaStream_t)>;
  // A place for a start that is under way.
  struct Place {
    Ticket* ticket;
    cudaEvent_t event;              // the send has ended
    const void* pending = nullptr;  // of the start whose done has not been enqueued; null if the place is free
    Reads reads = {};
  };
  static constexpr const char* kNotLaunched = "the kernel was not launched";

  void start(Call call, const Reads& reads, cudaStream_t stream, const LaunchHalf& launch);
  void done(const Call& call, const Reads& reads, cudaStream_t stream, const LaunchHalf& launch);
  void expect_open() const;

  const Peers peers_;
  const LaunchStart launch_start_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  std::vector<Place> places_;
};

}  // namespace jax_ep
