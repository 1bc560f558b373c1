"""jax_ep/_placement.py, against an oracle that deals rows one expert at a time, and by what it promises."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from jax_ep import _placement

# (num_ranks, experts per rank, slots per rank, tolerance in units of 1/4096); each is one compiled program
SHAPES = [
    (1, 3, 3, 0),
    (2, 1, 1, 0),
    (2, 4, 4, 0),
    (4, 3, 3, 0),
    (8, 4, 4, 0),
    (8, 4, 4, 409),
    (8, 5, 2, 0),
    (4, 3, 0, 0),
]
place = jax.jit(_placement.place_balanced, static_argnames=("num_ranks", "num_slots", "tolerance_units"))


def moved(placement, needs):
    """The same pieces, of a placement."""
    pieces = []
    for to, source in enumerate(placement.source):
        if source < 0:
            continue
        for expert, start in zip(placement.queue[source], placement.start[source], strict=True):
            name = source * placement.queue.shape[1] + expert
            rows = min(placement.end[to], start + needs[name]) - max(placement.begin[to], start)
            if rows > 0:
                pieces.append((source, to, name, rows))
    return sorted(pieces)


def needs_of(data, num_experts):
    kind = data.draw(st.sampled_from(["few", "skewed", "one hot", "with holes"]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if kind == "few":
        return rng.integers(0, 4, num_experts)
    needs = (np.exp(rng.normal(0, 1.5, num_experts)) * rng.integers(1, 60)).astype(np.int64)
    if kind == "one hot":
        needs[rng.integers(num_experts)] += 1000
    return needs * (rng.random(num_experts) < 0.4) if kind == "with holes" else needs


@pytest.mark.parametrize(("num_ranks", "local", "num_slots", "tolerance"), SHAPES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_placement(num_ranks, local, num_slots, tolerance, data):
    needs = needs_of(data, num_ranks * local)
    found = place(needs.astype(np.int32), num_ranks=num_ranks, num_slots=num_slots, tolerance_units=tolerance)
    found = jax.tree.map(np.asarray, found)
    pieces = [move[:4] for move in oracle.moves(needs, num_ranks, num_slots, tolerance / 4096)]
    assert moved(found, needs) == sorted(pieces)
    load = needs.reshape(num_ranks, -1).sum(1)
    np.testing.assert_array_equal(found.home_rows, load)
    for donor, to, _, rows in pieces:
        load[donor] -= rows
        load[to] += rows
    np.testing.assert_array_equal(found.num_rows, load)
    for rank in range(num_ranks):
        copies = list(dict.fromkeys(expert for _, to, expert, _ in pieces if to == rank))
        assert found.slot_expert[rank].tolist() == copies + [-1] * (num_slots - len(copies))
    home, mean = needs.reshape(num_ranks, -1).sum(1), -(-needs.sum() // num_ranks)
    limit = mean + mean * tolerance // 4096
    assert load.max() <= max(home.max(), limit)
    if num_slots == local:
        assert load.max() <= limit
    if home.max() <= limit:
        assert not pieces
    # One source per rank, and only of the source's home experts.
    assert all(len({donor for donor, to, *_ in pieces if to == rank}) <= 1 for rank in range(num_ranks))
    assert all(expert // local == donor for donor, _, expert, _ in pieces)


def test_nobody_moves_if_that_makes_the_largest_load_larger():
    """A donor takes rows of the donor before it, and finds too few slots for as many of its own."""
    needs = [4, 2, 0, 1, 2, 1, 2, 4, 4, 0, 1, 1, 0, 3, 0, 1, 4, 2, 1, 2, 0, 0, 4, 1, 0, 0, 0, 0, 0, 3, 3, 3]
    sizes = {"num_ranks": 8, "tolerance_units": 0}
    with_all_slots, with_one = (place(np.array(needs, np.int32), num_slots=slots, **sizes) for slots in (4, 1))
    assert with_all_slots.num_rows.max() == 7 < with_all_slots.home_rows.max()
    assert (with_one.slot_expert == -1).all() and (with_one.source == -1).all()
    np.testing.assert_array_equal(with_one.num_rows, with_one.home_rows)


def test_limits_do_not_overflow():
    rows = np.array([0, 1, 4095, 4096, 67_000_000, 2**26], np.int32)
    for units in (0, 1, 409, 4096, 31 * 4096, 255 * 4096 + 4095):
        exact = rows.astype(object) + rows.astype(object) * units // 4096
        small = np.array([value < 2**31 for value in exact])
        found = np.asarray(jax.jit(partial(_placement.limit_of, tolerance_units=units))(rows))
        assert found[small].tolist() == [int(value) for value in exact[small]]
