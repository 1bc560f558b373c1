#include "ffi/cuda/call_order.h"

#include <algorithm>

namespace jax_ep {

void CallOrder::open(EpGroupId id, const std::vector<int32_t>& devices) {
  if (devices.size() < 2) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  EpGroup& ep_group = ep_groups_[id];
  for (int32_t device : devices) ep_group.devices[device] = {};
}

void CallOrder::close(int64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ep_groups_.erase(ep_groups_.lower_bound({group, INT32_MIN}), ep_groups_.upper_bound({group, INT32_MAX}));
}

std::unique_lock<std::mutex> CallOrder::lock(int32_t device) {
  std::mutex* of_device = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    of_device = &of_devices_[device];
  }
  return std::unique_lock<std::mutex>(*of_device);
}

// An EP group without a call on the device yet is expected on the stream of the other EP group: XLA has one for all
// programs.
bool CallOrder::share_stream(const EpGroup& a, const EpGroup& b, int32_t device) {
  const Device &of_a = a.devices.at(device), &of_b = b.devices.at(device);
  return of_a.num_calls == 0 || of_b.num_calls == 0 || of_a.stream == of_b.stream;
}

Conflicts CallOrder::note(EpGroupId id, const NotedCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ep_groups_.find(id);
  if (found == ep_groups_.end()) return {};
  // Graphs are replayed without a call, on one device perhaps more often than on another: counts would be wrong.
  if (call.is_in_graph) {
    ep_groups_.erase(found);
    return {};
  }
  EpGroup& ep_group = found->second;
  Device& here = ep_group.devices.at(call.device);
  const uint64_t number = ++here.num_calls;
  here.stream = call.stream;
  here.op = call.op;
  ep_group.most_sms = std::max(ep_group.most_sms, call.num_sms);
  if (number > ep_group.num_complete + ep_group.records.size()) ep_group.records.emplace_back();
  Record& record = ep_group.records[number - ep_group.num_complete - 1];

  Conflicts conflicts;
  if (record.num_devices == 0) record.first_device = call.device, record.run_id = call.run_id;
  if (record.run_id != call.run_id) conflicts.run = RunConflict{record.first_device, number};
  for (const auto& [other_id, other] : ep_groups_) {
    const auto other_here = other.devices.find(call.device);
    if (other_id == id || other_here == other.devices.end()) continue;
    const uint64_t others_before = other_here->second.num_calls;
    // Either a device that made this call before was behind other calls; or a device that has yet to make it is.
    Seen there = record.seen.try_emplace(other_id, Seen{call.device, others_before}).first->second;
    for (const auto& [device, of_ep_group] : ep_group.devices) {
      const auto of_other = other.devices.find(device);
      if (of_ep_group.num_calls >= number || of_other == other.devices.end()) continue;
      if (of_other->second.num_calls > others_before) there = {device, of_other->second.num_calls};
    }
    if (there.others_before == others_before) continue;
    const bool is_one_stream =
        share_stream(ep_group, other, call.device) && share_stream(ep_group, other, there.device);
    if (!is_one_stream && ep_group.most_sms + other.most_sms <= call.device_sms) continue;
    const int32_t ahead = there.others_before > others_before ? there.device : call.device;
    conflicts.orders.push_back({other_id, other.devices.at(ahead).op, there.device, number, others_before,
                                there.others_before, is_one_stream});
  }

  // Calls become complete in their order, as each device makes them in order.
  ++record.num_devices;
  while (!ep_group.records.empty() && ep_group.records.front().num_devices == ep_group.devices.size()) {
    ep_group.records.pop_front();
    ++ep_group.num_complete;
  }
  return conflicts;
}

CallOrder& call_order() {
  static CallOrder* order = new CallOrder;  // never destroyed: a program may still run while the process ends
  return *order;
}

}  // namespace jax_ep
