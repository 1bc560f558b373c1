"""Split-phase calls: starts and dones in any order; each start has one done."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
from helpers import PURE_JAX, assert_same_bits, assert_trees_same_bits, open_group, run_spmd, spmd, to_numpy
from shapes import SMALL, make_inputs

SHAPE = dataclasses.replace(SMALL, hidden=128, dtype="float32")
OPTIONS = {
    "plain": {},
    "short": {"capacity": 16, "alignment": 8},
    "fp8": {"wire": "fp8", "dequantize": False},
    "dequantized": {"wire": "fp8_pow2"},
}


def result_or_refusal(group, mesh, program, pending, *inputs, **options):
    """The result of `program`, or None if its done refuses what is pending.

    Only a backend with kernels may refuse, and only if XLA makes two dones of one, or copies an array of the shape and
    dtype of one in `pending`. A refusal leaves the group usable.
    """
    lowered = jax.jit(spmd(program, mesh, **options)).lower(*inputs)
    executable = lowered.compile()
    try:
        return to_numpy(executable(*inputs))
    except jax.errors.JaxRuntimeError as error:
        assert group.backend not in PURE_JAX
        assert "may copy what is pending" in str(error)
    text = executable.as_text()
    copied = set(re.findall(r" = \(?(\w+\[[\d,]*\])[^=]*? copy(?:-start)?\(", text))
    is_pending_copied = copied & {hlo_type(leaf) for leaf in jax.tree.leaves(pending)}
    is_done_repeated = text.count('"jax_ep_dispatch_done"') > lowered.as_text().count("@jax_ep_dispatch_done")
    assert is_pending_copied or is_done_repeated, "refused for no reason"
    group.check()
    return None


def hlo_type(leaf):
    """As HLO's text names the shape and dtype of one device's part of an array, whose first axis is that of devices."""
    kind = {"i": "s", "u": "u", "f": "f"}.get(leaf.dtype.kind, "bf")
    return f"{kind}{8 * leaf.dtype.itemsize}[{','.join(map(str, leaf.shape[1:]))}]"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # the kernels cast bfloat16 to fp8, and XLA casts float32
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_split_phase_calls_equal_whole_calls(make_group, mesh, layout, options, dtype):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    group = make_group(mesh, shape)

    def whole_and_split_phase(*inputs):
        settings = {"group": group, "layout": layout, "zero_pad": True, **options}
        whole = ep.dispatch(*inputs, **settings)
        split_phase = ep.dispatch_done(ep.dispatch_start(*inputs, **settings))
        y = whole.x.astype(dtype) * 3
        out = ep.combine(y, whole, out_dtype="bfloat16")
        split_phase_out = ep.combine_done(ep.combine_start(y, split_phase, out_dtype="bfloat16"))
        return (whole, out), (split_phase, split_phase_out)

    whole, split_phase = run_spmd(whole_and_split_phase, mesh, *make_inputs(shape, mesh.size, "uneven"))
    assert_trees_same_bits(split_phase, whole)


def test_two_in_flight_and_done_out_of_order(make_group, mesh, layout):
    """Two batches. The second dispatch is done first, and its combine starts before the first dispatch is done."""
    group = make_group(mesh, SHAPE)
    batches = [make_inputs(SHAPE, mesh.size, "uneven", seed) for seed in range(2)]

    def whole(*batches):
        recvs = [ep.dispatch(*batch, group=group, layout=layout, zero_pad=True) for batch in batches]
        return recvs, [ep.combine(jnp.tanh(recv.x), recv) for recv in recvs]

    def interleaved(*batches):
        first, second = (ep.dispatch_start(*batch, group=group, layout=layout, zero_pad=True) for batch in batches)
        second = ep.dispatch_done(second)
        second_out = ep.combine_start(jnp.tanh(second.x), second)
        first = ep.dispatch_done(first)
        first_out = ep.combine_start(jnp.tanh(first.x), first)
        second_out = ep.combine_done(second_out)
        return [first, second], [ep.combine_done(first_out), second_out]

    assert_trees_same_bits(run_spmd(interleaved, mesh, *batches), run_spmd(whole, mesh, *batches))


def loss(group, split_phase, settings, wires, experts, x, topk_idx, topk_weights):
    if split_phase:
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, **settings))
        out = ep.combine_done(ep.combine_start(experts(recv), recv, **wires))
    else:
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **settings)
        out = ep.combine(experts(recv), recv, **wires)
    return jnp.sum(out.astype(jnp.float32) ** 2)


def names_of_calls(program, mesh, inputs):
    return set(re.findall(r"@jax_ep_(\w+)", jax.jit(spmd(program, mesh)).lower(*inputs).as_text()))


@pytest.mark.parametrize(
    ("dtype", "settings", "wires", "is_split"),
    [
        ("bfloat16", {}, {}, True),
        ("bfloat16", {"wire": "fp8", "grad_wire": "fp8"}, {"wire": "fp8", "grad_wire": "fp8_e5m2"}, True),
        ("float32", {"capacity": 16, "alignment": 8}, {}, True),
        ("float32", {"wire": "fp8_pow2"}, {"grad_wire": "fp8"}, False),  # XLA casts g, and dispatch_like sends it
        ("float32", {}, {"out_dtype": "bfloat16"}, True),
    ],
    ids=["plain", "fp8", "float32", "cast by XLA", "another out_dtype"],
)
@pytest.mark.parametrize("layout", ["ragged", "expert", "token"])
def test_the_backward_pass_is_split_phase(make_group, mesh, layout, dtype, settings, wires, is_split):
    """The gradients have the same bits as those of whole operations."""
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    group, settings = make_group(mesh, shape), {"layout": layout, **settings}
    if layout == "token":
        settings.pop("alignment", None)
    inputs = make_inputs(shape, mesh.size, "uneven")

    def experts(recv):
        y = jnp.tanh(recv.x)
        return y if layout != "token" else y * jnp.sum(recv.weights, axis=-1, keepdims=True).astype(y.dtype)

    def gradient(split_phase):
        return jax.grad(partial(loss, group, split_phase, settings, wires, experts), argnums=(0, 2))

    def gradients(*inputs):
        return [gradient(split_phase)(*inputs) for split_phase in (False, True)]

    whole, split_phase = run_spmd(gradients, mesh, *inputs)
    if group.backend in PURE_JAX:  # XLA may fuse, and round, the two in different ways
        for one, other in zip(to_numpy(split_phase), to_numpy(whole), strict=True):
            one, other = one.astype(np.float32), other.astype(np.float32)
            np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02 * np.abs(other).max())
    else:
        assert_trees_same_bits(split_phase, whole)
        found = names_of_calls(gradient(True), mesh, inputs)
        assert {"dispatch_back_start", "dispatch_back_done"} <= found
        assert ({"combine_back_start", "combine_back_done"} <= found) == is_split
        assert not {"dispatch_back", "combine_back"} & found


@pytest.mark.parametrize("wanted", ["x", "topk_weights", "y"])
def test_gradients_of_one_operand(make_group, mesh, layout, wanted):
    """The backward operations run, and end, also if only one operand of a start is differentiated."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    shift = jnp.zeros((), jnp.float32)

    def gradient(split_phase):
        def of(x, topk_idx, topk_weights):
            def value(operand):
                given = {"x": x, "topk_weights": topk_weights, "y": shift} | {wanted: operand}
                experts = lambda recv: jnp.tanh(recv.x) + given["y"]  # noqa: E731
                operands = given["x"], topk_idx, given["topk_weights"]
                return loss(group, split_phase, {"layout": layout}, {}, experts, *operands)

            return jax.grad(value)({"x": x, "topk_weights": topk_weights, "y": shift}[wanted])[None]

        return of

    whole, split_phase = (run_spmd(gradient(split), mesh, *inputs) for split in (False, True))
    assert_same_bits(split_phase, whole)


def check_gradients_of_layers(group, mesh, layout, stack):
    """`stack(step, x)` runs some layers, in which something is computed beside the rows."""

    def gradient(split_phase):
        def total(x, topk_idx, topk_weights):
            out = stack(lambda x: layer(group, layout, split_phase, x, topk_idx, topk_weights), x)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(total, argnums=(0, 2))

    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    whole, split_phase = (run_spmd(gradient(split), mesh, *inputs) for split in (False, True))
    assert_trees_same_bits(split_phase, whole)


def test_gradients_of_layers_in_a_loop(make_group, mesh, layout):
    def stack(step, x):
        return jax.lax.scan(lambda x, _: (step(x), None), x, length=3)[0]

    check_gradients_of_layers(make_group(mesh, SHAPE), mesh, layout, stack)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="jax.checkpoint runs split-phase calls again")
def test_gradients_of_layers_with_checkpoint(make_group, mesh, layout):
    def stack(step, x):
        return jax.checkpoint(step)(jax.checkpoint(step)(x))

    check_gradients_of_layers(make_group(mesh, SHAPE), mesh, layout, stack)


def test_the_backward_pass_keeps_the_order(kernel_backend, mesh):
    """In the recipe of docs/overlap.md, the computation's gradient is between the halves of the backward operation.

    Barriers hold it there. The first one has the pending backward operation, and what the gradient of the computation
    reads. The second one has the pending operation, which the done then reads, and the result of that gradient.
    """

    def total(group, x, topk_idx, topk_weights):
        pending = ep.dispatch_start(x, topk_idx, topk_weights, group=group)
        pending, y = jax.lax.optimization_barrier((pending, x))
        pending, y = jax.lax.optimization_barrier((pending, jax.lax.rev(y, (0,))))
        return jnp.sum(ep.dispatch_done(pending).x ** 2) + jnp.sum(y**2)

    with open_group(mesh, SHAPE, backend=kernel_backend) as group:
        program = spmd(jax.grad(partial(total, group)), mesh)
        text = jax.jit(program).lower(*make_inputs(SHAPE, mesh.size, "uneven")).as_text()
    pending, beside = set(), set()  # values: what is pending, and what went through a barrier with it
    reverse = None
    for line in text[text.index("@jax_ep_dispatch_back_start") - 100 :].splitlines():
        if not (found := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)):
            continue
        name, call = found.groups()
        values = re.findall(r"%\w+(?:#\d+)?", call)
        if "@jax_ep_dispatch_back_start" in call:
            pending.add(f"{name}#1")
        elif "optimization_barrier" in call and pending & set(values):
            results = [f"{name}#{i}" for i in range(len(values))] if len(values) > 1 else [name]
            if reverse in values:
                return  # and the done is behind this barrier
            for value, result in zip(values, results, strict=True):
                (pending if value in pending else beside).add(result)
        elif "stablehlo.reverse" in call:
            assert values[0] in beside
            reverse = name
        assert "@jax_ep_dispatch_back_done" not in call
    raise AssertionError("no barrier has the result of the computation's gradient and what is pending")


def gradients_with_barriers(group, split_phase, operand, x, topk_idx, topk_weights):
    """The recipe's layer as a function of a factor of `operand`: "beside" is what is computed beside the rows."""

    def together(*arrays):
        return jax.lax.optimization_barrier(arrays) if split_phase else arrays

    def total(factor):
        factors = dict.fromkeys(("x", "beside", "y"), 1.0) | {operand: factor}
        if split_phase:
            pending, beside = together(
                ep.dispatch_start(x * factors["x"], topk_idx, group=group, zero_pad=True), x * factors["beside"]
            )
            recv = ep.dispatch_done(pending)
            pending, beside = together(ep.combine_start(recv.x * factors["y"], recv), beside * factors["beside"])
            return jnp.sum(ep.combine_done(pending) ** 2) + jnp.sum(beside)
        recv = ep.dispatch(x * factors["x"], topk_idx, group=group, zero_pad=True)
        beside = x * factors["beside"] * factors["beside"]
        return jnp.sum(ep.combine(recv.x * factors["y"], recv) ** 2) + jnp.sum(beside)

    return jax.grad(total)(1.0)[None]


@pytest.mark.parametrize("operand", ["x", "beside", "y"])
def test_every_backward_start_has_a_done(make_group, mesh, operand):
    """A barrier makes JAX differentiate a done, also if nobody differentiates its start."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")

    def both(*inputs):
        return [gradients_with_barriers(group, split_phase, operand, *inputs) for split_phase in (False, True)]

    whole, split_phase = run_spmd(both, mesh, *inputs)
    assert_same_bits(split_phase, whole)
    text = jax.jit(spmd(partial(gradients_with_barriers, group, True, operand), mesh)).lower(*inputs).as_text()
    for op, operands in (("dispatch", "x"), ("combine", "xy")):
        starts, dones = (len(re.findall(rf"@jax_ep_{op}_back_{half}\b", text)) for half in ("start", "done"))
        assert starts == dones
        if group.backend not in PURE_JAX:
            assert starts >= int(operand in operands)


def test_gradients_of_one_program_for_different_operands(make_group, mesh):
    """JAX keeps the forward rule of a jitted function. It must not keep which operands were differentiated before."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")

    def layer(y_scale, weights_scale, x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, zero_pad=True)
        recv = dataclasses.replace(recv, weights=recv.weights * weights_scale)
        return jnp.sum(ep.combine_done(ep.combine_start(recv.x * y_scale, recv)) ** 2)[None]

    def over_ranks(y_scale, weights_scale, *inputs):
        return spmd(partial(layer, y_scale, weights_scale), mesh)(*inputs)

    def gradients(program, argnums):
        return jax.grad(lambda *scales: jnp.sum(program(*scales, *inputs)), argnums=argnums)(1.0, 1.0)

    program = jax.jit(over_ranks)
    gradients(program, (0,))
    after = gradients(program, (0, 1))
    fresh = gradients(jax.jit(lambda *operands: over_ranks(*operands)), (0, 1))
    assert after[1] != 0
    for one, other in zip(after, fresh, strict=True):
        assert_same_bits(one, other)


def test_a_jitted_helper_keeps_calls_apart(kernel_backend, mesh):
    """Two pending calls go through one jitted function, which JAX traces once for equal arguments."""

    def total(group, x, topk_idx, topk_weights):
        helper = jax.jit(lambda pending, x: jax.lax.optimization_barrier((pending, x)))
        first = ep.dispatch_start(x, topk_idx, topk_weights, group=group)
        second = ep.dispatch_start(x * 2, topk_idx, topk_weights, group=group)
        (first, x), (second, x) = helper(first, x), helper(second, x)
        return jnp.sum(ep.dispatch_done(first).x ** 2) + jnp.sum(ep.dispatch_done(second).x ** 3) + jnp.sum(x)

    with open_group(mesh, SHAPE, backend=kernel_backend) as group:
        program = spmd(jax.grad(partial(total, group)), mesh)
        text = jax.jit(program).lower(*make_inputs(SHAPE, mesh.size)).as_text()
    assert [len(re.findall(f"@jax_ep_dispatch_back_{half}", text)) for half in ("start", "done")] == [2, 2]


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_second_done_is_an_error(make_group, mesh, layout, op):
    group = make_group(mesh, SHAPE)

    def done_twice(*inputs):
        pending = ep.dispatch_start(*inputs, group=group, layout=layout)
        done = ep.dispatch_done
        if op == "combine":
            recv = done(pending)
            pending, done = ep.combine_start(recv.x, recv), ep.combine_done
        return done(pending), done(pending)

    with pytest.raises(ep.Error, match=f"{op}_done"):
        jax.eval_shape(spmd(done_twice, mesh), *make_inputs(SHAPE, mesh.size))


def test_done_in_both_branches_of_cond(make_group, mesh, layout):
    """Only one branch runs, so that there is one done. A backend with kernels refuses it if XLA copies for a branch."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    start = partial(ep.dispatch_start, group=group, layout=layout, zero_pad=True)

    def double(pending):
        return ep.dispatch_done(pending).x * 2

    def keep(pending):
        return ep.dispatch_done(pending).x

    def scaled(scale, *inputs):
        return jax.lax.cond(scale > 1, double, keep, start(*inputs))

    whole = jax.jit(spmd(lambda *i: ep.dispatch(*i, group=group, layout=layout, zero_pad=True).x, mesh))
    expected, pending = to_numpy(whole(*inputs)), jax.eval_shape(spmd(start, mesh), *inputs)
    for scale in (1, 2):
        result = result_or_refusal(group, mesh, scaled, pending, scale, *inputs, replicated=(0,))
        assert_same_bits(whole(*inputs), expected)
        if result is None:
            continue  # XLA copies for a branch
        assert_same_bits(result, expected * scale)


def test_start_and_done_in_a_branch_of_cond(make_group, mesh, layout):
    """XLA copies nothing for them, so that no backend refuses."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    settings = {"group": group, "layout": layout, "zero_pad": True}

    def split_phase(*inputs):
        return ep.dispatch_done(ep.dispatch_start(*inputs, **settings)).x

    def double(*inputs):
        return split_phase(*inputs) * 2

    def scaled(scale, *inputs):
        return jax.lax.cond(scale > 1, double, split_phase, *inputs)

    expected = run_spmd(lambda *inputs: ep.dispatch(*inputs, **settings).x, mesh, *inputs)
    for scale in (1, 2):
        assert_same_bits(run_spmd(scaled, mesh, scale, *inputs, replicated=(0,)), expected * scale)


def test_vmap_is_refused(make_group, mesh, layout):
    """Of starts that come before any done, there may be only a few. A backend without kernels has no starts."""
    group = make_group(mesh, SHAPE)

    def batch(x, topk_idx, topk_weights):
        def element(scale):
            pending = ep.dispatch_start(x * scale, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
            return ep.dispatch_done(pending).x

        return jax.vmap(element)(jnp.arange(3.0))

    inputs = make_inputs(SHAPE, mesh.size)
    if group.backend in PURE_JAX:
        rows = run_spmd(batch, mesh, *inputs)
        assert_same_bits(rows[:, 2], 2 * rows[:, 1])
        return
    with pytest.raises(
        ep.SplitCallError, match="dispatch_start: .* vmap; call dispatch in place of dispatch_start and"
    ):
        jax.eval_shape(spmd(batch, mesh), *inputs)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("form", ["eager", "disable_jit"])
def test_a_start_outside_of_a_program_is_refused(make_group, mesh, layout, op, form):
    group = make_group(mesh, SHAPE)

    def split_phase(*inputs):
        if op == "dispatch":
            return ep.dispatch_done(ep.dispatch_start(*inputs, group=group, layout=layout)).counts
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return ep.combine_done(ep.combine_start(recv.x, recv))

    program = spmd(split_phase, mesh)
    with (
        jax.disable_jit(form == "disable_jit"),
        pytest.raises(ep.SplitCallError, match=f"{op}_start: called outside of jax.jit, or .*call {op}\\b"),
    ):
        (jax.jit(program) if form == "disable_jit" else program)(*make_inputs(SHAPE, mesh.size))


INNER_FUNCTIONS = {
    "scan": lambda done: jax.lax.scan(lambda c, _: (c, done()), 0, length=5)[1],
    "while_loop": lambda done: jax.lax.fori_loop(0, 5, lambda _, c: c + done(), 0),
    "cond": lambda done: jax.lax.cond(jnp.bool(True), done, done),
    "jit": lambda done: jax.jit(done)(),
    "checkpoint": lambda done: jax.checkpoint(done)(),
    "grad": lambda done: jax.grad(lambda x: x * done())(1.0),
    "vmap": lambda done: jax.vmap(lambda x: x * done())(jnp.arange(3)),
}


@pytest.mark.parametrize("transform", INNER_FUNCTIONS)
def test_an_inner_function_may_not_end_what_it_closes_over(make_group, mesh, layout, transform):
    """It is traced once, and may run several times: several dones of one start."""
    group = make_group(mesh, SHAPE)

    def done_in_an_inner_function(*inputs):
        pending = ep.dispatch_start(*inputs, group=group, layout=layout)
        return INNER_FUNCTIONS[transform](lambda: jnp.sum(ep.dispatch_done(pending).counts))

    with pytest.raises(
        ep.SplitCallError, match="dispatch_done: pending is from an outer function; .*as an argument"
    ) as e:
        jax.eval_shape(spmd(done_in_an_inner_function, mesh), *make_inputs(SHAPE, mesh.size))
    assert f"{transform} " in str(e.value).replace(",", " ").replace(")", " ")


def test_a_pipeline_carries_what_is_pending(make_group, mesh, layout):
    """Each step of a loop ends what the step before has started.

    A backend with kernels refuses the done if XLA copies the carry.
    """
    group = make_group(mesh, SHAPE)
    start = partial(ep.dispatch_start, group=group, layout=layout, zero_pad=True)

    def step(pending, batch):
        recv = ep.dispatch_done(pending)
        return start(*batch), recv.x

    def pipeline(*inputs):
        batches = jax.tree.map(lambda a: jnp.stack([a] * 3), inputs)
        last, rows = jax.lax.scan(step, start(*inputs), batches)
        return *rows, ep.dispatch_done(last).x

    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    whole = jax.jit(spmd(lambda *i: ep.dispatch(*i, group=group, layout=layout, zero_pad=True).x, mesh))
    expected, pending = to_numpy(whole(*inputs)), jax.eval_shape(spmd(start, mesh), *inputs)
    results = result_or_refusal(group, mesh, pipeline, pending, *inputs)
    assert_same_bits(whole(*inputs), expected)
    if results is None:
        return  # XLA copies the carry
    for rows in results:
        assert_same_bits(rows, expected)


def layer(group, layout, split_phase, x, topk_idx, topk_weights):
    """What a start reads is short-lived, and what is computed beside it wants memory."""
    settings = {"group": group, "layout": layout, "zero_pad": True}

    def run(start, done, whole, compute, x, *operands):
        if not split_phase:
            return jax.lax.optimization_barrier((whole(*operands), compute(x)))
        pending, x = jax.lax.optimization_barrier((start(*operands), x))
        pending, x = jax.lax.optimization_barrier((pending, compute(x)))
        return jax.lax.optimization_barrier((done(pending), x))

    start, whole = (partial(op, **settings) for op in (ep.dispatch_start, ep.dispatch))
    recv, y = run(start, ep.dispatch_done, whole, jnp.sort, x, x * 2, topk_idx, topk_weights)
    out, y = run(ep.combine_start, ep.combine_done, ep.combine, jnp.flip, y, recv.x / 4, recv)
    return out + y


def test_layers_in_a_loop(make_group, mesh, layout):
    group = make_group(mesh, SHAPE)

    def layers(split_phase, x, *routing):
        return jax.lax.scan(lambda x, _: (layer(group, layout, split_phase, x, *routing), None), x, length=5)[0]

    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    whole, split_phase = (run_spmd(partial(layers, split_phase), mesh, *inputs) for split_phase in (False, True))
    assert_same_bits(split_phase, whole)


def test_programs_are_enqueued_ahead(make_group, mesh, layout):
    """The host comes to a start while dones of former executions, whose memory XLA uses again, have yet to run."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    whole, split_phase = (
        jax.jit(spmd(partial(layer, group, layout, split_phase), mesh)) for split_phase in (False, True)
    )
    expected = to_numpy(whole(*inputs))
    for out in to_numpy([program(*inputs) for _ in range(10) for program in (split_phase, split_phase, whole)]):
        assert_same_bits(out, expected)
