"""The keyword arguments of `dispatch` and `dispatch_start`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep import _checks, _layouts
from jax_ep._layouts import LayoutName
from jax_ep._settings import GroupSettings
from jax_ep._wires import Wire


@dataclasses.dataclass(frozen=True)
class DispatchOptions:
    """What `dispatch` documents under these names."""

    layout: LayoutName
    capacity: int | None
    alignment: int
    wire: Wire | None
    dequantize: bool
    zero_pad: bool | None

    def checked(self, op: str, group: GroupSettings, num_tokens: int) -> CheckedOptions:
        """The options for a call with `num_tokens` tokens per rank, with the capacity to use."""
        _checks.choice(f"{op}: layout", self.layout, _layouts.LAYOUTS)
        _checks.wire(op, self.wire, group.hidden)
        if self.zero_pad is not None:
            _checks.boolean(op, "zero_pad", self.zero_pad)
        _checks.boolean(op, "dequantize", self.dequantize)
        alignment = _checks.integer(f"{op}: alignment", self.alignment, 1, _checks.MAX_INT32)
        capacity = _capacity(op, self.capacity, alignment, self.layout, num_tokens, group)
        return CheckedOptions(self.layout, capacity, alignment, self.wire, self.dequantize, self.zero_pad)


@dataclasses.dataclass(frozen=True)
class CheckedOptions(DispatchOptions):
    """Options that fit a group; the capacity is known."""

    capacity: int


def _capacity(op: str, capacity: Any, alignment: int, layout: LayoutName, num_tokens: int, group: GroupSettings) -> int:
    """The capacity to use, checked against alignment."""
    by_default = ", which is enough for any routing" if capacity is None else ""
    if capacity is None:
        capacity = _layouts.default_capacity(
            layout,
            num_ranks=group.num_ranks,
            num_tokens=num_tokens,
            top_k=group.top_k,
            experts_per_rank=group.experts_per_rank,
            alignment=alignment,
        )
    elif _checks.integer(f"{op}: capacity", capacity, 1) % alignment:
        raise ValueError(
            f"{op}: capacity is {capacity}; it must be a multiple of alignment = {alignment}, "
            f"e.g. {_layouts.align_up(capacity, alignment)}"
        )
    largest = _checks.MAX_INT32 // (group.experts_per_rank if layout == "expert" else 1) // alignment * alignment
    if capacity > largest:
        raise ValueError(
            f"{op}: capacity is {capacity}{by_default}; a rank's rows are numbered in int32, so it must be at most "
            f"{largest}: give a smaller one"
        )
    return int(capacity)
