// What Python tells the emulator: functions of the module jax_ep._emulated besides those of jax_ep._cuda.
#pragma once

#include <nanobind/nanobind.h>

namespace emulator {

void bind(nanobind::module_& module);

}  // namespace emulator
