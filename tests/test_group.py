"""Group and backends: what a group says about itself, and its life."""

import copy

import jax
import jax.numpy as jnp
import pytest

import jax_ep as ep
from helpers import open_group, without_gpus
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
    assert group.memory_bytes == 0 if backend == "reference" else group.memory_bytes > 0


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
    assert set(backends) >= {"reference", "cuda"}
    assert backends["reference"].available
    assert backends["cuda"].available or backends["cuda"].reason


def test_auto_takes_the_best_backend(make_group, mesh):
    best = "cuda" if ep.backends()["cuda"].available else "reference"
    assert make_group(mesh, SMALL, backend="auto").backend == best


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
        ("slot taken", ep.Error, "^combine: rank 1 has no room for another operation while older halves"),
        ("wrong rank", ep.Error, "^combine: the program runs rank 5 on the device that group.mesh has as rank 1"),
    ],
)
def test_check_raises_what_devices_wrote(monkeypatch, mesh, reason, kind, message):
    without_gpus(monkeypatch, group_failure=lambda group_id: (reason, 3, 1, 0, 7, 5))
    with open_group(mesh, SMALL) as group:
        for _ in range(2):
            with pytest.raises(kind, match=message) as error:
                group.check()
    if kind is ep.PeerTimeoutError:
        failure = error.value
        assert (failure.op, failure.waiting_rank, failure.missing_rank) == ("combine", 1, 0)
        assert (failure.expected, failure.seen) == (7, 5)
