"""Runs an exchange in a chain, checks what comes out, and times it on the host's clock and the GPUs' time lines."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import _processes
from jax_ep.bench.cases import Case, Inputs, make_inputs, signs_of_experts
from jax_ep.bench.exchanges import AXIS, EpExchange, Exchange
from jax_ep.bench.timeline import TRACE_OPTIONS, Operation, TimeLine, operations_of, time_line, trace

WARM_UPS = 2
SAMPLES = 9
IN_A_ROW = 10  # executions that are enqueued one after the other
TRACED_EXECUTIONS = 5


class Wall(NamedTuple):
    """Microseconds of a pair on the host's clock; of several processes, on that of the slowest."""

    pair_us: float  # of executions one behind the other
    waiting_pair_us: float  # of executions that the host waits for one by one


class Timing(NamedTuple):
    wall: Wall
    time_line: TimeLine | None
    right: bool


class Forward(NamedTuple):
    """A timing, and what it leaves for the backward pass. Arrays have a leading axis of ranks."""

    timing: Timing
    topk_idx: np.ndarray
    inputs: Inputs
    y: jax.Array | None
    recv: Any


def time_forward(exchange: Exchange, case: Case, mesh: Mesh, pairs: int, *, traced: bool) -> Forward:
    """Times a chain of `pairs` pairs; checks what comes out of it, and what its last dispatch delivered."""

    def chain(inputs: Inputs, y: jax.Array | None) -> Any:
        x, *routing = inputs
        for _ in range(pairs):
            recv = exchange.dispatch(x, *routing)
            x = exchange.combine(_from_experts(exchange, recv, y), recv)
        return x, recv

    host_inputs = make_inputs(case)
    inputs = _place(host_inputs, mesh)
    y = None
    if exchange.casts:
        y = _spmd(lambda inputs: exchange.rows(exchange.dispatch(*inputs)), mesh)(inputs)
    wall, found, (out, recv) = _time_chain(chain, mesh, pairs, (inputs, y), traced=traced)

    def check(inputs: Inputs, out: jax.Array, recv: Any, weights: jax.Array) -> jax.Array:
        signed = exchange.combine(_times_signs(exchange.rows(recv), recv.group_sizes, case), recv)
        expected = inputs.x.astype(jnp.float32) * weights[:, None]
        return (out == inputs.x).all() & (signed.astype(jnp.float32) == expected).all()

    signed_weights = (host_inputs.topk_weights * signs_of_experts(case)[host_inputs.topk_idx]).sum(-1)
    right = _on_all_ranks(lambda: _spmd(check, mesh)(inputs, out, recv, _place(signed_weights, mesh)))
    return Forward(Timing(wall, found, right), host_inputs.topk_idx, inputs, y, recv)


def time_backward(exchange: EpExchange, forward: Forward, mesh: Mesh, pairs: int) -> Timing:
    """Times a chain of `pairs` backward passes along the last route of `forward`; checks what comes out of it."""

    def chain(g: jax.Array, y: jax.Array | None, recv: Any) -> jax.Array:
        for _ in range(pairs):
            g = exchange.backward(g, recv.x if y is None else y, recv)
        return g

    g = forward.inputs.x  # any cotangent as exact as x: what comes out equals it, as the weights add up to 1
    wall, found, out = _time_chain(chain, mesh, pairs, (g, forward.y, forward.recv), traced=True)
    right = _on_all_ranks(lambda: _spmd(lambda out, g: (out == g).all(), mesh)(out, g))
    return Timing(wall, found, right)


def _place(arrays: Any, mesh: Mesh) -> Any:
    """The arrays of a pytree, which have a leading axis of ranks, each rank's part on its device.

    (jax.device_put would have all processes compare the whole.)
    """
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)


def _on_all_ranks(check: Callable[[], jax.Array]) -> bool:
    """Whether what `check` gives, [R], is true everywhere, in other processes, too."""
    with _processes.rendezvous_of_all("jax_ep.bench", "right") as rendezvous:
        here = all(bool(shard.data.all()) for shard in check().addressable_shards)
        return all(rendezvous.exchange(here).values())


def _from_experts(exchange: Exchange, recv: Any, y: jax.Array | None) -> jax.Array:
    """What arrived; or y, no sooner than that."""
    if y is None:
        return exchange.rows(recv)
    return lax.optimization_barrier((y, recv.x))[0]


def _times_signs(rows: jax.Array, group_sizes: jax.Array, case: Case) -> jax.Array:
    own = jnp.asarray(signs_of_experts(case)).reshape(case.ranks, -1)[lax.axis_index(AXIS)].astype(rows.dtype)
    if rows.ndim == 3:
        return rows * own[:, None, None]
    return rows * jnp.repeat(own, group_sizes, total_repeat_length=rows.shape[0])[:, None]


def _spmd(fn: Callable, mesh: Mesh) -> Any:
    """fn, of one rank's arrays, jitted for arrays with a leading axis of ranks."""

    def on_rank(*args: Any) -> Any:
        # Reshapes, which cost nothing: a slice would be a kernel.
        args = jax.tree.map(lambda a: a.reshape(a.shape[1:]), args)
        return jax.tree.map(lambda a: a[None], fn(*args))

    split = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def _time_chain(
    chain: Callable, mesh: Mesh, pairs: int, operands: tuple[Any, ...], *, traced: bool
) -> tuple[Wall, TimeLine | None, Any]:
    """The time of a pair by the host's clock and by the GPUs' time lines, and the result of the chain.

    Where it cannot be run in one process, it is an error in all.
    """

    def run(times: int, in_a_row: int) -> None:
        for _ in range(times):
            for _ in range(in_a_row):
                result = None  # lets go of the last one: the next gets the same memory, and XLA's graph need not change
                result = compiled(*operands)
            jax.block_until_ready(result)

    with _processes.rendezvous_of_all("jax_ep.bench", "times") as rendezvous:
        compiled = _spmd(chain, mesh).lower(*operands).compile(TRACE_OPTIONS)
        _expect_room(compiled, mesh)
        rendezvous.exchange(None)  # in a collective, all would wait for one that has no room
        run(1, 1)
        rendezvous.exchange(None)
        wall_us = [_median_seconds(partial(run, 1, n)) * 1e6 / (n * pairs) for n in (IN_A_ROW, 1)]
        gpus = [operations_of(events) for events in trace(lambda: run(TRACED_EXECUTIONS, 1))] if traced else []
        walls, traces = zip(*rendezvous.exchange([wall_us, gpus]).values(), strict=True)
    wall = Wall(*map(max, zip(*walls, strict=True)))
    everywhere = [[Operation(*operation) for operation in gpu] for gpus in traces for gpu in gpus]
    if traced:
        _expect_operations(everywhere, mesh)
    return wall, time_line(everywhere, pairs, mesh.size), compiled(*operands)


def _expect_operations(traced: Sequence[Sequence[Operation]], mesh: Mesh) -> None:
    """Warns if there are none on GPUs; on other devices there never are."""
    if mesh.devices.flat[0].platform == "gpu" and not any(traced):
        warnings.warn(
            "the profiler saw no kernels of jax_ep on the GPUs: no times but the host's. The reference backend has "
            "none; for the cuda backend, see that CUPTI is installed (it comes with jax[cuda13])",
            stacklevel=2,
        )


def _expect_room(compiled: Any, mesh: Mesh) -> None:
    """Raises what XLA would when it runs, where a device of this process surely has no room for it."""
    memory = compiled.memory_analysis()
    needed = memory.output_size_in_bytes + memory.temp_size_in_bytes
    for device in mesh.local_devices:
        has = device.memory_stats() or {}  # empty where the platform does not say
        if needed + has.get("bytes_in_use", 0) > has.get("bytes_limit", math.inf):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {needed} bytes more do not fit on {device}: {has}")


def _median_seconds(run: Callable[[], None]) -> float:
    """The median time of `SAMPLES` runs, after some to warm up."""
    seconds = []
    for _ in range(WARM_UPS + SAMPLES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])
