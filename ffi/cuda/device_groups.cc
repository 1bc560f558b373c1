#include "ffi/cuda/device_groups.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "ffi/cuda/sharing.h"

namespace jax_ep {
namespace {

struct Lists {
  std::mutex mutex;
  std::map<int32_t, HostMemory> of_devices;
};

// Never destroyed: a kernel may still read a list while the process ends.
Lists& lists() {
  static Lists* lists = new Lists;
  return *lists;
}

template <typename Word>
void store(Word& word, Word value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

}  // namespace

DeviceGroupsEntry add_device_group(int32_t ordinal, int32_t device_sms, const DeviceGroup& group) {
  const std::lock_guard<std::mutex> lock(lists().mutex);
  auto found = lists().of_devices.find(ordinal);
  if (found == lists().of_devices.end()) {
    found = lists().of_devices.emplace(ordinal, HostMemory::allocate(sizeof(DeviceGroups))).first;
  }
  auto& list = *static_cast<DeviceGroups*>(found->second.data());
  store(list.device_sms, device_sms);
  DeviceGroup hidden = group;
  hidden.control = nullptr;
  const auto is_free = [](const DeviceGroup& entry) { return entry.control == nullptr; };
  DeviceGroup* const entry = std::find_if(std::begin(list.groups), std::end(list.groups), is_free);
  if (entry == std::end(list.groups)) return {};
  *entry = hidden;
  store(entry->control, group.control);  // last: from now on, kernels read the entry
  return {static_cast<const DeviceGroups*>(found->second.on_device(ordinal)), entry,
          static_cast<int32_t>(entry - list.groups)};
}

void remove_device_group(const DeviceGroupsEntry& entry) {
  const std::lock_guard<std::mutex> lock(lists().mutex);
  if (entry.group != nullptr) store<Control*>(entry.group->control, nullptr);
}

void note_device_call(const DeviceGroupsEntry& entry, cudaStream_t stream, int32_t num_sms, bool is_in_graph) {
  if (entry.group == nullptr) return;
  DeviceGroup& group = *entry.group;
  store(group.most_sms, std::max(group.most_sms, static_cast<uint32_t>(num_sms)));
  store(group.is_in_graph, group.is_in_graph | static_cast<uint32_t>(is_in_graph));
  store(group.stream, reinterpret_cast<unsigned long long>(stream));
}

}  // namespace jax_ep
