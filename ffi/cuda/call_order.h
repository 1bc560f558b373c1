// Finds devices of this process that run the operations of two groups in different order. An operation keeps its stream
// and its SMs until all ranks have run it, so such devices would wait for each other until the time-out.
//
// Handlers note each call before they launch it. This is plain C++: nothing here asks the device.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace jax_ep {

// One expert-parallel group of a mesh: a group, and the index of a list in GroupConfig::devices.
using LineId = std::pair<int64_t, int32_t>;

struct NotedCall {
  int32_t device;      // CUDA ordinal
  const void* stream;  // waits until the operation ends
  int32_t num_sms;     // for the operation
  int32_t device_sms;
  uint32_t op;       // OpKind
  bool is_in_graph;  // the call is captured: CUDA graphs launch it, and tell nobody
};

// A call that comes before an operation of another line on one device, and after that operation on another device.
struct OrderConflict {
  LineId other;
  uint32_t other_op;  // an operation of the other line
  int32_t other_device;
  uint64_t number;                              // of the call in its line, from 1
  uint64_t others_before, others_before_there;  // calls of the other line, on this device and on `other_device`
  bool is_one_stream;  // both lines have one stream on each of the two devices: fewer SMs would not help
};

class CallOrder {
 public:
  // A line with one device needs no check, and is left out. What other processes do is not seen here.
  void open(LineId id, const std::vector<int32_t>& devices);
  void close(int64_t group);

  // Held while a call is noted and launched: calls are noted in the order in which the device gets them.
  std::unique_lock<std::mutex> lock(int32_t device);
  // Gives the conflicts with other open lines. Two operations on different streams that fit on a device together are no
  // conflict. A line with a call in a CUDA graph is left out from then on.
  std::vector<OrderConflict> note(LineId id, const NotedCall& call);

 private:
  struct Device {
    uint64_t num_calls = 0;
    const void* stream = nullptr;  // of the newest call
    uint32_t op = 0;               // of the newest call
  };
  // How many calls of another line had come, as the first device that is in both lines made a call.
  struct Seen {
    int32_t device;
    uint64_t others_before;
  };
  // A call that some devices of the line have yet to make.
  struct Record {
    size_t num_devices = 0;  // that have made it
    std::map<LineId, Seen> seen;
  };
  struct Line {
    std::map<int32_t, Device> devices;
    int32_t most_sms = 0;  // of a call so far
    uint64_t num_complete = 0;
    std::deque<Record> records;  // of the calls behind the first `num_complete`
  };

  static bool share_stream(const Line& a, const Line& b, int32_t device);

  std::mutex mutex_;
  std::map<LineId, Line> lines_;
  std::map<int32_t, std::mutex> of_devices_;
};

// Of this process.
CallOrder& call_order();

}  // namespace jax_ep
