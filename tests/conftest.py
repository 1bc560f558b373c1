"""Devices, backends and groups that all tests share.

As a program of several processes (jax-ep launch -n 4 pytest tests/test_dispatch.py), every process runs the same tests
in the same order, on a mesh of all processes' devices.
"""

import os

# Only the CPU platform reads this, so it does no harm where GPUs are used; it must be there before JAX starts.
if "JAX_COORDINATOR_ADDRESS" not in os.environ and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import contextlib
import re
import zlib
from collections import Counter

import hypothesis
import jax
import pytest

import jax_ep as ep
from helpers import ONE_OF_SEVERAL, PATIENCE_S, make_mesh, open_group
from jax_ep import _native
from not_emulated import reason_not_emulated

if ONE_OF_SEVERAL:
    jax.distributed.initialize()
if jax.default_backend() == "gpu":  # which multiplies float32 in TF32 by default
    jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("jax_ep", deadline=None, derandomize=ONE_OF_SEVERAL or "CI" in os.environ)
hypothesis.settings.load_profile("jax_ep")

# An emulated GPU is a CPU device of a single process.
HAS_EMULATED = _native.emulated is not None and jax.default_backend() == "cpu" and not ONE_OF_SEVERAL
# Values of the parameters `backend` and `kernel_backend` that stand for groups over an emulated network: the ranks of
# each node.
NODE_SIZES = {f"emulated_nodes_of_{size}": size for size in (1, 2, 4)}
EMULATED = ["emulated", *NODE_SIZES] if HAS_EMULATED else []
BACKENDS = ["reference", "collectives"]
if ep.backends()["cuda"].available:
    BACKENDS.append(pytest.param("cuda", marks=pytest.mark.gpu))
BACKENDS += EMULATED
KERNEL_BACKENDS = [pytest.param("cuda", marks=pytest.mark.gpu), *EMULATED]
EP_SIZES = (1, 2, 4, 8)
ALL_CASES = "JAX_EP_ALL_CASES"  # in the environment: no case is left out

# Of each test, about one case in so many runs.
REFERENCE_SHARE = 2  # with backend "reference", if the test also runs emulated
COLLECTIVES_SHARE = 6  # with backend "collectives"

left_out = 0  # tests that were deselected: see choose_tests


# --- which tests run ------------------------------------------------------------------------------------------------


def test_of(item):
    """The test function of which `item` is a case."""
    return item.path, item.originalname


def parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def backend_parameter(item):
    params = parameters(item)
    return params.get("backend", params.get("kernel_backend"))


def is_emulated(item):
    return backend_parameter(item) in EMULATED


def hash_of(item):
    return zlib.crc32(item.nodeid.encode())


def sample(cases, share):
    """About one case in `share`, and at least one."""
    return [item for item in cases if hash_of(item) % share == 0] or [min(cases, key=hash_of)]


def node_size(item):
    """The ranks of each node in the groups of this test; 0 if the test does not use a network."""
    return NODE_SIZES.get(backend_parameter(item), 0)


def num_ranks(item):
    """The ranks of this test's groups, as far as fixtures tell."""
    if "any_mesh" in parameters(item):
        return parameters(item)["any_mesh"]
    if "pair" in item.fixturenames:
        return 2
    return 8 if "largest_mesh" in item.fixturenames else 4


def why_not_emulated(item):
    return reason_not_emulated(item.path.name, item.name, over_network=bool(node_size(item)))


def choose_tests(items):
    """The tests that run, as CONTRIBUTING.md describes them. Hashes of the tests' names choose."""
    with_reference, with_collectives, over_network = {}, {}, {}
    emulated_tests = {test_of(item) for item in items if is_emulated(item) and not why_not_emulated(item)}
    for item in items:
        name = re.sub(r"\bep\d+\b", "", item.nodeid)
        if backend_parameter(item) == "collectives":
            with_collectives.setdefault(test_of(item), []).append(item)
        elif node_size(item):
            if not why_not_emulated(item):
                over_network.setdefault(test_of(item), []).append(item)
        elif (
            backend_parameter(item) == "cuda"
            or "any_mesh" not in parameters(item)
            or num_ranks(item) == EP_SIZES[zlib.crc32(name.encode()) % len(EP_SIZES)]
        ):
            if backend_parameter(item) == "reference" and test_of(item) in emulated_tests:
                with_reference.setdefault(test_of(item), []).append(item)
            else:
                yield item
    for cases in with_reference.values():
        yield from sample(cases, REFERENCE_SHARE)
    for cases in with_collectives.values():
        yield from sample(cases, COLLECTIVES_SHARE)
    for cases in over_network.values():
        yield min(cases, key=hash_of)


# Files with few tests that take long.
LONG_FILES = ["test_examples.py", "test_native.py", "test_integrations.py", "test_fallback.py"]


def longest_files_first(items):
    """Returns a sort key: LONG_FILES first, so that none begins last; then by the number of tests."""
    num_tests = Counter(item.path.name for item in items)
    return lambda item: (item.path.name not in LONG_FILES, -num_tests[item.path.name], item.path.name)


def pytest_collection_modifyitems(config, items):
    global left_out
    for item in items:  # also those that are skipped here, for which pytest does not look
        if unknown := set(item.fixturenames) - set(item._fixtureinfo.name2fixturedefs) - {"request"}:
            raise pytest.UsageError(f"{item.nodeid}: there are no fixtures {sorted(unknown)}")
    # A group that fits in one node uses no network.
    items[:] = [item for item in items if not node_size(item) or node_size(item) < num_ranks(item)]
    if ALL_CASES not in os.environ:
        chosen = set(choose_tests(items))
        deselected = [item for item in items if item not in chosen]
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=deselected)
        left_out = len(deselected)
    items.sort(key=longest_files_first(items))
    has_gpus = jax.default_backend() == "gpu" and len(jax.devices()) >= 2
    for item in items:
        why = why_not_emulated(item)
        if is_emulated(item) and why:
            item.add_marker(pytest.mark.skip(reason=f"not emulated: {why}"))
        if item.get_closest_marker("gpu") and not has_gpus:
            more = f"; not emulated: {why}" if why else ""
            item.add_marker(pytest.mark.skip(reason=f"needs two or more CUDA devices{more}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Groups that the test or its fixtures make span nodes of this many ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if size := node_size(item):
            patch.setenv("JAX_EP_NODE_SIZE", str(size))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """An emulated test that is skipped fails if tests/not_emulated.py does not say why."""
    report = yield
    if report.skipped and is_emulated(item) and not why_not_emulated(item) and len(jax.devices()) >= max(EP_SIZES):
        _, _, reason = report.longrepr
        report.outcome, report.longrepr = "failed", f"{reason}; tests/not_emulated.py must say why"
    return report


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of a process of pytest-xdist, for the process that reports
        session.config.workeroutput["left_out"] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    global left_out
    left_out = getattr(node, "workeroutput", {}).get("left_out", left_out)


def pytest_terminal_summary(terminalreporter):
    if left_out:
        terminalreporter.write_line(
            f"{left_out} cases left out. These ran: with any_mesh, one number of ranks per case (reference, emulated); "
            f"of each test, one case over an emulated network, one in {REFERENCE_SHARE} with the reference if it also "
            f"ran emulated, and one in {COLLECTIVES_SHARE} with collectives. {ALL_CASES}=1 runs all"
        )


# --- backends -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """The backend under test. CONTRIBUTING.md says with which backends a test runs."""
    return "emulated" if request.param in NODE_SIZES else request.param


@pytest.fixture(scope="session", params=KERNEL_BACKENDS)
def kernel_backend(request):
    """A backend that runs the kernels: on GPUs, or emulated."""
    return "emulated" if request.param in NODE_SIZES else request.param


if HAS_EMULATED:
    _native.emulated.set_patience(PATIENCE_S)


@pytest.fixture(params=(1, 2, 3, 4), ids="seed{}".format)
def adversary(request):
    """The seed by which emulated GPUs run threads, blocks and launches in another order, and show stores late.

    On real GPUs, it is the seed of the test's inputs only.
    """
    set_adversary = _native.emulated.set_adversary if HAS_EMULATED else lambda seed: None
    set_adversary(request.param)
    yield request.param
    set_adversary(0)


# --- devices and groups ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["expert", "ragged"])
def layout(request):
    return request.param


@pytest.fixture(scope="session", params=EP_SIZES, ids="ep{}".format)
def any_mesh(request):
    """A mesh of each EP size. A case with the backend "reference" or "emulated" runs with one of them."""
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
