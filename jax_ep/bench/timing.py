"""Runs an exchange in a chain, checks the results, and times it on the host's clock and on the GPUs' time lines."""

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
    """The time of a pair on the host's clock, in microseconds. With several processes: of the slowest process."""

    pair_us: float  # executions are enqueued one after another, without waiting
    waiting_pair_us: float  # the host waits for each execution


class Timing(NamedTuple):
    wall: Wall
    time_line: TimeLine | None
    right: bool


class Forward(NamedTuple):
    """The timing of a forward pass, and the arrays that the backward pass needs, with a leading axis of ranks."""

    timing: Timing
    topk_idx: np.ndarray
    inputs: Inputs
    y: jax.Array | None
    recv: Any


def time_forward(exchange: Exchange, case: Case, mesh: Mesh, pairs: int, *, traced: bool) -> Forward:
    """Times a chain of `pairs` pairs. Checks its result, and the rows that its last dispatch delivered."""

    def chain(inputs: Inputs, y: jax.Array | None) -> Any:
        x, *routing = inputs
        for _ in range(pairs):
            recv = exchange.dispatch(x, *routing)
            x = exchange.combine(_from_experts(exchange, recv, y), recv)
        return x, recv

    host_inputs = make_inputs(case)
    inputs = place(host_inputs, mesh)
    y = None
    if exchange.computes_rows:
        y = spmd(lambda inputs: exchange.rows(exchange.dispatch(*inputs)), mesh)(inputs)
    wall, found, (out, recv) = _time_chain(chain, mesh, pairs, (inputs, y), traced=traced)

    def check(inputs: Inputs, out: jax.Array, recv: Any, weights: jax.Array) -> jax.Array:
        signs = jnp.asarray(signs_of_experts(case)).reshape(case.ranks, -1)[lax.axis_index(AXIS)]
        signed = exchange.combine(exchange.scaled_rows(recv, signs), recv)
        expected = inputs.x.astype(jnp.float32) * weights[:, None]
        return _agree(out, inputs.x, case.combine_wire) & _agree(signed, expected, case.combine_wire)

    signed_weights = (host_inputs.topk_weights * signs_of_experts(case)[host_inputs.topk_idx]).sum(-1)
    right = _on_all_ranks(lambda: spmd(check, mesh)(inputs, out, recv, place(signed_weights, mesh)))
    return Forward(Timing(wall, found, right), host_inputs.topk_idx, inputs, y, recv)


def time_backward(exchange: EpExchange, forward: Forward, mesh: Mesh, pairs: int) -> Timing:
    """Times a chain of `pairs` backward passes along the last route of `forward`, and checks the result."""

    def chain(g: jax.Array, y: jax.Array | None, recv: Any) -> jax.Array:
        for _ in range(pairs):
            g = exchange.backward(g, recv.x if y is None else y, recv)
        return g

    g = forward.inputs.x  # the result must equal g: x is exact, and the weights add up to 1
    wall, found, out = _time_chain(chain, mesh, pairs, (g, forward.y, forward.recv), traced=True)
    right = _on_all_ranks(lambda: spmd(lambda out, g: _agree(out, g, exchange.grad_wire), mesh)(out, g))
    return Timing(wall, found, right)


def _agree(a: jax.Array, b: jax.Array, wire: str | None) -> jax.Array:
    """True if a equals b. Sums that travelled as fp8 are exact but for the rounding of their float32 scales."""
    tolerance = 0.0 if wire is None else 1e-4
    return (jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)) <= tolerance).all()


def place(arrays: Any, mesh: Mesh) -> Any:
    """Places the arrays of a pytree on the mesh. Their leading axis is the rank; each rank gets its part.

    (jax.device_put would make all processes compare the whole arrays.)
    """
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)


def _on_all_ranks(check: Callable[[], jax.Array]) -> bool:
    """Returns True if the result of `check`, [R], is true on all ranks of all processes."""
    with _processes.rendezvous_of_all("jax_ep.bench", "right") as rendezvous:
        here = all(bool(shard.data.all()) for shard in check().addressable_shards)
        return all(rendezvous.exchange(here).values())


def _from_experts(exchange: Exchange, recv: Any, y: jax.Array | None) -> jax.Array:
    """Returns the rows that arrived or, if y is given, y once the rows have arrived."""
    if y is None:
        return exchange.rows(recv)
    return lax.optimization_barrier((y, recv.x))[0]


def spmd(fn: Callable, mesh: Mesh) -> Any:
    """Jits `fn`, a function of one rank's arrays, for arrays with a leading axis of ranks."""

    def on_rank(*args: Any) -> Any:
        # A reshape costs nothing. A slice would be a kernel.
        args = jax.tree.map(lambda a: a.reshape(a.shape[1:]), args)
        return jax.tree.map(lambda a: a[None], fn(*args))

    split = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def _time_chain(
    chain: Callable, mesh: Mesh, pairs: int, operands: tuple[Any, ...], *, traced: bool
) -> tuple[Wall, TimeLine | None, Any]:
    """Returns the times of a pair on the host's clock and on the GPUs' time lines, and the result of the chain.

    If the chain fails in one process, all processes raise an error.
    """

    def run(times: int, in_a_row: int) -> None:
        for _ in range(times):
            for _ in range(in_a_row):
                result = None  # frees the memory for the next result, so XLA need not update its CUDA graph
                result = compiled(*operands)
            jax.block_until_ready(result)

    with _processes.rendezvous_of_all("jax_ep.bench", "times") as rendezvous:
        compiled = spmd(chain, mesh).lower(*operands).compile(TRACE_OPTIONS)
        _expect_room(compiled, mesh)
        rendezvous.exchange(None)  # otherwise, a collective would wait for a process without enough memory
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
    """Warns if GPUs ran no operations in the trace. Traces of other devices have none."""
    if mesh.devices.flat[0].platform == "gpu" and not any(traced):
        warnings.warn(
            "the profiler saw no kernels of jax_ep on the GPUs: no times but the host's. The reference backend has "
            "none; for the cuda backend, see that CUPTI is installed (it comes with jax[cuda13])",
            stacklevel=2,
        )


def _expect_room(compiled: Any, mesh: Mesh) -> None:
    """Raises XLA's out-of-memory error early, if a device of this process cannot have enough memory."""
    memory = compiled.memory_analysis()
    needed = memory.output_size_in_bytes + memory.temp_size_in_bytes
    for device in mesh.local_devices:
        has = device.memory_stats() or {}  # empty if the platform has no statistics
        if needed + has.get("bytes_in_use", 0) > has.get("bytes_limit", math.inf):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {needed} bytes more do not fit on {device}: {has}")


def _median_seconds(run: Callable[[], None]) -> float:
    """Returns the median time of `SAMPLES` runs, after `WARM_UPS` runs."""
    seconds = []
    for _ in range(WARM_UPS + SAMPLES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])
