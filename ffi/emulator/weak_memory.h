// Memory that blocks, ranks and hosts share. A store stays pending, visible to its own block only, until it settles.
// Stores settle in any order, but those of a block to one address in their order. Loads are not reordered: PTX allows
// more.
//
// A release names the stores that come before it: the thread's own, and those that its thread has synchronized with
// through its warp and the block's barriers. Who reads the released value with an acquire makes them all settle.
// Read-modify-writes settle at once. Without an adversary stores settle at once, too.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace emulator {

struct PendingStore;
struct BlockStores {
  std::vector<PendingStore*> pending;
};

// The stores that a release orders before itself.
struct Release {
  std::shared_ptr<BlockStores> block;
  int warp = 0, lane = 0;
  uint32_t own_warp = 0;          // stores of the thread's warp below this number
  std::vector<uint32_t> ordered;  // the same of each warp of the block
  void settle() const;
  bool is_settled() const;
};

enum class Order { kRelaxed, kAcquire, kRelease, kAcquireRelease };

void store_bytes(void* p, const void* value, uint32_t bytes, Order order);
void load_bytes(const void* p, void* value, uint32_t bytes, Order order);
// Settles what is pending at p, for a read-modify-write there; begin_atomic() and end_atomic() enclose it.
void begin_atomic(void* p, uint32_t bytes, Order order);
void end_atomic(void* p, Order order, bool changed);
void fence();
// What a load of the host's acquires.
void acquire(const void* p);

template <typename T>
void store(T* p, T value, Order order) {
  store_bytes(p, &value, sizeof(T), order);
}
template <typename T>
T load(const T* p, Order order) {
  T value;
  load_bytes(p, &value, sizeof(T), order);
  return value;
}
template <typename T, typename Next>
T atomic(T* p, Next next, Order order = Order::kRelaxed) {
  begin_atomic(p, sizeof(T), order);
  T before = *p, after = next(before);
  // Another process may change the word at the same time.
  while (!__atomic_compare_exchange(p, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    after = next(before);
  }
  end_atomic(p, order, after != before);
  return before;
}

// What the running thread's stores until now, and those it has synchronized with, are to a release.
std::shared_ptr<Release> release_here();
// Stores what has come over a network. The store is visible at once, and carries `release` if there is one.
void write_settled(void* p, const void* value, uint32_t bytes, const std::shared_ptr<Release>& release);

// For the scheduler. settle_some: about `share` of the pending stores that are not held; returns whether there was one.
// settle_held: some that are held, once nothing else can run. settle_all: all of a block.
bool settle_some(double share);
bool settle_held();
void settle_all(BlockStores& block);

}  // namespace emulator
