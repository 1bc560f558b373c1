#include "ffi/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
__asm__(R"(
.text
.globl jax_ep_switch_fiber
.hidden jax_ep_switch_fiber
.type jax_ep_switch_fiber, @function
jax_ep_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jax_ep_switch_fiber, .-jax_ep_switch_fiber
)");
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl jax_ep_switch_fiber
.hidden jax_ep_switch_fiber
.type jax_ep_switch_fiber, %function
jax_ep_switch_fiber:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size jax_ep_switch_fiber, .-jax_ep_switch_fiber
)");
#else
#error "The emulator switches fibers on x86-64 and aarch64 only."
#endif

namespace emulator {
namespace {

constexpr uint64_t kUntouched = 0x5354414b454e4421;  // at the end of each stack

std::vector<void*>& free_stacks() {
  static auto* stacks = new std::vector<void*>;
  return *stacks;
}

}  // namespace

void* take_stack() {
  if (free_stacks().empty()) {
    // Many at once, without unmapped pages between them: Linux limits the number of mappings.
    constexpr size_t kStacks = 64;
    void* memory = mmap(nullptr, kStacks * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = 0; i < kStacks; ++i) {
      void* const stack = static_cast<uint8_t*>(memory) + i * kStackBytes;
      *static_cast<uint64_t*>(stack) = kUntouched;
      free_stacks().push_back(stack);
    }
  }
  void* stack = free_stacks().back();
  free_stacks().pop_back();
  return stack;
}

bool give_stack_back(void* stack) {
  free_stacks().push_back(stack);
  return *static_cast<const uint64_t*>(stack) == kUntouched;
}

void* new_fiber(void* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(stack) + kStackBytes);
#if defined(__x86_64__)
  uint64_t* frame = top - 8;  // six registers, the address of `entry`, and a return address that is never used
  std::memset(frame, 0, 8 * sizeof(uint64_t));
  frame[6] = reinterpret_cast<uint64_t>(entry);
#else
  uint64_t* frame = top - 20;
  std::memset(frame, 0, 20 * sizeof(uint64_t));
  frame[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  return frame;
}

}  // namespace emulator
