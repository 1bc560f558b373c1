// The open groups of each device of this process. A kernel that waits for long looks at the other groups of its device
// (other_groups.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arena.h"

namespace jax_ep {

// A group of a device, in pinned host memory.
struct DeviceGroup {
  Control* control;  // of the group's rank on this device
  const PeerTable* table;
  int32_t rank, num_ranks;
  uint32_t id;           // 24 bits, random, and the same on all ranks of the EP group. Each opening has a new id.
  uint32_t is_open = 0;  // 1 while kernels may read the entry

  // Of the calls so far.
  uint32_t has_call = 0;          // 1 after the first call
  uint32_t most_blocks = 0;       // of a launch; each counts as one SM
  uint32_t is_in_graph = 0;       // 1 if a call was captured in a CUDA graph: `stream` says nothing about its replays
  unsigned long long stream = 0;  // of the newest call
};

// The open groups of one device.
struct DeviceGroups {
  static constexpr int32_t kMaxGroups = 64;  // kernels do not look at more

  uint32_t device_sms;
  uint32_t num_entries;  // entries from this index on have never been used
  DeviceGroup groups[kMaxGroups];
};

// Where an open group is in the list of its device.
struct DeviceGroupsEntry {
  const DeviceGroups* list = nullptr;  // the device's address
  DeviceGroup* group = nullptr;        // the host's address
  int32_t index = 0, ordinal = 0;
};

// Reserves an entry in the list of the device. If the list is full, the result has null pointers.
DeviceGroupsEntry reserve_device_group(int32_t ordinal, uint32_t device_sms);
// Shows the group to kernels, which use its table from now on.
void show_device_group(const DeviceGroupsEntry& entry, const DeviceGroup& group);
// Hides the group from kernels. Those that run may still use its table.
void hide_device_group(const DeviceGroupsEntry& entry);
// Frees a hidden entry, once no kernel uses it.
void free_device_group(const DeviceGroupsEntry& entry);
// Notes a call of the group, before it is launched.
void note_device_call(const DeviceGroupsEntry& entry, cudaStream_t stream, int32_t num_blocks, bool is_in_graph);

}  // namespace jax_ep
