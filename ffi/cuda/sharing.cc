#include "ffi/cuda/sharing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "ffi/cuda/runtime.h"
#include "ffi/layout.h"

namespace jax_ep {
namespace {

constexpr int64_t kGranularity = int64_t{2} << 20;  // of device memory that is shared

struct Driver {
#define JAX_EP_DRIVER_FUNCTION(name) decltype(&::name) name = driver_function<decltype(&::name)>(#name)
  JAX_EP_DRIVER_FUNCTION(cuGetErrorString);
  JAX_EP_DRIVER_FUNCTION(cuMemGetAllocationGranularity);
  JAX_EP_DRIVER_FUNCTION(cuMemCreate);
  JAX_EP_DRIVER_FUNCTION(cuMemRelease);
  JAX_EP_DRIVER_FUNCTION(cuMemAddressReserve);
  JAX_EP_DRIVER_FUNCTION(cuMemAddressFree);
  JAX_EP_DRIVER_FUNCTION(cuMemMap);
  JAX_EP_DRIVER_FUNCTION(cuMemUnmap);
  JAX_EP_DRIVER_FUNCTION(cuMemSetAccess);
  JAX_EP_DRIVER_FUNCTION(cuMemRetainAllocationHandle);
  JAX_EP_DRIVER_FUNCTION(cuMemExportToShareableHandle);
  JAX_EP_DRIVER_FUNCTION(cuMemImportFromShareableHandle);
#undef JAX_EP_DRIVER_FUNCTION
};
const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check_driver(CUresult status, const std::string& what) {
  if (status == CUDA_SUCCESS) return;
  const char* reason = nullptr;
  driver().cuGetErrorString(status, &reason);
  throw std::runtime_error(what + ": " + (reason ? reason : "unknown error of the CUDA driver"));
}

void check_errno(bool is_fine, const char* what) {
  if (!is_fine) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

std::string mebibytes(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

CUmemLocation location(int32_t ordinal) {
  CUmemLocation location = {};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = ordinal;
  return location;
}

// True if the driver's functions for virtual memory allocate and map the memory.
bool is_virtual(Sharing sharing) { return sharing == Sharing::kFileDescriptor || sharing == Sharing::kFabric; }

CUmemAllocationHandleType handle_type(Sharing sharing) {
  return sharing == Sharing::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp shareable(int32_t ordinal, Sharing sharing) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = handle_type(sharing);
  properties.location = location(ordinal);
  return properties;
}

void set_access(const void* data, int64_t bytes, int32_t ordinal, const std::string& what) {
  CUmemAccessDesc access = {};
  access.location = location(ordinal);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver().cuMemSetAccess(address(data), bytes, &access, 1), what);
}

}  // namespace

void throw_full(int64_t bytes, int32_t ordinal, const std::string& reason) {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  throw std::runtime_error(
      "the group needs " + std::to_string(bytes) + " bytes (" + mebibytes(bytes) + ") on CUDA device " +
      std::to_string(ordinal) + ", where " + mebibytes(free) + " are free (" + reason +
      "); XLA takes most of a device's memory when it starts: set " +
      "XLA_PYTHON_CLIENT_MEM_FRACTION lower, or make the group with fewer max_tokens_per_rank, or with a lower " +
      "max_arena_bytes");
}

Sharing best_sharing(const std::vector<int32_t>& ordinals) {
  try {
    for (int32_t ordinal : ordinals) {
      const DeviceMemory memory = DeviceMemory::allocate(1, ordinal, Sharing::kFileDescriptor);
      DeviceMemory::map(memory.handle(), memory.descriptor(), ordinal);
    }
  } catch (const std::runtime_error&) {
    return Sharing::kIpc;
  }
  return Sharing::kFileDescriptor;
}

// --- device memory ---------------------------------------------------------------------------------------------------

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) close(number_);
}

DeviceMemory DeviceMemory::allocate(int64_t bytes, int32_t ordinal, Sharing sharing) {
  const OnDevice device(ordinal);
  if (is_virtual(sharing)) {
    const CUmemAllocationProp properties = shareable(ordinal, sharing);
    size_t granularity = 0;
    check_driver(driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "cuMemGetAllocationGranularity");
    const int64_t rounded = align_up(bytes, granularity);
    CUmemGenericAllocationHandle physical = 0;
    const CUresult status = driver().cuMemCreate(&physical, rounded, &properties, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) throw_full(bytes, ordinal, "cuMemCreate");
    check_driver(status, "cuMemCreate");
    return map_physical(physical, rounded, ordinal, sharing, true);
  }
  // CUDA IPC gives others all of the granule that they are given a part of.
  if (sharing == Sharing::kIpc) bytes = align_up(bytes, kGranularity);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw_full(bytes, ordinal, "cudaMalloc");
  }
  check(status, "cudaMalloc");
  return {static_cast<uint8_t*>(data), bytes, ordinal, sharing, true};
}

// Takes the reference to `physical` over.
DeviceMemory DeviceMemory::map_physical(CUmemGenericAllocationHandle physical, int64_t bytes, int32_t ordinal,
                                        Sharing sharing, bool is_own) {
  CUdeviceptr data = 0;
  CUresult status = driver().cuMemAddressReserve(&data, bytes, 0, 0, 0);
  if (status == CUDA_SUCCESS) {
    status = driver().cuMemMap(data, bytes, 0, physical, 0);
    if (status != CUDA_SUCCESS) driver().cuMemAddressFree(data, bytes);
  }
  driver().cuMemRelease(physical);  // the mapping keeps it
  check_driver(status, "mapping " + std::to_string(bytes) + " bytes for CUDA device " + std::to_string(ordinal));
  DeviceMemory memory(reinterpret_cast<uint8_t*>(data), bytes, ordinal, sharing, is_own);
  memory.let_in(ordinal);
  return memory;
}

DeviceMemory DeviceMemory::map(const MemoryHandle& handle, const FileDescriptor& descriptor, int32_t ordinal) {
  const OnDevice device(ordinal);
  if (is_virtual(handle.sharing)) {
    CUmemFabricHandle fabric = handle.fabric;
    void* const shareable = handle.sharing == Sharing::kFabric
                                ? static_cast<void*>(&fabric)
                                : reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.number()));
    CUmemGenericAllocationHandle physical = 0;
    check_driver(driver().cuMemImportFromShareableHandle(&physical, shareable, handle_type(handle.sharing)),
                 "cuMemImportFromShareableHandle");
    return map_physical(physical, handle.bytes, ordinal, handle.sharing, false);
  }
  void* data = nullptr;
  check(cudaIpcOpenMemHandle(&data, handle.ipc, cudaIpcMemLazyEnablePeerAccess),
        "CUDA device " + std::to_string(ordinal) + " cannot map another process's memory by CUDA IPC");
  return {static_cast<uint8_t*>(data), handle.bytes, ordinal, Sharing::kIpc, false};
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ordinal_, other.ordinal_);
  std::swap(sharing_, other.sharing_);
  std::swap(is_own_, other.is_own_);
  return *this;
}

void DeviceMemory::let_in(int32_t ordinal) const {
  const std::string what = "CUDA device " + std::to_string(ordinal) + " cannot reach the memory of " +
                           (is_own_ ? "device " + std::to_string(ordinal_) : "another process's device") +
                           ", which expert parallelism over them needs";
  if (is_virtual(sharing_)) {
    set_access(data_, bytes_, ordinal, what);
  } else if (ordinal != ordinal_) {
    const OnDevice device(ordinal);
    const cudaError_t status = cudaDeviceEnablePeerAccess(ordinal_, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check(status, what);
    }
  }
}

MemoryHandle DeviceMemory::handle() const {
  MemoryHandle handle = {};
  handle.sharing = sharing_;
  handle.bytes = bytes_;
  if (sharing_ == Sharing::kIpc) check(cudaIpcGetMemHandle(&handle.ipc, data_), "cudaIpcGetMemHandle");
  if (sharing_ == Sharing::kFabric) export_to(&handle.fabric);
  return handle;
}

FileDescriptor DeviceMemory::descriptor() const {
  int number = -1;
  export_to(&number);
  return FileDescriptor(number);
}

void DeviceMemory::export_to(void* shareable) const {
  CUmemGenericAllocationHandle physical = 0;
  check_driver(driver().cuMemRetainAllocationHandle(&physical, data_), "cuMemRetainAllocationHandle");
  const CUresult status = driver().cuMemExportToShareableHandle(shareable, physical, handle_type(sharing_), 0);
  driver().cuMemRelease(physical);
  check_driver(status, "cuMemExportToShareableHandle");
}

void DeviceMemory::free() {
  if (data_ == nullptr) return;
  if (is_virtual(sharing_)) {
    driver().cuMemUnmap(address(data_), bytes_);
    driver().cuMemAddressFree(address(data_), bytes_);
  } else if (is_own_) {
    cudaFree(data_);
  } else {
    cudaIpcCloseMemHandle(data_);
  }
  data_ = nullptr;
}

LastingMemory allocate_lasting(int64_t bytes, int32_t ordinal, Sharing sharing) {
  struct Allocation {
    const DeviceMemory* memory = nullptr;
    int64_t used = 0;
  };
  static std::mutex mutex;
  static std::map<std::pair<int32_t, Sharing>, Allocation> allocations;
  const std::lock_guard<std::mutex> lock(mutex);
  Allocation& newest = allocations[{ordinal, sharing}];
  bytes = align_up(bytes, 256);
  if (newest.memory == nullptr || newest.used + bytes > newest.memory->bytes()) {
    auto memory = DeviceMemory::allocate(bytes > kGranularity ? bytes : kGranularity, ordinal, sharing);
    const OnDevice device(ordinal);
    check(cudaMemset(memory.data(), 0, memory.bytes()), "cudaMemset");
    newest = {new DeviceMemory(std::move(memory)), 0};
  }
  newest.used += bytes;
  return {newest.memory, newest.used - bytes};
}

// --- host memory -----------------------------------------------------------------------------------------------------

HostMemory HostMemory::allocate(int64_t bytes) {
  HostMemory memory;
  memory.descriptor_ = FileDescriptor(memfd_create("jax_ep", MFD_CLOEXEC));
  const int number = memory.descriptor_.number();
  check_errno(number >= 0 && ftruncate(number, bytes) == 0, "memfd_create");
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, number, 0);
  check_errno(data != MAP_FAILED, "mmap");
  const cudaError_t status = cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status != cudaSuccess) munmap(data, bytes);
  check(status, "cudaHostRegister");
  memory.data_ = data;
  memory.bytes_ = bytes;
  return memory;
}

HostMemory HostMemory::map(const FileDescriptor& descriptor, int64_t bytes) {
  HostMemory memory;
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor.number(), 0);
  check_errno(data != MAP_FAILED, "mmap");
  memory.data_ = data;
  memory.bytes_ = bytes;
  return memory;
}

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

HostMemory::~HostMemory() {
  if (data_ == nullptr) return;
  if (descriptor_.number() >= 0) cudaHostUnregister(data_);
  munmap(data_, bytes_);
}

void* HostMemory::on_device(int32_t ordinal) const {
  const OnDevice device(ordinal);
  void* data = nullptr;
  check(cudaHostGetDevicePointer(&data, data_, 0), "cudaHostGetDevicePointer");
  return data;
}

FileDescriptor HostMemory::descriptor() const {
  FileDescriptor copy(fcntl(descriptor_.number(), F_DUPFD_CLOEXEC, 0));
  check_errno(copy.number() >= 0, "fcntl");
  return copy;
}

}  // namespace jax_ep
