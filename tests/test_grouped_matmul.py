"""grouped_matmul against a dense oracle: one NumPy matrix product per group, in float64."""

import importlib.util
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import _native
from jax_ep.moe import _grouped_matmul
from jax_ep.moe._grouped_matmul import grouped_matmul
from jax_ep.moe._portable_matmul import portable_matmul

K, N = 24, 40
SIZES = {
    "ragged": [3, 5, 1, 4],
    "with_empty_groups": [0, 7, 0, 6],
    "one_hot_group": [0, 0, 13, 0],
    "no_rows": [0, 0, 0, 0],
    "one_group": [13],
}
SIZES_WITH_COPIES = {  # of the groups of w, of the groups of copies
    "ragged": ([3, 5, 1], [4]),
    "with_empty_groups": ([0, 7, 2], [0, 6, 0]),
    "rows_of_copies_only": ([0, 0], [9, 4]),
    "rows_of_w_only": ([5, 8], [0, 0]),
    "no_copies": ([3, 5], []),
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
RAGGED = ["ragged_dot"]
if importlib.util.find_spec("tokamax"):
    RAGGED.append("tokamax")
CASES = [(implementation, "ragged") for implementation in RAGGED]
CASES.append(("einsum", "expert"))
needs_hopper = pytest.mark.skipif(
    _native.grouped_matmul_reason(jax.devices()) is not None, reason="needs a Hopper GPU and the grouped GEMM"
)
GROUPED = [pytest.param("grouped", layout, marks=needs_hopper) for layout in ("ragged", "expert")]
HAS_NO_KERNEL = [("tokamax", "float32"), ("grouped", "float32")]
CASES_OF_DTYPES = [
    pytest.param(*case, dtype, marks=needs_hopper if case[0] == "grouped" else ())
    for case in [*CASES, ("grouped", "ragged"), ("grouped", "expert")]
    for dtype in TOLERANCES
    if (case[0], dtype) not in HAS_NO_KERNEL
]


def arrays(sizes, layout, dtype, num_beyond, beyond=0.0):
    """rows, w, group_sizes, dy and a mask of the valid rows; rows and dy hold `beyond` in all other rows."""
    rng = np.random.default_rng(len(sizes) + sum(sizes))
    capacity = max(sizes) + num_beyond
    if layout == "expert":
        valid = np.arange(capacity) < np.array(sizes)[:, None]
    else:
        valid = np.arange(sum(sizes) + num_beyond) < sum(sizes)

    def random(*shape):
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype))  # as rounded to dtype

    rows, dy = (np.where(valid[..., None], random(*valid.shape, size), beyond) for size in (K, N))
    as_array = [jnp.asarray(array, dtype) for array in (rows, random(len(sizes), K, N), dy)]
    return as_array[0], as_array[1], jnp.array(sizes, jnp.int32), as_array[2], valid


def oracle(rows, w, dy, valid, sizes):
    """(out, gradient of rows, gradient of w) in float64; zeros beyond the groups."""
    rows, w, dy = (np.asarray(array, np.float64) for array in (rows, w, dy))
    out, d_rows, d_w = np.zeros(dy.shape), np.zeros(rows.shape), np.zeros(w.shape)
    index = np.argwhere(valid)  # in the order of the groups, in both layouts
    for g, group in enumerate(np.split(index, np.cumsum(sizes)[:-1])):
        at = tuple(group.T)
        out[at], d_rows[at], d_w[g] = rows[at] @ w[g], dy[at] @ w[g].T, rows[at].T @ dy[at]
    return out, d_rows, d_w


def run(rows, w, group_sizes, dy, implementation, copies=None, matmul=grouped_matmul):
    """The value, and the gradients of rows, of w and, if they are given, of copies."""

    @jax.jit
    def value_and_gradients(rows, w, copies, group_sizes, dy):
        def multiply(rows, w, copies):
            return matmul(rows, w, group_sizes, implementation=implementation, copies=copies)

        out, vjp = jax.vjp(multiply, rows, w, copies)
        return out, *vjp(dy)

    results = value_and_gradients(rows, w, copies, group_sizes, dy)
    return [np.asarray(array, np.float64) for array in results if array is not None]


def expect_close(found, expected, tolerance):
    scale = max(np.linalg.norm(expected), 1e-30)
    assert np.linalg.norm(found - expected) <= tolerance * scale


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("implementation", "layout", "dtype"), CASES_OF_DTYPES)
def test_value_and_gradients(implementation, layout, dtype, sizes):
    rows, w, group_sizes, dy, valid = arrays(sizes, layout, dtype, num_beyond=3)
    out, d_rows, d_w = run(rows, w, group_sizes, dy, implementation)
    expected = oracle(rows, w, dy, valid, sizes)
    expect_close(out[valid], expected[0][valid], TOLERANCES[dtype])
    expect_close(d_rows, expected[1], TOLERANCES[dtype])
    expect_close(d_w, expected[2], TOLERANCES[dtype])


@pytest.mark.parametrize("matmul", [grouped_matmul, portable_matmul])
@pytest.mark.parametrize(("home_sizes", "copies_sizes"), SIZES_WITH_COPIES.values(), ids=SIZES_WITH_COPIES)
@pytest.mark.parametrize(("implementation", "layout", "dtype"), CASES_OF_DTYPES)
def test_value_and_gradients_with_copies(implementation, layout, dtype, home_sizes, copies_sizes, matmul):
    num_home, sizes = len(home_sizes), home_sizes + copies_sizes
    rows, w, group_sizes, dy, valid = arrays(sizes, layout, dtype, num_beyond=3)
    out, d_rows, d_w, d_copies = run(
        rows, w[:num_home], group_sizes, dy, implementation, copies=w[num_home:], matmul=matmul
    )
    expected = oracle(rows, w, dy, valid, sizes)
    expect_close(out[valid], expected[0][valid], TOLERANCES[dtype])
    expect_close(d_rows, expected[1], TOLERANCES[dtype])
    expect_close(d_w, expected[2][:num_home], TOLERANCES[dtype])
    expect_close(d_copies, expected[2][num_home:], TOLERANCES[dtype])


@pytest.mark.parametrize(("implementation", "layout"), [*CASES, *GROUPED])
def test_vmap_with_copies(implementation, layout):
    """The weights are common to all elements of the vmap; the copies are not."""
    sizes = [0, 7, 2, 4, 6]
    rows, w, group_sizes, dy, valid = arrays(sizes, layout, "bfloat16", num_beyond=3)
    dtype = jnp.bfloat16 if implementation in ("tokamax", "grouped") else jnp.float32
    rows, w, dy = (array.astype(dtype) for array in (rows, w, dy))

    def loss(w, copies, factor):
        out = portable_matmul(rows * factor, w, group_sizes, implementation=implementation, copies=copies * factor)
        return jnp.sum(jnp.where(valid[..., None], out * dy, 0).astype(jnp.float32))

    copies, factors = jnp.stack([w[3:], 2 * w[3:]]), jnp.array([1, 2], dtype)
    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, 0, 0)))
    d_w, d_copies = gradients(w[:3], copies, factors)
    expected = oracle(rows, w, dy, valid, sizes)[2]
    for i, factor in enumerate([1, 2]):
        tolerance = TOLERANCES[jnp.dtype(dtype).name]
        expect_close(np.asarray(d_w[i], np.float64), factor * expected[:3], tolerance)
        expect_close(np.asarray(d_copies[i], np.float64), factor**2 * expected[3:], tolerance)


@pytest.mark.parametrize(("num_copies", "num_operands", "num_results"), [(None, 3, 2), (0, 4, 3), (2, 4, 3)])
def test_grouped_passes_both_arrays_to_the_kernels(monkeypatch, num_copies, num_operands, num_results):
    monkeypatch.setattr(_native, "grouped_matmul", SimpleNamespace(workspace_bytes=lambda num_groups: 128))
    num_groups = 3 + (num_copies or 0)
    rows, w, dy = (jnp.zeros(shape, jnp.bfloat16) for shape in ((20, K), (3, K, N), (20, N)))
    copies = None if num_copies is None else jnp.zeros((num_copies, K, N), jnp.bfloat16)

    def value_and_gradients(rows, w, copies, group_sizes, dy):
        def multiply(rows, w, copies):
            return grouped_matmul(rows, w, group_sizes, implementation="grouped", copies=copies)

        out, vjp = jax.vjp(multiply, rows, w, copies)
        return out, vjp(dy)

    traced = jax.jit(value_and_gradients).trace(rows, w, copies, jnp.zeros(num_groups, jnp.int32), dy)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "concatenate" not in program and "slice" not in program
    calls = re.findall(rf"@{_grouped_matmul.TARGET}\(.*product = (\d).* : \((.*)\) -> \((.*)\)", program)
    found = {int(product): (of.count("tensor"), to.count("tensor")) for product, of, to in calls}
    assert "leaves_empty_copies = false" in program and "leaves_empty_copies = true" not in program
    assert len(calls) == 3 and found == {0: (num_operands, 2), 1: (num_operands, 2), 2: (3, num_results)}


@pytest.mark.parametrize(("implementation", "layout"), [*CASES, *GROUPED])
def test_rows_beyond_the_groups_contribute_nothing(implementation, layout):
    sizes = SIZES["with_empty_groups"]
    rows, w, group_sizes, dy, valid = arrays(sizes, layout, "float32", num_beyond=5, beyond=np.nan)
    if implementation in ("tokamax", "grouped"):
        rows, w, dy = (array.astype(jnp.bfloat16) for array in (rows, w, dy))
    out, d_rows, d_w = run(rows, w, group_sizes, dy, implementation)
    expected = oracle(rows, w, dy, valid, sizes)
    tolerance = TOLERANCES[rows.dtype.name]
    expect_close(out[valid], expected[0][valid], tolerance)
    assert not d_rows[~valid].any()
    expect_close(d_rows, expected[1], tolerance)
    expect_close(d_w, expected[2], tolerance)


@needs_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grouped_with_more_groups_than_a_block_has_threads(dtype):
    sizes = [(7 * g) % 4 for g in range(2500)]
    rows, w, group_sizes, dy, valid = arrays(sizes, "ragged", dtype, num_beyond=70)
    for found, expected in zip(
        run(rows, w, group_sizes, dy, "grouped"), oracle(rows, w, dy, valid, sizes), strict=True
    ):
        at = valid if found.shape == dy.shape else ...
        expect_close(found[at], expected[at], TOLERANCES[dtype])


@needs_hopper
@pytest.mark.parametrize(
    ("layout", "given", "meant"),
    [
        ("ragged", [4, -3, 0, 5], [4, 0, 0, 5]),
        ("ragged", [4, 9, 5, 2], [4, 5, 0, 0]),  # there are 9 rows
        ("expert", [-1, 3, 8, 99], [0, 3, 5, 5]),  # there is room for 5
    ],
)
def test_sizes_that_do_not_fit_reach_no_other_rows(layout, given, meant):
    rows, w, _, dy, valid = arrays(meant, layout, "bfloat16", num_beyond=0)
    out, d_rows, d_w = run(rows, w, jnp.array(given, jnp.int32), dy, "grouped")
    expected = oracle(rows, w, dy, valid, meant)
    expect_close(out[valid], expected[0][valid], TOLERANCES["bfloat16"])
    expect_close(d_rows, expected[1], TOLERANCES["bfloat16"])
    expect_close(d_w, expected[2], TOLERANCES["bfloat16"])


@needs_hopper
@pytest.mark.parametrize("layout", ["ragged", "expert"])
def test_grouped_waits_for_its_operands_in_cuda_graphs(layout):
    """Each product reads what the kernel before it wrote. XLA captures the calls of the loop in CUDA graphs."""
    sizes = [300, 0, 900, 100]
    rows, w, group_sizes, _, valid = arrays(sizes, layout, "bfloat16", num_beyond=0)
    square = jnp.asarray(np.random.default_rng(0).standard_normal((len(sizes), K, K)) / K**0.5, jnp.bfloat16)

    @jax.jit
    def chain(rows, group_sizes):
        for _ in range(12):
            rows = grouped_matmul(rows * 1.5, square, group_sizes // 1, implementation="grouped")
        return rows

    first = np.asarray(chain(rows, group_sizes), np.float64)
    for _ in range(20):
        assert np.array_equal(np.asarray(chain(rows, group_sizes), np.float64)[valid], first[valid])
    expected = np.asarray(rows, np.float64)
    index = np.argwhere(valid)
    for _ in range(12):
        expected = np.array(jnp.asarray(expected * 1.5, jnp.bfloat16), np.float64)
        for g, group in enumerate(np.split(index, np.cumsum(sizes)[:-1])):
            at = tuple(group.T)
            expected[at] = expected[at] @ np.asarray(square[g], np.float64)
        expected = np.array(jnp.asarray(expected, jnp.bfloat16), np.float64)
    expect_close(first[valid], expected[valid], 4 * TOLERANCES["bfloat16"])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("layout", ["ragged", "expert"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_may_be_replicated_in_shard_map(check_vma, layout):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    rows, w, group_sizes, dy, valid = arrays(SIZES["ragged"], layout, "float32", num_beyond=3)
    rows, dy = (jnp.stack([array, 2 * array]) for array in (rows, dy))
    spec = jax.sharding.PartitionSpec("ep")

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, jax.sharding.PartitionSpec(), spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    def multiply(rows, w, dy):
        implementation = "einsum" if layout == "expert" else "ragged_dot"
        return grouped_matmul(rows[0], w, group_sizes, implementation=implementation)[None] * dy

    d_w = jax.grad(lambda w: multiply(rows, w, dy).sum())(w)
    expect_close(np.asarray(d_w), 5 * oracle(rows[0], w, dy[0], valid, SIZES["ragged"])[2], TOLERANCES["float32"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"implementation": "cublas"}, ValueError, "'grouped', 'einsum', 'ragged_dot', 'tokamax'"),
        ({"implementation": "einsum"}, ValueError, r"rows \[G, C, K\], the layout \"expert\""),
        ({"rows": (2, 3, 4), "implementation": "ragged_dot"}, ValueError, r"rows \[M, K\], the layout \"ragged\""),
        ({"rows": (3,)}, ValueError, r"rows has shape \(3,\)"),
        ({"rows": (5, 3)}, ValueError, "w has shape .* rows has K = 3"),
        ({"group_sizes": (3,)}, ValueError, "group_sizes has shape .* G = 2"),
        ({"w": (0, 4, 6), "group_sizes": (0,)}, ValueError, r"w has shape \(0, 4, 6\); .* at least one group"),
        ({"w_dtype": "bfloat16"}, TypeError, "w has dtype bfloat16; it must be float32"),
        ({"rows_dtype": "int32"}, TypeError, "the dtype of rows"),
        ({"copies": (2, 3, 6)}, ValueError, r"copies has shape \(2, 3, 6\); .* w has K = 4 and N = 6"),
        ({"copies": (4, 6)}, ValueError, r"copies has shape \(4, 6\); it must be \[G2, K, N\]"),
        ({"copies": (1, 4, 6), "copies_dtype": "bfloat16"}, TypeError, "copies has dtype bfloat16; it must be float32"),
        ({"copies": (1, 4, 6)}, ValueError, "group_sizes has shape .* G = 3"),
        (
            {"rows": (2, 5, 4), "copies": (1, 4, 6), "implementation": "einsum"},
            ValueError,
            "rows has shape .* with G = 3, the number of groups of w and copies",
        ),
        ({"rows": (3, 5, 4), "implementation": "einsum"}, ValueError, "with G = 2, the number of groups of w$"),
        ({"implementation": "grouped"}, ValueError, 'cannot multiply these arrays: .*; use "einsum" or "ragged_dot"'),
    ],
)
def test_errors(change, error, words):
    shapes = {"rows": (5, 4), "w": (2, 4, 6), "group_sizes": (2,)}
    dtypes = {"rows": "float32", "w": "float32", "group_sizes": "int32", "copies": "float32"}
    for name, value in change.items():
        if name.endswith("_dtype"):
            dtypes[name.removesuffix("_dtype")] = value
        elif name != "implementation":
            shapes[name] = value
    given = {name: jnp.zeros(shapes[name], dtypes[name]) for name in shapes}
    with pytest.raises(error, match=words):
        grouped_matmul(**given, implementation=change.get("implementation", "ragged_dot"))


def test_grouped_needs_its_module_a_dtype_aligned_channels_and_hopper_gpus(monkeypatch):
    def reason(dtype="bfloat16", channels=(64, 128), capabilities=("9.0", "9.0")):
        devices = [SimpleNamespace(device_kind="a GPU", compute_capability=c) for c in capabilities]
        return _grouped_matmul.no_grouped_reason(jnp.dtype(dtype), channels, devices)

    monkeypatch.setattr(_native, "grouped_matmul", None)
    assert "built without nvcc or without CUTLASS" in reason()
    monkeypatch.setattr(_native, "grouped_matmul", object())
    assert reason() is None and reason("float16") is None
    assert "the dtype is float32" in reason("float32")
    assert "60 channels are not a multiple of 8" in reason(channels=(64, 60))
    assert "a GPU is no Hopper GPU" in reason(capabilities=("9.0", "10.0"))
    assert "is no Hopper GPU" in _grouped_matmul.no_grouped_reason(jnp.dtype("bfloat16"), (64,), jax.devices("cpu"))
