// Memory that blocks, ranks and the host share. A store is pending at first: only its own block sees it. It settles
// when it becomes visible to all threads (PTX: is performed). Stores settle in any order, but a block's stores to one
// address settle in program order. Loads are not reordered, although PTX allows it.
//
// A release covers the thread's own earlier stores, and the stores that the thread has synchronized with through its
// warp and the block's barriers. An acquire that reads the released value settles all covered stores.
// Read-modify-writes settle at once. Without an adversary, all stores settle at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
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
  uint32_t own_lane = 0;  // covers the stores of this lane whose number in the warp is smaller
  // ordered[w]: the release covers the stores of warp w whose number is less than ordered[w]. For the thread's own
  // warp, this applies only to the other lanes; own_lane is the limit for the thread's own lane.
  std::vector<uint32_t> ordered;
  void settle() const;
  bool is_settled() const;
};

enum class Order { kRelaxed, kAcquire, kRelease, kAcquireRelease };

void store_bytes(void* p, const void* value, uint32_t bytes, Order order);
void load_bytes(const void* p, void* value, uint32_t bytes, Order order);
// begin_atomic() and end_atomic() enclose a read-modify-write. begin_atomic() settles the pending stores at p.
void begin_atomic(void* p, uint32_t bytes, Order order);
void end_atomic(void* p, Order order, bool changed);
void fence();
// Makes the host acquire: settles the stores that the value at p releases.
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

// Returns the release that the running thread would perform now. It covers the thread's earlier stores, and the stores
// that the thread has synchronized with.
std::shared_ptr<Release> release_here();
// Stores what has come over a network. The store is visible at once, and carries `release` if there is one.
void write_settled(void* p, const void* value, uint32_t bytes, const std::shared_ptr<Release>& release);

// The scheduler calls these. settle_some() picks about `share` of the pending stores, at most `max_picks`, and
// settles the picked stores that are not held. It returns true if it settled a store. settle_held() settles about a
// quarter of all pending stores, held or not. The scheduler calls it rarely, by chance, and when nothing else can run.
// It returns true if a store was pending. settle_all() settles all stores of a block.
bool settle_some(double share, double max_picks = std::numeric_limits<double>::infinity());
bool settle_held();
void settle_all(BlockStores& block);

}  // namespace emulator
