"""The shortest mixture-of-experts layer: experts split over all devices, checked against a dense computation."""

import os
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
T, H, I, E, K = 64 * mesh.size, 128, 256, 4 * mesh.size, 2  # tokens, hidden, inner channels, experts, top_k
group = ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=64, dtype=jnp.float32)
specs = P("ep"), P(), P("ep"), P("ep")  # tokens and experts are split over the devices


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("ep"))
def moe_layer(x, w_router, w_gate_up, w_down):
    routing = ep.moe.route(x @ w_router, top_k=K)
    return ep.moe.mlp(x, routing.topk_idx, routing.topk_weights, w_gate_up, w_down, group=group)


def dense_layer(x, w_router, w_gate_up, w_down):
    """The same on one device, with every expert on every token."""
    logits, topk_idx = jax.lax.top_k(x @ w_router, K)
    weights = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], topk_idx].set(jax.nn.softmax(logits))
    gate, up = jnp.split(jnp.einsum("th,ehf->tef", x, w_gate_up), 2, axis=-1)
    return jnp.einsum("tef,efh,te->th", jax.nn.silu(gate) * up, w_down, weights)


keys = jax.random.split(jax.random.key(0), 4)
shapes = (T, H), (H, E), (E, H, 2 * I), (E, I, H)
arrays = [0.1 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
out, dense = moe_layer(*sharded), dense_layer(*arrays)
error = jnp.linalg.norm(jax.device_get(out) - dense) / jnp.linalg.norm(dense)
print(f"{E} experts on {mesh.size} devices; against the dense layer: relative error {error:.1e}")
