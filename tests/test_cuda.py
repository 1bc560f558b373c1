"""The kernels under load, on GPUs or emulated: many programs at once, large calls, graphs, memory."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep as ep
import oracle
from helpers import (
    COMBINE_BOUND,
    IN_GRAPHS,
    NO_GRAPHS,
    arena_slot_bytes,
    assert_combined,
    assert_each_token_combined,
    assert_same_bits,
    assert_trees_same_bits,
    chain,
    compiled,
    in_one_process,
    num_arena_slots,
    open_group,
    place,
    run_spmd,
    spmd,
    to_numpy,
)
from jax_ep import _native
from shapes import SMALL, Shape, make_inputs, random_array
from test_examples import EXAMPLES, TINY

SHAPE = replace(SMALL, hidden=256)
FLOAT = Shape("float", num_experts=8, top_k=2, hidden=128, tokens=24, dtype="float32")
LARGE = Shape("large", num_experts=64, top_k=8, hidden=1024, tokens=1024)
LONG = Shape("long", num_experts=32, top_k=16, hidden=2888, tokens=300)
# What ffi/plan.h tells apart, on more than two ranks: rows sent in turns, small teams, blocks that share SMs or do not.
LAUNCHES = (
    Shape("in_turns", num_experts=64, top_k=8, hidden=4608, tokens=129),
    Shape("thin", num_experts=64, top_k=1, hidden=4608, tokens=129),
    Shape("dense", num_experts=64, top_k=8, hidden=7168, tokens=32),
    Shape("sparse", num_experts=64, top_k=8, hidden=7168, tokens=20),
    Shape("many_ranks", num_experts=64, top_k=8, hidden=4608, tokens=500),
)
# Emulated, on four ranks: about the least sizes that plan.h treats in the same way.
SMALLER = {
    "large": replace(LARGE, hidden=128, tokens=264),
    "long": replace(LONG, tokens=34),
    "in_turns": replace(LAUNCHES[0], hidden=2304),
    "thin": replace(LAUNCHES[1], hidden=2304, tokens=33),
    "dense": replace(LAUNCHES[2], hidden=2304),
    "sparse": replace(LAUNCHES[3], hidden=2304),
    "many_ranks": Shape("many_ranks", num_experts=64, top_k=32, hidden=768, tokens=257),
}


@pytest.fixture(scope="module")
def mesh(mesh, largest_mesh, kernel_backend):
    """All GPUs; or four emulated ones, as all of them share a CPU."""
    return mesh if kernel_backend == "emulated" else largest_mesh


@pytest.fixture
def make_group(kernel_backend):
    """make_group(mesh, shape=SHAPE, **overrides): a group that the test closes."""

    def make(mesh, shape=SHAPE, **overrides):
        return open_group(mesh, shape, **{"backend": kernel_backend, "timeout": 10.0, **overrides})

    return make


@pytest.fixture
def sized(kernel_backend):
    """sized(shape): the shape, or a smaller one that the emulated backend takes in its place."""
    return lambda shape: SMALLER.get(shape.name, shape) if kernel_backend == "emulated" else shape


def promised(recv):
    """What is the same on every backend, of a dispatch with zero_pad=True."""
    return recv.x, recv.counts, recv.group_sizes, recv.weights, recv.scales, recv.num_dropped


def assert_close(actual, expected, dtype):
    """For sums that another backend makes in another order; a few combines may lie behind them."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= 4 * COMBINE_BOUND[dtype] * np.linalg.norm(expected)


# --- many programs and groups ---------------------------------------------------------------------------------------


def programs(group):
    """Functions of one rank's inputs that use every operation; each gives what is exact, and what is summed."""

    def layer(layout, options, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, zero_pad=True, **options)
        return promised(recv), ep.combine(ep.dequantize(recv), recv)

    def follow(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, group=group, layout="ragged", zero_pad=True)
        return (promised(recv), ep.dispatch_like(x[:, :32], recv)), ()

    def exchange(options, x, topk_idx, topk_weights):
        splits = jnp.sum(jax.nn.one_hot(topk_idx[:, 0], group.num_experts, dtype=jnp.int32), axis=0)
        sent = ep.all_to_all(x, splits, group=group, **options)
        return (sent.splits, ep.all_to_all_back(ep.dequantize(sent), splits, group=group)), ()

    def gradients(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
            return jnp.sum(ep.combine(recv.x, recv).astype(jnp.float32))

        return (), jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    return [
        partial(layer, "ragged", {}),
        partial(layer, "expert", {"wire": "fp8", "dequantize": False, "capacity": 4}),
        partial(layer, "ragged", {"wire": "fp8_pow2", "alignment": 8}),
        follow,
        partial(exchange, {}),
        partial(exchange, {"wire": "fp8"}),
        partial(exchange, {"wire": "fp8", "dequantize": False}),
        gradients,
    ]


def test_a_thousand_calls_in_any_order(make_group, mesh, kernel_backend):
    """Two groups, fourteen executables, fifty calls under way at a time: each call gives what it gave at first."""
    shapes = SHAPE, FLOAT
    groups = [make_group(mesh, shape) for shape in shapes]
    calls, first = [], []
    for shape, group in zip(shapes, groups, strict=True):
        references = programs(make_group(mesh, shape, backend="reference"))
        all_inputs = [place(make_inputs(shape, mesh.size, "uneven", seed), mesh) for seed in range(2)]
        for program, reference in zip(programs(group), references, strict=True):
            run, run_reference = (jax.jit(spmd(fn, mesh)) for fn in (program, reference))
            for inputs in all_inputs:
                calls.append(partial(run, *inputs))
                exact, sums = result = to_numpy(calls[-1]())
                expected_exact, expected_sums = to_numpy(run_reference(*inputs))
                assert_trees_same_bits(exact, expected_exact)
                jax.tree.map(partial(assert_close, dtype=shape.dtype), sums, expected_sums)
                first.append(result)

    # More than 32 programs on their way to a CPU device would wait for one another.
    num_batches, batch_size = (6, 16) if kernel_backend == "emulated" else (20, 50)
    for batch in np.random.default_rng(0).integers(len(calls), size=(num_batches, batch_size)):
        results = [calls[i]() for i in batch]
        for i, result in zip(batch, results, strict=True):
            assert_trees_same_bits(to_numpy(result), first[i])
    for group in groups:
        group.check()
        group.close()


def test_independent_chains_of_two_groups(make_group, mesh):
    """XLA may run the chains at once or one after the other."""
    shapes = FLOAT, replace(FLOAT, hidden=64, tokens=5)
    all_inputs = [make_inputs(shape, mesh.size, "uneven", seed) for seed, shape in enumerate(shapes)]
    with make_group(mesh, shapes[0]) as first, make_group(mesh, shapes[1]) as second:
        both = jax.jit(spmd(lambda one, other: (chain(first, *one), chain(second, *other)), mesh))
        results = [to_numpy(both(*all_inputs)) for _ in range(5)]
        for again in results[1:]:
            assert_trees_same_bits(again, results[0])
        for out, shape, inputs in zip(results[0], shapes, all_inputs, strict=True):
            reference = make_group(mesh, shape, backend="reference")
            assert_close(out, run_spmd(partial(chain, reference), mesh, *inputs), shape.dtype)


# --- large calls ----------------------------------------------------------------------------------------------------


def run_large(group, layout, inputs, **options):
    """What dispatch promises, the experts' outputs and what combine makes of them."""
    mean = group.num_ranks * inputs.topk_idx.shape[1] * group.top_k // group.num_experts  # of an expert's rows
    capacity = 2 * mean if layout == "expert" else None

    def layer(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, capacity=capacity, zero_pad=True, **options)
        y = ep.dequantize(recv)
        return promised(recv), y, ep.combine(y, recv)

    with group:
        return run_spmd(layer, group.mesh, *inputs)


def expect_the_reference(make_group, mesh, shape, layout, inputs, options=None, **settings):
    """Rows are those of the reference, bit by bit; sums are near the oracle's."""
    options = options or {}
    recv, y, out = run_large(make_group(mesh, shape, **settings), layout, inputs, **options)
    expected, _, _ = run_large(make_group(mesh, shape, backend="reference"), layout, inputs, **options)
    assert_trees_same_bits(recv, expected)
    _, _, _, weights, _, _ = recv
    capacity = weights.shape[-1]
    route = oracle.route(inputs.topk_idx, num_experts=shape.num_experts, layout=layout, capacity=capacity)
    assert_combined(out, y, weights, route, dtype=shape.dtype)
    assert_each_token_combined(out, y, weights, route, dtype=shape.dtype)


@pytest.mark.parametrize("options", [{}, {"wire": "fp8", "dequantize": False}, {"wire": "fp8_pow2"}], ids=str)
def test_many_tokens(make_group, sized, mesh, layout, options):
    shape = sized(LARGE)
    expect_the_reference(make_group, mesh, shape, layout, make_inputs(shape, mesh.size), options)


@pytest.mark.parametrize("num_sms", [None, 4])
@pytest.mark.parametrize("routing", ["uneven", "out_of_range"])
def test_long_rows_of_many_experts(make_group, sized, mesh, layout, routing, num_sms):
    """More pieces of y than a warp asks for at once (on 2 ranks), the last of a row shorter; tokens without rows."""
    shape = sized(LONG)
    expect_the_reference(make_group, mesh, shape, layout, make_inputs(shape, mesh.size, routing), num_sms=num_sms)


@pytest.mark.parametrize("options", [{}, {"wire": "fp8", "dequantize": False}], ids=str)
@pytest.mark.parametrize("shape", LAUNCHES, ids=str)
def test_launches_of_other_shapes(make_group, sized, mesh, shape, options):
    shape = sized(shape)
    expect_the_reference(make_group, mesh, shape, "ragged", make_inputs(shape, mesh.size, "uneven"), options)


@pytest.mark.parametrize("num_sms", [1, 4])
def test_fewer_multiprocessors_give_the_same_bits(make_group, sized, mesh, layout, num_sms):
    shape = sized(LARGE)
    inputs = make_inputs(shape, mesh.size)
    few, default = (run_large(make_group(mesh, shape, num_sms=n), layout, inputs) for n in (num_sms, None))
    assert_trees_same_bits(few, default)


# --- what XLA makes of the calls ------------------------------------------------------------------------------------


def test_graphs_give_the_same_bits(make_group, mesh):
    """Results are kept, so that the buffers of the next run lie elsewhere and a captured graph must be updated."""
    with make_group(mesh) as group:
        all_inputs = [place(make_inputs(SHAPE, mesh.size, "uneven", seed), mesh) for seed in range(4)]
        captured, plain = (
            compiled(partial(chain, group), mesh, *all_inputs[0], options=options) for options in (IN_GRAPHS, NO_GRAPHS)
        )
        pairs = [(captured(*inputs), plain(*inputs)) for inputs in all_inputs * 3]
        for from_graph, expected in pairs:
            assert_same_bits(from_graph, expected)
        group.check()


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[str, ...]
    text: str


class Module:
    """Compiled HLO, taken apart."""

    def __init__(self, text):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[str]] = {}  # the opcodes of each
        for line in text.splitlines():
            if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
                opcodes = self.computations[header[1]] = []
            elif found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)", line):
                name, opcode, rest = found.groups()
                operands = re.findall(r"%([\w.-]+)", re.split(r"\), \w+=", rest)[0])
                self.instructions[name] = Instruction(opcode, tuple(operands), rest)
                opcodes.append(opcode)

    def calls(self, target=r"\w+"):
        """The instructions that call jax_ep, by name."""
        pattern = re.compile(f'custom_call_target="jax_ep_{target}"')
        return {name: i for name, i in self.instructions.items() if pattern.search(i.text)}

    def source(self, name):
        """The instruction that computed the value, behind those that only name it differently."""
        while (instruction := self.instructions[name]).opcode in ("bitcast", "get-tuple-element"):
            (name,) = instruction.operands
        return instruction

    def users(self, name):
        """The instructions that read the value, under whatever name."""
        for user, instruction in self.instructions.items():
            if name not in instruction.operands:
                continue
            if instruction.opcode == "bitcast":
                yield from self.users(user)
            else:
                yield instruction

    def only_moves(self, instruction):
        """Whether it changes nothing but where a value lies."""
        opcodes = {instruction.opcode}
        if instruction.opcode == "fusion":
            opcodes = set(self.computations[re.search(r"calls=%?([\w.-]+)", instruction.text)[1]])
        opcodes -= {"parameter", "bitcast"}
        return bool(opcodes) and opcodes <= {"copy", "copy-start", "copy-done", "transpose"}


def test_xla_adds_nothing_around_the_calls(make_group, mesh, layout):
    """A whole layer, compiled: no collective, and no copy of what goes into the calls or of the rows they return."""
    inputs = place(make_inputs(SHAPE, mesh.size), mesh)
    shape = (mesh.size, SHAPE.num_experts // mesh.size, SHAPE.hidden, SHAPE.hidden)
    (experts,) = place([random_array(np.random.default_rng(0), shape, SHAPE.dtype)], mesh)

    def layer(experts, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        if layout == "ragged":
            y = lax.ragged_dot(recv.x, experts, recv.group_sizes)
        else:
            y = jnp.einsum("ech,ehf->ecf", recv.x, experts)
        return ep.combine(y, recv)

    with make_group(mesh) as group:
        module = Module(compiled(layer, mesh, experts, *inputs, options=NO_GRAPHS).as_text())
    opcodes = {instruction.opcode for instruction in module.instructions.values()}
    assert not {o for o in opcodes if re.match("all-|reduce-scatter|collective-|ragged-all-", o)}
    assert len(module.calls()) == 2
    for instruction in module.calls().values():
        assert not [name for name in instruction.operands if module.only_moves(module.source(name))]
    (dispatch,) = module.calls("dispatch")
    rows = [
        name
        for name, i in module.instructions.items()
        if i.opcode == "get-tuple-element" and dispatch in i.operands and "index=0" in i.text
    ]
    readers = list(itertools.chain.from_iterable(module.users(name) for name in rows))
    assert readers
    assert not [reader for reader in readers if module.only_moves(reader)]


def test_operands_are_waited_for(make_group, mesh):
    """In graphs, XLA starts what follows a GEMM of its own before that is through."""
    shape = replace(SHAPE, hidden=32)
    x, topk_idx, topk_weights = place(make_inputs(shape, mesh.size, "uneven"), mesh)
    weights = (mesh.size, shape.num_experts // mesh.size, shape.hidden, shape.hidden)
    (experts,) = place([random_array(np.random.default_rng(0), weights, shape.dtype)], mesh)

    def gradients(x, topk_idx, topk_weights, experts):
        def loss(x, topk_weights):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
            y = jnp.tanh(lax.ragged_dot(recv.x, experts, recv.group_sizes))
            return jnp.sum(ep.combine(y, recv).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    with make_group(mesh, shape) as group:
        inputs = x, topk_idx, topk_weights, experts
        program = compiled(gradients, mesh, *inputs, options=IN_GRAPHS)
        one_by_one = [to_numpy(program(*inputs)) for _ in range(3)]
        results = [program(*inputs) for _ in range(200)]
        for result in results:
            assert_trees_same_bits(to_numpy(result), one_by_one[-1])


# --- devices --------------------------------------------------------------------------------------------------------


def test_devices_are_known_and_fit(kernel_backend):
    native = getattr(_native, kernel_backend)
    ordinals = [0, 1]
    assert [native.unsupported_device(ordinal) for ordinal in ordinals] == ["", ""]
    assert native.unsupported_pair(ordinals) == ""
    uuids = [native.device_uuid(ordinal) for ordinal in ordinals]
    assert [native.find_device(uuid) for uuid in uuids] == ordinals
    assert native.find_device(bytes(16)) == native.find_device(uuids[0][:8]) == -1


def test_experts_that_do_not_fit_in_shared_memory(make_group, mesh):
    with pytest.raises(ep.Error, match=r"Group: \d+ experts on \d ranks do not fit .*; spread them over more ranks"):
        make_group(mesh, replace(SHAPE, num_experts=mesh.size * 50_000))


# --- memory ---------------------------------------------------------------------------------------------------------


def arena_bytes(group):
    """Of one rank."""
    return oracle.round_up(num_arena_slots(group) * arena_slot_bytes(group), 256)


@pytest.mark.parametrize("shape", [SHAPE, FLOAT, LARGE], ids=str)
def test_memory_bytes(make_group, mesh, shape):
    """The arena, and control memory that does not grow with the number of tokens."""
    with make_group(mesh, shape) as group:
        assert 0 < group.memory_bytes - arena_bytes(group) < 64 * 1024


def test_an_arena_that_does_not_fit(make_group, mesh):
    shape = replace(SHAPE, tokens=min(2**30, 2**32 // mesh.size**2 - 1))  # as many as a group may have
    needed = arena_bytes(make_group(mesh, shape, backend="reference"))
    with pytest.raises(ep.Error, match=f"needs {needed} bytes .* max_tokens_per_rank, .* max_arena_bytes"):
        make_group(mesh, shape, max_arena_bytes=2**62)
    with make_group(mesh) as group:
        run_spmd(partial(chain, group), mesh, *make_inputs(SHAPE, mesh.size))
        group.check()


@in_one_process
def test_closed_groups_give_their_memory_back(make_group, mesh):
    def used():
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return sum(map(int, subprocess.check_output(command, text=True).split())) * 2**20

    def open_and_close():
        with make_group(mesh, replace(LARGE, tokens=16 * LARGE.tokens)) as group:
            return group.memory_bytes

    open_and_close()  # loads the kernels
    before = used()
    arenas = [open_and_close() for _ in range(20)]
    assert used() - before < min(arenas)


# --- training -------------------------------------------------------------------------------------------------------


@in_one_process
def test_training_gives_the_curve_of_the_reference(make_group, mesh, tmp_path):
    def losses(backend):
        out = tmp_path / backend
        options = [*TINY, "--steps=20", "--dtype=float32", f"--mesh=1x{mesh.size}", f"--backend={backend}"]
        # This process holds most of the memory that JAX would take at once.
        # In TF32, the backends' order of summation would soon be amplified.
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        command = [sys.executable, EXAMPLES / "train_moe.py", *options, "--out", out]
        subprocess.run(command, env=env, check=True, timeout=200)
        return json.loads((out / "train_moe.json").read_text())["loss"]

    np.testing.assert_allclose(losses("cuda"), losses("reference"), rtol=0, atol=1e-3)
