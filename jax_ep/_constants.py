"""The numbers that Python and C++ share. scripts/write_constants.py writes them to ffi/constants.h."""

from __future__ import annotations

import enum

MAX_LOCAL_RANKS = 32  # of a group on the CUDA backend without a network: one per lane of a warp
MAX_RANKS = 256  # of a group on the CUDA backend over a network
MAX_TOP_K = 32  # experts of a token
CHANNELS_PER_SCALE = 128  # channels of an fp8 row that share one float32 scale
TOLERANCE_UNITS_PER_ONE = 4096  # units in a tolerance of 1.0: balance rounds its tolerance to whole units
MAX_BALANCE_BLOCKS = 32  # blocks of a kernel of balance that goes over all pairs (token, k)
ELSEWHERE = -1  # in place of the ordinal of a device that belongs to another process


class Layout(enum.IntEnum):
    """How received rows are arranged. jax_ep/_layouts.py and ffi/layout.h have the arithmetic."""

    EXPERT = 0  # [experts_per_rank, capacity]: every expert has `capacity` rows of its own
    RAGGED = 1  # [capacity]: one expert after the other, each rounded up to `alignment` rows
    TOKEN = 2  # [capacity]: a row per token, one source rank after the other; a token names each rank at most once


class Cast(enum.IntEnum):
    """How the sender casts rows to fp8. jax_ep/_wires.py defines the formats; the kernels give the same bits."""

    NONE = 0
    AMAX = 1  # the largest value of a block becomes 448
    POWER_OF_TWO = 2  # the same scale, rounded up to a power of two
    E5M2 = 3  # to float8_e5m2: the largest value of a block becomes 57344


class ScalesFormat(enum.IntEnum):
    """The form in which a kernel writes the scales of fp8 rows. jax_ep/_scales.py describes the forms."""

    FLOAT32 = 0
    FLOAT32_COLUMNS = 1
    UE8M0 = 2
    UE8M0_COLUMNS = 3


class FailureReason(enum.IntEnum):
    """Why a device gave up an operation. The native modules give the name in words, such as "other op"."""

    TIMEOUT = 0
    OTHER_OP = 1  # a peer is in another call
    WRONG_RANK = 2  # XLA runs another rank on this device than the group's mesh says
    SLOT_TAKEN = 3  # the operation that had the arena slot before was started and never done
    ELSEWHERE = 4  # another process, perhaps on another host, has the record
    OTHER_ORDER = 5  # devices run this group's operations and another's in different order: docs/design.md
    OVERLAP = 6  # two operations of the group run at the same time on this device
    OTHER_RUN = 7  # devices run the calls of two runs of programs in different order: ffi/cuda/call_order.h

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")
