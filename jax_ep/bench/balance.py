"""`jax-ep bench balance`: times balance, replicate and the gradient of replicate, beside the floor of the link.

Each operation runs in a chain of dependent calls in one executable. `us` is the median time of its kernels on the GPUs'
time lines. Where there are no such kernels, it is the time of the chain on the host's clock, divided by the calls.
`floor_us` is the time that the link needs for the same copies (`floor.link_floor`). For balance, and without copies, it
is null.

balance is timed with uniform routing and a tolerance of 1, where nothing is copied; with uniform routing and a
tolerance of 0; and with the routing "hot", where every token names the experts 0 to K - 1. replicate and its gradient
are timed without copies, and with those of "hot", in a group whose ranks have K experts each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_ep as ep
from jax_ep import _checks
from jax_ep.bench.cases import ROUTINGS, Case
from jax_ep.bench.devices import allow_virtual_cpus
from jax_ep.bench.exchanges import AXIS, open_group
from jax_ep.bench.floor import link_floor
from jax_ep.bench.options import case_of, mismatches
from jax_ep.bench.timeline import TRACE_OPTIONS, trace
from jax_ep.bench.timing import place, spmd

BALANCE_KERNELS = ("count_pairs_kernel", "balance_kernel", "number_pairs_kernel")
EXECUTIONS = 5
TOLERANCE = 1.0  # so large that uniform routing needs no copies


def hot(case: Case) -> np.ndarray:
    """Every token names the experts 0 to K - 1: [R, T, K]."""
    return np.broadcast_to(np.arange(case.top_k), (case.ranks, case.tokens, case.top_k))


def routing(name: str, case: Case) -> np.ndarray:
    ids = hot(case) if name == "hot" else ROUTINGS["uniform"](np.random.default_rng(0), case)
    return ids.astype(np.int32)


def time_us(
    chain: Callable, operands: tuple[Any, ...], mesh: Mesh, kernels: Sequence[str], calls: int
) -> tuple[float, Any]:
    """Returns the time of a call in a chain of `calls` calls, and the result of the chain.

    A call runs these kernels. On a GPU's time line, its time is from the start of the first to the end of the last, and
    the result is the median.
    """
    compiled = spmd(chain, mesh).lower(*operands).compile(TRACE_OPTIONS)
    result = jax.block_until_ready(compiled(*operands))

    def run() -> None:
        for _ in range(EXECUTIONS):
            jax.block_until_ready(compiled(*operands))

    times = []
    for events in trace(run):
        ours = sorted((e for e in events if any(name in e.name for name in kernels)), key=lambda event: event.start_ns)
        firsts, lasts = ours[:: len(kernels)], ours[len(kernels) - 1 :: len(kernels)]
        us = [
            (last.start_ns + last.duration_ns - first.start_ns) / 1e3 for first, last in zip(firsts, lasts, strict=True)
        ]
        # The first call of a chain waits for the other ranks' hosts.
        times += [time for number, time in enumerate(us) if number % calls]
    if times:
        return statistics.median(times), result
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6 / (EXECUTIONS * calls), result


def copies_between_ranks(slots: np.ndarray, experts_per_rank: int) -> np.ndarray:
    """Returns the number of experts that each rank copies to each other: [R, R]. slots: [R, B]."""
    copies = np.zeros((len(slots), len(slots)), np.int64)
    for rank, of_rank in enumerate(slots):
        np.add.at(copies[:, rank], of_rank[of_rank >= 0] // experts_per_rank, 1)
    return copies


def copy_floor_us(copies: np.ndarray, expert_bytes: int, row_bytes: int, mesh: Mesh) -> float | None:
    """The time that the link needs for copies[from, to] experts. They travel in rows."""
    return link_floor(mesh, -(-copies * expert_bytes // row_bytes), row_bytes) if copies.any() else None


def time_balance(
    group: ep.Group, mesh: Mesh, topk_idx: np.ndarray, tolerance: float, calls: int
) -> tuple[float, ep.Plan]:
    """Returns the time of a balance, and the plan, with a leading axis of ranks."""

    def chain(topk_idx: jax.Array) -> ep.Plan:
        for _ in range(calls):
            plan = ep.balance(topk_idx, group=group, tolerance=tolerance)
            topk_idx, _ = lax.optimization_barrier((topk_idx, plan.num_rows))
        return plan

    return time_us(chain, (place(topk_idx, mesh),), mesh, BALANCE_KERNELS, calls)


def time_replicate(plan: ep.Plan, mesh: Mesh, experts: jax.Array, calls: int) -> tuple[float, bool]:
    """Returns the time of a replicate in place, and whether the slots got the right experts (make_experts)."""

    def chain(w: jax.Array, plan: ep.Plan) -> tuple[jax.Array, jax.Array]:
        for _ in range(calls):
            w = ep.replicate(w, plan)
        copies = w[plan.group.experts_per_rank :]
        wanted = jnp.maximum(plan.slot_expert, 0).astype(w.dtype)  # the first expert's and an empty slot's are zeros
        return w, (copies == wanted[:, None]).all()

    us, (_, right) = time_us(chain, (experts, plan), mesh, ["replicate_kernel"], calls)
    return us, bool(right.all())


def time_gradient(plan: ep.Plan, mesh: Mesh, experts: jax.Array, calls: int) -> tuple[float, bool]:
    """Returns the time of the gradient of replicate, and whether each home expert got the gradients of its copies."""

    def chain(w: jax.Array, plan: ep.Plan) -> tuple[jax.Array, jax.Array]:
        group = plan.group
        _, gradient = jax.vjp(lambda w: ep.replicate(w, plan), w)
        g = jnp.ones_like(w)
        for _ in range(calls):
            (g,) = gradient(g)  # the slots' part becomes zero
        first = lax.axis_index(AXIS) * group.experts_per_rank
        copies = plan.slots.reshape(-1, 1) == first + jnp.arange(group.experts_per_rank)
        wanted = (1 + copies.sum(axis=0)).astype(g.dtype)
        return g, (g[: group.experts_per_rank] == wanted[:, None]).all()

    us, (_, right) = time_us(chain, (experts, plan), mesh, ["replicate_kernel"], calls)
    return us, bool(right.all())


def make_experts(group: ep.Group, mesh: Mesh, expert_bytes: int) -> jax.Array:
    """Returns arrays [E_local + B, ...] of all ranks. All elements of expert e are e."""
    elements = expert_bytes // group.dtype.itemsize

    def on_rank(rank: jax.Array) -> jax.Array:
        ids = rank * group.experts_per_rank + jnp.arange(group.slots_per_rank)
        return jnp.broadcast_to(ids.astype(group.dtype)[:, None], (group.slots_per_rank, elements))

    return spmd(on_rank, mesh)(place(np.arange(group.num_ranks), mesh))


def measure(options: argparse.Namespace, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yields the rows of the report."""
    case = case_of(options, mesh.size, routing="", num_sms=options.num_sms)
    with open_group(case, mesh, options.backend, replicas=case.experts_per_rank) as group:
        for name, tolerance in (("uniform", TOLERANCE), ("uniform", 0.0), ("hot", 0.0)):
            us, plan = time_balance(group, mesh, routing(name, case), tolerance, options.chain)
            loads, share = np.asarray(plan.num_rows), case.tokens * case.top_k
            yield {
                "operation": "balance",
                "routing": name,
                "experts": case.experts,
                "tolerance": tolerance,
                "copies": int((np.asarray(plan.slot_expert) >= 0).sum()),
                "us": us,
                "checked": bool(loads.sum() == case.ranks * share and loads.max() <= (1 + tolerance) * share),
            }
        group.check()
    few = dataclasses.replace(case, experts=case.ranks * case.top_k)
    with open_group(few, mesh, options.backend, replicas=few.experts_per_rank) as group:
        _, no_copies = time_balance(group, mesh, routing("uniform", few), TOLERANCE, 1)
        _, plan = time_balance(group, mesh, routing("hot", few), 0.0, 1)
        yield from measure_copies(no_copies, mesh, options.expert_bytes[0], options.chain)
        for expert_bytes in options.expert_bytes:
            yield from measure_copies(plan, mesh, expert_bytes, options.chain)
        group.check()


def measure_copies(plan: ep.Plan, mesh: Mesh, expert_bytes: int, calls: int) -> Iterator[dict[str, Any]]:
    group = plan.group
    copies = copies_between_ranks(np.asarray(plan.slots)[0], group.experts_per_rank)
    experts = make_experts(group, mesh, expert_bytes)
    row_bytes = group.hidden * group.dtype.itemsize
    directions = {"replicate": (time_replicate, copies), "replicate, gradient": (time_gradient, copies.T)}
    for name, (measure, directed) in directions.items():
        us, right = measure(plan, mesh, experts, calls)
        floor_us = copy_floor_us(directed, expert_bytes, row_bytes, mesh)
        yield {
            "operation": name,
            "expert_bytes": expert_bytes,
            "copies": int(copies.sum()),
            "busiest_bytes": int(max(copies.sum(axis=0).max(), copies.sum(axis=1).max()) * expert_bytes),
            "us": us,
            "floor_us": floor_us,
            "checked": right,
        }


def _parse(argv: Sequence[str] | None, *, num_ranks: int, on_cpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jax-ep bench balance",
        description="Times balance, replicate and the gradient of replicate on this machine's devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    megabytes = lambda text: [round(float(part) * 1e6) // 16 * 16 for part in text.split(",")]  # noqa: E731
    add = parser.add_argument
    add("--tokens", type=int, default=64 if on_cpu else 4096, help="tokens per rank")
    add("--hidden", type=int, default=64 if on_cpu else 7168, help="channels of a token")
    add("--top-k", type=int, default=4 if on_cpu else 8, help="experts per token")
    add("--experts", type=int, default=32 if on_cpu else 256, help="experts in all, for balance")
    add(
        "--expert-mb",
        dest="expert_bytes",
        type=megabytes,
        default="0.01" if on_cpu else "1,10,88",
        help="megabytes of an expert, for replicate; a list",
    )
    add("--dtype", choices=_checks.DTYPES, default="bfloat16", help="of tokens and experts")
    add("--num-sms", type=int, help="SMs that replicate may use")
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="backend of jax_ep")
    add("--chain", type=int, default=4 if on_cpu else 20, help="calls in one executable; at least 2")
    add("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args(argv)
    for wrong in mismatches(options, num_ranks):
        parser.error(wrong)
    if options.chain < 2:
        parser.error(f"--chain is {options.chain}; it must be at least 2")
    return options


def _show(row: dict[str, Any]) -> None:
    what = f"{row['routing']}, {row['experts']} experts" if "routing" in row else f"{row['expert_bytes'] / 1e6:g} MB"
    print(f"{row['operation']:20}  {what:22}  {row['copies']:3} copies  {row['us']:9.1f} us", end="")
    if row.get("floor_us"):
        print(f"  floor {row['floor_us']:.1f} us, {row['floor_us'] / row['us']:.2f} of the link", end="")
    print("" if row["checked"] else "  WRONG", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    devices = jax.devices()
    options = _parse(argv, num_ranks=len(devices), on_cpu=devices[0].platform == "cpu")
    print(f"{len(devices)} x {devices[0].device_kind}; microseconds per call")
    rows = []
    for row in measure(options, Mesh(np.array(devices), (AXIS,))):
        rows.append(row)
        _show(row)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
    return 0 if all(row["checked"] for row in rows) else 1


def run(argv: Sequence[str] | None = None) -> int:
    """The command `jax-ep bench balance`; exit status 1 if any result was wrong."""
    allow_virtual_cpus()
    return main(argv)
