"""The model of model.py one byte at a time, as a server runs it: with a cache of keys and values.

At a few tokens per rank the experts' rows are few: dispatch sends them as fp8, in the layout of a batched product.
"""

import jax
import jax.numpy as jnp

import jax_ep as ep
from moe_lm import model


def serving(params: dict, cfg: model.Config) -> dict:
    """The parameters of `model.init` in the model's dtype, with a list of layers in place of a stacked axis.

    A loop that Python unrolls reads weights and writes the cache where they are; a scan would copy each layer's.
    """
    params = jax.tree.map(lambda p: p.astype(cfg.dtype), params)
    layers = [jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(cfg.layers)]
    return params | {"layers": layers}


def empty_cache(batch: int, length: int, cfg: model.Config) -> list[dict]:
    """Of each layer, keys and values of `length` positions of `batch` sequences."""
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
    """Reads one byte of each sequence, int32 [B], at `position`; returns the next one's logits [B, 256], and the cache.

    `params` is what `serving` makes. Runs inside `jax.shard_map`, like the functions of model.py.
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
    """Attention of x [B, 1, H] to the positions up to its own, and the cache with that."""
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
    _, ids, weights = model.route(x, layer, cfg)
    # Experts whose product takes fp8 rows need dequantize=False: recv.scales then has a scale per 128 channels.
    recv = ep.dispatch(x, ids, weights, group=group, layout="expert", wire=wire)
    return ep.combine(model.expert_mlp(recv.x, layer["experts"], jnp.matmul), recv)
