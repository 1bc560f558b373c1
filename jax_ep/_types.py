"""What the public functions, the backends and the user give one another, and what a backend must do.

These types refer to one another, so they are in one module.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jax_ep import _checks, _layouts, _wires
from jax_ep._constants import CHANNELS_PER_SCALE
from jax_ep._dispatch_options import CheckedOptions
from jax_ep._layouts import LayoutName
from jax_ep._placement import PlanArrays
from jax_ep._scales import ScalesFormat
from jax_ep._settings import GroupSettings
from jax_ep._split_calls import BackwardCall, EndBack
from jax_ep._transport import Transport
from jax_ep._wires import GradWire, Wire


class TokenSlots(NamedTuple):
    """The slots that tokens name, for the layout "token". Both arrays are [T, K] int32; invalid slots mean "none"."""

    sent: jax.Array  # the first slot of a rank, where k is the first that names the rank; else -1
    named: jax.Array  # the slot of each pair (token, k)


class Backend(Protocol):
    """How one group moves its rows. R ranks, T tokens, K = top_k, H = hidden; `rows` are `Route.rows_shape`.

    A backend belongs to one group. The public functions check their arguments, attach the gradient rules and call these
    methods. All of them run inside `shard_map`, on one rank's operands, and are traced by JAX.
    """

    group: GroupSettings
    memory_bytes: int  # device memory held per rank, outside XLA's
    closed: bool
    transport: Transport = "host"  # how ranks reach one another's memory; in plain JAX, XLA decides
    has_grouped_gemm: bool = False  # all devices of the group can run it, and all processes have its extension
    splits_calls: bool = False  # a start and its done are two calls: it has start_dispatch_back and start_combine_back
    sends_pairs: bool = False  # in the layout "token", slots and weights travel with the rows: see dispatch

    def close(self) -> None: ...

    def check(self) -> None:
        """Raises what went wrong on a device, if anything did."""

    def stats(self) -> dict[str, Any]:
        """The counters of `GroupStats` that it knows: this process's ranks, as `_processes.ep_groups` orders them."""
        ...

    def dispatch_start(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: Any,
        topk_weights: jax.Array | None,
        *,
        zero_pad: bool,
    ) -> Any:
        """Begins a `dispatch` and waits for no peer. Returns arrays for that `dispatch`, and for nothing else."""

    def dispatch(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: Any,
        topk_weights: jax.Array | None,
        started: Any,
        *,
        zero_pad: bool,
    ) -> Dispatched:
        """Sends x [T, H] (or its (fp8, scales) pair) to the ranks of its experts and lays out what arrives.

        In the layout "token", if `sends_pairs` is True, topk_idx is a `TokenSlots`, and the result also has topk_idx,
        weights [capacity, K] and num_rows_per_rank. If it is False, topk_idx is `TokenSlots.sent`, topk_weights is
        None, and `_token_layout` sends slots and weights in a second operation.

        `started` is what a `dispatch_start` of the same operands returned, or None for a whole operation.
        """

    def dispatch_like(self, route: Route, x: jax.Array, *, zero_pad: bool) -> jax.Array:
        """Sends x [T, H'] along `route`."""

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """The transpose of dispatch: sums rows to [T, H'], and sends weights back to [T, K]. None stays None.

        With a wire, a rank casts the float32 sums that it sends to other ranks, but not those of its own tokens.

        In the layout "token", weights are [rows, K], and the backend has `sends_pairs`.
        """

    def start_dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[Any, EndBack] | None:
        """Begins a `dispatch_back`. Returns (started, end), or None if `dispatch_back` must run instead.

        `started` is the cotangent of what `dispatch_start` returned. `end(started)` ends the operation and returns what
        `dispatch_back` returns.
        """
        return None

    def combine_start(self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any, wire: Wire | None) -> Any:
        """As dispatch_start, for `combine`."""

    def combine(
        self, route: Route, y: jax.Array, weights: jax.Array, started: Any, out_dtype: Any, wire: Wire | None
    ) -> jax.Array:
        """Sums y [rows, H] times weights [rows] to [T, H]; ends a `combine_start` if given what that returned.

        With a wire, a rank casts the float32 sums that it sends to other ranks, but not those of its own tokens.
        """

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The cotangents of combine's y and, where y is given, weights, for the cotangent g [T, H] of its result.

        With a wire, every row of g is cast, also the rows that stay on their rank.
        """
        ...

    def start_combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[Any, EndBack] | None:
        """Begins a `combine_back`, as start_dispatch_back does. Returns None if `combine_back` must run instead."""
        return None

    def all_to_all(
        self, x: jax.Array, splits: jax.Array, wire: str | None, *, dequantize: bool, zero_pad: bool
    ) -> AllToAll:
        """Sends x [M, H], sorted by expert, split by splits [E]."""

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        """Returns y [R, M, H] to where all_to_all took it from: [M, H], zero beyond the splits."""

    def balance(self, topk_idx: jax.Array, tolerance_units: int) -> PlanArrays:
        """Plans the rows of topk_idx [T, K]; the tolerance is in units of 1 / TOLERANCE_UNITS_PER_ONE."""
        ...

    def replicate(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        """Copies the experts in slots [R, B]: w [E_local, ...] or [E_local + B, ...] to [E_local + B, ...]."""
        ...

    def copy_experts(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        """The copies alone: w [E_local, ...] to [B, ...]. Slots without a copy are unspecified."""
        ...

    def add_copies(self, g: jax.Array, copies: jax.Array, slots: jax.Array) -> jax.Array:
        """The transpose: adds the cotangents of copies [B, ...] to g [E_local, ...], in float32."""
        ...

    def expand(
        self,
        x: jax.Array,
        row_of_pair: jax.Array,
        counts: jax.Array,
        group_sizes: jax.Array,
        *,
        capacity: int,
        zero_pad: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """Copies x [N, H] to the rows [capacity, H] of its pairs. Returns the rows, and pair_of_row of `Expanded`.

        The rows that alignment adds to a group become zero. `zero_pad`: whether the rows after the last group become
        zero, too; otherwise, they are unspecified.
        """
        ...

    def reduce(self, y: jax.Array, weights: jax.Array | None, row_of_pair: jax.Array) -> jax.Array:
        """Sums y [capacity, H] times weights [capacity], or unweighted, over the pairs of each token: [N, H]."""
        ...

    def reduce_back(
        self, g: jax.Array, y: jax.Array | None, weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """The backward pass of `reduce`. g [N, H] is the cotangent of its result.

        Returns the cotangents of y and of weights; the second is None if y is None. They are zero in rows without a
        pair.
        """
        ...

    def __copy__(self) -> Self:
        return self  # static data of pytrees: JAX compares backends by identity

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["backend", "layout", "capacity", "alignment", "num_tokens", "tolerance_units"],
)
@dataclasses.dataclass(frozen=True)
class Route:
    """Which row of which rank each (token, k) went to: all that combine and the backward pass need."""

    arrays: Any  # the backend's own pytree of arrays
    backend: Backend
    layout: LayoutName
    capacity: int
    alignment: int
    num_tokens: int
    tolerance_units: int | None  # of the plan of `balance` along which rows went; None for no plan

    @property
    def group(self) -> GroupSettings:
        return self.backend.group

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Leading dimensions of the backend's rows on the experts' side. They have an entry per slot."""
        slots_per_rank = self.backend.group.slots_per_rank
        return _layouts.rows_shape(self.layout, capacity=self.capacity, experts_per_rank=slots_per_rank)

    @property
    def has_empty_slots(self) -> bool:
        """Whether the backend's results have slots for copies of experts, which this call does not use."""
        return bool(self.group.replicas) and self.tolerance_units is None

    @property
    def visible_rows_shape(self) -> tuple[int, ...]:
        """Leading dimensions of recv.x: those of the backend's rows, without empty slots."""
        return _layouts.rows_shape(self.layout, capacity=self.capacity, experts_per_rank=self.num_entries)

    @property
    def num_entries(self) -> int:
        """The experts of a rank that recv.counts has: without empty slots."""
        return self.group.experts_per_rank if self.has_empty_slots else self.group.slots_per_rank

    def without_empty_slots(self, rows: jax.Array) -> jax.Array:
        """`rows` [*rows_shape, ...] of the backend as [*visible_rows_shape, ...].

        Only the layout "expert" has rows of empty slots.
        """
        return rows[: self.visible_rows_shape[0]]

    def with_empty_slots(self, rows: jax.Array) -> jax.Array:
        """The inverse of `without_empty_slots`: empty slots are zero."""
        missing = self.rows_shape[0] - self.visible_rows_shape[0]
        return jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)]) if missing else rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("x", "counts", "group_sizes", "weights", "scales", "num_dropped", "route"),
        *("topk_idx", "num_rows", "num_rows_per_rank"),
    ],
    meta_fields=["scales_format", "channels_per_scale"],
)
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that a rank's experts received. A pytree of arrays; E_local = experts per rank, H = hidden.

    Rows are ordered by local expert, then source rank, then source token, then k; in the layout "token", by source
    rank, then source token. If rows went along a plan of `balance`, E_local below means E_local + B, with
    B = group.replicas: the copies of experts in the replica slots come behind the home experts.

    Attributes:
        x: [capacity, H] ("ragged" and "token" layouts) or [E_local, capacity, H] ("expert"), in the group's dtype, or
            float8_e4m3fn when `scales` is set.
        counts: [E_local] int32, rows of each local expert that hold a token. In the layout "token", the pairs
            (token, k) of each local expert.
        group_sizes: [E_local] int32, rows that each local expert occupies. These are the counts; in the ragged layout,
            they are rounded up to a multiple of `alignment`, and the added rows are zero. In the layout "token", they
            do not describe the rows of x: use those of `expand`.
        weights: float32, one per row of x; 0 in rows that hold no token. In the layout "token", [capacity, K]; 0 for
            experts of other ranks.
        scales: one per `channels_per_scale` channels of x, if rows arrive in fp8 and dequantize is False; else None.
            float32 [..., ceil(H/channels_per_scale)], or the form that `dispatch` describes under scales_format.
        num_dropped: [] int32, rows that this rank dropped because they did not fit. The number of all ranks is
            `jax.lax.psum(recv.num_dropped, axes)`, with all axes over which the tokens are split.
        route: opaque; `combine` and `dispatch_like` use it.
        topk_idx: in the layout "token", [capacity, K] int32, the local experts of each row; -1 for experts of other
            ranks, and in rows that hold no token. None in the other layouts.
        num_rows: in the layout "token", [] int32, the rows that hold a token. They come first. None in the other
            layouts.
        num_rows_per_rank: in the layout "token", [R] int32, the rows from each source rank. None in the other layouts.
        scales_format: the argument of the call (static). In the layout "token", it is the form of the scales that
            `expand` returns, and `scales` is float32.
        channels_per_scale: 32 with wire="mxfp8", else 128 (static).

    Examples:
        >>> def rows_per_rank(x, topk_idx):
        ...     recv = ep.dispatch(x, topk_idx, group=group, layout="ragged")
        ...     return jnp.sum(recv.counts)[None]
        >>> int(jnp.sum(on_each_rank(rows_per_rank)(x, topk_idx))) == topk_idx.size
        True
    """

    x: jax.Array
    counts: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    scales: jax.Array | None
    num_dropped: jax.Array
    route: Route
    topk_idx: jax.Array | None = None
    num_rows: jax.Array | None = None
    num_rows_per_rank: jax.Array | None = None
    scales_format: ScalesFormat = "float32"
    channels_per_scale: int = CHANNELS_PER_SCALE

    @property
    def group(self) -> GroupSettings:
        """The `Group` that moved the rows."""
        return self.route.group

    @property
    def row_expert(self) -> jax.Array:
        """int32, one per row of x: the row's local expert, or -1 if the row belongs to no expert.

        Use it to index parameters per expert, such as biases: bias[recv.row_expert]. JAX reads the index -1 as the last
        expert. This is harmless: combine does not read these rows, and their cotangents are zero.

        Raises:
            ValueError: recv has the layout "token", in which a row has several experts.

        Examples:
            >>> def biased(x, topk_idx, w, bias):  # bias [E_local, H]
            ...     recv = ep.dispatch(x, topk_idx, group=group, layout="ragged")
            ...     y = jax.lax.ragged_dot(recv.x, w, recv.group_sizes) + bias[recv.row_expert]
            ...     return ep.combine(y, recv)
            >>> on_each_rank(biased)(x, topk_idx, w, jnp.ones((E, H), group.dtype)).shape == x.shape
            True
        """
        route = self.route
        if route.layout == "token":
            raise ValueError("row_expert: recv has the layout 'token'; use recv.topk_idx, or expand(recv).row_expert")
        return _layouts.row_expert(self.group_sizes, layout=route.layout, capacity=route.capacity)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "counts", "group_sizes", "weights", "scales", "num_dropped", "row_of_pair", "pair_of_row"],
    meta_fields=["backend", "scales_format", "channels_per_scale"],
)
@dataclasses.dataclass(frozen=True)
class Expanded:
    """The rows that `expand` makes: the ragged layout of rows that arrived in the layout "token". A pytree of arrays.

    E_local = experts per rank (E_local + B along a plan of `balance`), H = hidden. N and K are the dimensions of
    recv.topk_idx.

    Attributes:
        x: [capacity, H], grouped by local expert; in recv.x's dtype. The rows that alignment adds to a group are zero.
            `zero_pad` of `expand` decides whether the rows after the last group are zero or unspecified.
        counts: [E_local] int32, rows of each local expert that hold a token.
        group_sizes: [E_local] int32, the counts, rounded up to a multiple of `alignment`.
        weights: [capacity] float32; 0 in rows that hold no token.
        scales: the scales of the rows, in the scales_format of the dispatch; None if recv has no scales.
        num_dropped: [] int32, rows that did not fit.
        row_of_pair: [N, K] int32, the row of each pair (row of recv, k); `capacity` for no row. `reduce` uses it.
        pair_of_row: [capacity] int32, n * K + k for the pair (n, k) of each row; N * K for no pair. `reduce` uses it.
        backend: internal (static); `reduce` uses it.
        scales_format: the form of `scales` (static): the argument of the dispatch.
        channels_per_scale: as in recv (static).

    Examples:
        >>> def is_within_the_room(x, topk_idx):
        ...     rows = ep.expand(ep.dispatch(x, topk_idx, group=group, layout="token"), alignment=8)
        ...     return (jnp.sum(rows.group_sizes) <= len(rows.x))[None]
        >>> bool(jnp.all(on_each_rank(is_within_the_room)(x, topk_idx)))
        True
    """

    x: jax.Array
    counts: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    scales: jax.Array | None
    num_dropped: jax.Array
    row_of_pair: jax.Array
    pair_of_row: jax.Array
    backend: Backend
    scales_format: ScalesFormat = "float32"
    channels_per_scale: int = CHANNELS_PER_SCALE

    @property
    def group(self) -> GroupSettings:
        """The `Group` of the dispatch."""
        return self.backend.group

    @property
    def row_expert(self) -> jax.Array:
        """[capacity] int32, the local expert of each row, and -1 in rows outside of all groups.

        Examples:
            >>> def experts_of_rows(x, topk_idx):
            ...     return ep.expand(ep.dispatch(x, topk_idx, group=group, layout="token")).row_expert
            >>> int(jnp.max(on_each_rank(experts_of_rows)(x, topk_idx))) < E // R
            True
        """
        return _layouts.row_expert(self.group_sizes, layout="ragged", capacity=len(self.x))


def route_of(op: str, recv: Any) -> Route:
    """The route of `recv`, which must be what dispatch returned."""
    if not isinstance(recv, Dispatched):
        raise TypeError(f"{op}: recv, the second argument, is {_checks.kind(recv)}; it must be what dispatch returned")
    return recv.route


@dataclasses.dataclass(frozen=True)
class DispatchCall:
    """What is static in one call of dispatch."""

    backend: Backend
    options: CheckedOptions
    num_tokens: int
    quantized: bool  # x comes as a pair (float8_e4m3fn, scales)
    tolerance_units: int | None = None  # of the plan of `balance` whose slots topk_idx holds; None for no plan
    backward: BackwardCall | None = None  # of a split-phase call

    @property
    def arrives_fp8(self) -> bool:
        return self.options.wire is not None or self.quantized

    @property
    def returns_fp8(self) -> bool:
        return self.arrives_fp8 and not self.options.dequantize

    @property
    def channels_per_scale(self) -> int:
        return _wires.channels_per_scale(self.options.wire)

    @property
    def scales_format(self) -> ScalesFormat:
        """The form in which the backend returns scales. In the layout "token", `expand` makes the form of the call."""
        return "float32" if self.options.layout == "token" else self.options.scales_format

    def route(self, arrays: Any) -> Route:
        options = self.options
        facts = options.layout, options.capacity, options.alignment, self.num_tokens, self.tolerance_units
        return Route(arrays, self.backend, *facts)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "splits", "scales"], meta_fields=["group"])
@dataclasses.dataclass(frozen=True)
class AllToAll:
    """The rows that a rank received from `all_to_all`. R ranks, M rows, E_local = experts per rank, H = hidden.

    Attributes:
        x: [R, M, H]. Block r contains the rows from rank r, sorted by local expert, starting at row 0. Rows beyond the
            sum of splits[r] are unspecified, in training, too: set them to zero before you multiply them by weights
            that you train. In the group's dtype, or float8_e4m3fn when `scales` is set.
        splits: [R, E_local] int32, rows from each rank for each local expert.
        scales: float32 [R, M, ceil(H/128)] with an fp8 wire and dequantize=False; else None.
        group: the `Group`.

    Examples:
        >>> splits = jnp.zeros((R, E), jnp.int32).at[:, 0].set(T).reshape(-1)  # each rank sends its rows to expert 0
        >>> recv = on_each_rank(lambda x, splits: ep.all_to_all(x, splits, group=group))(x, splits)
        >>> recv.x.shape == (R * R, T, H) and recv.splits.shape == (R * R, E // R)
        True
    """

    x: jax.Array
    splits: jax.Array
    scales: jax.Array | None
    group: GroupSettings
