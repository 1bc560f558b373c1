"""Times the value and gradient of one MoE layer over jax_ep, over lax's collectives, and without communication.

    python benchmarks/moe_step.py --json moe_step.json        # all GPUs of this machine, else 8 virtual CPU devices

The layer consists of a router, a dispatch, SwiGLU experts and a combine. The program takes its gradient in x and in all
weights, without rematerialisation. The router's gradient stays on each rank, because a training step sums it in the
same way for every variant. The variants differ only in how they move the tokens:

    all_to_all          LaxExchange of jax_ep.bench: sorts copies of tokens by expert, sends padded blocks with
                        lax.all_to_all, and sorts again
    ragged_all_to_all   the same with lax.ragged_all_to_all, without padding (XLA:CPU does not have it)
    jax_ep              jax_ep.dispatch and jax_ep.combine
    ideal               LocalExchange, without communication: every rank keeps its tokens, and uses its own experts in
                        place of the others. It still sorts copies by expert, writes each copy to its expert's rows, and
                        sums the outputs, in both passes, with gathers only. So the overhead of another variant is its
                        time in addition to this local work

In every variant, the experts use buffers of the same size: --capacity-factor times the mean number of rows. The padded
blocks of all_to_all have the same total size. A routing that does not fit is an error, so no variant drops rows. The
experts are a batched einsum over [E_local, capacity, H] or, with --compute ragged_dot, lax.ragged_dot over [capacity,
H]. XLA:GPU computes the weights' gradient of ragged_dot as a dense product of each expert with all rows, and in some
releases also the rest of it.

All ranks hold the same experts. So all variants, even ideal, must give the same loss and gradients. (For experts, this
holds for the sum of the gradients over the ranks.) The program reports and checks the largest difference from
all_to_all, relative in norm.

Every variant is a separate executable. The variants take turns. In a turn, a variant runs IN_A_ROW times, without
waiting in between, on the host's clock. In the JSON file:

    step_ms             the time of one execution: the median over --samples turns
    overhead_ms         step_ms, minus the step_ms of ideal
    overhead_ratio      the overhead of jax_ep, divided by the overhead of the better lax variant; null if that is 0 or
                        less
    executable_bytes    the memory that XLA allocates per rank for one execution: arguments, results and temporaries,
                        from compiled.memory_analysis()
    group_bytes         the memory that the group holds per rank in addition
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jax_ep as ep
from jax_ep.bench import report
from jax_ep.bench.cases import Case
from jax_ep.bench.devices import allow_virtual_cpus
from jax_ep.bench.exchanges import AXIS, EpExchange, Exchange, LaxExchange, LocalExchange, open_group
from jax_ep.bench.options import mismatches

WARM_UPS = 2
IN_A_ROW = 5
LAX = ("all_to_all", "ragged_all_to_all")
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-3}  # float32: wide enough for TF32


class Operands(NamedTuple):
    """One rank's arrays of a layer, or their gradients: x [T, H], router [H, E] and the weights of its experts."""

    x: jax.Array
    router: jax.Array
    gate_up: jax.Array  # [E_local, H, 2 * I]
    down: jax.Array  # [E_local, I, H]


class Compute(NamedTuple):
    """How experts compute: the layout of rows, and the function product(rows, weights, group_sizes)."""

    layout: str
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


COMPUTES = {
    "einsum": Compute("expert", lambda rows, weights, group_sizes: jnp.einsum("ech,ehf->ecf", rows, weights)),
    "ragged_dot": Compute("ragged", lax.ragged_dot),
}


def route(x: jax.Array, router: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Returns each token's experts and their weights, [T, K] int32 and float32."""
    probabilities = jax.nn.softmax(jnp.dot(x, router, preferred_element_type=jnp.float32))
    weights, topk_idx = lax.top_k(probabilities, top_k)
    return topk_idx, weights / weights.sum(axis=-1, keepdims=True)


def loss(operands: Operands, exchange: Exchange, compute: Compute, top_k: int) -> jax.Array:
    """Returns half the sum of squares of the layer's result. So the cotangent of the result is the result itself."""
    x, router, gate_up, down = operands
    recv = exchange.dispatch(x, *route(x, router, top_k))
    gate, up = jnp.split(compute.product(exchange.rows(recv), gate_up, recv.group_sizes), 2, axis=-1)
    y = compute.product(jax.nn.silu(gate) * up, down, recv.group_sizes)
    return 0.5 * jnp.square(exchange.combine(y, recv).astype(jnp.float32)).sum()


def make_operands(case: Case, expert_hidden: int) -> Operands:
    """Makes this rank's arrays. The tokens differ between ranks; the weights are the same on all ranks."""

    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, case.dtype) / jnp.sqrt(shape[-2]).astype(case.dtype)

    H, E_local = case.hidden, case.experts_per_rank
    return Operands(
        x=jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), (case.tokens, H), case.dtype),
        router=normal(1, H, case.experts),
        gate_up=normal(2, E_local, H, 2 * expert_hidden),
        down=normal(3, E_local, expert_hidden, H),
    )


def on_ranks(fn: Callable, mesh: Mesh) -> Any:
    """Jits `fn`, a function of one rank's arrays. Its callers pass the ranks' arrays joined along the first axis."""
    split = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def needed_capacity_factor(topk_idx: np.ndarray, case: Case) -> float:
    """Returns the largest ratio of a load to its mean: per expert, per expert in ideal, and per pair of ranks."""
    rank, local = np.arange(case.ranks)[:, None, None], case.experts_per_rank

    def largest(group: np.ndarray, num_groups: int) -> float:
        return np.bincount(group.reshape(-1)).max() * num_groups / group.size

    return max(
        largest(topk_idx, case.experts),
        largest(rank * local + topk_idx % local, case.experts),
        largest(rank * case.ranks + topk_idx // local, case.ranks**2),
    )


def make_exchanges(case: Case, factor: float, group: ep.Group) -> dict[str, Exchange]:
    """Makes the variants. The program compares the results of the others with the first."""
    rows = factor * case.tokens * case.top_k  # per rank
    capacity = math.ceil(rows / case.experts_per_rank if case.layout == "expert" else rows)
    over_lax = partial(LaxExchange, case, capacity=capacity, slots_per_rank=math.ceil(rows / case.ranks))
    return {
        "all_to_all": over_lax(ragged=False),
        "ragged_all_to_all": over_lax(ragged=True),
        "jax_ep": EpExchange(group, case.layout, wire=None, capacity=capacity),
        "ideal": LocalExchange(case, capacity),
    }


def compile_step(name: str, exchange: Exchange, compute: Compute, top_k: int, mesh: Mesh, operands: Operands) -> Any:
    """Compiles a function from operands to (losses [R], gradients).

    Returns None if XLA does not have the collective here, or lacks memory for its buffers.
    """

    def step(operands: Operands) -> tuple[jax.Array, Operands]:
        value, gradients = jax.value_and_grad(loss)(operands, exchange, compute, top_k)
        return value[None], gradients

    try:
        compiled = on_ranks(step, mesh).lower(operands).compile()
        jax.block_until_ready(compiled(operands))
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" in str(error) or "RESOURCE_EXHAUSTED" in str(error):
            print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            return None
        raise
    return compiled


def largest_difference(found: Any, wanted: Any, mesh: Mesh, *, any_rank: bool) -> float:
    """Returns the largest difference between two results of a step, relative in norm.

    With any_rank, compares the sums over the ranks of the experts' gradients.
    """

    def over_ranks(result: tuple[jax.Array, Operands]) -> Any:
        value, gradients = jax.tree.map(lambda a: a.astype(jnp.float32), result)
        if any_rank:
            gradients = gradients._replace(**lax.psum({"gate_up": gradients.gate_up, "down": gradients.down}, AXIS))
        return value, gradients

    def relative(found: jax.Array, wanted: jax.Array) -> jax.Array:
        error, size = lax.psum((jnp.square(found - wanted).sum(), jnp.square(wanted).sum()), AXIS)
        return jnp.sqrt(error / size)

    def on_rank(found: Any, wanted: Any) -> jax.Array:
        differences = jax.tree.leaves(jax.tree.map(relative, over_ranks(found), over_ranks(wanted)))
        return jnp.stack(differences).max()[None]

    return float(np.max(on_ranks(on_rank, mesh)(found, wanted)))


def time_steps(steps: dict[str, Any], operands: Operands, samples: int) -> dict[str, list[float]]:
    """Times the steps in turn. Returns `samples` times of each, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UPS + samples):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                result = step(operands)
            jax.block_until_ready(result)
            if turn >= WARM_UPS:
                times[name].append((time.perf_counter() - start) * 1e3 / IN_A_ROW)
    return times


def executable_bytes(step: Any) -> int:
    memory = step.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def measure(options: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """Measures all variants. Returns the content of the JSON file."""
    compute = COMPUTES[options.compute]
    case = Case(
        ranks=mesh.size,
        tokens=options.tokens,
        hidden=options.hidden,
        top_k=options.top_k,
        experts=options.experts,
        dtype=options.dtype,
        wire=None,
        layout=compute.layout,
        routing="router",
    )
    operands = on_ranks(partial(make_operands, case, options.expert_hidden), mesh)()
    topk_idx, _ = on_ranks(partial(route, top_k=case.top_k), mesh)(operands.x, operands.router)
    needed = needed_capacity_factor(np.asarray(topk_idx).reshape(case.ranks, case.tokens, case.top_k), case)
    if needed > options.capacity_factor:
        raise SystemExit(f"--capacity-factor is {options.capacity_factor}; this routing needs {needed:.3f}")
    with open_group(case, mesh, options.backend) as group:
        exchanges = make_exchanges(case, options.capacity_factor, group)
        compiled = {
            name: compile_step(name, exchange, compute, case.top_k, mesh, operands)
            for name, exchange in exchanges.items()
        }
        steps = {name: step for name, step in compiled.items() if step}
        differences = {
            name: largest_difference(step(operands), steps["all_to_all"](operands), mesh, any_rank=name == "ideal")
            for name, step in steps.items()
        }
        times = time_steps(steps, operands, options.samples)
        group.check()
        backend, group_bytes = group.backend, group.memory_bytes
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    overheads = {name: ms - medians["ideal"] for name, ms in medians.items()}
    best_lax = min(overheads[name] for name in LAX if name in overheads)
    return {name: value for name, value in vars(options).items() if name != "json"} | {
        "ranks": case.ranks,
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "backend": backend,
        "needed_capacity_factor": needed,
        "variants": [
            {
                "variant": name,
                "step_ms": medians[name],
                "overhead_ms": overheads[name],
                "samples_ms": times[name],
                "executable_bytes": executable_bytes(step),
                "group_bytes": group_bytes if name == "jax_ep" else 0,
                "difference": differences[name],
            }
            for name, step in steps.items()
        ],
        "overhead_ratio": overheads["jax_ep"] / best_lax if best_lax > 0 else None,
        "checked": all(difference <= TOLERANCE[case.dtype] for difference in differences.values()),
    }


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("variant", title=f"{result['ranks']} x {result['device']}, backend {result['backend']}")
    for heading in ("step, ms", "overhead, ms", "memory, MiB", "difference"):
        table.add_column(heading, justify="right")
    for row in result["variants"]:
        mib = (row["executable_bytes"] + row["group_bytes"]) / 2**20
        cells = f"{row['step_ms']:.3f}", f"{row['overhead_ms']:.3f}", f"{mib:.1f}", f"{row['difference']:.1e}"
        table.add_row(row["variant"], *cells)
    console = Console()
    console.print(table)
    if result["overhead_ratio"] is not None:
        console.print(f"jax_ep's overhead is {result['overhead_ratio']:.3f} of the better lax variant's")
    if not result["checked"]:
        console.print(f"WRONG: a difference is larger than {TOLERANCE[result['dtype']]}")


def parse(argv: Sequence[str] | None, *, num_ranks: int, on_cpu: bool) -> argparse.Namespace:
    """Parses the options. The default sizes are small on CPUs."""
    parser = argparse.ArgumentParser(
        description="Times the value and gradient of a MoE layer over jax_ep, over lax's collectives, and without "
        "communication.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=64 if on_cpu else 4096, help="tokens per rank")
    add("--hidden", type=int, default=64 if on_cpu else 4096, help="channels of a token")
    add("--expert-hidden", type=int, default=32 if on_cpu else 1536, help="channels inside an expert")
    add("--experts", type=int, default=16 if on_cpu else 64, help="experts in all")
    add("--top-k", type=int, default=4 if on_cpu else 8, help="experts per token")
    add("--dtype", choices=TOLERANCE, default="bfloat16", help="dtype of activations and weights")
    add("--compute", choices=COMPUTES, default="einsum", help="how the experts compute")
    add(
        "--capacity-factor",
        type=float,
        default=2.0 if on_cpu else 1.25,
        help="capacity, divided by the mean number of rows",
    )
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="backend of jax_ep")
    add(
        "--samples", type=int, default=3 if on_cpu else 20, help=f"turns; in a turn, each variant runs {IN_A_ROW} steps"
    )
    add("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args(argv)
    for wrong in mismatches(options, num_ranks):
        parser.error(wrong)
    if why := report.missing("rich"):
        parser.error(why)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes the JSON file. Exit status 1 if any variant was wrong."""
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    options = parse(argv, num_ranks=len(devices), on_cpu=on_cpu)
    if on_cpu:
        print("virtual CPU devices: shows that it works, not how fast it is")
    result = measure(options, Mesh(np.array(devices), (AXIS,)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    show(result)
    return 0 if result["checked"] else 1


if __name__ == "__main__":
    allow_virtual_cpus()
    sys.exit(main())
