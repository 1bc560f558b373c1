"""The native extensions: how they load, the C++ unit tests, and layout arithmetic against Python's; and scripts/."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import _layouts, _native

ROOT = Path(__file__).parents[1]
needs_native = pytest.mark.skipif(_native.cpu is None, reason="the native extensions are not built")


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
    for part in ("tests-1", "tests-2", "tests-3"):
        assert steps[part]["arguments"] == {"PYTEST_ARGS": "-k 'a or b=c'", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert steps["bench-7-grad"]["arguments"] == {"STEP_TIMEOUT": "60"}
    assert "arguments" not in steps["layer"]
    assert not former.exists()


def test_training_curves_that_are_apart_are_found():
    mismatches = script("compare_training").mismatches
    curve = np.linspace(6, 1.5, 300).tolist()

    def changed(step, difference):
        return [loss + difference if number == step else loss for number, loss in enumerate(curve, start=1)]

    assert mismatches(curve, curve) == []
    assert mismatches(curve, changed(90, 0.9e-4)) == mismatches(curve, changed(91, 0.039)) == []
    for step, difference in ((1, 2e-4), (90, -2e-4), (91, 0.05), (300, -0.05), (7, np.nan)):
        (line,) = mismatches(curve, changed(step, difference))
        assert line.startswith(f"step {step}: ")
    assert mismatches(curve, curve[:-1]) == ["one run has 300 steps, the other run has 299"]


def test_the_comparison_of_training_runs_fails_if_they_are_apart(tmp_path):
    for name, last in (("one", 2.0), ("same", 2.01), ("apart", 2.1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_moe.json").write_text(json.dumps({"loss": [6.0] * 299 + [last]}))
    command = [sys.executable, ROOT / "scripts" / "compare_training.py", tmp_path / "one"]
    for other, status in (("same", 0), ("apart", 1), ("missing", 1)):
        assert subprocess.run([*command, tmp_path / other], capture_output=True).returncode == status


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
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


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
