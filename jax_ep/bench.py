"""Times dispatch + combine on this machine's devices, next to what plain JAX offers.

    python -m jax_ep.bench --tokens 8,32,128 --wire fp8 --json rows.json

Method: a chain of dependent dispatch -> combine pairs is one jitted executable; its time is that of the host's clock,
the median of several executions, divided by the pairs. Every pair has a routing of its own, as XLA would share the work
that equal ones need. The experts give back what they get, so that nothing else is timed (but for the cast of fp8 rows),
and the numbers are chosen such that no step rounds: what comes out must equal what went in, bit for bit.

Each row of the JSON file is a `Case` and what was measured. Times are in microseconds; null stands for what is not
measured here (yet):

    pair_us, dispatch_us, combine_us                 on the device's time line
    wall_pair_us                                     on the host's clock
    lax_pair_us                                      the same with lax.all_to_all, padded; on the host's clock
    lax_ragged_pair_us                               the same with lax.ragged_all_to_all, where the platform has it
    floor_pair_us, floor_dispatch_us, floor_combine_us   what the link needs for as many bytes
    arena_bytes                                      device memory that the group holds on each rank, outside XLA's
    checked                                          whether all results were right

A `Case` says what to time, an `Exchange` is a way to do it, `time_pair` runs one, `measure` makes a row of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep as ep
from jax_ep import _checks, _layouts, _wires

AXIS = "ep"
EXECUTIONS = 20
VIRTUAL_CPUS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange to time. Fields are named as in the JSON rows; tokens are per rank."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    wire: str | None
    layout: str
    routing: str

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks


class Inputs(NamedTuple):
    """All ranks' arguments: x [R, T, H]; for each pair topk_idx [R, pairs, T, K] int32, topk_weights alike, float32."""

    x: Any
    topk_idx: Any
    topk_weights: Any


def make_inputs(case: Case, pairs: int, seed: int = 0) -> Inputs:
    """Numbers with which a chain of pairs is exact, in all dtypes and wires: each token's weights add up to 1."""
    rng = np.random.default_rng(seed)
    # A weighted sum over some of a token's experts is a multiple of 1/32, less than 8: 8 bits, as many as bfloat16 has.
    x = rng.integers(-7, 8, (case.ranks, case.tokens, case.hidden))
    x[..., :: _wires.CHANNELS_PER_SCALE] = 7  # each block's largest: its fp8 rows are then 64 * x
    shares = rng.multinomial(32 - case.top_k, np.full(case.top_k, 1 / case.top_k), (case.ranks, pairs, case.tokens))
    topk_idx = np.stack([ROUTINGS[case.routing](rng, case) for _ in range(pairs)], axis=1)
    return Inputs(x.astype(jnp.dtype(case.dtype)), topk_idx.astype(np.int32), (1 + shares).astype(np.float32) / 32)


def _uniform(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R, T, K] distinct experts, all equally likely."""
    return rng.random((case.ranks, case.tokens, case.experts)).argsort(axis=-1)[..., : case.top_k]


def _skewed(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R, T, K] distinct experts, as near to half of them on rank 0 as its number of experts allows."""
    scores = rng.random((case.ranks, case.tokens, case.experts))
    hot, cold = np.split(scores, [case.experts_per_rank], axis=-1)
    rounded_up_in_turn = (case.top_k + np.arange(case.tokens) % 2) // 2
    num_hot = np.clip(rounded_up_in_turn, case.top_k - cold.shape[-1], hot.shape[-1])
    # Scores lie in [0, 1): a hot expert less 2 comes before all cold ones, plus 2 after them.
    place = hot.argsort(axis=-1).argsort(axis=-1)
    hot = np.where(place < num_hot[:, None], hot - 2, hot + 2)
    return np.concatenate([hot, cold], axis=-1).argsort(axis=-1)[..., : case.top_k]


ROUTINGS: dict[str, Callable[[np.random.Generator, Case], np.ndarray]] = {"uniform": _uniform, "skewed": _skewed}


class Exchange(Protocol):
    """A way to move tokens to experts and back. Its methods run inside shard_map, on one rank's operands."""

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

    def dispatch(self, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> ep.Dispatched:
        return ep.dispatch(x, topk_idx, topk_weights, group=self.group, layout=self.layout, wire=self.wire)

    def rows(self, recv: ep.Dispatched) -> jax.Array:
        return ep.dequantize(recv)

    def combine(self, y: jax.Array, recv: ep.Dispatched) -> jax.Array:
        return ep.combine(y, recv)


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


def signs_of_experts(case: Case) -> np.ndarray:
    """+1 or -1 for each expert, [E]: to see that rows are at the right one."""
    return np.random.default_rng(1).choice(np.array([-1, 1], np.float32), case.experts)


def _times_signs(rows: jax.Array, group_sizes: jax.Array, case: Case) -> jax.Array:
    own = jnp.asarray(signs_of_experts(case)).reshape(case.ranks, -1)[lax.axis_index(AXIS)].astype(rows.dtype)
    if rows.ndim == 3:
        return rows * own[:, None, None]
    return rows * jnp.repeat(own, group_sizes, total_repeat_length=rows.shape[0])[:, None]


class Timing(NamedTuple):
    wall_pair_us: float
    right: bool


def time_pair(exchange: Exchange, case: Case, mesh: Mesh, pairs: int) -> Timing:
    """Times a chain of `pairs` pairs; checks what comes out of it, and what its last dispatch delivered."""

    def spmd(fn: Callable) -> Any:
        """fn, of one rank's arrays, for arrays with a leading axis of ranks."""

        def on_rank(*args: Any) -> Any:
            return jax.tree.map(lambda a: a[None], fn(*jax.tree.map(lambda a: a[0], args)))

        split = PartitionSpec(AXIS)
        return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))

    def chain(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        for pair in range(pairs):
            recv = exchange.dispatch(x, topk_idx[pair], topk_weights[pair])
            x = exchange.combine(exchange.rows(recv), recv)
        return x, recv

    inputs = make_inputs(case, pairs)
    operands = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec(AXIS)))
    run = spmd(chain).lower(*operands).compile()
    seconds, (out, recv) = _median_seconds(lambda: run(*operands))

    signed = spmd(lambda recv: exchange.combine(_times_signs(exchange.rows(recv), recv.group_sizes, case), recv))(recv)
    weight_sums = (inputs.topk_weights[:, -1] * signs_of_experts(case)[inputs.topk_idx[:, -1]]).sum(-1, keepdims=True)
    right = np.array_equal(out, inputs.x) and np.array_equal(signed, inputs.x * weight_sums)
    return Timing(seconds / pairs * 1e6, right)


def _median_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """The median time of `EXECUTIONS` runs after two to warm up, and the last one's result."""
    seconds = []
    for _ in range(2 + EXECUTIONS):
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]), result


def measure(case: Case, mesh: Mesh, *, backend: str, pairs: int) -> dict[str, Any]:
    """A row of the report: the case, and all that was measured of it."""
    with ep.Group(
        mesh,
        AXIS,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens_per_rank=case.tokens,
        dtype=case.dtype,
        backend=backend,
    ) as group:
        ours = time_pair(EpExchange(group, case.layout, case.wire), case, mesh, pairs)
        group.check()
        padded = time_pair(LaxExchange(case, ragged=False), case, mesh, pairs)
        ragged = _time_pair_if_implemented(LaxExchange(case, ragged=True), case, mesh, pairs)
        return dataclasses.asdict(case) | {
            "backend": group.backend,
            "device": mesh.devices.flat[0].device_kind,
            "chain": pairs,
            "num_sms": group.num_sms,
            "dispatch_us": None,
            "combine_us": None,
            "pair_us": None,
            "wall_pair_us": ours.wall_pair_us,
            "floor_dispatch_us": None,
            "floor_combine_us": None,
            "floor_pair_us": None,
            "lax_pair_us": padded.wall_pair_us,
            "lax_ragged_pair_us": ragged.wall_pair_us if ragged else None,
            "arena_bytes": group.memory_bytes,
            "checked": ours.right and padded.right and (ragged is None or ragged.right),
        }


def _time_pair_if_implemented(exchange: Exchange, case: Case, mesh: Mesh, pairs: int) -> Timing | None:
    try:
        return time_pair(exchange, case, mesh, pairs)
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        return None


COLUMNS = {  # name in a row: (heading, width)
    "tokens": ("tokens", 6),
    "hidden": ("hidden", 6),
    "top_k": ("top_k", 5),
    "experts": ("experts", 7),
    "dtype": ("dtype", 8),
    "wire": ("wire", 8),
    "layout": ("layout", 6),
    "routing": ("routing", 7),
    "wall_pair_us": ("jax_ep", 10),
    "lax_pair_us": ("all_to_all", 10),
    "lax_ragged_pair_us": ("ragged_all_to_all", 17),
    "checked": ("checked", 7),
}


def _line(cells: dict[str, Any]) -> str:
    def text(cell: Any) -> str:
        if isinstance(cell, bool):
            return "yes" if cell else "WRONG"
        return "-" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell)

    return "  ".join(text(cells[name]).rjust(width) for name, (_, width) in COLUMNS.items())


def _parse(argv: Sequence[str] | None, *, on_cpu: bool) -> argparse.Namespace:
    """The options; small by default on CPUs."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m jax_ep.bench",
        description="Times dispatch + combine on this machine's accelerators, or else on virtual CPU devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=numbers, default=[8, 32] if on_cpu else [8, 32, 128], help="per rank; a list gives a row each")
    add("--hidden", type=int, default=256 if on_cpu else 7168, help="channels of a token")
    add("--top-k", type=int, default=4 if on_cpu else 8, help="experts per token")
    add("--experts", type=int, default=32 if on_cpu else 256, help="experts in all")
    add("--wire", choices=["none", *_wires.WIRES], default="none", help="format in which rows travel")
    add("--layout", choices=_layouts.LAYOUTS, default="ragged", help="of the rows that arrive")
    add("--dtype", choices=_checks.DTYPES, default="bfloat16", help="of activations")
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="of jax_ep")
    add("--routing", choices=ROUTINGS, default="uniform", help="skewed: half of all rows go to one rank")
    add("--chain", type=int, default=4 if on_cpu else 50, help="pairs in one executable")
    add("--json", metavar="FILE", help="write the rows there, too")
    options = parser.parse_args(argv)
    if options.top_k > options.experts:
        parser.error(f"--top-k is {options.top_k}; it must be at most --experts = {options.experts}")
    if options.chain < 1:
        parser.error(f"--chain is {options.chain}; it must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, one line per case as it is measured. Exit status 1 if any result was wrong."""
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    options = _parse(argv, on_cpu=on_cpu)
    mesh = Mesh(np.array(devices), (AXIS,))
    print(f"{len(devices)} x {devices[0].device_kind}; microseconds per dispatch + combine on the host's clock")
    if on_cpu:
        print("virtual CPU devices: shows that it works, not how fast it is")
    print(_line({name: heading for name, (heading, _) in COLUMNS.items()}))
    rows = []
    for tokens in options.tokens:
        case = Case(
            ranks=mesh.size,
            tokens=tokens,
            hidden=options.hidden,
            top_k=options.top_k,
            experts=options.experts,
            dtype=options.dtype,
            wire=None if options.wire == "none" else options.wire,
            layout=options.layout,
            routing=options.routing,
        )
        rows.append(measure(case, mesh, backend=options.backend, pairs=options.chain))
        print(_line(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0 if all(row["checked"] for row in rows) else 1


if __name__ == "__main__":
    # Several CPU devices, for want of an accelerator, unless the user chose their number. Read when JAX first looks.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={VIRTUAL_CPUS}"
    sys.exit(main())
