#include "ffi/cuda/device_groups.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "ffi/cuda/sharing.h"

namespace jax_ep {
namespace {

struct List {
  HostMemory memory;  // a DeviceGroups
  bool is_reserved[DeviceGroups::kMaxGroups] = {};
};
struct Lists {
  std::mutex mutex;
  std::map<int32_t, List> of_devices;
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

DeviceGroupsEntry reserve_device_group(int32_t ordinal, uint32_t device_sms) {
  const std::lock_guard<std::mutex> lock(lists().mutex);
  auto found = lists().of_devices.find(ordinal);
  if (found == lists().of_devices.end()) {
    found = lists().of_devices.emplace(ordinal, List{HostMemory::allocate(sizeof(DeviceGroups))}).first;
  }
  List& list = found->second;
  const auto free = std::find(std::begin(list.is_reserved), std::end(list.is_reserved), false);
  if (free == std::end(list.is_reserved)) return {};
  *free = true;
  const auto index = static_cast<int32_t>(free - std::begin(list.is_reserved));
  auto* const groups = static_cast<DeviceGroups*>(list.memory.data());
  store(groups->device_sms, device_sms);
  store(groups->num_entries, std::max(groups->num_entries, static_cast<uint32_t>(index) + 1));
  return {static_cast<const DeviceGroups*>(list.memory.on_device(ordinal)), &groups->groups[index], index, ordinal};
}

void show_device_group(const DeviceGroupsEntry& entry, const DeviceGroup& group) {
  if (entry.group == nullptr) return;
  DeviceGroup hidden = group;
  hidden.is_open = 0;
  *entry.group = hidden;
  store(entry.group->is_open, 1u);  // last, release: kernels acquire this word before they read the others
}

void hide_device_group(const DeviceGroupsEntry& entry) {
  if (entry.group != nullptr) store(entry.group->is_open, 0u);
}

void free_device_group(const DeviceGroupsEntry& entry) {
  if (entry.group == nullptr) return;
  const std::lock_guard<std::mutex> lock(lists().mutex);
  lists().of_devices.at(entry.ordinal).is_reserved[entry.index] = false;
}

void note_device_call(const DeviceGroupsEntry& entry, cudaStream_t stream, int32_t num_blocks, bool is_in_graph) {
  if (entry.group == nullptr) return;
  DeviceGroup& group = *entry.group;
  store(group.most_blocks, std::max(group.most_blocks, static_cast<uint32_t>(num_blocks)));
  store(group.is_in_graph, group.is_in_graph | static_cast<uint32_t>(is_in_graph));
  store(group.stream, reinterpret_cast<unsigned long long>(stream));
  store(group.has_call, 1u);
}

}  // namespace jax_ep
