"""route: computes experts, weights and balancing losses from a router's logits, without communication or a group."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _checks, _compat

Score: TypeAlias = Literal["softmax", "sigmoid"]
SCORES: tuple[Score, ...] = get_args(Score)


class Routing(NamedTuple):
    """A router's choice for this rank's tokens. E experts, K = top_k; `...` are the leading dimensions of the logits.

    Examples:
        >>> routing = ep.moe.route(jnp.array([[1.0, 3.0, 2.0, 0.0]]), top_k=2)
        >>> routing.topk_idx.tolist(), routing.load.tolist()
        ([[1, 2]], [0.0, 0.5, 0.5, 0.0])
    """

    topk_idx: jax.Array
    """[..., K] int32: the experts of each token, the highest score (with bias) first."""
    topk_weights: jax.Array
    """[..., K] float32: the weights of these experts."""
    aux_loss: jax.Array
    """[] float32: the load-balancing loss; 1 if all experts have equal loads and equal mean scores."""
    z_loss: jax.Array
    """[] float32: the mean over tokens of logsumexp(logits) squared."""
    load: jax.Array
    """[E] float32: the fraction of the (token, k) choices that name each expert. The sum is 1."""


@_compat.named
def route(
    logits: Annotated[jax.Array, "floating point [..., E]"],
    *,
    top_k: int,
    score: Score = "softmax",
    bias: Annotated[jax.Array, "floating point [E]"] | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Chooses top_k experts for each token, and computes their weights and the balancing losses.

    All arithmetic is in float32. Among equal scores, the expert with the lower index goes first. `route` communicates
    with no other rank: it computes the losses and the load from this rank's tokens. It also works outside
    `jax.shard_map`.

    | model | arguments |
    | --- | --- |
    | Mixtral, gpt-oss (softmax over the chosen logits), Qwen3-MoE | the defaults |
    | DeepSeek-V3 | `score="sigmoid", bias=bias, num_groups=8, topk_groups=4, scale=2.5` |
    | Kimi K2 (one expert group) | `score="sigmoid", bias=bias, scale=2.827` |
    | Switch Transformer | `top_k=1, normalize=False` |

    **Losses over several ranks.** `jax.lax.pmean(routing.aux_loss, axes)` is the mean of the ranks' losses: each rank
    balances its own tokens. To balance the tokens of all ranks together, average the load and the mean shares first.
    The share of an expert is its score, divided by the sum of the token's scores:

        log_scores = logits.astype(jnp.float32)
        log_scores = jax.nn.log_sigmoid(log_scores)  # only with score="sigmoid"
        mean_shares = jax.nn.softmax(log_scores).mean(axis=tuple(range(logits.ndim - 1)))  # [E]
        load, mean_shares = jax.lax.pmean((routing.load, mean_shares), axes)
        aux_loss = num_experts * jnp.sum(load * mean_shares)

    For `z_loss` and `load`, the mean over the ranks is exactly the value for all tokens. For a loss per sequence, apply
    `jax.vmap` to `route`.

    Args:
        logits: [..., E], the router's output for each token. The leading dimensions are usually [T] or [B, S].
        top_k: experts per token, 1 to E.
        score: "softmax" over the experts, or "sigmoid" of each logit.
        bias: [E], added to the scores only to choose the experts, never to compute the weights. It has no gradient. To
            balance without an auxiliary loss, change the bias after each training step: add a small step to the bias of
            each expert with a load below 1 / E, and subtract the step from the bias of each expert with a load above
            1 / E (https://arxiv.org/abs/2408.15664).
        num_groups: the number of expert groups, for node-limited routing. An expert group is E / num_groups consecutive
            experts (it is not a `Group`). Its score is the sum of the two highest scores (with bias) of its experts.
        topk_groups: a token may choose experts only from the topk_groups expert groups with the highest scores. Give
            both num_groups and topk_groups, or neither.
        normalize: True divides the weights of each token by their sum.
        scale: multiplies the weights, after normalisation.

    Returns:
        A `Routing`. Gradients flow to the logits through topk_weights, aux_loss and z_loss. aux_loss is
        E * sum over e of load[e] * P[e]. P[e] is the mean over tokens of the score of e divided by the sum of the
        token's scores. load has no gradient.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Sources: GShard (https://arxiv.org/abs/2006.16668) and Switch Transformer (https://arxiv.org/abs/2101.03961) for
    aux_loss, ST-MoE (https://arxiv.org/abs/2202.08906) for z_loss, DeepSeek-V3 (https://arxiv.org/abs/2412.19437,
    section 2.1.2) for sigmoid scores, the bias and the expert groups.

    Examples:
        >>> logits = jnp.array([[0.0, 2.0, 1.0, -1.0]])
        >>> routing = ep.moe.route(logits, top_k=2)
        >>> routing.topk_idx.tolist()
        [[1, 2]]
        >>> bool(jnp.allclose(routing.topk_weights, jax.nn.softmax(jnp.array([2.0, 1.0]))))
        True
    """
    num_experts = _check(logits, top_k, score, bias, num_groups, topk_groups, normalize, scale)
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    # A softmax of logarithms divides scores by their sum without underflow (softmax scores: up to a constant).
    log_scores = logits if score == "softmax" else jax.nn.log_sigmoid(logits)

    choice = lax.stop_gradient(
        scores if bias is None else scores + jnp.broadcast_to(bias.astype(jnp.float32), scores.shape)
    )
    if num_groups is not None and topk_groups is not None:
        choice = _keep_best_groups(choice, num_groups, topk_groups)
    _, topk_idx = lax.top_k(choice, top_k)
    topk_idx = topk_idx.astype(jnp.int32)

    if normalize:
        topk_weights = jax.nn.softmax(jnp.take_along_axis(log_scores, topk_idx, axis=-1))
    else:
        topk_weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    topk_weights = topk_weights * scale

    # Sums over all leading axes, without a reshape: JAX cannot reshape axes that are sharded over explicit mesh axes.
    *leading, _ = range(logits.ndim)
    # A sum of comparisons, since XLA adds to a histogram with atomics on GPUs.
    experts = lax.expand_dims(jnp.arange(num_experts, dtype=jnp.int32), range(logits.ndim))
    num_chosen = (topk_idx[..., None] == experts).sum(axis=(*leading, -2), dtype=jnp.int32)
    load = num_chosen.astype(jnp.float32) / max(topk_idx.size, 1)
    num_tokens = max(logits.size // num_experts, 1)
    mean_shares = jax.nn.softmax(log_scores).sum(axis=tuple(leading)) / num_tokens
    z_loss = jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum() / num_tokens
    return Routing(topk_idx, topk_weights, num_experts * jnp.sum(load * mean_shares), z_loss, load)


def _keep_best_groups(choice: jax.Array, num_groups: int, topk_groups: int) -> jax.Array:
    """`choice` [..., E] with -infinity for the experts outside of each token's best expert groups."""
    by_group = choice.reshape(*choice.shape[:-1], num_groups, -1)
    best_two, _ = lax.top_k(by_group, min(2, by_group.shape[-1]))
    _, best_groups = lax.top_k(best_two.sum(axis=-1), topk_groups)
    is_best = jnp.any(jax.nn.one_hot(best_groups, num_groups, dtype=jnp.bool), axis=-2)
    return jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(choice.shape)


def _check(
    logits: Any, top_k: Any, score: Any, bias: Any, num_groups: Any, topk_groups: Any, normalize: Any, scale: Any
) -> int:
    """Checks the arguments of route; returns the number of experts."""
    op = "moe.route"
    if not hasattr(logits, "shape") or not hasattr(logits, "dtype"):
        raise TypeError(f"{op}: logits is {_checks.kind(logits)}; it must be an array")
    if not logits.shape or not logits.shape[-1]:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}; it must be [..., E], with at least one expert")
    _check_floating(op, "logits", logits)
    num_experts = logits.shape[-1]
    _checks.integer(f"{op}: top_k", top_k, 1, num_experts)
    _checks.choice(f"{op}: score", score, SCORES)
    if bias is not None:
        _checks.array(op, "bias", bias, {"E": num_experts}, getattr(bias, "dtype", None))
        _check_floating(op, "bias", bias)
    _checks.boolean(op, "normalize", normalize)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: scale is {scale!r}, {_checks.kind(scale)}; it must be a number")

    if (num_groups is None) != (topk_groups is None):
        missing = "topk_groups" if topk_groups is None else "num_groups"
        raise ValueError(
            f"{op}: {missing} is None, but num_groups = {num_groups} and topk_groups = {topk_groups} go together; give "
            "both or neither"
        )
    if num_groups is not None:
        _checks.integer(f"{op}: num_groups", num_groups, 1, num_experts)
        if num_experts % num_groups:
            raise ValueError(
                f"{op}: num_groups is {num_groups}; it must divide the number of experts, {num_experts}, the last "
                "dimension of logits"
            )
        _checks.integer(f"{op}: topk_groups", topk_groups, 1, num_groups)
        room = topk_groups * (num_experts // num_groups)
        if top_k > room:
            raise ValueError(
                f"{op}: topk_groups is {topk_groups}; {topk_groups} expert groups of {num_experts // num_groups} "
                f"experts have {room} experts, fewer than top_k = {top_k}: use "
                f"topk_groups={-(-top_k * num_groups // num_experts)}"
            )
    return num_experts


def _check_floating(op: str, name: str, value: Any) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; it must be a floating-point dtype, such as float32")
