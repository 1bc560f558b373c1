"""Measures how much of the communication hides behind computation: dispatch and combine beside GEMMs.

    python benchmarks/overlap.py --json overlap.json          # all GPUs of this machine, else 8 virtual CPU devices

The program measures two forms, with the recipes of docs/overlap.md, and their backward passes:

    shared expert   GEMMs that do not depend on the experts run beside the dispatch, and more GEMMs beside the combine
    two halves      the experts of one half of the batch run beside the dispatch and the combine of the other half.
                    Nothing runs beside the first dispatch and the last combine, so at most half of the communication
                    can be hidden

Each form is a chain of STEPS steps in one executable. In the forms with "backward", the first step is the forward pass.
Every later step is the backward pass of this first step. Its cotangents are the results of the step before. GEMMs take
the place of the experts, and the rows that arrive go back unchanged, so only the communication and the GEMMs count. The
number of GEMMs beside each operation is at least one, and otherwise such that they take about as long as the operation
alone. The program runs each chain sequentially, and overlapped by the recipe, for each number of streaming
multiprocessors (SMs) that an operation may use. It runs them with GEMMs of cuBLAS and of Triton, because XLA by itself
chooses the one that is faster alone, and its choice varies between runs. All tokens must come back unchanged, bit for
bit. (In the layout "token", combine adds the rows of a token, and the sums must have the expected bits.) Times are from
a profiler trace of the GPUs. In the JSON file, they are per step, and medians over executions and GPUs:

    alone_us            the communication without GEMMs
    gemms_us            the GEMMs without communication
    sequential_us       the communication and the GEMMs, one after the other
    overlapped_us       the communication and the GEMMs, overlapped by the recipe
    hidden_share        (sequential_us - overlapped_us) / alone_us: the fraction of the communication that costs no time
    beside_gemms        the fraction of the communication kernels' time in which a GEMM ran on the same GPU
    gemms_slowed        the GEMMs' time overlapped, divided by their time sequentially: they have fewer SMs
    gemm_kernels        the names of the GEMMs' kernels
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep as ep
from jax_ep._layouts import LAYOUTS, LayoutName
from jax_ep.bench import report
from jax_ep.bench.cases import Case, Inputs, make_inputs
from jax_ep.bench.devices import allow_virtual_cpus
from jax_ep.bench.exchanges import AXIS, open_group
from jax_ep.bench.options import case_of, mismatches, sms_or_auto
from jax_ep.bench.timeline import KINDS, TRACE_OPTIONS, Event, trace

STEPS = 8
EXECUTIONS = 5  # traced executions
WARM_UPS = 2
GEMMS_TIMED = 32
CAPACITY_FACTOR = 2  # capacity, divided by the mean number of rows
GEMMS_BY = {"auto": {}, "cublas": {"xla_gpu_enable_triton_gemm": False}, "triton": {"xla_gpu_cublas_fallback": False}}


def overlapped(start: Callable, operands: Any, done: Callable, compute: Callable, x: Any) -> tuple[Any, Any]:
    """done(start(*operands)), compute(x), where compute(x) runs while the rows travel."""
    operands, x = lax.optimization_barrier((operands, x))  # start and compute wait for all inputs of both
    pending, x = lax.optimization_barrier((start(*operands), x))  # compute comes after the start
    pending, y = lax.optimization_barrier((pending, compute(x)))  # the done comes after compute
    return done(pending), y


def sequential(start: Callable, operands: Any, done: Callable, compute: Callable, x: Any) -> tuple[Any, Any]:
    """The same results, one after the other. Nothing else runs beside them."""
    operands, x = lax.optimization_barrier((operands, x))
    result, x = lax.optimization_barrier((done(start(*operands)), x))
    return lax.optimization_barrier((result, compute(x)))


class Work(NamedTuple):
    """The number of GEMMs beside a dispatch and beside a combine."""

    dispatch: int
    combine: int


class Gemms(NamedTuple):
    """`count` products of rows [M, H], one after the other, with weights [H, H]."""

    weights: jax.Array
    count: int

    def __call__(self, rows: jax.Array) -> jax.Array:
        for _ in range(self.count):
            rows = rows @ self.weights
        return rows


class Exchange(NamedTuple):
    """The group and the layout of all operations."""

    group: ep.Group
    layout: LayoutName

    def start(self, *inputs: jax.Array) -> Any:
        capacity = CAPACITY_FACTOR * inputs[0].shape[0] * self.group.top_k if self.layout == "ragged" else None
        return ep.dispatch_start(*inputs, group=self.group, layout=self.layout, capacity=capacity)

    def after_steps(self, x: np.ndarray, topk_idx: np.ndarray) -> np.ndarray:
        """Returns what becomes of x in STEPS steps, which send the rows that arrive back as they are.

        In the layout "token", a row comes back from each rank that the token names, and combine adds these rows.
        """
        if self.layout != "token":
            return x
        ranks = np.sort(topk_idx // (self.group.num_experts // self.group.num_ranks), axis=-1)
        ranks_of_token = 1 + np.sum(ranks[:, 1:] != ranks[:, :-1], axis=-1, keepdims=True)
        for _ in range(STEPS):
            row = total = x.astype(np.float32)
            for added in range(1, ranks_of_token.max()):
                total = np.where(added < ranks_of_token, total + row, total)
            x = total.astype(x.dtype)
        return x


def shared_expert(
    order: Callable, exchange: Exchange, work: Work, weights: jax.Array, inputs: Inputs, rows: Any
) -> Any:
    """A step: inputs.x of the next one, and the GEMMs' rows."""
    recv, rows = order(exchange.start, inputs, ep.dispatch_done, Gemms(weights, work.dispatch), rows)
    return order(ep.combine_start, (recv.x, recv), ep.combine_done, Gemms(weights, work.combine), rows)


def two_halves(order: Callable, exchange: Exchange, work: Work, weights: jax.Array, inputs: Inputs, rows: Any) -> Any:
    """A step: inputs.x of the next one, and the GEMMs' rows."""
    start = exchange.start
    half = inputs.x.shape[0] // 2
    first, second = jax.tree.map(lambda a: a[:half], inputs), jax.tree.map(lambda a: a[half:], inputs)
    # The GEMMs take the place of the experts of a half, so they run after its rows have arrived.
    recv, rows = lax.optimization_barrier((ep.dispatch_done(start(*first)), rows))
    recv_2, rows = order(start, second, ep.dispatch_done, Gemms(weights, work.dispatch), rows)
    recv_2, rows = lax.optimization_barrier((recv_2, rows))
    y, rows = order(ep.combine_start, (recv.x, recv), ep.combine_done, Gemms(weights, work.combine), rows)
    recv_2, rows = lax.optimization_barrier((recv_2, rows))
    return jnp.concatenate([y, ep.combine_done(ep.combine_start(recv_2.x, recv_2))]), rows


class Form(NamedTuple):
    step: Callable
    parts: int  # the number of dispatches in a step, and of combines
    backward: bool = False  # all steps but the first are backward passes of the first

    def work(self, gemms_of: Callable[[str], int]) -> Work:
        """`gemms_of(kind)` returns the number of GEMMs that take as long as a kernel of `kind`, one of KINDS."""
        dispatch, combine = map(gemms_of, KINDS)
        # combine's backward pass is a dispatch kernel, and runs beside the gradient of combine's GEMMs.
        return Work(combine, dispatch) if self.backward else Work(dispatch, combine)


FORMS = {
    "shared expert": Form(shared_expert, 1),
    "two halves": Form(two_halves, 2),
    "shared expert, backward": Form(shared_expert, 1, backward=True),
    "two halves, backward": Form(two_halves, 2, backward=True),
}


class Bench(NamedTuple):
    """The data that all chains of a run share."""

    exchange: Exchange
    inputs: Inputs  # the ranks' arrays, joined along the first axis
    weights: jax.Array
    rows: jax.Array
    gemms_by: str = "auto"


def make_bench(group: ep.Group, case: Case, gemm_rows: int) -> Bench:
    inputs = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), make_inputs(case))
    rng = np.random.default_rng(2)
    weights = (rng.standard_normal((case.hidden, case.hidden)) / np.sqrt(case.hidden)).astype(jnp.dtype(case.dtype))
    rows = np.ones((case.ranks * gemm_rows, case.hidden), jnp.dtype(case.dtype))
    split, whole = (NamedSharding(group.mesh, spec) for spec in (PartitionSpec(AXIS), PartitionSpec()))
    operands = jax.device_put((inputs, weights, rows), (split, whole, split))
    return Bench(Exchange(group, case.layout), *operands)


def compile_chain(bench: Bench, form: Form, order: Callable, work: Work) -> Callable[[], Any]:
    """Compiles a chain of STEPS steps. Each step uses the results of the step before."""

    def chain(inputs: Inputs, weights: jax.Array, rows: jax.Array) -> Any:
        def step(x: jax.Array, rows: jax.Array) -> Any:
            return form.step(order, bench.exchange, work, weights, inputs._replace(x=x), rows)

        state, steps = (inputs.x, rows), [step] * STEPS
        if form.backward:
            state, gradient = jax.vjp(step, *state)
            steps = [lambda *cotangents: gradient(cotangents)] * (STEPS - 1)
        for step in steps:
            state = lax.optimization_barrier(state)  # without it, two steps would overlap
            state = step(*state)
        return state

    return compile_on_ranks(chain, bench)


def compile_gemms(bench: Bench) -> Callable[[], Any]:
    return compile_on_ranks(lambda inputs, weights, rows: Gemms(weights, GEMMS_TIMED)(rows), bench)


def compile_on_ranks(fn: Callable, bench: Bench) -> Callable[[], Any]:
    mesh, split, whole = bench.exchange.group.mesh, PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(split, whole, split), out_specs=split, check_vma=False)
    operands = bench.inputs, bench.weights, bench.rows
    options = TRACE_OPTIONS | GEMMS_BY[bench.gemms_by]
    return partial(jax.jit(mapped).lower(*operands).compile(options), *operands)


def events_of(run: Callable[[], Any]) -> list[list[Event]]:
    """Returns the events of each GPU in EXECUTIONS executions. The list is empty without GPUs."""

    def executions(times: int) -> None:
        for _ in range(times):
            jax.block_until_ready(run())

    executions(WARM_UPS)
    if jax.default_backend() == "cpu":
        return []
    return [sorted(events, key=lambda event: event.start_ns) for events in trace(partial(executions, EXECUTIONS))]


def communicates(event: Event, kinds: Sequence[str] = (*KINDS, "start", "hold")) -> bool:
    return any(f"{kind}_kernel" in event.name for kind in kinds)


def by_step(events: Sequence[Event]) -> list[list[Event]]:
    """Splits the events of all executions into steps. Every step has the same number of events."""
    size, rest = divmod(len(events), STEPS * EXECUTIONS)
    if rest or not size:
        raise SystemExit(
            f"the trace has {len(events)} of some kernels, not a multiple of {STEPS * EXECUTIONS}; run it again"
        )
    return [list(events[i : i + size]) for i in range(0, len(events), size)]


def step_us(gpus: Sequence[Sequence[Event]]) -> float:
    """Returns the time of a step. Measures from the first communication of the second step to that of the last step.

    In the first step, a GPU whose host was early waits for the other GPUs' hosts.
    """
    times = []
    for events in gpus:
        starts = [
            step[0].start_ns for step in by_step([event for event in events if communicates(event, (*KINDS, "start"))])
        ]
        times += [(starts[i + STEPS - 1] - starts[i + 1]) / (STEPS - 2) / 1e3 for i in range(0, len(starts), STEPS)]
    return statistics.median(times)


def kind_us(gpus: Sequence[Sequence[Event]], kind: str) -> float:
    """Returns the time of the kernels of one kind in a step."""
    return statistics.median(
        sum(event.duration_ns for event in step) / 1e3
        for events in gpus
        for step in by_step([event for event in events if communicates(event, [kind])])
    )


def compute_us(gpus: Sequence[Sequence[Event]]) -> float:
    """Returns the time of all kernels that do not communicate, in one execution."""
    busy = (sum(event.duration_ns for event in events if not communicates(event)) for events in gpus)
    return statistics.median(busy) / 1e3 / EXECUTIONS


def beside_gemms(gpus: Sequence[Sequence[Event]]) -> float:
    """Returns the fraction of the communication's time in which another kernel runs on the same GPU."""
    total = beside = 0.0
    for events in gpus:
        gemms = [(e.start_ns, e.start_ns + e.duration_ns) for e in events if not communicates(e)]  # one at a time
        for event in (event for event in events if communicates(event, KINDS)):
            end = event.start_ns + event.duration_ns
            total += event.duration_ns
            beside += sum(max(0.0, min(end, stop) - max(event.start_ns, start)) for start, stop in gemms)
    return beside / total


def measure(bench: Bench, form: Form) -> dict[str, Any]:
    """Measures a form. Returns a row of the JSON file, without the settings."""
    work, row = Work(1, 1), {}
    alone = events_of(compile_chain(bench, form, sequential, Work(0, 0)))
    gemms = events_of(compile_gemms(bench))
    if alone:
        gemm = compute_us(gemms) / GEMMS_TIMED
        work = form.work(lambda kind: max(1, round(kind_us(alone, kind) / form.parts / gemm)))
        kernels = sorted({event.name for events in gemms for event in events})
        row = {"alone_us": step_us(alone), "gemms_us": gemm * sum(work), "gemm_kernels": kernels}
    chains = [compile_chain(bench, form, order, work) for order in (sequential, overlapped)]
    one_by_one, both = (events_of(chain) for chain in chains)
    if alone:
        row |= {"sequential_us": step_us(one_by_one), "overlapped_us": step_us(both)}
        row |= {
            "hidden_share": (row["sequential_us"] - row["overlapped_us"]) / row["alone_us"],
            "beside_gemms": beside_gemms(both),
            "gemms_slowed": compute_us(both) / compute_us(one_by_one),
        }
    expected = bench.exchange.after_steps(*map(np.asarray, (bench.inputs.x, bench.inputs.topk_idx)))
    checked = all(np.array_equal(chain()[0], expected) for chain in chains)
    return {"gemms": work._asdict(), **row, "checked": checked}


def measure_all(options: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """Measures all forms. Returns the content of the JSON file."""
    rows = []
    for num_sms in options.num_sms:
        case = case_of(options, mesh.size, routing="uniform", layout=options.layout, num_sms=num_sms)
        with open_group(case, mesh, options.backend) as group:
            bench = make_bench(group, case, options.gemm_rows)
            rows += [
                {"form": name, "num_sms": num_sms, "gemms_by": by, **measure(bench._replace(gemms_by=by), FORMS[name])}
                for by in options.gemms_by
                for name in options.forms
            ]
            group.check()
            backend = group.backend
    of_rows = ("json", "num_sms", "gemms_by", "forms")
    return {name: value for name, value in vars(options).items() if name not in of_rows} | {
        "ranks": mesh.size,
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "backend": backend,
        "rows": rows,
        "checked": all(row["checked"] for row in rows),
    }


def show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['ranks']} x {result['device']}, backend {result['backend']}; microseconds",
        box=box.SIMPLE,
        padding=0,
    )
    table.add_column("form", no_wrap=True)
    table.add_column("SMs", justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    times = {"alone_us": "alone", "gemms_us": "GEMMs", "sequential_us": "in turn", "overlapped_us": "overlapped"}
    shares = {"hidden_share": "hidden", "beside_gemms": "beside"}
    for heading in (*times.values(), *shares.values(), "slowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        cells = [f"{row[name]:.0f}" if name in row else "-" for name in times]
        cells += [f"{row[name]:.0%}" if name in row else "-" for name in shares]
        cells += [f"{row['gemms_slowed']:.2f}" if "gemms_slowed" in row else "-"]
        table.add_row(row["form"], str(row["num_sms"] or "auto"), row["gemms_by"], *cells)
    console = Console(width=max(100, Console().width))  # for the longest rows
    console.print(table)
    console.print(f"{'all' if result['checked'] else 'WRONG: not all'} results have the expected bits")


def parse(argv: Sequence[str] | None, *, num_ranks: int, on_cpu: bool) -> argparse.Namespace:
    """Parses the options. The default sizes are small on CPUs."""
    parser = argparse.ArgumentParser(
        description="Measures how much of dispatch and combine hides behind GEMMs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=16 if on_cpu else 4096, help="tokens per rank, an even number")
    add("--hidden", type=int, default=32 if on_cpu else 4096, help="channels of a token")
    add("--experts", type=int, default=16 if on_cpu else 64, help="experts in all")
    add("--top-k", type=int, default=2 if on_cpu else 8, help="experts per token")
    add(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="dtype of activations and GEMMs"
    )
    add("--layout", choices=LAYOUTS, default="ragged", help="layout of the rows that arrive")
    add("--gemm-rows", type=int, help="rows of the GEMMs, per rank; None: all tokens")
    by = ["auto"] if on_cpu else ["cublas", "triton"]
    add("--gemms-by", choices=GEMMS_BY, nargs="+", default=by, help="library of the GEMMs; auto: XLA chooses")
    add("--forms", choices=FORMS, nargs="+", default=list(FORMS), help="the forms to measure")
    add("--num-sms", type=sms_or_auto, nargs="+", default=[24, None], help="SMs that an operation may use, or auto")
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="backend of jax_ep")
    add("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args(argv)
    if options.gemm_rows is None:
        options.gemm_rows = options.tokens
    for wrong in mismatches(options, num_ranks):
        parser.error(wrong)
    if options.tokens % 2:
        parser.error(f"--tokens is {options.tokens}; it must be an even number, as a batch has two halves")
    if why := report.missing("rich"):
        parser.error(why)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes the JSON file. Exit status 1 if a token came back wrong."""
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    options = parse(argv, num_ranks=len(devices), on_cpu=on_cpu)
    if on_cpu:
        print("virtual CPU devices have no time line: shows that it works, not what is hidden")
    result = measure_all(options, Mesh(np.array(devices), (AXIS,)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    show(result)
    return 0 if result["checked"] else 1


if __name__ == "__main__":
    allow_virtual_cpus()
    sys.exit(main())
