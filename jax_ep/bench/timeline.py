"""How long operations take on the GPUs' time lines, from a profiler's trace."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

# Kernels of ffi/cuda: dispatch_kernel and combine_kernel. The backward pass of dispatch runs combine_kernel, and the
# backward pass of combine runs dispatch_kernel.
KINDS = ("dispatch", "combine")
TRACE_OPTIONS = {
    "xla_enable_command_buffers_during_profiling": True
}  # or else XLA runs no CUDA graphs under a profiler


class Event(NamedTuple):
    """What one GPU did: a kernel, a copy or a memset."""

    name: str
    start_ns: float
    duration_ns: float


class TimeLine(NamedTuple):
    """Microseconds, medians over executions and GPUs; see jax_ep.bench for their meaning."""

    pair_us: float
    pair_us_fastest_rank: float
    pair_us_slowest_rank: float
    pair_us_median: float
    pair_us_p95: float
    dispatch_kernel_us: float
    combine_kernel_us: float


class Operation(NamedTuple):
    """A dispatch, a combine or the backward pass of one, on one GPU."""

    kind: str
    start_ns: float
    work_ns: float


def trace(run: Callable[[], None]) -> list[list[Event]]:
    """What each GPU did while `run` ran; empty if the profiler saw none."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return events_of_gpus(jax.profiler.ProfileData.from_file(str(file)))


def events_of_gpus(profile: jax.profiler.ProfileData) -> list[list[Event]]:
    """The events of each GPU in a profile, in the order in which the profile has the GPUs."""
    return [
        [
            Event(event.name, event.start_ns, event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream #")  # other lines tell of the same work again
            for event in line.events
        ]
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:")
    ]


def time_line(gpus: Sequence[Sequence[Operation]], pairs: int, num_ranks: int) -> TimeLine | None:
    """The times of chains of `pairs` pairs, of which each GPU ran any number; None if there are no such kernels.

    `gpus` are those of all processes, and may be more than the ranks: a process's trace has all GPUs that it sees.
    Warns, and returns None, if the trace is not whole.
    """
    found = [len(operations) for operations in gpus if operations]
    if not found or pairs < 3:
        return None
    if len(found) != num_ranks or any(number % (2 * pairs) for number in found):
        warnings.warn(
            f"the trace has {', '.join(map(str, found))} operations of its GPUs, not a multiple of {2 * pairs} of each "
            f"of {num_ranks}: no times from it",
            stacklevel=2,
        )
        return None
    chains = [_chains_us(operations, pairs) for operations in gpus if operations]  # of each rank
    pair_us = [[statistics.fmean(chain) for chain in of_rank] for of_rank in chains]
    of_rank = [statistics.median(of_chains) for of_chains in pair_us]
    single = sorted(us for of_rank in chains for chain in of_rank for us in chain)
    work_us = {
        kind: statistics.median(op.work_ns for operations in gpus for op in operations if op.kind == kind) / 1e3
        for kind in KINDS
    }
    return TimeLine(
        pair_us=statistics.median(us for of_chains in pair_us for us in of_chains),
        pair_us_fastest_rank=min(of_rank),
        pair_us_slowest_rank=max(of_rank),
        pair_us_median=statistics.median(single),
        pair_us_p95=single[len(single) * 95 // 100],
        dispatch_kernel_us=work_us["dispatch"],
        combine_kernel_us=work_us["combine"],
    )


def _chains_us(operations: Sequence[Operation], pairs: int) -> list[list[float]]:
    """The times from one pair to the next, in each chain: from the second pair's start on, to that of the last one.

    In the first, the GPU whose host was first waits for the other GPUs' hosts.
    """
    starts = [operation.start_ns / 1e3 for operation in operations[::2]]
    chains = [starts[i + 1 : i + pairs] for i in range(0, len(starts), pairs)]
    return [[end - start for start, end in itertools.pairwise(chain)] for chain in chains]


def operations_of(events: Sequence[Event]) -> list[Operation]:
    """The operations of one GPU in their order. Kernels of one kind, one after the other, are the same operation.

    All work that follows an operation counts as a part of it, up to the next one.
    """
    operations: list[Operation] = []
    for event in sorted(events, key=lambda event: event.start_ns):
        kind = next((kind for kind in KINDS if f"{kind}_kernel" in event.name), None)
        if kind and (not operations or operations[-1].kind != kind):
            operations.append(Operation(kind, event.start_ns, event.duration_ns))
        elif operations:
            last = operations.pop()
            operations.append(last._replace(work_ns=last.work_ns + event.duration_ns))
    return operations
