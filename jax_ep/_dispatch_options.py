"""The keyword arguments of `dispatch` and `dispatch_start`."""

from __future__ import annotations

import dataclasses

from jax_ep import _checks, _layouts
from jax_ep._layouts import LayoutName
from jax_ep._placement import limit_of
from jax_ep._scales import ScalesFormat
from jax_ep._settings import GroupSettings
from jax_ep._wires import DISPATCH_WIRES, GRAD_WIRES, DispatchWire, GradWire


@dataclasses.dataclass(frozen=True)
class DispatchOptions:
    """What `dispatch` documents under these names."""

    layout: LayoutName
    capacity: int | None
    capacity_factor: float | None
    alignment: int
    wire: DispatchWire | None
    grad_wire: GradWire | None
    dequantize: bool
    zero_pad: bool | None
    scales_format: ScalesFormat = "float32"

    def checked(
        self, op: str, group: GroupSettings, num_tokens: int, tolerance_units: int | None = None
    ) -> CheckedOptions:
        """The options for a call with `num_tokens` tokens per rank, with the capacity to use.

        `tolerance_units`: of the plan along which rows go; None for no plan.
        """
        _checks.choice(f"{op}: layout", self.layout, _layouts.LAYOUTS)
        _checks.wire(op, self.wire, group.hidden, formats=DISPATCH_WIRES)
        _checks.wire(op, self.grad_wire, group.hidden, "grad_wire", GRAD_WIRES)
        if self.zero_pad is not None:
            _checks.boolean(op, "zero_pad", self.zero_pad)
        _checks.boolean(op, "dequantize", self.dequantize)
        alignment = _checks.integer(f"{op}: alignment", self.alignment, 1, _checks.MAX_INT32)
        capacity = self._capacity(op, alignment, num_tokens, group, tolerance_units)
        if self.layout == "token":
            alignment = 1  # there are no groups of rows to align
        return CheckedOptions(
            self.layout,
            capacity,
            None,
            alignment,
            self.wire,
            self.grad_wire,
            self.dequantize,
            self.zero_pad,
            self.scales_format,
        )

    def _capacity(
        self, op: str, alignment: int, num_tokens: int, group: GroupSettings, tolerance_units: int | None
    ) -> int:
        """The capacity to use, checked against alignment."""
        capacity, origin = self.capacity, ""
        sizes = {"num_tokens": num_tokens, "top_k": group.top_k, "experts_per_rank": group.experts_per_rank}
        if self.capacity_factor is not None:
            if capacity is not None:
                raise ValueError(
                    f"{op}: capacity_factor is {self.capacity_factor} and capacity is {capacity}; give one of them"
                )
            factor = _checks.positive(f"{op}: capacity_factor", self.capacity_factor)
            capacity = _layouts.capacity_of_factor(self.layout, factor, **sizes, alignment=alignment)
            if self.layout == "token":
                capacity = min(capacity, most_rows_of(self.layout, group, num_tokens, tolerance_units))
            origin = f", from capacity_factor = {factor}"
        elif capacity is None:
            most_rows = most_rows_of(self.layout, group, num_tokens, tolerance_units)
            num_groups = group.experts_per_rank if tolerance_units is None else group.slots_per_rank
            capacity = _layouts.capacity_for(self.layout, most_rows, num_groups=num_groups, alignment=alignment)
            origin = ", which is enough for any routing"
            if self.layout != "token":
                origin += " that names no expert twice for a token"
        elif isinstance(capacity, float):
            raise TypeError(
                f"{op}: capacity is {capacity}, a float; it must be an int, a number of rows: for a multiple of what a "
                f"balanced router sends, give capacity_factor={capacity}"
            )
        elif _checks.integer(f"{op}: capacity", capacity, 1) % alignment:
            raise ValueError(
                f"{op}: capacity is {capacity}; it must be a multiple of alignment = {alignment}, "
                f"e.g. {_layouts.align_up(capacity, alignment)}"
            )
        # In the layout "token", `expand` numbers the pairs (row, k).
        parts = group.top_k if self.layout == "token" else group.slots_per_rank if self.layout == "expert" else 1
        largest = _checks.MAX_INT32 // parts // alignment * alignment
        if capacity > largest:
            raise ValueError(
                f"{op}: capacity is {capacity}{origin}; a rank's rows are numbered in int32, so it must be at most "
                f"{largest}: give a smaller one"
            )
        return int(capacity)


@dataclasses.dataclass(frozen=True)
class CheckedOptions(DispatchOptions):
    """Options that fit a group; the capacity is known."""

    capacity: int


def most_rows_of(layout: LayoutName, group: GroupSettings, num_tokens: int, tolerance_units: int | None) -> int:
    """The most rows that a rank (or, in the layout "expert", an expert) gets if no token names an expert twice.

    `tolerance_units`: of the plan along which rows go; None for no plan.
    """
    if tolerance_units is not None and layout == "ragged" and group.replicas == group.experts_per_rank:
        return limit_of(num_tokens * group.top_k, tolerance_units)
    return _layouts.most_rows(
        layout,
        num_ranks=group.num_ranks,
        num_tokens=num_tokens,
        top_k=group.top_k,
        experts_per_rank=group.experts_per_rank,
    )
