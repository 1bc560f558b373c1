#include "ffi/emulator/scheduler.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/network.h"

namespace emulator {

constexpr uint64_t kNsPerStep = 10;
// Without this limit, a step is slow if many stores are pending: most picks are held stores, which do not settle.
constexpr double kMaxPicksPerStep = 16;
constexpr double kHeldSettleShare = 0.0003;  // the fraction of the steps at which settle_held() runs
constexpr uint32_t kLogLongestNs = 22;       // log2 of the longest delay of a launch
constexpr int kSlowSkips = 40;
constexpr uint64_t kFirstSkipNs = 1'000'000, kLongestEarlySkipNs = 125'000'000, kShareOfWait = 32;
// Four times the longest time-out (ffi/cuda/group.cc), because skips grow, and so a thread may notice its time-out
// late.
constexpr uint64_t kLongestWaitNs = 4'000'000'000'000'000;
// A device has more SMs than it reports, so that several launches fit beside one another as they do on a GPU of 132
// SMs.
constexpr int kSmsPerReported = 4;
constexpr int64_t kStaticSharedBytes = 16 << 10;  // what a kernel's static variables take at most

Scheduler& scheduler() {
  static auto* scheduler = new Scheduler;  // never destroyed: fibers may run while the process ends
  return *scheduler;
}

// --- devices, streams and launches ---------------------------------------------------------------------------------

Device* Scheduler::device(int ordinal) {
  for (const auto& device : devices_) {
    if (device->ordinal == ordinal) return device.get();
  }
  auto& device = devices_.emplace_back(std::make_unique<Device>());
  device->ordinal = ordinal;
  device->num_sms = num_sms_;
  device->sms.resize(kSmsPerReported * num_sms_);
  return device.get();
}

void Scheduler::set_num_sms(int num_sms) {
  num_sms_ = num_sms;
  for (const auto& device : devices_) {
    if (device->resident_blocks > 0) continue;
    device->num_sms = num_sms;
    device->sms.assign(kSmsPerReported * num_sms, Sm{});
  }
}

Stream* Scheduler::add_stream(int ordinal) {
  auto& stream = streams_.emplace_back(std::make_unique<Stream>());
  stream->device = device(ordinal);
  return stream.get();
}

void Scheduler::add_work(Stream& stream, Work work) {
  if (work.launch) begin_launch(*work.launch);
  stream.work.push_back(std::move(work));
  streams_may_advance_ = true;
}

bool Scheduler::is_idle(int ordinal) const {
  return std::all_of(streams_.begin(), streams_.end(), [=](const auto& stream) {
    return stream->work.empty() || (ordinal >= 0 && stream->device->ordinal != ordinal);
  });
}

void Scheduler::begin_launch(Launch& launch) {
  launch.order.resize(launch.num_blocks / launch.cluster);
  std::iota(launch.order.begin(), launch.order.end(), 0);
  if (adversary.shuffles_blocks) {
    for (size_t i = launch.order.size(); i > 1; --i) {
      std::swap(launch.order[i - 1], launch.order[adversary.random.below(static_cast<uint32_t>(i))]);
    }
  }
  launch.not_before_ns = now_ns_ + lateness();
}

void Scheduler::reset() {
  if (!is_idle()) stop("reset_scheduler() while streams have work");
  steps_without_progress_ = progress_ = progress_at_skip_ = num_steps_ = 0;
  now_ns_ = first_skip_at_ns_ = kStartNs, skip_ns_ = 0, num_skips_ = 0;
}

// Returns a random delay of the begin or the end of a launch, in nanoseconds.
uint64_t Scheduler::lateness() {
  if (!adversary.delays_launches || !adversary.random.happens(adversary.late_share)) return 0;
  return adversary.random.log_uniform(kLogLongestNs);
}

void Scheduler::advance_streams() {
  streams_may_advance_ = false;
  for (bool again = true; again;) {  // an event of one stream may let another go on
    again = false;
    for (size_t i = 0; i < streams_.size(); ++i) {
      while (advance(*streams_[i])) again = true;
    }
  }
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                [](const auto& stream) { return stream->is_closed && stream->work.empty(); }),
                 streams_.end());
}

// Advances the first work of the stream. Returns true if it is complete, and was removed.
bool Scheduler::advance(Stream& stream) {
  if (stream.work.empty()) return false;
  Work& work = stream.work.front();
  if (work.waits_for && !*work.waits_for) return false;
  if (work.sets) *work.sets = true;
  if (work.call) work.call();
  if (work.launch) {
    start_blocks(*stream.device, *work.launch);
    if (work.launch->num_ended < work.launch->num_blocks || now_ns_ < work.launch->no_end_before_ns) return false;
    for (const auto& stores : work.launch->stores) settle_all(*stores);
  }
  stream.work.pop_front();
  note_progress();
  return true;
}

void Scheduler::start_blocks(Device& device, Launch& launch) {
  if (now_ns_ < launch.not_before_ns) return;
  while (launch.num_started < launch.num_blocks) {
    std::vector<Sm*> sms;
    for (uint32_t i = 0; i < launch.cluster; ++i) {
      // A cluster starts as a whole; the emulator does not ask whether a real GPU's SMs would hold it.
      Sm* const sm = launch.cluster > 1 ? &device.sms[i % device.sms.size()] : find_sm(device, launch);
      if (sm == nullptr) return;
      sms.push_back(sm);
    }
    if (launch.cluster > 1 && device.resident_blocks > 0) return;
    const uint32_t first = launch.order[launch.num_started / launch.cluster] * launch.cluster;
    for (uint32_t i = 0; i < launch.cluster; ++i) start_block(device, *sms[i], launch, first + i);
    launch.num_started += launch.cluster;
    note_progress();
  }
}

// An SM with room for a block of the launch, or null.
Sm* Scheduler::find_sm(Device& device, const Launch& launch) {
  if (adversary.resident_blocks != 0 && device.resident_blocks >= adversary.resident_blocks) return nullptr;
  for (Sm& sm : device.sms) {
    if (adversary.delays_launches && sm.taken_until_ns <= now_ns_ && adversary.random.happens(0.02)) {
      sm.taken_until_ns = now_ns_ + adversary.random.below(1'000'000);
    }
    if (sm.taken_until_ns > now_ns_) continue;
    if (sm.threads_left < static_cast<int>(launch.block_threads)) continue;
    if (sm.shared_left < static_cast<int64_t>(launch.shared_bytes) + kStaticSharedBytes) continue;
    return &sm;
  }
  return nullptr;
}

void Scheduler::start_block(Device& device, Sm& sm, Launch& launch, uint32_t index) {
  auto* block = new Block;
  block->index = index;
  block->launch = &launch;
  block->device = &device;
  block->sm = &sm;
  block->shared = static_cast<uint8_t*>(std::aligned_alloc(128, kSharedBytes + 128 - kSharedBytes % 128));
  block->shared_used = launch.shared_bytes;
  // What shared memory holds is whatever was there: nobody may rely on it.
  std::memset(block->shared, static_cast<int>(adversary.random.next()), launch.shared_bytes + kStaticSharedBytes);
  block->stores = std::make_shared<BlockStores>();
  block->holds_stores = adversary.delays_stores && adversary.random.happens(adversary.held_blocks_share);
  sm.threads_left -= static_cast<int>(launch.block_threads);
  sm.shared_left -= static_cast<int64_t>(launch.shared_bytes) + kStaticSharedBytes;
  ++device.resident_blocks;
  blocks_.push_back(block);
  start_threads(*block);
}

void Scheduler::end_block(Block* block) {
  if (!block->bulk_copies.empty()) stop("a block ends before its bulk copies have landed");
  Launch& launch = *block->launch;
  launch.stores.push_back(block->stores);
  block->sm->threads_left += static_cast<int>(launch.block_threads);
  block->sm->shared_left += static_cast<int64_t>(launch.shared_bytes) + kStaticSharedBytes;
  --block->device->resident_blocks;
  if (++launch.num_ended == launch.num_blocks) launch.no_end_before_ns = now_ns_ + lateness();
  streams_may_advance_ = true;
  note_progress();
  blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
  ended_.push_back(block);
}

// A block is not freed when it ends, because its last thread still runs on its stack then.
void Scheduler::free_ended_blocks() {
  for (Block* block : ended_) {
    const auto is_here = [=](const Warp* warp) { return warp->block == block; };
    ready_.erase(std::remove_if(ready_.begin(), ready_.end(), is_here), ready_.end());
    polling_.erase(std::remove_if(polling_.begin(), polling_.end(), is_here), polling_.end());
    free_threads(*block);
    std::free(block->shared);
    delete block;
  }
  ended_.clear();
}

// --- turns ---------------------------------------------------------------------------------------------------------

bool Scheduler::land_some(double share) {
  bool any = false;
  for (size_t i = 0; i < copying_.size();) {
    Block* const block = copying_[i];
    for (size_t copy = 0; copy < block->bulk_copies.size();) {
      if (adversary.random.happens(share)) {
        land(*block, copy);
        any = true;
      } else {
        ++copy;
      }
    }
    if (block->bulk_copies.empty()) {
      copying_.erase(copying_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return any;
}

static uint64_t end_of_stall(const Warp& warp) { return std::max(warp.stall.until_ns, warp.block->stall.until_ns); }

void Scheduler::run(std::deque<Warp*>& from) {
  if (adversary.shuffles_warps) {
    std::swap(from.front(), from[adversary.random.below(static_cast<uint32_t>(from.size()))]);
  }
  Warp* const warp = from.front();
  from.pop_front();
  if (end_of_stall(*warp) > now_ns_) {
    stalled_.emplace_back(warp, &from);
    return;
  }
  (&from == &ready_ ? warp->is_queued : warp->is_polling_queued) = false;
  run_warp(*warp);
}

// Queues the warps whose stall, and whose block's stall, is over. With `at_once`, first advances time to the end of the
// earliest stall. Returns true if it queued a warp.
bool Scheduler::end_stalls(bool at_once) {
  if (stalled_.empty()) return false;
  const auto end_of = [](const auto& stalled) { return end_of_stall(*stalled.first); };
  const auto sooner = [=](const auto& a, const auto& b) { return end_of(a) < end_of(b); };
  if (at_once) now_ns_ = std::max(now_ns_, end_of(*std::min_element(stalled_.begin(), stalled_.end(), sooner)));
  const auto is_over = [=](const auto& stalled) { return end_of(stalled) <= now_ns_; };
  const auto over = std::stable_partition(stalled_.begin(), stalled_.end(), std::not_fn(is_over));
  const bool any = over != stalled_.end();
  for (auto stalled = over; stalled != stalled_.end(); ++stalled) stalled->second->push_back(stalled->first);
  stalled_.erase(over, stalled_.end());
  return any;
}

bool Scheduler::step() {
  free_ended_blocks();
  now_ns_ += kNsPerStep;
  ++num_steps_;
  const uint64_t before = progress_;
  if (streams_may_advance_ || num_steps_ % 64 == 0) advance_streams();
  if (!copying_.empty()) land_some(adversary.settle_share);
  if (!stalled_.empty()) end_stalls(false);
  if (adversary.delays_stores) {
    settle_some(adversary.settle_share, kMaxPicksPerStep);
    if (adversary.random.happens(kHeldSettleShare)) settle_held();
    if (has_puts()) {
      deliver_some(adversary.settle_share);
      if (adversary.random.happens(kHeldSettleShare)) deliver_held();
    }
  }
  const bool polls = adversary.shuffles_warps ? adversary.random.happens(0.2) : num_steps_ % 8 == 0;
  // A polling thread may be preempted between two loads. Then it is in ready_, although it makes no progress.
  const size_t patience = ready_.empty() ? 2 * polling_.size() + 2 : 64 * (ready_.size() + polling_.size()) + 2000;
  if (ready_.size() + polling_.size() > 0 && ++steps_without_progress_ <= patience) {
    run(ready_.empty() || (polls && !polling_.empty()) ? polling_ : ready_);
    return true;
  }
  // Everybody waits.
  if (land_some(1)) return true;
  if (settle_some(0.5) || settle_some(1)) return true;
  if (has_puts() && (deliver_some(0.5) || deliver_some(1))) return true;
  advance_streams();
  if (progress_ != before) return true;
  return end_stalls(true) || settle_held() || deliver_held();
}

// When the next launch or SM is free that an adversary holds back.
uint64_t Scheduler::end_of_delay() const {
  uint64_t next = UINT64_MAX;
  for (const auto& stream : streams_) {
    if (stream->work.empty() || !stream->work.front().launch) continue;
    const Launch& launch = *stream->work.front().launch;
    if (launch.num_ended == launch.num_blocks && launch.no_end_before_ns > now_ns_) {
      next = std::min(next, launch.no_end_before_ns);
    }
    if (launch.num_started == launch.num_blocks) continue;
    if (launch.not_before_ns > now_ns_) next = std::min(next, launch.not_before_ns);
    for (const Sm& sm : stream->device->sms) {
      if (sm.taken_until_ns > now_ns_) next = std::min(next, sm.taken_until_ns);
    }
  }
  return next;
}

bool Scheduler::has_late_launch() const { return end_of_delay() != UINT64_MAX; }

// What the threads wait for.
std::string Scheduler::report() const {
  std::string text;
  for (const auto& stream : streams_) {
    if (stream->work.empty()) continue;
    text += "\n  device " + std::to_string(stream->device->ordinal) + ", stream: ";
    const Work& work = stream->work.front();
    if (work.waits_for) text += "waits for an event";
    if (!work.launch) continue;
    text += std::to_string(work.launch->num_started) + " blocks of " + std::to_string(work.launch->num_blocks) +
            " started, " + std::to_string(work.launch->num_ended) + " ended, " +
            std::to_string(work.launch->block_threads) + " threads and " + std::to_string(work.launch->shared_bytes) +
            " bytes of shared memory each";
  }
  for (const Block* block : blocks_) {
    text += "\n  device " + std::to_string(block->device->ordinal) + ", block " + std::to_string(block->index) +
            " of " + std::to_string(block->launch->num_blocks) + ":";
    for (const Warp& warp : block->warps) {
      text += " warp " + std::to_string(warp.number) + " (" + std::to_string(__builtin_popcount(warp.ended)) +
              " ended, " + std::to_string(__builtin_popcount(warp.polling)) + " poll, " +
              std::to_string(warp.arrived[0] + warp.arrived[1]) + " in a collective)";
    }
    for (int id = 0; id < kMaxBarriers; ++id) {
      const Barrier& barrier = block->barriers[id];
      if (barrier.arrived == 0) continue;
      text += " barrier " + std::to_string(id) + " (" + std::to_string(barrier.arrived) + " of " +
              std::to_string(barrier.expected) + ")";
    }
  }
  return text;
}

void Scheduler::skip_time() {
  const uint64_t next = end_of_delay();
  steps_without_progress_ = 0;
  if (next != UINT64_MAX) {
    now_ns_ = next;
    streams_may_advance_ = true;
    return;
  }
  if (ready_.empty() && polling_.empty()) stop("deadlock: nothing can go on" + report());
  // Time advances slowly at first, because wait_for() reads some words only at every 64th poll. After kSlowSkips skips,
  // each skip is twice as long as the one before, until a thread makes progress. But no skip is longer than
  // kLongestEarlySkipNs, or 1 / kShareOfWait of the time without progress if that is longer. So threads poll often
  // enough between their first long wait and their time-out: wait_for() and find_deadlocked_peer() need several times
  // 64 polls.
  if (progress_ != progress_at_skip_) num_skips_ = 0, first_skip_at_ns_ = now_ns_;
  progress_at_skip_ = progress_;
  if (num_skips_ < kSlowSkips) skip_ns_ = kFirstSkipNs;
  now_ns_ += skip_ns_;
  if (now_ns_ - first_skip_at_ns_ > kLongestWaitNs) {
    stop("no thread has made progress for longer than any time-out: a wait has no deadline" + report());
  }
  const uint64_t longest = std::max(kLongestEarlySkipNs, (now_ns_ - first_skip_at_ns_) / kShareOfWait);
  if (++num_skips_ >= kSlowSkips) skip_ns_ = std::min(2 * skip_ns_, longest);
}

}  // namespace emulator
