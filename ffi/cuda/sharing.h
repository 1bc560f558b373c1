// Memory that the processes of a host share: device memory, and host memory that devices write.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace jax_ep {

// How other processes map a device's memory.
enum class Sharing : int32_t {
  kNone,            // not at all
  kFileDescriptor,  // it lives as long as anybody maps it, so that a process may close its group or die at any time
  kIpc              // CUDA IPC, where there is no such descriptor: the owner frees it when nobody maps it any more
};

// Throws std::runtime_error: no room for `bytes` on the current device, and what the user can do.
[[noreturn]] void throw_full(int64_t bytes, int32_t ordinal, const std::string& reason);

// Whether these devices' memory can be shared by file descriptors, found by trying: a driver may say so in a sandbox
// that does not let it.
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

// What another process must know to map device memory: plain bytes. With kFileDescriptor, a descriptor goes beside it.
struct MemoryHandle {
  Sharing sharing;
  int64_t bytes;
  cudaIpcMemHandle_t ipc;
};
static_assert(std::is_trivially_copyable_v<MemoryHandle>);

// Memory of a device: this process's, or another's that is mapped here.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Throws std::runtime_error, with what the user can do if the device's memory is full.
  static DeviceMemory allocate(int64_t bytes, int32_t ordinal, Sharing sharing);
  // Maps another process's memory for the device `ordinal`.
  static DeviceMemory map(const MemoryHandle& handle, const FileDescriptor& descriptor, int32_t ordinal);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory() { free(); }

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Lets another device of this process read and write it.
  void let_in(int32_t ordinal) const;
  MemoryHandle handle() const;
  FileDescriptor descriptor() const;  // for kFileDescriptor
  void free();

 private:
  DeviceMemory(uint8_t* data, int64_t bytes, int32_t ordinal, Sharing sharing, bool is_own)
      : data_(data), bytes_(bytes), ordinal_(ordinal), sharing_(sharing), is_own_(is_own) {}
  static DeviceMemory map_physical(unsigned long long physical, int64_t bytes, int32_t ordinal, bool is_own);

  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  int32_t ordinal_ = 0;
  Sharing sharing_ = Sharing::kNone;
  bool is_own_ = true;
};

// A small part of a larger allocation of zeros that stays for the life of the process.
struct LastingMemory {
  const DeviceMemory* allocation;
  int64_t offset;

  uint8_t* data() const { return allocation->data() + offset; }
};
LastingMemory allocate_lasting(int64_t bytes, int32_t ordinal, Sharing sharing);

// Zeros in pinned host memory behind a file descriptor without a name, so that nothing stays behind.
class HostMemory {
 public:
  HostMemory() = default;
  static HostMemory allocate(int64_t bytes);
  // Maps another process's, to read.
  static HostMemory map(const FileDescriptor& descriptor, int64_t bytes);
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept;
  ~HostMemory();

  void* data() const { return data_; }
  void* on_device(int32_t ordinal) const;  // where that device sees it
  FileDescriptor descriptor() const;

 private:
  FileDescriptor descriptor_;  // of own memory
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace jax_ep
