"""Times the value and gradient of one MoE layer over jax_ep, over lax's collectives, and without communication.

    python benchmarks/moe_step.py --json moe_step.json        # all GPUs of this machine, else 8 virtual CPU devices

The layer consists of a router, a dispatch, SwiGLU experts and a combine. The program takes its gradient in x and in all
weights, without rematerialisation. The router's gradient stays on each rank, because a training step sums it in the
same way for every variant. The variants differ only in how they move the tokens:

    all_to_all          LaxExchange of jax_ep.bench: copies of tokens sorted by expert, lax.all_to_all of padded blocks,
                        and sorted again
    ragged_all_to_all   the same over lax.ragged_all_to_all, without padding (XLA:CPU has none)
    jax_ep              jax_ep.moe.mlp
    ideal               LocalExchange, without communication: every rank keeps its tokens, and its own experts stand in
                        for the others'. XLA still sorts copies by expert, writes each to its expert's rows and sums
                        the outputs, forwards and backwards, all of it with gathers. This is not a lower bound: a
                        variant that writes rows faster than XLA can have a negative overhead, so no ratio is reported

Every variant's experts work on buffers of one size, --capacity-factor times the mean number of rows; the padded blocks
of all_to_all have as much room. A routing that does not fit is an error, so that nobody drops rows. The experts compute
as jax_ep.moe.mlp does with experts= the value of --compute, in all variants: "einsum" is a batched matmul over
[E_local, capacity, H]; "grouped" (CUTLASS's, on Hopper GPUs) and "ragged_dot" (JAX's) are matmuls of ragged groups over
[capacity, H].

All ranks hold the same experts, so that even the ideal must give the same loss and gradients (those of the experts in
the sum over the ranks). The largest difference from all_to_all, relative in norm, is reported and checked.

Every variant is an executable of its own. By turns each runs IN_A_ROW times, one execution behind the other, on the
host's clock. In the JSON file:

    step_ms             the median over --samples turns, of one execution
    overhead_ms         what that is beyond the ideal's
    executable_bytes    what XLA allocates per rank for one execution: arguments, results and temporaries, by
                        compiled.memory_analysis()
    group_bytes         what the group holds per rank besides

With --skew, the program times the layer of jax_ep alone, under skewed routing, in three ways to give it room:

    python benchmarks/moe_step.py --skew 0 0.5 1 1.5 hot

    balanced            moe.mlp(balance=--tolerance) with --replicas slots per rank, and the default room
    dropping            moe.mlp(capacity_factor=--capacity-factor), which drops the rows that do not fit
    worst_case          moe.mlp with the default room, which is enough for any routing

A number is the sigma of lognormal popularity: token by token, experts are drawn in proportion to exp(sigma * z[e]),
with z[e] normal. "hot" is uniform, but every token also names one and the same expert. All ranks draw from the same
popularity. The layer gets ids and weights and has no router. The JSON file has, for each skew and variant, step_ms,
executable_bytes and group_bytes as above, and:

    busiest_rows        the rows that the busiest rank computes
    mean_rows           the mean over the ranks
    dropped_rows        the sum over the ranks
    buffer_rows         the rows of a rank's buffer
    copies              the copies of experts, over all ranks

The values and gradients of balanced must be those of worst_case, and neither may drop rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jax_ep as ep
from jax_ep._layouts import LayoutName
from jax_ep.bench import report
from jax_ep.bench.cases import Case
from jax_ep.bench.devices import allow_virtual_cpus
from jax_ep.bench.exchanges import AXIS, Exchange, LaxExchange, LocalExchange, open_group
from jax_ep.bench.options import case_of, mismatches
from jax_ep.moe._grouped_matmul import grouped_matmul

WARM_UPS = 2
IN_A_ROW = 5
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-3}  # the last leaves room for TF32


SKEWED_ROWS = ("busiest_rows", "mean_rows", "dropped_rows", "buffer_rows", "copies")


class Operands(NamedTuple):
    """One rank's arrays of a layer, or their gradients: x [T, H], router [H, E] and the weights of its experts."""

    x: jax.Array
    router: jax.Array
    gate_up: jax.Array  # [E_local, H, 2 * I]
    down: jax.Array  # [E_local, I, H]


LAYOUTS: dict[str, LayoutName] = {"einsum": "expert", "grouped": "ragged", "ragged_dot": "ragged"}  # of --compute


def matmul(compute: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows in the layout of `compute`, times one matrix per expert."""
    if compute == "einsum":
        return jnp.einsum("ech,ehf->ecf", rows, weights)
    return grouped_matmul(rows, weights, group_sizes, implementation=compute)


Layer = Callable[..., jax.Array]  # (x, topk_idx, topk_weights, gate_up, down) -> [T, H]


def layer_over(exchange: Exchange, compute: str) -> Layer:
    """The layer of jax_ep.moe.mlp, with another exchange."""

    def layer(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        recv = exchange.dispatch(x, topk_idx, topk_weights)
        gate, up = jnp.split(matmul(compute, exchange.rows(recv), gate_up, recv.group_sizes), 2, axis=-1)
        return exchange.combine(matmul(compute, jax.nn.silu(gate) * up, down, recv.group_sizes), recv)

    return layer


def route(x: jax.Array, router: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Each token's experts and their weights, [T, K] int32 and float32."""
    routing = ep.moe.route(jnp.dot(x, router, preferred_element_type=jnp.float32), top_k=top_k)
    return routing.topk_idx, routing.topk_weights


def loss(operands: Operands, layer: Layer, top_k: int) -> jax.Array:
    """Half the sum of squares of what the layer gives: its cotangent is the layer's result."""
    x, router, gate_up, down = operands
    out = layer(x, *route(x, router, top_k), gate_up, down)
    return 0.5 * jnp.square(out.astype(jnp.float32)).sum()


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


def make_layers(case: Case, factor: float, group: ep.Group, compute: str) -> dict[str, Layer]:
    """The variants. The first is what the others are compared with."""
    rows = factor * case.tokens * case.top_k  # of a rank
    capacity = math.ceil(rows / case.experts_per_rank if case.layout == "expert" else rows)
    over_lax = partial(LaxExchange, case, capacity=capacity, rows_per_pair=math.ceil(rows / case.ranks))
    return {
        "all_to_all": layer_over(over_lax(ragged=False), compute),
        "ragged_all_to_all": layer_over(over_lax(ragged=True), compute),
        "jax_ep": partial(ep.moe.mlp, group=group, experts=compute, capacity=capacity),
        "ideal": layer_over(LocalExchange(case, capacity), compute),
    }


def compile_step(name: str, layer: Layer, top_k: int, mesh: Mesh, operands: Operands) -> Any:
    """operands -> losses [R], gradients; None where XLA has no such collective, or no room for its buffers."""

    def step(operands: Operands) -> tuple[jax.Array, Operands]:
        value, gradients = jax.value_and_grad(loss)(operands, layer, top_k)
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


def largest_difference(found: Any, wanted: Any, mesh: Mesh, *, sums_expert_gradients: bool) -> float:
    """Returns the largest difference between two results of a step, relative in norm.

    With sums_expert_gradients, sums the experts' gradients over ranks before it compares them.
    """

    def over_ranks(result: tuple[jax.Array, Operands]) -> Any:
        value, gradients = jax.tree.map(lambda a: a.astype(jnp.float32), result)
        if sums_expert_gradients:
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


def make_case(options: argparse.Namespace, num_ranks: int) -> Case:
    return case_of(options, num_ranks, layout=LAYOUTS[options.compute], routing="router")


def facts(options: argparse.Namespace, case: Case, mesh: Mesh, backend: str) -> dict[str, Any]:
    """What every result tells of its run: the options, and what ran it."""
    return {name: value for name, value in vars(options).items() if name != "json"} | {
        "ranks": case.ranks,
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "backend": backend,
    }


def measure(options: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """What the JSON file holds."""
    case = make_case(options, mesh.size)
    operands = on_ranks(partial(make_operands, case, options.expert_hidden), mesh)()
    topk_idx, _ = on_ranks(partial(route, top_k=case.top_k), mesh)(operands.x, operands.router)
    needed = needed_capacity_factor(np.asarray(topk_idx).reshape(case.ranks, case.tokens, case.top_k), case)
    if needed > options.capacity_factor:
        raise SystemExit(f"--capacity-factor is {options.capacity_factor}; this routing needs {needed:.3f}")
    with open_group(case, mesh, options.backend) as group:
        layers = make_layers(case, options.capacity_factor, group, options.compute)
        compiled = {name: compile_step(name, layer, case.top_k, mesh, operands) for name, layer in layers.items()}
        steps = {name: step for name, step in compiled.items() if step}
        differences = {
            name: largest_difference(
                step(operands), steps["all_to_all"](operands), mesh, sums_expert_gradients=name == "ideal"
            )
            for name, step in steps.items()
        }
        times = time_steps(steps, operands, options.samples)
        group.check()
        backend, group_bytes = group.backend, group.memory_bytes
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    overheads = {name: ms - medians["ideal"] for name, ms in medians.items()}
    return facts(options, case, mesh, backend) | {
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
        "checked": all(difference <= TOLERANCE[case.dtype] for difference in differences.values()),
    }


class SkewedOperands(NamedTuple):
    """What a step under skewed routing is differentiated in: x [T, H] and the weights of a rank's experts."""

    x: jax.Array
    gate_up: jax.Array
    down: jax.Array


def skewed_topk_idx(skew: float | Literal["hot"], case: Case) -> np.ndarray:
    """Returns distinct experts for the tokens of all ranks: [R * T, K] int32."""
    rng = np.random.default_rng(0)
    popularity = rng.normal(size=case.experts) * (0 if skew == "hot" else skew)
    if skew == "hot":
        popularity[rng.integers(case.experts)] = np.inf
    scores = popularity + rng.gumbel(size=(case.ranks * case.tokens, case.experts))
    return np.argsort(-scores, axis=1)[:, : case.top_k].astype(np.int32)


def make_skewed_layers(options: argparse.Namespace, plain: ep.Group, balanced: ep.Group) -> dict[str, dict[str, Any]]:
    """The arguments of moe.mlp in each variant."""
    return {
        "balanced": {"group": balanced, "balance": options.tolerance},
        "dropping": {"group": plain, "capacity_factor": options.capacity_factor},
        "worst_case": {"group": plain},
    }


def compile_skewed_step(arguments: dict[str, Any], compute: str, mesh: Mesh, *operands: Any) -> Any:
    """(operands, topk_idx) -> losses [R], gradients."""

    def loss(operands: SkewedOperands, topk_idx: jax.Array) -> jax.Array:
        x, gate_up, down = operands
        weights = jnp.full(topk_idx.shape, 1 / topk_idx.shape[1], jnp.float32)
        out = ep.moe.mlp(x, topk_idx, weights, gate_up, down, experts=compute, **arguments)
        return 0.5 * jnp.square(out.astype(jnp.float32)).sum()

    def step(operands: SkewedOperands, topk_idx: jax.Array) -> tuple[jax.Array, SkewedOperands]:
        value, gradients = jax.value_and_grad(loss)(operands, topk_idx)
        return value[None], gradients

    return on_ranks(step, mesh).lower(*operands).compile()


def skewed_rows(arguments: dict[str, Any], mesh: Mesh, x: jax.Array, topk_idx: Any) -> dict[str, float]:
    """Returns SKEWED_ROWS of one routing."""

    def on_rank(x: jax.Array, topk_idx: jax.Array) -> tuple[jax.Array, ...]:
        group, options, num_copies = arguments["group"], {}, jnp.int32(0)
        if "capacity_factor" in arguments:
            options["capacity_factor"] = arguments["capacity_factor"]
        if "balance" in arguments:
            plan = options["plan"] = ep.balance(topk_idx, group=group, tolerance=arguments["balance"])
            num_copies = jnp.sum(plan.slot_expert >= 0)
        recv = ep.dispatch(x, topk_idx, group=group, **options)
        numbers = jnp.sum(recv.counts), recv.num_dropped, jnp.int32(recv.x.shape[0]), num_copies
        return tuple(number.astype(jnp.int32)[None] for number in numbers)

    rows, dropped, buffer_rows, copies = map(np.asarray, on_ranks(on_rank, mesh)(x, topk_idx))
    numbers = rows.max(), rows.mean(), dropped.sum(), buffer_rows[0], copies.sum()
    return {name: number.item() for name, number in zip(SKEWED_ROWS, numbers, strict=True)}


def measure_skewed(options: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """What the JSON file holds with --skew."""
    case = make_case(options, mesh.size)
    given = on_ranks(partial(make_operands, case, options.expert_hidden), mesh)()
    operands = SkewedOperands(given.x, given.gate_up, given.down)
    skews = []
    with (
        open_group(case, mesh, options.backend) as plain,
        open_group(case, mesh, options.backend, replicas=options.replicas) as balanced,
    ):
        arguments = make_skewed_layers(options, plain, balanced)
        first = operands, skewed_topk_idx(0.0, case)
        compiled = {name: compile_skewed_step(of, options.compute, mesh, *first) for name, of in arguments.items()}
        for skew in options.skew:
            topk_idx = on_ranks(lambda ids: ids, mesh)(skewed_topk_idx(skew, case))
            steps = {name: lambda operands, run=run, ids=topk_idx: run(operands, ids) for name, run in compiled.items()}
            difference = largest_difference(
                steps["balanced"](operands), steps["worst_case"](operands), mesh, sums_expert_gradients=False
            )
            times = time_steps(steps, operands, options.samples)
            skews.append(
                {
                    "skew": skew,
                    "difference": difference,
                    "variants": [
                        {
                            "variant": name,
                            "step_ms": statistics.median(times[name]),
                            "samples_ms": times[name],
                            "executable_bytes": executable_bytes(compiled[name]),
                            "group_bytes": arguments[name]["group"].memory_bytes,
                            **skewed_rows(arguments[name], mesh, operands.x, topk_idx),
                        }
                        for name in compiled
                    ],
                }
            )
        plain.check()
        balanced.check()
        backend = plain.backend
    dropped = [row["dropped_rows"] for skew in skews for row in skew["variants"] if row["variant"] != "dropping"]
    return facts(options, case, mesh, backend) | {
        "skews": skews,
        "checked": not any(dropped) and all(skew["difference"] <= TOLERANCE[case.dtype] for skew in skews),
    }


def show_skewed(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("skew", "variant", title=f"{result['ranks']} x {result['device']}, backend {result['backend']}")
    for heading in ("step, ms", "MiB", "busiest / mean", "dropped", "buffer", "copies"):
        table.add_column(heading, justify="right")
    for skew in result["skews"]:
        for row in skew["variants"]:
            mib = (row["executable_bytes"] + row["group_bytes"]) / 2**20
            load = f"{row['busiest_rows']} / {row['mean_rows']:.0f}"
            cells = f"{row['step_ms']:.3f}", f"{mib:.1f}", load, *(str(row[name]) for name in SKEWED_ROWS[2:])
            table.add_row(str(skew["skew"]), row["variant"], *cells)
    console = Console()
    console.print(table)
    if not result["checked"]:
        console.print(
            f"WRONG: balanced or worst_case drops rows, or they differ by more than {TOLERANCE[result['dtype']]}"
        )


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
    if not result["checked"]:
        console.print(f"WRONG: a difference is larger than {TOLERANCE[result['dtype']]}")


def skew(text: str) -> float | str:
    """Parses a value of --skew."""
    if text == "hot":
        return text
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more, or hot")
    return value


def skew_mismatches(options: argparse.Namespace, num_ranks: int) -> Iterator[str]:
    if options.skew and LAYOUTS[options.compute] != "ragged":
        yield f"--compute is {options.compute}; with --skew it must be ragged_dot or grouped, which have ragged rows"
    if not 0 <= options.tolerance < math.inf:
        yield f"--tolerance is {options.tolerance}; it must be 0 or more"
    most = options.experts // num_ranks
    if options.replicas > most:
        yield f"--replicas is {options.replicas}; it must be at most {most}, the experts of a rank"


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
    add("--dtype", choices=TOLERANCE, default="bfloat16", help="of activations and weights")
    add("--compute", choices=LAYOUTS, help="what the experts are made of: einsum, or ragged_dot with --skew")
    add("--capacity-factor", type=float, default=2.0 if on_cpu else 1.25, help="room for rows, over their mean number")
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="of jax_ep")
    add("--samples", type=int, default=3 if on_cpu else 20, help=f"turns; one is {IN_A_ROW} steps of each variant")
    add("--skew", type=skew, nargs="+", metavar="SIGMA", help="time jax_ep alone: lognormal sigmas, or hot")
    add("--tolerance", type=float, default=0.0, help="with --skew: of the balanced placement")
    add("--replicas", type=int, help="with --skew: slots per rank for copies of experts (all experts of a rank)")
    add("--json", metavar="FILE", help="write what was measured there")
    options = parser.parse_args(argv)
    options.compute = options.compute or ("ragged_dot" if options.skew else "einsum")
    for wrong in mismatches(options, num_ranks):
        parser.error(wrong)
    options.replicas = options.replicas or options.experts // num_ranks
    for wrong in skew_mismatches(options, num_ranks):
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
    result = (measure_skewed if options.skew else measure)(options, Mesh(np.array(devices), (AXIS,)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    (show_skewed if options.skew else show)(result)
    return 0 if result["checked"] else 1


if __name__ == "__main__":
    allow_virtual_cpus()
    sys.exit(main())
