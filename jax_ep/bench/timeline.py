"""The times of operations on the GPUs' time lines, from a profiler trace."""

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
}  # without it, XLA runs no CUDA graphs under a profiler


class Event(NamedTuple):
    """One activity of a GPU: a kernel, a copy or a memset."""

    name: str
    start_ns: float
    duration_ns: float


class TimeLine(NamedTuple):
    """Times in microseconds: medians over executions and GPUs. The docstring of jax_ep.bench explains the fields."""

    pair_us: float
    pair_us_fastest_rank: float
    pair_us_slowest_rank: float
    pair_us_median: float
    pair_us_p95: float
    dispatch_kernel_us: float
    combine_kernel_us: float


class Operation(NamedTuple):
    """A dispatch, a combine, or a backward pass of one of them, on one GPU."""

    kind: str
    start_ns: float
    work_ns: float


def trace(run: Callable[[], None]) -> list[list[Event]]:
    """Returns the events of each GPU while `run` ran. The list is empty if the profiler saw no GPU."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return events_of_gpus(jax.profiler.ProfileData.from_file(str(file)))


def events_of_gpus(profile: jax.profiler.ProfileData) -> list[list[Event]]:
    """Returns the events of each GPU in a profile, in the profile's order of GPUs."""
    return [
        [
            Event(event.name, event.start_ns, event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream #")  # other lines contain the same work again
            for event in line.events
        ]
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:")
    ]


def time_line(gpus: Sequence[Sequence[Operation]], pairs: int, num_ranks: int) -> TimeLine | None:
    """Returns the times of chains of `pairs` pairs, or None if the trace has no such kernels.

    Each GPU may have run several chains. `gpus` has the GPUs of all processes. There may be more GPUs than ranks,
    because the trace of a process has all GPUs that the process sees. If the trace is incomplete, warns and returns
    None.
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
    """Returns the times from the start of a pair to the start of the next, for each chain, without its first pair.

    In the first pair, a GPU whose host was early waits for the other GPUs' hosts.
    """
    starts = [operation.start_ns / 1e3 for operation in operations[::2]]
    chains = [starts[i + 1 : i + pairs] for i in range(0, len(starts), pairs)]
    return [[end - start for start, end in itertools.pairwise(chain)] for chain in chains]


def operations_of(events: Sequence[Event]) -> list[Operation]:
    """Returns the operations of one GPU, in order. Consecutive kernels of one kind are one operation.

    All work between two operations counts as part of the first.
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
