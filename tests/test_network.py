"""Groups over a network, emulated: what crosses it, and what it changes.

Tests of all backends run over an emulated network, too (NODE_SIZES in conftest.py). test_multiprocess.py has the tests
on GPUs.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import jax_ep as ep
import oracle
from conftest import HAS_EMULATED
from helpers import (
    PURE_JAX,
    arena_slot_bytes,
    assert_same_bits,
    assert_trees_same_bits,
    every_operation,
    inputs_of_every_operation,
    make_mesh,
    num_arena_slots,
    open_group,
    rows_between_ranks,
    run_spmd,
    there_and_back,
    traffic,
)
from shapes import SMALL, make_inputs

needs_emulated = pytest.mark.skipif(not HAS_EMULATED, reason="there are no emulated GPUs")
MOST_TOKENS_BY_RANK = 32  # rows of more tokens go by node: has_few_tokens in ffi/plan.h


@pytest.fixture(params=[(2, 1), (4, 2), (4, 1), (8, 4), (8, 2)], ids=lambda sizes: "ep{}-nodes_of_{}".format(*sizes))
def nodes(request, monkeypatch):
    """A mesh, and how many ranks of it are a node of the groups that the test makes."""
    num_ranks, node_size = request.param
    monkeypatch.setenv("JAX_EP_NODE_SIZE", str(node_size))
    return make_mesh((num_ranks,)), node_size


def test_tests_use_the_network(request, backend, make_group, mesh):
    """The group of a test has nodes if the parameter of the test says so."""
    group = make_group(mesh, SMALL)
    x, topk_idx, _ = make_inputs(SMALL, mesh.size)
    run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
    _, _, node_size = request.node.callspec.params["backend"].partition("_nodes_of_")
    if not node_size:
        assert group.backend in PURE_JAX or not group._impl._has_network
        return
    assert group._impl._has_network
    assert group._impl.traffic() == tuple(traffic(topk_idx, SMALL, int(node_size), by_node=False).sum(axis=0))


@needs_emulated
@pytest.mark.parametrize("tokens", [8, MOST_TOKENS_BY_RANK, MOST_TOKENS_BY_RANK + 1])
def test_traffic(nodes, tokens):
    """A row of few tokens crosses the network once per far rank, a row of many once per far node; and then back."""
    mesh, node_size = nodes
    shape = replace(SMALL, tokens=tokens)
    x, topk_idx, _ = make_inputs(shape, mesh.size, "uneven")
    expected = traffic(topk_idx, shape, node_size, by_node=tokens > MOST_TOKENS_BY_RANK and node_size > 1)
    with open_group(mesh, shape, backend="emulated") as group:
        run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
        assert group._impl.traffic() == tuple(expected.sum(axis=0))


@needs_emulated
@pytest.mark.parametrize("tokens", [8, 40])
def test_same_bits_as_in_one_node(nodes, monkeypatch, tokens):
    """Sums of many tokens are added by node: they are the same on every run, but not those of a group in one node."""
    mesh, _ = nodes
    shape = replace(SMALL, tokens=tokens, hidden=384)
    inputs = inputs_of_every_operation(shape, mesh.size)

    def results(runs):
        with open_group(mesh, shape, backend="emulated") as group:
            return [run_spmd(partial(every_operation, group), mesh, *inputs) for _ in range(runs)]

    first, second = results(2)
    assert_trees_same_bits(second, first)
    monkeypatch.delenv("JAX_EP_NODE_SIZE")
    ((rows, sums),) = results(1)
    assert_trees_same_bits(first[0], rows)
    if tokens <= MOST_TOKENS_BY_RANK:
        assert_trees_same_bits(first[1], sums)


@needs_emulated
def test_late_puts_change_no_bit(nodes, adversary):
    mesh, _ = nodes
    shape = replace(SMALL, tokens=40, hidden=384)
    inputs = make_inputs(shape, mesh.size, "uneven", seed=adversary)
    with open_group(mesh, shape, backend="emulated") as group:
        for _ in range(2):
            recv = run_spmd(partial(ep.dispatch, group=group, layout="expert", zero_pad=True), mesh, *inputs)
            expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, layout="expert")
            assert_same_bits(recv.x, expected.x)
            assert_same_bits(recv.counts, expected.route.counts)


@needs_emulated
def test_ranks_count_what_they_see(nodes):
    """A rank does not see what a far rank has counted: the rows that came from here, and those that it took back."""
    mesh, node_size = nodes
    x, topk_idx, _ = make_inputs(SMALL, mesh.size, "uneven")
    with open_group(mesh, SMALL, backend="emulated") as group:
        run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
        stats = group.stats()
    there, node = rows_between_ranks(topk_idx, SMALL).sum(axis=1), np.arange(mesh.size) // node_size
    is_near = node == node[:, None]
    np.testing.assert_array_equal(stats.rows_sent, there * is_near + there.T)
    np.testing.assert_array_equal(stats.rows_received, there.T + there * is_near)


@needs_emulated
@pytest.mark.parametrize("tokens", [8, 256])
def test_memory_bytes(nodes, tokens):
    """The arena also has places for each node's rows. Behind it come staged rows, and a word for each row."""
    mesh, node_size = nodes
    num_ranks, num_nodes = mesh.size, mesh.size // node_size if node_size > 1 else 0
    with open_group(mesh, replace(SMALL, tokens=tokens), backend="emulated") as group:
        slots, rows = num_arena_slots(group), num_ranks * tokens
        row = oracle.round_up(oracle.round_up(16 * SMALL.top_k, 128) + 2 * SMALL.hidden, 128)
        arena = slots * arena_slot_bytes(group) * (num_ranks + num_nodes) // num_ranks
        needed = arena + slots * rows * row + slots * (rows + num_nodes * tokens) * 8
        assert 0 < group.memory_bytes - needed < 64 * 1024


@needs_emulated
def test_an_arena_that_does_not_fit(nodes):
    mesh, _ = nodes
    with pytest.raises(ep.Error, match=r"needs \d+ bytes .*NVSHMEM takes 512 MiB at a time.* max_tokens_per_rank"):
        open_group(mesh, replace(SMALL, tokens=2**25), backend="emulated", max_arena_bytes=2**62)
    x, topk_idx, _ = make_inputs(SMALL, mesh.size)
    with open_group(mesh, SMALL, backend="emulated") as group:
        out = run_spmd(partial(there_and_back, group, "ragged"), mesh, x, topk_idx)
    assert np.isfinite(jax.tree.leaves(out)[0].astype(np.float32)).all()
