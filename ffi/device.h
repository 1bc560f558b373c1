// Why a device, or the link between two devices, cannot run the kernels. Every function returns the reason, which says
// what to do, or "" if there is none. ffi/cuda/device.h asks CUDA for the facts.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/plan.h"

namespace jax_ep {

struct DeviceFacts {
  std::string name;
  int32_t major, minor;  // compute capability
  int64_t shared_bytes;  // the most shared memory of a thread block
};

inline std::string unsupported_reason(const DeviceFacts& device) {
  if (device.major < 9) {
    return device.name + " has compute capability " + std::to_string(device.major) + "." +
           std::to_string(device.minor) + "; the kernels need 9.0 (Hopper)";
  }
  if (device.shared_bytes < kMaxBlockSharedBytes) {
    return device.name + " has " + std::to_string(device.shared_bytes) +
           " bytes of shared memory for a thread block; the kernels need " + std::to_string(kMaxBlockSharedBytes) +
           " (a data center GPU: H100, H200, B200)";
  }
  return "";
}

// What device `from` can do with the memory of device `to`.
struct LinkFacts {
  int32_t from, to;  // CUDA ordinals
  bool has_access, has_native_atomics;
};

// A receiver uses a 16-byte unit as soon as the unit differs from the sentinel. So every unit must arrive whole. CUDA
// does not report which links keep a 16-byte store whole. NVLink does, and has native atomics. PCIe may split the
// store, and has no native atomics.
inline std::string unsupported_reason(const LinkFacts& link) {
  const std::string from = std::to_string(link.from), to = std::to_string(link.to);
  if (!link.has_access) {
    return "CUDA device " + from + " cannot reach the memory of CUDA device " + to +
           " (cudaDeviceCanAccessPeer is 0, as between MIG instances); take devices that NVLink connects";
  }
  if (!link.has_native_atomics) {
    return "the link from CUDA device " + from + " to CUDA device " + to +
           " may split a 16-byte store, as PCIe does (cudaDevP2PAttrNativeAtomicSupported is 0); take devices that "
           "NVLink connects";
  }
  return "";
}

}  // namespace jax_ep
