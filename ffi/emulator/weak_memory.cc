#include "ffi/emulator/weak_memory.h"

#include <algorithm>
#include <unordered_map>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/machine.h"
#include "ffi/emulator/scheduler.h"

namespace emulator {

constexpr uintptr_t kGranuleBytes = 16;

// A store, or the half of one, within 16 aligned bytes.
struct PendingStore {
  uintptr_t granule;
  uint8_t first, bytes;  // within the granule
  uint8_t value[kGranuleBytes];
  std::shared_ptr<BlockStores> block;
  int warp, lane;
  uint32_t number;  // among the stores of the warp
  bool is_held;     // only a rule of the memory model, a deadline or settle_held() settles it
  std::shared_ptr<Release> release;
  size_t index_in_all, index_in_block;  // of the lists of pending stores

  bool overlaps(const PendingStore& other) const {
    return first < other.first + other.bytes && other.first < first + bytes;
  }
};

namespace {

// What is not settled at 16 aligned bytes: stores in the order in which they take effect, and releases whose value has
// settled before the stores that they order.
struct Granule {
  std::vector<PendingStore*> stores;
  std::vector<std::shared_ptr<Release>> releases;
};

// Never destroyed: fibers may run while the process ends.
auto& granules = *new std::unordered_map<uintptr_t, Granule>;
auto& all_pending = *new std::vector<PendingStore*>;

uintptr_t granule_of(const void* p) { return reinterpret_cast<uintptr_t>(p) & ~(kGranuleBytes - 1); }

Granule* find_granule(const void* p) {
  if (granules.empty()) return nullptr;
  const auto found = granules.find(granule_of(p));
  return found == granules.end() ? nullptr : &found->second;
}

void forget_if_empty(uintptr_t granule) {
  const auto found = granules.find(granule);
  if (found != granules.end() && found->second.stores.empty() && found->second.releases.empty()) granules.erase(found);
}

// Whether every store has settled, so that no release orders anything any more.
bool all_is_settled() {
  if (!all_pending.empty()) return false;
  while (!granules.empty()) granules.erase(granules.begin());  // clear() would write all buckets each time
  return true;
}

// Takes a store out of a list, in which it has this index.
void take_out(std::vector<PendingStore*>& from, size_t PendingStore::* index, const PendingStore* store) {
  PendingStore* const last = from.back();
  from[store->*index] = last;
  last->*index = store->*index;
  from.pop_back();
}

void settle(PendingStore* store) {
  const uintptr_t granule = store->granule;
  Granule& at = granules[granule];
  while (true) {  // the block's earlier stores to the same bytes take effect first
    PendingStore* earlier = nullptr;
    for (PendingStore* other : at.stores) {
      if (other == store) break;
      if (other->block == store->block && other->overlaps(*store)) {
        earlier = other;
        break;
      }
    }
    if (earlier == nullptr) break;
    settle(earlier);
  }
  std::memcpy(reinterpret_cast<void*>(granule + store->first), store->value, store->bytes);
  at.stores.erase(std::find(at.stores.begin(), at.stores.end(), store));
  if (store->release && !store->release->is_settled()) at.releases.push_back(store->release);
  take_out(store->block->pending, &PendingStore::index_in_block, store);
  take_out(all_pending, &PendingStore::index_in_all, store);
  delete store;
  scheduler().note_progress();
}

bool covers(const Release& release, const PendingStore& store) {
  if (store.warp != release.warp) {
    return static_cast<size_t>(store.warp) < release.ordered.size() && store.number < release.ordered[store.warp];
  }
  return store.lane == release.lane ? store.number < release.own_lane : store.number < release.ordered[store.warp];
}

bool is_release(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }
bool is_acquire(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }

// What the running thread attaches to a store of this order.
std::shared_ptr<Release> release_of(Order order) { return is_release(order) ? release_here() : current->fence; }

void acquire(Granule& at) {
  const std::vector<std::shared_ptr<Release>> releases = std::move(at.releases);
  at.releases.clear();
  for (const auto& release : releases) release->settle();
}

void add_pending(uintptr_t address, const uint8_t* value, uint32_t bytes, const std::shared_ptr<Release>& release) {
  Warp& warp = *current->warp;
  auto* store = new PendingStore;
  store->granule = address & ~(kGranuleBytes - 1);
  store->first = static_cast<uint8_t>(address - store->granule);
  store->bytes = static_cast<uint8_t>(bytes);
  std::memcpy(store->value, value, bytes);
  store->block = warp.block->stores;
  store->warp = warp.number;
  store->lane = current->lane;
  store->number = warp.num_stores++;
  store->is_held = warp.block->holds_stores || adversary.random.happens(adversary.held_share);
  store->release = release;
  store->index_in_all = all_pending.size();
  store->index_in_block = store->block->pending.size();
  all_pending.push_back(store);
  store->block->pending.push_back(store);
  granules[store->granule].stores.push_back(store);
}

}  // namespace

std::shared_ptr<Release> release_here() {
  const Warp& warp = *current->warp;
  auto release = std::make_shared<Release>();
  release->block = warp.block->stores;
  release->warp = warp.number;
  release->lane = current->lane;
  release->own_lane = warp.num_stores;
  release->ordered = warp.ordered;
  release->ordered[warp.number] = current->stores_ordered;
  return release;
}

bool Release::is_settled() const {
  return std::none_of(block->pending.begin(), block->pending.end(),
                      [&](const PendingStore* store) { return covers(*this, *store); });
}

void Release::settle() const {
  while (true) {  // settling one may settle others
    const auto found = std::find_if(block->pending.begin(), block->pending.end(),
                                    [&](const PendingStore* store) { return covers(*this, *store); });
    if (found == block->pending.end()) return;
    emulator::settle(*found);
  }
}

void store_bytes(void* p, const void* value, uint32_t bytes, Order order) {
  maybe_preempt();
  if (current->word_read_last == p) may_stall_before_writing_back();
  scheduler().note_progress();
  if (!adversary.delays_stores && all_is_settled()) {
    if (!adversary.tears_units || bytes < kGranuleBytes) {
      std::memcpy(p, value, bytes);
      return;
    }
  }
  const auto address = reinterpret_cast<uintptr_t>(p);
  const auto* from = static_cast<const uint8_t*>(value);
  const std::shared_ptr<Release> release = release_of(order);
  if (bytes == kGranuleBytes && adversary.tears_units) {
    const uint32_t half = adversary.random.below(2) * 8;
    add_pending(address + half, from + half, 8, release);
    add_pending(address + 8 - half, from + 8 - half, 8, release);
  } else {
    add_pending(address, from, bytes, release);
  }
}

void load_bytes(const void* p, void* value, uint32_t bytes, Order order) {
  maybe_preempt();
  current->word_read_last = bytes < kGranuleBytes ? p : nullptr;
  Granule* at = find_granule(p);
  if (at == nullptr) {
    std::memcpy(value, p, bytes);
    return;
  }
  const BlockStores* own = current->warp->block->stores.get();
  // What others have stored is seen by chance; once seen, it has settled, so that nobody sees what was before.
  for (bool again = true; again;) {
    again = false;
    for (PendingStore* store : at->stores) {
      if (store->block.get() == own || store->is_held || !adversary.random.happens(0.25)) continue;
      settle(store);
      again = !at->stores.empty();
      break;
    }
  }
  uint8_t seen[kGranuleBytes];
  const uintptr_t granule = granule_of(p);
  std::memcpy(seen, reinterpret_cast<const void*>(granule), kGranuleBytes);
  for (const PendingStore* store : at->stores) {
    if (store->block.get() == own) std::memcpy(seen + store->first, store->value, store->bytes);
  }
  std::memcpy(value, seen + (reinterpret_cast<uintptr_t>(p) - granule), bytes);
  if (is_acquire(order)) {
    acquire(*at);
  } else {
    for (const auto& release : at->releases) current->seen_releases.push_back(release);
  }
  forget_if_empty(granule);
}

void write_settled(void* p, const void* value, uint32_t bytes, const std::shared_ptr<Release>& release) {
  std::memcpy(p, value, bytes);
  if (release && !release->is_settled()) granules[granule_of(p)].releases.push_back(release);
}

void begin_atomic(void* p, uint32_t bytes, Order order) {
  maybe_preempt();
  Granule* at = find_granule(p);
  if (at == nullptr) return;
  const auto first = static_cast<uint8_t>(reinterpret_cast<uintptr_t>(p) - granule_of(p));
  while (true) {
    const auto found = std::find_if(at->stores.begin(), at->stores.end(), [&](const PendingStore* store) {
      return store->first < first + bytes && first < store->first + store->bytes;
    });
    if (found == at->stores.end()) break;
    settle(*found);
  }
  if (is_acquire(order)) acquire(*at);
  forget_if_empty(granule_of(p));
}

void end_atomic(void* p, Order order, bool changed) {
  if (changed) scheduler().note_progress();
  if (!adversary.delays_stores && all_is_settled()) return;
  const std::shared_ptr<Release> release = release_of(order);
  if (release && !release->is_settled()) granules[granule_of(p)].releases.push_back(release);
}

void acquire(const void* p) {
  if (Granule* at = find_granule(p)) acquire(*at);
}

void fence() {
  maybe_preempt();
  if (!adversary.delays_stores) return;
  for (const auto& release : current->seen_releases) release->settle();
  current->seen_releases.clear();
  current->fence = release_here();
}

bool settle_some(double share, double max_picks) {
  if (all_is_settled()) return false;
  const double wanted = std::min(share * static_cast<double>(all_pending.size()), max_picks);
  auto count = static_cast<size_t>(wanted);
  if (adversary.random.happens(wanted - static_cast<double>(count))) ++count;
  bool any = false;
  for (; count > 0 && !all_pending.empty(); --count) {
    PendingStore* const store = all_pending[adversary.random.below(static_cast<uint32_t>(all_pending.size()))];
    if (store->is_held) continue;
    settle(store);
    any = true;
  }
  return any;
}

bool settle_held() {
  const bool any = !all_pending.empty();
  for (size_t count = (all_pending.size() + 3) / 4; count > 0 && !all_pending.empty(); --count) {
    settle(all_pending[adversary.random.below(static_cast<uint32_t>(all_pending.size()))]);
  }
  return any;
}

void settle_all(BlockStores& block) {
  while (!block.pending.empty()) settle(block.pending.back());
}

}  // namespace emulator
