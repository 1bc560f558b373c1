"""`jax-ep bench experts`: times the matrix products of a layer's experts on one device, and checks their results."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _native
from jax_ep.bench import models
from jax_ep.moe import _grouped_matmul as moe

PRODUCTS = ("forward", "rows_gradient", "weights_gradient")


class Model(NamedTuple):
    """The experts of one device of an expert-parallel model: the up-projection is [hidden, 2 * intermediate]."""

    hidden: int
    intermediate: int
    experts: int


RANKS = {"deepseek-v3": 16, "qwen3-235b": 8, "gpt-oss-120b": 8, "mixtral-8x7b": 4}  # that share a model's experts


def one_rank_of(model: models.Model, num_ranks: int) -> Model:
    assert model.intermediate is not None
    return Model(model.hidden, model.intermediate, model.num_experts // num_ranks)


MODELS = {name: one_rank_of(models.MODELS[name], num_ranks) for name, num_ranks in RANKS.items()}
MODELS["tiny"] = Model(256, 128, 4)


def uniform(rows_per_expert: int, experts: int) -> np.ndarray:
    return np.full(experts, rows_per_expert, np.int32)


def lognormal(rows_per_expert: int, experts: int) -> np.ndarray:
    """Sizes whose logarithm is normal with standard deviation 1; the largest is about 7 times the median."""
    quantiles = (np.arange(experts) + 0.5) / experts
    weights = np.exp([statistics.NormalDist().inv_cdf(q) for q in quantiles])
    sizes = np.floor(weights / weights.sum() * rows_per_expert * experts).astype(np.int32)
    sizes[-1] += rows_per_expert * experts - sizes.sum()
    return np.random.default_rng(0).permutation(sizes)


def one_hot(rows_per_expert: int, experts: int) -> np.ndarray:
    """Half of all rows go to one expert, the others share the other half."""
    sizes = np.full(experts, rows_per_expert * experts // 2 // max(experts - 1, 1), np.int32)
    sizes[experts // 2] += rows_per_expert * experts - sizes.sum()
    return sizes


GROUPS: dict[str, Callable[[int, int], np.ndarray]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "one-hot": one_hot,
}


class Operands(NamedTuple):
    rows: jax.Array
    w: jax.Array
    dy: jax.Array
    group_sizes: jax.Array


class Candidate(NamedTuple):
    """One way to compute one product. `run` takes Operands and may raise."""

    name: str
    product: str
    run: Callable[[Operands], jax.Array]


# --- candidates -----------------------------------------------------------------------------------------------------


def _of_function(name: str, multiply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Iterator[Candidate]:
    """The three products of a differentiable function of (rows, w, group_sizes)."""

    def gradient(operand: int, operands: Operands) -> jax.Array:
        def of_one(array: jax.Array) -> jax.Array:
            pair = (array, operands.w) if operand == 0 else (operands.rows, array)
            return multiply(*pair, operands.group_sizes)

        (result,) = jax.vjp(of_one, operands[operand])[1](operands.dy)
        return result

    yield Candidate(name, "forward", lambda o: multiply(o.rows, o.w, o.group_sizes))
    yield Candidate(name, "rows_gradient", partial(gradient, 0))
    yield Candidate(name, "weights_gradient", partial(gradient, 1))


def _padded(multiply: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """A function of padded rows as one of ragged rows, for groups of one size."""

    def call(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        out = multiply(rows.reshape(w.shape[0], -1, rows.shape[-1]), w, group_sizes)
        return out.reshape(rows.shape[0], -1)

    return call


def _plain_einsum(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.einsum("gck,gkn->gcn", rows, w)


def _of_pallas() -> Iterator[Candidate]:
    """The example kernels that JAX ships for Hopper, with tile shapes that its own tuning tries."""

    def forward(operands: Operands, **config: Any) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        rows, w, _, group_sizes = operands
        return ragged_dot(rows, w, group_sizes=group_sizes, block_k=64, **config)

    def rows_gradient(operands: Operands, **config: Any) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        _, w, dy, group_sizes = operands
        return ragged_dot(dy, w, group_sizes=group_sizes, block_k=64, transpose_rhs=True, **config)

    def weights_gradient(operands: Operands, **config: Any) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

        rows, _, dy, group_sizes = operands
        return transposed_ragged_dot(rows, dy, group_sizes=group_sizes, block_k=64, **config)

    wide: dict[str, Any] = {"block_m": 128, "block_n": 192, "max_concurrent_steps": 4, "grid_block_n": 1}
    square: dict[str, Any] = {"block_m": 128, "block_n": 128, "max_concurrent_steps": 5, "grid_block_n": 4}
    yield Candidate("pallas:128x192", "forward", partial(forward, **wide))
    yield Candidate("pallas:128x128", "forward", partial(forward, **square))
    yield Candidate("pallas:128x128", "rows_gradient", partial(rows_gradient, **square))
    yield Candidate("pallas:128x128", "weights_gradient", partial(weights_gradient, **square))


def _of_tokamax() -> Iterator[Candidate]:
    """tokamax's Mosaic GPU kernels: with the configuration that it chooses untuned, and with one that its data for the
    H100 have chosen most often."""
    yield from _of_function("tokamax", lambda rows, w, sizes: moe._tokamax(rows, w, sizes))

    def tuned(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu, pallas_mosaic_gpu_common

        config = pallas_mosaic_gpu_common.Config(
            block_m=128, block_n=64, block_k=128, num_stages=4, split_k=1, persistent=True, grid_tile_width=8
        )
        plain = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)
        op = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(
            config=config,
            vjp=partial(pallas_mosaic_gpu.base.vjp, dlhs_ragged_dot=plain, drhs_ragged_dot=plain),
        )
        return op(rows, w, group_sizes=group_sizes)

    yield from _of_function("tokamax:tuned", tuned)


def candidates(kinds: Sequence[str], *, is_uniform: bool) -> Iterator[Candidate]:
    if "einsum" in kinds and is_uniform:
        yield from _of_function("einsum", _padded(_plain_einsum))
    if "grouped" in kinds and _native.grouped_matmul is not None:
        yield from _of_function("grouped", lambda rows, w, sizes: moe._grouped(False, rows, (w,), sizes))
    if "pallas" in kinds:
        yield from _of_pallas()
    if "tokamax" in kinds:
        yield from _of_tokamax()
    if "ragged_dot" in kinds:
        yield from _of_function("ragged_dot", lambda rows, w, sizes: moe._ragged_dot(rows, w, sizes))


# --- checks ---------------------------------------------------------------------------------------------------------

SAMPLED_ROWS = 8  # of each group
SAMPLED_CHANNELS = 8


class Expected(NamedTuple):
    """Samples of the three products, in float32, and where they are."""

    row_index: np.ndarray  # [G, S]
    channels: np.ndarray
    products: dict[str, Any]


@jax.jit
def _samples(operands: Operands, row_index: jax.Array, channels: jax.Array) -> tuple[jax.Array, ...]:
    rows, w, dy, group_sizes = operands
    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    forward = multiply("gsk,gkn->gsn", rows[row_index], w)
    rows_gradient = multiply("gsn,gkn->gsk", dy[row_index], w)
    group_of_row = jnp.repeat(
        jnp.arange(len(group_sizes)), group_sizes, total_repeat_length=rows.shape[0]
    )  # of a row beyond the groups: the last, but its operands are zeros
    in_group = jax.nn.one_hot(group_of_row, len(group_sizes), dtype=rows.dtype)
    by_group = (in_group[:, :, None] * rows[:, channels][:, None]).reshape(rows.shape[0], -1)
    weights_gradient = multiply("mc,mn->cn", by_group, dy)
    return forward, rows_gradient, weights_gradient.reshape(len(group_sizes), len(channels), -1)


def expect(operands: Operands, sizes: np.ndarray) -> Expected:
    rng = np.random.default_rng(1)
    starts = np.cumsum(sizes) - sizes
    offsets = (rng.random((len(sizes), SAMPLED_ROWS)) * sizes[:, None]).astype(np.int32)
    offsets[:, 0], offsets[:, -1] = 0, np.maximum(sizes - 1, 0)
    row_index = np.minimum(starts[:, None] + offsets, operands.rows.shape[0] - 1)
    channels = np.sort(rng.choice(operands.rows.shape[1], SAMPLED_CHANNELS, replace=False))
    found = _samples(operands, row_index, channels)
    return Expected(row_index, channels, dict(zip(PRODUCTS, map(np.asarray, found), strict=True)))


def error_of(product: str, result: jax.Array, expected: Expected, sizes: np.ndarray) -> float:
    """||difference|| / ||expected|| of the samples. NaN if the result is not finite everywhere."""
    if product == "weights_gradient":
        found = np.asarray(result[:, expected.channels].astype(jnp.float32))
        want = expected.products[product]
    else:
        has_rows = sizes > 0
        found = np.asarray(result[expected.row_index].astype(jnp.float32))[has_rows]
        want = expected.products[product][has_rows]
    if not bool(jnp.isfinite(result[: sizes.sum()] if product != "weights_gradient" else result).all()):
        return math.nan
    return float(np.linalg.norm(found - want)) / max(float(np.linalg.norm(want)), 1e-30)


TOLERANCE = 5e-3  # of bfloat16 and float16 results; a rounding of bfloat16 is 2e-3 of the norm


def edge_case_error(candidate: Candidate, dtype: Any) -> str | None:
    """Runs the candidate on a small case with empty groups and with NaN in the rows beyond the groups.

    Returns what is wrong, or None.
    """
    k, n = 512, 768
    sizes = np.array([0, 37, 129, 0, 64, 1, 0, 200], np.int32)
    num_rows, num_valid = 500, int(sizes.sum())
    rng = np.random.default_rng(2)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    rows, dy = random(num_rows, k), random(num_rows, n)
    operands = Operands(
        rows.at[num_valid:].set(jnp.nan), random(len(sizes), k, n), dy.at[num_valid:].set(jnp.nan), jnp.asarray(sizes)
    )
    result = np.asarray(jax.jit(candidate.run)(operands).astype(jnp.float32))
    on_host = [np.asarray(array.astype(jnp.float32)) for array in operands[:3]]
    ends = np.cumsum(sizes)
    wrong = []
    for g, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        found = result[g] if candidate.product == "weights_gradient" else result[start:end]
        of_rows, of_w, of_dy = on_host[0][start:end], on_host[1][g], on_host[2][start:end]
        pairs = {
            "forward": (of_rows, of_w),
            "rows_gradient": (of_dy, of_w.T),
            "weights_gradient": (of_rows.T, of_dy),
        }
        want = np.matmul(*pairs[candidate.product])
        if not np.linalg.norm(found - want) <= TOLERANCE * np.linalg.norm(want):
            wrong.append(f"group {g} of {sizes[g]} rows")
    if candidate.product == "rows_gradient" and np.any(result[num_valid:] != 0):
        wrong.append("rows beyond the groups have a gradient")
    return ", ".join(wrong) or None


# --- times ----------------------------------------------------------------------------------------------------------


def time_us(run: Callable[[], jax.Array], seconds: float, samples: int) -> float:
    """Microseconds of one execution: the median over chains of executions, each at least `seconds` long."""
    run().block_until_ready()
    start = time.perf_counter()
    for _ in range(3):
        result = run()
    result.block_until_ready()
    in_a_row = max(3, math.ceil(seconds / ((time.perf_counter() - start) / 3)))
    chains = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(in_a_row):
            result = run()
        result.block_until_ready()
        chains.append((time.perf_counter() - start) / in_a_row)
    return statistics.median(chains) * 1e6


def make_operands(model: Model, sizes: np.ndarray, dtype: Any) -> Operands:
    keys = jax.random.split(jax.random.key(0), 3)
    num_rows, width = int(sizes.sum()), 2 * model.intermediate
    shapes = ((num_rows, model.hidden), (model.experts, model.hidden, width), (num_rows, width))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    rows, w, dy = (draw(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return Operands(rows, w, dy, jnp.asarray(sizes))


def measure(
    candidate: Candidate, operands: Operands, expected: Expected, sizes: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """The part of a row of the report that one candidate gives."""
    row = {"candidate": candidate.name, "product": candidate.product}
    try:
        compiled = jax.jit(candidate.run).lower(operands).compile()
        error = error_of(candidate.product, compiled(operands), expected, sizes)
        us = time_us(lambda: compiled(operands), options.seconds, options.samples)
    except Exception as failure:  # a candidate that cannot run must not end the bench
        return row | {"error": _in_one_line(failure)}
    _, k = operands.rows.shape
    flops = 2 * float(sizes.sum()) * k * operands.w.shape[2]
    return row | {
        "us": round(us, 1),
        "tflops": round(flops / us / 1e6, 1),
        "norm_error": float(f"{error:.1e}"),
        "right": error <= TOLERANCE,
    }


def _in_one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".strip().partition("\n")[0][:200]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        prog="jax-ep bench experts",
        description="Times the up-projection of a layer's experts, and the products of its gradient, on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    words = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    default_models = "tiny" if on_cpu else ",".join(RANKS)
    add = parser.add_argument
    add("--models", type=words, default=default_models, help=f"of {', '.join(MODELS)}; a list")
    add("--rows", type=numbers, default="16" if on_cpu else "16,256,2048", help="rows per expert; a list")
    add("--groups", type=words, default="uniform,lognormal", help=f"of {', '.join(GROUPS)}; a list")
    add("--candidates", type=words, default="einsum,grouped,ragged_dot", help="what to time; a list")
    add("--only", type=words, default="", help="time only candidates whose names contain one of these; a list")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--seconds", type=float, default=0.015, help="length of a chain of executions")
    add("--samples", type=int, default=3, help="chains per time")
    add("--budget", type=float, default=math.inf, help="seconds after which no further case begins")
    add("--json", metavar="FILE", help="also write the rows with a time to FILE")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace, *, is_uniform: bool) -> list[Candidate]:
    found = candidates(options.candidates, is_uniform=is_uniform)
    parts = [part for part in options.only if part]
    return [c for c in found if not parts or any(part in c.name for part in parts)]


def run(argv: Sequence[str] | None = None) -> int:
    """The command `jax-ep bench experts`; exit status 1 if any result was wrong."""
    options = _parse(argv)
    begin = time.perf_counter()
    dtype = jnp.dtype(options.dtype)
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row, separators=(",", ":")), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump([row for row in rows if "us" in row], file, indent=1)

    report({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": options.dtype})
    for candidate in _chosen(options, is_uniform=False):
        try:
            wrong = edge_case_error(candidate, dtype)
        except Exception as failure:
            wrong = _in_one_line(failure)
        report({"case": "edges", "candidate": candidate.name, "product": candidate.product, "wrong": wrong})
    for rows_per_expert, groups, name in itertools.product(options.rows, options.groups, options.models):
        case = {"case": f"{name}/{rows_per_expert}/{groups}"}
        if time.perf_counter() - begin > options.budget:
            report(case | {"error": "no time left"})
            continue
        sizes = GROUPS[groups](rows_per_expert, MODELS[name].experts)
        operands = make_operands(MODELS[name], sizes, dtype)
        expected = expect(operands, sizes)
        for candidate in _chosen(options, is_uniform=groups == "uniform"):
            report(case | measure(candidate, operands, expected, sizes, options))
        del operands  # the next ones need the memory
    print(f"{time.perf_counter() - begin:.0f} s")
    _print_table(rows)
    return 0 if all(row.get("right", True) and not row.get("wrong") for row in rows) else 1


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """For each case and product, a line with the TFLOP/s of einsum, and of the fastest of each kind of candidate."""
    timed = [row for row in rows if "tflops" in row]
    kinds = list(dict.fromkeys(row["candidate"].split(":")[0] for row in timed))
    print("TFLOP/s, the fastest configuration of each: " + ", ".join(kinds))
    for case in dict.fromkeys(row["case"] for row in timed):
        cells = []
        for product in PRODUCTS:
            best = []
            for kind in kinds:
                of_kind = [
                    row
                    for row in timed
                    if row["case"] == case and row["product"] == product and row["candidate"].split(":")[0] == kind
                ]
                if of_kind:
                    row = max(of_kind, key=lambda row: row["tflops"])
                    config = row["candidate"].partition(":")[2]
                    best.append(f"{kind[:4]} {row['tflops']:.0f}{f'({config})' if config else ''}")
            cells.append(" ".join(best))
        print(f"{case}: " + " | ".join(cells))
