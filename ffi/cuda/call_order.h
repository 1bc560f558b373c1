// Finds devices of this process that run operations in different order. An operation keeps its stream and its SMs until
// all ranks have run it. So devices that run the operations of two groups in different order would wait for each other
// until kernels find it (other_groups.cuh), or until the time-out. Devices that run two programs in different order
// could take one program's rows for the other's.
//
// Handlers note each call before they launch it. This file is plain C++ and does not use the device.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace jax_ep {

// One EP group of a mesh: the id of a Group, and the index of a list in GroupConfig::devices.
using EpGroupId = std::pair<int64_t, int32_t>;

struct NotedCall {
  int32_t device;      // CUDA ordinal
  const void* stream;  // waits until the operation ends
  int32_t num_sms;     // for the operation
  int32_t device_sms;
  uint32_t op;       // OpKind
  bool is_in_graph;  // the call is captured: a CUDA graph launches it without a handler
  int64_t run_id;    // CallStream::run_id
};

// A call that comes before an operation of another EP group on one device, and after that operation on another device.
struct OrderConflict {
  EpGroupId other;
  uint32_t other_op;  // an operation of the other EP group
  int32_t other_device;
  uint64_t number;                              // of the call in its EP group, from 1
  uint64_t others_before, others_before_there;  // calls of the other EP group, on this device and on `other_device`
  bool is_one_stream;  // both EP groups have one stream on each of the two devices: fewer SMs would not help
};

// Call `number` of the EP group belongs to one run of a program on this device, and to another run on other_device.
// Calls with the same number must be one operation.
struct RunConflict {
  int32_t other_device;
  uint64_t number;  // of the call in its EP group, from 1
};

struct Conflicts {
  std::vector<OrderConflict> orders;
  std::optional<RunConflict> run;
};

class CallOrder {
 public:
  // Ignores an EP group with one device, which needs no check. Calls of other processes are not seen.
  void open(EpGroupId id, const std::vector<int32_t>& devices);
  void close(int64_t group);

  // The caller holds the lock while it notes and launches a call. So calls are noted in the order in which the device
  // gets them.
  std::unique_lock<std::mutex> lock(int32_t device);
  // Returns the conflict with another run of a program, if any, and the conflicts with other open EP groups. Two
  // operations on different streams that fit on a device together are no conflict. An EP group with a call in a CUDA
  // graph is left out from then on.
  Conflicts note(EpGroupId id, const NotedCall& call);

 private:
  struct Device {
    uint64_t num_calls = 0;
    const void* stream = nullptr;  // of the newest call
    uint32_t op = 0;               // of the newest call
  };
  // The first device in both EP groups that made a call, and the calls of the other EP group on it before that call.
  struct Seen {
    int32_t device;
    uint64_t others_before;
  };
  // A call that some devices of the EP group have not made yet.
  struct Record {
    size_t num_devices = 0;    // the number of devices that have made the call
    int32_t first_device = 0;  // the first device that made the call
    int64_t run_id = 0;        // the run of the call on first_device
    std::map<EpGroupId, Seen> seen;
  };
  struct EpGroup {
    std::map<int32_t, Device> devices;
    int32_t most_sms = 0;  // of all calls so far
    uint64_t num_complete = 0;
    std::deque<Record> records;  // of the calls after the first `num_complete`
  };

  static bool share_stream(const EpGroup& a, const EpGroup& b, int32_t device);

  std::mutex mutex_;
  std::map<EpGroupId, EpGroup> ep_groups_;
  std::map<int32_t, std::mutex> of_devices_;
};

// The registry of this process.
CallOrder& call_order();

}  // namespace jax_ep
