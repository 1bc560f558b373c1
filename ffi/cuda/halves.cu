#include <stdexcept>
#include <string>

#include "ffi/cuda/halves.h"
#include "ffi/cuda/launch.cuh"
#include "ffi/cuda/protocol.cuh"

namespace jax_ep {
namespace {

constexpr int32_t kWarp = 32;

// One warp: with more, a start would hold up what XLA has behind it.
__global__ void __launch_bounds__(kWarp)
    start_kernel(const __grid_constant__ Peers peers, const __grid_constant__ Call call) {
  __shared__ State state;
  const Operation op = {peers, call, call.ticket, state, kWarp};
  wait_for_dependencies();
  op.stamp(0);
  const uint32_t blocks_before = op.begin(false);
  for (int32_t block = threadIdx.x; block < kMaxSenders; block += kWarp) call.ticket->has_sent[block] = 0;
  if (threadIdx.x == 0) *call.pending = call.ticket->epoch = state.epoch;
  op.tell_former_finished();
  op.end(blocks_before, [] {});
}

}  // namespace

Halves::Halves(const Peers& peers) : peers_(peers) {
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
  start_kernel<<<1, kWarp, 0, stream>>>(peers_, call);
  check(cudaGetLastError(), kNotLaunched);
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

cudaError_t load_start() { return load_kernel(start_kernel, 0); }

}  // namespace jax_ep
