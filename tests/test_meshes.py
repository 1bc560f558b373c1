"""Meshes as programs have them: several axes, automatic axes, meshes in context, parts of a mesh, no devices yet.

Most tests run a layer whose experts have weights, and compare it with a dense layer.
"""

import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
import oracle
from helpers import (
    TESTS,
    assert_dispatched,
    assert_trees_same_bits,
    in_one_process,
    inputs_of_every_operation,
    make_mesh,
    open_group,
    run_spmd,
    without_gpus,
)
from jax_ep import _backends, _native
from shapes import SMALL, Shape, make_inputs

BY_RANK = (P("ep"),) * 4
SHAPE = Shape("layer", num_experts=8, top_k=2, hidden=32, tokens=4, dtype="float32")


def mesh_of(axis_type=AxisType.Auto, **axes):
    """A mesh with these axes and sizes over the first devices."""
    mesh = make_mesh(tuple(axes.values()), tuple(axes))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(axes))


def layer(group, x, topk_idx, topk_weights, w):
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    return ep.combine(jax.lax.ragged_dot(recv.x, w, recv.group_sizes, precision="highest"), recv)


def layer_of_einsum(group, x, topk_idx, topk_weights, w):
    """The same layer without ragged_dot, which takes neither unbatched weights under vmap nor explicit axes."""
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", zero_pad=True)
    ends = jnp.cumsum(recv.group_sizes)
    row = jnp.arange(recv.x.shape[0])[:, None]
    of_expert = ((row < ends) & (row >= ends - recv.group_sizes)).astype(recv.x.dtype)
    return ep.combine(jnp.einsum("rh,ehi,re->ri", recv.x, w, of_expert, precision="highest"), recv)


def arguments(num_ranks, seed=0):
    """x, topk_idx, topk_weights and the experts' weights, for all ranks of a group."""
    inputs = (a.reshape(-1, a.shape[-1]) for a in make_inputs(SHAPE, num_ranks, seed=seed))
    shape = (SHAPE.num_experts, SHAPE.hidden, SHAPE.hidden)
    w = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / np.sqrt(SHAPE.hidden)
    return *inputs, np.float32(w)


def dense(x, topk_idx, topk_weights, w):
    of_expert = jax.nn.one_hot(topk_idx, len(w))
    return jnp.einsum("th,ehi,tke,tk->ti", x, w, of_expert, topk_weights, precision="highest")


def mlp_of_group(group, *args):
    return ep.moe.mlp(*args, group=group)


def dense_mlp(x, topk_idx, topk_weights, w_gate_up, w_down):
    gate, up = jnp.split(jnp.einsum("th,ehi->tei", x, w_gate_up), 2, axis=-1)
    y = jnp.einsum("tei,eih->teh", jax.nn.silu(gate) * up, w_down)
    return jnp.einsum("teh,tke,tk->th", y, jax.nn.one_hot(topk_idx, len(w_down)), topk_weights)


def value_and_gradients(layer, x, topk_idx, topk_weights, w):
    def loss(x, topk_weights, w):
        return jnp.sum(jnp.sin(layer(x, topk_idx, topk_weights, w)))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, topk_weights, w)


def put_one(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def put(mesh, arrays, specs):
    return tuple(put_one(mesh, a, spec) for a, spec in zip(arrays, specs, strict=True))


def mapped_over(group, axis_name="ep", layer=layer, **options):
    return jax.shard_map(partial(layer, group), in_specs=P(axis_name), out_specs=P(axis_name), **options)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def assert_is_layer(mapped, mesh, args, specs=BY_RANK):
    assert_close(jax.jit(mapped)(*put(mesh, args, specs)), dense(*args))


# --- a tuple of axes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_name", [("a", "b"), ("b", "a"), ("c", "a"), ("b",)], ids="-".join)
def test_rank_is_the_position_along_the_axes(make_group, axis_name, layout):
    """Bit for bit; each setting of the other axes is a group of its own."""
    mesh = mesh_of(a=2, b=2, c=2)
    group = make_group(mesh, SMALL, axis_name=axis_name)
    others = [name for name in mesh.axis_names if name not in axis_name]
    order = [mesh.axis_names.index(name) for name in (*others, *axis_name)]
    num_groups = mesh.size // group.num_ranks
    groups = [make_inputs(SMALL, group.num_ranks, "uneven", seed) for seed in range(num_groups)]

    def on_mesh(arrays):  # [groups, ranks, ...] to the axes of the mesh
        array = np.stack(arrays)
        return array.reshape([2] * 3 + list(array.shape[2:])).transpose([*np.argsort(order), *range(3, array.ndim + 1)])

    def by_group(array):
        return array.transpose([*order, *range(3, array.ndim)]).reshape(num_groups, group.num_ranks, *array.shape[3:])

    dispatch = partial(ep.dispatch, group=group, layout=layout)
    recv = run_spmd(dispatch, mesh, *(on_mesh(arrays) for arrays in zip(*groups, strict=True)))
    recv = jax.tree.map(by_group, recv)
    for i, inputs in enumerate(groups):
        expected = oracle.dispatch(*inputs, num_experts=group.num_experts, layout=layout)
        assert_dispatched(jax.tree.map(lambda a, i=i: a[i], recv), expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_layer_over_two_axes(make_group, axis_type):
    """The expert axis of MaxText is such a tuple. Weights and tokens are split over both axes; with gradients."""
    axes = ("data", "ep")
    mesh = mesh_of(axis_type, data=2, ep=2, model=2)
    group = make_group(mesh, SHAPE, axis_name=axes)
    assert (group.num_ranks, group.experts_per_rank, group.axis_name) == (4, 2, axes)
    args = arguments(4)
    mapped = mapped_over(group, axes, mesh=mesh)
    assert_close(value_and_gradients(mapped, *put(mesh, args, [P(axes)] * 4)), value_and_gradients(dense, *args))
    assert group.stats().ranks == (0, 1, 2, 3) * 2


def test_other_operations_over_two_axes_give_the_bits_of_one_axis(make_group):
    """Other tests compare the operations over one axis with the oracle."""

    def operations(x, topk_idx, topk_weights, splits, *, group):
        fp8 = ep.dispatch(x, topk_idx, topk_weights, group=group, zero_pad=True, wire="fp8", dequantize=False)
        fp8, x = jax.lax.optimization_barrier((fp8, x))  # XLA might put the dispatch between the start and the done
        done = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, zero_pad=True))
        out = ep.combine_done(ep.combine_start(done.x, done))
        sent = ep.all_to_all(x, splits, group=group)
        back = ep.all_to_all_back(2 * sent.x, splits, group=group)
        return fp8.x, fp8.scales, done.x, out, ep.dispatch_like(x, done), sent.splits, back

    inputs = inputs_of_every_operation(SMALL, 4)
    results = []
    for mesh in (mesh_of(ep=4), mesh_of(major=2, minor=2)):
        group = make_group(mesh, SMALL, axis_name=mesh.axis_names)
        on_mesh = [array.reshape(*mesh.devices.shape, *array.shape[1:]) for array in inputs]
        found = run_spmd(partial(operations, group=group), mesh, *on_mesh)
        results.append([a.reshape(4, *a.shape[mesh.devices.ndim :]) for a in jax.tree.leaves(found)])
    assert_trees_same_bits(*results)


def test_scan_over_checkpointed_layers(make_group):
    axes = ("ep", "data")
    mesh = mesh_of(data=2, ep=2)
    group = make_group(mesh, SHAPE, axis_name=axes)
    x, topk_idx, topk_weights, w = arguments(4)
    layers = np.stack([w, -w, w / 2])

    def network(layer, x, topk_idx, topk_weights, layers):
        block = jax.checkpoint(lambda x, w: (x + layer(x, topk_idx, topk_weights, w), None))
        return jax.lax.scan(block, x, layers)[0]

    specs = P(axes), P(axes), P(axes), P(None, axes)
    mapped = jax.shard_map(partial(network, partial(layer, group)), mesh=mesh, in_specs=specs, out_specs=P(axes))
    args = x, topk_idx, topk_weights, layers
    assert_close(value_and_gradients(mapped, *args), value_and_gradients(partial(network, dense), *args))


def test_too_many_ranks_for_cuda_along_two_axes():
    mesh = SimpleNamespace(devices=np.full((2, 129), SimpleNamespace(platform="gpu")), shape={"data": 2, "ep": 129})
    with pytest.raises(ValueError, match=r"axis_name is \('data', 'ep'\), along which .* 258 devices"):
        _backends.choose("cuda", mesh, ("data", "ep"))


# --- axes that shard_map leaves out ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "axis_type"),
    [("ep-other", AxisType.Auto), ("other-ep", AxisType.Auto), ("ep-other", AxisType.Explicit)],
    ids=str,
)
def test_other_axes_are_left_out(make_group, order, axis_type):
    """Activations and weights are sharded along an axis that shard_map does not map; with gradients."""
    sizes = {"ep": 4, "other": 2}
    mesh = mesh_of(axis_type, **{name: sizes[name] for name in order.split("-")})
    group = make_group(mesh, SHAPE)
    args = arguments(4)
    mapped = mapped_over(group, layer=layer_of_einsum, mesh=mesh, axis_names={"ep"})
    specs = P("ep", "other"), P("ep"), P("ep"), P("ep", None, "other")
    assert_close(value_and_gradients(mapped, *put(mesh, args, specs)), value_and_gradients(dense, *args))


@pytest.mark.parametrize(
    ("experts", "balance", "axis_type"),
    [
        (experts, balance, axis_type)
        for experts, balance in (("einsum", None), ("ragged_dot", None), ("ragged_dot", 0.0))
        for axis_type in (AxisType.Auto, AxisType.Explicit)
    ],
    ids=str,
)
def test_moe_layer_over_two_axes_beside_one_left_out(make_group, experts, balance, axis_type):
    """The layer's own matmuls, with weights that are sharded along the axis that shard_map leaves out."""
    axes = ("data", "ep")
    mesh = mesh_of(axis_type, data=2, ep=2, model=2)
    group = make_group(mesh, SHAPE, axis_name=axes, replicas=0 if balance is None else 1)
    x, topk_idx, topk_weights, w_gate_up = arguments(4)
    w_down = arguments(4, seed=1)[3][:, : SHAPE.hidden // 2]

    def layer_of(mlp):
        return lambda x, topk_idx, topk_weights, w: mlp(x, topk_idx, topk_weights, w["gate_up"], w["down"])

    mlp = partial(ep.moe.mlp, group=group, experts=experts, balance=balance)
    mapped = jax.shard_map(mlp, mesh=mesh, in_specs=P(axes), out_specs=P(axes), axis_names=set(axes))
    w = {"gate_up": w_gate_up, "down": w_down}
    specs = {"gate_up": P(axes, None, "model"), "down": P(axes, "model")}
    placed = [*put(mesh, (x, topk_idx, topk_weights), [P(axes)] * 3), jax.tree.map(partial(put_one, mesh), w, specs)]
    expected = value_and_gradients(layer_of(dense_mlp), x, topk_idx, topk_weights, w)
    assert_close(value_and_gradients(layer_of(mapped), *placed), expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_moe_layer_of_sequences_beside_an_axis_left_out(make_group, axis_type):
    """x [batch, sequence, H], whose sequences are sharded along the axis that shard_map leaves out; with gradients."""
    mesh = mesh_of(axis_type, ep=4, other=2)
    mapped = mapped_over(make_group(mesh, SHAPE), mesh=mesh, axis_names={"ep"}, layer=mlp_of_group)
    *tokens, w_gate_up = arguments(4)
    w = w_gate_up, arguments(4, seed=1)[3][:, : SHAPE.hidden // 2]
    by_sequence = [a.reshape(8, SHAPE.tokens // 2, -1) for a in tokens]
    placed = *put(mesh, by_sequence, [P("ep", "other")] * 3), put(mesh, w, [P("ep")] * 2)
    loss, (dx, d_weights, _) = value_and_gradients(lambda *args: mapped(*args[:3], *args[3]), *placed)
    expected = value_and_gradients(lambda *args: dense_mlp(*args[:3], *args[3]), *tokens, w)
    assert_close(
        (loss, (dx.reshape(-1, SHAPE.hidden), d_weights.reshape(tokens[2].shape))), (expected[0], expected[1][:2])
    )


def test_shard_map_in_shard_map(make_group):
    """The outer one maps the data axis, the inner one the group's."""
    mesh = mesh_of(data=2, ep=4)
    group = make_group(mesh, SHAPE)
    inner = mapped_over(group, axis_names={"ep"})
    outer = jax.shard_map(inner, mesh=mesh, in_specs=(*[P("data")] * 3, P()), out_specs=P("data"), axis_names={"data"})
    by_token = P(("data", "ep"))
    assert_is_layer(outer, mesh, arguments(8), (by_token, by_token, by_token, P("ep")))


# --- meshes in context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mesh_of_set_mesh(make_group, axis_type):
    mesh = mesh_of(axis_type, ep=4)
    with jax.set_mesh(mesh):
        group = make_group(None, SHAPE)
        assert group.mesh is mesh
        assert_is_layer(mapped_over(group), mesh, arguments(4))


def test_mesh_of_set_mesh_while_tracing(make_group):
    mesh = mesh_of(ep=4)

    def traced(*args):
        group = make_group(None, SHAPE, backend="reference")
        assert group.mesh is mesh
        return mapped_over(group)(*args)

    with jax.set_mesh(mesh):
        assert_is_layer(traced, mesh, arguments(4))


def test_explicit_arrays_outside_shard_map(make_group):
    """The result has its sharding in its type."""
    mesh = mesh_of(AxisType.Explicit, data=2, ep=4)
    by_token = P(("data", "ep"))
    with jax.set_mesh(mesh):
        group = make_group(None, SHAPE)
        args = arguments(8)
        mapped = jax.shard_map(partial(layer, group), in_specs=(*[by_token] * 3, P("ep")), out_specs=by_token)
        placed = put(mesh, args, (*[by_token] * 3, P("ep")))
        assert jax.typeof(jax.jit(mapped)(*placed)).sharding.spec == P(("data", "ep"), None)
        assert_close(jax.jit(mapped)(*placed), dense(*args))


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "num_groups": 4, "topk_groups": 2}], ids=["", "groups"])
@pytest.mark.parametrize(
    ("shape", "spec"), [((16, 8), P(("data", "ep"))), ((8, 4, 8), P("data", "ep")), ((8, 4, 8), P(None, "ep"))], ids=str
)
def test_route_of_explicit_arrays(shape, spec, options):
    """The router of README's layer outside of shard_map, where flax_moe.py has it; with gradients."""
    mesh = mesh_of(AxisType.Explicit, data=2, ep=4)
    logits = np.random.default_rng(0).standard_normal(shape, np.float32)

    def loss(logits):
        routing = ep.moe.route(logits, top_k=2, **options)
        return jnp.sum(jnp.sin(routing.topk_weights)) + routing.aux_loss + routing.z_loss, routing

    results = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = results(logits)
    with jax.set_mesh(mesh):
        actual = results(put_one(mesh, logits, spec))
    assert_close(actual, expected)
    assert jax.typeof(actual[0][1].topk_idx).sharding.spec == P(*spec, *[None] * (len(shape) - len(spec)))


def test_parts_of_a_mesh(make_group):
    """A group on some devices, another one on the others, and one on all; all at once."""
    whole = mesh_of(ep=4)
    parts = [Mesh(devices, ("ep",)) for devices in whole.devices.reshape(2, 2)]
    groups = [make_group(mesh, SHAPE) for mesh in (*parts, whole)]
    for group in groups:
        assert_is_layer(mapped_over(group, mesh=group.mesh), group.mesh, arguments(group.num_ranks))
    with pytest.raises(ValueError, match=r"mesh \{'ep': 4\}, the group \{'ep': 2\}; pass mesh=group.mesh"):
        jax.eval_shape(mapped_over(groups[0], mesh=whole), *arguments(4))


# --- without devices ------------------------------------------------------------------------------------------------

ABSTRACT = AbstractMesh((2, 2), ("data", "ep"), axis_types=(AxisType.Auto,) * 2)
AXES = ("data", "ep")
UNUSED_SIZE = 2 * SHAPE.tokens  # max_tokens_per_rank of groups that must have no equal group among those still open


def lowered_without_devices(group, platform="cpu"):
    """The layer, lowered for `platform` by shapes alone."""
    by_rank = NamedSharding(group.mesh, P(AXES))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_rank) for a in arguments(4)]
    return jax.jit(mapped_over(group, AXES, mesh=group.mesh)).trace(*shapes).lower(lowering_platforms=(platform,))


def test_lowers_without_devices_and_runs_when_they_come(make_group):
    group = make_group(ABSTRACT, SHAPE, axis_name=AXES, max_tokens_per_rank=UNUSED_SIZE)
    assert not group.has_devices
    assert group.memory_bytes == 0
    lowered = lowered_without_devices(group)
    mesh = mesh_of(data=2, ep=2)
    args = arguments(4)
    placed = put(mesh, args, [P(AXES)] * 4)
    with group.open(mesh) as opened:
        assert opened.has_devices
        assert opened.backend == group.backend
        program = lowered.compile(device_assignment=tuple(mesh.devices.flat))
        assert_close(program(*placed), dense(*args))
        # Functions that were made with the group without devices run, too.
        assert_close(jax.jit(mapped_over(group, AXES, mesh=mesh))(*placed), dense(*args))
        opened.check()


def test_programs_need_an_open_group(kernel_backend):
    mesh = mesh_of(ep=4)
    group = open_group(mesh.abstract_mesh, SHAPE, max_tokens_per_rank=UNUSED_SIZE, backend=kernel_backend)
    args = arguments(4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="has not made the group .* make an equal Group"):
        jax.block_until_ready(jax.jit(mapped_over(group, mesh=mesh))(*args))


def test_abstract_mesh_in_context(make_group):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments(4)]
    with jax.sharding.use_abstract_mesh(ABSTRACT):
        group = make_group(None, SHAPE, backend="reference", axis_name=AXES)
        assert group.mesh == ABSTRACT
        assert jax.eval_shape(mapped_over(group, AXES), *shapes).shape == shapes[0].shape


def group_numbers(text):
    return set(re.findall(r"group = (\d+)", text))


def test_lowering_for_gpus_names_the_group_that_will_be_opened(monkeypatch):
    """The number in a program is the one of the equal group on devices, whatever groups there were before."""
    numbers = []
    group = open_group(ABSTRACT, SHAPE, axis_name=AXES, backend="cuda")
    text = lowered_without_devices(group, "cuda").as_text()
    assert re.findall(r"custom_call @(jax_ep_\w+)", text) == ["jax_ep_dispatch", "jax_ep_combine"]
    without_gpus(monkeypatch, open_group=lambda number, **config: numbers.append(str(number)))
    for _ in range(2):
        group.open(mesh_of(data=2, ep=2)).close()
    assert numbers == [*group_numbers(text)] * 2
    with group.open(mesh_of(data=2, ep=2)), group.open(mesh_of(data=2, ep=2)):
        assert numbers[3] != numbers[2] == numbers[0]


@pytest.mark.parametrize(
    ("platform", "num_ranks", "expected"),
    [
        ("gpu", 4, "cuda"),
        ("gpu", 64, "cuda"),
        ("gpu", 512, "collectives"),
        ("tpu", 4, "collectives"),
        ("cpu", 4, "reference"),
    ],
)
def test_backend_without_devices(platform, num_ranks, expected):
    device = jax.sharding.AbstractDevice(device_kind=f"a {platform}", num_cores=None, platform=platform)
    mesh = AbstractMesh((num_ranks,), ("ep",), abstract_device=device)
    assert open_group(mesh, SHAPE, num_experts=512).backend == expected


@pytest.mark.parametrize(("num_ranks", "rows_per_token"), [(32, 1), (40, 2)])
def test_many_ranks_without_devices_have_a_network(monkeypatch, num_ranks, rows_per_token):
    """More than 32 ranks need one, even if JAX_EP_NODE_SIZE is not set. The route then has two rows per token."""
    monkeypatch.delenv("JAX_EP_NODE_SIZE", raising=False)
    mesh = AbstractMesh((num_ranks,), ("ep",))
    group = open_group(mesh, SHAPE, num_experts=num_ranks, backend="cuda")
    route_of = jax.shard_map(
        lambda x, topk_idx: ep.dispatch(x, topk_idx, group=group).route.arrays.send_index,
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    x = jax.ShapeDtypeStruct((num_ranks * 4, SHAPE.hidden), SHAPE.dtype)
    topk_idx = jax.ShapeDtypeStruct((num_ranks * 4, SHAPE.top_k), jnp.int32)
    assert jax.eval_shape(route_of, x, topk_idx).shape == (num_ranks * 4 * rows_per_token, num_ranks)


def test_backend_without_devices_whose_kind_is_not_known():
    mesh = AbstractMesh((4,), ("ep",))
    with pytest.raises(ValueError, match=r"backend is 'auto', and the mesh is an AbstractMesh .* backend='cuda'"):
        open_group(mesh, SHAPE)
    for backend in ("cuda", "collectives", "reference"):
        assert open_group(mesh, SHAPE, backend=backend).backend == backend


def test_what_a_group_without_devices_refuses():
    group = open_group(ABSTRACT, SHAPE, axis_name=AXES, backend="reference")
    assert "no devices" in str(group)
    with pytest.raises(ValueError, match="stats: the group is on an AbstractMesh"):
        group.stats()
    with pytest.raises(TypeError, match="open: mesh is an AbstractMesh"):
        group.open(ABSTRACT)
    with pytest.raises(
        ValueError, match=r"open: mesh is \{'ep': 4\}; it must have the group's axes, in their order: \{'data'"
    ):
        group.open(mesh_of(ep=4))
    with pytest.raises(ValueError, match=r"open: mesh is \{'ep': 2, 'data': 2\}; .*, in their order: \{'data': 2, 'ep"):
        group.open(mesh_of(ep=2, data=2))
    with pytest.raises(ValueError, match=r"mesh is None, and no mesh is set"):
        group.open()
    with pytest.raises(ValueError, match="backend is 'cuda', which cannot be used here: .* at most 256"):
        open_group(AbstractMesh((257,), ("ep",)), SHAPE, num_experts=257, backend="cuda")
    group.close()
    with pytest.raises(ValueError, match="group is closed"):
        lowered_without_devices(group)


# --- export ---------------------------------------------------------------------------------------------------------


def exported(group, **options):
    placed = put(group.mesh, arguments(group.num_ranks), BY_RANK)
    function = jax.jit(mapped_over(group, mesh=group.mesh))
    return jax.export.export(function, disabled_checks=ep.export_checks(), **options)(*placed)


def test_exported_program_runs_with_an_equal_group(make_group):
    """The program runs after its group is closed and other groups were made."""
    mesh = mesh_of(ep=4)
    group = make_group(mesh, SHAPE)
    program = exported(group)
    group.close()
    make_group(mesh, SHAPE, top_k=1)
    equal = make_group(mesh, SHAPE)
    args = arguments(4)
    placed = put(mesh, args, BY_RANK)
    assert_close(jax.jit(program.call)(*placed), dense(*args))
    equal.check()


def test_export_names_every_call_of_the_operations():
    """Forward and backward, whole and split-phase calls."""
    mesh = AbstractMesh((4,), ("ep",))
    group = open_group(mesh, SHAPE, backend="cuda")

    def every_operation(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        like = ep.dispatch_like(x, recv)
        done = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="ragged"))
        splits = jnp.zeros(group.num_experts, jnp.int32)
        back = ep.all_to_all_back(ep.all_to_all(x, splits, group=group).x, splits, group=group)
        return ep.combine(recv.x + like, recv) + ep.combine_done(ep.combine_start(done.x, done)) + back

    mapped = jax.shard_map(every_operation, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))

    def gradients(x, topk_idx, topk_weights):
        return jax.value_and_grad(lambda x, w: jnp.sum(mapped(x, topk_idx, w)), (0, 1))(x, topk_weights)

    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P("ep"))) for a in arguments(4)[:3]]
    export = partial(jax.export.export, jax.jit(gradients), platforms=["cuda"])
    with pytest.raises(ValueError, match="jax_ep_dispatch"):
        export()(*args)
    program = export(disabled_checks=ep.export_checks())(*args)
    calls = set(re.findall(r"custom_call @(jax_ep_\w+)", program.mlir_module()))
    assert {check.is_custom_call() for check in ep.export_checks()} >= calls
    assert len(calls) == 16


def test_export_of_a_layer_with_the_grouped_gemm(monkeypatch):
    monkeypatch.setattr(_native, "grouped_matmul", SimpleNamespace(workspace_bytes=lambda num_groups: 128))
    group = open_group(AbstractMesh((4,), ("ep",)), SHAPE, dtype=jnp.bfloat16, backend="cuda")
    mlp = partial(ep.moe.mlp, group=group, experts="grouped")
    mapped = jax.shard_map(mlp, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    gradients = jax.grad(lambda x, *others: jnp.sum(mapped(x, *others).astype(jnp.float32)))
    x, topk_idx, topk_weights, w_gate_up = arguments(4)
    arrays = jnp.bfloat16(x), topk_idx, topk_weights, jnp.bfloat16(w_gate_up), jnp.bfloat16(w_gate_up[:, :16])
    by_rank = NamedSharding(group.mesh, P("ep"))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_rank) for a in arrays]
    export = jax.export.export(jax.jit(gradients), platforms=["cuda"], disabled_checks=ep.export_checks())
    assert "jax_ep_grouped_matmul" in export(*shapes).mlir_module()


def test_export_for_gpus_without_devices():
    """A machine without GPUs exports what GPUs will run."""
    group = open_group(ABSTRACT, SHAPE, axis_name=AXES, backend="cuda")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(ABSTRACT, P(AXES))) for a in arguments(4)]
    function = jax.jit(mapped_over(group, AXES, mesh=ABSTRACT))
    program = jax.export.export(function, platforms=["cuda"], disabled_checks=ep.export_checks())(*shapes)
    assert program.nr_devices == 4
    assert len(group_numbers(program.mlir_module())) == 1


@in_one_process
@pytest.mark.parametrize("name", ["reference", *(["emulated"] if _native.emulated else [])])
def test_exported_program_runs_in_a_fresh_process(name, tmp_path):
    pytest.importorskip("flatbuffers", reason="Exported.serialize needs the package flatbuffers")
    with open_group(mesh_of(ep=4), SHAPE, max_tokens_per_rank=UNUSED_SIZE, backend=name) as group:
        (tmp_path / "program").write_bytes(exported(group).serialize())
    command = "import sys, test_meshes; test_meshes.run_exported(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", command, tmp_path / "program", name],
        cwd=TESTS, env=os.environ, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def run_exported(path, backend):
    """Runs what was exported, with a group that this process makes."""
    with open(path, "rb") as file:
        program = jax.export.deserialize(bytearray(file.read()))
    mesh, args = mesh_of(ep=4), arguments(4)
    with open_group(mesh, SHAPE, max_tokens_per_rank=UNUSED_SIZE, backend=backend) as group:
        assert_close(jax.jit(program.call)(*put(mesh, args, BY_RANK)), dense(*args))
        group.check()


# --- transformations of the whole layer -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in shard_map", "of shard_map"])
def test_vmap_of_a_layer(make_group, place):
    """vmap in the mapped function, or of the mapped function; each element has its own tokens, all share the weights.

    With gradients.
    """
    mesh = mesh_of(ep=4)
    group = make_group(mesh, SHAPE)
    batches = [arguments(4, seed)[:3] for seed in range(3)]
    stacked, w = [np.stack(arrays) for arrays in zip(*batches, strict=True)], arguments(4)[3]
    axes = (0, 0, 0, None)
    if place == "of shard_map":
        batched = jax.vmap(mapped_over(group, layer=layer_of_einsum, mesh=mesh), axes)
    else:
        specs = (*[P(None, "ep")] * 3, P("ep"))
        of_batch = jax.vmap(partial(layer_of_einsum, group), axes)
        batched = jax.shard_map(of_batch, mesh=mesh, in_specs=specs, out_specs=specs[0])
    args = *stacked, w
    assert_close(value_and_gradients(batched, *args), value_and_gradients(jax.vmap(dense, axes), *args))


@pytest.mark.parametrize("experts", ["ragged_dot", "einsum"])
@pytest.mark.parametrize("place", ["in shard_map", "of shard_map"])
def test_vmap_of_a_moe_layer(make_group, place, experts):
    """README's layer, whose elements share the experts' weights; with gradients."""
    mesh = mesh_of(ep=4)
    mlp = partial(ep.moe.mlp, group=make_group(mesh, SHAPE), experts=experts)
    x, topk_idx, topk_weights = (
        np.stack(arrays) for arrays in zip(*(arguments(4, i)[:3] for i in range(3)), strict=True)
    )
    w = arguments(4)[3], arguments(4, seed=1)[3][:, : SHAPE.hidden // 2]
    axes = (0, 0, 0, None, None)
    if place == "of shard_map":
        batched = jax.vmap(jax.shard_map(mlp, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), axes)
    else:
        specs = (*[P(None, "ep")] * 3, P("ep"), P("ep"))
        batched = jax.shard_map(jax.vmap(mlp, axes), mesh=mesh, in_specs=specs, out_specs=specs[0])

    def layer_of(mlp):
        return lambda x, topk_idx, topk_weights, w: mlp(x, topk_idx, topk_weights, *w)

    expected = value_and_gradients(layer_of(jax.vmap(dense_mlp, axes)), x, topk_idx, topk_weights, w)
    assert_close(value_and_gradients(layer_of(batched), x, topk_idx, topk_weights, w), expected)


def test_disable_jit(make_group):
    """All but the operations runs step by step."""
    mesh = mesh_of(ep=2)
    group = make_group(mesh, SHAPE)
    args = arguments(2)
    expected = dense(*args)
    with jax.disable_jit():
        assert_close(mapped_over(group, mesh=mesh)(*args), expected)
