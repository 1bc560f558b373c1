"""dispatch: rows, places, counts, capacity and padding, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_ep as ep
import oracle
from helpers import PURE_JAX, assert_dispatched, assert_same_bits, make_mesh, open_group, run_spmd, spmd, to_numpy
from shapes import ROUTINGS, SMALL, make_inputs

SMALL_F32 = dataclasses.replace(SMALL, dtype="float32", hidden=16)


def check_dispatch(group, mesh, inputs, *, layout, zero_pad=None, **options):
    """Runs one dispatch, compares it with the oracle, and returns what the oracle says."""
    expected = oracle.dispatch(*inputs, num_experts=group.num_experts, layout=layout, **options)

    def dispatch(x, topk_idx, topk_weights):
        return ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=zero_pad, **options)

    recv = run_spmd(dispatch, mesh, *inputs)
    assert_dispatched(recv, expected, zero_pad=zero_pad is True)
    return expected


@pytest.fixture(scope="module")
def small_dispatch(make_group, any_mesh, layout):
    """dispatch of the small shape, compiled once for all routings."""
    group = make_group(any_mesh, SMALL)
    return jax.jit(spmd(lambda *inputs: ep.dispatch(*inputs, group=group, layout=layout), any_mesh))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_at_every_ep_size(small_dispatch, any_mesh, layout, routing):
    inputs = make_inputs(SMALL, any_mesh.size, routing)
    expected = oracle.dispatch(*inputs, num_experts=SMALL.num_experts, layout=layout)
    assert_dispatched(to_numpy(small_dispatch(*inputs)), expected)


def test_same_bits_on_every_run(small_dispatch, any_mesh, layout):
    """All but the padding, which is unspecified; the oracle comparison is exact."""
    inputs = make_inputs(SMALL, any_mesh.size)
    expected = oracle.dispatch(*inputs, num_experts=SMALL.num_experts, layout=layout)
    for _ in range(5):
        assert_dispatched(to_numpy(small_dispatch(*inputs)), expected)


def test_one_expert_per_rank(make_group, any_mesh, layout):
    shape = dataclasses.replace(SMALL_F32, num_experts=any_mesh.size, top_k=min(2, any_mesh.size))
    check_dispatch(make_group(any_mesh, shape), any_mesh, make_inputs(shape, any_mesh.size), layout=layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_and_padding_with_zeros(make_group, mesh, layout, dtype):
    shape = dataclasses.replace(SMALL, dtype=dtype)
    inputs = make_inputs(shape, mesh.size, "uneven")
    check_dispatch(make_group(mesh, shape), mesh, inputs, layout=layout, zero_pad=True)


def test_padding_is_zero_when_differentiated(make_group, mesh, layout):
    """zero_pad=None: the experts' own gradients may read the padding, so that it must be zero then."""
    group = make_group(mesh, SMALL_F32)
    inputs = make_inputs(SMALL_F32, mesh.size, "uneven")

    def forward_of_vjp(x, topk_idx, topk_weights):
        return jax.vjp(lambda x: ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout), x)[0]

    recv = run_spmd(forward_of_vjp, mesh, *inputs)
    assert_dispatched(recv, oracle.dispatch(*inputs, num_experts=group.num_experts, layout=layout), zero_pad=True)


def test_no_weights_means_ones(make_group, mesh, layout):
    x, topk_idx, _ = make_inputs(SMALL_F32, mesh.size, "uneven")
    check_dispatch(make_group(mesh, SMALL_F32), mesh, (x, topk_idx, None), layout=layout)


def test_rows_keep_every_bit(make_group, mesh, layout):
    """NaN, infinity, -0 and subnormal values travel like any other, and spoil no other row."""
    inputs = make_inputs(SMALL_F32, mesh.size)
    inputs.x[:, ::2, :5] = [np.nan, -np.inf, -0.0, 1e-45, -np.nan]
    check_dispatch(make_group(mesh, SMALL_F32), mesh, inputs, layout=layout)


def test_default_capacity(make_group, mesh):
    group = make_group(mesh, SMALL)
    inputs = make_inputs(SMALL, mesh.size)
    rows = mesh.size * SMALL.tokens
    experts_per_rank = SMALL.num_experts // mesh.size

    def shapes(**options):
        dispatch = spmd(lambda *inputs: ep.dispatch(*inputs, group=group, **options), mesh)
        recv = jax.eval_shape(dispatch, *inputs)
        return recv.x.shape[1:], recv.weights.shape[1:]

    assert shapes() == shapes(layout="ragged")
    assert shapes(layout="expert") == ((experts_per_rank, rows, SMALL.hidden), (experts_per_rank, rows))
    for alignment in (1, 8, 128):
        capacity = rows * min(SMALL.top_k, experts_per_rank) + experts_per_rank * (alignment - 1)
        capacity = -(-capacity // alignment) * alignment
        assert shapes(layout="ragged", alignment=alignment) == ((capacity, SMALL.hidden), (capacity,))


def test_capacity_factor(make_group, mesh, layout):
    """1.0 is the room of a balanced router: T * K rows of a rank, shared by its experts in the expert layout."""
    group = make_group(mesh, SMALL_F32)
    inputs = make_inputs(SMALL_F32, mesh.size, "hot_expert")
    balanced = SMALL_F32.tokens * SMALL_F32.top_k // (group.experts_per_rank if layout == "expert" else 1)
    capacity = oracle.round_up(balanced * 3 // 2, 8)

    def dispatch(*inputs):
        return ep.dispatch(*inputs, group=group, layout=layout, capacity_factor=1.5, alignment=8)

    expected = oracle.dispatch(
        *inputs, num_experts=SMALL_F32.num_experts, layout=layout, capacity=capacity, alignment=8
    )
    assert expected.route.num_dropped.any()
    assert_dispatched(run_spmd(dispatch, mesh, *inputs), expected)


@pytest.mark.parametrize("routing", ["uniform", "hot_expert", "uneven", "duplicates"])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("shortage", ["none", "one", "most"])
def test_capacity(make_group, mesh, layout, alignment, shortage, routing):
    """As much as is needed, one unit (an alignment) less, and far less. num_dropped counts the dropped rows."""
    inputs = make_inputs(SMALL_F32, mesh.size, routing)
    needed = oracle.needed_capacity(inputs.topk_idx, SMALL_F32.num_experts, layout, alignment)
    capacity = {"none": needed, "one": needed - alignment, "most": oracle.round_up(needed // 4, alignment)}[shortage]
    capacity = max(capacity, alignment)
    group = make_group(mesh, SMALL_F32)
    expected = check_dispatch(group, mesh, inputs, layout=layout, alignment=alignment, capacity=capacity)
    assert expected.route.num_dropped.any() == (capacity < needed)


@pytest.mark.parametrize("capacity", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("routing", ["uneven", "out_of_range"])
def test_fair_room_at_every_ep_size(make_group, any_mesh, layout, routing, capacity):
    """Levels of 0, of 1 and above, with remainders that begin at every rank; source ranks of unequal need."""
    shape = dataclasses.replace(SMALL_F32, tokens=24)
    group = make_group(any_mesh, shape)
    check_dispatch(group, any_mesh, make_inputs(shape, any_mesh.size, routing), layout=layout, capacity=capacity)


def test_more_experts_and_ranks_than_a_warp_has_lanes(make_group, largest_mesh):
    """The fill over experts takes several rounds of a warp, whose remainder goes on from one to the next."""
    shape = dataclasses.replace(SMALL_F32, num_experts=80 * largest_mesh.size, tokens=64, top_k=8)
    group = make_group(largest_mesh, shape)
    inputs = make_inputs(shape, largest_mesh.size)
    for capacity, alignment in ((70, 1), (150, 1), (300, 2), (4 * 75, 4)):
        expected = check_dispatch(group, largest_mesh, inputs, layout="ragged", capacity=capacity, alignment=alignment)
        assert expected.route.num_dropped.all()


def test_duplicates_beyond_the_default_capacity_are_counted(make_group, mesh, layout):
    inputs = make_inputs(SMALL_F32, mesh.size)
    inputs.topk_idx[:] = SMALL_F32.num_experts - 1
    expected = check_dispatch(make_group(mesh, SMALL_F32), mesh, inputs, layout=layout)
    rows_sent = inputs.topk_idx.size
    assert expected.route.counts.sum() + expected.route.num_dropped.sum() == rows_sent
    # The default capacity of the ragged layout has room for all of them.
    dropped = rows_sent - mesh.size * SMALL_F32.tokens if layout == "expert" else 0
    assert expected.route.num_dropped.tolist() == [0] * (mesh.size - 1) + [dropped]


@pytest.mark.parametrize("alignment", [1, 8, 16, 128])
@pytest.mark.parametrize("zero_pad", [True, False])
def test_alignment_of_ragged_groups(make_group, mesh, alignment, zero_pad):
    """Rows that alignment adds are zero whatever zero_pad says, as a grouped matmul reads them."""
    inputs = make_inputs(SMALL_F32, mesh.size, "uneven")
    group = make_group(mesh, SMALL_F32)
    expected = check_dispatch(group, mesh, inputs, layout="ragged", alignment=alignment, zero_pad=zero_pad)
    assert not (expected.route.group_sizes % alignment).any()


def test_alignment_leaves_group_sizes_of_the_expert_layout(make_group, mesh):
    inputs = make_inputs(SMALL_F32, mesh.size, "uneven")
    check_dispatch(make_group(mesh, SMALL_F32), mesh, inputs, layout="expert", alignment=16, capacity=32)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_fewer_tokens_than_the_group_allows(make_group, mesh, layout, tokens):
    inputs = make_inputs(SMALL_F32, mesh.size)
    group = make_group(mesh, SMALL_F32)

    def dispatch_first(*inputs):
        return ep.dispatch(*(a[:tokens] for a in inputs), group=group, layout=layout)

    recv = run_spmd(dispatch_first, mesh, *inputs)
    first = (a[:, :tokens] for a in inputs)
    assert_dispatched(recv, oracle.dispatch(*first, num_experts=SMALL_F32.num_experts, layout=layout))


@pytest.mark.parametrize("num_sms", [None, 4])
@pytest.mark.parametrize("options", [{"capacity": 8}, {"alignment": 4}, {"alignment": 4, "wire": "fp8"}], ids=str)
def test_no_tokens_at_all(make_group, mesh, layout, options, num_sms):
    inputs = make_inputs(SMALL_F32, mesh.size)
    group = make_group(mesh, SMALL_F32, num_sms=num_sms)

    def layer(*inputs):
        recv = ep.dispatch(*(a[:0] for a in inputs), group=group, layout=layout, zero_pad=True, **options)
        return recv.x, recv.counts, ep.combine(recv.x, recv)

    x, counts, out = run_spmd(layer, mesh, *inputs)
    assert out.shape == (mesh.size, 0, SMALL_F32.hidden)
    assert not x.any()
    assert not counts.any()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_names", [("data", "ep"), ("ep", "data")], ids="-".join)
def test_every_setting_of_the_other_axes_is_a_group(make_group, layout, axis_names, check_vma):
    mesh = make_mesh((2, 2), axis_names)
    group = make_group(mesh, SMALL_F32)
    replicas = [make_inputs(SMALL_F32, 2, "uneven", seed) for seed in range(2)]
    data_axis = axis_names.index("data")
    inputs = [np.stack(arrays, axis=data_axis) for arrays in zip(*replicas, strict=True)]

    def dispatch(*inputs):
        return ep.dispatch(*inputs, group=group, layout=layout)

    recv = run_spmd(dispatch, mesh, *inputs, check_vma=check_vma)
    for replica, its_inputs in enumerate(replicas):
        its_recv = jax.tree.map(lambda a, i=replica: np.take(a, i, axis=data_axis), recv)
        assert_dispatched(its_recv, oracle.dispatch(*its_inputs, num_experts=group.num_experts, layout=layout))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mesh_in_context(make_group, mesh, layout, axis_type):
    """A mesh with devices in another order, of either type of axes, that shard_map takes from the context."""
    mesh = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=(axis_type,))
    group = make_group(mesh, SMALL_F32)
    inputs = make_inputs(SMALL_F32, mesh.size)
    by_rank = PartitionSpec("ep")

    def dispatch(*inputs):
        recv = ep.dispatch(*(a[0] for a in inputs), group=group, layout=layout)
        return jax.tree.map(lambda a: a[None], recv)

    with jax.set_mesh(mesh):
        arguments = jax.device_put(inputs, NamedSharding(mesh, by_rank))
        recv = to_numpy(jax.jit(jax.shard_map(dispatch, in_specs=by_rank, out_specs=by_rank))(*arguments))
    assert_dispatched(recv, oracle.dispatch(*inputs, num_experts=SMALL_F32.num_experts, layout=layout))


def test_permuted_mesh_is_an_error_or_right(make_group, mesh, layout):
    """The ranks are those of the shard_map at hand. Kernels cannot follow: they poison the result and say so."""
    group = make_group(mesh, SMALL_F32)
    permuted = Mesh(np.roll(mesh.devices, 1), mesh.axis_names)
    inputs = make_inputs(SMALL_F32, mesh.size)
    if group.backend in PURE_JAX or mesh.size == 1:
        check_dispatch(group, permuted, inputs, layout=layout)
        return
    try:
        recv = run_spmd(lambda *inputs: ep.dispatch(*inputs, group=group, layout=layout), permuted, *inputs)
    except jax.errors.JaxRuntimeError as error:
        # The handler of a rank refuses if it runs after the kernel of another rank has failed.
        assert "its group has failed before" in str(error)
    else:
        assert (recv.counts == 0).all()
        assert (recv.num_dropped == -1).all()
    # All ranks are wrong; over a network, one that hears of another's failure first does not look at its own.
    with pytest.raises(ep.Error, match="mesh|Group.check of its process says why"):
        group.check()
    with pytest.raises(ep.Error, match="mesh|Group.check of its process says why"):
        run_spmd(lambda *inputs: ep.dispatch(*inputs, group=group, layout=layout).counts, mesh, *inputs)


@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 128), ("float32", 4), ("bfloat16", 256), ("float16", 8)])
def test_dispatch_like(make_group, mesh, layout, dtype, hidden):
    """Another dtype and another width take the saved route, as long as the row is no longer than the group's."""
    shape = dataclasses.replace(SMALL, hidden=256)
    group = make_group(mesh, shape)
    inputs = make_inputs(shape, mesh.size, "uneven")
    other = make_inputs(dataclasses.replace(shape, dtype=dtype, hidden=hidden), mesh.size, seed=1).x
    capacity = oracle.needed_capacity(inputs.topk_idx, shape.num_experts, layout) // 2 * 2 - 2
    settings = {"layout": layout, "capacity": capacity, "alignment": 2}
    route = oracle.route(inputs.topk_idx, num_experts=shape.num_experts, **settings)

    def dispatch_like(other, *inputs):
        return ep.dispatch_like(other, ep.dispatch(*inputs, group=group, **settings))

    rows = run_spmd(dispatch_like, mesh, other, *inputs)
    assert rows.shape == (*route.is_token.shape, hidden)
    assert_same_bits(rows[route.is_token], route.gather(other)[route.is_token])

    def differentiated(other, *inputs):
        return jax.vjp(lambda other: dispatch_like(other, *inputs), other)[0]

    # Zeros where there is no token.
    assert_same_bits(run_spmd(differentiated, mesh, other, *inputs), route.gather(other))


def test_two_groups_in_one_program(make_group, mesh, layout):
    """Groups share nothing: other shapes, dtypes and numbers of experts side by side."""
    wide = dataclasses.replace(SMALL, num_experts=8, top_k=2, hidden=64, tokens=5)
    groups = [make_group(mesh, shape) for shape in (SMALL_F32, wide)]
    all_inputs = [make_inputs(shape, mesh.size, "uneven") for shape in (SMALL_F32, wide)]

    def dispatch_both(*all_inputs):
        return [ep.dispatch(*i, group=g, layout=layout) for i, g in zip(all_inputs, groups, strict=True)]

    for recv, inputs, group in zip(run_spmd(dispatch_both, mesh, *all_inputs), all_inputs, groups, strict=True):
        assert_dispatched(recv, oracle.dispatch(*inputs, num_experts=group.num_experts, layout=layout))


def test_types_under_x64(make_group, mesh, layout):
    """64-bit mode changes neither a type nor a bit."""
    group = make_group(mesh, SMALL_F32)
    with jax.enable_x64(True):
        check_dispatch(group, mesh, make_inputs(SMALL_F32, mesh.size, "uneven"), layout=layout)
        assert jnp.asarray(1.0).dtype == jnp.float64


@pytest.fixture(params=("reference", "collectives"))
def debug_group(mesh, monkeypatch, request):
    monkeypatch.setenv("JAX_EP_DEBUG_NANS", "1")
    with open_group(mesh, dataclasses.replace(SMALL, dtype="float32"), backend=request.param) as group:
        yield group


@pytest.mark.parametrize(
    "options", [{}, {"alignment": 8}, {"wire": "fp8", "dequantize": False}, {"capacity": 16}], ids=str
)
def test_debug_nans(debug_group, mesh, layout, options):
    """JAX_EP_DEBUG_NANS=1: unspecified rows are NaN. All other rows are unchanged. combine reads no unspecified row."""
    inputs = make_inputs(dataclasses.replace(SMALL, dtype="float32"), mesh.size, "uneven")
    expected = oracle.dispatch(
        *inputs, num_experts=SMALL.num_experts, layout=layout, **{k: v for k, v in options.items() if k != "dequantize"}
    )

    def dispatch(*inputs):
        recv = ep.dispatch(*inputs, group=debug_group, layout=layout, **options)
        like = ep.dispatch_like(inputs[1], recv)
        zeros = ep.dispatch(*inputs, group=debug_group, layout=layout, zero_pad=True, **options)
        return recv, like, zeros, ep.combine(ep.dequantize(recv), recv)

    recv, like, zeros, out = run_spmd(dispatch, mesh, *inputs)
    assert_dispatched(recv, expected)
    assert_dispatched(zeros, expected, zero_pad=True)
    route = expected.route
    unspecified = ~(route.is_token | route.is_alignment)
    assert unspecified.any() or "capacity" in options  # on two ranks, tokens fill the capacity
    assert np.isnan(recv.x[unspecified].astype(np.float32)).all()
    assert recv.scales is None or np.isnan(recv.scales[unspecified]).all()
    assert (like[~route.is_token] == np.iinfo(np.int32).max).all()
    assert_same_bits(like[route.is_token], route.gather(inputs.topk_idx)[route.is_token])
    assert np.isfinite(out).all()


def test_debug_nans_leave_gradients_alone(debug_group, mesh, layout):
    """A differentiated call has zeros in these rows unless it says zero_pad=False."""
    inputs = make_inputs(dataclasses.replace(SMALL, dtype="float32"), mesh.size, "uneven")

    def gradients(x, topk_idx, topk_weights):
        def loss(x, gain, zero_pad):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=debug_group, layout=layout, zero_pad=zero_pad)
            return jnp.sum(ep.combine(recv.x * gain, recv))

        return [jax.grad(loss, (0, 1))(x, jnp.ones(x.shape[1]), zero_pad) for zero_pad in (None, False)]

    (dx, dgain), (dx_unpadded, dgain_unpadded) = run_spmd(gradients, mesh, *inputs, check_vma=False)
    assert np.isfinite(dx).all()
    assert np.isfinite(dgain).all()
    assert_same_bits(dx, dx_unpadded)
    assert np.isnan(dgain_unpadded).all()  # 0 times NaN: as a GPU may do
