// Stands in for a header of NVSHMEM. nvshmem.h holds all emulated functions.
#pragma once

#include "nvshmem.h"
