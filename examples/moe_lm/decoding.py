"""Runs the model of model.py one byte at a time, with a cache of keys and values, as a server does.

At a few tokens per rank the experts' rows are few: they travel as fp8, and `jax_ep.moe.mlp` pads them for one batched
matmul, which reads the experts' weights once.
"""

import jax
import jax.numpy as jnp

import jax_ep as ep
from moe_lm import model


def serving(params: dict, cfg: model.Config) -> dict:
    """Converts the parameters of `model.init` to the model's dtype, with a list of layers instead of a stacked axis.

    With the list, Python unrolls the loop over layers, which reads weights and writes the cache in place. A scan would
    copy the weights and the cache of each layer.
    """
    params = jax.tree.map(lambda p: p.astype(cfg.dtype), params)
    layers = [jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(cfg.layers)]
    return params | {"layers": layers}


def empty_cache(batch: int, length: int, cfg: model.Config) -> list[dict]:
    """Returns an empty cache: for each layer, the keys and values of `length` positions of `batch` sequences."""
    shape = batch, length, cfg.heads, cfg.hidden // cfg.heads
    return [{name: jnp.zeros(shape, cfg.dtype) for name in ("keys", "values")} for _ in range(cfg.layers)]


def step(
    params: dict,
    cache: list[dict],
    read: jax.Array,
    position: jax.Array,
    cfg: model.Config,
    group: ep.Group,
    wire: str | None = None,
) -> tuple[jax.Array, list[dict]]:
    """Reads a byte of each sequence, int32 [B], at `position`. Returns the next byte's logits [B, 256], and the cache.

    `params` is a result of `serving`. Runs inside `jax.shard_map`, like the functions of model.py.
    """
    x = params["embedding"][read][:, None]
    new_cache = []
    for layer, past in zip(params["layers"], cache, strict=True):
        out, past = attention(model.rms_norm(x, layer["attention_norm"]), position, layer, past, cfg)
        new_cache.append(past)
        x += out
        rows = model.rms_norm(x, layer["moe_norm"])[:, 0]
        x += moe(rows, layer, cfg, group, wire)[:, None]
    return model.unembed(x[:, 0], params), new_cache


def attention(x: jax.Array, position: jax.Array, layer: dict, past: dict, cfg: model.Config) -> tuple[jax.Array, dict]:
    """Returns the attention of x [B, 1, H] to all positions up to its own, and the cache with the new position."""
    q, k, v = model.queries_keys_values(x, position[None], layer, cfg)
    past = {
        name: jax.lax.dynamic_update_slice_in_dim(past[name], new, position, axis=1)
        for name, new in (("keys", k), ("values", v))
    }
    seen = jnp.arange(past["keys"].shape[1]) <= position
    out = jax.nn.dot_product_attention(q, past["keys"], past["values"], mask=seen[None, None, None])
    return out.reshape(x.shape) @ layer["attention_out"], past


def moe(x: jax.Array, layer: dict, cfg: model.Config, group: ep.Group, wire: str | None) -> jax.Array:
    """Mixture of experts, x [T, H] -> [T, H]."""
    _, routing = model.route(x, layer, cfg)
    return model.experts(x, routing, layer, group, wire=wire)
