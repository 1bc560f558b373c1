"""The CUDA backend where only GPUs can show it: many programs at once, graphs, compiled programs, failures, memory."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep as ep
import oracle
from helpers import (
    COMBINE_BOUND,
    assert_combined,
    assert_same_bits,
    assert_trees_same_bits,
    run_spmd,
    spmd,
    to_numpy,
)
from shapes import SMALL, Shape, make_inputs, np_dtype, random_array
from test_examples import EXAMPLES, TINY

pytestmark = pytest.mark.gpu

SHAPE = replace(SMALL, hidden=256)
FLOAT = Shape("float", num_experts=8, top_k=2, hidden=128, tokens=24, dtype="float32")
LARGE = Shape("large", num_experts=64, top_k=8, hidden=1024, tokens=1024)

# Options of XLA: what it may put into CUDA graphs. By default it takes no fewer than five commands in a row.
IN_GRAPHS = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@pytest.fixture(scope="module")
def mesh(largest_mesh):
    return largest_mesh


def make_group(mesh, shape=SHAPE, **overrides):
    settings = {
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "max_tokens_per_rank": shape.tokens,
        "dtype": np_dtype(shape.dtype),
        "backend": "cuda",
        "timeout": 10.0,
    }
    return ep.Group(mesh, **settings | overrides)


def place(inputs, mesh):
    """Arrays with a leading axis of ranks, each rank's part on its device."""
    return jax.device_put(tuple(inputs), NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def compiled(fn, mesh, *inputs, options=None, check_vma=True):
    """The executable of `fn` on every device, which runs whatever becomes of the group that `fn` was traced with."""
    return jax.jit(spmd(fn, mesh, check_vma=check_vma)).lower(*inputs).compile(compiler_options=options)


def promised(recv):
    """What is the same on every backend, of a dispatch with zero_pad=True."""
    return recv.x, recv.counts, recv.group_sizes, recv.weights, recv.scales, recv.num_dropped


def chain(group, x, topk_idx, topk_weights):
    """Six operations, each of which needs the one before."""
    for layout in ("ragged", "expert", "ragged"):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
        x = ep.combine(recv.x, recv)
    return x


def assert_close(actual, expected, dtype):
    """For sums that another backend makes in another order; a few combines may lie behind them."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= 4 * COMBINE_BOUND[dtype] * np.linalg.norm(expected)


def assert_poison(*arrays):
    assert all(np.isnan(a.astype(np.float32)).all() for a in arrays)


# --- many programs and groups ---------------------------------------------------------------------------------------


def programs(group):
    """Functions of one rank's inputs that use every operation; each gives what is exact, and what is summed."""

    def layer(layout, options, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, zero_pad=True, **options)
        return promised(recv), ep.combine(ep.dequantize(recv), recv)

    def follow(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, group=group, layout="ragged", zero_pad=True)
        return (promised(recv), ep.dispatch_like(x[:, :32], recv)), ()

    def exchange(wire, x, topk_idx, topk_weights):
        splits = jnp.sum(jax.nn.one_hot(topk_idx[:, 0], group.num_experts, dtype=jnp.int32), axis=0)
        sent = ep.all_to_all(x, splits, group=group, wire=wire)
        return (sent.splits, ep.all_to_all_back(ep.dequantize(sent), splits, group=group)), ()

    def gradients(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
            return jnp.sum(ep.combine(recv.x, recv).astype(jnp.float32))

        return (), jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    return [
        partial(layer, "ragged", {}),
        partial(layer, "expert", {"wire": "fp8", "capacity": 4}),
        partial(layer, "ragged", {"wire": "fp8_pow2", "dequantize": True, "alignment": 8}),
        follow,
        partial(exchange, None),
        partial(exchange, "fp8"),
        gradients,
    ]


def test_a_thousand_calls_in_any_order(mesh):
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

    for batch in np.random.default_rng(0).integers(len(calls), size=(20, 50)):
        results = [calls[i]() for i in batch]
        for i, result in zip(batch, results, strict=True):
            assert_trees_same_bits(to_numpy(result), first[i])
    for group in groups:
        group.check()
        group.close()


def test_independent_chains_of_two_groups(mesh):
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
    capacity = 256 * group.num_ranks if layout == "expert" else None  # twice the mean

    def layer(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, capacity=capacity, zero_pad=True, **options)
        y = ep.dequantize(recv)
        return promised(recv), y, ep.combine(y, recv)

    with group:
        return run_spmd(layer, group.mesh, *inputs)


@pytest.mark.parametrize("options", [{}, {"wire": "fp8"}, {"wire": "fp8_pow2", "dequantize": True}], ids=str)
def test_many_tokens(mesh, layout, options):
    inputs = make_inputs(LARGE, mesh.size)
    recv, y, out = run_large(make_group(mesh, LARGE), layout, inputs, **options)
    expected, _, _ = run_large(make_group(mesh, LARGE, backend="reference"), layout, inputs, **options)
    assert_trees_same_bits(recv, expected)
    _, _, _, weights, _, _ = recv
    capacity = weights.shape[-1]
    route = oracle.route(inputs.topk_idx, num_experts=LARGE.num_experts, layout=layout, capacity=capacity)
    assert_combined(out, y, weights, route, dtype=LARGE.dtype)


@pytest.mark.parametrize("num_sms", [1, 4])
def test_fewer_multiprocessors_give_the_same_bits(mesh, layout, num_sms):
    inputs = make_inputs(LARGE, mesh.size)
    few, default = (run_large(make_group(mesh, LARGE, num_sms=n), layout, inputs) for n in (num_sms, None))
    assert_trees_same_bits(few, default)


# --- what XLA makes of the calls ------------------------------------------------------------------------------------


def test_graphs_give_the_same_bits(mesh):
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


def test_xla_adds_nothing_around_the_calls(mesh, layout):
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


def test_operands_are_waited_for(mesh):
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


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def inputs(mesh):
    return place(make_inputs(SHAPE, mesh.size), mesh)


@pytest.mark.parametrize("options", [IN_GRAPHS, NO_GRAPHS], ids=["in_graphs", "no_graphs"])
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


def assert_given_up(group, mesh, program, inputs):
    """After a failure nothing waits again: compiled programs give poison at once, and no new one is traced."""
    begun = time.monotonic()
    assert_poison(to_numpy(program(*inputs)))
    assert time.monotonic() - begun < 1
    with pytest.raises(ep.Error):
        jax.eval_shape(spmd(partial(chain, group), mesh), *inputs)


def halves(group, mesh):
    """dispatch_start and dispatch_done as programs of their own; what is pending passes between them."""

    def start(*inputs):
        return ep.dispatch_start(*inputs, group=group, layout="ragged", zero_pad=True)

    def done(pending):
        recv = ep.dispatch_done(pending)
        return recv.x, recv.counts, recv.num_dropped

    return jax.jit(spmd(start, mesh)), jax.jit(spmd(done, mesh))


def test_halves_in_programs_of_their_own(mesh, inputs):
    with make_group(mesh) as group:
        start, done = halves(group, mesh)
        first, second = start(*inputs), start(*inputs)
        expected = to_numpy(done(second))
        assert_trees_same_bits(to_numpy(done(first)), expected)
        group.check()

        done(first)  # again
        _, counts, num_dropped = to_numpy(done(start(*inputs)))
        assert (counts == 0).all()
        assert (num_dropped == -1).all()
        with pytest.raises(ep.Error, match="done before"):
            group.check()


def test_a_start_without_done(mesh, inputs):
    """It holds its slot; whoever needs that slot says so when its time is up."""
    with make_group(mesh, timeout=2.0) as group:
        start, _ = halves(group, mesh)
        program = compiled(partial(chain, group), mesh, *inputs)
        jax.block_until_ready(start(*inputs))
        assert_poison(to_numpy(program(*inputs)))
        with pytest.raises(ep.Error, match="halves are under way"):
            group.check()
        assert_given_up(group, mesh, program, inputs)


def test_ranks_in_different_calls(mesh, inputs):
    def dispatch(layout, capacity, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, capacity=capacity)
        return recv.x.reshape(-1, group.hidden), recv.weights.reshape(-1), recv.counts, recv.num_dropped

    def at_odds(*inputs):
        ragged = partial(dispatch, "ragged", 32 * group.experts_per_rank)
        return lax.cond(lax.axis_index("ep") == 0, ragged, partial(dispatch, "expert", 32), *inputs)

    with make_group(mesh) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        rows, weights, counts, num_dropped = run_spmd(at_odds, mesh, *inputs, check_vma=False)
        assert_poison(rows, weights)
        assert (counts == 0).all()
        assert (num_dropped == -1).all()
        with pytest.raises(ep.Error, match="dispatch: rank .* was in another call than rank"):
            group.check()
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_rank_that_never_comes(mesh, inputs, missing):
    missing = 0 if missing == "first" else mesh.size - 1

    def without_one(*inputs):
        def stay_away(x, topk_idx, topk_weights):
            return jnp.zeros_like(x)

        return lax.cond(lax.axis_index("ep") == missing, stay_away, partial(chain, group), *inputs)

    with make_group(mesh, timeout=2.0) as group:
        program = compiled(partial(chain, group), mesh, *inputs)
        expected = to_numpy(program(*inputs))
        incomplete = compiled(without_one, mesh, *inputs, check_vma=False)
        begun = time.monotonic()
        out = to_numpy(incomplete(*inputs))
        assert group.timeout <= time.monotonic() - begun < group.timeout + 1
        assert_poison(np.delete(out, missing, axis=0))
        with pytest.raises(ep.PeerTimeoutError) as error:
            group.check()
        assert error.value.op == "dispatch"
        assert error.value.missing_rank == missing
        assert error.value.waiting_rank in set(range(mesh.size)) - {missing}
        assert_given_up(group, mesh, program, inputs)
    with make_group(mesh) as successor:
        assert_same_bits(run_spmd(partial(chain, successor), mesh, *inputs), expected)


# --- memory ---------------------------------------------------------------------------------------------------------


def arena_bytes(group):
    """Of one rank: in each slot, for every rank, as many rows as it may send, with headers and marks.

    There are four slots if they fit in 64 MiB, else two.
    """
    header = oracle.round_up(16 * group.top_k, 128)
    payload = group.hidden * group.dtype.itemsize
    row = oracle.round_up(header + payload, 128) + 8 * (-(-payload // 512) + 1)
    slot = group.num_ranks * group.max_tokens_per_rank * row
    four = oracle.round_up(4 * slot, 256)
    return four if four <= 64 * 2**20 else oracle.round_up(2 * slot, 256)


@pytest.mark.parametrize("shape", [SHAPE, FLOAT, LARGE], ids=str)
def test_memory_bytes(mesh, shape):
    """The arena, and control memory that does not grow with the number of tokens."""
    with make_group(mesh, shape) as group:
        assert 0 < group.memory_bytes - arena_bytes(group) < 64 * 1024


def test_an_arena_that_does_not_fit(mesh, inputs):
    shape = replace(SHAPE, tokens=2**30)
    needed = arena_bytes(make_group(mesh, shape, backend="reference"))
    with pytest.raises(ep.Error, match=f"needs {needed} bytes .* max_tokens_per_rank"):
        make_group(mesh, shape)
    with make_group(mesh) as group:
        run_spmd(partial(chain, group), mesh, *inputs)
        group.check()


def test_closed_groups_give_their_memory_back(mesh):
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


def test_training_gives_the_curve_of_the_reference(mesh, tmp_path):
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
