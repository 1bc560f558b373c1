// Which blocks are on a device, which warp runs next, and what time it is.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/emulator/machine.h"

namespace emulator {

inline constexpr size_t kSharedBytes = size_t{227} << 10;  // of a block, and of an SM
inline constexpr int kThreadsPerSm = 2048;

// machine.cc's part in it.
void start_threads(Block& block);
void free_threads(Block& block);
void run_warp(Warp& warp);
void land(Block& block, size_t copy);

struct Sm {
  int threads_left = kThreadsPerSm;
  int64_t shared_left = kSharedBytes;
  uint64_t taken_until_ns = 0;  // by something else, as an adversary has it
};

struct Device {
  int ordinal = 0;
  int num_sms = 0;  // that it reports
  std::vector<Sm> sms;
  int resident_blocks = 0;
};

// What a stream runs, one after the other.
struct Work {
  std::unique_ptr<Launch> launch;         // a kernel,
  std::function<void()> call;             // or a call of the host's,
  std::shared_ptr<bool> waits_for, sets;  // or a wait for an event, or its record
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

  // Runs a warp or starts something. False if nothing can be done until the host does something, or time passes.
  bool step();
  void let_time_pass(uint64_t ns) {
    now_ns_ += ns;
    turns_without_progress_ = 0;
  }
  // Lets the time pass: to when a launch that is late begins, or by a part of a time-out.
  void skip_time();
  bool is_idle(int ordinal = -1) const;  // no stream has work: of one device, or of all
  bool has_late_launch() const;          // one that an adversary holds back

  void add_ready(Warp* warp) { ready_.push_back(warp); }
  void add_polling(Warp* warp) { polling_.push_back(warp); }
  void add_copying(Block* block) { copying_.push_back(block); }
  void end_block(Block* block);
  // A block has left, or it or one of its warps stalls: its stores settle soon.
  void settle_stores_soon(const std::shared_ptr<BlockStores>& stores);
  // Something has happened that others may wait for.
  void note_progress() {
    turns_without_progress_ = 0;
    ++progress_;
  }
  void note_access() { now_ns_ += 2; }
  uint64_t now_ns() const { return now_ns_; }

 private:
  void advance_streams();
  bool advance(Stream& stream);
  void begin_launch(Launch& launch);
  uint64_t lateness();
  void start_blocks(Device& device, Launch& launch);
  Sm* find_sm(Device& device, const Launch& launch);
  void start_block(Device& device, Sm& sm, Launch& launch, uint32_t index);
  void free_ended_blocks();
  void settle_due_stores();
  uint64_t end_of_delay() const;
  bool land_some(double share);
  void run(std::deque<Warp*>& from);
  bool end_stalls(bool at_once);
  std::string report() const;

  int num_sms_ = 2;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::deque<Warp*> ready_, polling_;
  std::vector<std::pair<Warp*, std::deque<Warp*>*>> stalled_;                 // and where they are to go
  std::deque<std::pair<uint64_t, std::shared_ptr<BlockStores>>> due_stores_;  // deadlines, and the stores of blocks
  std::vector<Block*> blocks_, copying_, ended_;  // on a device; with copies in flight; to be freed
  size_t turns_without_progress_ = 0;
  uint64_t progress_ = 0, progress_at_skip_ = 0;
  uint32_t turn_ = 0;
  uint64_t now_ns_ = 1'000'000, skip_ns_ = 0;
  int num_skips_ = 0;  // since something has happened
  bool streams_may_advance_ = false;
};

Scheduler& scheduler();

}  // namespace emulator
