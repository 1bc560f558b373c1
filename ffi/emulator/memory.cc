// The functions of CUDA's runtime and driver for memory. All memory is the host's, and all devices reach it.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/runtime.h"

using namespace emulator;

namespace {

constexpr size_t kMemoryBytes = size_t{64} << 30;  // of a device
constexpr size_t kGranuleBytes = size_t{2} << 20;  // Allocations of whole granules are files, which CUDA IPC shares.

// cudaMalloc fills allocations below this size with one random byte, because CUDA does not initialize memory. It does
// not fill larger ones, which contain zeros: the fill would make the host allocate every page.
constexpr size_t kFillBelowBytes = size_t{1} << 20;
constexpr int kNoFile = -1;

struct Mapping {
  int file;  // kNoFile: anonymous memory, or memory of another process
  size_t bytes;
};
// By address.
std::map<void*, Mapping>& mappings() {
  static auto* mappings = new std::map<void*, Mapping>;
  return *mappings;
}

int create_file(size_t bytes) {
  const int file = memfd_create("jax_ep_emulated", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  close(file);
  return -1;
}

// Null if there is no room.
void* map_memory(int file, size_t bytes, bool is_own) {
  const int flags = file == kNoFile ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  const Lock lock;
  mappings()[memory] = {is_own ? file : kNoFile, bytes};
  return memory;
}

// Null if there is no room.
void* allocate_filled(size_t bytes) {
  const size_t room = (bytes + 511) / 256 * 256;
  void* const memory = std::aligned_alloc(256, room);
  const Lock lock;
  if (memory) std::memset(memory, static_cast<int>(adversary.random.next()), room);
  return memory;
}

// Returns false if the address is not in mappings().
bool unmap_memory(void* memory) {
  const Lock lock;
  const auto found = mappings().find(memory);
  if (found == mappings().end()) return false;
  munmap(memory, found->second.bytes);
  if (found->second.file >= 0) close(found->second.file);
  mappings().erase(found);
  return true;
}

// What a cudaIpcMemHandle_t and a CUmemFabricHandle hold.
struct SharedFile {
  pid_t process;
  int file;
  size_t bytes;
};
static_assert(sizeof(SharedFile) <= sizeof(cudaIpcMemHandle_t) && sizeof(SharedFile) <= sizeof(CUmemFabricHandle));

// Returns a file descriptor, or -1 if the process has closed the file or has ended.
int open_file(const SharedFile& shared) {
  const std::string path = "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.file);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = nullptr;
  if (bytes > kMemoryBytes) return failed(cudaErrorMemoryAllocation);
  if (bytes > 0 && bytes % kGranuleBytes == 0) {
    const int file = create_file(bytes);
    if (file >= 0) *memory = map_memory(file, bytes, true);
    if (file >= 0 && *memory == nullptr) close(file);
  } else {
    *memory = bytes < kFillBelowBytes ? allocate_filled(bytes) : map_memory(kNoFile, bytes, false);
  }
  return *memory ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  cudaDeviceSynchronize();
  if (!unmap_memory(memory)) std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemoryBytes;
  *free = *total;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const Lock lock;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  const Lock lock;
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const Lock lock;
  const auto found = mappings().find(memory);
  if (found == mappings().end() || found->second.file == kNoFile) return failed(cudaErrorNotSupported);
  const SharedFile shared = {getpid(), found->second.file, found->second.bytes};
  std::memcpy(handle, &shared, sizeof(shared));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  SharedFile shared;
  std::memcpy(&shared, &handle, sizeof(shared));
  const int file = open_file(shared);
  if (file < 0) return failed(cudaErrorInvalidValue);
  *memory = map_memory(file, shared.bytes, false);
  close(file);
  return *memory ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  return unmap_memory(memory) ? cudaSuccess : failed(cudaErrorInvalidValue);
}

// --- the driver ----------------------------------------------------------------------------------------------------

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranuleBytes;
  return CUDA_SUCCESS;
}

namespace {
// Physical memory. A handle is its address. It is freed when no handle and no mapping of this process refers to it.
struct Allocation {
  int file;
  size_t bytes;
  CUmemAllocationHandleType type;  // that it can be exported as
  int references = 1;
};

Allocation* allocation_of(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Allocation*>(handle); }

// Takes `file` over.
CUmemGenericAllocationHandle new_allocation(int file, size_t bytes, CUmemAllocationHandleType type) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(new Allocation{file, bytes, type});
}

void release(Allocation* allocation) {
  if (--allocation->references > 0) return;
  close(allocation->file);
  delete allocation;
}

std::map<CUdeviceptr, Allocation*>& mapped_allocations() {
  static auto* allocations = new std::map<CUdeviceptr, Allocation*>;
  return *allocations;
}
}  // namespace

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  if (bytes > kMemoryBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = create_file(bytes);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = new_allocation(file, bytes, properties->requestedHandleTypes);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Lock lock;
  release(allocation_of(handle));
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const Lock lock;
  Allocation* const allocation = allocation_of(handle);
  if (bytes > allocation->bytes) return CUDA_ERROR_INVALID_VALUE;
  void* const memory = reinterpret_cast<void*>(address);
  if (mmap(memory, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->file, 0) == MAP_FAILED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ++allocation->references;
  mapped_allocations()[address] = allocation;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const Lock lock;
  const auto found = mapped_allocations().find(address);
  if (found == mapped_allocations().end()) return CUDA_ERROR_INVALID_VALUE;
  release(found->second);
  mapped_allocations().erase(found);
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
  const bool is_fine = mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0;
  return is_fine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const Lock lock;
  const auto found = mapped_allocations().find(reinterpret_cast<CUdeviceptr>(address));
  if (found == mapped_allocations().end()) return CUDA_ERROR_INVALID_VALUE;
  ++found->second->references;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->second);
  return CUDA_SUCCESS;
}

// A fabric handle does not keep the memory. A file descriptor does.
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  const Lock lock;
  const Allocation& allocation = *allocation_of(handle);
  if (allocation.type != type) return CUDA_ERROR_INVALID_VALUE;
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    const SharedFile shared = {getpid(), allocation.file, allocation.bytes};
    std::memcpy(shareable, &shared, sizeof(shared));
  } else {
    *static_cast<int*>(shareable) = dup(allocation.file);
  }
  return CUDA_SUCCESS;
}

// `shareable` points to a fabric handle, or is a file descriptor.
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  SharedFile shared = {};
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) std::memcpy(&shared, shareable, sizeof(shared));
  const int file = type == CU_MEM_HANDLE_TYPE_FABRIC ? open_file(shared)
                                                     : dup(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = new_allocation(file, static_cast<size_t>(status.st_size), type);
  return CUDA_SUCCESS;
}
