// Which blocks are on a device, which warp runs next, and what time it is.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/emulator/machine.h"
#include "ffi/emulator/runtime.h"

namespace emulator {

inline constexpr int kThreadsPerSm = 2048;

// Defined in machine.cc.
void start_threads(Block& block);
void free_threads(Block& block);
void run_warp(Warp& warp);
void land(Block& block, size_t copy);

struct Sm {
  int threads_left = kThreadsPerSm;
  int64_t shared_left = kSharedBytes;
  uint64_t taken_until_ns = 0;  // the adversary lets other work occupy the SM until then
};

struct Device {
  int ordinal = 0;
  int num_sms = 0;  // that it reports
  std::vector<Sm> sms;
  int resident_blocks = 0;
};

// What a stream runs, one after the other.
struct Work {
  std::unique_ptr<Launch> launch;         // a kernel, or null
  std::function<void()> call;             // a host function, or null
  std::shared_ptr<bool> waits_for, sets;  // the event that this work waits for, and the event that it records
};
struct Stream {
  Device* device = nullptr;
  std::deque<Work> work;  // the first runs
  bool is_closed = false;
};
struct Event {
  std::shared_ptr<bool> recorded;  // null if it never was
};

class Scheduler {
 public:
  Device* device(int ordinal);
  Stream* add_stream(int ordinal);
  void add_work(Stream& stream, Work work);
  void set_num_sms(int num_sms);

  // Performs one step: runs a warp, starts blocks, or settles stores. Returns false if nothing can happen until the
  // host acts or time advances.
  bool step();
  void advance_time(uint64_t ns) {
    now_ns_ += ns;
    steps_without_progress_ = 0;
  }
  // Advances virtual time when all fibers wait: to the end of the next delay that the adversary has chosen (a launch
  // begins or ends, or an SM is free), or else by an interval, which grows while nothing happens. Stops the program if
  // nothing happens for longer than any time-out.
  void skip_time();
  bool is_idle(int ordinal = -1) const;  // no stream has work: of one device, or of all
  bool has_late_launch() const;          // one that an adversary holds back

  void add_ready(Warp* warp) { ready_.push_back(warp); }
  void add_polling(Warp* warp) { polling_.push_back(warp); }
  void add_copying(Block* block) { copying_.push_back(block); }
  void end_block(Block* block);
  // Records an event that a waiting thread may wait for, such as a store.
  void note_progress() {
    steps_without_progress_ = 0;
    ++progress_;
  }
  void note_access() { now_ns_ += 2; }
  uint64_t now_ns() const { return now_ns_; }
  // Resets the time and all counters to their first values. All streams must be empty.
  void reset();

 private:
  void advance_streams();
  bool advance(Stream& stream);
  void begin_launch(Launch& launch);
  uint64_t lateness();
  void start_blocks(Device& device, Launch& launch);
  Sm* find_sm(Device& device, const Launch& launch);
  void start_block(Device& device, Sm& sm, Launch& launch, uint32_t index);
  void free_ended_blocks();
  uint64_t end_of_delay() const;
  bool land_some(double share);
  void run(std::deque<Warp*>& from);
  bool end_stalls(bool at_once);
  std::string report() const;

  int num_sms_ = 2;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::deque<Warp*> ready_, polling_;
  std::vector<std::pair<Warp*, std::deque<Warp*>*>> stalled_;  // warps, and the queue to which each returns
  std::vector<Block*> blocks_, copying_, ended_;  // resident; with bulk copies in flight; ended, to be freed
  static constexpr uint64_t kStartNs = 1'000'000;
  size_t steps_without_progress_ = 0;
  uint64_t progress_ = 0, progress_at_skip_ = 0;
  uint32_t num_steps_ = 0;
  uint64_t now_ns_ = kStartNs, skip_ns_ = 0, first_skip_at_ns_ = kStartNs;
  int num_skips_ = 0;  // since something has happened
  bool streams_may_advance_ = false;
};

Scheduler& scheduler();

}  // namespace emulator
