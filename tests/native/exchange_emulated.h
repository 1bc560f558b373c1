// For all scenarios between emulated GPUs: limits, and settings of the emulator's adversary.
#pragma once

#include <random>
#include <vector>

#include "exchange.h"
#include "ffi/emulator/adversary.h"
#include "ffi/emulator/runtime.h"

namespace {

constexpr int32_t kMostBlocks = 12;  // of a launch here

constexpr double kTimeout = 60.0;  // seconds

// If the seed limits the number of resident blocks of a device, raises the limit to what one scenario needs.
class ResidentBlocks {
 public:
  explicit ResidentBlocks(int needed) : former_(emulator::adversary.resident_blocks) {
    if (former_ != 0) emulator::adversary.resident_blocks = needed;
  }
  ~ResidentBlocks() { emulator::adversary.resident_blocks = former_; }

 private:
  int former_;
};
constexpr int kNoBlockLimit = 0;
// Room for the bodies of two split-phase calls and one block of a whole operation. plan.h leaves enough SMs for these.
constexpr int kBlocksOfSplitPhase = 2 * kMostBlocks + 1;

// Restores the adversary's settings at the end of a scenario that changes them.
class Settings {
 public:
  Settings() : former_(emulator::adversary) {}
  Settings(const Settings&) = delete;
  ~Settings() {
    former_.random = emulator::adversary.random;
    emulator::adversary = former_;
  }

 private:
  emulator::Adversary former_;
};

// Launches any operation that needs only results of run_whole().
void launch_any(Session& session, std::mt19937& random) {
  const auto choice = random() % 3;
  if (choice == 0) {
    session.whole([](Rank& rank) { return rank.dispatch_back(); });
  } else if (choice == 1) {
    session.whole([](Rank& rank) { return rank.dispatch_with_route(OpKind::kDispatchLike, rank.like); });
  } else {
    session.whole([](Rank& rank) { return rank.combine_back(); });
  }
}

}  // namespace
