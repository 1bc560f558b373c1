"""Measures the rounding errors of the wire formats on each leg of an exchange, against float64.

    JAX_PLATFORMS=cpu python benchmarks/leg_errors.py

Prints the table of docs/concepts.md, "Wires", from 8 virtual CPU devices. An error is relative: the norm of (result -
exact), divided by the norm of exact, over all rows. Rows are in bfloat16 and normally distributed. The layout is
"token": a leg to the experts sends one row per token and rank, and a leg back to the tokens adds these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep as ep

AXIS = "ep"
FORMATS = ("none", "fp8", "fp8_pow2", "fp8_e5m2")  # none: the rows stay in bfloat16
TO_EXPERTS = "x to the experts"
OUTPUTS_BACK = "the experts' outputs back"
COTANGENT_TO_EXPERTS = "the cotangent of combine's result to the experts"
COTANGENT_BACK = "the cotangent of x back"
FORWARD_LEGS, BACKWARD_LEGS = (TO_EXPERTS, OUTPUTS_BACK), (COTANGENT_TO_EXPERTS, COTANGENT_BACK)
LEGS = (*FORWARD_LEGS, *BACKWARD_LEGS)  # in the order of docs/concepts.md


def formats_of(leg: str) -> dict[str, Any]:
    """Returns the formats of a leg: name -> value of the wire argument."""
    names = FORMATS if leg in BACKWARD_LEGS else FORMATS[:-1]
    return {name: None if name == "none" else name for name in names}


def make_rows(group: ep.Group, num_tokens: int) -> tuple[np.ndarray, ...]:
    """Returns tokens x and a cotangent g [R, T, H], topk_idx [R, T, K], and y [R, R * T, H]: the experts' outputs."""
    rng = np.random.default_rng(0)
    ranks, hidden = group.num_ranks, group.hidden

    def draw(num_rows: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal((ranks, num_rows, hidden), np.float32), group.dtype))

    ids = rng.random((ranks, num_tokens, group.num_experts)).argsort(axis=-1)[..., : group.top_k]
    return draw(num_tokens), draw(num_tokens), ids.astype(np.int32), draw(ranks * num_tokens)


def run_legs(group: ep.Group, x: Any, g: Any, topk_idx: Any, y: Any) -> dict[tuple[str, str], np.ndarray]:
    """Returns the result of each leg with each format, on all ranks: rows [R, R * T, H], or sums [R, T, H]."""

    def on_rank(x: jax.Array, g: jax.Array, topk_idx: jax.Array, y: jax.Array) -> dict[tuple[str, str], jax.Array]:
        x, g, topk_idx, y = (a[0] for a in (x, g, topk_idx, y))
        dispatch = partial(ep.dispatch, group=group, layout="token", zero_pad=True)
        recv = dispatch(x, topk_idx, None)
        results = {}
        for name, wire in formats_of(TO_EXPERTS).items():
            results[TO_EXPERTS, name] = dispatch(x, topk_idx, None, wire=wire).x
            results[OUTPUTS_BACK, name] = ep.combine(y, recv, wire=wire)
        for name, wire in formats_of(COTANGENT_TO_EXPERTS).items():
            _, combine_vjp = jax.vjp(partial(ep.combine, recv=recv, grad_wire=wire), y)
            _, dispatch_vjp = jax.vjp(lambda x, wire=wire: dispatch(x, topk_idx, None, grad_wire=wire).x, x)
            results[COTANGENT_TO_EXPERTS, name] = combine_vjp(g)[0]
            results[COTANGENT_BACK, name] = dispatch_vjp(y)[0]
        return {key: result[None] for key, result in results.items()}

    split = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(on_rank, mesh=group.mesh, in_specs=split, out_specs=split))
    arrays = jax.device_put((x, g, topk_idx, y), NamedSharding(group.mesh, split))
    return jax.tree.map(lambda result: np.asarray(result, np.float64), program(*arrays))


def measure_errors(group: ep.Group, num_tokens: int) -> Iterator[tuple[str, str, float]]:
    """Yields the relative error of each leg with each format."""
    x, g, topk_idx, y = make_rows(group, num_tokens)
    rank_of = topk_idx // group.experts_per_rank
    # Row i of a rank is the i-th token that has an expert there. Tokens are in the order of (source rank, token).
    tokens_of_rank = [np.nonzero((rank_of == rank).any(axis=-1)) for rank in range(group.num_ranks)]
    rows_of_x, rows_of_g, sums_of_y = np.zeros(y.shape), np.zeros(y.shape), np.zeros(x.shape)
    for rank, (source, token) in enumerate(tokens_of_rank):
        num_rows = len(source)
        rows_of_x[rank, :num_rows], rows_of_g[rank, :num_rows] = x[source, token], g[source, token]
        sums_of_y[source, token] += y[rank, :num_rows].astype(np.float64)
    exact = dict(zip(LEGS, (rows_of_x, sums_of_y, rows_of_g, sums_of_y), strict=True))
    for (leg, name), result in run_legs(group, x, g, topk_idx, y).items():
        yield leg, name, float(np.linalg.norm(result - exact[leg]) / np.linalg.norm(exact[leg]))


def table(errors: Iterable[tuple[str, str, float]]) -> str:
    found = {(leg, name): error for leg, name, error in errors}
    lines = ['| leg | None | `"fp8"` | `"fp8_pow2"` | `"fp8_e5m2"` |', "| --- | --: | --: | --: | --: |"]
    for leg in LEGS:
        cells = (f"{100 * found[leg, name]:.2g} %" if (leg, name) in found else "-" for name in FORMATS)
        lines.append(f"| {leg} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices("cpu")), (AXIS,))
    sizes = {"num_experts": 64, "top_k": 8, "hidden": 1024, "max_tokens_per_rank": 64}
    with ep.Group(mesh, axis_name=AXIS, **sizes) as group:
        print(table(measure_errors(group, num_tokens=64)))


if __name__ == "__main__":
    main()
