// Python functions that control the emulator. Only the module jax_ep._emulated has them.
#pragma once

#include <nanobind/nanobind.h>

namespace emulator {

void bind(nanobind::module_& module);

}  // namespace emulator
