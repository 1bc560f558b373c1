// The open groups of each device of this process. A kernel that waits for long looks at the other groups of its device
// (other_groups.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

// A group of a device, in pinned host memory. The host writes all words, with atomic stores.
struct DeviceGroup {
  Control* control;  // of the group's rank on this device; null: the entry is free
  const PeerTable* table;
  int32_t rank, num_ranks;
  uint32_t id;  // the same on all ranks of the EP group, in all processes

  // Of the calls so far.
  uint32_t most_sms;
  uint32_t is_in_graph;       // 1 if a call was captured in a CUDA graph, which may run it on another stream
  unsigned long long stream;  // of the newest call; 0 before the first call
};

// The open groups of one device.
struct DeviceGroups {
  static constexpr int32_t kMost = 64;  // kernels look at no more groups

  int32_t device_sms;
  DeviceGroup groups[kMost];
};

// Where an open group is in the list of its device.
struct DeviceGroupsEntry {
  const DeviceGroups* list = nullptr;  // the device's address
  DeviceGroup* group = nullptr;        // the host's address
  int32_t index = 0;
};

// Adds a group to the list of the device. If the list is full, the entry has no pointers.
DeviceGroupsEntry add_device_group(int32_t ordinal, int32_t device_sms, const DeviceGroup& group);
void remove_device_group(const DeviceGroupsEntry& entry);
// Notes a call of the group, before it is launched.
void note_device_call(const DeviceGroupsEntry& entry, cudaStream_t stream, int32_t num_sms, bool is_in_graph);

}  // namespace jax_ep
