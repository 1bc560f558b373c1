"""The backend in pure JAX for GPUs that cannot run the kernels: one copy of a row crosses per destination rank.

The reference backend gathers all tokens of the group on every rank. This backend gathers only the ids and the weights.
The receiver works out its rows from them, as the reference does. Then it tells each source which tokens it wants, in
which order: source and receiver share a list with an entry per token. The tokens of the entries travel in rounds of a
fixed number of entries. Each round is one all_to_all. The ranks of a group agree on the number of rounds at run time,
so that a balanced routing takes few rounds.

A token may have rows at several experts of one rank. The entries with the most rows come first, so that only the first
rounds have entries with many rows. The receiver runs a round's layers one after the other: layer j holds the j-th row
of every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat, _layouts, _wires
from jax_ep._backends.reference import ReferenceBackend, _from_bits, _size, _to_bits
from jax_ep._layouts import take
from jax_ep._types import DispatchCall, Route
from jax_ep._wires import GradWire

Carry = TypeVar("Carry")

LEAST_ROUND = 64  # entries per pair of ranks: a smaller round would cost more in latency than its padding does


class CollectivesRoute(NamedTuple):
    """One rank's part of a route. Each pair of ranks has a list of entries, cut into rounds of N entries.

    The first array is also in the route of the reference backend. An index one past the end means "none".
    """

    row: jax.Array  # [R, T, K] int32, this rank's row of each (source rank, token, k)
    num_rounds: jax.Array  # [] int32, rounds that are not empty, the same on all ranks of the group
    num_layers: jax.Array  # [rounds] int32, the most rows that an entry of the round has at this rank
    entry_row: jax.Array  # [rounds, K, R * N] int32, this rank's row of each (layer, source rank, entry), by rising k
    sent_token: jax.Array  # [rounds, R, N] int32, the token that this rank sends in each (destination rank, entry)


class CollectivesBackend(ReferenceBackend):
    """Moves rows by `lax.all_to_all` in rounds. It takes from the reference all that does not move rows."""

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[jax.Array, jax.Array | None]:
        num_rows, weights = _size(route.rows_shape), weights.reshape(-1)
        y = None if y is None else _to_carry(y.reshape(num_rows, -1))
        zeros = jnp.zeros((num_rows, g.shape[-1]), _carry_dtype(g.dtype)), jnp.zeros(num_rows, jnp.float32)
        zeros, y, weights = _compat.vary((zeros, y, weights), ())

        def place(
            cotangents: tuple[jax.Array, jax.Array], row: jax.Array, arrived: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            of_y, of_weights = cotangents
            rows = arrived.astype(jnp.float32) if wire is None else _wires.unpack(arrived, g.shape[-1], wire)
            weighted = (rows * take(weights, row)[..., None]).astype(g.dtype)
            of_y = of_y.at[row].set(_to_carry(weighted), mode="drop")
            if y is not None:
                products = jnp.sum(rows * _from_bits(take(y, row), g.dtype).astype(jnp.float32), axis=-1)
                of_weights = of_weights.at[row].set(products, mode="drop")
            return of_y, of_weights

        of_y, of_weights = self._receive(route, g if wire is None else _wires.pack(g, wire), zeros, place)
        of_y = _from_bits(of_y, g.dtype).reshape(*route.rows_shape, -1)
        return of_y, None if y is None else of_weights.reshape(route.rows_shape)

    def _rows(self, route: Route, x: jax.Array) -> jax.Array:
        def place(rows: jax.Array, row: jax.Array, arrived: jax.Array) -> jax.Array:
            return rows.at[row].set(_to_carry(arrived), mode="drop")

        rows = jnp.zeros((_size(route.rows_shape), *x.shape[1:]), _carry_dtype(x.dtype))
        rows = self._receive(route, x, rows, place)
        return _from_bits(rows, x.dtype).reshape(*route.rows_shape, *x.shape[1:])

    def _receive(
        self, route: Route, x: jax.Array, initial: Carry, place: Callable[[Carry, jax.Array, jax.Array], Carry]
    ) -> Carry:
        """Sends x [T, ...] along `route`.

        Calls place(carry, row [R * N], arrived [R * N, ...]) for each layer of each round of N entries, with carry =
        `initial` at first. Returns the last carry.
        """
        arrays: CollectivesRoute = route.arrays
        initial, x, arrays = _compat.vary((initial, x, arrays), ())

        def run_round(i: jax.Array, carry: Carry) -> Carry:
            arrived = self._exchange(take(x, arrays.sent_token[i])).reshape(-1, *x.shape[1:])

            def run_layer(layer: jax.Array, carry: Carry) -> Carry:
                return place(carry, arrays.entry_row[i, layer], arrived)

            return lax.fori_loop(0, arrays.num_layers[i], run_layer, carry)

        return lax.fori_loop(0, arrays.num_rounds, run_round, initial)

    def _sum_rows(
        self, route: Route, rows: jax.Array, weights: jax.Array | None, out_dtype: Any, wire: GradWire | None
    ) -> jax.Array:
        hidden, dtype = rows.shape[-1], rows.dtype
        rows = _to_carry(rows.reshape(-1, hidden))
        weights = None if weights is None else weights.reshape(-1)
        result = jnp.zeros((route.num_tokens, hidden), jnp.float32)
        arrays: CollectivesRoute = route.arrays
        result, rows, weights, arrays = _compat.vary((result, rows, weights, arrays), ())

        def run_round(i: jax.Array, result: jax.Array) -> jax.Array:
            def term(layer: int | jax.Array) -> jax.Array:
                row = arrays.entry_row[i, layer]
                term = _from_bits(take(rows, row), dtype).astype(jnp.float32)
                return term if weights is None else term * take(weights, row)[..., None]

            total = lax.fori_loop(1, arrays.num_layers[i], lambda layer, total: total + term(layer), term(0))
            total = total.reshape(*arrays.sent_token[i].shape, hidden)
            if wire is None:
                arrived = self._exchange(total.astype(dtype))
            else:
                arrived = self._with_own(_wires.unpack(self._exchange(_wires.pack(total, wire)), hidden, wire), total)

            # One rank at a time: a rank has a token once. The order of the additions is the same on every run.
            def add_rank(rank: jax.Array, result: jax.Array) -> jax.Array:
                return result.at[arrays.sent_token[i, rank]].add(arrived[rank].astype(jnp.float32), mode="drop")

            return lax.fori_loop(0, self.group.num_ranks, add_rank, result)

        return lax.fori_loop(0, arrays.num_rounds, run_round, result).astype(out_dtype)

    def _route(self, call: DispatchCall, topk_idx: jax.Array) -> tuple[_layouts.RowPlacement, Any]:
        placement, of_reference = super()._route(call, topk_idx)
        row = of_reference.row
        _, num_tokens, top_k = row.shape
        none, round_size = _size(call.route(None).rows_shape), self._round_size(num_tokens)

        def by_round(entries: jax.Array, fill: int) -> jax.Array:
            """[..., T] as [rounds, ..., N]."""
            padding = [(0, 0)] * (entries.ndim - 1) + [(0, -num_tokens % round_size)]
            entries = jnp.pad(entries, padding, constant_values=fill)
            return jnp.moveaxis(entries.reshape(*entries.shape[:-1], -1, round_size), -2, 0)

        # Each integer that is sorted holds a key and an index: XLA on CPUs takes far longer for an argsort.
        is_row, k = row < none, jnp.arange(top_k, dtype=jnp.int32)
        k_of_layer = jnp.sort(jnp.where(is_row, k, top_k + k), axis=-1) % top_k  # of each (source rank, token)
        row_of_layer = jnp.take_along_axis(row, k_of_layer, axis=-1)
        num_rows = jnp.sum(is_row, axis=-1, dtype=jnp.int32)
        entries = jnp.sort((top_k - num_rows) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)[None], axis=1)
        token, num_rows = entries % num_tokens, top_k - entries // num_tokens  # of each (source rank, entry)
        entry_row = jnp.moveaxis(jnp.take_along_axis(row_of_layer, token[..., None], axis=1), -1, 0)
        num_layers = jnp.max(by_round(num_rows, 0), axis=(1, 2))
        num_rounds = lax.pmax(jnp.sum(num_layers > 0, dtype=jnp.int32), self.group.axis_name)

        sent_token = self._exchange(jnp.where(num_rows > 0, token, num_tokens))
        entry_row = by_round(entry_row, none)
        entry_row = entry_row.reshape(*entry_row.shape[:2], -1)
        arrays = CollectivesRoute(row, num_rounds, num_layers, entry_row, by_round(sent_token, num_tokens))
        return placement, arrays

    def _round_size(self, num_tokens: int) -> int:
        """Entries per pair of ranks in a round. A rank has about as many entries in a round as it has tokens."""
        return min(num_tokens, max(LEAST_ROUND, -(-num_tokens // self.group.num_ranks)))


def _carry_dtype(dtype: Any) -> Any:
    """The dtype in which a loop carries rows of `dtype`: integers where XLA on CPUs would widen all rows in a step."""
    dtype = jnp.dtype(dtype)
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_small else dtype


def _to_carry(x: jax.Array) -> jax.Array:
    """x in its carry dtype; `_from_bits` inverts it."""
    return x if _carry_dtype(x.dtype) == x.dtype else _to_bits(x)
