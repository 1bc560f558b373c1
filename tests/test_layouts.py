"""Capacity: which rows a rank keeps if there is too little room, and how much room a capacity factor gives.

The tests of the layouts themselves are in test_dispatch.py and test_token_layout.py.
"""

import functools
import types

import jax
import numpy as np
import pytest

import oracle
from jax_ep import _layouts
from jax_ep._dispatch_options import DispatchOptions

NUM_RANKS, NUM_EXPERTS, TOKENS, TOP_K = 8, 64, 4096, 8
EXPERTS_PER_RANK = NUM_EXPERTS // NUM_RANKS


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_fill(num):
    rng = np.random.default_rng(num)
    fill = jax.jit(_layouts.fill)
    for _ in range(200):
        need = rng.integers(0, rng.choice([1, 3, 20]), num).astype(np.int32)
        room, start = int(rng.integers(need.sum() + 3)), int(rng.integers(num))
        kept = np.asarray(fill(need, room, start))
        np.testing.assert_array_equal(kept, oracle.fill(need, room, start), err_msg=f"{need} {room} {start}")
        # All room is used, nobody gets more than they need, and entries that lose rows keep equal numbers, within one.
        assert kept.sum() == min(need.sum(), room)
        assert (kept <= need).all()
        assert (kept[kept < need] >= kept.max(initial=0) - 1).all()


def test_fill_begins_at_start_and_goes_round():
    assert _layouts.fill(np.array([5, 1, 5, 5], np.int32), 12, 3).tolist() == [4, 1, 3, 4]


def test_fill_of_large_numbers():
    need = np.array([2**29, 2**30, 0, 2**29 - 1], np.int32)
    assert _layouts.fill(need, 2**30).tolist() == oracle_level(need, 2**30)


def oracle_level(need, room):
    """Fill by bisection, as the oracle counts up to the level."""
    low, high = 0, int(need.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(need, middle).sum(dtype=np.int64) <= room else (low, middle - 1)
    kept = np.minimum(need, low).astype(np.int64)
    for i in np.flatnonzero(need > low)[: room - kept.sum()]:
        kept[i] += 1
    return kept.tolist()


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 3, 8])
def test_place(layout, alignment):
    rng = np.random.default_rng(alignment)
    for num_experts, num_ranks in ((1, 1), (3, 4), (5, 2)):
        place = jax.jit(
            functools.partial(_layouts.place_rows, layout=layout, alignment=alignment), static_argnames="capacity"
        )
        for capacity in (0, alignment, 4 * alignment, 40 * alignment):
            need = rng.integers(0, 12, (num_experts, num_ranks)).astype(np.int32)
            first_expert = num_experts * int(rng.integers(num_ranks))
            placement = place(need, capacity=capacity, first_slot=first_expert)
            options = {"layout": layout, "capacity": capacity, "alignment": alignment, "first_expert": first_expert}
            kept = oracle.share_room(need, **options)
            np.testing.assert_array_equal(placement.kept, kept)
            np.testing.assert_array_equal(placement.counts, kept.sum(axis=1))
            assert placement.num_dropped == need.sum() - kept.sum()


def routing(skew, seed=0):
    """Rows from each source rank for each expert, [R, E]: the top K of random logits; experts differ by skew."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((NUM_RANKS, TOKENS, NUM_EXPERTS), np.float32)
    logits += skew * rng.standard_normal(NUM_EXPERTS, np.float32)
    chosen = np.argpartition(logits, -TOP_K, axis=-1)[..., -TOP_K:]
    return np.stack([np.bincount(ids.reshape(-1), minlength=NUM_EXPERTS) for ids in chosen]).astype(np.int32)


def drop_rates(sent, layout, factor, alignment):
    """What share of its rows each source rank loses, and each expert; of rows `sent` [R, E]."""
    sizes = {"num_tokens": TOKENS, "top_k": TOP_K, "experts_per_rank": EXPERTS_PER_RANK, "alignment": alignment}
    capacity = _layouts.capacity_of_factor(layout, factor, **sizes)
    place = functools.partial(_layouts.place_rows, layout=layout, capacity=capacity, alignment=alignment)
    need = sent.T.reshape(NUM_RANKS, EXPERTS_PER_RANK, NUM_RANKS)
    first_experts = np.arange(NUM_RANKS) * EXPERTS_PER_RANK
    kept = jax.jit(jax.vmap(lambda need, first: place(need, first_slot=first).kept))(need, first_experts)
    kept = np.asarray(kept).reshape(NUM_EXPERTS, NUM_RANKS)
    return 1 - kept.sum(axis=0) / sent.sum(axis=1), 1 - kept.sum(axis=1) / sent.sum(axis=0)


@functools.cache
def cached_routing(skew):
    return routing(skew)


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("skew", "bound"), [(0, 0.01), (0.5, 0.02)])
def test_source_ranks_lose_alike(layout, alignment, factor, skew, bound):
    rates, _ = drop_rates(cached_routing(skew), layout, factor, alignment)
    assert np.ptp(rates) < bound
    if skew:
        assert rates.min() > 0  # rows are dropped, so the bound is not met trivially


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("factor", [0.75, 1.0])
def test_experts_of_equal_need_lose_alike(layout, alignment, factor):
    sent = np.full((NUM_RANKS, NUM_EXPERTS), TOKENS * TOP_K // NUM_EXPERTS, np.int32)
    sent[:, ::2] += 7 * 128
    _, rates = drop_rates(sent, layout, factor, alignment)
    assert rates.max() > 0.1
    for equal in (rates[::2], rates[1::2]):
        assert np.ptp(equal) < 0.01


@pytest.mark.parametrize(
    ("layout", "factor", "alignment", "capacity"),
    [
        ("ragged", 1.0, 1, 60),  # T * K
        ("ragged", 1.25, 1, 75),
        ("ragged", 1.1, 1, 66),  # not 67, whatever 1.1 * 60 is in floating point
        ("ragged", 1.01, 1, 61),
        ("ragged", 1.0, 16, 64),
        ("expert", 1.0, 1, 20),  # T * K / E_local
        ("expert", 1.01, 1, 21),
        ("expert", 1.25, 8, 32),
        ("token", 1.0, 1, 60),  # a row for each pair
    ],
)
def test_capacity_factor(layout, factor, alignment, capacity):
    sizes = {"num_tokens": 15, "top_k": 4, "experts_per_rank": 3, "alignment": alignment}
    assert _layouts.capacity_of_factor(layout, factor, **sizes) == capacity


def test_capacity_factor_in_float32():
    """It counts as the decimal number that it shows, not as 1.10000002384."""
    options = DispatchOptions("ragged", None, np.float32(1.1), 1, None, None, True, None)
    group = types.SimpleNamespace(top_k=4, experts_per_rank=3, num_ranks=8, hidden=128)
    assert options.checked("dispatch", group, num_tokens=15).capacity == 66
