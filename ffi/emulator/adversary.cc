#include "ffi/emulator/adversary.h"

#include <map>
#include <sstream>
#include <stdexcept>

namespace emulator {

Adversary adversary;

namespace {
const std::map<std::string, bool Adversary::*> kSwitches = {
    {"delays_stores", &Adversary::delays_stores},     {"tears_units", &Adversary::tears_units},
    {"shuffles_warps", &Adversary::shuffles_warps},   {"shuffles_blocks", &Adversary::shuffles_blocks},
    {"delays_launches", &Adversary::delays_launches},
};
const std::map<std::string, double Adversary::*> kShares = {
    {"settle_share", &Adversary::settle_share},           {"held_share", &Adversary::held_share},
    {"held_blocks_share", &Adversary::held_blocks_share}, {"stall_share", &Adversary::stall_share},
    {"switch_share", &Adversary::switch_share},           {"late_share", &Adversary::late_share},
};
}  // namespace

Adversary adversary_of(uint64_t seed, const std::string& settings) {
  Adversary made;
  made.seed = seed;
  made.random = Random(seed);
  if (seed != 0) {
    Random choice(~seed);
    made.delays_stores = choice.happens(0.75);
    made.shuffles_warps = choice.happens(0.75);
    made.shuffles_blocks = choice.happens(0.5);
    made.delays_launches = choice.happens(0.5);
    constexpr int kResident[] = {0, 0, 1, 2, 3, 5};
    made.resident_blocks = kResident[choice.below(6)];
    constexpr double kChoices[] = {0.005, 0.05, 0.3};
    made.settle_share = kChoices[choice.below(3)];
    made.switch_share = kChoices[choice.below(3)];
    constexpr double kHeld[] = {0, 0.0003, 0.003}, kHeldBlocks[] = {0, 0.1, 0.5}, kStalls[] = {0, 0.1, 0.5};
    made.held_share = kHeld[choice.below(3)];
    made.held_blocks_share = kHeldBlocks[choice.below(3)];
    made.stall_share = kStalls[choice.below(3)];
  }
  std::istringstream parts(settings);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const double value = equals == std::string::npos ? 1 : std::stod(part.substr(equals + 1));
    if (const auto found = kSwitches.find(name); found != kSwitches.end()) {
      made.*found->second = value != 0;
    } else if (const auto share = kShares.find(name); share != kShares.end()) {
      made.*share->second = value;
    } else if (name == "resident_blocks") {
      made.resident_blocks = static_cast<int>(value);
    } else {
      throw std::invalid_argument("the emulator has no setting '" + name + "'");
    }
  }
  return made;
}

}  // namespace emulator
