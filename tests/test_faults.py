"""What goes wrong on purpose in kernels, and what each fault must give: its error, in time, on all ranks, and for good.

Emulated GPUs have a time of their own, which passes when all of them wait. So only real GPUs show that the error comes
in time. Emulated GPUs run one operation after the other. So a program of several operations ends with a refusal there,
where real GPUs have all operations in their queue, and return poison.

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
    PATIENCE_S,
    assert_same_bits,
    assert_trees_same_bits,
    chain,
    compiled,
    emulated_patience,
    num_arena_slots,
    open_group,
    place,
    run_spmd,
    spin,
    spmd,
    steps_per_second,
    to_numpy,
    wait_for_all_devices,
)
from jax_ep._dispatch_options import CheckedOptions
from jax_ep._types import DispatchCall
from shapes import SMALL, make_inputs

with_and_without_graphs = pytest.mark.parametrize("options", [IN_GRAPHS, NO_GRAPHS], ids=["in_graphs", "no_graphs"])


@pytest.fixture(scope="module")
def mesh(largest_mesh):
    return largest_mesh


@pytest.fixture
def inputs(mesh):
    return place(make_inputs(SMALL, mesh.size), mesh)


@pytest.fixture
def make_group(kernel_backend):
    """make_group(mesh, timeout=10.0, **settings): a group of SMALL, which the test closes."""

    def make(mesh, timeout=10.0, **settings):
        return open_group(mesh, SMALL, backend=kernel_backend, timeout=timeout, **settings)

    return make


def is_emulated(group):
    return group.backend == "emulated"


def assert_poison(*arrays):
    assert all(np.isnan(a.astype(np.float32)).all() for a in arrays)


def poison_or_refusal(program, inputs, expect_poison=assert_poison, reason="its group has failed before"):
    """Runs a program of a failed group. XLA asks a handler, which refuses, or replays a CUDA graph, which gives poison.

    True if a handler has refused.
    """
    try:
        out = to_numpy(program(*inputs))
    except jax.errors.JaxRuntimeError as error:
        assert reason in str(error)
        return True
    expect_poison(out)
    return False


def expect_failure(group, program, inputs, expect_poison=assert_poison):
    """Runs a program in which the group fails. All its operations are in the queues of real GPUs before that."""
    is_refused = poison_or_refusal(program, inputs, expect_poison)
    assert is_emulated(group) or not is_refused


def assert_given_up(group, mesh, program, inputs):
    """After a failure nothing waits again: compiled programs end at once without a result, and no new one begins."""
    with waits_for_nothing(group, most=1):
        poison_or_refusal(program, inputs)
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
    """The block takes at least `least` seconds, and at most a second more than the group's time-out.

    Emulated time passes to the time-out when all emulated GPUs have waited for half a second.
    """
    begun = time.monotonic()
    with emulated_patience(0.5):
        yield
    assert is_emulated(group) or least <= time.monotonic() - begun < group.timeout + 1


@contextlib.contextmanager
def waits_for_nothing(group, most):
    """The block takes less than `most` seconds. Emulated GPUs that waited for a time-out would take PATIENCE_S."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < (PATIENCE_S if is_emulated(group) else most)


# --- ranks that do not come, or come late ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_rank_that_never_comes(make_group, mesh, inputs, missing):
    missing = 0 if missing == "first" else mesh.size - 1
    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        incomplete = compiled(partial(without_rank, missing, group), mesh, *inputs, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            expect_failure(group, incomplete, inputs, lambda out: assert_poison(np.delete(out, missing, axis=0)))
        with pytest.raises(ep.PeerTimeoutError, match=f"^dispatch: rank . gave up waiting for rank {missing}") as error:
            group.check()
        assert error.value.op == "dispatch"
        assert error.value.missing_rank == missing
        assert error.value.waiting_rank in set(range(mesh.size)) - {missing}
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


@with_and_without_graphs
def test_nothing_waits_twice(make_group, mesh, inputs, options):
    """A hundred operations are under way when the first gives up, and a hundred programs come after it."""
    with make_group(mesh, timeout=4.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs, options=options)
        to_numpy(program(*inputs))
        queue = compiled(partial(without_rank, 0, group, layers=50), mesh, *inputs, options=options, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            expect_failure(group, queue, inputs, lambda out: assert_poison(out[1:]))
        with waits_for_nothing(group, most=group.timeout):  # less than one of them would wait
            for _ in range(100):
                # After the first refusal XLA's error about the graph that it could not record may take its place.
                poison_or_refusal(program, inputs, reason="" if options is IN_GRAPHS else "its group has failed before")


def test_a_rank_that_comes_late(make_group, mesh, inputs):
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
        assert is_emulated(group) or time.monotonic() - begun >= 1
        assert_same_bits(out, expected)
        group.check()


def test_ranks_in_different_groups(make_group, mesh, inputs):
    """Each group misses the ranks that are in the other.

    A process of several devices sees that they run the two groups in different order: it does not wait.
    """
    is_seen = len(mesh.local_devices) > 1
    in_other_order = "ranks . and . run operations of this group and of another group in different order"
    with make_group(mesh, timeout=2.0) as one, make_group(mesh, timeout=2.0) as other:

        def at_odds(*inputs):
            return lax.cond(lax.axis_index("ep") == 0, partial(chain, one), partial(chain, other), *inputs)

        program = compiled(at_odds, mesh, *inputs, options=NO_GRAPHS, check_vma=False)
        if is_seen:
            with waits_for_nothing(one, most=1):
                poison_or_refusal(program, inputs, reason="in different order")
        else:
            with ends_in_time(one, least=one.timeout):
                expect_failure(one, program, inputs)
        late = "rank 0 gave up waiting for rank [^0]", "rank [^0] gave up waiting for rank 0 "
        first = "(dispatch|combine):" if is_seen else "dispatch:"  # a device may be one operation ahead of the other
        for group, missing in zip((one, other), late, strict=True):
            with pytest.raises(ep.Error, match=f"^{first} {in_other_order if is_seen else missing}"):
                group.check()


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
    return dispatched(group, *inputs, wire="fp8")


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
def test_ranks_in_different_calls(make_group, mesh, inputs, what):
    usual, odd = AT_ODDS[what]

    def at_odds(*inputs):
        return lax.cond(lax.axis_index("ep") == 0, partial(odd, group), partial(usual, group), *inputs)

    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        program_at_odds = compiled(at_odds, mesh, *inputs, check_vma=False)
        with ends_in_time(group):
            poison_or_refusal(program_at_odds, inputs)  # a rank's call may come when the others have failed
        with pytest.raises(ep.Error, match=r"^\w+: rank . was in another call than rank .* with the same shapes"):
            group.check()
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


def test_ranks_in_another_order(make_group, mesh, inputs):
    """What is traced knows a mesh by its shape only."""
    with make_group(mesh, timeout=2.0) as group:
        reversed_mesh = Mesh(mesh.devices[::-1], mesh.axis_names)
        program = compiled(partial(chain, group), reversed_mesh, *place(to_numpy(inputs), reversed_mesh))
        with ends_in_time(group):
            poison_or_refusal(program, place(to_numpy(inputs), reversed_mesh))
        with pytest.raises(ep.Error, match=r"^dispatch: the program runs rank . on the device that .* as rank ."):
            group.check()


# --- what does not fit in the group's memory ------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [SMALL.top_k - 1, SMALL.top_k + 1])
def test_another_top_k(make_group, mesh, inputs, top_k):
    """The public functions refuse it while tracing; the handler refuses it, too, before a kernel writes over rows."""

    def dispatch(x, topk_idx, topk_weights):
        options = CheckedOptions("ragged", 64, None, 1, None, None, False, None)
        call = DispatchCall(group._impl, options, SMALL.tokens, False)
        ids = jnp.tile(topk_idx[:, :1], (1, top_k))
        return group._impl.dispatch(call, x, ids, ids.astype(jnp.float32), None, zero_pad=False).x

    with make_group(mesh) as group:
        expected = run_spmd(partial(chain, group), mesh, *inputs)
        program = compiled(dispatch, mesh, *inputs)
        message = rf"dispatch: topk_idx is int32 \[\d+, {top_k}\]; it must be int32 \[\d+, {SMALL.top_k}\]"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            to_numpy(program(*inputs))
        group.check()
        assert_same_bits(run_spmd(partial(chain, group), mesh, *inputs), expected)


# --- what a failed group returns, and refuses -----------------------------------------------------------------------


def every_operation(group, x, topk_idx, topk_weights):
    """Floating-point results, counts, and the number of dropped rows."""
    splits = jnp.zeros(group.num_experts, jnp.int32).at[0].set(SMALL.tokens)

    def layer(x, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        return ep.combine(recv.x, recv)

    out, transpose = jax.vjp(layer, x, topk_weights)
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="expert", wire="fp8", dequantize=False)
    sent = ep.all_to_all(x, splits, group=group, wire="fp8", dequantize=False)
    rows = [recv.x, recv.scales, recv.weights, sent.x, sent.scales, ep.dispatch_like(x, recv)]
    back = ep.all_to_all_back(ep.dequantize(sent), splits, group=group)
    return [out, *transpose(out), *rows, back], [recv.counts, recv.group_sizes, sent.splits], recv.num_dropped


@with_and_without_graphs
def test_a_failed_group_returns_poison_and_refuses_work(make_group, mesh, inputs, options):
    """A graph gives nothing that could be taken for a result; a handler and what is not compiled give the error."""
    with make_group(mesh, timeout=4.0) as group:
        program = compiled(partial(every_operation, group), mesh, *inputs, options=options)
        for _ in range(3):  # in graphs, later calls replay what the first has recorded
            rows, counts, num_dropped = to_numpy(program(*inputs))
            assert not any(np.isnan(a.astype(np.float32)).any() for a in rows[:3])
            assert all(a.sum() > 0 for a in counts)
            assert (num_dropped == 0).all()
        group.check()

        incomplete = compiled(partial(without_rank, 0, group), mesh, *inputs, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            expect_failure(group, incomplete, inputs, lambda out: assert_poison(out[1:]))

        def expect_poison(out):
            rows, counts, num_dropped = out
            assert_poison(*rows)
            assert not any(a.any() for a in counts)
            assert (num_dropped == -1).all()

        reason = "its group has failed before (PeerTimeoutError: dispatch: rank "
        with waits_for_nothing(group, most=1):
            is_refused = poison_or_refusal(program, inputs, expect_poison, reason)
        assert is_refused or options is IN_GRAPHS

        call = spmd(partial(chain, group), mesh)
        refusals = group.check, partial(jax.eval_shape, call, *inputs), partial(call, *inputs)
        for refusal in refusals * 2:  # again and again
            with pytest.raises(ep.PeerTimeoutError, match="gave up waiting for rank 0 "):
                refusal()
    with pytest.raises(ValueError, match="group is closed"):
        jax.eval_shape(call, *inputs)


def alone(op, group, x, topk_idx, topk_weights, recv):
    """The results of one operation: values, counts, and the number of dropped rows."""
    splits = jnp.ones(group.num_experts, jnp.int32)
    if op.startswith("dispatch") and op != "dispatch_like":
        wire = {"wire": "fp8"} if op == "dispatch_fp8" else {}
        layout = "expert" if op == "dispatch_expert" else "ragged"
        new = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, **wire)
        return [new.x, new.weights], [new.counts, new.group_sizes], new.num_dropped
    if op == "all_to_all":
        sent = ep.all_to_all(x, splits, group=group)
        return [sent.x], [sent.splits], jnp.int32(-1)
    if op == "balance":
        plan = ep.balance(topk_idx, group=group)
        plan = jax.tree.map(lambda array: array + 1, plan)  # without rows and copies, a plan has -1
        return [], [plan.slot_expert, plan.slots, plan.topk_slot, plan.num_rows - 1, plan.home_rows - 1], jnp.int32(-1)
    if op == "replicate":
        experts = jnp.ones((group.experts_per_rank, 16), x.dtype)
        none = jnp.full((group.num_ranks, 1), -1, jnp.int32)
        plan = ep.Plan(none[0], jnp.int32(0), jnp.int32(0), none, topk_idx, group=group, tolerance_units=0)
        return [ep.replicate(experts, plan)[group.experts_per_rank :]], [], jnp.int32(-1)
    values = {
        "combine": lambda: ep.combine(recv.x, recv),
        "combine_backward": lambda: jax.vjp(lambda y: ep.combine(y, recv), recv.x)[1](x),
        "dispatch_like": lambda: ep.dispatch_like(x, recv),
        "all_to_all_back": lambda: ep.all_to_all_back(jnp.stack([x] * group.num_ranks), splits, group=group),
    }[op]()
    return jax.tree.leaves(values), [], jnp.int32(-1)


@pytest.mark.parametrize(
    "op",
    [
        *("dispatch_ragged", "dispatch_expert", "dispatch_fp8", "dispatch_like", "combine", "combine_backward"),
        *("all_to_all", "all_to_all_back", "balance", "replicate"),
    ],
)
def test_an_operation_that_gives_up_returns_poison(make_group, mesh, inputs, op):
    """The last rank takes no part. All results of the others are poison."""
    with make_group(mesh, timeout=2.0, replicas=1 if op in ("balance", "replicate") else 0) as group:
        recv = run_spmd(partial(ep.dispatch, group=group, layout="ragged"), mesh, *inputs)
        operation = partial(alone, op, group)

        def without_last(*operands):
            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(operation, *operands))
            return lax.cond(lax.axis_index("ep") == mesh.size - 1, lambda *_: nothing, operation, *operands)

        program = compiled(without_last, mesh, *inputs, recv, check_vma=False)
        with ends_in_time(group, least=group.timeout):
            values, counts, num_dropped = jax.tree.map(lambda a: a[:-1], to_numpy(program(*inputs, recv)))
        assert_poison(*values)
        assert not any(a.any() for a in counts)
        assert (num_dropped == -1).all()
        with pytest.raises(ep.PeerTimeoutError, match=f"gave up waiting for rank {mesh.size - 1}"):
            group.check()


# --- closing --------------------------------------------------------------------------------------------------------


def test_a_group_is_closed_while_a_program_runs(make_group, mesh, inputs):
    """What waits for a peer gives up at once; what the program would still ask for is refused."""
    with make_group(mesh, timeout=20.0) as group:
        expected = run_spmd(partial(chain, group), mesh, *inputs)
        incomplete = compiled(partial(without_rank, 0, group), mesh, *inputs, check_vma=False)
        out = incomplete(*inputs)
        time.sleep(1)  # it waits
        begun = time.monotonic()
    try:
        assert_poison(to_numpy(out)[1:])
    except jax.errors.JaxRuntimeError as error:
        assert "group is closed" in str(error)
    assert time.monotonic() - begun < (PATIENCE_S - 2 if is_emulated(group) else 4)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


def test_a_program_that_still_runs_does_not_reach_the_next_group(make_group, mesh, inputs):
    """An equal group has the same name in programs. So the next group waits for programs of the closed one."""
    is_slow = np.ones(mesh.size, bool)
    (steps,) = place([(0.7 * steps_per_second(mesh, is_slow) * is_slow).astype(np.int32)], mesh)

    def with_pause(group, steps, x, topk_idx, topk_weights):
        x = chain(group, x, topk_idx, topk_weights, layers=1)
        pause = spin(steps + (x[0, 0] > 1e30).astype(jnp.int32))
        return chain(group, x + pause.astype(x.dtype), topk_idx, topk_weights, layers=2)

    with make_group(mesh, timeout=20.0) as group:
        expected = run_spmd(partial(chain, group), mesh, *inputs)
        program = compiled(partial(with_pause, group), mesh, steps, *inputs)
        out = program(steps, *inputs)
        time.sleep(0.3)  # the program is in its pause
    with make_group(mesh, timeout=5.0) as successor, emulated_patience(0.5):
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)
        wait_for_all_devices(out)
        successor.check()
        assert (successor.stats().operations["dispatch"] == 3).all()


@with_and_without_graphs
def test_a_program_outlives_its_group(make_group, mesh, inputs, options):
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


def test_an_old_route_outlives_its_group(make_group, mesh, inputs):
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


# --- split-phase calls ----------------------------------------------------------------------------------------------


def start(group, *inputs):
    return ep.dispatch_start(*inputs, group=group, layout="ragged", zero_pad=True)


def done(pending):
    recv = ep.dispatch_done(pending)
    return recv.x, recv.counts, recv.num_dropped


def start_and_done(group, *inputs):
    return done(start(group, *inputs))


def test_start_and_done_in_programs_of_their_own(make_group, mesh, inputs):
    """XLA copies what goes from the start to the done, and may reuse the start's memory: an error, never rows."""
    with make_group(mesh) as group:
        pending = jax.jit(spmd(partial(start, group), mesh))(*inputs)
        with pytest.raises(jax.errors.JaxRuntimeError, match="dispatch_done: .* start and done must be in one program"):
            to_numpy(jax.jit(spmd(done, mesh))(pending))
        group.check()


def test_a_start_is_done_twice(make_group, mesh, inputs):
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


def test_a_start_without_done(make_group, mesh, inputs):
    """It holds its arena slot. An operation that needs this slot says so when its time is up."""
    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        jax.block_until_ready(jax.jit(spmd(partial(start, group), mesh))(*inputs))
        with ends_in_time(group, least=group.timeout):
            expect_failure(group, program, inputs)
        with pytest.raises(ep.Error, match="split-phase calls are in flight"):
            group.check()
        assert_given_up(group, mesh, program, inputs)


def test_more_starts_than_slots(make_group, mesh, inputs):
    """The done of the last start comes first. It needs the arena slot of the first start, whose done comes later."""

    def out_of_room(x, *routing):
        pending = []
        for _ in range(num_arena_slots(group) + 1):
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
            expect_failure(group, program, inputs, lambda out: assert_poison(*(rows for rows, *_ in out)))
        with pytest.raises(ep.Error, match="split-phase calls are in flight"):
            group.check()


def test_the_host_raises_between_start_and_done(make_group, mesh, inputs):
    """The group is closed without waiting for what will never be done."""
    with make_group(mesh) as group:
        expected = run_spmd(partial(start_and_done, group), mesh, *inputs)
    with (
        waits_for_nothing(group, most=group.timeout),
        pytest.raises(KeyError, match="nothing to do with jax_ep"),
        make_group(mesh) as group,
    ):
        _started = jax.jit(spmd(partial(start, group), mesh))(*inputs)
        raise KeyError("nothing to do with jax_ep")
    with make_group(mesh) as successor:
        assert_trees_same_bits(run_spmd(partial(start_and_done, successor), mesh, *inputs), expected)
