// What a seed decides. A seed of 0 decides nothing: threads run in order, and stores are visible at once.
#pragma once

#include <cstdint>
#include <string>

namespace emulator {

// splitmix64: few instructions, as it is asked at every access to memory.
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  // Returns a number from 2 to 2 ** bits. Each interval from 2 ** k + 1 to 2 ** (k + 1) has the same probability.
  uint64_t log_uniform(uint32_t bits) {
    const uint64_t power = uint64_t{1} << below(bits);
    return power + below(static_cast<uint32_t>(power)) + 1;
  }
  bool happens(double probability) { return static_cast<double>(next() >> 11) < probability * 9007199254740992.0; }

 private:
  uint64_t state_;
};

struct Adversary {
  uint64_t seed = 0;
  bool delays_stores = false;    // stores become visible late, and in another order
  bool tears_units = false;      // a store of 16 bytes arrives as two stores of 8 bytes
  bool shuffles_warps = false;   // any ready warp and lane runs next; threads lose the processor between accesses
  bool shuffles_blocks = false;  // the blocks of a launch start in any order
  bool delays_launches = false;  // ranks are late, and so is the end of a launch
  int resident_blocks = 0;       // a device holds no more at a time; 0: as many as its SMs hold
  double late_share = 0.3;     // with delays_launches: the fraction of launches that begin, and of those that end, late
  double stall_share = 0;      // the fraction of blocks that stop once, as a whole or with one warp
  double settle_share = 0.05;  // the fraction of pending stores and bulk copies that complete at each step
  double held_share = 0;       // the fraction of stores that stay pending as long as possible
  double held_blocks_share = 0;  // the fraction of blocks whose stores are all held
  double switch_share = 0.05;    // with shuffles_warps: the fraction of accesses at which a thread is preempted
  Random random;
};

// Derives the fields from the seed. `settings`, such as "tears_units=1,delays_stores=0", then override single fields.
Adversary adversary_of(uint64_t seed, const std::string& settings = "");

extern Adversary adversary;

}  // namespace emulator
