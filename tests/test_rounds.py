"""Groups whose arena is too small for all tokens: operations have rounds, and the same bits as without rounds."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep as ep
import oracle
from helpers import (
    PURE_JAX,
    assert_same_bits,
    assert_trees_same_bits,
    make_mesh,
    open_group,
    run_spmd,
    there_and_back,
)
from shapes import ROUTINGS, SMALL, make_inputs

SHAPE = dataclasses.replace(SMALL, tokens=23)
FLOAT = dataclasses.replace(SHAPE, dtype="float32", hidden=200)
ROUND_TOKENS = 8  # so that 23 tokens have three rounds, and the last has fewer tokens


def bytes_for(group, tokens):
    """The bytes of an arena for so many tokens per round. The group may choose smaller, equal rounds."""
    impl = group._impl
    return impl._native.arena_bytes_for(impl._id, tokens)


@pytest.fixture(scope="module")
def make_groups(kernel_backend):
    """make_groups(mesh, shape): an equal pair of groups: without rounds, and with rounds of ROUND_TOKENS tokens."""
    opened = {}

    def make(mesh, shape, round_tokens=ROUND_TOKENS, **settings):
        key = (mesh, shape, round_tokens, *settings.items())
        if key not in opened:
            one = open_group(mesh, shape, backend=kernel_backend, **settings)
            bound = bytes_for(one, round_tokens)
            opened[key] = one, open_group(mesh, shape, backend=kernel_backend, max_arena_bytes=bound, **settings)
        return opened[key]

    yield make
    for pair in opened.values():
        for group in pair:
            group.close()


def assert_same_results(groups, mesh, fn, *inputs):
    """fn(group, *inputs) has the same bits with both groups."""
    one, several = (run_spmd(partial(fn, group), mesh, *inputs) for group in groups)
    assert_trees_same_bits(several, one)
    for group in groups:
        group.check()


def results_of(recv):
    """All that a dispatch returns, with the route."""
    names = ("x", "scales", "weights", "counts", "group_sizes", "num_dropped", "topk_idx", "num_rows_per_rank")
    return {name: getattr(recv, name, None) for name in names}, recv.route.arrays


def layer(group, x, topk_idx, topk_weights, *, layout, wire=None, back_wire=None, grad_wire=None, capacity=None):
    recv = ep.dispatch(
        x, topk_idx, topk_weights, group=group, layout=layout, wire=wire, grad_wire=grad_wire, capacity=capacity,
        zero_pad=True,
    )  # fmt: skip
    return recv, ep.combine(recv.x, recv, wire=back_wire, grad_wire=grad_wire)


def test_memory(make_groups, mesh):
    one, several = make_groups(mesh, SHAPE)
    assert one._impl.round_tokens == SHAPE.tokens
    assert several._impl.round_tokens == ROUND_TOKENS
    assert 0 < several.memory_bytes - several.max_arena_bytes < 64 * 1024
    assert several.memory_bytes < one.memory_bytes


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatch_and_combine(make_groups, any_mesh, layout, routing):
    inputs = make_inputs(SHAPE, any_mesh.size, routing)

    def both(group, *inputs):
        recv, out = layer(group, *inputs, layout=layout)
        return results_of(recv), out, ep.dispatch_like(inputs[1], recv)

    assert_same_results(make_groups(any_mesh, SHAPE), any_mesh, both, *inputs)


def test_with_stores_that_come_late(make_groups, mesh, adversary):
    inputs = make_inputs(SHAPE, mesh.size, "hot_expert", seed=adversary)
    both = partial(layer, layout="ragged", wire="fp8", back_wire="fp8")
    for _ in range(2):
        assert_same_results(make_groups(mesh, SHAPE), mesh, lambda *args: both(*args)[1], *inputs)


@pytest.mark.parametrize("wire", [None, "fp8", "fp8_pow2"])
def test_wires_and_gradients(make_groups, mesh, layout, wire):
    inputs = make_inputs(SHAPE, mesh.size, "uneven")

    def both(group, x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            back_wire = wire and "fp8"
            grad_wire = wire and "fp8_e5m2"
            _, out = layer(
                group, x, topk_idx, topk_weights, layout=layout, wire=wire, back_wire=back_wire, grad_wire=grad_wire
            )
            return out

        out, transpose = jax.vjp(loss, x, topk_weights)
        return out, transpose(out)

    assert_same_results(make_groups(mesh, SHAPE), mesh, both, *inputs)


def test_fp8_rows(make_groups, mesh, layout):
    def rows(group, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, wire="fp8", dequantize=False, zero_pad=True)
        return results_of(recv)

    assert_same_results(make_groups(mesh, SHAPE), mesh, rows, *make_inputs(SHAPE, mesh.size, "uneven"))


@pytest.mark.parametrize("capacity", [4, 16])
def test_dropped_rows(make_groups, mesh, layout, capacity):
    inputs = make_inputs(SHAPE, mesh.size, "hot_expert")

    def both(group, *inputs):
        recv, out = layer(group, *inputs, layout=layout, capacity=capacity)
        return results_of(recv), out

    assert_same_results(make_groups(mesh, SHAPE), mesh, both, *inputs)


def test_layout_token(make_groups, mesh):
    def both(group, x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv, out = layer(group, x, topk_idx, topk_weights, layout="token")
            return (out, jnp.sum(recv.weights)), results_of(recv)

        out, transpose, results = jax.vjp(loss, x, topk_weights, has_aux=True)
        return out, results, transpose(out)

    assert_same_results(make_groups(mesh, SHAPE), mesh, both, *make_inputs(SHAPE, mesh.size, "duplicates"))


def test_all_to_all(make_groups, any_mesh):
    x, topk_idx, _ = make_inputs(SHAPE, any_mesh.size, "uneven")
    splits = np.array([np.bincount(ids[ids >= 0], minlength=SHAPE.num_experts) for ids in topk_idx[..., 0]], np.int32)
    is_sent = np.arange(SHAPE.tokens) < splits.sum(axis=1)[:, None]
    is_received = oracle.all_to_all(is_sent[..., None], splits)[0]

    def both(group, x, splits, is_received):
        sent, transpose = jax.vjp(lambda x: jnp.where(is_received, ep.all_to_all(x, splits, group=group).x, 0), x)
        fp8 = ep.all_to_all(x, splits, group=group, wire="fp8")
        back = ep.all_to_all_back(jnp.where(is_received, sent, jnp.nan), splits, group=group)
        return sent, jnp.where(is_received, fp8.x, 0), fp8.splits, back, transpose(sent)

    assert_same_results(make_groups(any_mesh, SHAPE), any_mesh, both, x, splits, is_received)
    _, group = make_groups(any_mesh, SHAPE)
    back = run_spmd(lambda *inputs: both(group, *inputs)[3], any_mesh, x, splits, is_received)
    assert_same_bits(back, np.where(is_sent[..., None], x, 0))


def test_fewer_tokens_than_a_round(make_groups, mesh, layout):
    """The same kernels as without rounds, between operations that have rounds."""
    few = make_inputs(dataclasses.replace(SHAPE, tokens=5), mesh.size)

    def both(group, many, few):
        return [layer(group, *inputs, layout=layout)[1] for inputs in (many, few, many)]

    assert_same_results(make_groups(mesh, SHAPE), mesh, both, tuple(make_inputs(SHAPE, mesh.size)), tuple(few))


@pytest.mark.parametrize("round_tokens", [1, 12, 22])
def test_other_rounds(make_groups, mesh, round_tokens):
    """Rounds of one token; 12 and 22 of 23 tokens have two rounds, of 12 and 11 tokens."""
    groups = make_groups(mesh, FLOAT, round_tokens)
    assert groups[1]._impl.round_tokens == min(round_tokens, 12)
    both = partial(layer, layout="expert")
    assert_same_results(groups, mesh, lambda *args: both(*args)[1], *make_inputs(FLOAT, mesh.size, "uneven"))


def test_in_a_loop(make_groups, mesh):
    def loop(group, x, topk_idx, topk_weights):
        def step(x, _):
            out = layer(group, x, topk_idx, topk_weights, layout="ragged")[1]
            return out, jnp.sum(out)

        return lax.scan(step, x, length=3)

    assert_same_results(make_groups(mesh, FLOAT), mesh, loop, *make_inputs(FLOAT, mesh.size, "uneven"))


def test_balanced(make_groups, mesh):
    """dispatch along a plan, and copies of experts in a smaller arena."""
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size, "hot_expert")
    local = SHAPE.num_experts // mesh.size
    w = np.random.default_rng(3).standard_normal((mesh.size, local, SHAPE.hidden, 16), np.float32)

    def both(group, x, topk_idx, topk_weights, w):
        plan = ep.balance(topk_idx, group=group)

        def loss(x, w):
            copies = ep.replicate(w, plan)
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, plan=plan, zero_pad=True)
            return ep.combine(recv.x, recv), copies

        out, transpose = jax.vjp(loss, x, w)
        return out, transpose(out), plan.slot_expert

    assert_same_results(make_groups(mesh, SHAPE, replicas=local), mesh, both, x, topk_idx, topk_weights, w)


def test_counters(make_groups, mesh):
    """An operation counts once, and each of its rows counts once."""
    x, topk_idx, _ = make_inputs(SHAPE, mesh.size, "uneven")
    grown = []
    for group in make_groups(mesh, SHAPE):
        before = group.stats()
        run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
        after = group.stats()
        rows = [getattr(after, name) - getattr(before, name) for name in ("rows_sent", "rows_received", "bytes_sent")]
        calls = {op: after.operations[op] - before.operations[op] for op in after.operations}
        grown.append((rows, calls))
    assert grown[1][0][0].sum() > 0
    assert (grown[1][1]["dispatch"] == 1).all()
    jax.tree.map(np.testing.assert_array_equal, *grown)


def test_split_phase_calls(make_groups, mesh):
    """The error names the bytes with which a split-phase call is possible."""
    one, several = make_groups(mesh, SHAPE)
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size)

    def split(group, x, topk_idx, topk_weights):
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group))
        return ep.combine_done(ep.combine_start(recv.x, recv))

    needed = bytes_for(one, SHAPE.tokens)
    wanted = rf"dispatch_start: a rank has T = 23 tokens, but .* has 8 .* max_arena_bytes={needed}, or call dispatch"
    with pytest.raises(ValueError, match=wanted):
        run_spmd(partial(split, several), mesh, x, topk_idx, topk_weights)

    def start_to_combine(x, topk_idx):
        recv = ep.dispatch(x, topk_idx, group=several)
        return ep.combine_done(ep.combine_start(recv.x, recv))

    with pytest.raises(ValueError, match=rf"combine_start: .* max_arena_bytes={needed}, or call combine\n"):
        run_spmd(start_to_combine, mesh, x, topk_idx)
    with open_group(mesh, SHAPE, backend=one.backend, max_arena_bytes=needed) as group:
        assert group._impl.round_tokens == SHAPE.tokens
        assert_same_results((one, group), mesh, split, x, topk_idx, topk_weights)
    few = make_inputs(dataclasses.replace(SHAPE, tokens=ROUND_TOKENS), mesh.size)
    assert_same_results((one, several), mesh, split, *few)


def test_too_few_bytes(make_groups, mesh):
    one, _ = make_groups(mesh, SHAPE)
    least = bytes_for(one, 1)
    with pytest.raises(ValueError, match=rf"^max_arena_bytes is {least - 1}; it must be at least {least}, "):
        open_group(mesh, SHAPE, backend=one.backend, max_arena_bytes=least - 1)
    with open_group(mesh, SHAPE, backend=one.backend, max_arena_bytes=least) as group:
        assert group._impl.round_tokens == 1


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1", True])
def test_wrong_numbers_of_bytes(wrong):
    with pytest.raises((TypeError, ValueError), match="max_arena_bytes"):
        open_group(make_mesh((1,)), SHAPE, backend="reference", max_arena_bytes=wrong)


def test_backends_in_plain_jax_ignore_the_bound(mesh):
    for backend in PURE_JAX:
        with open_group(mesh, SHAPE, backend=backend, max_arena_bytes=1) as group:
            assert group.max_arena_bytes == 1
            x, topk_idx, _ = make_inputs(SHAPE, mesh.size)
            out = run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
            assert np.isfinite(jax.tree.leaves(out)[0].astype(np.float32)).all()
