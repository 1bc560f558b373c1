"""Measures the rounding errors of the wire formats on each leg of an exchange, against sums in float64.

    python benchmarks/leg_errors.py

Prints the table of docs/concepts.md, "Wires". Without GPUs, it runs on 8 virtual CPU devices. An error is relative: the
norm of (result - exact) divided by the norm of exact, over all rows. Rows are normally distributed, in bfloat16. The
layout is "token", so each leg moves one row per token and rank, or adds these rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep as ep

AXIS = "ep"
FORMATS = ("none", "fp8", "fp8_pow2", "fp8_e5m2")  # none: in bfloat16
# The legs in the order of docs/concepts.md, and whether they are in the backward pass.
LEGS = {
    "x to the experts": False,
    "the experts' outputs back": False,
    "the cotangent of combine's result to the experts": True,
    "the cotangent of x back": True,
}


def formats_of(leg: str) -> dict[str, Any]:
    """Returns format -> the argument that chooses it."""
    return {name: None if name == "none" else name for name in (FORMATS if LEGS[leg] else FORMATS[:-1])}


def make_rows(group: ep.Group, num_tokens: int) -> tuple[np.ndarray, ...]:
    """Returns tokens x and a cotangent g [R, T, H], topk_idx [R, T, K], and y [R, R * T, H]: the experts' outputs."""
    random = np.random.default_rng(0)
    ranks, hidden = group.num_ranks, group.hidden

    def draw(num_rows: int) -> np.ndarray:
        return np.asarray(jnp.asarray(random.standard_normal((ranks, num_rows, hidden), np.float32), group.dtype))

    ids = random.random((ranks, num_tokens, group.num_experts)).argsort(axis=-1)[..., : group.top_k]
    return draw(num_tokens), draw(num_tokens), ids.astype(np.int32), draw(ranks * num_tokens)


def run_legs(group: ep.Group, x: Any, g: Any, topk_idx: Any, y: Any) -> dict[tuple[str, str], np.ndarray]:
    """Returns what each leg gives with each format, on all ranks: rows [R, R * T, H], or sums [R, T, H]."""

    def on_rank(x: jax.Array, g: jax.Array, topk_idx: jax.Array, y: jax.Array) -> dict[tuple[str, str], jax.Array]:
        x, g, topk_idx, y = (a[0] for a in (x, g, topk_idx, y))
        dispatch = partial(ep.dispatch, group=group, layout="token", zero_pad=True)
        recv = dispatch(x, topk_idx, None)
        to_experts, outputs_back, cotangent_to_experts, cotangent_back = LEGS
        results = {}
        for name, wire in formats_of(to_experts).items():
            results[to_experts, name] = dispatch(x, topk_idx, None, wire=wire).x
            results[outputs_back, name] = ep.combine(y, recv, wire=wire)
        for name, wire in formats_of(cotangent_to_experts).items():
            _, of_combine = jax.vjp(partial(ep.combine, recv=recv, grad_wire=wire), y)
            _, of_dispatch = jax.vjp(lambda x, wire=wire: dispatch(x, topk_idx, None, grad_wire=wire).x, x)
            results[cotangent_to_experts, name] = of_combine(g)[0]
            results[cotangent_back, name] = of_dispatch(y)[0]
        return {key: result[None] for key, result in results.items()}

    split = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(on_rank, mesh=group.mesh, in_specs=split, out_specs=split))
    arrays = jax.device_put((x, g, topk_idx, y), NamedSharding(group.mesh, split))
    return jax.tree.map(lambda result: np.asarray(result, np.float64), program(*arrays))


def errors(group: ep.Group, num_tokens: int) -> Iterator[tuple[str, str, float]]:
    """Yields the relative error of each leg with each format."""
    x, g, topk_idx, y = make_rows(group, num_tokens)
    rank_of = topk_idx // group.experts_per_rank
    # Row i of rank r is that of the i-th token, in the order of (rank, token), which has an expert there.
    tokens = [np.nonzero((rank_of == rank).any(axis=-1)) for rank in range(group.num_ranks)]
    rows_of_x, rows_of_g, sums_of_y = np.zeros(y.shape), np.zeros(y.shape), np.zeros(x.shape)
    for rank, (source, token) in enumerate(tokens):
        number = len(source)
        rows_of_x[rank, :number], rows_of_g[rank, :number] = x[source, token], g[source, token]
        sums_of_y[source, token] += y[rank, :number].astype(np.float64)
    exact = dict(zip(LEGS, (rows_of_x, sums_of_y, rows_of_g, sums_of_y), strict=True))
    for (leg, name), result in run_legs(group, x, g, topk_idx, y).items():
        yield leg, name, float(np.linalg.norm(result - exact[leg]) / np.linalg.norm(exact[leg]))


def table(rows: Iterator[tuple[str, str, float]]) -> str:
    found = {(leg, name): error for leg, name, error in rows}
    lines = ['| leg | None | `"fp8"` | `"fp8_pow2"` | `"fp8_e5m2"` |', "| --- | --: | --: | --: | --: |"]
    for leg in LEGS:
        cells = (f"{100 * found[leg, name]:.2g} %" if (leg, name) in found else "-" for name in FORMATS)
        lines.append(f"| {leg} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    sizes = {"num_experts": 64, "top_k": 8, "hidden": 1024, "max_tokens_per_rank": 64}
    with ep.Group(mesh, axis_name=AXIS, **sizes) as group:
        print(table(errors(group, num_tokens=64)))


if __name__ == "__main__":
    main()
