"""Ways to move tokens to experts and back: jax_ep, plain JAX, and no communication."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_ep as ep
from jax_ep import _layouts, _token_layout
from jax_ep._group import BackendName
from jax_ep._layouts import LayoutName
from jax_ep._wires import DispatchWire, GradWire, Wire
from jax_ep.bench.cases import Case

AXIS = "ep"
_NOWHERE = np.iinfo(np.int32).max  # an index past the end of every array


def open_group(case: Case, mesh: Mesh, backend: BackendName, replicas: int = 0) -> ep.Group:
    """Makes the group for a case on a mesh with the axis AXIS. The caller closes it."""
    return ep.Group(
        mesh,
        AXIS,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=case.tokens,
        dtype=case.dtype,
        num_sms=case.num_sms,
        backend=backend,
        replicas=replicas,
    )


class Exchange(Protocol):
    """A way to move tokens to experts and back. Its methods run inside shard_map, on one rank's operands."""

    @property
    def computes_rows(self) -> bool:
        """True if `rows` casts or multiplies. The bench then computes the outputs before it times a chain."""
        ...

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        """Moves x [T, H] to the experts. Returns a pytree that has `group_sizes` [E_local] int32."""

    def rows(self, recv: Any) -> jax.Array:
        """Returns the outputs of experts that change nothing: the rows that arrived, in the case's dtype.

        [E_local, capacity, H] or [capacity, H], by expert. In the layout "token", each row times the sum of its
        weights.
        """
        ...

    def scaled_rows(self, recv: Any, factors: jax.Array) -> jax.Array:
        """Returns the outputs of experts that multiply by their factor in factors [E_local]."""
        ...

    def combine(self, y: jax.Array, recv: Any) -> jax.Array:
        """Brings y, which has the shape of `rows`, back to the tokens and sums it: [T, H]."""
        ...


@dataclasses.dataclass(frozen=True)
class EpExchange:
    """The exchange of jax_ep."""

    group: ep.Group
    layout: LayoutName
    wire: DispatchWire | None
    combine_wire: Wire | None = None
    grad_wire: GradWire | None = None
    capacity: int | None = None
    capacity_factor: float | None = None
    zero_pad: bool | None = None

    @property
    def computes_rows(self) -> bool:
        return self.wire is not None or self.layout == "token"

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> ep.Dispatched:
        return ep.dispatch(
            x,
            topk_idx,
            topk_weights,
            group=self.group,
            layout=self.layout,
            capacity=self.capacity,
            capacity_factor=self.capacity_factor,
            wire=self.wire,
            dequantize=False,
            zero_pad=self.zero_pad,
        )

    def rows(self, recv: ep.Dispatched) -> jax.Array:
        rows = ep.dequantize(recv)
        return rows if self.layout != "token" else _times(rows, jnp.sum(recv.weights, axis=-1))

    def scaled_rows(self, recv: ep.Dispatched, factors: jax.Array) -> jax.Array:
        rows = ep.dequantize(recv)
        if self.layout != "token":
            return _times_factors(rows, recv.group_sizes, factors)
        assert recv.topk_idx is not None
        return _times(rows, jnp.sum(recv.weights * factors[recv.topk_idx], axis=-1))

    def combine(self, y: jax.Array, recv: ep.Dispatched) -> jax.Array:
        return ep.combine(y, recv, wire=self.combine_wire)

    def backward(self, g: jax.Array, y: jax.Array, recv: ep.Dispatched) -> jax.Array:
        """Runs the backward pass of a pair. g [T, H] is the cotangent of its result; returns the cotangent of x.

        It calls the two backward operations directly, as the gradient rules do. jax.grad of a pair would also run the
        forward pass in the same executable.
        """
        backend, wire = recv.route.backend, self.grad_wire
        if recv.topk_idx is not None:  # the layout "token", in which the weights belong to the experts
            y_cotangent, _ = backend.combine_back(recv.route, g, None, jnp.sum(recv.weights, axis=-1), wire)
            x_cotangent, _ = _token_layout.dispatch_back(recv.route, recv.topk_idx, y_cotangent, recv.weights, wire)
        else:
            y_cotangent, weights_cotangent = backend.combine_back(recv.route, g, y, recv.weights, wire)
            x_cotangent, _ = backend.dispatch_back(recv.route, y_cotangent, weights_cotangent, wire)
        assert x_cotangent is not None
        return x_cotangent


class Blocks(NamedTuple):
    """The position in a buffer of the rows to, or from, each rank: [R] int32 each."""

    starts: jax.Array
    sizes: jax.Array


class Copies(NamedTuple):
    """The positions of K copies of each token in a buffer of rows, and their weights in the sum."""

    row_of_copy: jax.Array  # [T, K] int32
    copy_of_row: jax.Array  # [rows] int32: token * K + k
    weights: jax.Array  # [T, K]


class LaxReceived(NamedTuple):
    x: jax.Array  # [E_local, capacity, H] or [capacity, H]
    group_sizes: jax.Array  # [E_local] int32
    sent: Copies
    arrival_of_row: jax.Array  # [rows of x] int32: position of each row in the buffer that arrived
    row_of_arrival: jax.Array  # [rows of the buffer that arrived] int32
    outgoing: Blocks
    incoming: Blocks


@dataclasses.dataclass(frozen=True)
class LaxExchange:
    """An exchange in plain JAX: sorts copies of the tokens by expert, exchanges them, and sorts the rows that arrive.

    Rows travel in the case's dtype, also if the case has a wire. It drops no rows. If a routing sends more than
    `rows_per_pair` rows from one rank to another, or more rows than the capacity, the results are wrong.
    """

    case: Case
    ragged: bool  # True: lax.ragged_all_to_all; False: lax.all_to_all of padded blocks
    capacity: int | None = None  # as in jax_ep.dispatch
    rows_per_pair: int | None = None  # rows of a padded block; None: the most that one rank can send to another
    computes_rows = False

    @property
    def _num_arrivals(self) -> int:
        """The number of rows of the buffer that arrives."""
        case = self.case
        return case.ranks * (self.rows_per_pair or case.tokens * min(case.top_k, case.experts_per_rank))

    @property
    def _num_sent(self) -> int:
        """The number of rows of the buffer that is sent."""
        return self.case.tokens * self.case.top_k if self.ragged else self._num_arrivals

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> LaxReceived:
        case = self.case
        x, topk_idx = lax.optimization_barrier((x, topk_idx))  # without it, XLA sorts once for a whole chain
        splits = jnp.bincount(topk_idx.reshape(-1), length=case.experts).reshape(case.ranks, -1)
        arriving = lax.all_to_all(splits, AXIS, 0, 0)  # [source rank, E_local]
        outgoing, incoming = self._blocks(splits.sum(axis=1)), self._blocks(arriving.sum(axis=1))
        sent = _sort_copies(topk_idx, topk_weights, outgoing.starts, outgoing.sizes, self._num_sent)
        arrived = self._move(_expand(x, sent), self._num_arrivals, outgoing, incoming)

        # The rows of the result are in the order of experts, then source ranks. The rows of the buffer that arrives are
        # in the order of source ranks, then experts.
        chunk_starts = incoming.starts[:, None] + jnp.cumsum(arriving, axis=1) - arriving
        arrivals = _places(chunk_starts.T.reshape(-1), arriving.T.reshape(-1), self._num_arrivals)
        group_sizes = arriving.sum(axis=0)
        first_row, shape = _layout(case, self.capacity, group_sizes)
        rows = _places(first_row, group_sizes, self._num_arrivals)
        arrival_of_row = _scatter(arrivals, rows, math.prod(shape))
        row_of_arrival = _scatter(rows, arrivals, self._num_arrivals)
        return LaxReceived(
            x=_take(arrived, arrival_of_row, row_of_arrival).reshape(*shape, -1),
            group_sizes=group_sizes,
            sent=sent,
            arrival_of_row=arrival_of_row,
            row_of_arrival=row_of_arrival,
            outgoing=outgoing,
            incoming=incoming,
        )

    def rows(self, recv: LaxReceived) -> jax.Array:
        return recv.x

    def scaled_rows(self, recv: LaxReceived, factors: jax.Array) -> jax.Array:
        return _times_factors(recv.x, recv.group_sizes, factors)

    def combine(self, y: jax.Array, recv: LaxReceived) -> jax.Array:
        returned = _take(y.reshape(-1, y.shape[-1]), recv.row_of_arrival, recv.arrival_of_row)
        return _sum(self._move(returned, self._num_sent, recv.incoming, recv.outgoing), recv.sent)

    def _blocks(self, sizes: jax.Array) -> Blocks:
        starts = (
            _starts(sizes) if self.ragged else jnp.arange(self.case.ranks) * (self._num_arrivals // self.case.ranks)
        )
        return Blocks(starts.astype(jnp.int32), sizes.astype(jnp.int32))

    def _move(self, buffer: jax.Array, num_rows: int, outgoing: Blocks, incoming: Blocks) -> jax.Array:
        if not self.ragged:
            return lax.all_to_all(buffer, AXIS, 0, 0, tiled=True)
        return lax.ragged_all_to_all(
            buffer,
            jnp.zeros((num_rows, self.case.hidden), buffer.dtype),
            outgoing.starts,
            outgoing.sizes,
            lax.all_to_all(incoming.starts, AXIS, 0, 0, tiled=True),
            incoming.sizes,
            axis_name=AXIS,
        )


class LocalReceived(NamedTuple):
    x: jax.Array  # [E_local, capacity, H] or [capacity, H]
    group_sizes: jax.Array  # [E_local] int32
    kept: Copies


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """No communication: each copy of a token goes to the expert of its own rank that has the same local index.

    The local work of an exchange remains. One gather sorts the copies by local expert and writes them to the rows of
    the layout. Another gather sums the outputs with the weights. If all ranks hold the same experts, a layer has the
    same results as with communication. As with LaxExchange, no rows are dropped.
    """

    case: Case
    capacity: int | None = None
    computes_rows = False

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> LocalReceived:
        expert = topk_idx % self.case.experts_per_rank
        group_sizes = jnp.bincount(expert.reshape(-1), length=self.case.experts_per_rank)
        first_row, shape = _layout(self.case, self.capacity, group_sizes)
        kept = _sort_copies(expert, topk_weights, first_row, group_sizes, math.prod(shape))
        return LocalReceived(_expand(x, kept).reshape(*shape, -1), group_sizes, kept)

    def rows(self, recv: LocalReceived) -> jax.Array:
        return recv.x

    def scaled_rows(self, recv: LocalReceived, factors: jax.Array) -> jax.Array:
        return _times_factors(recv.x, recv.group_sizes, factors)

    def combine(self, y: jax.Array, recv: LocalReceived) -> jax.Array:
        return _sum(y.reshape(-1, y.shape[-1]), recv.kept)


def _sort_copies(expert: jax.Array, weights: jax.Array, starts: jax.Array, sizes: jax.Array, num_rows: int) -> Copies:
    """Sorts the copies of the tokens by expert [T, K]. Chunk i has sizes[i] copies, and starts at row starts[i]."""
    copies = jnp.argsort(expert.reshape(-1), stable=True)  # token * K + k, in the order of experts
    rows = _places(starts, sizes, copies.size)
    row_of_copy = _scatter(rows, copies, copies.size).reshape(expert.shape)
    return Copies(row_of_copy, _scatter(copies, rows, num_rows), weights)


def _expand(x: jax.Array, copies: Copies) -> jax.Array:
    """Writes each token's copies to their rows."""
    token_of_row = copies.copy_of_row // copies.row_of_copy.shape[1]  # past the end for a row without a token
    return _take(x, token_of_row, copies.row_of_copy)


def _sum(rows: jax.Array, copies: Copies) -> jax.Array:
    """Returns the weighted sum over each token's copies: [T, H]."""
    terms = _take(rows, copies.row_of_copy, copies.copy_of_row).astype(jnp.float32) * copies.weights[..., None]
    return terms.sum(axis=1).astype(rows.dtype)


def _times(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies each row of rows [N, H] by its factor in factors [N]."""
    return (rows.astype(jnp.float32) * factors[:, None]).astype(rows.dtype)


def _times_factors(rows: jax.Array, group_sizes: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies the rows of each expert by the expert's factor."""
    if rows.ndim == 3:
        return rows * factors.astype(rows.dtype)[:, None, None]
    return _times(rows, jnp.repeat(factors, group_sizes, total_repeat_length=rows.shape[0]))


def _layout(case: Case, capacity: int | None, group_sizes: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns the first row of each group, [E_local] int32, and the leading dimensions of the buffer."""
    sizes = {"num_tokens": case.tokens, "top_k": case.top_k, "experts_per_rank": case.experts_per_rank, "alignment": 1}
    if capacity is None and case.capacity_factor is not None:
        capacity = _layouts.capacity_of_factor(case.layout, case.capacity_factor, **sizes)
    capacity = capacity or _layouts.default_capacity(case.layout, num_ranks=case.ranks, **sizes)
    shape = _layouts.rows_shape(case.layout, capacity=capacity, experts_per_rank=case.experts_per_rank)
    return _layouts.place_rows(
        group_sizes[:, None], layout=case.layout, capacity=capacity, alignment=1
    ).first_row, shape


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes


def _places(starts: jax.Array, sizes: jax.Array, total: int) -> jax.Array:
    """Returns the positions of `total` items. Chunk i holds the next sizes[i] items, and starts at starts[i].

    An item after the last chunk gets _NOWHERE.
    """
    item = jnp.arange(total, dtype=jnp.int32)
    shift = jnp.repeat(starts - _starts(sizes), sizes, total_repeat_length=total)
    return jnp.where(item < sizes.sum(), item + shift, _NOWHERE)


def _scatter(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """Returns an array of `size` elements: values [n] at their places, and _NOWHERE in all others."""
    return jnp.full(size, _NOWHERE, jnp.int32).at[places].set(values, mode="drop")


@jax.custom_vjp
def _take(x: jax.Array, index: jax.Array, places: jax.Array) -> jax.Array:
    """Returns x[index], with zeros for an index past the end.

    `places` [rows of x, ...] holds the positions of each row of x in the result. With them, the gradient is a gather.
    JAX's own gradient is a scatter, which is slow on GPUs.
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _take_forward(x: jax.Array, index: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x, index, places), places


def _take_backward(places: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    rows = g.reshape(-1, g.shape[-1]).at[places.reshape(len(places), -1)].get(mode="fill", fill_value=0)
    return rows.sum(axis=1, dtype=jnp.float32).astype(g.dtype), None, None


_take.defvjp(_take_forward, _take_backward)
