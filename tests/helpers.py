"""Run a function on every device of a mesh, NumPy in and NumPy out, and compare with the oracle."""

import contextlib
import functools
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep as ep
import oracle
from jax_ep import _backends, _native
from shapes import Inputs, Shape, make_inputs, np_dtype, random_array

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def load_program(path: str) -> types.ModuleType:
    """The module of a program outside the package, such as "benchmarks/overlap.py"."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


# The command jax-ep of the jax_ep under test, whether that is installed or not. Start it with cwd=TESTS: Python takes
# modules from the folder that it starts in, and jax_ep/ of a checkout has no native extensions.
JAX_EP = [sys.executable, "-c", "import sys; from jax_ep._cli import main; sys.exit(main())"]

COMBINE_BOUND = {"bfloat16": 5e-3, "float16": 6e-4, "float32": 1e-6}

# Options of XLA: what it may put into CUDA graphs. By default it takes no fewer than five commands in a row.
IN_GRAPHS = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# How long emulated GPUs wait for the host before they let time pass to the next time-out, in real seconds.
PATIENCE_S = 20

# Backends without native code. They hold no memory outside of XLA's and cannot fail on a device.
PURE_JAX = ("reference", "collectives")

# Under jax-ep launch every process runs the tests.
ONE_OF_SEVERAL = "JAX_COORDINATOR_ADDRESS" in os.environ
in_one_process = pytest.mark.skipif(ONE_OF_SEVERAL, reason="starts processes, or looks at all memory")


def make_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...] = ("ep",)) -> Mesh:
    """A mesh over the first devices; the test is skipped where there are too few, or none of them is here."""
    size = int(np.prod(shape))
    if size > len(jax.devices()):
        pytest.skip(f"needs {size} devices, there are {len(jax.devices())}")
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(shape), axis_names)
    if not mesh.local_devices:
        pytest.skip("the mesh has no device of this process")
    return mesh


def mesh_axis_of(mesh: Mesh, axis_name: str) -> Mesh:
    """The devices of a mesh of one axis, with another name for the axis."""
    return Mesh(mesh.devices, (axis_name,))


def without_gpus(monkeypatch: pytest.MonkeyPatch, **functions: Callable) -> None:
    """From here on groups are of the CUDA backend, whose native half does nothing, or calls `functions`."""
    idle = {
        "device_uuid": lambda ordinal: bytes(16),
        "open_group": lambda group_id, **config: None,
        "close_group": lambda group_id: None,
        "group_bytes": lambda group_id: 0,
        "group_round_tokens": lambda group_id: 2**31 - 1,
        "group_failure": lambda group_id: None,
        "group_stats": lambda group_id: [],
    }
    monkeypatch.setattr(_native, "cuda", types.SimpleNamespace(**idle | functions))
    monkeypatch.setattr(_backends, "choose", lambda *arguments: _backends.Choice("cuda"))


def open_group(mesh: Mesh, shape: Shape, **settings) -> ep.Group:
    """The group of a named shape along the axis "ep"; `settings` override those of the shape."""
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k, "hidden": shape.hidden}
    more = {"max_tokens_per_rank": shape.tokens, "dtype": np_dtype(shape.dtype)}
    return ep.Group(mesh, **sizes | more | settings)


def arena_slot_bytes(group: ep.Group) -> int:
    """The size of a slot of the CUDA backend's arena: for each rank, room for the rows that it may send.

    A row has a header, the payload and escape masks.
    """
    header = oracle.round_up(16 * group.top_k, 128)
    payload = group.hidden * group.dtype.itemsize
    row = oracle.round_up(header + payload, 128) + 8 * (-(-payload // 512) + 1)
    return group.num_ranks * group.max_tokens_per_rank * row


def num_arena_slots(group: ep.Group) -> int:
    """How many operations of the group may be under way at once: four if their arena slots fit in 64 MiB, else two."""
    return 4 if oracle.round_up(4 * arena_slot_bytes(group), 256) <= 64 * 2**20 else 2


@contextlib.contextmanager
def emulated_patience(seconds: float) -> Iterator[None]:
    """Emulated GPUs wait so long for the host in the block. Nothing, without them."""
    if _native.emulated is None:
        yield
        return
    _native.emulated.set_patience(seconds)
    try:
        yield
    finally:
        _native.emulated.set_patience(PATIENCE_S)


def spmd(fn: Callable, mesh: Mesh, *, check_vma: bool = True, replicated: tuple[int, ...] = ()) -> Callable:
    """shard_map of fn over all axes of mesh, for global arrays whose leading axes are those of the mesh.

    fn sees and returns one device's part, without those axes. Arguments listed in `replicated` have no such axes:
    every device gets the whole.
    """
    lead = mesh.devices.ndim
    split = PartitionSpec(*mesh.axis_names)

    def on_device(*args):
        args = [
            arg if i in replicated else jax.tree.map(lambda a: a.reshape(a.shape[lead:]), arg)
            for i, arg in enumerate(args)
        ]
        return jax.tree.map(lambda a: a[(None,) * lead], fn(*args))

    @functools.wraps(fn)
    def run(*args):
        in_specs = tuple(PartitionSpec() if i in replicated else split for i in range(len(args)))
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=check_vma)
        return mapped(*args)

    return run


def run_spmd(fn: Callable, mesh: Mesh, *args, **options):
    """`fn` compiled and run once on every device; a pytree of NumPy arrays."""
    return to_numpy(jax.jit(spmd(fn, mesh, **options))(*args))


def compiled(fn: Callable, mesh: Mesh, *inputs, options: dict | None = None, check_vma: bool = True) -> Callable:
    """The executable of `fn` on every device, which runs whatever becomes of the group that `fn` was traced with."""
    return jax.jit(spmd(fn, mesh, check_vma=check_vma)).lower(*inputs).compile(compiler_options=options)


def place(inputs: Sequence[np.ndarray], mesh: Mesh) -> tuple[jax.Array, ...]:
    """Arrays whose leading axes are those of mesh, each device's part on it."""
    return jax.device_put(tuple(inputs), NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def chain(group: ep.Group, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array, layers: int = 3) -> jax.Array:
    """Two operations per layer, each of which needs the one before; six in all by default."""
    for layer in range(layers):
        recv = ep.dispatch(
            x, topk_idx, topk_weights, group=group, layout=("ragged", "expert")[layer % 2], zero_pad=True
        )
        x = ep.combine(recv.x, recv)
    return x


def exchange_rows(group, x, splits):
    sent = ep.all_to_all(x, splits, group=group)
    return ep.all_to_all_back(sent.x, splits, group=group)


def there_and_back(group, layout, x, topk_idx):
    recv = ep.dispatch(x, topk_idx, group=group, layout=layout, zero_pad=True)
    return ep.combine(recv.x, recv)


FP8_ROWS = {"wire": "fp8_pow2", "dequantize": False}


def every_operation(group, x, topk_idx, topk_weights, splits):
    """Two trees of results: rows, which are the same bits on every backend, and sums."""

    def layer(x, topk_weights, layout, **wire):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True, **wire)
        return recv, ep.combine(recv.x, recv)

    def split_phase(x, layout):
        started = ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
        done = ep.dispatch_done(started)
        return done.x, ep.combine_done(ep.combine_start(done.x, done))

    rows, sums = {"all_to_all": exchange_rows(group, x, splits)}, {}
    for layout in ("expert", "ragged"):
        recv, out = layer(x, topk_weights, layout)
        _, transpose = jax.vjp(lambda x, weights, layout=layout: layer(x, weights, layout)[1], x, topk_weights)
        fp8 = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True, **FP8_ROWS)
        rows[layout] = {
            "dispatch": (recv.x, recv.weights, recv.counts),
            "dispatch_like": ep.dispatch_like(x, recv),
            "fp8": (fp8.x, fp8.scales),
        }
        sums[layout] = {
            "combine": out,
            "gradients": transpose(out),
            "dequantize": layer(x, topk_weights, layout, wire="fp8")[1],
        }
        # Behind the others, of which XLA could put more between a start and its done than there is room for.
        rows, sums, x = jax.lax.optimization_barrier((rows, sums, x))
        (rows[layout]["split-phase"], sums[layout]["split-phase"]), x = jax.lax.optimization_barrier(
            (split_phase(x, layout), x)
        )
    return rows, sums


def inputs_of_every_operation(shape: Shape, num_ranks: int) -> tuple[np.ndarray, ...]:
    """Rows of bfloat16, some of which look like units that have not arrived; and splits for all_to_all."""
    x, topk_idx, topk_weights = make_inputs(shape, num_ranks, "uniform")
    words = x.view(np.uint32)
    words[:, 0] = 0xFDFDFDFD  # the sentinel
    words[:, 1, 7::4] = 0xFDFDFDFC  # with the words of the next line, its escape
    words[:, 1, 4:7] = words[:, 1, 8:11] = 0xFDFDFDFD
    splits = [np.bincount(choices[:, 0], minlength=shape.num_experts) for choices in topk_idx]
    return x, topk_idx, topk_weights, np.array(splits, np.int32)


def rows_between_ranks(topk_idx: np.ndarray, shape: Shape) -> np.ndarray:
    """Which tokens go from each rank to each rank: [source, tokens, rank] bool."""
    num_ranks = len(topk_idx)
    owner = np.where(topk_idx >= 0, topk_idx // (shape.num_experts // num_ranks), -1)
    return (owner[..., None] == np.arange(num_ranks)).any(axis=2)


def traffic(topk_idx: np.ndarray, shape: Shape, node_size: int, *, by_node: bool) -> np.ndarray:
    """[rank, (rows, bytes)]: what each rank sends over a network in a dispatch and a combine.

    A row crosses the network once per far rank that it goes to. If rows go by node, it crosses once per far node, to
    the rank of the same number there. combine sends as many rows back.
    """
    goes, ranks = rows_between_ranks(topk_idx, shape), np.arange(len(topk_idx))
    if by_node:
        nodes = goes.reshape(*goes.shape[:2], -1, node_size).any(axis=3)
        goes = np.where(ranks % node_size == (ranks % node_size)[:, None, None], nodes.repeat(node_size, axis=2), False)
    is_far = ranks // node_size != (ranks // node_size)[:, None]
    rows = goes.sum(axis=1) * is_far
    sent, returned = rows.sum(axis=1), rows.sum(axis=0)
    row_bytes = shape.hidden * np_dtype(shape.dtype).itemsize
    header_bytes = oracle.round_up(16 * shape.top_k, 128)
    return np.stack([sent + returned, sent * (header_bytes + row_bytes) + returned * row_bytes], axis=1)


def spin(steps: jax.Array) -> jax.Array:
    """0, an int32, after as many steps of a loop, which no compiler can foresee: a delay for what is added to it."""

    def step(carry):
        left, state = carry
        return left - 1, state * 1664525 + 1013904223

    _, state = lax.while_loop(lambda carry: carry[0] > 0, step, (steps, steps))
    return jnp.minimum(state & 0x7FFFFFFF, 0)


def steps_per_second(mesh: Mesh, spinning: np.ndarray) -> float:
    """How fast `spin` is on those devices of mesh where `spinning` is 1, and not 0, all at once."""
    run, steps = jax.jit(spmd(spin, mesh)), 1000 * spinning.astype(np.int32)

    def seconds() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(run(steps))
        return time.perf_counter() - begun

    seconds()  # compiles
    while seconds() < 0.05:
        steps *= 2
    return steps.max() / min(seconds() for _ in range(3))  # other work on the devices can only slow a run


def wait_for_all_devices(out) -> None:
    """Waits until a program has ended on every device, with an error or without."""
    for leaf in jax.tree.leaves(out):
        for shard in getattr(leaf, "addressable_shards", ()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                shard.data.block_until_ready()


def to_numpy(tree):
    """NumPy arrays of a program's results. An error of a device comes when the program has ended on all devices.

    What a failed program still does on other devices would reach the next equal group, as nobody keeps its results.
    """
    wait_for_all_devices(tree)
    return jax.tree.map(_whole, tree)


def _whole(array) -> np.ndarray:
    """The array with the parts of it that other processes hold."""
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    replicated = jax.sharding.NamedSharding(array.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda a: a, out_shardings=replicated)(array).addressable_data(0))


def assert_same_bits(actual, expected, what: str = "") -> None:
    """Equal dtype, shape and bits: -0 is not 0, and a NaN equals itself."""
    actual, expected = (np.ascontiguousarray(_whole(array)) for array in (actual, expected))
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(bits), expected.view(bits), err_msg=what)


def assert_trees_same_bits(actual, expected) -> None:
    """The same structure, and the same bits in every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b, jax.tree_util.keystr(path))


def assert_dispatched(recv, expected: oracle.Dispatched, *, zero_pad: bool = False) -> None:
    """All that the contract promises about recv; with zero_pad, x is zero in every row that holds no token."""
    route = expected.route
    for name in ("counts", "group_sizes", "num_dropped"):
        assert_same_bits(getattr(recv, name), getattr(route, name), name)
    assert_same_bits(recv.weights, expected.weights, "weights")
    assert recv.x.shape == expected.x.shape
    promised = np.ones_like(route.is_token) if zero_pad else route.is_token | route.is_alignment
    assert_same_bits(recv.x[promised], expected.x[promised], "x")
    if expected.scales is None:
        assert recv.scales is None
    else:
        assert recv.scales.shape == expected.scales.shape
        assert_same_bits(recv.scales[route.is_token], expected.scales[route.is_token], "scales")


def order_sensitive_inputs(shape: Shape, num_ranks: int, seed: int = 0) -> Inputs:
    """Inputs whose float32 sums have other bits in another order. `shape` must have top_k=8.

    The weights of a token are signed powers of two in random order, far apart, and each large weight comes with both
    signs. A small term is lost if the sum adds it while a large term is in the sum. A product of a row and a power of
    two is exact, so that a fused multiply-add gives the same bits as a multiplication and an addition. Every second
    token names eight neighbouring experts, so that one rank has several of its terms.
    """
    rng = np.random.default_rng(seed)
    x, topk_idx, _ = make_inputs(shape, num_ranks, "uniform", seed)
    first = 4 * rng.integers(shape.num_experts // 4 - 1, size=topk_idx.shape[:2])
    neighbours = first[..., None] + rng.permuted(np.broadcast_to(np.arange(8), topk_idx.shape), axis=-1)
    topk_idx[:, ::2] = neighbours[:, ::2]
    weights = np.float32([2.0**60, -(2.0**60), 2.0**30, -(2.0**30), 1.0, -0.5, 2.0**-9, 2.0**-8])
    return Inputs(x, topk_idx, rng.permuted(np.broadcast_to(weights, topk_idx.shape), axis=-1))


def assert_each_token_combined(out, y, weights, route: oracle.Route, *, dtype: str) -> None:
    """assert_each_row_close for the tokens of out [R, T, H]."""
    assert_each_row_close(out, *oracle.combine(y, weights, route), dtype=dtype)


def assert_each_row_close(actual, total, magnitude, *, dtype: str) -> None:
    """Each row, along the last axis, lies within twice the contract's bound for `dtype`.

    The contract's bound is for all rows together. Among many rows, the error of a row that is lost stays below it.
    """
    error, size = (np.linalg.norm(array, axis=-1) for array in (actual.astype(np.float64) - total, magnitude))
    # Subnormal values of float16 are rounded to a multiple of the least of them.
    least = 8 * float(jnp.finfo(dtype).smallest_subnormal) * np.sqrt(total.shape[-1])
    assert (error <= 2 * COMBINE_BOUND[dtype] * size + least).all()


def assert_combined(out, y, weights, route: oracle.Route, *, dtype: str) -> None:
    """out [R, T, H] lies within the contract's bound for y of this dtype."""
    total, magnitude = oracle.combine(y, weights, route)
    assert out.shape == total.shape
    error = np.linalg.norm(out.astype(np.float64) - total)
    assert error <= COMBINE_BOUND[dtype] * np.linalg.norm(magnitude)
    assert not out[magnitude == 0].any(), "a token without any row must be zero"


def random_rows(route: oracle.Route, hidden: int, dtype: str, seed: int = 1) -> np.ndarray:
    """Experts' outputs [R, *rows, H]: NaN in every row that holds no token, as nobody may read those."""
    y = random_array(np.random.default_rng(seed), (*route.is_token.shape, hidden), dtype)
    y[~route.is_token] = np.array(np.nan, np_dtype(dtype))
    return y
