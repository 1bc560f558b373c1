// Stands in for CUDA's header of this name.
#pragma once

#include "ffi/emulator/cuda_api.h"
#include "ffi/emulator/device_code.h"
