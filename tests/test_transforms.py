"""JAX's transformations around the ops: jit, eager, scan, cond, remat, vmap, donation, and recv as a pytree."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import (
    assert_dispatched,
    assert_same_bits,
    assert_trees_same_bits,
    every_operation,
    inputs_of_every_operation,
    run_spmd,
    spmd,
    to_numpy,
)
from shapes import SMALL, make_inputs

SHAPE = dataclasses.replace(SMALL, dtype="float32")

both_check_vma = pytest.mark.parametrize("check_vma", [True, False])


@pytest.fixture(scope="module")
def group(make_group, mesh):
    return make_group(mesh, SHAPE)


@pytest.fixture(scope="module")
def inputs(mesh):
    return make_inputs(SHAPE, mesh.size, "uneven")


@pytest.fixture(scope="module")
def block(group, layout):
    """x, topk_idx, topk_weights -> the output of a layer whose experts do not need weights."""

    def block(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return ep.combine(jnp.tanh(recv.x), recv)

    return block


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@both_check_vma
def test_eager_equals_jit(block, mesh, inputs, check_vma):
    eager = to_numpy(spmd(block, mesh, check_vma=check_vma)(*inputs))
    assert_close(eager, run_spmd(block, mesh, *inputs, check_vma=check_vma))


STRICT = {"dtype": partial(jax.numpy_dtype_promotion, "strict"), "rank": partial(jax.numpy_rank_promotion, "raise")}


@pytest.mark.parametrize("promotion", STRICT)
def test_programs_that_forbid_promotion(make_group, mesh, promotion):
    """Every operation, with gradients, traced under jax_numpy_dtype_promotion or jax_numpy_rank_promotion."""
    shape = dataclasses.replace(SMALL, hidden=128)
    program = spmd(partial(every_operation, make_group(mesh, shape)), mesh)
    with STRICT[promotion]():
        jax.eval_shape(program, *inputs_of_every_operation(shape, mesh.size))


def test_check_vma_changes_nothing(group, layout, mesh, inputs):
    """Every op, with what is unspecified left out."""

    def all_ops(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
        done = ep.dispatch_done(
            ep.dispatch_start(x, topk_idx, None, group=group, layout=layout, zero_pad=True, wire="fp8")
        )
        out = ep.combine_done(ep.combine_start(done.x, done))
        splits = jnp.full(group.num_experts, 0, jnp.int32).at[3].set(len(x))
        there = ep.all_to_all(x, splits, group=group)
        back = ep.all_to_all_back(there.x, splits, group=group)
        return recv, done, out, ep.combine(ep.dispatch_like(x, recv), recv), there.splits, back

    with_check, without = (run_spmd(all_ops, mesh, *inputs, check_vma=check) for check in (True, False))
    assert_trees_same_bits(with_check, without)


@both_check_vma
def test_scan_over_layers(block, mesh, inputs, check_vma):
    """Three layers, each with weights of its own, forward and backward; recomputed in the backward pass or not."""
    x, topk_idx, topk_weights = inputs
    scales = jnp.array([1.0, -0.5, 2.0])

    def layer(x, scale, topk_idx, topk_weights):
        return x + block(x, topk_idx, topk_weights * scale)

    def unrolled(x, topk_idx, topk_weights, scales):
        for scale in scales:
            x = layer(x, scale, topk_idx, topk_weights)
        return x

    def scanned(layer):
        def layers(x, topk_idx, topk_weights, scales):
            return jax.lax.scan(lambda x, scale: (layer(x, scale, topk_idx, topk_weights), None), x, scales)[0]

        return layers

    def value_and_gradients(layers):
        mapped = spmd(layers, mesh, check_vma=check_vma, replicated=(3,))

        def loss(x, scales):
            return jnp.sum(mapped(x, topk_idx, topk_weights, scales) ** 2)

        return jax.tree.leaves(to_numpy(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, scales)))

    expected = value_and_gradients(unrolled)
    for layers in (scanned(layer), scanned(jax.checkpoint(layer))):
        for a, b in zip(value_and_gradients(layers), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@both_check_vma
def test_cond(block, mesh, inputs, check_vma):
    """Value and gradients of a layer that is there or not."""
    x, topk_idx, topk_weights = inputs

    def value_and_gradients(layer, *leading):
        mapped = spmd(layer, mesh, check_vma=check_vma, replicated=tuple(range(len(leading))))

        def loss(x, topk_weights):
            return jnp.sum(mapped(*leading, x, topk_idx, topk_weights) ** 2)

        return jax.tree.leaves(to_numpy(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, topk_weights)))

    def absent(x, *_):
        return x

    def maybe(take, *inputs):
        return jax.lax.cond(take, block, absent, *inputs)

    for take, layer in ((True, block), (False, absent)):
        for a, b in zip(value_and_gradients(maybe, take), value_and_gradients(layer), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@both_check_vma
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_remat(block, mesh, inputs, check_vma, policy):
    x, topk_idx, topk_weights = inputs

    def gradients(block):
        mapped = spmd(block, mesh, check_vma=check_vma)

        def loss(x, topk_weights):
            return jnp.sum(mapped(x, topk_idx, topk_weights) ** 2)

        return to_numpy(jax.jit(jax.grad(loss, argnums=(0, 1)))(x, topk_weights))

    remat = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
    for a, b in zip(gradients(remat), gradients(block), strict=True):
        assert_close(a, b)


def test_checkpoint_keeps_no_received_rows(make_group, mesh, layout):
    """What a layer adds to the memory of a scan over layers: with jax.checkpoint little more than its input."""
    shape = dataclasses.replace(SHAPE, hidden=256, tokens=64)
    x, topk_idx, topk_weights = make_inputs(shape, mesh.size)
    group = make_group(mesh, shape)
    num_local = shape.num_experts // mesh.size
    capacity = oracle.default_capacity(mesh.size, shape.tokens, shape.top_k, num_local, layout)
    received = capacity * (num_local if layout == "expert" else 1) * x[0, 0].nbytes

    def layer(x, scale, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return x + ep.combine(jnp.tanh(recv.x * scale), recv)

    def memory(layer, num_layers):
        def layers(x, *routing):
            scales = jnp.arange(num_layers, dtype=jnp.float32)
            return jax.lax.scan(lambda x, scale: (layer(x, scale, *routing), None), x, scales)[0]

        def loss(x, topk_weights):
            return jnp.sum(spmd(layers, mesh)(x, topk_idx, topk_weights))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, topk_weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain, checkpointed = ((memory(f, 6) - memory(f, 2)) / 4 for f in (layer, jax.checkpoint(layer)))
    assert plain >= received
    # Not exactly: small arrays fill gaps between large ones otherwise in programs of other sizes.
    assert 0.99 * x[0].nbytes <= checkpointed <= 2 * x[0].nbytes


@both_check_vma
def test_vmap_runs_once_per_element(group, layout, mesh, check_vma):
    batches = [make_inputs(SHAPE, mesh.size, routing) for routing in ("uneven", "hot_expert", "duplicates")]
    stacked = [np.stack(arrays, axis=1) for arrays in zip(*batches, strict=True)]
    dispatch = partial(ep.dispatch, group=group, layout=layout)

    def dispatch_and_combine(*stacked):
        recv = jax.vmap(dispatch)(*stacked)
        return recv, jax.vmap(ep.combine)(recv.x * 2, recv)

    recv, out = run_spmd(dispatch_and_combine, mesh, *stacked, check_vma=check_vma)
    for i, inputs in enumerate(batches):
        its_recv = jax.tree.map(lambda a, i=i: a[:, i], recv)
        assert_dispatched(its_recv, oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, layout=layout))
        alone = run_spmd(lambda *inputs: ep.combine(dispatch(*inputs).x * 2, dispatch(*inputs)), mesh, *inputs)
        assert_close(out[:, i], alone)


def test_vmap_of_x_alone_and_its_gradient(block, mesh, inputs):
    """One route for several x: what is not batched stays so."""
    x, topk_idx, topk_weights = inputs
    xs = np.stack([x, 2 * x, -x], axis=1)

    def loss(x, topk_idx, topk_weights):
        return jnp.sum(block(x, topk_idx, topk_weights) ** 2)

    def batched(xs, *others):
        return jax.vmap(jax.value_and_grad(loss), in_axes=(0, None, None))(xs, *others)

    def looped(xs, *others):
        return jax.tree.map(lambda *a: jnp.stack(a), *(jax.value_and_grad(loss)(x, *others) for x in xs))

    routing = (topk_idx, topk_weights)
    for a, b in zip(run_spmd(batched, mesh, xs, *routing), run_spmd(looped, mesh, xs, *routing), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_vmap_of_the_other_ops(group, layout, mesh, inputs):
    """dispatch_like, all_to_all and all_to_all_back, each against its calls one by one."""
    x, topk_idx, _ = inputs
    xs = np.stack([x, x + 1], axis=1)
    splits = np.zeros((mesh.size, 2, SHAPE.num_experts), np.int32)
    splits[:, 0, ::3] = 1
    splits[:, 1, 1] = SHAPE.tokens

    def all_ops(x, splits, topk_idx):
        recv = ep.dispatch(x, topk_idx, None, group=group, layout=layout)
        there = ep.all_to_all(x, splits, group=group)
        # Weighed down to what both promise: tokens' rows only.
        rows = jnp.where((recv.weights > 0)[..., None], ep.dispatch_like(2 * x, recv), 0)
        back = ep.all_to_all_back(there.x, splits, group=group)
        return rows, there.splits, jnp.where((jnp.arange(len(back)) < splits.sum())[:, None], back, 0)

    def batched(xs, splits, topk_idx):
        return jax.vmap(all_ops, in_axes=(0, 0, None))(xs, splits, topk_idx)

    def looped(xs, splits, topk_idx):
        return jax.tree.map(
            lambda *a: jnp.stack(a), *(all_ops(x, s, topk_idx) for x, s in zip(xs, splits, strict=True))
        )

    arguments = (xs, splits, topk_idx)
    assert_trees_same_bits(run_spmd(batched, mesh, *arguments), run_spmd(looped, mesh, *arguments))


def test_donation(block, mesh, inputs):
    """The output may take x's buffer."""
    expected = run_spmd(block, mesh, *inputs)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    x = jax.device_put(inputs.x, sharding)
    out = to_numpy(jax.jit(spmd(block, mesh), donate_argnums=0)(x, *inputs[1:]))
    assert_close(out, expected)
    assert x.is_deleted()


def test_recv_is_a_pytree(group, layout, mesh, inputs):
    """Through flatten and unflatten, tree.map, out of one program and into another, and as a carry of scan."""
    dispatch = jax.jit(spmd(partial(ep.dispatch, group=group, layout=layout, zero_pad=True), mesh))
    recv = dispatch(*inputs)
    leaves, structure = jax.tree.flatten(recv)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert_trees_same_bits(jax.tree.unflatten(structure, leaves), recv)

    def combine_carried(recv):
        def step(recv, _):
            return jax.tree.map(lambda a: a, recv), ep.combine(recv.x, recv)

        recv, outs = jax.lax.scan(step, recv, length=2)
        return outs, ep.combine(recv.x, recv)

    def dispatch_combine(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return ep.combine(recv.x, recv)

    outs, last = run_spmd(combine_carried, mesh, recv)
    together = run_spmd(dispatch_combine, mesh, *inputs)
    for out in (outs[:, 0], outs[:, 1], last):
        assert_same_bits(out, together)


def test_gradients_under_x64(block, mesh, inputs):
    x, topk_idx, topk_weights = inputs

    def gradients():

        def loss(x, w):
            return jnp.sum(spmd(block, mesh)(x, topk_idx, w) ** 2)

        return to_numpy(jax.jit(jax.grad(loss, argnums=(0, 1)))(x, topk_weights))

    expected = gradients()
    with jax.enable_x64(True):
        for a, b in zip(gradients(), expected, strict=True):
            assert a.dtype == np.float32
            assert_close(a, b)
