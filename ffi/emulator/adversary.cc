#include "ffi/emulator/adversary.h"

#include <sstream>
#include <stdexcept>

namespace jax_ep::emulator {

Adversary adversary;

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
    made.stalls_blocks = choice.happens(0.5);
    constexpr int kResident[] = {0, 0, 1, 2, 3, 5};
    made.resident_blocks = kResident[choice.below(6)];
    // Kernels rely on one of the two: blocks start in order, or all blocks of a launch fit on an idle device.
    if (made.shuffles_blocks) made.resident_blocks = 0;
    constexpr double kShares[] = {0.005, 0.05, 0.3};
    made.settle_share = kShares[choice.below(3)];
    made.switch_share = kShares[choice.below(3)];
    constexpr double kHeld[] = {0, 0.0003, 0.003};
    made.held_share = kHeld[choice.below(3)];
  }
  std::istringstream parts(settings);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const double value = equals == std::string::npos ? 1 : std::stod(part.substr(equals + 1));
    if (name == "delays_stores") {
      made.delays_stores = value != 0;
    } else if (name == "tears_units") {
      made.tears_units = value != 0;
    } else if (name == "shuffles_warps") {
      made.shuffles_warps = value != 0;
    } else if (name == "shuffles_blocks") {
      made.shuffles_blocks = value != 0;
    } else if (name == "delays_launches") {
      made.delays_launches = value != 0;
    } else if (name == "stalls_blocks") {
      made.stalls_blocks = value != 0;
    } else if (name == "resident_blocks") {
      made.resident_blocks = static_cast<int>(value);
    } else if (name == "settle_share") {
      made.settle_share = value;
    } else if (name == "held_share") {
      made.held_share = value;
    } else if (name == "switch_share") {
      made.switch_share = value;
    } else {
      throw std::invalid_argument("the emulator has no setting '" + name + "'");
    }
  }
  return made;
}

}  // namespace jax_ep::emulator
