"""all_to_all and all_to_all_back: rows that the caller has sorted by expert."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import assert_same_bits, open_group, run_spmd, spmd, to_numpy
from shapes import SMALL, make_inputs, random_array

SHAPE = dataclasses.replace(SMALL, tokens=48)
SPLITS_THAT_DO_NOT_FIT = ([60], [20, 20, 20], [48, 1], [0, -7, 20, -1, 50], [1, 2**31 - 1, 5, 2**31 - 1])


def random_splits(num_ranks, how):
    """Rows per rank and expert, [R, E] int32; a rank sends at most SHAPE.tokens."""
    rng = np.random.default_rng(5)
    splits = np.zeros((num_ranks, SHAPE.num_experts), np.int32)
    if how == "uneven":
        for rank in range(num_ranks):
            chosen = rng.integers(SHAPE.num_experts, size=rng.integers(SHAPE.tokens + 1))
            splits[rank] = np.bincount(chosen, minlength=SHAPE.num_experts)
    elif how == "all_to_one":
        splits[:, -1] = SHAPE.tokens
    return splits


def sent(splits):
    """[R, M] bool: rows that the splits cover."""
    return np.arange(SHAPE.tokens) < splits.sum(axis=-1, keepdims=True)


def received(splits):
    """[R, R, M] bool: rows of the blocks that hold something."""
    return oracle.all_to_all(sent(splits)[..., None], splits)[0][..., 0]


@pytest.fixture(scope="module")
def round_trip(make_group, any_mesh):
    """all_to_all, then all_to_all_back of other rows, compiled once for all splits."""
    group = make_group(any_mesh, SHAPE)

    def both(x, y, splits):
        return ep.all_to_all(x, splits, group=group), ep.all_to_all_back(y, splits, group=group)

    return jax.jit(spmd(both, any_mesh))


@pytest.mark.parametrize("how", ["uneven", "all_to_one", "nothing"])
def test_there_and_back(round_trip, any_mesh, how):
    num_ranks = any_mesh.size
    splits = random_splits(num_ranks, how)
    x = make_inputs(SHAPE, num_ranks).x
    blocks, received_splits = oracle.all_to_all(x, splits)
    mask = received(splits)
    y = random_array(np.random.default_rng(6), blocks.shape, SHAPE.dtype)
    y[..., 0] = -0.0  # which a sum that begins at zero would not keep
    y[~mask] = np.nan
    there, back = to_numpy(round_trip(x, y, splits))
    assert there.x.shape == blocks.shape
    assert there.scales is None
    assert_same_bits(there.splits, received_splits)
    assert_same_bits(there.x[mask], blocks[mask])
    assert_same_bits(back, oracle.all_to_all_back(y, splits))


@pytest.mark.parametrize("splits_of_rank", SPLITS_THAT_DO_NOT_FIT, ids=str)
def test_splits_that_do_not_fit(round_trip, any_mesh, splits_of_rank):
    """Experts get rows in order until the rows of x are spent. A negative split counts as zero.

    The sum of splits may exceed an int32.
    """
    num_ranks = any_mesh.size
    given = np.zeros((num_ranks, SHAPE.num_experts), np.int32)
    for rank in range(num_ranks):  # on each rank, another expert is the first with rows
        given[rank, rank : rank + len(splits_of_rank)] = splits_of_rank
    given[:, -1] = SHAPE.tokens
    ends = np.minimum(np.cumsum(np.maximum(given, 0), axis=-1, dtype=np.int64), SHAPE.tokens)
    splits = np.diff(ends, axis=-1, prepend=0).astype(np.int32)
    assert (splits.sum(axis=-1) == SHAPE.tokens).all()
    x = make_inputs(SHAPE, num_ranks).x
    blocks, received_splits = oracle.all_to_all(x, splits)
    mask = received(splits)
    y = random_array(np.random.default_rng(6), blocks.shape, SHAPE.dtype)
    y[~mask] = np.nan
    there, back = to_numpy(round_trip(x, y, given))
    assert_same_bits(there.splits, received_splits)
    assert_same_bits(there.x[mask], blocks[mask])
    assert_same_bits(back, oracle.all_to_all_back(y, splits))


WIRES_AND_SHAPES = [
    (wire, dtype, SHAPE.hidden) for wire in ("fp8", "fp8_pow2") for dtype in ("bfloat16", "float16", "float32")
]


@pytest.mark.parametrize(("wire", "dtype", "hidden"), [*WIRES_AND_SHAPES, ("fp8", "bfloat16", 400)])
def test_wire(make_group, mesh, wire, dtype, hidden):
    shape = dataclasses.replace(SHAPE, dtype=dtype, hidden=hidden)
    group = make_group(mesh, shape)
    splits = random_splits(mesh.size, "uneven")
    x = make_inputs(shape, mesh.size).x

    def exchange(x, splits):
        there = ep.all_to_all(x, splits, group=group, wire=wire, dequantize=False)
        return there, ep.dequantize(there), ep.all_to_all(x, splits, group=group, wire=wire)

    there, later, on_arrival = run_spmd(exchange, mesh, x, splits)
    mask = received(splits)
    quantised = oracle.quantize(x, wire)
    dequantised = oracle.dequantize(*quantised, x.dtype)
    assert on_arrival.scales is None
    for actual, payload in (
        (there.x, quantised[0]),
        (there.scales, quantised[1]),
        (later, dequantised),
        (on_arrival.x, dequantised),
    ):
        blocks, _ = oracle.all_to_all(payload, splits)
        assert actual.shape == blocks.shape
        assert_same_bits(actual[mask], blocks[mask])
    for sent in (there, on_arrival):
        assert_same_bits(sent.splits, oracle.all_to_all(x, splits)[1])


def test_fewer_rows_than_the_group_allows(make_group, mesh):
    group = make_group(mesh, SHAPE)
    x = make_inputs(SHAPE, mesh.size).x[:, :3]
    splits = np.zeros((mesh.size, SHAPE.num_experts), np.int32)
    splits[:, 1] = 2
    there = run_spmd(lambda x, splits: ep.all_to_all(x, splits, group=group), mesh, x, splits)
    blocks, _ = oracle.all_to_all(x, splits)
    assert there.x.shape == blocks.shape
    assert_same_bits(there.x[:, :, :2][:1], blocks[:, :, :2][:1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wire", [None, "fp8"])
def test_each_is_the_gradient_of_the_other(make_group, mesh, wire, check_vma):
    """Cotangents travel the other way, and those of rows that nobody sent are exactly zero.

    The rounding of a wire is differentiated straight through.
    """
    group = make_group(mesh, SHAPE)
    splits = random_splits(mesh.size, "uneven")
    mask = received(splits)
    x = make_inputs(SHAPE, mesh.size).x
    blocks = random_array(np.random.default_rng(7), mask.shape + (SHAPE.hidden,), SHAPE.dtype)
    blocks[~mask] = np.nan

    def gradients(x, blocks, splits):
        there, there_vjp = jax.vjp(lambda x: ep.all_to_all(x, splits, group=group, wire=wire).x, x)
        _, back_vjp = jax.vjp(lambda y: ep.all_to_all_back(y, splits, group=group), blocks)
        return there_vjp(blocks.astype(there.dtype))[0], back_vjp(x)[0]

    dx, dy = run_spmd(gradients, mesh, x, blocks, splits, check_vma=check_vma)
    assert_same_bits(dx, oracle.all_to_all_back(blocks, splits))
    assert_same_bits(dy, oracle.all_to_all(np.where(sent(splits)[..., None], x, 0), splits)[0])


def test_experts_on_sorted_rows(make_group, mesh):
    """The use it is made for: sort by expert, send, compute, send back, in a differentiated program."""
    shape = dataclasses.replace(SHAPE, dtype="float32")
    group = make_group(mesh, shape)
    rng = np.random.default_rng(8)
    x = make_inputs(shape, mesh.size).x
    expert = rng.integers(shape.num_experts, size=x.shape[:2]).astype(np.int32)
    gains = rng.normal(size=(shape.num_experts,)).astype(np.float32)

    def layer(x, expert):
        order = jnp.argsort(expert)
        splits = jnp.bincount(expert, length=shape.num_experts).astype(jnp.int32)
        there = ep.all_to_all(x[order], splits, group=group)
        ends = jnp.cumsum(there.splits, axis=1)
        local = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(len(x)), side="right"))(ends)
        first = jax.lax.axis_index("ep") * group.experts_per_rank
        y = there.x * jnp.take(jnp.asarray(gains), first + local, fill_value=0)[..., None]
        return jnp.zeros_like(x).at[order].set(ep.all_to_all_back(y, splits, group=group))

    def loss(x):
        return 0.5 * jnp.sum(spmd(layer, mesh)(x, expert) ** 2)

    value, dx = to_numpy(jax.jit(jax.value_and_grad(loss))(x))
    expected = x * gains[expert][..., None]
    np.testing.assert_allclose(value, 0.5 * np.sum(expected**2), rtol=1e-5)
    np.testing.assert_allclose(dx, expected * gains[expert][..., None], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"wire": "fp8"}, {"wire": "fp8", "dequantize": False}], ids=str)
def test_debug_nans(mesh, monkeypatch, options):
    """JAX_EP_DEBUG_NANS=1: rows beyond the splits are NaN, and the rows that arrive are unchanged."""
    monkeypatch.setenv("JAX_EP_DEBUG_NANS", "1")
    x, splits = make_inputs(SHAPE, mesh.size).x, random_splits(mesh.size, "uneven")
    mask = received(splits)

    def exchange(group, x, splits):
        there = ep.all_to_all(x, splits, group=group, **options)
        return there, ep.all_to_all_back(ep.dequantize(there), splits, group=group)

    with open_group(mesh, SHAPE, backend="reference") as group:
        there, back = run_spmd(partial(exchange, group), mesh, x, splits)
    monkeypatch.delenv("JAX_EP_DEBUG_NANS")
    with open_group(mesh, SHAPE, backend="reference") as group:
        plain, plain_back = run_spmd(partial(exchange, group), mesh, x, splits)
    assert_same_bits(back, plain_back)
    for rows, plain_rows in ((there.x, plain.x), (there.scales, plain.scales)):
        if rows is None:
            continue
        assert np.isnan(rows[~mask].astype(np.float32)).all()
        assert_same_bits(rows[mask], plain_rows[mask])
