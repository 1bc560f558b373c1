// Memory that processes share: device memory, and pinned host memory that devices write.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace jax_ep {

// How other processes map a device's memory.
enum class Sharing : int32_t {
  kNone,            // they do not
  kFileDescriptor,  // the memory lives as long as any process maps it; so a process may close its group or die at any
                    // time
  kIpc,             // CUDA IPC, if there are no descriptors
  kFabric           // fabric handles: processes of other hosts of the NVLink domain can map the memory, too
};
constexpr const char* kSharingNames[] = {"none", "descriptor", "ipc", "fabric"};  // by Sharing; Python's names

// True if memory stays until no process maps it. Otherwise, the owner must free it after all others have unmapped it,
// and it may end with the owner's process. CUDA's documentation does not say how long kFabric memory lives if the owner
// is on another host.
constexpr bool outlives_owner(Sharing sharing) { return sharing != Sharing::kIpc && sharing != Sharing::kFabric; }

// Throws std::runtime_error with a message that the device has no room for `bytes`, and what the user can do.
[[noreturn]] void throw_full(int64_t bytes, int32_t ordinal, const std::string& reason);

// The best way to share the memory of these devices within a host: kFileDescriptor if it works, otherwise kIpc. This
// function tries file descriptors, because in some sandboxes the driver reports that it supports them, but they do not
// work.
Sharing best_sharing(const std::vector<int32_t>& ordinals);

class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();

  int number() const { return number_; }

 private:
  int number_;
};

// What another process must know to map device memory. It is sent as bytes. With kFileDescriptor, the process also
// needs the descriptor.
struct MemoryHandle {
  Sharing sharing;
  int64_t bytes;
  cudaIpcMemHandle_t ipc;    // for kIpc
  CUmemFabricHandle fabric;  // for kFabric
};
static_assert(std::is_trivially_copyable_v<MemoryHandle>);

// Device memory that this process owns, or that another process owns and this process maps.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Throws std::runtime_error. If the device's memory is full, the message says what the user can do.
  static DeviceMemory allocate(int64_t bytes, int32_t ordinal, Sharing sharing);
  // Maps another process's memory for the device `ordinal`.
  static DeviceMemory map(const MemoryHandle& handle, const FileDescriptor& descriptor, int32_t ordinal);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory() { free(); }

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Lets another device of this process read and write the memory.
  void let_in(int32_t ordinal) const;
  MemoryHandle handle() const;
  FileDescriptor descriptor() const;  // for kFileDescriptor
  void free();

 private:
  DeviceMemory(uint8_t* data, int64_t bytes, int32_t ordinal, Sharing sharing, bool is_own)
      : data_(data), bytes_(bytes), ordinal_(ordinal), sharing_(sharing), is_own_(is_own) {}
  static DeviceMemory map_physical(CUmemGenericAllocationHandle physical, int64_t bytes, int32_t ordinal,
                                   Sharing sharing, bool is_own);
  void export_to(void* shareable) const;  // an int for kFileDescriptor, a CUmemFabricHandle for kFabric

  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  int32_t ordinal_ = 0;
  Sharing sharing_ = Sharing::kNone;
  bool is_own_ = true;
};

// A small part of a larger allocation of zeros. The allocation stays until the process ends.
struct LastingMemory {
  const DeviceMemory* allocation;
  int64_t offset;

  uint8_t* data() const { return allocation->data() + offset; }
};
LastingMemory allocate_lasting(int64_t bytes, int32_t ordinal, Sharing sharing);

// Zeros in pinned host memory behind an anonymous file descriptor, so that no file remains.
class HostMemory {
 public:
  HostMemory() = default;
  static HostMemory allocate(int64_t bytes);
  // Maps the memory of another process, read-only.
  static HostMemory map(const FileDescriptor& descriptor, int64_t bytes);
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept;
  ~HostMemory();

  void* data() const { return data_; }
  void* on_device(int32_t ordinal) const;  // the address for that device
  FileDescriptor descriptor() const;

 private:
  FileDescriptor descriptor_;  // only of memory that this process owns
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace jax_ep
