// The emulated GPUs: devices with streams, launches, blocks, warps and threads. A thread is a fiber, and one thread of
// the operating system runs all fibers of all devices, so that a seed decides everything that happens.
//
// A fiber runs until it waits (for its warp, a barrier, or in a loop that polls) or, under an adversary, until any
// access to memory that other blocks see. docs/emulator.md says what is emulated and what is not.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/emulator/cuda_api.h"
#include "ffi/emulator/weak_memory.h"

namespace emulator {

inline constexpr int kWarpLanes = 32;
inline constexpr int kMaxBarriers = 16;

struct Block;
struct Warp;

struct Thread {
  uint32_t index = 0;  // in the block
  Warp* warp = nullptr;
  int lane = 0;
  void* stack = nullptr;
  void* stack_pointer = nullptr;
  uint32_t collectives = 0;     // warp collectives that this thread has called
  uint32_t stores_ordered = 0;  // other lanes' stores with a smaller number happen before the next access
  bool barrier_result = false;
  std::vector<std::function<void()>> copies;  // cp.async: of the group that is not committed yet
  std::vector<std::vector<std::function<void()>>> copy_groups;
  std::vector<std::shared_ptr<Release>> seen_releases;  // by relaxed loads, for a later fence
  const void* word_read_last = nullptr;                 // by a load, of at most 8 bytes
  std::shared_ptr<Release> fence;                       // what a fence has ordered before later stores
};

// A pause of a block or a warp, chosen by the adversary.
struct Stall {
  uint64_t accesses_left = 0, barriers_left = 0;  // until it begins; 0: never
  uint64_t until_ns = 0;
};

struct Warp {
  Block* block = nullptr;
  int number = 0;
  std::vector<Thread> lanes;
  // As bits, by lane. A thread that is in no set waits for its warp or at a barrier.
  uint32_t ready = 0, polling = 0, ended = 0;
  bool is_queued = false, is_polling_queued = false;  // with the scheduler
  // Warp collectives alternate between two slots: no lane is more than one collective ahead of another.
  int arrived[2] = {};
  uint64_t values[2][kWarpLanes];
  uint64_t reduced[2];
  // For weak_memory.cc. num_stores: the stores of this warp so far. ordered: by warp of the block, the stores with a
  // smaller number happen before this warp's next access.
  uint32_t num_stores = 0;
  std::vector<uint32_t> ordered;
  Stall stall;
};

struct Barrier {
  int expected = 0, arrived = 0;
  bool any = false;
  std::vector<Thread*> waiting;
  std::vector<Warp*> warps;
};

// A bulk copy that has not landed yet.
struct BulkCopy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  uint64_t* landed;
};

struct Device;
struct Launch;
struct Sm;

struct Block {
  uint32_t index = 0;  // in the launch
  Launch* launch = nullptr;
  Device* device = nullptr;
  Sm* sm = nullptr;
  int num_running = 0;  // threads that have not ended
  std::vector<Warp> warps;
  Barrier barriers[kMaxBarriers];
  uint8_t* shared = nullptr;  // dynamic shared memory, and behind it the static variables
  size_t shared_used = 0;
  std::vector<std::pair<const void*, void*>> shared_variables;  // by the tag of the place in the code
  std::vector<BulkCopy> bulk_copies;
  std::shared_ptr<BlockStores> stores;
  bool holds_stores = false;  // the adversary holds all of them
  Stall stall;
};

extern Thread* current;  // the thread that runs

// --- what device code calls ----------------------------------------------------------------------------------------

[[noreturn]] void stop(const std::string& why);  // an error of the program under test: prints where, and aborts

// Gives the processor to the warp's other lanes, or to other warps, until all lanes have arrived. Returns the slot.
int arrive_at_collective(unsigned mask);
int collective_slot();

template <typename T, typename Source>
T exchange(unsigned mask, T value, Source source) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = *current->warp;
  const int lane = current->lane;
  std::memcpy(&warp.values[collective_slot()][lane], &value, sizeof(T));
  const int slot = arrive_at_collective(mask);
  std::memcpy(&value, &warp.values[slot][source(lane)], sizeof(T));
  return value;
}

template <typename T, typename Combine>
T reduce(unsigned mask, T value, Combine combine) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = *current->warp;
  const int own = collective_slot();
  T total = value;
  if (warp.arrived[own] > 0) {
    std::memcpy(&total, &warp.reduced[own], sizeof(T));
    total = combine(total, value);
  }
  std::memcpy(&warp.reduced[own], &total, sizeof(T));
  const int slot = arrive_at_collective(mask);
  std::memcpy(&total, &warp.reduced[slot], sizeof(T));
  return total;
}

unsigned match_any(unsigned mask, uint64_t value);
void sync_warp();

// bar.sync for `num_threads` threads, or bar.arrive if `waits` is false. With `waits`, returns true if `predicate` was
// true in any thread.
bool barrier(int id, int num_threads, bool waits, bool predicate = false);

// Called in each turn of a loop that polls: other threads run before the next look.
void poll_pause();

// Called before each access to memory that others use, and after a wait for a bulk copy: the adversary may let other
// threads run.
void maybe_preempt();
// A store calls this if its address is the last word that the thread has loaded. The adversary may stall the warp here.
void may_stall_before_writing_back();

uint64_t now_ns();  // virtual time

uint8_t* dynamic_shared();
void* shared_variable(const void* tag, size_t bytes, size_t alignment);
template <typename Tag>
inline char shared_tag = 0;

void copy_unit_async(void* to, const void* from);
void commit_copies();
void await_copies(int groups_left);
void start_bulk_copy(uint8_t* to, const uint8_t* from, uint32_t bytes, uint64_t* landed);
void init_landed(uint64_t* landed);
void expect_bytes(uint64_t* landed, uint32_t bytes);
bool has_landed(const uint64_t* landed, uint32_t phase);
void sync_cluster();

// --- what the runtime calls ----------------------------------------------------------------------------------------

struct Launch {
  Stream* stream = nullptr;
  uint32_t num_blocks = 0, block_threads = 0;
  size_t shared_bytes = 0;
  uint32_t cluster = 1;  // blocks that start together
  std::function<void()> kernel;
  uint64_t not_before_ns = 0, no_end_before_ns = 0;  // delays chosen by the adversary
  std::vector<uint32_t> order;                       // in which blocks start
  uint32_t num_started = 0, num_ended = 0;
  std::vector<std::shared_ptr<BlockStores>> stores;  // of blocks that have ended
  std::vector<int> cluster_arrived;
  std::vector<std::vector<Thread*>> cluster_waiting;
};

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> run);

}  // namespace emulator
