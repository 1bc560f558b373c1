#include "ffi/cuda/halves.h"

#include <stdexcept>
#include <string>

namespace jax_ep {

Halves::Halves(const Peers& peers, LaunchStart launch_start) : peers_(peers), launch_start_(launch_start) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  // Its blocks need not wait until a computation that is running has no more blocks to begin.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  for (int32_t slot = 0; slot < peers.layout.num_slots; ++slot) {
    Place& place = places_.emplace_back();
    place.ticket = &peers.control->tickets[slot];
    check(cudaEventCreateWithFlags(&place.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

void Halves::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ == nullptr) return;
  for (const Place& place : places_) cudaEventDestroy(place.event);
  cudaStreamDestroy(stream_);
  stream_ = nullptr;
}

void Halves::expect_open() const {
  if (stream_ == nullptr)
    throw std::invalid_argument("its group is closed; make a new Group and trace the function again");
}

void Halves::start(Call call, const Reads& reads, cudaStream_t stream, const LaunchHalf& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  expect_open();
  Place* free = nullptr;
  for (Place& place : places_) {
    // An older start whose memory XLA uses again is never done: its done was left out, or its program has failed.
    if (place.pending == call.pending) place.pending = nullptr;
    if (place.pending == nullptr) free = &place;
  }
  if (free == nullptr) {
    throw std::invalid_argument(std::to_string(places_.size()) +
                                " operations of the group are under way that are started and not done, and it has room "
                                "for no more; do one of them before, in the program that starts it");
  }
  // The send of a start without a done may still look at its ticket.
  check(cudaStreamWaitEvent(stream, free->event), "cudaStreamWaitEvent");
  call.half = Half::kStart;
  call.ticket = free->ticket;
  check(launch_start_(peers_, call, stream), kNotLaunched);
  check(cudaEventRecord(free->event, stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream_, free->event), "cudaStreamWaitEvent");
  launch(Half::kSend, free->ticket, stream_);
  check(cudaEventRecord(free->event, stream_), "cudaEventRecord");
  free->pending = call.pending;
  free->reads = reads;
}

void Halves::done(const Call& call, const Reads& reads, cudaStream_t stream, const LaunchHalf& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  expect_open();
  const char* kept =
      "start and done must be in one program, once each, and nothing between them (a jit boundary, the "
      "carry of a loop, donation) may copy what is pending";
  for (Place& place : places_) {
    if (place.pending != call.pending) continue;
    check(cudaStreamWaitEvent(stream, place.event), "cudaStreamWaitEvent");  // or XLA may use again what it reads
    if (place.reads != reads)
      throw std::invalid_argument(std::string("an operand is not where its start had it; ") + kept);
    place.pending = nullptr;
    launch(Half::kDone, place.ticket, stream);
    return;
  }
  throw std::invalid_argument(std::string("there is no start that it could end; ") + kept);
}

}  // namespace jax_ep
