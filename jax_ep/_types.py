"""What passes between the public functions, the backends and the user: pytrees of arrays with their static facts."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jax_ep import _compat, _layouts
from jax_ep._errors import SplitCallError

if TYPE_CHECKING:
    from jax_ep._backends import Backend
    from jax_ep._group import Group


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["group", "layout", "capacity", "alignment", "num_tokens"],
)
@dataclasses.dataclass(frozen=True)
class Route:
    """Which row of which rank each (token, k) went to: all that combine and the backward pass need."""

    arrays: Any  # the backend's own pytree of arrays
    group: Group
    layout: str
    capacity: int
    alignment: int
    num_tokens: int

    @property
    def backend(self) -> Backend:
        return self.group._backend_for(self.num_tokens)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Leading dimensions of the rows on the experts' side."""
        return _layouts.rows_shape(self.layout, capacity=self.capacity, experts_per_rank=self.group.experts_per_rank)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "counts", "group_sizes", "weights", "scales", "num_dropped", "route"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that a rank's experts received. A pytree of arrays; E_local = experts per rank, H = hidden.

    Rows are ordered by local expert, then source rank, then source token, then k.

    Attributes:
        x: [E_local, capacity, H] ("expert" layout) or [capacity, H] ("ragged"), in the group's dtype, or
            float8_e4m3fn when `scales` is set.
        counts: [E_local] int32, rows of each local expert that hold a token.
        group_sizes: [E_local] int32, rows that each local expert takes up: counts, rounded up to `alignment` in the
            ragged layout, where the rows so added are zero.
        weights: float32, one per row of x; 0 in rows that hold no token.
        scales: None, or float32 [..., H/128], one per 128 channels of x.
        num_dropped: [] int32, rows that this rank had no room for.
        route: opaque; what `combine` and `dispatch_like` follow.
    """

    x: jax.Array
    counts: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    scales: jax.Array | None
    num_dropped: jax.Array
    route: Route

    @property
    def group(self) -> Group:
        """The `Group` that moved the rows."""
        return self.route.group


@dataclasses.dataclass(frozen=True)
class DispatchCall:
    """What is static in one call of dispatch."""

    group: Group
    layout: str
    capacity: int
    alignment: int
    num_tokens: int
    wire: str | None
    quantized: bool  # x comes as a pair (float8_e4m3fn, scales)
    dequantize: bool
    zero_pad: bool | None

    @property
    def returns_fp8(self) -> bool:
        return (self.wire is not None or self.quantized) and not self.dequantize

    @property
    def backend(self) -> Backend:
        return self.group._backend_for(self.num_tokens)

    def route(self, arrays: Any) -> Route:
        return Route(arrays, self.group, self.layout, self.capacity, self.alignment, self.num_tokens)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "splits", "scales"], meta_fields=["group"])
@dataclasses.dataclass(frozen=True)
class AllToAll:
    """What a rank received. R ranks, M rows, E_local = experts per rank, H = hidden.

    Attributes:
        x: [R, M, H]; block r holds what rank r sent, sorted by local expert and packed from row 0. Rows beyond
            the sum of splits[r] are unspecified.
        splits: [R, E_local] int32, rows from each rank for each local expert.
        scales: None, or float32 [R, M, H/128] with an fp8 wire.
        group: the `Group`.
    """

    x: jax.Array
    splits: jax.Array
    scales: jax.Array | None
    group: Group


@partial(jax.tree_util.register_dataclass, data_fields=["operands"], meta_fields=["op", "group", "static"])
@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """An operation that was started; opaque, to be given to its `*_done` once."""

    operands: Any
    op: str
    group: Group
    static: Any
    _trace: Any = dataclasses.field(default_factory=_compat.current_trace, init=False, repr=False)
    _done: list[str] = dataclasses.field(default_factory=list, init=False, repr=False)

    def take(self) -> Any:
        """The operands; an error where it shows while tracing that a start is done more than once.

        An inner function (of a scan, say) may run any number of times, and is traced once. So it may not end what it
        closes over, but what it is given as an argument, which is a new object in its trace.
        """
        if self._done:
            raise SplitCallError(f"{self.op}_done: pending was done before; call {self.op}_start again for each done")
        if _compat.current_trace() != self._trace:
            raise SplitCallError(
                f"{self.op}_done: pending was started outside of the function that is being traced, which may run more "
                "than once; give it to that function as an argument"
            )
        self._done.append(self.op)
        return self.operands
