"""Group and backends: what a group says about itself, and its life."""

import copy
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
from conftest import HAS_EMULATED
from helpers import PURE_JAX, open_group, without_gpus
from jax_ep import _backends, _native
from shapes import SMALL


@pytest.fixture
def group(make_group, mesh):
    return make_group(mesh, SMALL)


def test_attributes(group, mesh, backend):
    assert group.mesh == mesh
    assert group.axis_name == "ep"
    assert group.num_ranks == mesh.size
    assert group.num_experts == SMALL.num_experts
    assert group.experts_per_rank == SMALL.num_experts // mesh.size
    assert group.top_k == SMALL.top_k
    assert group.hidden == SMALL.hidden
    assert group.max_tokens_per_rank == SMALL.tokens
    assert group.dtype == jnp.bfloat16
    assert group.backend == backend


def test_memory_bytes(group, backend):
    assert isinstance(group.memory_bytes, int)
    assert group.memory_bytes == 0 if backend in PURE_JAX else group.memory_bytes > 0


def test_hash_is_by_identity(make_group, mesh):
    first, second = (make_group(mesh, SMALL) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second, first}) == 2


def test_is_a_static_argument(group):
    """Usable as a static argument of jit, and so in a cache's key."""
    assert jax.jit(lambda x, group: x * group.num_experts, static_argnames="group")(2, group=group) == 2 * 16


def test_dtype_defaults_to_bfloat16_and_backend_to_auto(mesh):
    with ep.Group(mesh, num_experts=16, top_k=2, hidden=128, max_tokens_per_rank=8) as group:
        assert group.axis_name == "ep"
        assert group.dtype == jnp.bfloat16
        assert group.backend in ep.backends()


def test_is_static_and_the_only_one_of_its_kind(group):
    with pytest.raises(AttributeError, match="top_k"):
        group.top_k = 1
    assert copy.deepcopy(group) is group


def test_closing_twice_is_fine(make_group, mesh):
    with make_group(mesh, SMALL) as group:
        assert group.backend
    group.close()


def test_backends():
    backends = ep.backends()
    assert set(backends) >= {"reference", "collectives", "cuda"}
    assert all(backends[name].available for name in PURE_JAX)
    assert backends["cuda"].available or backends["cuda"].reason


def test_auto_takes_the_best_backend(make_group, mesh):
    best = "cuda" if ep.backends()["cuda"].available else "reference"
    assert make_group(mesh, SMALL, backend="auto").backend == best


def mesh_of_fake_gpus(monkeypatch, **functions):
    """A mesh of ("data", "ep") over 2 x 2 GPUs that are not there.

    CUDA numbers them from 4, and finds nothing wrong with them but what `functions` say.
    """
    gpus = [SimpleNamespace(platform="gpu", process_index=0, id=i, local_hardware_id=4 + i) for i in range(4)]
    native = {
        "device_uuid": lambda ordinal: bytes([ordinal]),
        "find_device": lambda uuid: uuid[0],
        "unsupported_device": lambda ordinal: "",
        "unsupported_pair": lambda ordinals: "",
    }
    monkeypatch.setattr(_native, "cuda", SimpleNamespace(**native | functions))
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: gpus)
    return SimpleNamespace(
        devices=np.array(gpus).reshape(2, 2), shape={"data": 2, "ep": 2}, axis_names=("data", "ep"), local_devices=gpus
    )


def test_auto_takes_cuda_on_gpus_that_run_it(monkeypatch):
    """Links matter between the ranks of a group, and between no others."""
    asked = []
    mesh = mesh_of_fake_gpus(monkeypatch, unsupported_pair=lambda ordinals: asked.append(ordinals) or "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _backends.choose("auto", mesh, "ep").backend == "cuda"
    assert asked == [[4, 5], [6, 7]]
    assert _backends.choose("cuda", mesh, "data").backend == "cuda"
    assert asked[2:] == [[4, 6], [5, 7]]


def test_links_of_gpus_that_this_process_does_not_see(monkeypatch):
    asked = []
    mesh_of_two = mesh_of_fake_gpus(
        monkeypatch,
        find_device=lambda uuid: -1 if uuid == bytes([5]) else uuid[0],
        unsupported_pair=lambda ordinals: asked.append(ordinals) or "",
    )
    assert _backends.choose("cuda", mesh_of_two, "ep").backend == "cuda"
    assert asked == [[4], [6, 7]]


# As ffi/device.h says it.
UNSUPPORTED = {
    "shared memory": ("unsupported_device", 6, "NVIDIA GeForce RTX 5090 has 101376 bytes of shared memory"),
    "machine code": ("unsupported_device", 7, "jax_ep's kernels do not load on NVIDIA X (no kernel image)"),
    "atomics": ("unsupported_pair", [6, 7], "the link from CUDA device 6 to CUDA device 7 may split a 16-byte store"),
    "access": ("unsupported_pair", [4, 5], "CUDA device 4 cannot reach the memory of CUDA device 5"),
}


@pytest.mark.parametrize(("function", "subject", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_gpus_that_cannot_run_the_kernels(monkeypatch, function, subject, reason):
    """Auto falls back, with a warning that says why; cuda is an error that says why."""
    mesh = mesh_of_fake_gpus(monkeypatch, **{function: lambda asked: reason if asked == subject else ""})
    with pytest.warns(
        UserWarning, match=f"^jax_ep uses XLA's collectives on GPUs, not its kernels: {re.escape(reason)}$"
    ):
        assert _backends.choose("auto", mesh, "ep").backend == "collectives"
    with pytest.raises(ValueError, match=f"^backend is 'cuda', which cannot be used here: {re.escape(reason)}. Use"):
        _backends.choose("cuda", mesh, "ep")
    is_of_device = function == "unsupported_device"
    assert ep.backends()["cuda"] == ep.BackendStatus(not is_of_device, reason if is_of_device else "")


# Each case: the facts that emulated CUDA reports, the function that must refuse them, and the start of its reason.
REPORTS = {
    "capability": ({"major": 8}, "unsupported_device", "emulated has compute capability 8.0; the kernels need 9.0"),
    "shared memory": (
        {"shared_bytes": 101376},
        "unsupported_device",
        "emulated has 101376 bytes of shared memory for a thread block; the kernels need ",
    ),
    "access": (
        {"can_access_peer": False},
        "unsupported_pair",
        "CUDA device 0 cannot reach the memory of CUDA device 1",
    ),
    "atomics": (
        {"has_native_atomics": False},
        "unsupported_pair",
        "the link from CUDA device 0 to CUDA device 1 may split a 16-byte store",
    ),
}


@pytest.mark.skipif(not HAS_EMULATED, reason="there are no emulated GPUs")
@pytest.mark.parametrize(("report", "function", "reason"), REPORTS.values(), ids=REPORTS)
def test_device_facts_come_from_cuda(mesh, report, function, reason):
    """ffi/cuda/device.h asks CUDA for each fact that ffi/device.h judges."""
    native = _native.emulated
    try:
        native.set_device_report(**report)
        reasons = {
            "unsupported_device": native.unsupported_device(0),
            "unsupported_pair": native.unsupported_pair([0, 1]),
        }
        if function == "unsupported_pair":
            with pytest.raises(ep.Error, match=f"^Group: {re.escape(reason)}.*, or backend='reference'$"):
                open_group(mesh, SMALL, backend="emulated")
    finally:
        native.set_device_report()
    assert reasons.pop(function).startswith(reason)
    assert list(reasons.values()) == [""]
    assert native.unsupported_device(0) == native.unsupported_pair([0, 1]) == ""


def test_public_names():
    """The contract's names are there, and nothing else is public."""
    assert set(ep.__all__) >= {
        "Group", "Dispatched", "AllToAll", "DispatchLayout", "BackendStatus", "backends",
        "dispatch", "dispatch_start", "dispatch_done", "dispatch_like", "dequantize", "dispatch_layout",
        "combine", "combine_start", "combine_done", "all_to_all", "all_to_all_back", "Error", "PeerTimeoutError",
    }  # fmt: skip
    assert all(getattr(ep, name).__doc__ for name in ep.__all__)


def test_errors_share_a_base():
    assert issubclass(ep.PeerTimeoutError, ep.Error)
    assert issubclass(ep.Error, Exception)


@pytest.mark.parametrize(
    ("reason", "kind", "message"),
    [
        ("timeout", ep.PeerTimeoutError, r"^combine: rank 1 gave up waiting for rank 0 \(expected 7, saw 5\)"),
        ("elsewhere", ep.PeerTimeoutError, "^combine: rank 0 gave up, and rank 1 with it; Group.check of its process"),
        ("other op", ep.Error, r"^combine: rank 0 was in another call than rank 1 \(call 0x5 against 0x7\)"),
        (
            "slot taken",
            ep.Error,
            "^combine: rank 1 has no room for another operation while older split-phase calls .* operation 7 of the "
            "group .* was started, its done has not run, .* Call its done before this combine",
        ),
        ("wrong rank", ep.Error, "^combine: the program runs rank 5 on the device that group.mesh has as rank 1"),
    ],
)
def test_check_raises_what_devices_wrote(monkeypatch, mesh, reason, kind, message):
    without_gpus(monkeypatch, group_failure=lambda group_id: (reason, "combine", 1, 0, 7, 5))
    with open_group(mesh, SMALL) as group:
        for _ in range(2):
            with pytest.raises(kind, match=message) as error:
                group.check()
    if kind is ep.PeerTimeoutError:
        failure = error.value
        assert (failure.op, failure.waiting_rank, failure.missing_rank) == ("combine", 1, 0)
        assert (failure.expected, failure.seen) == (7, 5)


# The grouped GEMM


@pytest.mark.skipif(_native.emulated is None, reason="the emulated backend is not built")
def test_a_group_loads_the_grouped_gemm_on_its_devices(mesh, monkeypatch):
    loaded = []
    monkeypatch.setattr(_native, "grouped_matmul", SimpleNamespace(load=loaded.append))
    settings = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 4, "backend": "emulated"}
    with ep.Group(mesh, **settings) as group:
        assert not group._impl.has_grouped_gemm and not loaded  # CPUs have no compute capability
    monkeypatch.setattr(_native, "grouped_matmul_reason", lambda devices: None)
    with ep.Group(mesh, **settings) as group:
        assert group._impl.has_grouped_gemm
        assert loaded == [device.local_hardware_id for device in mesh.devices.flat]
