"""The native extensions: how they load, the C++ unit tests, layout arithmetic against Python's, and dispatch_layout."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from jax_ep import _dispatch_layout, _layouts, _native

ROOT = Path(__file__).parents[1]
needs_native = pytest.mark.skipif(_native.cpu is None, reason="the native extensions are not built")
SIZES = [
    {"num_experts": 8, "num_ranks": 1, "num_nodes": 1},
    {"num_experts": 8, "num_ranks": 8, "num_nodes": 2},
    {"num_experts": 24, "num_ranks": 6, "num_nodes": 3},
    {"num_experts": 256, "num_ranks": 64, "num_nodes": 8},
]


def script(name):
    """The module of scripts/ of this name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_outlive_comments():
    """The hash that ties GPU results to sources does not change with what is not compiled."""
    native_hash = script("native_hash")
    source = rb"""f("// \" /*", 1);  // "one"
    /* two
       lines */ g( 2 );"""
    assert native_hash.compiled(source) == rb"""f("// \" /*", 1); g( 2 );"""


def test_the_last_run_of_each_step_counts(monkeypatch, tmp_path):
    native_hash = script("native_hash")
    monkeypatch.setattr(native_hash, "RESULTS", tmp_path)
    assert "there are no GPU results" in native_hash.check()

    def write(date, present, **steps):
        result = {
            "date": date,
            "native_hash": native_hash.native_hash() if present else "another",
            "device": "GPU",
            "num_devices": 2,
            "steps": {name: {"ok": ok} for name, ok in steps.items()},
        }
        (tmp_path / f"gpu_check-{date}.json").write_text(json.dumps(result))

    write("1", False, tests=True)
    assert "have not run on a GPU" in native_hash.check()
    write("2", True, tests=True, layer=False)
    assert "where layer failed" in native_hash.check()
    write("3", True, layer=True)
    assert native_hash.check().endswith("ran on 2 x GPU, last on 3: layer, tests.")


def test_results_tell_with_what_each_step_was_run(tmp_path):
    """Also where another call of the script has run another step with other settings."""

    def check(step, **settings):
        env = {"PATH": os.environ["PATH"], "PYTHON": "true", "GPU_CHECK_LOGS": str(tmp_path)}  # true: does nothing
        done = subprocess.run(
            [ROOT / "scripts" / "gpu_check.sh", step], env=env | settings, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    former = tmp_path / "tests-1.xml"
    former.write_text("a former run's")
    check("tests", PYTEST_ARGS="-k 'a or b=c'", CUDA_VISIBLE_DEVICES="0,1")
    check("bench-7-grad", STEP_TIMEOUT="60")
    check("layer")
    steps = {path.stem: script("gpu_report").step(path) for path in tmp_path.glob("*.status")}
    assert all(step["ok"] for step in steps.values())
    for part in ("tests-1", "tests-2"):
        assert steps[part]["arguments"] == {"PYTEST_ARGS": "-k 'a or b=c'", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert steps["bench-7-grad"]["arguments"] == {"STEP_TIMEOUT": "60"}
    assert "arguments" not in steps["layer"]
    assert not former.exists()


def test_cpp_unit_tests(tmp_path):
    """Builds and runs tests/native, with this environment's CMake or else the system's."""
    search_path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake, ctest = (shutil.which(name, path=search_path) for name in ("cmake", "ctest"))
    for command in (
        [cmake, "-S", Path(__file__).parent / "native", "-B", tmp_path],
        [cmake, "--build", tmp_path],
        [ctest, "--test-dir", tmp_path, "--output-on-failure"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_results_have_the_tests_of_all_parts(tmp_path):
    for part, failing in (("tests-1", ""), ("tests-2", "<failure/>")):
        (tmp_path / f"{part}.xml").write_text(
            f'<testsuites><testsuite tests="2" failures="{int(bool(failing))}" errors="0" skipped="1">'
            f'<testcase classname="c" name="{part}">{failing}</testcase>'
            '<testcase classname="c" name="left out"><skipped message="why"/></testcase></testsuite></testsuites>'
        )
    tests = script("gpu_report").tests
    assert tests([tmp_path / "tests-2.xml", tmp_path / "tests-3.xml"])["tests"] == 2  # part 3 was cut: it has no xml
    found = tests([tmp_path / "tests-1.xml", tmp_path / "tests-2.xml"])
    assert (found["tests"], found["failures"], found["skipped"]) == (4, 1, 2)
    assert (found["failing"], found["skip_reasons"]) == (["c::tests-2"], ["why"])
    assert tests([tmp_path / "tests-3.xml"]) is None


# Loading


def test_cuda_is_loaded_or_explained():
    if _native.cuda is None:
        assert "install" in _native.cuda_reason()
    else:
        assert _native.cuda_reason() is None


@pytest.mark.parametrize(
    ("broken", "error", "reason"),
    [
        (("_cuda",), ModuleNotFoundError("No module"), "jax_ep has no CUDA extension"),
        (("_cuda",), ImportError("libfoo.so: no such file"), r"does not load \(libfoo.so: no such file\)"),
        (("_cpu", "_cuda"), ModuleNotFoundError("No module"), "a folder without native extensions; install it"),
    ],
)
@needs_native
def test_import_survives_missing_extensions(broken, error, reason):
    """In a fresh process whose import system cannot load the extensions in `broken`."""
    script = f"""
import re, sys
class Broken:
    def find_spec(name, path=None, target=None):
        if name in {tuple(f"jax_ep.{name}" for name in broken)}:
            raise {error!r}
sys.meta_path.insert(0, Broken)
import jax.numpy as jnp, jax_ep as ep
from jax_ep import _native
assert re.search({reason!r}, _native.cuda_reason()), _native.cuda_reason()
layout = ep.dispatch_layout(jnp.array([[0, 1, 3]], jnp.int32), num_experts=4, num_ranks=2)
assert layout.num_tokens_per_rank.tolist() == [1, 1]
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


# Layout arithmetic


@needs_native
@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_layout_arithmetic_is_that_of_python(layout, alignment):
    rng = np.random.default_rng(alignment)
    for experts_per_rank in (1, 3, 16):
        sizes = {"num_ranks": 4, "num_tokens": 37, "top_k": 6, "experts_per_rank": experts_per_rank}
        default = _layouts.default_capacity(layout, **sizes, alignment=alignment)
        assert _native.cpu.default_capacity(layout, **sizes, alignment=alignment) == default
        need = rng.integers(0, 60, experts_per_rank).astype(np.int32)
        for capacity in (0, alignment, 5 * alignment, 1000 * alignment):
            python = _layouts.place(jnp.asarray(need), layout=layout, capacity=capacity, alignment=alignment)
            native = _native.cpu.place_groups(need.tolist(), layout=layout, capacity=capacity, alignment=alignment)
            assert native == list(zip(*(np.asarray(field).tolist() for field in python[:3]), strict=True))


@needs_native
def test_unknown_layout_is_named():
    with pytest.raises(ValueError, match="layout is 'jagged', but must be 'expert' or 'ragged'"):
        _native.cpu.place_groups([1], layout="jagged", capacity=8, alignment=1)


# dispatch_layout


def random_idx(num_experts, shape, seed=0):
    """Experts, among them some ids just outside [0, num_experts) on both sides and duplicates in a row."""
    return np.random.default_rng(seed).integers(-2, num_experts + 2, shape).astype(np.int32)


def expected_layout(topk_idx, *, num_experts, num_ranks, num_nodes):
    """The contract's words as plain loops."""
    per_expert = np.zeros(num_experts, np.int32)
    in_rank = np.zeros((len(topk_idx), num_ranks), bool)
    in_node = np.zeros((len(topk_idx), num_nodes), bool)
    for token, experts in enumerate(topk_idx):
        for expert in experts:
            if 0 <= expert < num_experts:
                per_expert[expert] += 1
                in_rank[token, expert * num_ranks // num_experts] = True
                in_node[token, expert * num_nodes // num_experts] = True
    return ep.DispatchLayout(in_rank.sum(0, dtype=np.int32), in_node.sum(0, dtype=np.int32), per_expert, in_rank)


def assert_layout(got, expected):
    for field in ep.DispatchLayout._fields:
        assert getattr(got, field).dtype == getattr(expected, field).dtype, field
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), err_msg=field)


@pytest.fixture(params=["as installed", "pure JAX"])
def dispatch_layout(request):
    """ep.dispatch_layout, and what stands in for it on other platforms and where there are no native extensions."""
    return ep.dispatch_layout if request.param == "as installed" else _dispatch_layout._pure_jax_layout


@needs_native
def test_native_target_is_what_runs():
    lowered = jax.jit(partial(ep.dispatch_layout, **SIZES[0])).lower(random_idx(8, (4, 2)))
    native = _native.cuda if jax.default_backend() == "gpu" else _native.cpu
    assert ("jax_ep_dispatch_layout" in lowered.compile().as_text()) == (native is not None)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (33, 8), (300, 2), (5, 0)], ids=str)
def test_counts(dispatch_layout, sizes, shape):
    topk_idx = random_idx(sizes["num_experts"], shape)
    expected = expected_layout(topk_idx, **sizes)
    assert_layout(dispatch_layout(topk_idx, **sizes), expected)
    assert_layout(jax.jit(lambda idx: dispatch_layout(idx, **sizes))(topk_idx), expected)


def test_one_node_by_default():
    topk_idx = random_idx(8, (20, 3))
    layout = ep.dispatch_layout(topk_idx, num_experts=8, num_ranks=4)
    assert_layout(layout, expected_layout(topk_idx, num_experts=8, num_ranks=4, num_nodes=1))


def test_dependent_calls_in_one_program(dispatch_layout):
    """Each call's ids come from the counts before it; on GPUs these are enough calls for XLA to capture in a graph."""
    sizes = {"num_experts": 8, "num_ranks": 4, "num_nodes": 2}

    @jax.jit
    def chain(topk_idx):
        layouts = []
        for _ in range(8):
            layouts.append(dispatch_layout(topk_idx, **sizes))
            topk_idx = (topk_idx + layouts[-1].num_tokens_per_rank[:3]) % 10 - 1
        return layouts

    topk_idx = random_idx(8, (40, 3))
    for _ in range(3):
        for layout in chain(topk_idx):
            assert_layout(layout, expected_layout(topk_idx, **sizes))
            topk_idx = (topk_idx + np.asarray(layout.num_tokens_per_rank)[:3]) % 10 - 1


def test_vmap(dispatch_layout):
    sizes = SIZES[2]
    topk_idx = random_idx(sizes["num_experts"], (2, 3, 17, 4))
    layouts = jax.vmap(jax.vmap(lambda idx: dispatch_layout(idx, **sizes)))(topk_idx)
    for i, j in np.ndindex(2, 3):
        one = jax.tree.map(lambda field, at=(i, j): field[at], layouts)
        assert_layout(one, expected_layout(topk_idx[i, j], **sizes))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
def test_shard_map(dispatch_layout, mesh, check_vma, replicated):
    """Inside shard_map each device sees its own tokens, and results vary over the mesh exactly if the ids do."""
    sizes, num_devices = SIZES[1], mesh.devices.size
    topk_idx = random_idx(8, (num_devices * 5, 3))
    spec = P() if replicated else P("ep")
    layouts = jax.shard_map(
        lambda idx: jax.tree.map(lambda field: field[None], dispatch_layout(idx, **sizes)),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )(topk_idx)
    parts = topk_idx[None] if replicated else topk_idx.reshape(num_devices, 5, 3)
    for rank, part in enumerate(parts):
        assert_layout(jax.tree.map(lambda field, at=rank: field[at], layouts), expected_layout(part, **sizes))


def test_inside_scan_and_grad(dispatch_layout):
    """Counts of a router's choice may stand in a loss: they are integers, so that no gradient goes through them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)

    def loss(logits):
        def layer(total, logits):
            weights, topk_idx = jax.lax.top_k(jax.nn.softmax(logits), 2)
            counts = dispatch_layout(topk_idx, num_experts=8, num_ranks=4, num_nodes=1).num_tokens_per_expert
            return total + jnp.sum(weights * counts[topk_idx]), None

        return jax.lax.scan(layer, jnp.float32(0), logits)[0]

    gradient = jax.jit(jax.grad(loss))(logits)
    assert jnp.all(jnp.isfinite(gradient)) and jnp.any(gradient != 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_idx": jnp.zeros((4,), jnp.int32)}, ValueError, r"topk_idx has shape \(4,\).*\[T, K\]"),
        ({"topk_idx": jnp.zeros((4, 2), jnp.float32)}, TypeError, "topk_idx has dtype float32.*int32"),
        ({"topk_idx": [[1, 2]]}, TypeError, "topk_idx is a list.*array"),
        ({"num_experts": 10}, ValueError, "num_experts is 10.*multiple of num_ranks = 4, e.g. 12"),
        ({"num_experts": 2**31}, ValueError, "num_experts is 2147483648.*1 to 2147483647"),
        ({"num_experts": 8.0}, TypeError, r"num_experts is 8\.0, a float.*int"),
        ({"num_ranks": 0}, ValueError, "num_ranks is 0.*at least 1"),
        ({"num_ranks": True}, TypeError, "num_ranks is True, a bool.*int"),
        ({"num_nodes": 3}, ValueError, "num_ranks is 4.*multiple of num_nodes = 3, e.g. 6"),
        ({"num_nodes": -1}, ValueError, "num_nodes is -1.*at least 1"),
    ],
)
def test_errors_while_tracing(change, error, message):
    arguments = {"topk_idx": jnp.zeros((4, 2), jnp.int32), "num_experts": 8, "num_ranks": 4} | change
    with pytest.raises(error, match=f"^dispatch_layout: {message}"):
        ep.dispatch_layout(arguments.pop("topk_idx"), **arguments)


def call_target(topk_idx, shapes, **attributes):
    """Calls the FFI target as jax_ep itself never would."""
    results = [
        jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "is_token_in_rank" else jnp.int32)
        for name, shape in shapes.items()
    ]
    attributes = {name: np.int32(value) for name, value in attributes.items()}
    return jax.block_until_ready(jax.ffi.ffi_call("jax_ep_dispatch_layout", results)(topk_idx, **attributes))


@needs_native
@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ({"num_tokens_per_rank": (5,)}, {}, r"num_tokens_per_rank has shape \[5\] but must have \[4\]"),
        ({"num_tokens_per_expert": (7,)}, {}, r"num_tokens_per_expert has shape \[7\] but must have \[8\]"),
        ({"is_token_in_rank": (6, 5)}, {}, r"is_token_in_rank has shape \[6, 5\] but must have \[6, 4\]"),
        ({"num_tokens_per_node": (2, 1)}, {}, "rank"),
        ({}, {"num_nodes": 3}, "num_nodes = 3 must divide num_ranks = 4"),
        ({}, {"num_ranks": 0}, "num_ranks = 0 must divide num_experts = 8, and both be positive"),
    ],
)
def test_errors_of_the_handler(shapes, attributes, message):
    shapes = {
        "num_tokens_per_rank": (4,),
        "num_tokens_per_node": (2,),
        "num_tokens_per_expert": (8,),
        "is_token_in_rank": (6, 4),
    } | shapes
    attributes = {"num_experts": 8, "num_ranks": 4, "num_nodes": 2} | attributes
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_target(jnp.zeros((6, 3), jnp.int32), shapes, **attributes)


@pytest.mark.skipif(_native.cuda is None or jax.default_backend() != "gpu", reason="needs a GPU")
def test_too_many_experts_for_the_cuda_kernel():
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_experts / num_ranks = 20000 must be at most 12288"):
        jax.block_until_ready(ep.dispatch_layout(jnp.zeros((1, 1), jnp.int32), num_experts=20000, num_ranks=1))
