"""Times `moe.mlp` on one device, and each of its parts alone.

    python benchmarks/mlp_parts.py --json mlp_parts.json

The group has one rank, which holds --experts experts of --model. So dispatch and combine move rows within one device.
Each part is an executable of its own: dispatch, the matmul with gate and up, the activation, the matmul with down, and
combine; with --layout token, also expand and reduce. A layer should take little longer than its parts together. The
layer runs once for each of --implementations, and the parts with the first of them. With --layout token, the kernels of
expand, reduce and their gradients are also timed alone, and beside them the same functions in plain JAX. With
--local-experts-per-token N, the device acts as one of several ranks: N of the --top-k experts of each token are local,
and the other ids are -1. For each executable the times are on the host's clock: the median over chains of executions,
one behind the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ep as ep
from jax_ep._backends import plain_expand
from jax_ep.bench import models
from jax_ep.bench.experts import time_us
from jax_ep.moe._grouped_matmul import grouped_matmul

AXIS = "ep"


def make_arrays(group: ep.Group, tokens: int, num_local: int, intermediate: int) -> tuple[jax.Array, ...]:
    """x, topk_idx, topk_weights, w_gate_up and w_down. Each token chooses different experts, all equally often.

    Only the first `num_local` of a token's experts are on this device.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    experts, hidden, top_k = group.num_experts, group.hidden, group.top_k
    draw = partial(jax.random.normal, dtype=group.dtype)
    topk_idx = np.full((tokens, top_k), -1, np.int32)
    topk_idx[:, :num_local] = (np.arange(tokens * num_local) % experts).reshape(tokens, num_local)
    return (
        draw(keys[0], (tokens, hidden)),
        jnp.asarray(topk_idx),
        jnp.full((tokens, top_k), 1 / top_k, jnp.float32),
        draw(keys[1], (experts, hidden, 2 * intermediate)) / hidden**0.5,
        draw(keys[2], (experts, intermediate, hidden)) / intermediate**0.5,
    )


def activate(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class Timer:
    """Compiles functions of one rank's arrays, and times them."""

    def __init__(self, mesh: Mesh, seconds: float, samples: int) -> None:
        self.mesh, self.seconds, self.samples = mesh, seconds, samples

    def __call__(self, function: Callable[..., Any], *arrays: Any) -> tuple[float, Any]:
        """Microseconds of one execution, and its result."""
        whole = PartitionSpec()
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False)
        compiled = jax.jit(mapped).lower(*arrays).compile()
        us = time_us(lambda: jax.tree.leaves(compiled(*arrays))[0], self.seconds, self.samples)
        return us, compiled(*arrays)


def time_parts(
    timer: Timer, group: ep.Group, implementation: str, layout: str | None, arrays: Sequence[jax.Array]
) -> dict[str, float]:
    """Microseconds of each part of the layer, which all get what the part before returned."""
    *tokens, w_gate_up, w_down = arrays
    matmul = partial(grouped_matmul, implementation=implementation)
    layout = layout or ("expert" if implementation == "einsum" else "ragged")
    us = {}
    us["dispatch"], recv = timer(partial(ep.dispatch, group=group, layout=layout), *tokens)
    rows = recv
    if layout == "token":
        us["expand"], rows = timer(ep.expand, recv)
    us["gate and up"], gate_up = timer(matmul, rows.x, w_gate_up, rows.group_sizes)
    us["activation"], hidden = timer(activate, gate_up)
    us["down"], y = timer(matmul, hidden, w_down, rows.group_sizes)
    if layout == "token":
        us["reduce"], y = timer(ep.reduce, y, rows)
    us["combine"], _ = timer(ep.combine, y, recv)
    return us


def time_copies(timer: Timer, group: ep.Group, tokens: Sequence[jax.Array]) -> list[dict[str, Any]]:
    """Times expand, reduce and their gradients: the backend's functions, and the same in plain JAX."""
    _, recv = timer(partial(ep.dispatch, group=group, layout="token"), *tokens)
    _, rows = timer(ep.expand, recv)
    capacity, row_of_pair, pair_of_row = len(rows.x), rows.row_of_pair, rows.pair_of_row
    backend = group._impl
    expand = partial(backend.expand, capacity=capacity, zero_pad=False)
    plain_expand_rows = partial(plain_expand.expand, capacity=capacity)
    cases: dict[str, tuple[tuple[Callable[..., Any], Sequence[Any]], ...]] = {
        "expand": (
            (expand, (recv.x, row_of_pair, rows.counts, rows.group_sizes)),
            (plain_expand_rows, (recv.x, row_of_pair)),
        ),
        "reduce": tuple((module.reduce, (rows.x, rows.weights, row_of_pair)) for module in (backend, plain_expand)),
        "gradient of expand": tuple((module.reduce, (rows.x, None, row_of_pair)) for module in (backend, plain_expand)),
        "gradient of reduce": tuple(
            (module.reduce_back, (recv.x, rows.x, rows.weights, row_of_pair, pair_of_row))
            for module in (backend, plain_expand)
        ),
    }
    return [
        {"implementation": name, "part": part, "us": timer(function, *arrays)[0]}
        for part, functions in cases.items()
        for name, (function, arrays) in zip(("kernel", "plain JAX"), functions, strict=True)
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    names = [model.name for model in models.MODELS.values() if model.intermediate]
    parser = argparse.ArgumentParser(
        description="Times moe.mlp on one device, and each of its parts alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=[*names, "tiny"], default="tiny" if on_cpu else "deepseek-v3", help="whose sizes to take")
    add(
        "--experts",
        type=int,
        default=4 if on_cpu else 16,
        help="experts of the device",
    )
    add("--top-k", type=int, default=2 if on_cpu else 8, help="experts per token")
    add("--local-experts-per-token", type=int, help="experts of a token that are on the device; without it, all")
    add("--tokens", type=int, default=16 if on_cpu else 4096, help="tokens of the device")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--implementations", default="ragged_dot" if on_cpu else "grouped,ragged_dot", help="of the matmuls; a list")
    add("--layout", choices=("token",), help="moe.mlp's layout, if not that of the implementation")
    add("--seconds", type=float, default=0.05, help="length of a chain of executions")
    add("--samples", type=int, default=5, help="chains per time")
    add("--json", metavar="FILE", help="write what was measured there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the times in microseconds, and writes them to the JSON file."""
    options = parse(argv)
    model = models.MODELS.get(options.model)
    hidden, intermediate = (model.hidden, model.intermediate) if model else (128, 64)
    assert intermediate is not None
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    sizes = {"num_experts": options.experts, "top_k": options.top_k, "hidden": hidden}
    timer = Timer(mesh, options.seconds, options.samples)
    rows = []
    with ep.Group(mesh, AXIS, **sizes, max_tokens_per_rank=options.tokens, dtype=options.dtype) as group:
        num_local = options.local_experts_per_token
        num_local = options.top_k if num_local is None else num_local
        arrays = make_arrays(group, options.tokens, num_local, intermediate)
        first, *others = options.implementations.split(",")
        parts = time_parts(timer, group, first, options.layout, arrays)
        rows += [{"implementation": first, "part": part, "us": us} for part, us in parts.items()]
        rows.append({"implementation": first, "part": "all parts", "us": sum(parts.values())})
        for implementation in (first, *others):
            us, _ = timer(partial(ep.moe.mlp, group=group, experts=implementation, layout=options.layout), *arrays)
            rows.append({"implementation": implementation, "part": "moe.mlp", "us": us})
        if options.layout == "token":
            rows += time_copies(timer, group, arrays[:3])
    for row in rows:
        print(f"{row['implementation']:10} {row['part']:18} {row['us']:10.1f}")
    if options.json:
        with open(options.json, "w") as file:
            told = {name: value for name, value in vars(options).items() if name != "json"}
            json.dump({"backend": group.backend, **told, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
