"""A byte-level transformer whose feed-forward layers are mixtures of experts.

Every function but `init` and `partition_specs` sees what one device sees and runs inside `jax.shard_map` over the mesh
axes "data" and "ep": the batch is split over both axes, the experts over "ep", all other parameters are replicated.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep as ep

AXES = ("data", "ep")
BYTES = 256
TEMPERATURE = 0.8  # of samples


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    expert_hidden: int
    dtype: jnp.dtype  # of activations; parameters are float32
    capacity_factor: float | None = None  # rows a rank has room for over the T * top_k of a balanced load; None: all
    balance: float = 0.0  # weight of the load-balancing loss
    remat: bool = False  # compute layers again in the backward pass: only what enters each is kept, no dispatched row


def init(key: jax.Array, cfg: Config) -> dict:
    """The parameters, float32; those of the layers are stacked in a leading axis that `jax.lax.scan` walks."""
    keys = iter(jax.random.split(key, 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    L, H, E, F = cfg.layers, cfg.hidden, cfg.experts, cfg.expert_hidden
    return {
        "embedding": jax.random.normal(next(keys), (BYTES, H)),
        "layers": {
            "attention_norm": jnp.ones((L, H)),
            "qkv": normal(L, H, 3 * H),
            "attention_out": normal(L, H, H) / math.sqrt(2 * L),
            "moe_norm": jnp.ones((L, H)),
            "router": normal(L, H, E),
            "experts": {
                "gate_up": normal(L, E, H, 2 * F),
                "down": normal(L, E, F, H) / math.sqrt(2 * L),
            },
        },
        "final_norm": jnp.ones(H),
        "unembedding": normal(H, BYTES),
    }


def partition_specs(tree) -> dict:
    """PartitionSpecs of parameters, or of anything that mirrors them, such as an optimiser's moments."""

    def spec(path, _):
        return P(None, "ep") if jax.tree_util.DictKey("experts") in path else P()

    return jax.tree.map_with_path(spec, tree)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of x [B, S, heads, D] at positions [S]."""
    D = x.shape[-1]
    angle = positions[:, None] * 10_000 ** (-jnp.arange(D // 2) / (D // 2))
    sin, cos = (f(angle)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def queries_keys_values(x: jax.Array, positions: jax.Array, layer: dict, cfg: Config) -> tuple[jax.Array, ...]:
    """Of x [B, S, H] at positions [S]; each [B, S, heads, H / heads]."""
    B, S, H = x.shape
    qkv = (x @ layer["qkv"].astype(x.dtype)).reshape(B, S, 3, cfg.heads, H // cfg.heads)
    return rotate(qkv[:, :, 0], positions), rotate(qkv[:, :, 1], positions), qkv[:, :, 2]


def attention(x: jax.Array, layer: dict, cfg: Config) -> jax.Array:
    """Causal self-attention, x [B, S, H] -> [B, S, H]."""
    q, k, v = queries_keys_values(x, jnp.arange(x.shape[1]), layer, cfg)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(x.shape) @ layer["attention_out"].astype(x.dtype)


def route(x: jax.Array, layer: dict, cfg: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For x [T, H]: the experts' probabilities [T, E], and the ids and weights [T, top_k] of those chosen."""
    probabilities = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"].astype(jnp.float32))
    weights, ids = jax.lax.top_k(probabilities, cfg.top_k)
    return probabilities, ids, weights / weights.sum(axis=-1, keepdims=True)


def moe(x: jax.Array, layer: dict, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """Mixture of experts, x [T, H] -> [T, H], and its metrics, equal on all devices."""
    probabilities, ids, weights = route(x, layer, cfg)
    recv = ep.dispatch(x, ids, weights, group=group, layout="ragged", capacity_factor=cfg.capacity_factor)
    y = expert_mlp(recv.x, layer["experts"], partial(jax.lax.ragged_dot, group_sizes=recv.group_sizes))
    out = ep.combine(y, recv)

    # Switch Transformer's balancing loss: its gradient lowers the probability of an expert with more than its share.
    load = jax.lax.pmean(jax.nn.one_hot(ids, cfg.experts).mean(axis=(0, 1)), AXES)
    balance = cfg.experts * jnp.sum(load * jax.lax.pmean(probabilities.mean(axis=0), AXES))
    return out, {"load": load, "balance": balance, "dropped": jax.lax.psum(recv.num_dropped, AXES)}


def expert_mlp(rows: jax.Array, experts: dict, matmul: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """SwiGLU of each row by its expert; matmul multiplies rows in dispatch's layout with one matrix per expert."""
    gate, up = jnp.split(matmul(rows, experts["gate_up"].astype(rows.dtype)), 2, axis=-1)
    return matmul(jax.nn.silu(gate) * up, experts["down"].astype(rows.dtype))


def unembed(x: jax.Array, params: dict) -> jax.Array:
    """float32 logits [..., 256] of what the last layer gives, x [..., H]."""
    x = rms_norm(x, params["final_norm"])
    return (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)


def forward(params: dict, tokens: jax.Array, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """Next-byte logits, tokens [B, S] -> float32 [B, S, 256], and the metrics of each MoE layer, stacked."""

    def block(x, layer):
        x += attention(rms_norm(x, layer["attention_norm"]), layer, cfg)
        rows = rms_norm(x, layer["moe_norm"]).reshape(-1, cfg.hidden)
        out, metrics = moe(rows, layer, cfg, group)
        return x + out.reshape(x.shape), metrics

    if cfg.remat:
        block = jax.checkpoint(block, prevent_cse=False)  # in a scan nothing can merge the two computations
    x, metrics = jax.lax.scan(block, params["embedding"].astype(cfg.dtype)[tokens], params["layers"])
    return unembed(x, params), metrics


def loss(params: dict, windows: jax.Array, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """The objective over windows int32 [B, S + 1], and metrics: "nats" per byte, and those of `moe`."""
    logits, metrics = forward(params, windows[:, :-1], cfg, group)
    log_probs = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(log_probs, windows[:, 1:, None], axis=-1).mean()
    nats = jax.lax.pmean(nats, AXES)
    return nats + cfg.balance * metrics["balance"].mean(), {"nats": nats} | metrics


def sample(params: dict, prompt: jax.Array, key: jax.Array, num_bytes: int, cfg: Config, group: ep.Group) -> jax.Array:
    """Continues each prompt, int32 [B, S] -> [B, num_bytes]; the model sees the last S bytes."""

    def step(window, key):
        logits, _ = forward(params, window, cfg, group)
        byte = jax.random.categorical(key, logits[:, -1] / TEMPERATURE).astype(window.dtype)
        return jnp.concatenate([window[:, 1:], byte[:, None]], axis=1), byte

    _, text = jax.lax.scan(step, prompt, jax.random.split(key, num_bytes))
    return text.T
