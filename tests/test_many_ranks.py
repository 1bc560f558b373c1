"""Groups of more than 32 ranks: emulated over a network, beside the reference backend."""

import os
import subprocess
import sys

import pytest

from conftest import HAS_EMULATED

# A child has as many virtual devices as the group has ranks. The arguments: the number of ranks, and of tokens per
# rank.
PROGRAM = """
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep as ep

R, T = map(int, sys.argv[1:])
H, E, K = 160, 2 * R, 4
mesh = jax.make_mesh((R,), ("ep",))
keys = jax.random.split(jax.random.key(R), 5)
x = jax.random.normal(keys[0], (R * T, H))
topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[1], (R * T, E))), K)
topk_idx = topk_idx.at[::5, 1].set(-1).at[1::7].set(E - 1 - jnp.arange(K))  # no expert; the experts of the last ranks
scale = 1 + jax.random.uniform(keys[2], (E, 1))
cotangent = jax.random.normal(keys[3], (R * T, H))
blocks = jax.random.normal(keys[4], (R * T, H))
splits = jnp.zeros((R, E), jnp.int32).at[:, ::9].set(1).at[:, -1].set(T - 1)
splits = jnp.where(jnp.cumsum(splits, 1) <= T, splits, 0)


def operations(group, wire, layout):
    def layer(x, topk_weights, topk_idx, scale):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, wire=wire, capacity=T * R)
        if layout == "token":
            rows = ep.expand(recv)
            of_row = jnp.repeat(scale, rows.group_sizes, axis=0, total_repeat_length=rows.x.shape[0])
            y = ep.reduce(rows.x * of_row, rows)
        else:
            y = recv.x * scale[:, :, None]
        return ep.combine(y, recv, wire=wire), (recv.counts, recv.num_dropped[None])

    def step(x, topk_weights, topk_idx, scale, cotangent, blocks, splits):
        of_arrays = partial(layer, topk_idx=topk_idx, scale=scale)
        out, back, (counts, dropped) = jax.vjp(of_arrays, x, topk_weights, has_aux=True)
        moved = ep.all_to_all(blocks, splits[0], group=group)
        returned = ep.all_to_all_back(moved.x, splits[0], group=group)
        plan = ep.balance(topk_idx, group=group)
        planned = ep.dispatch(x, topk_idx, topk_weights, group=group, plan=plan)
        of_slot, num_rows = ep.replicate(scale, plan), planned.x.shape[0]
        of_row = jnp.repeat(of_slot, planned.group_sizes, axis=0, total_repeat_length=num_rows)
        balanced = ep.combine(planned.x * of_row, planned)
        return out, back(cotangent), counts, dropped, moved.splits, returned, plan.num_rows[None], balanced

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


arrays = jax.device_put((x, topk_weights, topk_idx, scale, cotangent, blocks, splits), NamedSharding(mesh, P("ep")))
for wire, layout in ((None, "expert"), ("fp8", "token")):
    results = []
    for backend in ("emulated", "reference"):
        sizes = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens_per_rank": T, "dtype": jnp.float32}
        with ep.Group(mesh, **sizes, backend=backend, replicas=1) as group:
            results.append(jax.block_until_ready(operations(group, wire, layout)(*arrays)))
            group.check()
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    assert int(jnp.sum(results[0][2])) > 0
print("equal")
"""


@pytest.mark.skipif(not HAS_EMULATED, reason="jax_ep is not installed with the emulated backend")
@pytest.mark.parametrize(("num_ranks", "node_size", "num_tokens"), [(64, 8, 3), (40, 20, 33)])
def test_as_the_reference(num_ranks, node_size, num_tokens, tmp_path):
    """With 33 tokens, rows go through rail peers. The last node of 20 ranks has ranks below and above 32."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_ranks),
        "JAX_EP_NODE_SIZE": str(node_size),
    }
    command = [sys.executable, "-c", PROGRAM, str(num_ranks), str(num_tokens)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
