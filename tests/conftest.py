"""Devices, backends and groups that all tests share.

As a program of several processes (scripts/launch_local.py -n 4 python -m pytest tests/test_dispatch.py), every process
runs the same tests in the same order, on a mesh of all processes' devices.
"""

import os

# Only the CPU platform reads this, so it does no harm where GPUs are used; it must be there before JAX starts.
if "JAX_COORDINATOR_ADDRESS" not in os.environ and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import contextlib

import hypothesis
import jax
import pytest

import jax_ep as ep
from helpers import ONE_OF_SEVERAL, make_mesh, open_group

if ONE_OF_SEVERAL:
    jax.distributed.initialize()

hypothesis.settings.register_profile("jax_ep", deadline=None, derandomize=ONE_OF_SEVERAL or "CI" in os.environ)
hypothesis.settings.load_profile("jax_ep")

BACKENDS = ["reference"]
if ep.backends()["cuda"].available:
    BACKENDS.append(pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_collection_modifyitems(items):
    for item in items:  # also those that are skipped here, for which pytest does not look
        if unknown := set(item.fixturenames) - set(item._fixtureinfo.name2fixturedefs) - {"request"}:
            raise pytest.UsageError(f"{item.nodeid}: there are no fixtures {sorted(unknown)}")
    if jax.default_backend() == "gpu" and len(jax.devices()) >= 2:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs two or more CUDA devices"))


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """The backend under test; every test that makes a group runs once with each."""
    return request.param


@pytest.fixture(scope="session", params=["expert", "ragged"])
def layout(request):
    return request.param


@pytest.fixture(scope="session", params=[1, 2, 4, 8], ids="ep{}".format)
def any_mesh(request):
    """A mesh of each EP size."""
    return make_mesh((request.param,))


def mesh_of_at_most(num_ranks):
    """A power of two of ranks, as it must divide every shape's number of experts."""
    while num_ranks > len(jax.devices()):
        num_ranks //= 2
    return make_mesh((num_ranks,))


@pytest.fixture(scope="session")
def mesh():
    """Four ranks if there are as many: for tests to which the EP size does not matter."""
    return mesh_of_at_most(4)


@pytest.fixture(scope="session")
def largest_mesh():
    return mesh_of_at_most(8)


@pytest.fixture(scope="module")
def make_group(backend):
    """make_group(mesh, shape, **overrides): the group of a named shape, closed after the module's tests."""
    with contextlib.ExitStack() as groups:

        def make(mesh, shape, **overrides):
            return groups.enter_context(open_group(mesh, shape, **{"backend": backend, **overrides}))

        yield make
