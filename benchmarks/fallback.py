"""Compares the backends in plain JAX, "collectives" (the fallback without kernels) and "reference", as a table.

It measures the memory of the compiled program, and its time.

    python benchmarks/fallback.py                       # this machine's GPUs, else 8 virtual CPU devices
    python benchmarks/fallback.py --capacity-factor 0   # the default capacity, which drops nothing

Memory is that of the temporary buffers on each device, without arguments and results. Both backends compute the same
layer: a dispatch, experts that do nothing, and a combine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep

BACKENDS = ("reference", "collectives")
IN_A_ROW = 5  # runs of a program before the other backend's turn


class Sizes(NamedTuple):
    """The options of the command."""

    tokens: int = 512  # per rank
    hidden: int = 512
    experts: int = 64
    top_k: int = 8
    dtype: str = "float32"
    capacity_factor: float = 1.25  # of the balanced load; 0: the default capacity


def programs(group: ep.Group, sizes: Sizes) -> dict[str, Callable[..., Any]]:
    """What one device does in each program, given x, topk_idx and topk_weights."""
    capacity = int(sizes.capacity_factor * sizes.tokens * sizes.top_k) or None

    def dispatch(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> ep.Dispatched:
        return ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", capacity=capacity)

    def layer(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        recv = dispatch(x, topk_idx, topk_weights)
        # The barrier takes the place of the experts. On GPUs, without it, XLA may never store recv.x. XLA:CPU drops
        # optimization barriers, so on CPUs it has no effect.
        return ep.combine(jax.lax.optimization_barrier(recv.x), recv)

    def gradients(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        def loss(x: jax.Array, topk_weights: jax.Array) -> jax.Array:
            return jnp.sum(layer(x, topk_idx, topk_weights).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    return {"dispatch": lambda *args: dispatch(*args).x, "layer": layer, "gradients": gradients}


def compile_program(program: Callable[..., Any], mesh: jax.sharding.Mesh, sizes: Sizes) -> tuple[Any, Any]:
    """The executable of `program` on all devices, and its arguments: a uniform routing."""
    rng, tokens = np.random.default_rng(0), sizes.tokens * mesh.size
    topk_idx = rng.random((tokens, sizes.experts)).argsort(axis=1)[:, : sizes.top_k].astype(np.int32)
    x = rng.standard_normal((tokens, sizes.hidden), np.float32).astype(jnp.dtype(sizes.dtype))
    arguments = x, topk_idx, rng.random((tokens, sizes.top_k), np.float32)
    arguments = jax.device_put(arguments, NamedSharding(mesh, P("ep")))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(mapped).lower(*arguments).compile(), arguments


def open_group(backend: str, mesh: jax.sharding.Mesh, sizes: Sizes) -> ep.Group:
    """Makes the group for a backend. The caller closes it."""
    return ep.Group(
        mesh,
        num_experts=sizes.experts,
        top_k=sizes.top_k,
        hidden=sizes.hidden,
        max_tokens_per_rank=sizes.tokens,
        dtype=jnp.dtype(sizes.dtype),
        backend=backend,
    )


def measure(mesh: jax.sharding.Mesh, sizes: Sizes, turns: int) -> dict[str, dict[str, tuple[float, float]]]:
    """For each program and backend: MiB of temporary memory, and the mean time in ms of `turns` times IN_A_ROW runs.

    The backends take turns, so that other programs on the machine slow both alike. No times if `turns` is 0.
    """
    compiled: dict[str, dict[str, Any]] = {}
    for backend in BACKENDS:
        with open_group(backend, mesh, sizes) as group:
            for name, program in programs(group, sizes).items():
                compiled.setdefault(name, {})[backend] = compile_program(program, mesh, sizes)
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for name, of_backend in compiled.items():
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for turn in range(turns + 1 if turns else 0):
            for backend, (executable, arguments) in of_backend.items():
                begun = time.perf_counter()
                for _ in range(IN_A_ROW):
                    jax.block_until_ready(executable(*arguments))
                if turn:  # the first turn warms up
                    times[backend].append((time.perf_counter() - begun) / IN_A_ROW)
        results[name] = {
            backend: (
                executable.memory_analysis().temp_size_in_bytes / 2**20,
                1e3 * float(np.mean(times[backend] or np.nan)),
            )
            for backend, (executable, _) in of_backend.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in Sizes._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=10, help=f"of {IN_A_ROW} runs of each program (%(default)s)")
    options = parser.parse_args()
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    print(f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {sizes}")
    print("| program | reference: MiB | collectives: MiB | ratio | reference: ms | collectives: ms | ratio |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, of_backend in measure(mesh, sizes, options.turns).items():
        columns = zip(*(of_backend[backend] for backend in BACKENDS), strict=True)
        cells = [f"{reference:.1f} | {lean:.1f} | {lean / reference:.2f}" for reference, lean in columns]
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
