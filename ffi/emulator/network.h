// The emulated NVSHMEM: memory that all devices have at the same place of their heaps, and puts between devices. Each
// device is a processing element (PE).
//
// Under an adversary a put is under way for a while. Its data arrives in any order, 8 bytes at a time, and then its
// signal. Puts and words overtake one another, but none overtakes what its device sent to the same PE before a fence.
#pragma once

#include <cstdint>

namespace emulator {

// Zeros on this device; memory of as many bytes on other devices belongs to it. Null if there is no room.
uint8_t* allocate_symmetric(int64_t bytes);
// When all that is under way has arrived.
void free_symmetric(uint8_t* memory);
// The same byte in a PE's memory.
uint8_t* symmetric_address(const void* address, int pe);

// What device code calls: addresses are this device's own.
struct Word {
  void* address;
  uint64_t value;
  uint32_t bytes;  // 4 or 8
};
void put(void* to, const void* from, uint32_t bytes, const Word& signal, int pe);
void put_word(const Word& word, int pe);
void fence_puts();

// For the scheduler. has_puts: whether any is under way. deliver_some: something of about `share` of the puts that are not held; returns whether there was
// one. deliver_held: all of some that are held, once nothing else can run.
bool has_puts();
bool deliver_some(double share);
bool deliver_held();

}  // namespace emulator
