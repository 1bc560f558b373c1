#include "ffi/device.h"

#include "check.h"

using namespace jax_ep;

// Checks that the reason contains each of `words`.
void expect_names(const std::string& reason, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (reason.find(word) == std::string::npos) EXPECT_EQ(reason, "... " + word + " ...");
  }
}

void test_devices() {
  constexpr int64_t kHopperBytes = 227 * 1024, kConsumerBytes = 99 * 1024;
  EXPECT_EQ(unsupported_reason(DeviceFacts{"NVIDIA H20", 9, 0, kHopperBytes}), std::string());
  EXPECT_EQ(unsupported_reason(DeviceFacts{"NVIDIA B200", 10, 0, kHopperBytes}), std::string());
  EXPECT_EQ(unsupported_reason(DeviceFacts{"any", 9, 0, kMaxBlockSharedBytes}), std::string());
  expect_names(unsupported_reason(DeviceFacts{"NVIDIA A100", 8, 0, 163 * 1024}),
               {"NVIDIA A100 has compute capability 8.0;", "9.0 (Hopper)"});
  expect_names(unsupported_reason(DeviceFacts{"NVIDIA GeForce RTX 5090", 12, 0, kConsumerBytes}),
               {"NVIDIA GeForce RTX 5090 has 101376 bytes of shared memory", std::to_string(kMaxBlockSharedBytes)});
}

void test_links() {
  EXPECT_EQ(unsupported_reason(LinkFacts{0, 1, true, true}), std::string());
  expect_names(unsupported_reason(LinkFacts{2, 5, true, false}),
               {"from CUDA device 2 to CUDA device 5", "16-byte", "cudaDevP2PAttrNativeAtomicSupported", "NVLink"});
  expect_names(unsupported_reason(LinkFacts{2, 5, false, false}),
               {"CUDA device 2 cannot reach the memory of CUDA device 5", "cudaDeviceCanAccessPeer", "MIG"});
}

int main() {
  test_devices();
  test_links();
  return check::exit_status();
}
