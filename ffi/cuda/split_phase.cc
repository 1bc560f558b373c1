#include "ffi/cuda/split_phase.h"

#include <stdexcept>
#include <utility>

#include "ffi/cuda/runtime.h"

namespace jax_ep {
SplitPhaseCalls::Event::Event() {
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

SplitPhaseCalls::SplitPhaseCalls(const Peers& peers, LaunchStart launch_start, LaunchHold launch_hold)
    : peers_(peers), launch_start_(launch_start), launch_hold_(launch_hold) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  // With the highest priority, the body's blocks begin before the remaining blocks of a computation that already runs.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
}

void SplitPhaseCalls::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ == nullptr) return;
  started_.clear();
  cudaStreamDestroy(stream_);
  stream_ = nullptr;
}

void SplitPhaseCalls::check_open() const {
  if (stream_ == nullptr)
    throw std::invalid_argument("its group is closed; make a new Group and trace the function again");
}

void SplitPhaseCalls::start(Call call, Buffers buffers, Body body, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  call.phase = Phase::kStart;
  check(launch_start_(peers_, call, stream), "the kernel was not launched");
  auto epoch_taken = std::make_unique<Event>();
  check(cudaEventRecord(epoch_taken->event, stream), "cudaEventRecord");
  // If there are other starts, their bodies may run first, so there is no hold. (After a start that is never done,
  // later starts have no hold.)
  started_.erase(buffers.back());
  if (started_.empty())
    check(launch_hold_(peers_, call.pending, body.num_blocks, stream), "the kernel was not launched");
  const void* const pending = buffers.back();
  started_.insert_or_assign(pending, Started{std::move(epoch_taken), std::move(buffers), std::move(body)});
}

void SplitPhaseCalls::done(const Buffers& buffers, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  const auto found = started_.find(buffers.back());
  if (found == started_.end() || found->second.buffers != buffers) {
    throw std::invalid_argument(
        "there is no start that it could end; start and done must be in one program, once each, and nothing between "
        "them (a jit boundary, the carry of a loop, a branch of cond) may copy what is pending");
  }
  const Started started = std::move(found->second);
  started_.erase(found);
  const Event ended;
  check(cudaStreamWaitEvent(stream_, started.epoch_taken->event), "cudaStreamWaitEvent");
  check(started.body.launch(stream_), "the kernel was not launched");
  check(cudaEventRecord(ended.event, stream_), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, ended.event), "cudaStreamWaitEvent");
}

}  // namespace jax_ep
