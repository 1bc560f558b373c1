// The emulated NVSHMEM: symmetric memory of all devices, and puts from one device to another. Each device is a
// processing element (PE), whose number is the device's.
//
// Without an adversary a put arrives at once. Under an adversary it is in flight for a while: its data arrives in
// pieces of 8 bytes, in any order, and its word arrives behind the data. Puts overtake one another. No put overtakes a
// put that its device has sent to the same PE before a fence.
#pragma once

#include <cstdint>

namespace emulator {

// Allocates zeroed memory on this device. The next allocation of the same size on each other device belongs to the same
// symmetric memory. Returns null if there is no room.
uint8_t* allocate_symmetric(int64_t bytes);
// Delivers all puts that are in flight first.
void free_symmetric(uint8_t* memory);
// The same byte in a PE's memory; null if that PE has not allocated this memory.
uint8_t* symmetric_address(const void* address, int pe);

// --- what device code calls: all addresses are in symmetric memory of the calling device ---------------------------

struct Word {
  void* address;
  uint64_t value;
  uint32_t bytes;  // 4 or 8
};

// Copies `bytes`, a multiple of 8, to the PE, then stores the word there.
void put(void* to, const void* from, uint32_t bytes, const Word& signal, int pe);
void put_word(const Word& word, int pe);
// Orders all puts that this device has sent before all puts that it sends from here on, for each PE.
void fence_puts();

// --- what the scheduler calls --------------------------------------------------------------------------------------

bool has_puts();  // in flight
// Picks about `share` of the puts, and delivers a part of each picked put that is not held and may arrive. Returns true
// if it delivered something.
bool deliver_some(double share);
// Picks about half of all puts, held or not. For each picked put that may arrive, delivers all data that has not
// arrived, or else the signal. Returns true if a put was in flight.
bool deliver_held();

}  // namespace emulator
