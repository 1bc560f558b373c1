#include "ffi/emulator/network.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "ffi/emulator/adversary.h"
#include "ffi/emulator/machine.h"
#include "ffi/emulator/runtime.h"
#include "ffi/emulator/scheduler.h"
#include "ffi/emulator/weak_memory.h"

namespace emulator {
namespace {

constexpr uint32_t kPieceBytes = 8;

// One allocation on several devices.
struct Symmetric {
  int64_t bytes;
  std::map<int, uint8_t*> memory;  // by device
  bool is_complete;                // A device has asked for the memory of another one. No device joins from here on.
};

// Sender, receiver, and how many fences the sender had called before. Puts of a smaller number arrive first.
using Channel = std::tuple<int, int, uint32_t>;

struct Put {
  Channel channel;
  std::shared_ptr<Release> release;  // orders the sender's stores before the data, or before a word without data
  uint8_t* to;
  const uint8_t* from;
  std::vector<uint32_t> pieces;  // first bytes of the data's pieces that have not arrived
  Word word;                     // at the receiver
  bool is_held;                  // deliver_some() skips it
};

// Never destroyed: fibers may run while the process ends.
auto& symmetric = *new std::vector<Symmetric>;
auto& under_way = *new std::vector<Put>;
auto& num_under_way = *new std::map<Channel, int>;  // channels without puts have no entry
auto& num_fences = *new std::map<int, uint32_t>;    // by device

int device_here() {
  int ordinal = 0;
  if (current != nullptr) return current->warp->block->device->ordinal;
  cudaGetDevice(&ordinal);
  return ordinal;
}

// The symmetric memory that holds an address of a device, and the address's offset there. Stops the program if the
// address is in none.
std::pair<Symmetric*, int64_t> find(const void* address, int ordinal) {
  for (Symmetric& allocation : symmetric) {
    const auto here = allocation.memory.find(ordinal);
    if (here == allocation.memory.end()) continue;
    const int64_t offset = static_cast<const uint8_t*>(address) - here->second;
    if (offset >= 0 && offset < allocation.bytes) return {&allocation, offset};
  }
  stop("an address that is not in this device's symmetric memory");
}

// Whether no put is in flight that must arrive before this one.
bool may_arrive(const Put& put) {
  const auto& [from, to, fences] = put.channel;
  return num_under_way.lower_bound({from, to, 0})->first == put.channel;
}

// Delivers at most `most_pieces` pieces of a put's data; if all data has arrived, delivers the word and forgets the
// put.
void deliver_part(size_t index, uint32_t most_pieces) {
  Put& put = under_way[index];
  scheduler().note_progress();
  if (!put.pieces.empty()) {
    put.release->settle();  // What the sender stored before the put is part of the data.
    for (; most_pieces > 0 && !put.pieces.empty(); --most_pieces) {
      std::swap(put.pieces[adversary.random.below(static_cast<uint32_t>(put.pieces.size()))], put.pieces.back());
      std::memcpy(put.to + put.pieces.back(), put.from + put.pieces.back(), kPieceBytes);
      put.pieces.pop_back();
    }
    if (put.pieces.empty()) put.release = nullptr;
    return;
  }
  write_settled(put.word.address, &put.word.value, put.word.bytes, put.release);
  const auto in_channel = num_under_way.find(put.channel);
  if (--in_channel->second == 0) num_under_way.erase(in_channel);
  std::swap(put, under_way.back());
  under_way.pop_back();
}

void deliver_all() {
  while (!under_way.empty()) {
    for (size_t i = under_way.size(); i-- > 0;) {
      if (i < under_way.size() && may_arrive(under_way[i])) deliver_part(i, UINT32_MAX);
    }
  }
}

void send(Put put, int pe) {
  const int from = device_here();
  put.channel = {from, pe, num_fences[from]};
  put.is_held = current->warp->block->holds_stores || adversary.random.happens(adversary.held_share);
  ++num_under_way[put.channel];
  under_way.push_back(std::move(put));
  if (!adversary.delays_stores) deliver_all();
}

uint8_t* address_at(int pe, const void* address) {
  const auto [allocation, offset] = find(address, device_here());
  allocation->is_complete = true;
  const auto there = allocation->memory.find(pe);
  return there == allocation->memory.end() ? nullptr : there->second + offset;
}

uint8_t* address_of_receiver(int pe, const void* address) {
  uint8_t* const there = address_at(pe, address);
  if (there == nullptr) stop("a put to a device without this memory");
  return there;
}

Word word_of_receiver(int pe, const Word& word) {
  return {address_of_receiver(pe, word.address), word.value, word.bytes};
}

}  // namespace

uint8_t* allocate_symmetric(int64_t bytes) {
  const Lock lock;
  const int ordinal = device_here();
  uint8_t* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) return nullptr;
  std::memset(memory, 0, bytes);
  const auto lacks_this = [=](const Symmetric& allocation) {
    return allocation.bytes == bytes && !allocation.is_complete && allocation.memory.count(ordinal) == 0;
  };
  auto found = std::find_if(symmetric.begin(), symmetric.end(), lacks_this);
  if (found == symmetric.end()) found = symmetric.insert(found, {bytes, {}, false});
  found->memory[ordinal] = memory;
  return memory;
}

void free_symmetric(uint8_t* memory) {
  {
    const Lock lock;
    deliver_all();
    const int ordinal = device_here();
    Symmetric* const allocation = find(memory, ordinal).first;
    allocation->is_complete = true;
    allocation->memory.erase(ordinal);
    if (allocation->memory.empty()) symmetric.erase(symmetric.begin() + (allocation - symmetric.data()));
  }
  cudaFree(memory);
}

uint8_t* symmetric_address(const void* address, int pe) {
  const Lock lock;
  return address_at(pe, address);
}

void put(void* to, const void* from, uint32_t bytes, const Word& signal, int pe) {
  maybe_preempt();
  if (bytes % kPieceBytes != 0) stop("a put of bytes that are not a multiple of 8");
  find(from, device_here());
  Put put = {};
  put.to = address_of_receiver(pe, to);
  put.from = static_cast<const uint8_t*>(from);
  for (uint32_t piece = 0; piece < bytes; piece += kPieceBytes) put.pieces.push_back(piece);
  put.word = word_of_receiver(pe, signal);
  put.release = release_here();
  send(std::move(put), pe);
}

void put_word(const Word& word, int pe) {
  maybe_preempt();
  Put put = {};
  put.word = word_of_receiver(pe, word);
  put.release = current->fence;
  send(std::move(put), pe);
}

void fence_puts() {
  maybe_preempt();
  ++num_fences[device_here()];
}

bool has_puts() { return !under_way.empty(); }

bool deliver_some(double share) {
  const double wanted = share * static_cast<double>(under_way.size());
  auto count = static_cast<size_t>(wanted);
  if (adversary.random.happens(wanted - static_cast<double>(count))) ++count;
  bool any = false;
  for (; count > 0 && !under_way.empty(); --count) {
    const size_t index = adversary.random.below(static_cast<uint32_t>(under_way.size()));
    const Put& put = under_way[index];
    if (put.is_held || !may_arrive(put)) continue;
    deliver_part(index, 1 + adversary.random.below(64));
    any = true;
  }
  return any;
}

bool deliver_held() {
  const bool any = !under_way.empty();
  for (size_t i = under_way.size(); i-- > 0;) {
    if (adversary.random.happens(0.5) || i >= under_way.size()) continue;
    if (may_arrive(under_way[i])) deliver_part(i, UINT32_MAX);
  }
  return any;
}

}  // namespace emulator
