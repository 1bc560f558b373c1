"""Ways to move tokens to experts and back: jax_ep's own, and what one writes in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ep as ep
from jax_ep.bench.cases import Case

AXIS = "ep"


class Exchange(Protocol):
    """A way to move tokens to experts and back. Its methods run inside shard_map, on one rank's operands."""

    @property
    def casts(self) -> bool:
        """Whether `rows` is work: a cast of what arrived."""
        ...

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        """Moves x [T, H]; a pytree that has `group_sizes` [E_local] int32."""

    def rows(self, recv: Any) -> jax.Array:
        """What arrived, by expert, in the case's dtype: [E_local, capacity, H] or [capacity, H]."""
        ...

    def combine(self, y: jax.Array, recv: Any) -> jax.Array:
        """Brings y, shaped like `rows`, back and sums it: [T, H]."""
        ...


@dataclasses.dataclass(frozen=True)
class EpExchange:
    """jax_ep's own."""

    group: ep.Group
    layout: str
    wire: str | None

    @property
    def casts(self) -> bool:
        return self.wire is not None

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> ep.Dispatched:
        return ep.dispatch(x, topk_idx, topk_weights, group=self.group, layout=self.layout, wire=self.wire)

    def rows(self, recv: ep.Dispatched) -> jax.Array:
        return ep.dequantize(recv)

    def combine(self, y: jax.Array, recv: ep.Dispatched) -> jax.Array:
        return ep.combine(y, recv)

    def backward(self, g: jax.Array, y: jax.Array, recv: ep.Dispatched) -> jax.Array:
        """The backward pass of a pair, for the cotangent g [T, H] of its result: that of its x.

        It runs the two operations by themselves, as their gradient rules do: the gradient of a whole pair would have
        its forward pass in the same executable.
        """
        backend = recv.route.backend
        y_cotangent, weights_cotangent = backend.combine_back(recv.route, g, y, recv.weights)
        x_cotangent, _ = backend.dispatch_back(recv.route, y_cotangent, weights_cotangent)
        assert x_cotangent is not None
        return x_cotangent


class Blocks(NamedTuple):
    """Where the rows to, or from, each rank lie in a buffer: [R] int32 each."""

    starts: jax.Array
    sizes: jax.Array


class LaxReceived(NamedTuple):
    x: jax.Array  # [capacity, H]
    group_sizes: jax.Array  # [E_local] int32
    topk_weights: jax.Array  # [T, K]
    slot_of_copy: jax.Array  # [T, K] int32, place of each copy of a token in the buffer to be sent
    row_of_slot: jax.Array  # [slots] int32, row of x for each place in the buffer that arrived
    outgoing: Blocks
    incoming: Blocks


@dataclasses.dataclass(frozen=True)
class LaxExchange:
    """What one writes in plain JAX: sort the copies of the tokens by expert, exchange, sort what arrives; and back.

    Rows travel in the case's dtype and arrive in the ragged layout, whatever the case's wire and layout.
    """

    case: Case
    ragged: bool  # lax.ragged_all_to_all, or else lax.all_to_all of blocks padded to the worst case
    casts = False

    @property
    def _slots(self) -> int:
        """Rows of the buffer that arrives: the most that all ranks together may send to one."""
        return self.case.ranks * self._slots_per_rank

    @property
    def _slots_per_rank(self) -> int:
        return self.case.tokens * min(self.case.top_k, self.case.experts_per_rank)

    @property
    def _slots_sent(self) -> int:
        return self.case.tokens * self.case.top_k if self.ragged else self._slots

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> LaxReceived:
        case = self.case
        x, topk_idx = lax.optimization_barrier((x, topk_idx))  # or else XLA would sort once for a whole chain
        expert = topk_idx.reshape(-1)
        copies = jnp.argsort(expert, stable=True)  # token * K + k, in the order of experts
        splits = jnp.bincount(expert, length=case.experts).reshape(case.ranks, -1)
        arriving = lax.all_to_all(splits, AXIS, 0, 0)  # [source rank, E_local]
        outgoing, incoming = self._blocks(splits.sum(axis=1)), self._blocks(arriving.sum(axis=1))

        slots = _places(outgoing.starts, outgoing.sizes, copies.size)
        token_of_slot = jnp.zeros(self._slots_sent, jnp.int32).at[slots].set(copies // case.top_k)
        arrived = self._move(x[token_of_slot], self._slots, outgoing, incoming)

        # Rows are ordered by expert, then source rank; slots by source rank, then expert.
        chunk_starts = incoming.starts[:, None] + jnp.cumsum(arriving, axis=1) - arriving
        slot_of_row = _places(chunk_starts.T.reshape(-1), arriving.T.reshape(-1), self._slots)
        return LaxReceived(
            x=arrived.at[slot_of_row].get(mode="fill", fill_value=0),
            group_sizes=arriving.sum(axis=0),
            topk_weights=topk_weights,
            slot_of_copy=jnp.zeros_like(copies).at[copies].set(slots).reshape(topk_idx.shape),
            row_of_slot=jnp.zeros(self._slots, jnp.int32).at[slot_of_row].set(jnp.arange(self._slots), mode="drop"),
            outgoing=outgoing,
            incoming=incoming,
        )

    def rows(self, recv: LaxReceived) -> jax.Array:
        return recv.x

    def combine(self, y: jax.Array, recv: LaxReceived) -> jax.Array:
        back = self._move(y[recv.row_of_slot], self._slots_sent, recv.incoming, recv.outgoing)
        terms = back[recv.slot_of_copy].astype(jnp.float32) * recv.topk_weights[..., None]  # [T, K, H]
        return terms.sum(axis=1).astype(y.dtype)

    def _blocks(self, sizes: jax.Array) -> Blocks:
        starts = jnp.cumsum(sizes) - sizes if self.ragged else jnp.arange(self.case.ranks) * self._slots_per_rank
        return Blocks(starts.astype(jnp.int32), sizes.astype(jnp.int32))

    def _move(self, buffer: jax.Array, slots: int, outgoing: Blocks, incoming: Blocks) -> jax.Array:
        if not self.ragged:
            return lax.all_to_all(buffer, AXIS, 0, 0, tiled=True)
        return lax.ragged_all_to_all(
            buffer,
            jnp.zeros((slots, self.case.hidden), buffer.dtype),
            outgoing.starts,
            outgoing.sizes,
            lax.all_to_all(incoming.starts, AXIS, 0, 0, tiled=True),
            incoming.sizes,
            axis_name=AXIS,
        )


def _places(starts: jax.Array, sizes: jax.Array, total: int) -> jax.Array:
    """For `total` items, of which each chunk in turn holds sizes[i]: their place if that chunk starts at starts[i].

    Items beyond the last chunk get a place far beyond any buffer.
    """
    item = jnp.arange(total, dtype=jnp.int32)
    shift = jnp.repeat(starts - (jnp.cumsum(sizes) - sizes), sizes, total_repeat_length=total)
    return jnp.where(item < sizes.sum(), item + shift, np.iinfo(np.int32).max)
