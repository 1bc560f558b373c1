// Fibers: stacks that one operating-system thread switches between, in a few nanoseconds.
#pragma once

#include <cstddef>

namespace emulator {

// Saves the registers that a call preserves, stores the stack pointer in `*from`, and continues at `to`.
extern "C" void jax_ep_switch_fiber(void** from, void* to);

// Stacks are reused. give_stack_back() is false if the stack was too small: it has run over its end.
inline constexpr size_t kStackBytes = 128 * 1024;
void* take_stack();
bool give_stack_back(void* stack);

// Prepares a stack such that the first switch to the returned stack pointer calls `entry`, which must not return.
void* new_fiber(void* stack, void (*entry)());

}  // namespace emulator
