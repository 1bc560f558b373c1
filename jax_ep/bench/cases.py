"""The cases that the bench times, and their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep._constants import CHANNELS_PER_SCALE
from jax_ep._layouts import LayoutName
from jax_ep._wires import DispatchWire, GradWire, Wire


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange to time. The fields have the names of the JSON rows. `tokens` is per rank."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    wire: DispatchWire | None
    layout: LayoutName
    routing: str
    num_sms: int | None = None
    capacity_factor: float | None = None  # None: room for any routing
    combine_wire: Wire | None = None  # the `wire` of combine
    grad_wire: GradWire | None = None  # the `grad_wire` of dispatch and of combine

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks


class Inputs(NamedTuple):
    """The arguments of all ranks: x [R, T, H], topk_idx [R, T, K] int32, topk_weights [R, T, K] float32."""

    x: Any
    topk_idx: Any
    topk_weights: Any


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Returns inputs for which a chain of pairs is exact, in all dtypes and wires. Each token's weights add up to 1."""
    rng = np.random.default_rng(seed)
    # A weighted sum over some of a token's experts is a multiple of 1/32 below 8. It has 8 bits, which fit in bfloat16.
    x = rng.integers(-7, 8, (case.ranks, case.tokens, case.hidden), dtype=np.int8)
    # The largest value of each block. So "fp8" and "fp8_e5m2" represent x and its weighted sums exactly, except for the
    # rounding of the scale.
    x[..., ::CHANNELS_PER_SCALE] = 7
    shares = rng.multinomial(32 - case.top_k, np.full(case.top_k, 1 / case.top_k), (case.ranks, case.tokens))
    topk_idx = ROUTINGS[case.routing](rng, case)
    return Inputs(x.astype(jnp.dtype(case.dtype)), topk_idx.astype(np.int32), (1 + shares).astype(np.float32) / 32)


def _uniform(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Returns distinct experts, all equally likely: [R, T, K]."""
    return rng.random((case.ranks, case.tokens, case.experts)).argsort(axis=-1)[..., : case.top_k]


def _skewed(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Returns distinct experts, [R, T, K]: half of them on rank 0, or as many as rank 0 has."""
    scores = rng.random((case.ranks, case.tokens, case.experts))
    hot, cold = np.split(scores, [case.experts_per_rank], axis=-1)
    rounded_up_in_turn = (case.top_k + np.arange(case.tokens) % 2) // 2
    num_hot = np.clip(rounded_up_in_turn, case.top_k - cold.shape[-1], hot.shape[-1])
    # Scores are in [0, 1). So a hot expert with its score - 2 comes before all cold experts, with + 2 after them.
    place = hot.argsort(axis=-1).argsort(axis=-1)
    hot = np.where(place < num_hot[:, None], hot - 2, hot + 2)
    return np.concatenate([hot, cold], axis=-1).argsort(axis=-1)[..., : case.top_k]


ROUTINGS: dict[str, Callable[[np.random.Generator, Case], np.ndarray]] = {"uniform": _uniform, "skewed": _skewed}


def signs_of_experts(case: Case) -> np.ndarray:
    """Returns +1 or -1 for each expert, [E] float32. The signs show whether rows reached the right expert."""
    return np.random.default_rng(1).choice(np.array([-1, 1], np.float32), case.experts)
