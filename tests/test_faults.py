"""What goes wrong on purpose on GPUs, and what each fault must give: its error, in time, on all ranks, and for good.

Elsewhere: a process that dies (test_multiprocess.py), an arena that does not fit (test_cuda.py), and what can be seen
while tracing (test_errors.py, test_split.py).
"""

import contextlib
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jax_ep as ep
from helpers import (
    IN_GRAPHS,
    NO_GRAPHS,
    assert_same_bits,
    assert_trees_same_bits,
    chain,
    compiled,
    num_slots,
    open_group,
    place,
    run_spmd,
    spin,
    spmd,
    steps_per_second,
    to_numpy,
)
from jax_ep import _compat
from shapes import SMALL, make_inputs

pytestmark = pytest.mark.gpu

with_and_without_graphs = pytest.mark.parametrize("options", [IN_GRAPHS, NO_GRAPHS], ids=["in_graphs", "no_graphs"])


@pytest.fixture(scope="module")
def mesh(largest_mesh):
    return largest_mesh


@pytest.fixture
def inputs(mesh):
    return place(make_inputs(SMALL, mesh.size), mesh)


def make_group(mesh, timeout=10.0):
    return open_group(mesh, SMALL, backend="cuda", timeout=timeout)


def assert_poison(*arrays):
    assert all(np.isnan(a.astype(np.float32)).all() for a in arrays)


def assert_given_up(group, mesh, program, inputs):
    """After a failure nothing waits again: compiled programs give poison at once, and no new one begins."""
    begun = time.monotonic()
    assert_poison(to_numpy(program(*inputs)))
    assert time.monotonic() - begun < 1
    call = spmd(partial(chain, group), mesh)
    for begin in (partial(jax.eval_shape, call), call):  # traced, and eager
        with pytest.raises(ep.Error):
            begin(*inputs)


def without_rank(missing, group, *inputs, layers=3):
    """A chain of operations in which one rank takes no part."""

    def stay_away(x, topk_idx, topk_weights):
        return jnp.zeros_like(x)

    return lax.cond(lax.axis_index("ep") == missing, stay_away, partial(chain, group, layers=layers), *inputs)


@contextlib.contextmanager
def ends_in_time(group, least=0.0):
    """What the block does takes no longer than the group's time-out and a second, and `least` seconds."""
    begun = time.monotonic()
    yield
    assert least <= time.monotonic() - begun < group.timeout + 1


# --- ranks that do not come, or come late ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_rank_that_never_comes(mesh, inputs, missing):
    missing = 0 if missing == "first" else mesh.size - 1
    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        incomplete = compiled(partial(without_rank, missing, group), mesh, *inputs, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            out = to_numpy(incomplete(*inputs))
        assert_poison(np.delete(out, missing, axis=0))
        with pytest.raises(ep.PeerTimeoutError, match=f"^dispatch: rank . gave up waiting for rank {missing}") as error:
            group.check()
        assert error.value.op == "dispatch"
        assert error.value.missing_rank == missing
        assert error.value.waiting_rank in set(range(mesh.size)) - {missing}
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


@with_and_without_graphs
def test_nothing_waits_twice(mesh, inputs, options):
    """A hundred operations are under way when the first gives up, and a hundred programs come after it."""
    with make_group(mesh, timeout=4.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs, options=options)
        to_numpy(program(*inputs))
        queue = compiled(partial(without_rank, 0, group, layers=50), mesh, *inputs, options=options, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            out = to_numpy(queue(*inputs))
        assert_poison(out[1:])
        begun = time.monotonic()
        results = to_numpy([program(*inputs) for _ in range(100)])
        assert time.monotonic() - begun < group.timeout  # less than one of them would wait
        assert_poison(*results)


def test_a_rank_that_comes_late(mesh, inputs):
    """By more than a second: the others wait for it, and the results are the same."""
    is_late = np.arange(mesh.size) == mesh.size - 1
    (steps,) = place([(1.5 * steps_per_second(mesh, is_late) * is_late).astype(np.int32)], mesh)

    def late(steps, x, topk_idx, topk_weights):
        return chain(group, x, topk_idx + spin(steps), topk_weights)

    with make_group(mesh, timeout=20.0) as group:
        expected = run_spmd(partial(chain, group), mesh, *inputs)
        program = compiled(late, mesh, steps, *inputs)
        begun = time.monotonic()
        out = to_numpy(program(steps, *inputs))
        assert time.monotonic() - begun >= 1
        assert_same_bits(out, expected)
        group.check()


def test_ranks_in_different_groups(mesh, inputs):
    """Each group misses the ranks that are in the other."""
    with make_group(mesh, timeout=2.0) as one, make_group(mesh, timeout=2.0) as other:

        def at_odds(*inputs):
            return lax.cond(lax.axis_index("ep") == 0, partial(chain, one), partial(chain, other), *inputs)

        program = compiled(at_odds, mesh, *inputs, check_vma=False)
        with ends_in_time(one, least=one.timeout):
            assert_poison(to_numpy(program(*inputs)))
        with pytest.raises(ep.PeerTimeoutError, match="^dispatch: rank 0 gave up waiting for rank [^0]"):
            one.check()
        with pytest.raises(ep.PeerTimeoutError, match="^dispatch: rank [^0] gave up waiting for rank 0 "):
            other.check()


# --- ranks in different calls ---------------------------------------------------------------------------------------


def dispatched(group, x, topk_idx, topk_weights, **options):
    """As many rows as all ranks have tokens, in whatever layout."""
    options = {"layout": "ragged", "capacity": group.num_ranks * SMALL.tokens} | options
    return ep.dispatch(x, topk_idx, topk_weights, group=group, **options).x.reshape(-1, group.hidden)


def in_expert_layout(group, *inputs):
    return dispatched(
        group, *inputs, layout="expert", capacity=group.num_ranks * SMALL.tokens // group.experts_per_rank
    )


def fewer_tokens(group, *inputs):
    return dispatched(group, *(a[: SMALL.tokens // 2] for a in inputs))


def over_fp8(group, *inputs):
    return dispatched(group, *inputs, wire="fp8", dequantize=True)


def all_to_all(group, x, topk_idx, topk_weights):
    splits = jnp.zeros(group.num_experts, jnp.int32)
    return ep.all_to_all(x, splits, group=group).x.reshape(-1, group.hidden)


def along_a_route(group, x, topk_idx, topk_weights, dtype=jnp.bfloat16):
    """A row has as many bytes in every dtype."""
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    x = x[:, :: jnp.dtype(dtype).itemsize // x.dtype.itemsize].astype(dtype)
    return ep.dispatch_like(x, recv).astype(jnp.float32)[:, 0]


AT_ODDS = {
    "layout": (dispatched, in_expert_layout),
    "tokens": (dispatched, fewer_tokens),
    "wire": (dispatched, over_fp8),
    "operation": (dispatched, all_to_all),
    "dtype": (along_a_route, partial(along_a_route, dtype=jnp.float32)),
}


@pytest.mark.parametrize("what", AT_ODDS)
def test_ranks_in_different_calls(mesh, inputs, what):
    usual, odd = AT_ODDS[what]

    def at_odds(*inputs):
        return lax.cond(lax.axis_index("ep") == 0, partial(odd, group), partial(usual, group), *inputs)

    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        program_at_odds = compiled(at_odds, mesh, *inputs, check_vma=False)
        with ends_in_time(group):
            assert_poison(to_numpy(program_at_odds(*inputs)))
        with pytest.raises(ep.Error, match=r"^\w+: rank . was in another call than rank .* with the same shapes"):
            group.check()
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


def test_ranks_in_another_order(mesh, inputs):
    """What is traced knows a mesh by its shape only."""
    with make_group(mesh, timeout=2.0) as group:
        reversed_mesh = Mesh(mesh.devices[::-1], mesh.axis_names)
        program = compiled(partial(chain, group), reversed_mesh, *place(to_numpy(inputs), reversed_mesh))
        with ends_in_time(group):
            assert_poison(to_numpy(program(*place(to_numpy(inputs), reversed_mesh))))
        with pytest.raises(ep.Error, match=r"^dispatch: the program runs rank . on the device that .* as rank ."):
            group.check()


# --- what a failed group returns, and refuses -----------------------------------------------------------------------


def every_operation(group, x, topk_idx, topk_weights):
    """Floating-point results, counts, and the number of dropped rows."""
    splits = jnp.zeros(group.num_experts, jnp.int32).at[0].set(SMALL.tokens)

    def layer(x, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        return ep.combine(recv.x, recv)

    out, transpose = jax.vjp(layer, x, topk_weights)
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="expert", wire="fp8")
    sent = ep.all_to_all(x, splits, group=group, wire="fp8")
    rows = [recv.x, recv.scales, recv.weights, sent.x, sent.scales, ep.dispatch_like(x, recv)]
    back = ep.all_to_all_back(ep.dequantize(sent), splits, group=group)
    return [out, *transpose(out), *rows, back], [recv.counts, recv.group_sizes, sent.splits], recv.num_dropped


@with_and_without_graphs
def test_a_failed_group_returns_poison_and_refuses_work(mesh, inputs, options):
    """In what is compiled, nothing that could be taken for a result; in what is not, the error itself."""
    with make_group(mesh, timeout=4.0) as group:
        program = compiled(partial(every_operation, group), mesh, *inputs, options=options)
        for _ in range(3):  # in graphs, later calls replay what the first has recorded
            rows, counts, num_dropped = to_numpy(program(*inputs))
            assert not any(np.isnan(a.astype(np.float32)).any() for a in rows[:3])
            assert all(a.sum() > 0 for a in counts)
            assert (num_dropped == 0).all()
        group.check()

        incomplete = compiled(partial(without_rank, 0, group), mesh, *inputs, check_vma=False)
        jax.block_until_ready(incomplete(*inputs))
        begun = time.monotonic()
        rows, counts, num_dropped = to_numpy(program(*inputs))
        assert time.monotonic() - begun < 1
        assert_poison(*rows)
        assert not any(a.any() for a in counts)
        assert (num_dropped == -1).all()

        call = spmd(partial(chain, group), mesh)
        refusals = group.check, partial(jax.eval_shape, call, *inputs), partial(call, *inputs)
        for refusal in refusals * 2:  # again and again
            with pytest.raises(ep.PeerTimeoutError, match="gave up waiting for rank 0 "):
                refusal()
    with pytest.raises(ValueError, match="group is closed"):
        jax.eval_shape(call, *inputs)


# --- closing --------------------------------------------------------------------------------------------------------


def test_a_group_is_closed_while_a_program_runs(mesh, inputs):
    """What waits for a peer gives up at once; what the program would still ask for is refused."""
    with make_group(mesh, timeout=20.0) as group:
        expected = run_spmd(partial(chain, group), mesh, *inputs)
        incomplete = compiled(partial(without_rank, 0, group), mesh, *inputs, check_vma=False)
        begun = time.monotonic()
        out = incomplete(*inputs)
        time.sleep(1)  # it waits
    try:
        assert_poison(to_numpy(out)[1:])
    except jax.errors.JaxRuntimeError as error:
        assert "group is closed" in str(error)
    assert time.monotonic() - begun < 5
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


@with_and_without_graphs
def test_a_program_outlives_its_group(mesh, inputs, options):
    """XLA either asks the handler, which refuses, or replays the launch, which finds the group closed."""
    with make_group(mesh) as group:
        program = compiled(partial(chain, group), mesh, *inputs, options=options)
        expected = to_numpy(program(*inputs))
    # The first refusal says why; after it, XLA's error about the graph that it could not record may take its place.
    reasons = ["group is closed", "", ""]
    for reason in reasons:
        try:
            out = to_numpy(program(*inputs))
        except jax.errors.JaxRuntimeError as error:
            assert reason in str(error)
        else:
            assert_poison(out)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


def test_an_old_route_outlives_its_group(mesh, inputs):
    """Its rows would come without a word of the peers: they are not looked for in memory that is gone."""
    x = inputs[0]
    with make_group(mesh) as group:
        recv = run_spmd(partial(ep.dispatch, group=group, layout="ragged"), mesh, *inputs)
        program = compiled(ep.dispatch_like, mesh, x, recv, options=IN_GRAPHS)
        expected = to_numpy(program(x, recv))
    for _ in range(3):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            assert_poison(to_numpy(program(x, recv)))
    with make_group(mesh) as successor:
        recv = run_spmd(partial(ep.dispatch, group=successor, layout="ragged"), mesh, *inputs)
        assert_same_bits(run_spmd(ep.dispatch_like, mesh, x, recv), expected)


# --- halves ---------------------------------------------------------------------------------------------------------


def start(group, *inputs):
    return ep.dispatch_start(*inputs, group=group, layout="ragged", zero_pad=True)


def done(pending):
    recv = ep.dispatch_done(pending)
    return recv.x, recv.counts, recv.num_dropped


def start_and_done(group, *inputs):
    return done(start(group, *inputs))


def test_halves_in_programs_of_their_own(mesh, inputs):
    """XLA copies what goes from one to the other, and may use again what the start was given: an error, never rows."""
    with make_group(mesh) as group:
        pending = jax.jit(spmd(partial(start, group), mesh))(*inputs)
        with pytest.raises(jax.errors.JaxRuntimeError, match="dispatch_done: .* start and done must be in one program"):
            to_numpy(jax.jit(spmd(done, mesh))(pending))
        group.check()


@pytest.mark.skipif(not _compat.FFI_EFFECTS_ARE_ALLOWED, reason="XLA takes two equal dones for one")
def test_a_start_is_done_twice(mesh, inputs):
    """It shows while tracing, but not where inner functions are given what is pending."""

    def done_twice(*inputs):
        pending = start(group, *inputs)
        return jax.jit(done)(pending), jax.jit(done)(pending)

    with make_group(mesh) as group:
        expected = run_spmd(partial(start_and_done, group), mesh, *inputs)
        program = compiled(done_twice, mesh, *inputs)
        with pytest.raises(jax.errors.JaxRuntimeError, match="dispatch_done: there is no start that it could end; "):
            to_numpy(program(*inputs))
        group.check()  # the first done ended what was started
        assert_trees_same_bits(run_spmd(partial(start_and_done, group), mesh, *inputs), expected)


def test_a_start_without_done(mesh, inputs):
    """It holds its slot; whoever needs that slot says so when its time is up."""
    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        jax.block_until_ready(jax.jit(spmd(partial(start, group), mesh))(*inputs))
        with ends_in_time(group, least=group.timeout):
            assert_poison(to_numpy(program(*inputs)))
        with pytest.raises(ep.Error, match="halves are under way"):
            group.check()
        assert_given_up(group, mesh, program, inputs)


def test_more_starts_than_slots(mesh, inputs):
    """The last one's done comes first, and needs the slot of the first one, whose done is behind it."""

    def out_of_room(x, *routing):
        pending = []
        for _ in range(num_slots(group) + 1):
            started, x = lax.optimization_barrier((start(group, x, *routing), x))
            pending.append(started)
        results = []
        for started in (pending.pop(), *pending):
            started, results = lax.optimization_barrier((started, results))
            results.append(done(started))
        return results

    with make_group(mesh, timeout=2.0) as group:
        program = compiled(out_of_room, mesh, *inputs)
        with ends_in_time(group, least=group.timeout):
            assert_poison(*(rows for rows, *_ in to_numpy(program(*inputs))))
        with pytest.raises(ep.Error, match="halves are under way"):
            group.check()


def test_the_host_raises_between_start_and_done(mesh, inputs):
    """The group is closed without waiting for what will never be done."""
    with make_group(mesh) as group:
        expected = run_spmd(partial(start_and_done, group), mesh, *inputs)
    begun = time.monotonic()
    with pytest.raises(KeyError, match="nothing to do with jax_ep"), make_group(mesh) as group:
        jax.jit(spmd(partial(start, group), mesh))(*inputs)
        raise KeyError("nothing to do with jax_ep")
    assert time.monotonic() - begun < group.timeout
    with make_group(mesh) as successor:
        assert_trees_same_bits(run_spmd(partial(start_and_done, successor), mesh, *inputs), expected)
