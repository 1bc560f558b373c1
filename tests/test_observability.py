"""What a group tells about its work (Group.stats), and the names that profilers show."""

import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
from helpers import (
    chain,
    compiled,
    open_group,
    place,
    run_spmd,
    spin,
    spmd,
    steps_per_second,
    to_numpy,
    without_gpus,
)
from shapes import SMALL, make_inputs

COUNTERS = {
    "operations", "rows_dropped", "home_rows", "planned_rows", "copies", "rows_sent", "rows_received", "bytes_sent",
    "bytes_received", "seconds_waited",
}  # fmt: skip


# --- counters anywhere ----------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch, mesh):
    """The stats of a group of the CUDA backend, whose native half has made them up."""

    def group_stats(group_id):
        peers = [
            [(10 * i + r, 1000, 100 * i + r, 2000, 5 * 10**8 * r) for r in range(mesh.size)] for i in range(mesh.size)
        ]
        return [({"dispatch": 7, "combine": i}, 2**40 + i, (90, 80 + i, i), peers[i]) for i in range(mesh.size)]

    without_gpus(monkeypatch, group_stats=group_stats)
    with open_group(mesh, SMALL) as group:
        return group.stats()


def test_counters_are_arrays(counted, mesh):
    ranks = np.arange(mesh.size)
    assert counted.ranks == tuple(ranks)
    assert counted.devices == tuple(map(str, mesh.devices))
    np.testing.assert_array_equal(counted.operations["dispatch"], np.full(mesh.size, 7))
    np.testing.assert_array_equal(counted.operations["combine"], ranks)
    np.testing.assert_array_equal(counted.rows_dropped, 2**40 + ranks)
    np.testing.assert_array_equal(counted.home_rows, np.full(mesh.size, 90))
    np.testing.assert_array_equal(counted.planned_rows, 80 + ranks)
    np.testing.assert_array_equal(counted.copies, ranks)
    np.testing.assert_array_equal(counted.rows_sent, 10 * ranks[:, None] + ranks)
    np.testing.assert_array_equal(counted.rows_received, 100 * ranks[:, None] + ranks)
    np.testing.assert_array_equal(counted.bytes_sent, np.full((mesh.size, mesh.size), 1000))
    np.testing.assert_array_equal(counted.bytes_received, np.full((mesh.size, mesh.size), 2000))
    np.testing.assert_allclose(counted.seconds_waited, np.broadcast_to(ranks / 2, (mesh.size, mesh.size)))


def test_a_dict_has_totals(counted, mesh):
    told = json.loads(json.dumps(counted.to_dict()))
    assert told.keys() == {"ranks", "total"}
    assert told["total"].keys() == COUNTERS
    assert [rank["rank"] for rank in told["ranks"]] == list(range(mesh.size))
    assert all(rank.keys() == COUNTERS | {"rank", "device"} for rank in told["ranks"])
    assert told["ranks"][-1]["rows_sent"] == counted.rows_sent[-1].tolist()
    assert told["total"]["operations"]["dispatch"] == 7 * mesh.size
    assert told["total"]["rows_dropped"] == counted.rows_dropped.sum()
    assert told["total"]["seconds_waited"] == counted.seconds_waited.sum(axis=0).tolist()


def test_it_prints_as_a_table(counted, mesh):
    titles, *lines, total = str(counted).splitlines()
    names = "rank  device  operations  rows sent  rows received  rows dropped  MB sent  MB received  s for 0"
    assert titles.split()[: len(names.split())] == names.split()
    assert titles.endswith(f"s for {mesh.size - 1}")
    assert [line.split()[0] for line in lines] == [str(rank) for rank in range(mesh.size)]
    assert total.split()[0] == "all"
    assert {len(line) for line in (titles, *lines, total)} == {len(titles)}


def test_the_reference_backend_counts_nothing(mesh):
    with open_group(mesh, SMALL, backend="reference") as group:
        stats = group.stats()
    assert stats.devices == tuple(str(device) for device in mesh.local_devices)
    assert all(getattr(stats, name) is None for name in COUNTERS)
    assert json.loads(json.dumps(stats.to_dict()))["total"] == dict.fromkeys(COUNTERS)
    assert "counts nothing" in str(stats)


# --- counters of real work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "num_sms"), [(8, None), (300, None), (40, 1)])
def test_counts_are_those_of_the_routing(largest_mesh, kernel_backend, tokens, num_sms):
    """Every kind of operation once, and a split-phase dispatch, with drops, in fp8."""
    mesh, shape = largest_mesh, replace(SMALL, hidden=256, tokens=tokens)
    inputs = make_inputs(shape, mesh.size, "uneven")
    with open_group(mesh, shape, backend=kernel_backend, num_sms=num_sms, timeout=20.0) as group:

        def train(x, topk_idx, topk_weights):
            def loss(x, topk_weights):
                recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
                return jnp.sum(ep.combine(recv.x, recv).astype(jnp.float32))

            return jax.value_and_grad(loss, (0, 1))(x, topk_weights)

        def follow(x, topk_idx, topk_weights):
            pending = ep.dispatch_start(x, topk_idx, group=group, layout="expert", capacity=2, wire="fp8")
            recv = ep.dispatch_done(pending)
            return recv.num_dropped, ep.dispatch_like(x[:, :32], recv)

        def exchange(x, topk_idx, topk_weights):
            splits = jnp.sum(jax.nn.one_hot(topk_idx[:, 0], group.num_experts, dtype=jnp.int32), axis=0)
            sent = ep.all_to_all(x, splits, group=group)
            return ep.all_to_all_back(sent.x, splits, group=group)

        run_spmd(train, mesh, *inputs)
        num_dropped, _ = run_spmd(follow, mesh, *inputs)
        run_spmd(exchange, mesh, *inputs)
        stats = group.stats()

    rank_of = np.where(inputs.topk_idx >= 0, inputs.topk_idx // group.experts_per_rank, -1)
    goes_to = rank_of[..., None] == np.arange(mesh.size)  # [R, T, K, R]
    out, first = goes_to.any(axis=2).sum(axis=1), goes_to[:, :, 0].sum(axis=1)  # [R, R]: rows from each rank to each
    row, header, fp8_row = 512, 64, 256 + 16
    moved = [
        (out, row + header), (out.T, row), (out, row), (out.T, row + header),  # a layer, and its gradients
        (out, fp8_row + header), (out, 64),
        (first, row), (first.T, row),
    ]  # fmt: skip
    here = list(stats.ranks)
    rows, num_bytes = sum(number for number, _ in moved), sum(number * each for number, each in moved)
    np.testing.assert_array_equal(stats.rows_sent, rows[here])
    np.testing.assert_array_equal(stats.rows_received, rows.T[here])
    np.testing.assert_array_equal(stats.bytes_sent, num_bytes[here])
    np.testing.assert_array_equal(stats.bytes_received, num_bytes.T[here])
    np.testing.assert_array_equal(stats.rows_dropped, num_dropped[here])
    assert stats.rows_dropped.any()
    need_replicas = ("balance", "replicate", "replicate (backward)")
    times = dict.fromkeys(stats.operations, {1}) | {"dispatch": {2}} | dict.fromkeys(need_replicas, {0})
    assert {kind: set(number) for kind, number in stats.operations.items()} == times
    assert (stats.seconds_waited >= 0).all()
    assert stats.seconds_waited.any()


def test_the_rank_that_others_wait_for(largest_mesh, kernel_backend):
    """One that computes longer than the others, about a second. They wait for it, and for nobody else."""
    mesh, late_rank = largest_mesh, largest_mesh.size - 1
    is_late = np.arange(mesh.size) == late_rank
    steps = (1.5 * steps_per_second(mesh, is_late) * is_late).astype(np.int32)
    no_steps, steps, *inputs = place([0 * steps, steps, *make_inputs(SMALL, mesh.size)], mesh)
    with open_group(mesh, SMALL, backend=kernel_backend, timeout=20.0) as group:

        def late(steps, x, topk_idx, topk_weights):
            return chain(group, x, topk_idx + spin(steps), topk_weights)

        program = compiled(late, mesh, no_steps, *inputs)
        to_numpy(program(no_steps, *inputs))
        before = group.stats()
        begun = time.perf_counter()
        to_numpy(program(steps, *inputs))
        seconds = time.perf_counter() - begun  # not what was asked for, where other processes use the GPUs at times
        after = group.stats()
    waited = after.seconds_waited - before.seconds_waited
    others_here = np.array(after.ranks) != late_rank
    if kernel_backend == "emulated":  # whose time is slower, by no fixed factor
        seconds = waited.max()
        assert seconds > 0
    assert (waited[others_here, late_rank] >= seconds / 2).all()
    waited[others_here, late_rank] = 0
    assert (waited < seconds / 4).all()


def test_a_closed_group_still_tells(largest_mesh, kernel_backend):
    with open_group(largest_mesh, SMALL, backend=kernel_backend) as group:
        run_spmd(lambda *inputs: chain(group, *inputs), largest_mesh, *make_inputs(SMALL, largest_mesh.size))
        told = group.stats().to_dict()
    assert group.stats().to_dict() == told
    assert set(group.stats().operations["combine"]) == {3}


# --- names for profilers --------------------------------------------------------------------------------------------


def test_operations_have_names(make_group, mesh):
    """In the metadata of what XLA is given, which profilers show; a backward pass has the name of its operation."""
    group = make_group(mesh, SMALL)

    def everything(x, topk_idx, topk_weights):
        def loss(x):
            recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="ragged"))
            out = ep.combine(recv.x + ep.dispatch_like(x, recv), recv)
            splits = jnp.ones(group.num_experts, jnp.int32)
            sent = ep.all_to_all(out, splits, group=group)
            return jnp.sum(ep.all_to_all_back(sent.x, splits, group=group).astype(jnp.float32) ** 2)

        return jax.grad(loss)(x)

    inputs = place(make_inputs(SMALL, mesh.size), mesh)
    text = jax.jit(spmd(everything, mesh)).lower(*inputs).as_text(debug_info=True)
    for name in ("dispatch_done", "dispatch_like", "combine", "all_to_all", "all_to_all_back"):
        assert f"jvp(jax_ep.{name})/" in text, name
        assert f"transpose(jvp(jax_ep.{name}))/" in text, name
