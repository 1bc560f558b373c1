// Operations in halves: a start takes its turn on XLA's stream, its rows are sent on a stream beside that, and its done
// comes behind both. XLA believes that a start has ended when its turn is taken. So what a send reads must stay where
// it is, which holds where the done has the same operands: here that is checked, or else wrong rows might be sent.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <functional>
#include <mutex>
#include <vector>

#include "ffi/cuda/call.h"

namespace jax_ep {

// The halves of one group on one device. XLA may call from any thread, in the order in which it enqueues.
class Halves {
 public:
  // Addresses of what a send reads.
  using Reads = std::array<const void*, 4>;
  // Launches a half with a ticket on a stream.
  using Launch = std::function<cudaError_t(Half, Ticket*, cudaStream_t)>;

  // On the current device, which `peers` are of. Throws std::runtime_error, as all functions do if CUDA fails.
  explicit Halves(const Peers& peers);
  // Behind all that has been launched.
  void close();

  // Takes the turn of `call` on `stream`, and has `launch` send beside it. Throws std::invalid_argument if too many are
  // under way.
  void start(Call call, const Reads& reads, cudaStream_t stream, const Launch& launch);
  // Has `launch` end, on `stream`, the start that gave call.pending. Throws std::invalid_argument if there is none, or
  // if what it reads is not where it was.
  void done(const Call& call, const Reads& reads, cudaStream_t stream, const Launch& launch);

 private:
  // A place for a start that is under way.
  struct Place {
    Ticket* ticket;
    cudaEvent_t event;              // the send has ended
    const void* pending = nullptr;  // of the start whose done has not been enqueued; null if the place is free
    Reads reads = {};
  };

  void expect_open() const;

  const Peers peers_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  std::vector<Place> places_;
};

// Loads the kernel on the current device: a kernel loaded while a peer waits can deadlock.
cudaError_t load_start();

}  // namespace jax_ep
