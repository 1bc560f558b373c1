"""The native extensions: how they load, the C++ unit tests, and layout arithmetic against Python's."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import _layouts, _native

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CMAKE_LISTS = (ROOT / "CMakeLists.txt").read_text()
needs_native = pytest.mark.skipif(_native.cpu is None, reason="the native extensions are not built")


def test_cpp_unit_tests(tmp_path):
    """Builds and runs tests/native, with this environment's CMake or else the system's."""
    search_path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake, ctest = (shutil.which(name, path=search_path) for name in ("cmake", "ctest"))
    for command in (
        [cmake, "-S", TESTS / "native", "-B", tmp_path],
        [cmake, "--build", tmp_path],
        [ctest, "--test-dir", tmp_path, "--output-on-failure"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("source", ["balance", "replicate", "start"])
def test_small_kernels_compile_for_a_network(source, tmp_path):
    """They compile with the flags of _nvshmem, without NVSHMEM's wheel.

    Device code is linked there. So a function that is not inlined must not take more registers than a kernel that
    calls it may have.
    """
    options = [
        "-std=c++17",
        "-O3",
        "-arch=sm_90",
        "-cubin",
        "-rdc=true",
        "-DJAX_EP_NETWORK",
        "--expt-relaxed-constexpr",
    ]
    command = ["nvcc", *options, "-I", ROOT, ROOT / "ffi" / "cuda" / f"{source}.cu", "-o", tmp_path / "kernels"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_build_without_compiler(tmp_path):
    """Without a C++ compiler, CMake builds no extension. It fails if one is asked for, or if the compiler is broken."""
    search_path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake, make = (shutil.which(name, path=search_path) for name in ("cmake", "make"))

    def configure(folder, *options):
        command = [cmake, "-S", ROOT, "-B", tmp_path / folder, "-G", "Unix Makefiles", f"-DCMAKE_MAKE_PROGRAM={make}"]
        return subprocess.run([*command, *options], env={"PATH": "/nowhere"}, capture_output=True, text=True)

    done = configure("auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jax_ep is installed without its native extensions" in " ".join(done.stderr.split())
    assert not (tmp_path / "auto" / "CMakeFiles" / "_cpu.dir").exists()
    assert configure("off", "-DJAX_EP_CUDA=off").returncode == 0
    for option in ("CUDA", "NVSHMEM", "CUTLASS", "EMULATOR"):
        assert (
            f"JAX_EP_{option} is ON, but there is no C++ compiler" in configure(option, f"-DJAX_EP_{option}=ON").stderr
        )
    broken = configure("broken", "-DCMAKE_CXX_COMPILER=/bin/false")
    assert broken.returncode != 0 and "is not able to compile" in " ".join(broken.stderr.split())


@pytest.mark.parametrize(
    ("gpus", "architectures"),
    [("9.0\\n9.0\\n", "90"), ("9.0\\n10.0\\n", "90;100"), ("10.0\\n", "90;100"), ("", "90;100"), (None, "90;100")],
)
def test_code_for_the_gpus_of_the_machine(gpus, architectures, tmp_path):
    """An install compiles CUDA code for Hopper only, if nvidia-smi knows Hopper GPUs only. None: it fails."""
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n" if gpus is None else f"#!/bin/sh\nprintf '{gpus}'\n")
    nvidia_smi.chmod(0o755)
    block = re.search(r"^  if\(NOT DEFINED CMAKE_CUDA_ARCHITECTURES\)\n.*?^  message.*?$", CMAKE_LISTS, re.S | re.M)
    script = tmp_path / "architectures.cmake"
    script.write_text(block[0])
    cmake = shutil.which("cmake", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    search_path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run([cmake, "-P", script], env={"PATH": search_path}, capture_output=True, text=True)
    assert f"Architectures of CUDA code: {architectures}\n" in done.stdout, done.stdout + done.stderr


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
        (
            ("_cpu", "_cuda"),
            ModuleNotFoundError("No module"),
            r"installed without a C\+\+ compiler, or Python imports the folder",
        ),
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
    subprocess.run([sys.executable, "-c", script], cwd=TESTS, check=True)


@needs_native
def test_extensions_have_separate_nanobind_domains():
    """nanobind warns if two modules register the same type in one domain.

    It would then pass objects of one module to functions of the other. The test can only fail where both _cuda and
    _emulated are built.
    """
    done = subprocess.run([sys.executable, "-c", "import jax_ep"], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0 and "was already registered" not in done.stderr, done.stderr


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
        needed = np.max(need) if layout == "expert" else np.sum(-(-need // alignment) * alignment)
        for capacity in (0, alignment, 5 * alignment, 1000 * alignment):
            native = _native.cpu.place_groups(need.tolist(), layout=layout, capacity=capacity, alignment=alignment)
            first_row, group_sizes, fits = zip(*native, strict=True)
            assert all(fits) == (needed <= capacity)
            if all(fits):
                place = _layouts.place_rows(
                    jnp.asarray(need)[:, None], layout=layout, capacity=capacity, alignment=alignment
                )
                assert list(first_row) == place.first_row.tolist()
                assert list(group_sizes) == place.group_sizes.tolist()


@needs_native
@pytest.mark.parametrize("num_ranks", [1, 2, 7, 32])
def test_rows_are_shared_as_in_python(num_ranks):
    rng = np.random.default_rng(num_ranks)
    fill = jax.jit(_layouts.fill)
    for _ in range(100):
        need = rng.integers(0, rng.choice([2, 50]), num_ranks).astype(np.int32)
        room, start = int(rng.integers(need.sum() + 2)), int(rng.integers(num_ranks))
        assert _native.cpu.share_rows(need.tolist(), room, start) == fill(need, room, start).tolist()


@needs_native
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("share_rows", {"need": [3, -1], "room": 2, "start": 0}, "need is -1, but must be at least 0"),
        ("share_rows", {"need": [2**31 - 1, 1], "room": 2, "start": 0}, "need has the sum 2147483648, but must fit"),
        ("share_rows", {"need": [3, 1], "room": -2, "start": 0}, "room is -2, but must be at least 0"),
        ("share_rows", {"need": [3, 1], "room": 2, "start": -1}, "start is -1, but must be at least 0"),
        ("share_rows", {"need": [3, 1], "room": 2, "start": 2}, "start is 2, but must be below the 2 ranks of need"),
        ("share_rows", {"need": [], "room": 2, "start": 0}, "start is 0, but must be below the 0 ranks of need"),
        ("place_groups", {"need": [-1], "layout": "ragged", "capacity": 8, "alignment": 1}, "need is -1"),
        ("place_groups", {"need": [1], "layout": "ragged", "capacity": -8, "alignment": 1}, "capacity is -8"),
        ("place_groups", {"need": [1], "layout": "ragged", "capacity": 8, "alignment": 0}, "alignment is 0"),
        ("group_bytes", {"num_ranks": 0}, "num_ranks is 0, but must be at least 1"),
        ("group_bytes", {"num_ranks": 4, "num_experts": 2}, "num_experts is 2, but must be at least 4"),
        ("group_bytes", {"top_k": 0}, "top_k is 0, but must be at least 1"),
        ("default_capacity", {"alignment": 0}, "alignment is 0, but must be at least 1"),
        ("default_capacity", {"num_tokens": -1}, "num_tokens is -1, but must be at least 0"),
    ],
)
def test_numbers_without_meaning_are_refused(function, arguments, message):
    usual = {
        "group_bytes": {"num_ranks": 2, "num_experts": 8, "top_k": 2, "max_tokens": 4, "max_payload": 256},
        "default_capacity": {
            **{"layout": "ragged", "num_ranks": 2, "num_tokens": 4, "top_k": 2, "experts_per_rank": 4},
            "alignment": 1,
        },
    }
    with pytest.raises(ValueError, match=message):
        getattr(_native.cpu, function)(**usual.get(function, {}) | arguments)


@needs_native
def test_unknown_layout_is_named():
    with pytest.raises(ValueError, match="layout is 'jagged', but must be 'expert' or 'ragged'"):
        _native.cpu.place_groups([1], layout="jagged", capacity=8, alignment=1)


@pytest.mark.skipif(_native.emulated is None, reason="needs emulated GPUs")
def test_a_fabric_handle_does_not_keep_the_memory():
    """So a process must not free its memory before the others have unmapped it."""
    offer = _native.emulated.offer_fabric([0, 1])
    handles = offer.handles()
    for _ in range(2):
        _native.emulated.try_fabric([0, 1], handles)
    del offer
    with pytest.raises(RuntimeError, match="cuMemImportFromShareableHandle"):
        _native.emulated.try_fabric([0], handles)
