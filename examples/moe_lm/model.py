"""A byte-level transformer whose feed-forward layers are mixtures of experts.

Every function except `init` and `partition_specs` runs inside `jax.shard_map` over the mesh axes "data" and "ep", on
one device's arrays. The batch is split over both axes, and the experts over "ep". All other parameters are replicated.
"""

import dataclasses
import math

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
    capacity_factor: float | None = None  # capacity of a rank / (T * top_k); None: room for all rows
    balance_loss: float = 0.0  # weight of the load-balancing loss
    balance: float | None = None  # tolerance of ep.balance; None: each expert's rows stay on its rank
    remat: bool = False  # recompute layers in the backward pass: keep only each layer's input, no dispatched rows
    wires: tuple[tuple[str, str], ...] = ()  # wire formats: arguments of ep.moe.mlp and their values


def init(key: jax.Array, cfg: Config) -> dict:
    """Makes the parameters, float32. `jax.lax.scan` runs over the leading axis of the layers' parameters."""
    keys = iter(jax.random.split(key, 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    L, H, E, I = cfg.layers, cfg.hidden, cfg.experts, cfg.expert_hidden
    return {
        "embedding": jax.random.normal(next(keys), (BYTES, H)),
        "layers": {
            "attention_norm": jnp.ones((L, H)),
            "qkv": normal(L, H, 3 * H),
            "attention_out": normal(L, H, H) / math.sqrt(2 * L),
            "moe_norm": jnp.ones((L, H)),
            "router": normal(L, H, E),
            "experts": {
                "gate_up": normal(L, E, H, 2 * I),
                "down": normal(L, E, I, H) / math.sqrt(2 * L),
            },
        },
        "final_norm": jnp.ones(H),
        "unembedding": normal(H, BYTES),
    }


def partition_specs(tree) -> dict:
    """Returns the PartitionSpecs of parameters, or of a tree that contains them, such as an optimiser's moments."""

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
    """Returns the queries, keys and values of x [B, S, H] at positions [S], each [B, S, heads, H / heads]."""
    B, S, H = x.shape
    qkv = (x @ layer["qkv"].astype(x.dtype)).reshape(B, S, 3, cfg.heads, H // cfg.heads)
    return rotate(qkv[:, :, 0], positions), rotate(qkv[:, :, 1], positions), qkv[:, :, 2]


def attention(x: jax.Array, layer: dict, cfg: Config) -> jax.Array:
    """Causal self-attention, x [B, S, H] -> [B, S, H]."""
    q, k, v = queries_keys_values(x, jnp.arange(x.shape[1]), layer, cfg)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(x.shape) @ layer["attention_out"].astype(x.dtype)


def route(x: jax.Array, layer: dict, cfg: Config) -> tuple[jax.Array, ep.moe.Routing]:
    """For x [T, H]: the router's logits [T, E], float32, and the experts chosen."""
    logits = x.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
    return logits, ep.moe.route(logits, top_k=cfg.top_k)


def experts(x: jax.Array, routing: ep.moe.Routing, layer: dict, group: ep.Group, **options) -> jax.Array:
    """Weighted sum of the experts' outputs for each token, x [T, H] -> [T, H]."""
    weights = (layer["experts"][name].astype(x.dtype) for name in ("gate_up", "down"))
    return ep.moe.mlp(x, routing.topk_idx, routing.topk_weights, *weights, group=group, **options)


def moe(x: jax.Array, layer: dict, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """Mixture of experts, x [T, H] -> [T, H], and its metrics, equal on all devices."""
    logits, routing = route(x, layer, cfg)
    capacity = None if cfg.capacity_factor is None else math.ceil(cfg.capacity_factor * len(x) * cfg.top_k)
    out = experts(x, routing, layer, group, capacity=capacity, balance=cfg.balance, **dict(cfg.wires))

    # The loss of ep.moe.route balances each device's tokens by themselves. This one balances those of all devices.
    load = jax.lax.pmean(routing.load, AXES)
    balance = cfg.experts * jnp.sum(load * jax.lax.pmean(jax.nn.softmax(logits).mean(axis=0), AXES))
    dropped = jnp.int32(0) if capacity is None else dropped_rows(routing, capacity, cfg, group)
    return out, {"load": load, "balance": balance, "dropped": dropped}


def dropped_rows(routing: ep.moe.Routing, capacity: int, cfg: Config, group: ep.Group) -> jax.Array:
    """Rows, over all devices, that do not fit in the capacity of their rank."""
    # XLA merges this plan with the plan of moe.mlp. Without cfg.balance, only the rows of home experts count.
    plan = ep.balance(routing.topk_idx, group=group, tolerance=cfg.balance or 0.0)
    num_rows = plan.home_rows if cfg.balance is None else plan.num_rows
    return jax.lax.psum(jnp.maximum(num_rows - capacity, 0), AXES)


def unembed(x: jax.Array, params: dict) -> jax.Array:
    """Returns float32 logits [..., 256] for the last layer's output x [..., H]."""
    x = rms_norm(x, params["final_norm"])
    return (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)


def forward(params: dict, tokens: jax.Array, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """Returns next-byte logits, tokens [B, S] -> float32 [B, S, 256], and the metrics of each MoE layer, stacked."""

    def block(x, layer):
        x += attention(rms_norm(x, layer["attention_norm"]), layer, cfg)
        rows = rms_norm(x, layer["moe_norm"]).reshape(-1, cfg.hidden)
        out, metrics = moe(rows, layer, cfg, group)
        return x + out.reshape(x.shape), metrics

    if cfg.remat:
        block = jax.checkpoint(block, prevent_cse=False)  # in a scan, XLA cannot merge the two computations
    x, metrics = jax.lax.scan(block, params["embedding"].astype(cfg.dtype)[tokens], params["layers"])
    return unembed(x, params), metrics


def loss(params: dict, windows: jax.Array, cfg: Config, group: ep.Group) -> tuple[jax.Array, dict]:
    """Returns the loss over windows int32 [B, S + 1], and metrics: "nats" per byte, and the metrics of `moe`."""
    logits, metrics = forward(params, windows[:, :-1], cfg, group)
    log_probs = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(log_probs, windows[:, 1:, None], axis=-1).mean()
    nats = jax.lax.pmean(nats, AXES)
    return nats + cfg.balance_loss * metrics["balance"].mean(), {"nats": nats} | metrics


def sample(params: dict, prompt: jax.Array, key: jax.Array, num_bytes: int, cfg: Config, group: ep.Group) -> jax.Array:
    """Continues each prompt, int32 [B, S] -> [B, num_bytes]. The model sees the last S bytes."""

    def step(window, key):
        logits, _ = forward(params, window, cfg, group)
        byte = jax.random.categorical(key, logits[:, -1] / TEMPERATURE).astype(window.dtype)
        return jnp.concatenate([window[:, 1:], byte[:, None]], axis=1), byte

    _, text = jax.lax.scan(step, prompt, jax.random.split(key, num_bytes))
    return text.T
