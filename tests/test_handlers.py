"""The handlers of the CUDA backend refuse buffers of another type or shape than their kernels expect.

The public functions refuse them while tracing. So these tests call the FFI targets directly.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
from helpers import make_mesh, open_group, spmd, wait_for_all_devices
from jax_ep import _wires
from jax_ep._backends import targets
from jax_ep._backends.cuda import balance_work_words
from jax_ep._backends.targets import NONE, Result
from jax_ep._constants import Layout
from shapes import SMALL

CAPACITY = 64
ABSENT = {"x_scales", "out_scales"}  # rows travel in bfloat16
ONLY_OF_TOKEN = {"named_slot", "recv_topk_idx", "num_rows_per_rank"}  # only with the layout "token"
# A handler compares some other buffers with these.
GIVES_SIZES = ("x", "g", "y", "topk_idx", "weights", "experts", "row_of_pair", "pair_of_row", "group_sizes")
ATTRIBUTES = {
    "layout": Layout.RAGGED,
    "capacity": CAPACITY,
    "alignment": 1,
    "cast": 0,
    "dequantize": False,
    "zero_pad": False,
    "scales_format": 0,
    "tolerance": 0,
    "clears_slots": True,
}
OPS = {  # in messages
    "combine_back": "combine (backward)",
    "copy_experts": "replicate",
    "dispatch_back": "dispatch (backward)",
    "reduce_back": "reduce (backward)",
    "replicate_back": "replicate (backward)",
}


@pytest.fixture
def group(kernel_backend, mesh):
    with open_group(mesh, SMALL, backend=kernel_backend, replicas=1) as group:
        yield group


def buffers(group, declared, layout):
    """The type of each buffer, by name, in a call that a handler takes."""
    num_tokens = SMALL.tokens
    is_token = layout == Layout.TOKEN
    absent = ABSENT if is_token else ABSENT | ONLY_OF_TOKEN
    sizes = {
        "T": (num_tokens,),
        "M": (num_tokens,),
        "P": (num_tokens * (2 if group._impl._has_network else 1),),
        "K": (group.top_k,),
        "H": (group.hidden,),
        "S": (_wires.num_scales(group.hidden),),
        "R": (group.num_ranks,),
        "RC": (group.num_ranks * group.slots_per_rank,),
        "B": (group.replicas,),
        "C": (group.slots_per_rank,),
        "L": (group.experts_per_rank,),
        "W": (balance_work_words(group),),
        "D": (64,),
        "N": (CAPACITY,),
        "*rows": (CAPACITY,),
        "*pairs": (CAPACITY, group.top_k) if is_token else (CAPACITY,),
        "*scales": (CAPACITY, _wires.num_scales(group.hidden)),
        "2": (2,),
    }
    return {
        array.name: NONE
        if array.name in absent
        else Result(sum((sizes[dim] for dim in array.dims.split()), ()), array.dtype or group.dtype)
        for array in declared
    }


def call(group, target, changed=None, mesh=None, **attributes):
    """Calls a target with zeros, and with the type that `changed` has for one operand or result."""
    mesh = mesh or group.mesh
    attributes = ATTRIBUTES | attributes
    operands = buffers(group, target.operands, attributes["layout"])
    results = buffers(group, target.results, attributes["layout"])
    for name, result in (changed or {}).items():
        (operands if name in operands else results)[name] = result
    attributes = {name: value for name, value in attributes.items() if name in target.attributes}

    operands.pop("axis_index", None)  # which _call adds
    add_call = group._impl._call_local if target in targets.LOCAL else group._impl._call

    def on_device(x):
        given = {name: jnp.zeros(shape, dtype) + x.astype(dtype) for name, (shape, dtype) in operands.items()}
        got = add_call(target, given, results, **attributes)
        return jnp.stack([jnp.sum(array).astype(jnp.float32) for array in got.values()])

    return jax.jit(spmd(on_device, mesh))(np.zeros(mesh.size, np.float32))


def variants(result):
    """The same type with one more row, and with another element type."""
    if result is not NONE:
        yield Result((*((result.shape[0] + 1,) if result.shape else (1,)), *result.shape[1:]), result.dtype)
        yield Result(result.shape, jnp.int16)


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        *((target, Layout.RAGGED) for target in (*targets.TARGETS, *(target.start for target in targets.SPLIT))),
        *((target, Layout.TOKEN) for target in (targets.DISPATCH, targets.DISPATCH.start, targets.DISPATCH_BACK)),
        *((target, Layout.RAGGED) for target in targets.LOCAL),
    ],
    ids=lambda value: value.name.lower(),
)
def test_buffers_of_other_types_and_shapes(group, target, layout):
    op = OPS.get(target.name, target.name)
    for array in (*target.operands, *target.results):
        if array.name == "axis_index":
            continue
        for changed in variants(buffers(group, [array], layout)[array.name]):
            with pytest.raises(jax.errors.JaxRuntimeError) as error:
                wait_for_all_devices(out := call(group, target, {array.name: changed}, layout=layout))
                jax.block_until_ready(out)
            name = r"\w+" if array.name in GIVES_SIZES else array.name
            shape = r"\[[\d, ]*\]"
            assert error.match(f"{re.escape(op)}: {name} is .* {shape}; it must be .* {shape}")
    group.check()


def test_tolerances_that_no_plan_has(group):
    for tolerance in (-1, group.num_ranks * 4096 + 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"balance: .* 1 replicas and tolerance is {tolerance};"):
            jax.block_until_ready(call(group, targets.BALANCE, tolerance=tolerance))


def test_ranks_in_runs_of_their_own(kernel_backend):
    """In one run of a program, all devices make the group's first call. Here, each makes it in another run."""
    devices = make_mesh((2,))
    with open_group(devices, SMALL, backend=kernel_backend, replicas=1, timeout=200.0) as group:
        first, second = (jax.sharding.Mesh([device], group.mesh.axis_names) for device in devices.devices.flat)
        out = call(group, targets.DISPATCH, mesh=first)
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"in different order: operation 1 of Group.* one run of a program on device 0, .* device 1. Call the",
        ):
            jax.block_until_ready(call(group, targets.DISPATCH, mesh=second))
        jax.block_until_ready(out)  # soon, not after the time-out
        message = "ranks 1 and 0 run programs with operations of this group in different order; call the programs from"
        with pytest.raises(ep.Error, match=message):
            group.check()


def test_experts_are_copied_in_place(group):
    with pytest.raises(jax.errors.JaxRuntimeError, match="replicate: .* out must have the memory of experts"):
        jax.block_until_ready(call(group, targets.REPLICATE))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="replicate .backward.: .* out must have the memory of experts"
    ):
        jax.block_until_ready(call(group, targets.REPLICATE_BACK))


def test_a_message_in_full(group):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(call(group, targets.COMBINE, {"row_weights": Result((CAPACITY, 2), jnp.int32)}))
    message = f"combine: row_weights is int32 [{CAPACITY}, 2]; it must be float32 [{CAPACITY}]"
    assert message in str(error.value)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(call(group, targets.COMBINE, {"y": Result((CAPACITY, SMALL.hidden), jnp.int8)}))
    assert f"combine: y is int8 [{CAPACITY}, {SMALL.hidden}]; it must be float32, float16 or bfloat16 [" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("target", "num_rows", "hidden"),
    [
        (targets.DISPATCH, {"x": SMALL.tokens, "out": CAPACITY}, 0),
        (targets.DISPATCH, {"x": SMALL.tokens, "out": CAPACITY}, 4),
        (targets.DISPATCH, {"x": SMALL.tokens, "out": CAPACITY}, 12),
        # There is no case combine-0, because XLA removes a call whose only result is empty.
        (targets.COMBINE, {"y": CAPACITY, "out": SMALL.tokens}, 12),
        (targets.EXPAND, {"x": SMALL.tokens, "out": CAPACITY}, 12),
        (targets.REDUCE, {"y": CAPACITY, "out": SMALL.tokens}, 12),
    ],
    ids=["dispatch-0", "dispatch-4", "dispatch-12", "combine-12", "expand-12", "reduce-12"],
)
def test_rows_that_are_not_whole_units(group, target, num_rows, hidden):
    changed = {name: Result((number, hidden), group.dtype) for name, number in num_rows.items()}
    num_bytes = hidden * group.dtype.itemsize
    message = f"{target.name}: a row has {num_bytes} bytes in transit; it must have 16 or a multiple of 16"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(group, target, changed))


@pytest.mark.parametrize("target", targets.LOCAL, ids=lambda target: target.name)
def test_top_k_above_32(group, target):
    wide = {"row_of_pair": Result((SMALL.tokens, 33), jnp.int32)}
    message = rf"row_of_pair is int32 \[{SMALL.tokens}, 33\]; it must be int32 \[{SMALL.tokens}, 32\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(group, target, wide))


@pytest.mark.parametrize(
    "target", [targets.COMBINE, targets.COMBINE.start, targets.DISPATCH_BACK, targets.COMBINE_BACK], ids=str
)
def test_rows_and_sums_that_no_wire_carries(kernel_backend, mesh, target):
    message = "the rows have 72 channels; rows that travel in fp8 must have a multiple of 16"
    with (
        open_group(mesh, SMALL, backend=kernel_backend, hidden=72) as group,
        pytest.raises(jax.errors.JaxRuntimeError, match=message),
    ):
        wait_for_all_devices(out := call(group, target, cast=1))
        jax.block_until_ready(out)


def test_combine_back_refuses_to_cast_float32(group):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        float32 = {"g": Result((SMALL.tokens, SMALL.hidden), jnp.float32)}
        jax.block_until_ready(call(group, targets.COMBINE_BACK, float32, cast=1))
    assert f"combine (backward): g is float32 [{SMALL.tokens}, {SMALL.hidden}]; it must be bfloat16" in str(error.value)


@pytest.mark.parametrize("wrong", [{"layout": 7}, {"alignment": 0}, {"capacity": -1}], ids=str)
def test_attributes_that_no_layout_has(group, wrong):
    with pytest.raises(jax.errors.JaxRuntimeError, match="dispatch: layout is .* capacity is .* and alignment is"):
        jax.block_until_ready(call(group, targets.DISPATCH, **wrong))


@pytest.mark.parametrize("wrong", [{"scales_format": 4}, {"scales_format": 1, "capacity": CAPACITY - 1}], ids=str)
def test_a_format_that_no_scales_have(group, wrong):
    with pytest.raises(jax.errors.JaxRuntimeError, match="dispatch: scales_format is .*; scales_format must be"):
        jax.block_until_ready(call(group, targets.DISPATCH, **wrong))
