"""`jax-ep bench`, or `python -m jax_ep.bench`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep as ep
from jax_ep import _checks, _network, _processes, _wires
from jax_ep._group import BackendName
from jax_ep._layouts import LAYOUTS
from jax_ep.bench import report, run_page
from jax_ep.bench.cases import ROUTINGS, Case
from jax_ep.bench.devices import allow_virtual_cpus
from jax_ep.bench.exchanges import AXIS, EpExchange, LaxExchange, open_group
from jax_ep.bench.floor import measure_floor, over_network
from jax_ep.bench.models import MODELS
from jax_ep.bench.options import flag, mismatches, sms_or_auto
from jax_ep.bench.timing import Timing, time_backward, time_forward

OTHERS = ("balance", "experts")  # modules with a bench of their own: jax-ep bench NAME
OUTPUTS = ("json", "plot", "report")  # options that name a file or a directory to write; only process 0 writes


def measure(case: Case, mesh: Mesh, *, backend: BackendName, pairs: int, grad: bool, lax: bool) -> dict[str, Any]:
    """Measures a case. Returns a row of the report."""
    with open_group(case, mesh, backend) as group:
        exchange = EpExchange(
            group,
            case.layout,
            case.wire,
            case.combine_wire,
            case.grad_wire,
            capacity_factor=case.capacity_factor,
            zero_pad=grad,
        )
        forward = time_forward(exchange, case, mesh, pairs, traced=True)
        group.check()
        backward = time_backward(exchange, forward, mesh, pairs) if grad else None
        group.check()
        row = dataclasses.asdict(case) | {
            "backend": group.backend,
            "device": mesh.devices.flat[0].device_kind,
            "chain": pairs,
            "zero_pad": grad,
            "arena_bytes": group.memory_bytes,
        }
        row |= _transport(group, case, forward.topk_idx)
    topk_idx, timing = forward.topk_idx, forward.timing
    num_dropped = sum(int(np.sum(shard.data)) for shard in forward.recv.num_dropped.addressable_shards)
    if num_dropped:
        print(f"{num_dropped} rows did not fit, so the results are wrong: give a larger --capacity-factor")
    del forward  # its arrays are large, and lax's arrays need the memory
    floor = measure_floor(case, topk_idx, mesh)
    plain = dataclasses.replace(case, wire=None, combine_wire=None, grad_wire=None, num_sms=None, layout="ragged")
    padded = _time_lax(plain, mesh, pairs, ragged=False) if lax else None
    ragged = _time_lax(plain, mesh, pairs, ragged=True) if lax else None
    timings = [timing, backward, padded, ragged]
    return (
        row
        | _times(timing, dispatch_kernel="dispatch_us", combine_kernel="combine_us")
        | _times(backward, prefix="grad_", dispatch_kernel="combine_us", combine_kernel="dispatch_us")
        | {
            "floor_dispatch_us": floor and floor.dispatch_us,
            "floor_combine_us": floor and floor.combine_us,
            "floor_pair_us": floor and sum(floor),
            "lax_pair_us": padded and padded.wall.pair_us,
            "lax_ragged_pair_us": ragged and ragged.wall.pair_us,
            "checked": all(timing.right for timing in timings if timing),
        }
    )


def _transport(group: ep.Group, case: Case, topk_idx: np.ndarray) -> dict[str, str | int | None]:
    """Returns the part of a row that describes how ranks reach each other."""
    hosts = _processes.exchange_among_all("jax_ep.bench", "hosts", _processes.host())
    nodes = _network.nodes(list(group.mesh.devices.flat), hosts)
    num_nodes = len(set(nodes))
    by_cuda = "nvshmem" if group._impl.transport == "network" and num_nodes > 1 else "nvlink"
    transport = by_cuda if group.backend == "cuda" else None
    rows, num_bytes = over_network(case, topk_idx, len(nodes) // num_nodes) if transport == "nvshmem" else (None, None)
    return {
        "processes": len(hosts),
        "nodes": num_nodes,
        "transport": transport,
        "network_rows": rows,
        "network_bytes": num_bytes,
    }


def _times(
    timing: Timing | None, *, prefix: str = "", dispatch_kernel: str, combine_kernel: str
) -> dict[str, float | None]:
    """Returns the part of a row for one chain. The last two arguments name the operations that ran the two kernels."""
    line = timing and timing.time_line
    times = {
        "pair_us": line and line.pair_us,
        "pair_us_fastest_rank": line and line.pair_us_fastest_rank,
        "pair_us_slowest_rank": line and line.pair_us_slowest_rank,
        "pair_us_median": line and line.pair_us_median,
        "pair_us_p95": line and line.pair_us_p95,
        dispatch_kernel: line and line.dispatch_kernel_us,
        combine_kernel: line and line.combine_kernel_us,
        "wall_pair_us": timing and timing.wall.pair_us,
        "wall_waiting_pair_us": timing and timing.wall.waiting_pair_us,
    }
    return {prefix + name: us for name, us in times.items()}


@functools.cache  # independent of the wire: several cases of one run often share it
def _time_lax(case: Case, mesh: Mesh, pairs: int, *, ragged: bool) -> Timing | None:
    """Times a collective of lax. Returns None, on all ranks, if XLA does not have it here or lacks memory for it."""
    try:
        return time_forward(LaxExchange(case, ragged), case, mesh, pairs, traced=False).timing
    except (jax.errors.JaxRuntimeError, ep.Error) as error:  # raised here, or published by another process
        if "RESOURCE_EXHAUSTED" in str(error):
            name = "ragged_all_to_all" if ragged else "all_to_all"
            warnings.warn(f"lax.{name} is left out at {case.tokens} tokens: out of memory", stacklevel=2)
        elif "UNIMPLEMENTED" not in str(error):
            raise
        return None


def _parse(argv: Sequence[str] | None, *, num_ranks: int, on_cpu: bool) -> argparse.Namespace:
    """Parses the options. The default sizes are small on CPUs."""

    def listed(item: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
        def values(text: str) -> list[Any]:
            try:
                return [item(part) for part in text.split(",")]
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r} is no list of {what}") from None

        return values

    def wires(formats: Iterable[str]) -> Callable[[str], list[Any]]:
        def wire(text: str) -> str | None:
            if text not in ["none", *formats]:
                raise argparse.ArgumentTypeError(
                    f"{text!r} is no choice of this option; choose from none, {', '.join(formats)}"
                )
            return None if text == "none" else text

        return listed(wire, "wires")

    numbers = listed(int, "whole numbers, such as 8,32")
    sms = listed(sms_or_auto, "whole numbers or auto, such as 24,auto")
    parser = argparse.ArgumentParser(
        prog="jax-ep bench",
        description="Times dispatch + combine on this machine's accelerators, or on virtual CPU devices if there are "
        "none. Started in several processes, it times the devices of all. An option that takes a list (1,2,3) makes a "
        "case of every combination.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=numbers, default="8,32" if on_cpu else "8,32,128", help="tokens per rank; a list")
    add(
        "--model",
        choices=MODELS,
        help="time the sizes of this model; --hidden, --top-k and --experts override them",
    )
    hidden, top_k, experts = (256, 4, 32) if on_cpu else (7168, 8, 256)
    add("--hidden", type=numbers, default=argparse.SUPPRESS, help=f"channels of a token; a list (default: {hidden})")
    add("--top-k", type=numbers, default=argparse.SUPPRESS, help=f"experts per token; a list (default: {top_k})")
    add("--experts", type=numbers, default=argparse.SUPPRESS, help=f"experts in all; a list (default: {experts})")
    # The bench cannot check "fp8_pow2" on the other legs: with its scales, sums of make_inputs are not exact in fp8.
    for name, formats, what in (
        ("--wire", list(_wires.DISPATCH_WIRES), "tokens travel to the experts"),
        ("--combine-wire", ["fp8"], "the experts' outputs come back"),
        (
            "--grad-wire",
            ["fp8", "fp8_e5m2"],
            "cotangents travel, with --grad: the grad_wire of dispatch and of combine",
        ),
    ):
        add(
            name,
            type=wires(formats),
            default="none",
            help=f"format in which {what}: none, {', '.join(formats)}; a list",
        )
    add("--num-sms", type=sms, default="auto", help="SMs that an operation may use; a list")
    add("--layout", choices=LAYOUTS, default="ragged", help="layout of the rows that arrive")
    add(
        "--capacity-factor",
        type=float,
        metavar="FACTOR",
        help="room for the rows that arrive, as in jax_ep.dispatch; without it, there is room for any routing",
    )
    add("--routing", choices=ROUTINGS, default="uniform", help="skewed: half of all rows go to one rank")
    add("--dtype", choices=_checks.DTYPES, default="bfloat16", help="dtype of activations")
    add("--backend", choices=["auto", *ep.backends()], default="auto", help="backend of jax_ep")
    add("--chain", type=int, default=4 if on_cpu else 50, help="pairs in one executable; 3 or more for GPU times")
    add("--grad", action="store_true", help="also time the backward pass")
    compare = argparse.BooleanOptionalAction
    add("--lax", action=compare, default=True, help="also time lax.all_to_all and lax.ragged_all_to_all")
    add("--json", metavar="FILE", help="also write the rows to FILE")
    add("--plot", metavar="FILE", help="plot the time per pair over the tokens to FILE (needs matplotlib)")
    add("--report", metavar="FOLDER", help="write a page about the run to FOLDER: report.html, report.md and plots")
    options = parser.parse_args(argv)
    if options.model:
        model = MODELS[options.model]
        hidden, top_k, experts = model.hidden, model.top_k, model.num_experts
    sizes = {"hidden": [hidden], "top_k": [top_k], "experts": [experts]}
    options = argparse.Namespace(**sizes | vars(options))
    if jax.process_index() != 0:
        vars(options).update(dict.fromkeys(OUTPUTS))
    if wrong := _mismatch(options, num_ranks):
        parser.error(wrong)
    return options


def _mismatch(options: argparse.Namespace, num_ranks: int) -> str | None:
    """Returns an error in the options of any process, or None. All processes must have the same options.

    The error is the same in all processes, except that other processes see the process named.
    """
    missing = report.missing("matplotlib") if options.plot else None
    wrong = f"--plot: {missing}" if missing else next(mismatches(options, num_ranks), None)
    mine = {name: value for name, value in vars(options).items() if name not in OUTPUTS}
    published = _processes.exchange_among_all("jax_ep.bench", "options", [wrong, mine])
    for process, (wrong, theirs) in published.items():
        if wrong:
            return wrong if process == jax.process_index() else f"process {process}: {wrong}"
        for name, value in theirs.items():
            if value != (first := published[0][1][name]):
                return f"{flag(name)} is {value} in process {process}, {first} in process 0; give all the same"
    return None


def _cases(options: argparse.Namespace, num_ranks: int) -> list[Case]:
    fixed = {"ranks": num_ranks, "dtype": options.dtype, "layout": options.layout, "routing": options.routing}
    fixed["capacity_factor"] = options.capacity_factor
    combinations = itertools.product(*(getattr(options, name) for name in report.SETTINGS))
    return [Case(**fixed, **dict(zip(report.SETTINGS, values, strict=True))) for values in combinations]


def _show(
    measured: Iterable[dict[str, Any]], cases: Sequence[Case], options: argparse.Namespace, command: str
) -> list[dict[str, Any]]:
    """Prints a line for each row as it is measured, and writes the files of the options. Returns the rows."""
    devices = jax.devices()
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    print(f"{len(devices)} x {devices[0].device_kind}{processes}; microseconds per dispatch + combine")
    if devices[0].platform == "cpu":
        print("virtual CPU devices: shows that it works, not how fast it is")
    rows: list[dict[str, Any]] = []
    with report.open_report(cases, grad=options.grad, lax=options.lax) as table:
        for row in measured:
            rows.append(row)
            table.add(row)
            # After every case, so that an error in a later one costs no rows.
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(rows, file, indent=1)
            if options.report:
                page = run_page.write(options.report, rows, command)
    if options.plot:
        report.plot(rows, options.plot)
    if options.report:
        print(f"wrote {page}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, with a line for each case as it is measured. Returns exit status 1 if any result was wrong.

    In several processes, all measure, and process 0 prints.
    """
    argv = sys.argv[1:] if argv is None else argv
    devices = jax.devices()
    options = _parse(argv, num_ranks=len(devices), on_cpu=devices[0].platform == "cpu")
    mesh = Mesh(np.array(devices), (AXIS,))
    cases = _cases(options, mesh.size)
    measured = (
        measure(case, mesh, backend=options.backend, pairs=options.chain, grad=options.grad, lax=options.lax)
        for case in cases
    )
    command = shlex.join(["jax-ep", "bench", *argv])
    rows = _show(measured, cases, options, command) if jax.process_index() == 0 else list(measured)
    return 0 if all(row["checked"] for row in rows) else 1


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command `jax-ep bench`, in one process or several. Returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in OTHERS:
        return importlib.import_module(f"jax_ep.bench.{argv[0]}").run(argv[1:])
    if not _processes.join():
        allow_virtual_cpus()
    return main(argv)


if __name__ == "__main__":
    sys.exit(run())
