// Asks CUDA whether this machine's devices, and the links between them, can run the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ffi/cuda/runtime.h"
#include "ffi/cuda/start.h"
#include "ffi/device.h"

namespace jax_ep {

inline cudaDeviceProp device_properties(int32_t ordinal) {
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  return properties;
}

inline int32_t count_sms(int32_t ordinal) {
  int32_t count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  return count;
}

// Why the device cannot run the kernels, or "".
inline std::string unsupported_device(int32_t ordinal) {
  const cudaDeviceProp properties = device_properties(ordinal);
  const auto shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  const std::string reason =
      unsupported_reason(DeviceFacts{properties.name, properties.major, properties.minor, shared_bytes});
  if (!reason.empty()) return reason;
  const OnDevice device(ordinal);
  const cudaError_t status = load_start();  // all kernels are compiled for the same devices
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // the error would stay and be reported to whoever asks next
  return std::string("jax_ep's kernels do not load on ") + properties.name + " (" + cudaGetErrorString(status) +
         "); reinstall it on this machine: pip install -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native .";
}

// Why the kernels cannot use the link from one device to another, or "".
inline std::string unsupported_link(int32_t from, int32_t to) {
  int has_access = 0, has_native_atomics = 0;
  check(cudaDeviceCanAccessPeer(&has_access, from, to), "cudaDeviceCanAccessPeer");
  check(cudaDeviceGetP2PAttribute(&has_native_atomics, cudaDevP2PAttrNativeAtomicSupported, from, to),
        "cudaDeviceGetP2PAttribute");
  return unsupported_reason(LinkFacts{from, to, has_access != 0, has_native_atomics != 0});
}

// Why two of these devices cannot be in one group, or "". The list may name a device several times.
inline std::string unsupported_pair(const std::vector<int32_t>& ordinals) {
  for (int32_t from : ordinals) {
    for (int32_t to : ordinals) {
      const std::string reason = from == to ? "" : unsupported_link(from, to);
      if (!reason.empty()) return reason;
    }
  }
  return "";
}

// This process's ordinal of the device with this UUID; -1 if the process does not see the device.
inline int32_t find_device(const std::string& uuid) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    const cudaUUID_t found = device_properties(ordinal).uuid;
    if (uuid.size() == sizeof(found.bytes) && std::memcmp(uuid.data(), found.bytes, uuid.size()) == 0) return ordinal;
  }
  return -1;
}

}  // namespace jax_ep
