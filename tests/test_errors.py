"""Errors that can be seen while tracing: the type, and that the argument, its value and what would fit are named."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
from conftest import HAS_EMULATED
from helpers import make_mesh, open_group, spmd
from jax_ep import _backends, _processes
from shapes import SMALL, make_inputs


def assert_names(error, *mentions):
    """The message holds each of `mentions` as a word of its own."""
    for mention in mentions:
        assert re.search(rf"(?<!\w){re.escape(str(mention))}(?!\w)", str(error)), f"{mention!r} is not in: {error}"


def ids(table):
    return [f"{next(iter(changes))}-{i}" for i, (changes, *_) in enumerate(table)]


GROUP = [
    ({"mesh": 4}, TypeError, ["int", "Mesh"]),
    ({"mesh": None}, ValueError, ["None", "jax.set_mesh"]),
    ({"axis_name": "expert"}, ValueError, ["expert", "ep"]),
    ({"axis_name": ("ep", "expert")}, ValueError, ["('ep', 'expert')", "different axes", "('ep',)"]),
    ({"axis_name": ("ep", "ep")}, ValueError, ["('ep', 'ep')", "different axes"]),
    ({"axis_name": ()}, ValueError, ["()", "('ep',)"]),
    ({"axis_name": ["ep"]}, ValueError, ["['ep']", "tuple"]),
    ({"axis_name": None}, ValueError, ["None", "('ep',)"]),
    ({"num_experts": 3}, ValueError, [3, 2, 4]),
    ({"num_experts": 0}, ValueError, [0, 1]),
    ({"num_experts": 16.0}, TypeError, ["16.0", "int"]),
    ({"top_k": 0}, ValueError, [0, 1]),
    ({"top_k": 33}, ValueError, [33, 32]),
    ({"top_k": 17}, ValueError, [17, "num_experts", 16]),
    ({"hidden": 12}, ValueError, [12, 16]),
    ({"hidden": 6, "dtype": jnp.float32}, ValueError, [6, 8]),
    ({"max_tokens_per_rank": 0}, ValueError, [0, 1]),
    ({"dtype": jnp.int32}, TypeError, ["int32", "bfloat16", "float16", "float32"]),
    ({"dtype": jnp.float8_e4m3fn}, TypeError, ["float8_e4m3fn", "bfloat16", "float16", "float32"]),
    ({"backend": "gpu"}, ValueError, ["gpu", "auto", "cuda", "collectives", "reference"]),
    ({"num_sms": 0}, ValueError, [0, 1]),
    ({"timeout": 0}, ValueError, [0]),
    ({"timeout": None}, TypeError, ["None", "seconds"]),
    ({"timeout": "10"}, TypeError, ["10", "str"]),
    ({"backend": ["cuda"]}, ValueError, ["cuda", "auto"]),
    ({"backend": np.array(["cuda", "auto"])}, ValueError, ["auto", "cuda", "reference"]),
    ({"num_experts": 2**31}, ValueError, [2**31, 2**31 - 1]),
    ({"hidden": 2**30}, ValueError, [2**30, 2**30 - 1]),
    ({"max_tokens_per_rank": 2**31}, ValueError, [2**31, 2**31 - 1]),
    ({"num_sms": 2**31}, ValueError, [2**31, 1024]),
    ({"timeout": jnp.float32(1)}, TypeError, ["ArrayImpl", "seconds"]),
]


@pytest.mark.parametrize(("changes", "error", "mentions"), GROUP, ids=ids(GROUP))
def test_group(changes, error, mentions):
    good = {"mesh": make_mesh((2,)), "num_experts": 16, "top_k": 4, "hidden": 128, "max_tokens_per_rank": 8}
    with pytest.raises(error) as raised:
        ep.Group(**good | changes)
    assert_names(raised.value, next(iter(changes)), *mentions)


def test_cuda_backend_needs_gpus(make_group):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("ep",))
    with pytest.raises(ValueError, match="GPUs") as raised:
        make_group(mesh, SMALL, backend="cuda")
    assert_names(raised.value, "backend", "cuda", "collectives", "reference")


def test_cuda_backend_needs_an_axis_of_at_most_256():
    gpu = SimpleNamespace(platform="gpu")
    mesh = SimpleNamespace(devices=np.full((2, 257), gpu), shape={"data": 2, "ep": 257})
    with pytest.raises(ValueError, match="axis_name") as raised:
        _backends.choose("cuda", mesh, "ep")
    assert_names(raised.value, "backend", "'cuda'", "'ep'", 257, "at most 256", "('data', 'ep')")
    with pytest.warns(UserWarning, match="uses XLA's collectives on GPUs, not its kernels: axis_name is 'ep'"):
        assert _backends.choose("auto", mesh, "ep").backend == "collectives"


@pytest.mark.skipif(not HAS_EMULATED, reason="there are no emulated GPUs")
def test_too_many_tokens_for_the_ranks():
    with pytest.raises(ep.Error, match="max_tokens_per_rank is 67108864; with 8 ranks, it must be at most 67108863"):
        open_group(make_mesh((8,)), SMALL, max_tokens_per_rank=2**26, backend="emulated")


def test_a_cuda_group_without_a_network_needs_an_axis_of_at_most_32(monkeypatch):
    """33 GPUs of one host: the processes agree that they need no network."""
    devices = np.full(33, SimpleNamespace(platform="gpu", process_index=0))
    mesh = SimpleNamespace(devices=devices, shape={"ep": 33}, local_devices=[])
    monkeypatch.setattr(_processes, "owners", lambda mesh: [0])
    monkeypatch.setattr(_processes, "ep_groups", lambda mesh, axis_name: devices.reshape(1, 33))
    monkeypatch.setattr(_backends, "_link_reason", lambda *_: "")
    reason = _backends._agree("", mesh, "ep", 1.0)[0]
    assert_names(reason, "'ep'", 33, "without a network has at most 32", "('data', 'ep')")


def test_quantised_x_needs_whole_units(make_group, mesh):
    """The caller gave no wire, so that the message must not blame one."""
    shape = dataclasses.replace(SMALL, hidden=72)
    group = make_group(mesh, shape)
    x, topk_idx, _ = make_inputs(shape, mesh.size)
    pair = x.astype(jnp.float8_e4m3fn), np.ones((*x.shape[:-1], 1), np.float32)
    with pytest.raises(ValueError, match="x is quantised") as raised:
        jax.eval_shape(spmd(lambda *pair: ep.dispatch(pair, topk_idx[0], group=group, layout="ragged"), mesh), *pair)
    assert_names(raised.value, 72, 16)


def test_dequantize_takes_what_was_received():
    with pytest.raises(TypeError, match="dequantize: recv is an array; it must be what"):
        ep.dequantize(jnp.ones(3))


def quantised(x):
    return x.astype(jnp.float8_e4m3fn), jnp.ones((len(x), -(-x.shape[-1] // 128)), jnp.float32)


# What to change in a good call (a value, or a function of the good one), the error, and what its message mentions. The
# argument to blame comes first; its name is looked for without being mentioned.
DISPATCH = [
    ({"x": lambda x: x[0]}, ValueError, ["(128,)"]),
    ({"x": lambda x: x[:, :64]}, ValueError, [64, "group.hidden", 128]),
    ({"x": lambda x: x.astype(jnp.float32)}, TypeError, ["float32", "x.astype('bfloat16')"]),
    ({"x": lambda x: quantised(x)[0]}, TypeError, ["float8_e4m3fn", "bfloat16 (fp8 comes in a pair: (x, scales))"]),
    ({"x": 1.0}, TypeError, ["a float", "array"]),
    ({"x": [[0.0] * 128] * 8}, ValueError, ["list", 8, "array", "pair"]),
    ({"x": lambda x: jnp.zeros((9, 128), x.dtype)}, ValueError, [9, "max_tokens_per_rank", 8]),
    ({"x": lambda x: (quantised(x)[0], quantised(x)[1][:, :0])}, ValueError, ["(8, 0)"]),
    (
        {"x": lambda x: (x, quantised(x)[1])},
        TypeError,
        ["bfloat16", "float8_e4m3fn (for rows in bfloat16", "wire='fp8'"],
    ),
    ({"x": lambda x: (quantised(x)[0], x[:, :1])}, TypeError, ["bfloat16", "float32"]),
    ({"topk_idx": lambda idx: idx[0]}, ValueError, ["(4,)"]),
    ({"topk_idx": lambda idx: idx[:, :3]}, ValueError, [3, "group.top_k", 4]),
    ({"topk_idx": lambda idx: idx[:7]}, ValueError, [7, 8]),
    ({"topk_idx": lambda idx: idx.astype(jnp.int16)}, TypeError, ["int16", "topk_idx.astype('int32')"]),
    ({"topk_idx": lambda idx: idx * 0.5}, TypeError, ["float32", "int32 (are topk_idx and topk_weights swapped?"]),
    ({"topk_weights": lambda w: w[0]}, ValueError, ["(4,)"]),
    ({"topk_weights": lambda w: w[:, :3]}, ValueError, [3, 4]),
    ({"topk_weights": lambda w: w.astype(jnp.bfloat16)}, TypeError, ["bfloat16", "topk_weights.astype('float32')"]),
    ({"topk_weights": lambda w: w.astype(jnp.int32)}, TypeError, ["int32", "float32 (are topk_idx", "swapped"]),
    ({"group": "ep"}, TypeError, ["str", "Group"]),
    ({"layout": "dense"}, ValueError, ["dense", "expert", "ragged"]),
    ({"layout": np.zeros(2)}, ValueError, ["expert", "ragged"]),
    ({"capacity": 12, "alignment": 8}, ValueError, [12, 8, 16]),
    ({"capacity": -8}, ValueError, [-8]),
    ({"capacity": 8.5}, TypeError, ["8.5", "a float", "capacity_factor=8.5"]),
    ({"capacity": jnp.int32(8)}, TypeError, ["an array", "int known when tracing"]),
    ({"capacity": 2**33}, ValueError, [2**33, "int32", 2**31 - 1]),
    ({"capacity": None, "alignment": 2**30}, ValueError, [9 * 2**30, "any routing", 2**30]),
    ({"capacity_factor": 1.25, "capacity": 8}, ValueError, [1.25, "capacity", 8, "one of them"]),
    ({"capacity_factor": 0}, ValueError, [0, "positive"]),
    ({"capacity_factor": float("nan")}, ValueError, ["nan", "finite"]),
    ({"capacity_factor": "1.25"}, TypeError, ["1.25", "a str", "number"]),
    ({"capacity_factor": jnp.float32(1)}, TypeError, ["an array", "number known when tracing"]),
    ({"capacity_factor": 2.0**27}, ValueError, [2**32, "int32", 2**31 - 1]),
    ({"alignment": 0}, ValueError, [0, 1]),
    ({"alignment": 2**31}, ValueError, [2**31, 2**31 - 1]),
    ({"zero_pad": 0}, TypeError, [0, "bool"]),
    ({"dequantize": "no"}, TypeError, ["no", "bool"]),
    ({"wire": ["fp8"]}, ValueError, ["fp8", "fp8_pow2"]),
    ({"wire": np.zeros(2)}, ValueError, ["None", "fp8", "fp8_pow2"]),
    ({"wire": "fp4"}, ValueError, ["fp4", "fp8", "fp8_pow2"]),
    ({"wire": "fp8", "x": quantised}, ValueError, ["fp8", "None"]),
    ({"wire": "fp8_e5m2"}, ValueError, ["fp8_e5m2", "'fp8_pow2'", "'mxfp8'"]),
    ({"grad_wire": "mxfp8"}, ValueError, ["mxfp8", "None", "fp8_pow2", "fp8_e5m2"]),
    ({"grad_wire": "fp4"}, ValueError, ["fp4", "None", "fp8_pow2", "fp8_e5m2"]),
]

COMBINE = [
    ({"y": lambda y: y[..., 0]}, ValueError, [128]),
    ({"y": lambda y: y[..., :64]}, ValueError, [64, 128]),
    ({"y": lambda y: y[:-1]}, ValueError, []),
    ({"y": lambda y: y.astype(jnp.float32)}, TypeError, ["float32", "y.astype('bfloat16')"]),
    ({"y": lambda y: quantised(y)[0]}, TypeError, ["float8_e4m3fn", "bfloat16 (fp8 rows", "jax_ep.dequantize(recv)"]),
    ({"recv": lambda recv: recv.x}, TypeError, ["second argument", "an array", "dispatch"]),
    ({"out_dtype": "junk"}, TypeError, ["junk", "bfloat16"]),
    ({"out_dtype": "int32"}, TypeError, ["int32", "bfloat16", "float16", "float32"]),
    ({"wire": "fp8_e5m2"}, ValueError, ["fp8_e5m2", "None", "'fp8_pow2'"]),
    ({"wire": "mxfp8"}, ValueError, ["mxfp8", "None", "'fp8_pow2'"]),
    ({"grad_wire": 8}, ValueError, [8, "None", "fp8_pow2", "fp8_e5m2"]),
]

DISPATCH_LIKE = [
    ({"x": lambda x: x[0]}, ValueError, ["(128,)"]),
    ({"x": lambda x: x[:7]}, ValueError, [7, 8]),
    ({"x": lambda x: x.astype(jnp.float32)}, ValueError, [128, "float32", 256, 64]),
    ({"x": lambda x: x[:, :0]}, ValueError, [0, 128]),
    ({"x": lambda x: x.astype(jnp.int4)}, TypeError, ["int4", "int8"]),
    ({"x": lambda x: jax.random.split(jax.random.key(0), (8, 4))}, TypeError, ["key<fry>", "int8"]),
    ({"recv": lambda recv: recv.x}, TypeError, ["dispatch"]),
]

ALL_TO_ALL = [
    ({"x": lambda x: x[0]}, ValueError, ["(128,)"]),
    ({"x": lambda x: x[:, :64]}, ValueError, [64, 128]),
    ({"x": lambda x: jnp.zeros((9, 128), x.dtype)}, ValueError, [9, "max_tokens_per_rank", 8]),
    ({"x": lambda x: x.astype(jnp.float32)}, TypeError, ["float32", "bfloat16"]),
    ({"splits": lambda splits: splits[:15]}, ValueError, [15, 16]),
    ({"splits": lambda splits: splits.astype(jnp.uint32)}, TypeError, ["uint32", "int32"]),
    ({"group": None}, TypeError, ["NoneType", "Group"]),
    ({"wire": "mxfp8"}, ValueError, ["mxfp8", "fp8", "fp8_pow2"]),
    ({"dequantize": 1}, TypeError, [1, "bool"]),
]

ALL_TO_ALL_BACK = [
    ({"y": lambda y: y[0]}, ValueError, ["(8, 128)"]),
    ({"y": lambda y: y[:1]}, ValueError, [1, 2]),
    ({"y": lambda y: y[..., :64]}, ValueError, [64, 128]),
    ({"y": lambda y: y.astype(jnp.float32)}, TypeError, ["float32", "bfloat16"]),
    ({"splits": lambda splits: splits[:15]}, ValueError, [15, 16]),
    ({"splits": lambda splits: splits.astype(jnp.uint32)}, TypeError, ["uint32", "int32"]),
]

CALLS = {
    ep.dispatch: DISPATCH,
    ep.dispatch_start: DISPATCH,
    ep.combine: COMBINE,
    ep.combine_start: COMBINE,
    ep.dispatch_like: DISPATCH_LIKE,
    ep.all_to_all: ALL_TO_ALL,
    ep.all_to_all_back: ALL_TO_ALL_BACK,
}


@pytest.fixture(scope="module")
def two_ranks():
    return make_mesh((2,))


@pytest.fixture(scope="module")
def group(make_group, two_ranks):
    return make_group(two_ranks, SMALL)


def trace(fn, mesh):
    """Traces fn on one device's part of the small inputs."""
    jax.eval_shape(spmd(fn, mesh), *make_inputs(SMALL, mesh.size))


def good_arguments(op, group, x, topk_idx, topk_weights):
    """Keyword arguments of a good call of `op`."""
    if op in (ep.dispatch, ep.dispatch_start):
        inputs = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        return {**inputs, "group": group, "layout": "ragged"}
    if op in (ep.all_to_all, ep.all_to_all_back):
        rows = {"x": x} if op is ep.all_to_all else {"y": jnp.stack([x] * group.num_ranks)}
        return {**rows, "splits": jnp.zeros(group.num_experts, jnp.int32), "group": group}
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    return {"x": x, "recv": recv} if op is ep.dispatch_like else {"y": recv.x, "recv": recv}


@pytest.mark.parametrize(
    ("op", "changes", "error", "mentions"),
    [
        pytest.param(op, *row, id=f"{op.__name__}-{name}")
        for op, table in CALLS.items()
        for row, name in zip(table, ids(table), strict=True)
    ],
)
def test_call(group, two_ranks, op, changes, error, mentions):
    def bad_call(*inputs):
        arguments = good_arguments(op, group, *inputs)
        changed = {k: change(arguments[k]) if callable(change) else change for k, change in changes.items()}
        return op(**arguments | changed)

    with pytest.raises(error) as raised:
        trace(bad_call, two_ranks)
    assert_names(raised.value, next(iter(changes)), *mentions)


def test_good_arguments_are_good(group, two_ranks):
    """What the tables start from raises nothing itself."""

    def call_all(x, *others):
        for op in CALLS:
            op(**good_arguments(op, group, x, *others))
        return x

    trace(call_all, two_ranks)


@pytest.mark.parametrize(
    ("op", "leg"),
    [
        (ep.dispatch, "wire"),
        (ep.dispatch, "grad_wire"),
        (ep.combine, "wire"),
        (ep.combine, "grad_wire"),
        (ep.all_to_all, "wire"),
    ],
)
def test_wire_needs_whole_units(make_group, two_ranks, op, leg):
    group = make_group(two_ranks, SMALL, hidden=72)

    def bad_call(x, *others):
        return op(**good_arguments(op, group, x[:, :72], *others), **{leg: "fp8"})

    with pytest.raises(ValueError, match=f": {leg} is 'fp8'") as raised:
        trace(bad_call, two_ranks)
    assert_names(raised.value, "hidden", 72, 16, f"{leg}=None")


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_outside_shard_map(group, transform):
    inputs = (a[0] for a in make_inputs(SMALL, num_ranks=2))
    with pytest.raises(ValueError, match="shard_map"):
        transform(partial(ep.dispatch, group=group, layout="ragged"))(*inputs)


@pytest.mark.parametrize(("axis_name", "automatic"), [("ep", "('ep',)"), (("data", "ep"), "('ep',)")])
def test_shard_map_that_leaves_the_axes_of_the_group_automatic(make_group, axis_name, automatic):
    mesh = make_mesh((2, 2), ("data", "ep"))
    group = make_group(mesh, SMALL, axis_name=axis_name)
    by_rank = jax.sharding.PartitionSpec("data")
    dispatch = partial(ep.dispatch, group=group, layout="ragged")
    mapped = jax.shard_map(dispatch, mesh=mesh, in_specs=by_rank, out_specs=by_rank, axis_names={"data"})
    inputs = make_inputs(SMALL, num_ranks=2)
    with pytest.raises(ValueError, match="shard_map") as raised:
        jax.eval_shape(mapped, *(a.reshape(-1, a.shape[-1]) for a in inputs))
    assert_names(raised.value, f"axes {automatic} automatic", "('data',) manual", f"axis_name = {axis_name!r}")


def test_shard_map_over_another_mesh(group):
    def dispatch(*inputs):
        return ep.dispatch(*inputs, group=group, layout="ragged")

    for mesh in (make_mesh((1,)), make_mesh((2,), ("model",))):
        with pytest.raises(ValueError, match="mesh") as raised:
            trace(dispatch, mesh)
        assert_names(raised.value, "shard_map", "ep", 2)


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_closed_group(make_group, two_ranks, op):
    group = make_group(two_ranks, SMALL)

    def call_after_close(*inputs):
        arguments = good_arguments(op, group, *inputs)
        group.close()
        return op(**arguments)

    with pytest.raises(ValueError, match="closed"):
        trace(call_after_close, two_ranks)


@pytest.mark.parametrize("done", [ep.dispatch_done, ep.combine_done])
def test_done_of_something_else(group, two_ranks, done):
    """Neither an array nor the pending call of the other operation."""

    def done_of_array(x, *_):
        return done(x)

    def done_of_other(*inputs):
        pending = ep.dispatch_start(*inputs, group=group, layout="ragged")
        if done is ep.dispatch_done:
            recv = ep.dispatch_done(pending)
            pending = ep.combine_start(recv.x, recv)
        return done(pending)

    for bad_call in (done_of_array, done_of_other):
        with pytest.raises(TypeError) as raised:
            trace(bad_call, two_ranks)
        assert_names(raised.value, "pending", done.__name__.replace("done", "start"))


def test_weights_in_float64(group, two_ranks):
    with jax.enable_x64(True), pytest.raises(TypeError) as raised:
        trace(lambda x, i, w: ep.dispatch(x, i, w.astype(np.float64), group=group, layout="ragged"), two_ranks)
    assert_names(raised.value, "topk_weights", "float64", "float32")
