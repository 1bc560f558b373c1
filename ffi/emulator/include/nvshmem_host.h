// Of NVSHMEM; nvshmem.h has all of it.
#pragma once

#include "nvshmem.h"
