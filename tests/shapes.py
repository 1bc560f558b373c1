"""The named shapes and routings of the tests. The sizes of known models are in jax_ep/bench/models.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jax_ep.bench.models import MODELS


@dataclass(frozen=True)
class Shape:
    """What one MoE layer moves. `tokens` is per rank, and small."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    tokens: int = 4
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return self.name


SMALL = Shape("small", num_experts=16, top_k=4, hidden=128, tokens=8)

KNOWN_MODELS = tuple(Shape(model.name, model.num_experts, model.top_k, model.hidden) for model in MODELS.values())

ODD = (
    Shape("shortest_row", num_experts=8, top_k=2, hidden=8, tokens=5),
    Shape("shortest_row_f32", num_experts=8, top_k=2, hidden=4, tokens=3, dtype="float32"),
    Shape("hidden_1000", num_experts=24, top_k=3, hidden=1000, tokens=7, dtype="float16"),
    Shape("top_1", num_experts=16, top_k=1, hidden=64, tokens=16),
    Shape("top_16", num_experts=64, top_k=16, hidden=48, tokens=6),
    Shape("top_32", num_experts=32, top_k=32, hidden=32, tokens=2, dtype="float32"),
    Shape("one_token", num_experts=16, top_k=4, hidden=128, tokens=1),
    Shape("many_tokens", num_experts=32, top_k=8, hidden=16, tokens=256),
)

SHAPES = (SMALL, *KNOWN_MODELS, *ODD)


def _uniform(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Distinct experts, all equally likely."""
    order = rng.random((num_ranks, shape.tokens, shape.num_experts)).argsort(axis=-1)
    return order[..., : shape.top_k]


def _uneven(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Every rank has another number of valid tokens (the first has none, the last all); the others name no expert."""
    idx = _uniform(rng, num_ranks, shape)
    num_valid = np.linspace(0, shape.tokens, num_ranks).astype(int) if num_ranks > 1 else [shape.tokens // 2]
    for rank, n in enumerate(num_valid):
        idx[rank, n:] = -1
    return idx


def _nothing(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """No token names any expert."""
    return np.full((num_ranks, shape.tokens, shape.top_k), -1)


def _hot_expert(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Every token names one and the same expert; its other choices are uniform."""
    idx = _uniform(rng, num_ranks, shape)
    hot = shape.num_experts // 2
    idx[np.logical_and(idx == hot, np.arange(shape.top_k) > 0)] = -1
    idx[..., 0] = hot
    return idx


def _duplicates(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Choices with replacement, and in every second token all of them the same expert."""
    idx = rng.integers(shape.num_experts, size=(num_ranks, shape.tokens, shape.top_k))
    idx[:, ::2] = idx[:, ::2, :1]
    return idx


def _out_of_range(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """About half of the choices lie outside [0, num_experts), just beside it or as far as int32 goes."""
    limits = np.iinfo(np.int32)
    outside = np.array([-1, -2, -shape.num_experts, limits.min, shape.num_experts, shape.num_experts + 1, limits.max])
    idx = _uniform(rng, num_ranks, shape)
    return np.where(rng.random(idx.shape) < 0.5, rng.choice(outside, idx.shape), idx)


Routing = Callable[[np.random.Generator, int, Shape], np.ndarray]

ROUTINGS: dict[str, Routing] = {
    "uniform": _uniform,
    "uneven": _uneven,
    "nothing": _nothing,
    "hot_expert": _hot_expert,
    "duplicates": _duplicates,
    "out_of_range": _out_of_range,
}


class Inputs(NamedTuple):
    """What all ranks give to dispatch: x [R, T, H], topk_idx [R, T, K] int32, topk_weights [R, T, K] float32."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


def make_inputs(shape: Shape, num_ranks: int, routing: str = "uniform", seed: int = 0) -> Inputs:
    """Random activations, a named routing, and weights of both signs."""
    rng = np.random.default_rng(seed)
    idx = ROUTINGS[routing](rng, num_ranks, shape).astype(np.int32)
    x = random_array(rng, (num_ranks, shape.tokens, shape.hidden), shape.dtype)
    return Inputs(x, idx, rng.normal(size=idx.shape).astype(np.float32))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal values; `dtype` may be one of ml_dtypes' names."""
    return rng.standard_normal(shape, dtype=np.float32).astype(np_dtype(dtype))


def np_dtype(name: str) -> np.dtype:
    """The NumPy dtype of that name, ml_dtypes' among them."""
    return np.dtype(getattr(ml_dtypes, name, name))
