"""Random groups and programs against the oracle, for --minutes.

With --late-operations N, N more operations follow, in which ranks are late at random.

    python tests/soak.py --minutes 8 --json soak.json     # all GPUs of this machine, else 8 virtual CPU devices
    python tests/soak.py --seed 1234 --cases 1            # one case again
    python tests/soak.py --backend emulated --adversary   # kernels on emulated GPUs, in another order in each case

A case follows from its seed and the number of devices. It is a group of random sizes over a random mesh, and three
tasks, a few times with other inputs. Each task has operations of one sort, and its results are compared with the
oracle's. The tasks run in one of three ways:

- Each operation is a program of its own. The tasks' programs run in random order.
- All tasks are one program. XLA chooses the order of their operations.
- All tasks are one program with a random order of operations. Some operations are split-phase calls, with as many in
  flight as the group allows.

The exit status is 1 if any case failed; a case that failed does not keep the next ones from running.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_ep as ep
import oracle
from helpers import (
    COMBINE_BOUND,
    assert_combined,
    assert_dispatched,
    assert_each_row_close,
    assert_each_token_combined,
    assert_same_bits,
    num_arena_slots,
    open_group,
    random_rows,
    spin,
    spmd,
    steps_per_second,
    to_numpy,
)
from jax_ep import _native
from shapes import ROUTINGS, SMALL, Shape, make_inputs, np_dtype, random_array

DTYPES = ("bfloat16", "float16", "float32")
MOST_VALUES = 2**21  # in the rows that all ranks of a line receive, by the default capacity
TASKS, ROUNDS = 3, 3
LATEST_S = 1e-3

# One operation after the other. Yields True between the start and the done of a split-phase call, else False.
Steps = Generator[bool, None, Any]


# --- what is drawn --------------------------------------------------------------------------------------------------


def draw_mesh(rng: np.random.Generator, devices: Sequence[Any]) -> Mesh:
    """One or two lines of any length, of any devices."""
    num_ranks = int(rng.integers(1, len(devices) + 1, size=2).max())
    num_lines = int(rng.integers(1, min(2, len(devices) // num_ranks) + 1))
    chosen = rng.permutation(len(devices))[: num_lines * num_ranks]
    return Mesh(np.array(devices)[chosen].reshape(num_lines, num_ranks), ("data", "ep"))


def draw_shape(rng: np.random.Generator, num_ranks: int) -> Shape:
    """`tokens` are the most that a task may have."""
    dtype = str(rng.choice(DTYPES))
    unit = 128 if rng.random() < 0.7 else 16 // np_dtype(dtype).itemsize
    hidden = unit * int(rng.integers(1, 1 + 2048 // unit))
    experts_per_rank = int(2 ** rng.uniform(0, 4))
    num_experts = num_ranks * experts_per_rank
    top_k = int(rng.integers(1, min(num_experts, 8 if rng.random() < 0.8 else 32) + 1))
    most_tokens = MOST_VALUES // (num_ranks**2 * experts_per_rank * hidden)
    return Shape("random", num_experts, top_k, hidden, tokens=int(np.clip(most_tokens, 1, 600)), dtype=dtype)


def draw_tokens(rng: np.random.Generator, shape: Shape) -> Shape:
    return dataclasses.replace(shape, tokens=int(shape.tokens ** rng.random()))


def draw_layout(rng: np.random.Generator, shape: Shape, num_ranks: int) -> dict[str, Any]:
    """Layout, capacity and alignment, as dispatch and the oracle take them."""
    layout = str(rng.choice(["expert", "ragged"]))
    alignment = int(rng.choice([1, 1, 4, 16, 128])) if layout == "ragged" else 1
    capacity = None
    if rng.random() < 0.5:
        mean = shape.tokens * shape.top_k // (shape.num_experts // num_ranks if layout == "expert" else 1)
        capacity = oracle.round_up(1 + int(rng.uniform(0, 2) * mean), alignment)
    return {"layout": layout, "capacity": capacity, "alignment": alignment}


def draw_wire(rng: np.random.Generator, shape: Shape) -> str | None:
    return None if shape.hidden % 16 else [None, "fp8", "fp8_pow2"][rng.integers(3)]


def draw_inputs(rng: np.random.Generator, shape: Shape, num_ranks: int) -> Any:
    return make_inputs(shape, num_ranks, str(rng.choice(list(ROUTINGS))), int(rng.integers(2**32)))


# --- tasks ----------------------------------------------------------------------------------------------------------


def in_programs_of_their_own(mesh: Mesh, fn: Any) -> Any:
    return jax.jit(spmd(fn, mesh))


class InOrder:
    """Makes functions of one program run in the order in which they are traced."""

    def begin(self) -> None:
        self.former: Any = jnp.zeros(())

    def __call__(self, fn: Any) -> Any:
        def run(*operands: Any) -> Any:
            operands, former = lax.optimization_barrier((operands, self.former))
            result, self.former = lax.optimization_barrier((fn(*operands), former))
            return result

        return run


def operation(program: Any, whole: Any, split_phase: tuple[Any, Any] | None = None, **options: Any) -> Any:
    """The steps of an operation: a whole call or, if `split_phase` has a start and a done, a split-phase call.

    `program` makes the function that runs a call.
    """

    def run_whole(*operands: Any) -> Steps:
        result = run(*operands)
        yield False
        return result

    def run_split_phase(*operands: Any) -> Steps:
        pending = start(*operands)
        yield True
        return done(pending)

    if split_phase is None:
        run = program(partial(whole, **options))
        return run_whole
    start, done = program(partial(split_phase[0], **options)), program(split_phase[1])
    return run_split_phase


class Layer:
    """dispatch, combine and dispatch_like."""

    num_operations = 3

    def __init__(
        self, rng: np.random.Generator, group: ep.Group, shape: Shape, program: Any, *, split_phase: bool
    ) -> None:
        self.num_ranks, self.shape = group.num_ranks, draw_tokens(rng, shape)
        self.layout = draw_layout(rng, self.shape, group.num_ranks)
        self.wire, self.quantized = draw_wire(rng, shape), False
        if self.wire == "fp8" and rng.random() < 0.5:
            self.wire, self.quantized = None, True
        self.weighted = rng.random() < 0.8
        self.dequantize = bool(rng.random() < 0.5)
        self.zero_pad = [None, False, True][rng.integers(3)]
        self.other_dtype = str(rng.choice(DTYPES))
        most_channels = shape.hidden * np_dtype(shape.dtype).itemsize // np_dtype(self.other_dtype).itemsize
        self.other_hidden = int(rng.integers(1, most_channels + 1))
        is_split_phase = [split_phase and rng.random() < 0.7 for _ in range(2)]
        self.dispatch = operation(
            program,
            ep.dispatch,
            (ep.dispatch_start, ep.dispatch_done) if is_split_phase[0] else None,
            group=group,
            wire=self.wire,
            dequantize=self.dequantize,
            zero_pad=self.zero_pad,
            **self.layout,
        )
        self.combine = operation(
            program,
            ep.combine,
            (ep.combine_start, ep.combine_done) if is_split_phase[1] else None,
            out_dtype=[None, jnp.float32][rng.integers(2)],
        )
        self.dispatch_like = operation(program, ep.dispatch_like)

    def draw(self, rng: np.random.Generator) -> tuple[Any, oracle.Dispatched]:
        """The operands of all ranks of a line, and what is expected of dispatch."""
        x, topk_idx, topk_weights = draw_inputs(rng, self.shape, self.num_ranks)
        if self.quantized:
            x = oracle.quantize(x, "fp8")
        inputs = x, topk_idx, topk_weights if self.weighted else None
        is_fp8 = self.quantized or self.wire is not None
        expected = oracle.dispatch(
            *inputs,
            num_experts=self.shape.num_experts,
            wire=self.wire,
            dequantize_to=np_dtype(self.shape.dtype) if is_fp8 and self.dequantize else None,
            **self.layout,
        )
        y = random_rows(expected.route, self.shape.hidden, self.shape.dtype, int(rng.integers(2**32)))
        other = random_array(rng, (self.num_ranks, self.shape.tokens, self.other_hidden), self.other_dtype)
        return (inputs, y, other), expected

    def run(self, inputs: Any, y: Any, other: Any) -> Steps:
        recv = yield from self.dispatch(*inputs)
        out = yield from self.combine(y, recv)
        rows = yield from self.dispatch_like(other, recv)
        return recv, out, rows

    def check(self, operands: Any, expected: oracle.Dispatched, results: Any) -> None:
        _, y, other = operands
        recv, out, rows = results
        route = expected.route
        assert_dispatched(recv, expected, zero_pad=bool(self.zero_pad))
        assert_combined(out, y, expected.weights, route, dtype=self.shape.dtype)
        assert_each_token_combined(out, y, expected.weights, route, dtype=self.shape.dtype)
        assert_same_bits(rows[route.is_token], route.gather(other)[route.is_token], "dispatch_like")


class Gradient:
    """The transposes of dispatch and of combine."""

    num_operations = 3  # nobody needs what combine returns

    def __init__(self, rng: np.random.Generator, group: ep.Group, shape: Shape, program: Any) -> None:
        self.num_ranks, self.shape = group.num_ranks, draw_tokens(rng, shape)
        self.layout = draw_layout(rng, self.shape, group.num_ranks)
        options = {"group": group, "wire": draw_wire(rng, shape), **self.layout}

        def cotangents(drows, dweights, dout, y, x, topk_idx, topk_weights):
            def dispatch(x, topk_weights):
                recv = ep.dispatch(x, topk_idx, topk_weights, **options)
                return (recv.x, recv.weights), recv

            def combine(y, weights):
                return ep.combine(y, dataclasses.replace(recv, weights=weights))

            _, transpose, recv = jax.vjp(dispatch, x, topk_weights, has_aux=True)
            return transpose((drows, dweights)), jax.vjp(combine, y, recv.weights)[1](dout)

        self.cotangents = operation(program, cotangents)

    def draw(self, rng: np.random.Generator) -> tuple[Any, oracle.Dispatched]:
        inputs = draw_inputs(rng, self.shape, self.num_ranks)
        expected = oracle.dispatch(*inputs, num_experts=self.shape.num_experts, **self.layout)
        drows, y = (
            random_rows(expected.route, self.shape.hidden, self.shape.dtype, int(rng.integers(2**32))) for _ in "12"
        )
        dweights = random_array(rng, expected.weights.shape, "float32")
        dout = random_array(rng, inputs.x.shape, self.shape.dtype)
        return (drows, dweights, dout, y, *inputs), expected

    def run(self, *operands: Any) -> Steps:
        return (yield from self.cotangents(*operands))

    def check(self, operands: Any, expected: oracle.Dispatched, results: Any) -> None:
        drows, dweights, dout, y, _, _, topk_weights = operands
        (dx, dtopk_weights), (dy, drow_weights) = results
        route = expected.route
        self._assert_close(dx, *oracle.combine(drows, None, route))
        gathered = np.zeros_like(topk_weights)
        gathered[tuple(route.source[route.is_token].T)] = dweights[route.is_token]
        assert_same_bits(dtopk_weights, gathered, "cotangent of topk_weights")
        rows = route.gather(dout.astype(np.float64))
        weighted = expected.weights[..., None].astype(np.float64) * rows
        self._assert_close(dy, weighted, weighted)
        terms = np.where(route.is_token[..., None], y.astype(np.float64), 0) * rows
        self._assert_close(drow_weights, terms.sum(axis=-1), np.abs(terms).sum(axis=-1))
        assert not dy[~route.is_token].any()
        assert not drow_weights[~route.is_token].any()

    def _assert_close(self, actual: np.ndarray, total: np.ndarray, magnitude: np.ndarray) -> None:
        error = np.linalg.norm(actual.astype(np.float64) - total)
        assert error <= COMBINE_BOUND[self.shape.dtype] * np.linalg.norm(magnitude)
        assert_each_row_close(actual, total, magnitude, dtype=self.shape.dtype)


class Exchange:
    """all_to_all, and all_to_all_back of other rows."""

    num_operations = 2

    def __init__(self, rng: np.random.Generator, group: ep.Group, shape: Shape, program: Any) -> None:
        self.num_ranks, self.shape = group.num_ranks, draw_tokens(rng, shape)
        self.wire, self.dequantize = draw_wire(rng, shape), bool(rng.random() < 0.5)
        self.there = operation(program, ep.all_to_all, group=group, wire=self.wire, dequantize=self.dequantize)
        self.back = operation(program, ep.all_to_all_back, group=group)

    def draw(self, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
        """The operands of all ranks of a line, and which rows of the blocks hold something."""
        tokens, num_experts = self.shape.tokens, self.shape.num_experts
        x = random_array(rng, (self.num_ranks, tokens, self.shape.hidden), self.shape.dtype)
        chosen = (rng.integers(num_experts, size=rng.integers(tokens + 1)) for _ in range(self.num_ranks))
        splits = np.stack([np.bincount(experts, minlength=num_experts).astype(np.int32) for experts in chosen])
        is_sent = np.arange(tokens) < splits.sum(axis=-1, keepdims=True)
        arrives = oracle.all_to_all(is_sent[..., None], splits)[0][..., 0]
        y = random_array(rng, (*arrives.shape, self.shape.hidden), self.shape.dtype)
        y[~arrives] = np.nan
        return (x, splits, y), arrives

    def run(self, x: Any, splits: Any, y: Any) -> Steps:
        there = yield from self.there(x, splits)
        back = yield from self.back(y, splits)
        return there, back

    def check(self, operands: Any, arrives: np.ndarray, results: Any) -> None:
        x, splits, y = operands
        there, back = results
        if self.wire is None:
            sent = [(there.x, x)]
        elif self.dequantize:
            sent = [(there.x, oracle.dequantize(*oracle.quantize(x, self.wire), x.dtype))]
        else:
            sent = zip((there.x, there.scales), oracle.quantize(x, self.wire), strict=True)
        for actual, payload in sent:
            blocks, _ = oracle.all_to_all(payload, splits)
            assert_same_bits(actual[arrives], blocks[arrives], "all_to_all")
        assert_same_bits(there.splits, oracle.all_to_all(x, splits)[1], "splits")
        assert_same_bits(back, oracle.all_to_all_back(y, splits), "all_to_all_back")


def run_tasks(rng: np.random.Generator, most_begun: int, tasks: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The tasks' results. Each step ends what the task's step before has started, and begins one operation, if any.

    An operation that is under way is ended before the `most_begun`-th operation after it begins.
    """
    steps = [task.run(*given) for task, given in zip(tasks, operands, strict=True)]
    results: list[Any] = [None] * len(tasks)
    running, under_way, num_begun = set(range(len(tasks))), {}, 0
    while running:
        due = [i for i, begun in under_way.items() if num_begun + 1 - begun >= most_begun]
        i = due[0] if due else int(rng.choice(sorted(running)))
        under_way.pop(i, None)
        try:
            is_in_flight = next(steps[i])
        except StopIteration as end:
            results[i] = end.value
            running.remove(i)
            continue
        num_begun += 1
        if is_in_flight:
            under_way[i] = num_begun
    return results


def run_case(seed: int, devices: Sequence[Any], backend: str) -> int:
    """Compares a case with the oracle; gives the number of its operations.

    Raises:
        AssertionError: a result is wrong.
        jax_ep.Error: an operation failed.
    """
    rng = np.random.default_rng(seed)
    mesh = draw_mesh(rng, devices)
    num_lines, num_ranks = mesh.devices.shape
    shape = draw_shape(rng, num_ranks)
    settings = {
        "backend": backend,
        "num_sms": [None, None, 1, 4, 16, 66][rng.integers(6)],
        "max_tokens_per_rank": shape.tokens * int(rng.choice([1, 1, 64])),  # a large arena has fewer slots
        "timeout": 20.0,
    }
    in_order = InOrder()
    programs = [partial(in_programs_of_their_own, mesh), lambda fn: fn, in_order]
    program = programs[rng.integers(3)]
    in_one_program = program is not programs[0]
    kinds: list[Any] = [partial(Layer, split_phase=program is in_order)] * 2 + [Exchange] + [Gradient] * in_one_program
    with open_group(mesh, shape, **settings) as group:
        tasks = [kinds[i](rng, group, shape, program) for i in rng.integers(len(kinds), size=TASKS)]

        def run(operands: Any) -> list[Any]:
            in_order.begin()
            return run_tasks(rng, num_arena_slots(group), tasks, operands)

        if in_one_program:
            run = jax.jit(spmd(run, mesh))
        for _ in range(ROUNDS):
            lines = [[task.draw(rng) for task in tasks] for _ in range(num_lines)]
            operands = [
                jax.tree.map(lambda *parts: np.stack(parts), *(given for given, _ in of_lines))
                for of_lines in zip(*lines, strict=True)
            ]
            results = to_numpy(run(operands))
            group.check()
            for number, line in enumerate(lines):
                for task, (given, expected), result in zip(tasks, line, results, strict=True):
                    task.check(given, expected, jax.tree.map(lambda a, n=number: a[n], result))
    return ROUNDS * num_lines * sum(task.num_operations for task in tasks)


# --- ranks that are late --------------------------------------------------------------------------------------------


def run_late(mesh: Mesh, backend: str, num_operations: int, seed: int = 0) -> dict[str, Any]:
    """A program of many operations, before each of which every rank spins for up to LATEST_S, and without that."""
    rng = np.random.default_rng(seed)
    shape = dataclasses.replace(SMALL, dtype="float32")
    num_layers = num_operations // 2
    x, topk_idx, topk_weights = make_inputs(shape, mesh.size)
    topk_weights = np.abs(topk_weights) / np.abs(topk_weights).sum(axis=-1, keepdims=True)  # x stays as large as it is
    most_steps = 1 + int(LATEST_S * steps_per_second(mesh, np.ones(mesh.devices.shape)))
    steps = rng.integers(most_steps, size=(*mesh.devices.shape, num_layers, 2), dtype=np.int32)

    def program(steps, x, topk_idx, topk_weights):
        def layer(x, now):
            number, (before_dispatch, before_combine) = now
            ids = (topk_idx + number) % shape.num_experts + spin(before_dispatch)
            recv = ep.dispatch(x, ids, topk_weights, group=group, layout="ragged", zero_pad=True)
            # The delay begins when there is a number of dropped rows, which is never negative.
            late = spin(before_combine + jnp.minimum(recv.num_dropped, 0))
            out = ep.combine(jnp.where(late == 0, recv.x, 0), recv)
            return out, out

        return lax.scan(layer, x, (jnp.arange(num_layers), steps))[1]

    with open_group(mesh, shape, backend=backend, timeout=60.0) as group:
        run = jax.jit(spmd(program, mesh))
        seconds, outputs = {}, {}
        for name, delays in {"first": steps * 0, "punctual": steps * 0, "late": steps}.items():
            begun = time.perf_counter()
            outputs[name] = to_numpy(run(delays, x, topk_idx, topk_weights))
            seconds[name] = time.perf_counter() - begun
        group.check()
    assert_same_bits(outputs["late"], outputs["punctual"], "late ranks")
    assert np.isfinite(outputs["late"]).all()
    return {
        "operations": 2 * num_layers,
        "largest_delay_s": LATEST_S,
        "seconds": {name: round(seconds[name], 3) for name in ("punctual", "late")},
    }


# --- the program ----------------------------------------------------------------------------------------------------


def attempt(seed: int | str, run: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What `run` gives, or None and what went wrong."""
    try:
        return run(), []
    except Exception as error:
        traceback.print_exc()
        return None, [{"seed": seed, "error": f"{type(error).__name__}: {error}"[:2000]}]


def again_options(options: argparse.Namespace) -> str:
    """What else a case of these options needs."""
    if options.backend != "emulated":
        return ""
    return f" --backend emulated --sms {options.sms}" + " --adversary" * options.adversary


def soak(options: argparse.Namespace) -> dict[str, Any]:
    devices = jax.devices()
    num_cases, operations, mismatches = 0, 0, []
    deadline = time.monotonic() + 60 * options.minutes
    for seed in itertools.count(options.seed):
        if num_cases == options.cases or time.monotonic() > deadline:
            break
        if options.adversary:
            _native.emulated.set_adversary(seed)
        done, wrong = attempt(seed, partial(run_case, seed, devices, options.backend))
        num_cases += 1
        operations += done or 0
        mismatches += wrong
        if wrong:
            again = again_options(options)
            print(f"soak: case {seed} failed; again: python tests/soak.py --seed {seed} --cases 1{again}", flush=True)
        jax.clear_caches()  # or else the programs of all cases stay
    late, wrong = None, []
    if options.late_operations:
        mesh = Mesh(np.array(devices[: 2 ** (len(devices).bit_length() - 1)]), ("ep",))
        late, wrong = attempt("late", partial(run_late, mesh, options.backend, options.late_operations))
    return {
        "backend": options.backend,
        "first_seed": options.seed,
        "cases": num_cases,
        "operations": operations,
        "mismatches": mismatches + wrong,
        "late": late,
    }


def machine() -> dict[str, Any]:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
    from gpu_report import commit
    from native_hash import native_hash

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "native_hash": native_hash(),
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="no case begins after so long (1)")
    add("--cases", type=int, help="how many, if the minutes suffice (as many as fit)")
    add("--seed", type=int, default=0, help="of the first case; the next has the next (0)")
    add("--late-operations", type=int, default=0, help="then so many operations with ranks that are late (none)")
    backends = [*ep.backends(), *(["emulated"] if _native.emulated else [])]
    add("--backend", choices=backends, help="of jax_ep (cuda where there are GPUs, else reference)")
    add("--sms", type=int, default=2, help="of each emulated GPU (2)")
    add("--adversary", action="store_true", help="emulated: a case's seed also decides docs/emulator.md's list")
    add("--json", metavar="FILE", help="write the result there")
    options = parser.parse_args(argv)
    if _native.emulated:
        _native.emulated.set_num_sms(options.sms)
    options.backend = options.backend or ("cuda" if jax.default_backend() == "gpu" else "reference")
    begun = time.monotonic()
    result = machine() | soak(options) | {"minutes": round((time.monotonic() - begun) / 60, 2)}
    print(json.dumps(result, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["mismatches"] else 0


if __name__ == "__main__":
    # Several CPU devices, for want of GPUs. Read when JAX first looks.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    sys.exit(main())
