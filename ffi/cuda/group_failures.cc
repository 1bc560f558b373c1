// The failures of a group: the records that its host writes, and those that it reads.
#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <string>

#include "ffi/cuda/group.h"
#include "ffi/cuda/runtime.h"

namespace jax_ep {
namespace {

constexpr uint32_t kUnknownOp = kNumOpKinds;  // FailureRecord::op

// A stream of the current device for copies that wait for no kernel. A copy on the default stream could wait for the
// kernels that it shall end.
class CopyStream {
 public:
  CopyStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  CopyStream(const CopyStream&) = delete;
  ~CopyStream() { cudaStreamDestroy(stream_); }

  cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) const {
    return cudaMemcpyAsync(to, from, bytes, kind, stream_);
  }
  cudaError_t wait() const { return cudaStreamSynchronize(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

const char* op_name(const FailureRecord& failure) {
  return failure.op == kUnknownOp ? "an operation" : kOpNames[failure.op];
}

std::string summary(const FailureRecord& failure) {
  const std::string op = op_name(failure), rank = std::to_string(failure.rank), peer = std::to_string(failure.peer);
  switch (static_cast<FailureReason>(failure.reason)) {
    case FailureReason::kTimeout:
      return "PeerTimeoutError: " + op + ": rank " + rank + " gave up waiting for rank " + peer;
    case FailureReason::kOtherOp:
      return "Error: " + op + ": rank " + peer + " was in another call than rank " + rank;
    case FailureReason::kWrongRank:
      return "Error: " + op + ": the program runs rank " + std::to_string(failure.seen) +
             " on the device that group.mesh has as rank " + rank;
    case FailureReason::kSlotTaken:
      return "Error: " + op + ": rank " + rank +
             " has no room for another operation while older split-phase calls are in flight";
    case FailureReason::kElsewhere:
      return "PeerTimeoutError: " + op + ": rank " + peer + " gave up, and rank " + rank + " with it";
    case FailureReason::kOtherOrder:
      return "Error: " + op + ": ranks " + rank + " and " + peer +
             " run operations of this group and of another group in different order";
    case FailureReason::kOtherRun:
      return "Error: " + op + ": ranks " + rank + " and " + peer +
             " run programs with operations of this group in different order";
    case FailureReason::kOverlap:
      return "Error: " + op + ": rank " + rank + " runs another operation of the group at the same time";
  }
  return "Error: " + op;
}

bool Group::record(const Member& member, const FailureRecord& why) const {
  auto* const records = static_cast<FailureRecord*>(records_[0].memory.data());
  const size_t index = index_of(member);
  const std::lock_guard<std::mutex> lock(host_records_mutex_);
  FailureRecord& record = records[Records::of_host(index)];
  if (load_acquire_on_host(&records[records_[0].of_kernels(index)].valid) || record.valid) return false;
  FailureRecord written = why;
  written.valid = 0;
  record = written;
  store_release_on_host(&record.valid, 1);
  return true;
}

void Group::fail(const Member& member, const FailureRecord& why) const {
  if (!record(member, why)) return;
  const OnDevice device(member.ordinal);
  const CopyStream stream;
  const uint32_t failed = 1u + why.rank;
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    stream.copy(&member.table.control[rank]->failed, &failed, sizeof(failed), cudaMemcpyHostToDevice);
  }
  check(stream.wait(), "telling the ranks that their group has failed");
}

void Group::record_failures_elsewhere() const {
  if (!has_hidden_records_) return;
  for (const Member& member : members_) {
    const OnDevice device(member.ordinal);
    const auto rank = static_cast<uint32_t>(member.peers.rank);
    uint32_t failed = 0;
    const CopyStream stream;
    const cudaError_t status =
        stream.copy(&failed, &member.peers.control->failed, sizeof(failed), cudaMemcpyDeviceToHost);
    check(status == cudaSuccess ? stream.wait() : status, "reading whether the group has failed");
    if (failed == 0 || failed == kClosed || failed == 1u + rank) continue;
    FailureRecord why = {};
    why.reason = static_cast<uint32_t>(FailureReason::kElsewhere);
    why.op = kUnknownOp;
    why.rank = rank;
    why.peer = failed - 1;
    record(member, why);
  }
}

std::optional<FailureRecord> Group::failure() const {
  std::optional<FailureRecord> elsewhere;
  for (const Records& records : records_) {
    const auto* first = static_cast<const FailureRecord*>(records.memory.data());
    for (const FailureRecord* record = first; record != first + 2 * records.num_ranks; ++record) {
      if (!load_acquire_on_host(&record->valid)) continue;  // the record was written before `valid`
      if (static_cast<FailureReason>(record->reason) != FailureReason::kElsewhere) return *record;
      elsewhere = *record;
    }
  }
  return elsewhere;  // if no record says why
}

}  // namespace jax_ep
