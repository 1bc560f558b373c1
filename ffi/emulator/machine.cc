#include "ffi/emulator/machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/fiber.h"
#include "ffi/emulator/scheduler.h"
#include "ffi/emulator/weak_memory.h"

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr uint32_t kLogLongestStallNs = 24;

void* scheduler_stack_pointer = nullptr;

uint32_t bit(int lane) { return 1u << lane; }

void enqueue(Warp& warp) {
  if (std::exchange(warp.is_queued, true)) return;
  scheduler().add_ready(&warp);
}

void make_ready(Thread& thread) {
  thread.warp->ready |= bit(thread.lane);
  enqueue(*thread.warp);
}

// Returns the next ready lane after `last`, in round-robin order. With shuffles_warps, returns any ready lane.
int next_lane(uint32_t ready, int last) {
  if (adversary.shuffles_warps) {
    for (int skip = static_cast<int>(adversary.random.below(__builtin_popcount(ready))); skip > 0; --skip) {
      ready &= ready - 1;
    }
    return __builtin_ctz(ready);
  }
  const uint32_t behind = last == kWarpLanes - 1 ? 0 : ready & ~((2u << last) - 1);
  return __builtin_ctz(behind ? behind : ready);
}

// Switches to another ready fiber of the warp. If there is none, or with `to_scheduler`, switches to the scheduler.
// Returns when this fiber runs again.
void switch_away(bool to_scheduler = false) {
  Thread* const self = current;
  Warp& warp = *self->warp;
  if (to_scheduler || warp.ready == 0) {
    current = nullptr;
    jax_ep_switch_fiber(&self->stack_pointer, scheduler_stack_pointer);
  } else {
    Thread* const next = &warp.lanes[next_lane(warp.ready, self->lane)];
    if (next == self) return;
    current = next;
    jax_ep_switch_fiber(&self->stack_pointer, next->stack_pointer);
  }
}

// The running thread waits for somebody to make it ready.
void wait() {
  current->warp->ready &= ~bit(current->lane);
  switch_away();
}

std::string place() {
  if (current == nullptr) return "";
  const Block& block = *current->warp->block;
  return " (block " + std::to_string(block.index) + ", thread " + std::to_string(current->index) + ")";
}

void complete(Barrier& barrier) {
  // All earlier stores of the participating warps happen before all their later accesses.
  if (adversary.delays_stores) {
    std::vector<uint32_t> ordered(barrier.warps.front()->ordered.size());
    for (const Warp* warp : barrier.warps) {
      for (size_t i = 0; i < ordered.size(); ++i) ordered[i] = std::max(ordered[i], warp->ordered[i]);
      ordered[warp->number] = std::max(ordered[warp->number], warp->num_stores);
    }
    for (Warp* warp : barrier.warps) {
      warp->ordered = ordered;
      for (Thread& lane : warp->lanes) lane.stores_ordered = warp->num_stores;
    }
  }
  for (Thread* thread : barrier.waiting) {
    thread->barrier_result = barrier.any;
    make_ready(*thread);
  }
  barrier = {};
}

void end_thread() {
  Thread* const self = current;
  Warp& warp = *self->warp;
  Block& block = *warp.block;
  warp.ready &= ~bit(self->lane);
  warp.ended |= bit(self->lane);
  if (warp.arrived[0] + warp.arrived[1] > 0) stop("a thread ends while others of its warp wait in a collective");
  --block.num_running;
  Barrier& all = block.barriers[0];  // __syncthreads() is for the threads that have not ended
  if (!all.waiting.empty()) {
    all.expected = block.num_running;
    if (all.arrived == all.expected) complete(all);
  }
  if (block.num_running == 0) scheduler().end_block(&block);
  switch_away();
}

void run_thread() {
  current->warp->block->launch->kernel();
  end_thread();
  stop("a thread that has ended runs");
}

}  // namespace

void stop(const std::string& why) {
  std::fprintf(stderr, "emulator: %s%s; seed %llu\n", why.c_str(), place().c_str(),
               static_cast<unsigned long long>(adversary.seed));
  std::abort();
}

// Plans one stall: the whole block stops at an access to memory, or one warp stops at an access or after a barrier.
static void plan_stall(Block& block) {
  constexpr uint32_t kLogMostAccesses = 12, kLogMostBarriers = 4;
  Warp& warp = block.warps[adversary.random.below(static_cast<uint32_t>(block.warps.size()))];
  const uint32_t choice = adversary.random.below(3);
  if (choice == 0) block.stall.accesses_left = adversary.random.log_uniform(kLogMostAccesses);
  if (choice == 1) warp.stall.accesses_left = adversary.random.log_uniform(kLogMostAccesses);
  if (choice == 2) warp.stall.barriers_left = adversary.random.log_uniform(kLogMostBarriers);
}

void start_threads(Block& block) {
  const int num_threads = static_cast<int>(block.launch->block_threads);
  block.num_running = num_threads;
  block.warps.resize((num_threads + kWarpLanes - 1) / kWarpLanes);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    warp.block = &block;
    warp.number = static_cast<int>(w);
    warp.ordered.resize(block.warps.size());
    warp.lanes.resize(std::min(kWarpLanes, num_threads - static_cast<int>(w) * kWarpLanes));
    for (size_t lane = 0; lane < warp.lanes.size(); ++lane) {
      Thread& thread = warp.lanes[lane];
      thread.index = static_cast<uint32_t>(w * kWarpLanes + lane);
      thread.warp = &warp;
      thread.lane = static_cast<int>(lane);
      thread.stack = take_stack();
      thread.stack_pointer = new_fiber(thread.stack, run_thread);
      warp.ready |= bit(thread.lane);
    }
    enqueue(warp);
  }
  if (adversary.random.happens(adversary.stall_share)) plan_stall(block);
}

void free_threads(Block& block) {
  for (Warp& warp : block.warps) {
    for (Thread& thread : warp.lanes) {
      if (!give_stack_back(thread.stack)) stop("a thread's stack is larger than the emulator's");
    }
  }
}

// Runs a warp's lanes, those that poll among them, until none of them can go on.
void run_warp(Warp& warp) {
  warp.ready |= warp.polling;
  warp.polling = 0;
  if (warp.ready == 0) return;
  current = &warp.lanes[next_lane(warp.ready, kWarpLanes - 1)];
  jax_ep_switch_fiber(&scheduler_stack_pointer, current->stack_pointer);
  if (warp.ready != 0) enqueue(warp);
  if (warp.polling != 0 && !std::exchange(warp.is_polling_queued, true)) scheduler().add_polling(&warp);
}

// --- warps and barriers --------------------------------------------------------------------------------------------

int collective_slot() { return current->collectives & 1; }

int arrive_at_collective(unsigned mask) {
  Thread& self = *current;
  Warp& warp = *self.warp;
  if (mask != 0xffffffffu || warp.ended != 0 || warp.lanes.size() != kWarpLanes) {
    stop("a warp collective without all 32 lanes");
  }
  const int slot = self.collectives++ & 1;
  scheduler().note_progress();
  if (++warp.arrived[slot] == kWarpLanes) {
    warp.arrived[slot] = 0;
    warp.ready = 0xffffffffu;
    if (adversary.shuffles_warps) switch_away();
  } else {
    wait();
  }
  return slot;
}

unsigned match_any(unsigned mask, uint64_t value) {
  Warp& warp = *current->warp;
  warp.values[collective_slot()][current->lane] = value;
  const int slot = arrive_at_collective(mask);
  unsigned same = 0;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (warp.values[slot][lane] == value) same |= bit(lane);
  }
  return same;
}

// Orders the lanes' memory accesses, which the other collectives do not.
void sync_warp() {
  arrive_at_collective(0xffffffffu);
  current->stores_ordered = std::max(current->stores_ordered, current->warp->num_stores);
}

static void start(Stall& stall) { stall.until_ns = now_ns() + adversary.random.log_uniform(kLogLongestStallNs); }

// Decrements `left`. If it reaches 0, starts the stall and returns true.
static bool begins(Stall& stall, uint64_t& left) {
  if (left == 0 || --left > 0) return false;
  start(stall);
  return true;
}

bool barrier(int id, int num_threads, bool waits, bool predicate) {
  Thread& self = *current;
  Barrier& barrier = self.warp->block->barriers[id];
  if (barrier.arrived > 0 && barrier.expected != num_threads) {
    stop("barrier " + std::to_string(id) + " is called for " + std::to_string(num_threads) + " threads and for " +
         std::to_string(barrier.expected));
  }
  scheduler().note_progress();
  barrier.expected = num_threads;
  barrier.any |= predicate;
  if (std::find(barrier.warps.begin(), barrier.warps.end(), self.warp) == barrier.warps.end()) {
    barrier.warps.push_back(self.warp);
  }
  if (waits) barrier.waiting.push_back(&self);
  ++barrier.arrived;
  const bool is_last = barrier.arrived == num_threads;
  if (is_last) complete(barrier);  // which makes this thread ready, too
  if (waits && !is_last) wait();
  const bool result = self.barrier_result;
  if (self.lane == 0 && begins(self.warp->stall, self.warp->stall.barriers_left)) switch_away(true);
  return result;
}

void poll_pause() {
  Warp& warp = *current->warp;
  warp.ready &= ~bit(current->lane);
  warp.polling |= bit(current->lane);
  switch_away();
}

void maybe_preempt() {
  scheduler().note_access();
  Stall &of_warp = current->warp->stall, &of_block = current->warp->block->stall;
  if (begins(of_warp, of_warp.accesses_left) || begins(of_block, of_block.accesses_left)) switch_away(true);
  if (adversary.shuffles_warps && adversary.random.happens(adversary.switch_share)) {
    switch_away(adversary.random.happens(0.5));
  }
}

// Two threads that read a word and write it back without an atomic lose one of their updates, but only if one of them
// stops in between until the other one's update has been used. A stall at any access seldom begins just there.
void may_stall_before_writing_back() {
  if (!adversary.random.happens(adversary.stall_share)) return;
  start(current->warp->stall);
  switch_away(true);
}

uint64_t now_ns() { return scheduler().now_ns(); }

void sync_cluster() {
  Thread& self = *current;
  const Block& block = *self.warp->block;
  Launch& launch = *block.launch;
  const uint32_t cluster = block.index / launch.cluster;
  launch.cluster_arrived.resize(launch.num_blocks);
  launch.cluster_waiting.resize(launch.num_blocks);
  scheduler().note_progress();
  release_here()->settle();  // all threads see the stores at once: stronger than the barrier's release in PTX
  if (++launch.cluster_arrived[cluster] == static_cast<int>(launch.cluster * launch.block_threads)) {
    launch.cluster_arrived[cluster] = 0;
    for (Thread* thread : launch.cluster_waiting[cluster]) make_ready(*thread);
    launch.cluster_waiting[cluster].clear();
  } else {
    launch.cluster_waiting[cluster].push_back(&self);
    wait();
  }
}

// --- shared memory -------------------------------------------------------------------------------------------------

uint8_t* dynamic_shared() { return current->warp->block->shared; }

void* shared_variable(const void* tag, size_t bytes, size_t alignment) {
  Block& block = *current->warp->block;
  for (const auto& [known, variable] : block.shared_variables) {
    if (known == tag) return variable;
  }
  block.shared_used = (block.shared_used + alignment - 1) / alignment * alignment;
  if (block.shared_used + bytes > kSharedBytes) stop("a block's variables do not fit in shared memory");
  void* const variable = block.shared + block.shared_used;
  block.shared_used += bytes;
  block.shared_variables.emplace_back(tag, variable);
  return variable;
}

// A thread's copies land when it waits for them, or before.
void copy_unit_async(void* to, const void* from) {
  const auto copy = [to, from] { std::memcpy(to, from, 16); };
  if (adversary.seed != 0 && adversary.random.happens(0.5)) {
    copy();
  } else {
    current->copies.push_back(copy);
  }
}

void commit_copies() { current->copy_groups.push_back(std::exchange(current->copies, {})); }

void await_copies(int groups_left) {
  auto& groups = current->copy_groups;
  while (static_cast<int>(groups.size()) > groups_left) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

// A word in shared memory that counts one arrival, and bytes.
namespace {
struct Landed {
  int32_t bytes_expected;
  bool has_arrived;
  uint8_t phase;
  uint8_t is_valid;
};
static_assert(sizeof(Landed) <= sizeof(uint64_t));
constexpr uint8_t kIsValid = 0x5a;

Landed& landed_at(uint64_t* word) {
  auto& landed = *reinterpret_cast<Landed*>(word);
  if (landed.is_valid != kIsValid) stop("an mbarrier is used before it is initialized");
  return landed;
}

void turn_phase_if_complete(Landed& landed) {
  if (!landed.has_arrived || landed.bytes_expected != 0) return;
  landed.has_arrived = false;
  landed.phase ^= 1;
}
}  // namespace

void init_landed(uint64_t* landed) { *reinterpret_cast<Landed*>(landed) = {0, false, 0, kIsValid}; }

void expect_bytes(uint64_t* landed, uint32_t bytes) {
  Landed& word = landed_at(landed);
  if (word.has_arrived) stop("an mbarrier for one arrival gets a second one within a phase");
  word.bytes_expected += static_cast<int32_t>(bytes);
  word.has_arrived = true;
  turn_phase_if_complete(word);
}

void start_bulk_copy(uint8_t* to, const uint8_t* from, uint32_t bytes, uint64_t* landed) {
  const auto is_whole = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (bytes == 0 || bytes % 16 != 0 || !is_whole(to) || !is_whole(from)) {
    stop("a bulk copy of bytes or addresses that are not multiples of 16, or of no bytes");
  }
  current->warp->block->bulk_copies.push_back({to, from, bytes, landed});
  scheduler().add_copying(current->warp->block);
}

void land(Block& block, size_t index) {
  const BulkCopy copy = block.bulk_copies[index];
  block.bulk_copies.erase(block.bulk_copies.begin() + static_cast<std::ptrdiff_t>(index));
  std::memcpy(copy.to, copy.from, copy.bytes);
  Landed& word = landed_at(copy.landed);
  word.bytes_expected -= static_cast<int32_t>(copy.bytes);
  turn_phase_if_complete(word);
  scheduler().note_progress();
}

bool has_landed(const uint64_t* landed, uint32_t phase) {
  return landed_at(const_cast<uint64_t*>(landed)).phase != phase;
}

}  // namespace emulator
