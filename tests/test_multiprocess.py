"""Several processes of jax.distributed; this file is also the program that each of them runs."""

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import jax_ep.launch
import oracle
from helpers import (
    COMBINE_BOUND,
    JAX_EP,
    ROOT,
    TESTS,
    assert_same_bits,
    assert_trees_same_bits,
    emulated_patience,
    every_operation,
    exchange_rows,
    in_one_process,
    inputs_of_every_operation,
    order_sensitive_inputs,
    random_rows,
    spmd,
    there_and_back,
    traffic,
)
from jax_ep import _backends, _compat, _native, _network, _processes, _transport, doctor
from shapes import SMALL, make_inputs, np_dtype

pytestmark = in_one_process

TIMEOUT_S = 240


def launch(num_processes, *command, devices=1, timeout=TIMEOUT_S, platform="cpu"):
    """Runs a command in several processes; on GPUs beside this process, which holds most of their memory."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    flags = env.get("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "host_platform_device_count" not in flag)
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    launcher = [*JAX_EP, "launch", "-n", str(num_processes)]
    options = ["--devices", str(devices), "--timeout", str(timeout)]
    return subprocess.run([*launcher, *options, *command], env=env, cwd=TESTS, capture_output=True, text=True)


def run_program(name, num_processes, **options):
    """Runs the function `name` of this file in several processes."""
    done = launch(num_processes, sys.executable, __file__, name, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the launcher ---------------------------------------------------------------------------------------------------


def test_launcher_numbers_lines_and_processes():
    done = launch(3, sys.executable, "-c", "import os; print('process', os.environ['SLURM_PROCID'])")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{i}] process {i}" for i in range(3)]


@pytest.mark.parametrize(("options", "expected"), [((), ["0,1", "2,3"]), (("--same-devices",), ["0,1", "0,1"])])
def test_launcher_gives_devices_to_processes(options, expected):
    program = "import os; print(os.environ['JAX_LOCAL_DEVICE_IDS'])"
    done = launch(2, *options, sys.executable, "-c", program, devices=2)
    assert sorted(done.stdout.splitlines()) == [f"[{process}] {devices}" for process, devices in enumerate(expected)]


def test_launcher_ends_the_others_when_one_fails():
    program = "import os, time; os.environ['SLURM_PROCID'] == '1' and exit(7); time.sleep(60)"
    begun = time.monotonic()
    assert launch(3, sys.executable, "-c", program).returncode == 7
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0", "python"), "--processes is 0; it must be at least 1"),
        (("-n", "1", "--devices", "0", "python"), "--devices is 0; it must be at least 1"),
        (("-n", "1", "no-such-program"), "there is no program 'no-such-program'"),
    ],
)
def test_launcher_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        jax_ep.launch.run(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_launcher_ends_all_when_the_time_is_up():
    assert launch(2, sys.executable, "-c", "import time; time.sleep(60)", timeout=1).returncode == 124


def test_launcher_ends_all_when_it_is_ended():
    program = "import os, time; print(os.getpid()); time.sleep(60)"
    command = [*JAX_EP, "launch", "-n", "2", sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as launcher:
        ids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.terminate()
        assert launcher.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    for process in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    ("variables", "joins"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, False),  # srun --pty bash, in a larger allocation
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1234"}, True),
    ],
)
def test_joining_others(monkeypatch, variables, joins):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda: joined.append(True))
    monkeypatch.setattr(os, "environ", variables)
    assert _processes.join() == bool(joined) == joins


# --- on CPU devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_backends_in_plain_jax(devices):
    """Each process compares what its own devices got with the oracle's answer for all of them."""
    run_program("backends_in_plain_jax", 2, devices=devices)


def backends_in_plain_jax():
    one_axis = jax.sharding.Mesh(jax.devices(), ("ep",))
    for mesh, layout_of_collectives in ((one_axis, "expert"), (mesh_of_two_axes(), "ragged")):
        for layout in ("expert", "ragged"):
            check_layer(mesh, layout, "reference")
        check_layer(mesh, layout_of_collectives, "collectives")


def test_balance_in_plain_jax():
    run_program("balance_in_plain_jax", 2, devices=2)


def balance_in_plain_jax():
    one_axis = jax.sharding.Mesh(jax.devices(), ("ep",))
    check_balanced_layer(one_axis, "ragged", "reference")
    check_balanced_layer(mesh_of_two_axes(), "expert", "collectives")


def mesh_of_two_axes():
    """A mesh on which a group's axis_name is ("inner", "outer"): the processes are along the minor axis."""
    devices = np.array(jax.devices())
    return jax.sharding.Mesh(devices.reshape(jax.process_count(), -1), ("outer", "inner"))


def test_shortest_program():
    done = launch(2, sys.executable, ROOT / "examples" / "multihost.py", devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 1 of 2: 2 of 4 devices, reference backend, relative error 0.0e+00" in done.stdout


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bench(platform, tmp_path, monkeypatch):
    """All processes' devices are measured, and one process reports them."""
    on_gpus = platform == "gpu"
    if not on_gpus:
        monkeypatch.setenv("JAX_EP_NODE_SIZE", "1")
    sizes = ["--tokens=2,3", "--hidden=128", "--top-k=2", "--experts=16", "--chain=3", "--wire=fp8", "--no-lax"]
    program = [*JAX_EP, "bench", f"--json={tmp_path / 'rows.json'}", *sizes]
    done = launch(2, *program, platform=platform)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checked") == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["tokens"] for row in rows] == [2, 3]
    for row in rows:
        assert (row["processes"], row["ranks"], row["nodes"]) == (2, 2, 1 if on_gpus else 2)
        assert row["transport"] == ("nvlink" if on_gpus else None)
        assert (row["pair_us"] is not None) == on_gpus
        assert row["wall_pair_us"] > 0 and row["checked"]


def test_bench_with_unequal_options():
    bench = f"exec {shlex.join(JAX_EP)} bench --experts=16 --tokens=$((2 + SLURM_PROCID)),8"
    done = launch(2, "sh", "-c", bench)
    assert done.returncode == 2
    assert "--tokens is [3, 8] in process 1, [2, 8] in process 0; give all the same" in done.stdout + done.stderr


def test_bench_with_options_that_do_not_fit_in_one_process():
    bench = f"exec {shlex.join(JAX_EP)} bench --experts=16 --tokens=$((1 - SLURM_PROCID))"
    done = launch(2, "sh", "-c", bench)
    assert done.returncode == 2
    assert "process 1: --tokens is 0; it must be at least 1" in done.stdout + done.stderr


def test_lax_is_left_out_everywhere():
    run_program("lax_without_room", 2)


def lax_without_room():
    """One process has no room, so that none times it."""
    from jax_ep.bench import __main__ as bench
    from jax_ep.bench import cases, exchanges

    class Local(exchanges.LocalExchange):  # so that one process can run it without the other
        def dispatch(self, *args):
            if jax.process_index() == 1:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return super().dispatch(*args)

    bench.LaxExchange = lambda case, ragged: Local(case)
    case = cases.Case(2, 3, 128, 2, 16, "float32", None, "ragged", "uniform")
    mesh = jax.sharding.Mesh(jax.devices(), (exchanges.AXIS,))
    with pytest.warns(UserWarning, match="lax.all_to_all is left out at 3 tokens: out of memory"):
        assert bench._time_lax(case, mesh, 1, ragged=False) is None


class FakeNative:
    """In place of the native half of the CUDA backend: shares a pipe with the other processes, and no GPU memory."""

    def __init__(self):
        self.opened = []
        self.closed = []
        self.freed = []
        self.fails = False
        self.no_fabric = "operation not permitted"  # why this process has no fabric handles
        self.unreachable = []  # processes whose fabric handles this process cannot map
        self.num_offers = 0
        self.tried = []

    def group_round_tokens(self, group_id):
        return 2**20

    def open_group(self, group_id, *, devices, sharing, exchange, network, pes, node_size, **config):
        """Without a network, every process writes its number into the pipes of its peers on the same host."""
        if self.fails:
            raise RuntimeError("the group needs 1 byte too many")
        if network is not None:
            assert exchange((b"", [])) == []
            self.opened.append(SimpleNamespace(id=group_id, network=network, pes=pes, node_size=node_size))
            return
        me = jax.process_index()
        reader, writer = os.pipe()
        others = exchange((b"handles of %d" % me, [writer]))
        for handles, descriptors in others:
            assert handles.startswith(b"handles of ")
            for descriptor in descriptors:
                os.write(descriptor, b"%d" % me)
                os.close(descriptor)
        os.close(writer)
        with open(reader, "rb") as pipe:  # it ends when all have closed it
            from_others = sorted(map(int, pipe.read().decode()))
        reached = {int(handles.split()[-1]): descriptors for handles, descriptors in others}
        assert from_others == sorted(process for process, descriptors in reached.items() if descriptors)
        opened = SimpleNamespace(id=group_id, devices=devices, others=from_others, sharing=sharing)
        self.opened.append(opened)
        opened.reached = sorted(reached)

    def close_group(self, group_id):
        self.closed.append(group_id)

    def free_arenas(self, group_id):
        self.freed.append(group_id)

    def best_sharing(self, ordinals):
        return "descriptor"

    def outlives_owner(self, sharing):
        return sharing not in ("ipc", "fabric")

    def offer_fabric(self, ordinals):
        self.num_offers += 1
        if self.no_fabric:
            raise RuntimeError(self.no_fabric)
        return SimpleNamespace(handles=lambda: b"%d" % jax.process_index())

    def try_fabric(self, ordinals, handles):
        self.tried.append(int(handles))
        if int(handles) in self.unreachable:
            raise RuntimeError("not the same NVLink domain")

    def device_uuid(self, ordinal):
        return b"%d of %d" % (ordinal, jax.process_index())

    def find_device(self, uuid):
        return next((ordinal for ordinal in range(8) if self.device_uuid(ordinal) == uuid), -1)

    def unsupported_pair(self, ordinals):
        return ""

    def group_bytes(self, group_id):
        return 0

    def group_failure(self, group_id):
        return None

    def group_stats(self, group_id):
        return []


def pretend_cuda():
    """The CUDA backend's way of making groups, on CPU devices."""
    _native.cuda = FakeNative()

    def choose(requested, mesh, axis_name, timeout=20.0):
        reason, transport = _backends._agree("", mesh, axis_name, timeout)
        return _backends.Choice("reference" if reason else "cuda", transport)

    _backends.choose = choose
    return _native.cuda


def make_group(mesh, shape=SMALL, **overrides):
    settings = {
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "max_tokens_per_rank": shape.tokens,
        "dtype": np_dtype(shape.dtype),
        "timeout": 20.0,
    }
    return ep.Group(mesh, **settings | overrides)


def all_agree(what):
    """All processes have the same."""
    print("agreed", json.dumps(what))


def test_making_groups():
    lines = [line.split(" ", 1)[1] for line in run_program("making_groups", 4, devices=2).splitlines()]
    agreed = [line for line in lines if line.startswith("agreed")]
    assert len(set(agreed)) * 4 == len(agreed) > 0


def making_groups():
    native, me, devices = pretend_cuda(), jax.process_index(), np.array(jax.devices())

    def opened_with(mesh, **options):
        with make_group(mesh, **options):
            return native.opened[-1]

    whole = opened_with(jax.sharding.Mesh(devices, ("ep",)))
    assert whole.others == sorted({0, 1, 2, 3} - {me})
    assert whole.devices == [[-1] * 2 * me + [0, 1] + [-1] * 2 * (3 - me)]
    assert whole.sharing == "descriptor"

    # Lines within a process, across two processes, and across all of them.
    inside = opened_with(jax.sharding.Mesh(devices.reshape(4, 2), ("data", "ep")))
    assert inside.others == []
    pairs = opened_with(jax.sharding.Mesh(devices.reshape(2, 4), ("data", "ep")))
    assert pairs.others == [me ^ 1]
    assert pairs.devices[1 - me // 2] == [-1] * 4
    across = opened_with(jax.sharding.Mesh(devices.reshape(4, 2), ("ep", "data")))
    assert across.others == whole.others

    # The others need not know of a group of two processes, nor of one's own.
    if me < 2:
        assert opened_with(jax.sharding.Mesh(devices[:4], ("ep",))).others == [1 - me]
    own = opened_with(jax.sharding.Mesh(jax.local_devices(), ("ep",)))
    assert own.others == []
    assert own.sharing == "none"

    # A tuple of axes: a rank is the position along both, whatever the order of the mesh's axes.
    grid = jax.sharding.Mesh(devices.reshape(2, 2, 2), ("node", "data", "local"))
    both = opened_with(grid, axis_name=("node", "local"))
    node, data = divmod(me, 2)
    assert both.others == [me ^ 2]
    assert both.devices[data] == ([0, 1, -1, -1] if node == 0 else [-1, -1, 0, 1])
    assert both.devices[1 - data] == [-1] * 4
    turned = opened_with(grid, axis_name=("local", "node"))
    assert turned.devices[data] == ([0, -1, 1, -1] if node == 0 else [-1, 0, -1, 1])

    # Two equal groups at once have different numbers. An equal group that is made later has the number of the first:
    # programs that were compiled for the first call the later one. All processes agree on the numbers.
    mesh = jax.sharding.Mesh(devices, ("ep",))
    with make_group(mesh), make_group(mesh):
        first, second = native.opened[-2:]
    ids = [first.id, second.id, *(opened_with(mesh).id for _ in range(3))]
    assert first.id != second.id
    assert ids[2:] == [first.id] * 3
    # Also where one process has not closed the group before yet.
    late = make_group(mesh)
    if me != 2:
        late.close()
    third = opened_with(mesh).id
    late.close()
    assert third == second.id
    all_agree([whole.id, inside.id, pairs.id, across.id, both.id, third, *ids])
    assert sorted(native.closed) == sorted(group.id for group in native.opened)
    assert not native.freed

    # By IPC, memory is freed when all have closed.
    os.environ["JAX_EP_SHARING"] = "ipc" if me == 0 else "descriptor"
    assert opened_with(mesh).id == native.freed[-1]

    keys = [key for key, _ in _compat._store().key_value_dir_get("jax_ep")]
    assert not [key for key in keys if key.endswith(f"/{me}")]


def test_what_cannot_be_made():
    run_program("what_cannot_be_made", 3)


def what_cannot_be_made():
    native, me, mesh = pretend_cuda(), jax.process_index(), jax.sharding.Mesh(jax.devices(), ("ep",))

    def expect(match, error=ep.Error, **options):
        with pytest.raises(error, match=match):
            make_group(mesh, **options)

    message = r"process \d makes its group with max_tokens_per_rank=\d+, process \d with \d+"
    expect(message, num_experts=24, max_tokens_per_rank=16 if me == 1 else 8)

    native.device_uuid = lambda ordinal: b"the only one"
    expect("processes 0 and 1 use the same GPU .* local_device_ids", num_experts=24)
    os.environ["JAX_EP_SAME_GPU"] = "1"
    make_group(mesh, num_experts=24).close()
    del os.environ["JAX_EP_SAME_GPU"]
    del native.device_uuid

    native.fails = me == 2
    expect("^Group: the group needs" if me == 2 else "^process 2: Group: the group needs 1 byte", num_experts=24)
    native.fails = False

    if me == 1:
        time.sleep(3)  # the others do not wait that long, and leave a note
        expect("process 0: Group: process 1 has not come within 1 s", num_experts=24)
    else:
        expect("^Group: process 1 has not come within 1 s. Every process", num_experts=24, timeout=1.0)


def test_devices_of_several_hosts():
    run_program("devices_of_several_hosts", 2, devices=2)


def devices_of_several_hosts():
    me, devices = jax.process_index(), np.array(jax.devices())
    _native.cuda = FakeNative()
    _processes.host = lambda: f"host {me}"
    across, inside = (jax.sharding.Mesh(devices.reshape(2, 2), names) for names in (("ep", "data"), ("data", "ep")))
    assert _backends._agree("", inside, "ep", 20.0)[0] == ""
    hosts = {0: "host 0", 1: "host 1"}
    assert _network.node_size(_processes.ep_groups(across, "ep"), hosts) == 1
    assert _network.node_size(_processes.ep_groups(inside, "ep"), hosts) == 2
    assert _network.node_size(devices.reshape(1, 4), hosts) == 2
    assert _network.node_size(devices[[0, 2, 1, 3]].reshape(1, 4), hosts) == 1
    reason = _backends._agree("", across, "ep", 20.0)[0]
    assert "on several hosts" in reason
    assert "process 0 cannot use the network: 2 devices of the mesh in one process" in reason
    ours = jax.sharding.Mesh(devices.reshape(4)[[0, 2]], ("ep",))
    sys.modules["jax_ep._nvshmem"] = None  # as if it had not been built
    reason = _backends._agree("", ours, "ep", 20.0)[0]
    assert "without NVSHMEM; install nvidia-nvshmem-cu13 as docs/multi_host.md says" in reason
    if me == 1:
        os.environ["JAX_EP_NODE_SIZE"] = "2"
        time.sleep(1)  # what it said before must not be taken for what it says now
    with pytest.raises(ep.Error, match=r"JAX_EP_NODE_SIZE is '2?' in process \d, and '2?' in process \d; set it"):
        _backends._agree("", across, "ep", 20.0)
    if me == 0:
        os.environ["JAX_EP_NODE_SIZE"] = "1"
        alone = jax.sharding.Mesh(jax.local_devices(), ("ep",))
        assert "one process per GPU" in _backends._agree("", alone, "ep", 20.0)[0]
        os.environ["JAX_EP_NODE_SIZE"] = "two"
        with pytest.raises(ValueError, match="JAX_EP_NODE_SIZE is 'two'; it must be a number of ranks"):
            _backends._agree("", alone, "ep", 20.0)
        os.environ["JAX_EP_NODE_SIZE"] = "3"
        with pytest.raises(ValueError, match="JAX_EP_NODE_SIZE is 3; it must divide the group's 4 ranks"):
            _network.node_size(devices.reshape(1, 4), hosts)


def test_fabric_or_network():
    run_program("fabric_or_network", 4)


def fabric_or_network():
    """Two processes on each of two hosts."""
    native, me, devices = pretend_cuda(), jax.process_index(), np.array(jax.devices())
    _processes.host = lambda: f"host {me // 2}"
    whole = jax.sharding.Mesh(devices, ("ep",))

    def agree(mesh=whole, **variables):
        native.tried.clear()
        os.environ.update(variables)
        try:
            return _backends._agree("", mesh, "ep", 20.0)
        finally:
            for name in variables:
                del os.environ[name]

    _network._module = FakeNvshmem
    native.no_fabric = ""
    assert agree() == ("", "fabric")
    assert native.tried == sorted({0, 1, 2, 3} - {me})
    assert agree(JAX_EP_NODE_SIZE="4") == ("", "fabric")
    assert agree(JAX_EP_SHARING="fabric") == ("", "fabric")
    native.num_offers = 0
    with make_group(whole) as group:
        opened = native.opened[-1]
        assert native.num_offers == 1  # the processes try only once, and then have one answer
        assert (opened.sharing, opened.reached, opened.others) == ("fabric", sorted({0, 1, 2, 3} - {me}), [me ^ 1])
        assert group._impl.transport == "fabric"
    assert native.freed == [opened.id]  # when all have closed

    # No process tries fabric handles if the group does not need them, or if the user asks for another way.
    inside = jax.sharding.Mesh(devices.reshape(2, 2), ("data", "ep"))
    assert (agree(inside), native.tried) == (("", "host"), [])
    assert (agree(JAX_EP_NODE_SIZE="2"), native.tried) == (("", "network"), [])
    descriptor = {"JAX_EP_SHARING": "descriptor"} if me == 1 else {}
    assert (agree(**descriptor), native.tried) == (("", "network"), [])
    assert agree(inside, JAX_EP_SHARING="fabric") == ("", "fabric")
    assert native.tried == [me ^ 1]

    # All processes choose the network if a process cannot share its memory, or cannot map another's.
    native.no_fabric = "operation not permitted" if me == 3 else ""
    assert (agree(), native.tried) == (("", "network"), [])
    refused = (
        "process 3: it cannot create fabric handles for its memory: operation not permitted. "
        "If NVLink connects these hosts: the service nvidia-imex must"
    )
    with pytest.raises(
        ep.Error, match=f"JAX_EP_SHARING is 'fabric', but fabric handles cannot be used here: {refused}"
    ):
        agree(JAX_EP_SHARING="fabric")
    native.no_fabric = ""
    native.unreachable = [1] if me == 2 else []
    assert agree() == ("", "network")
    unreachable = (
        "process 2: it cannot map the memory of process 1: not the same NVLink domain. "
        "If NVLink connects these hosts: the service nvidia-imex"
    )
    with pytest.raises(ep.Error, match=unreachable):
        agree(JAX_EP_SHARING="fabric")

    # Without NVSHMEM, the reason for collectives says why neither works.
    sys.modules["jax_ep._nvshmem"] = None
    _network._module = lambda: importlib.import_module("jax_ep._nvshmem")
    reason, _ = agree()
    assert "without NVSHMEM" in reason
    assert f"Fabric handles cannot be used either: {unreachable}" in reason

    native.unreachable = []
    with pytest.raises(ep.Error, match="JAX_EP_NODE_SIZE is 2, which asks for a network between nodes of 2 ranks"):
        agree(JAX_EP_SHARING="fabric", JAX_EP_NODE_SIZE="2")
    with pytest.raises(ep.Error, match="JAX_EP_SHARING is 'fabric' in process 0, 2 only; set it in all, or in none"):
        agree(JAX_EP_SHARING="" if me % 2 else "fabric")
    message = "JAX_EP_SHARING is 'post'; it must be 'descriptor', 'ipc' or 'fabric', or not be set"
    error, begin = (ValueError, "^") if me == 1 else (ep.Error, "^process 1: ")
    with pytest.raises(error, match=begin + message):
        agree(JAX_EP_SHARING="post" if me == 1 else "")
    assert agree() == ("", "fabric")


def test_no_more_ranks_by_fabric_handles_than_kernels_have():
    devices = np.array([[SimpleNamespace(process_index=rank) for rank in range(36)]])
    hosts = {process: f"host {process // 4}" for process in range(36)}
    transport, reason = _transport.choose(None, devices, hosts, dict.fromkeys(hosts, ""), None)
    assert transport == "network"
    assert reason == "the group has 36 ranks, and with fabric handles it has at most 32"


def test_one_process_without_cuda():
    run_program("one_process_without_cuda", 2)


def one_process_without_cuda():
    me, mesh = jax.process_index(), jax.sharding.Mesh(jax.devices(), ("ep",))
    _native.cuda = FakeNative()
    reason = _backends._agree("no GPU" if me == 1 else "", mesh, "ep", 20.0)[0]
    assert reason == ("no GPU" if me == 1 else "process 1: no GPU")
    elsewhere = jax.sharding.Mesh([device for device in jax.devices() if device.process_index != me], ("ep",))
    assert _backends._agree("", elsewhere, "ep", 20.0)[0] == f"process {me} has no device in the mesh"


def test_links_between_processes():
    run_program("links_between_processes", 2)


def links_between_processes():
    """Process 0 sees the GPUs of both processes, process 1 only its own. No process looks at GPUs of another node."""
    native, me = FakeNative(), jax.process_index()
    _native.cuda = native
    if me == 0:
        native.find_device = lambda uuid: int(uuid.split()[-1])
    native.unsupported_pair = lambda ordinals: f"the link of {ordinals} splits" if len(ordinals) > 1 else ""
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    reason = _backends._agree("", mesh, "ep", 20.0)[0]
    assert reason == ("" if me == 0 else "process 0: ") + "the link of [0, 1] splits"
    alone = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 1), ("data", "ep"))
    assert _backends._agree("", alone, "ep", 20.0)[0] == ""
    os.environ["JAX_EP_NODE_SIZE"] = "1"
    sys.modules["jax_ep._nvshmem"] = None  # as if it had not been built
    assert "without NVSHMEM" in _backends._agree("", mesh, "ep", 20.0)[0]


class FakeNvshmem:
    """In place of jax_ep._nvshmem."""

    def __init__(self):
        self.started = []
        self.finished = []

    def unique_id(self):
        return b"made by %d" % jax.process_index()

    def start(self, unique_id, *, pe, num_pes, ordinal):
        self.started.append((unique_id, pe, num_pes, ordinal))

    def network(self):
        return "the network"

    def finish(self, ordinal):
        self.finished.append(ordinal)


def test_groups_over_a_network(monkeypatch):
    monkeypatch.setenv("JAX_EP_NODE_SIZE", "2")
    assert run_program("groups_over_a_network", 4).count("ended") == 4


def groups_over_a_network():
    native, nvshmem, me, devices = pretend_cuda(), FakeNvshmem(), jax.process_index(), np.array(jax.devices())
    _network._module = lambda: nvshmem
    mesh = jax.sharding.Mesh(devices[::-1], ("ep",))
    with make_group(mesh), make_group(mesh):
        first, second = native.opened
    assert first.network == "the network"
    assert first.pes == [[3, 2, 1, 0]]
    assert (first.node_size, second.node_size) == (2, 2)
    assert nvshmem.started == [(b"made by 0", me, 4, 0)]
    assert native.freed == native.closed == [second.id, first.id]

    # Groups within a node need no network, whatever their processes.
    if me < 2:
        with make_group(jax.sharding.Mesh(devices[:2], ("ep",))):
            assert native.opened[-1].sharing == "descriptor"
    else:
        # A group may span another mesh, but not other processes.
        os.environ["JAX_EP_NODE_SIZE"] = "1"
        with pytest.raises(ep.Error, match=r"processes \[2, 3\], and an earlier group .* of \[0, 1, 2, 3\]"):
            make_group(jax.sharding.Mesh(devices[2:], ("ep",)))
    atexit._run_exitfuncs()
    assert nvshmem.finished == [0]
    print("ended")


def test_doctor():
    done = launch(2, *JAX_EP, "doctor", devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("versions") == 1
    assert "4 x cpu (platform cpu), process 0 of 2" in done.stdout
    assert "ranks 2 (cpu:2048), 3 (cpu:2049)" in done.stdout
    assert "process 0, 1 cannot use the network: 2 devices of the mesh in one process" in done.stdout


def test_doctor_of_groups_that_use_cuda():
    run_program("doctor_of_groups_that_use_cuda", 4)


def doctor_of_groups_that_use_cuda():
    native = pretend_cuda()
    me = jax.process_index()

    def examine():
        findings = doctor.examine(doctor.Sizes())
        return findings["auto"], findings["ways"], doctor.report(findings)

    auto, ways, text = examine()
    assert auto["transport"] == "peer memory, which processes share as file descriptors"
    assert ways[2] == ["descriptor", "descriptor", None, "descriptor"]
    assert "D: peer memory, which processes share as file descriptors" in text

    # Each process says how its memory is to be mapped; or that it cannot be.
    os.environ["JAX_EP_SHARING"] = "ipc" if me == 1 else ""
    assert examine()[1][2] == ["descriptor", "ipc", None, "descriptor"]
    os.environ["JAX_EP_SHARING"] = "post" if me == 1 else ""
    _, ways, text = examine()
    assert ways == []
    assert "process 1 cannot make a group: JAX_EP_SHARING is 'post'; it must be" in text
    native.no_fabric = ""
    os.environ["JAX_EP_SHARING"] = "fabric"
    auto, ways, text = examine()
    assert auto["transport"].startswith("peer memory, which processes share by fabric handles")
    assert ways[2] == ["fabric", "fabric", None, "fabric"]
    assert "F: peer memory, which processes share by fabric handles" in text
    os.environ["JAX_EP_SHARING"] = ""

    def not_built():
        raise ModuleNotFoundError

    _network._module = not_built
    os.environ["JAX_EP_NODE_SIZE"] = "2"
    auto, ways, text = examine()
    assert (auto["backend"], ways) == ("reference", [])
    assert "process 0, 1, 2, 3 cannot use the network: jax_ep was built without NVSHMEM" in text
    _network._module = FakeNvshmem
    auto, ways, text = examine()
    assert auto["transport"].startswith("NVSHMEM between hosts")
    assert ways[2] == ["network", "network", None, "mapped"]
    assert [line.split() for line in text.splitlines() if line.startswith("          2")] == [["2", "N", "N", "M"]]
    assert "all can use the network" in text

    doctor._gpus = lambda devices: ["the only one"]
    assert "processes 0 and 1 use the same GPU (the only one); give each its own" in examine()[0]["reason"]


def test_doctor_when_a_process_fails():
    run_program("doctor_when_a_process_fails", 2)


def doctor_when_a_process_fails():
    """No process waits for it, and all tell what was raised."""
    me, begun = jax.process_index(), time.monotonic()

    def gpus(devices):
        if me == 1:
            raise RuntimeError("no such GPU")
        return []

    doctor._gpus = gpus
    findings = doctor.examine(doctor.Sizes())
    assert findings["auto"]["reason"] == ("no such GPU" if me == 1 else "process 1: no such GPU")
    assert f"None: {findings['auto']['reason']}" in doctor.report(findings)
    assert time.monotonic() - begun < 60


def test_a_program_that_one_process_does_not_run():
    run_program("who_does_not_come", 2)


def who_does_not_come():
    _processes._PROGRAMS_TIMEOUT = 1.0
    if jax.process_index() == 0:
        with pytest.raises(
            ep.Error, match="^jax_ep.bench: process 1 has not come within 1 s. All processes must run it"
        ):
            _processes.exchange_among_all("jax_ep.bench", "hosts", "here")


def test_a_process_that_comes_late_to_the_end():
    run_program("who_comes_late_to_the_end", 2)


def who_comes_late_to_the_end():
    me = jax.process_index()
    rendezvous = _processes.Rendezvous("a walk", [0, 1], timeout=1.0)
    rendezvous.exchange(None)
    if me == 1:
        time.sleep(3)  # the other has gone, and must not be taken for present
    with pytest.raises(ep.Error, match=f"^Group: process {1 - me} has not come within 1 s. Every process"):
        rendezvous.wait_for_all()


# --- a layer --------------------------------------------------------------------------------------------------------


def check_layer(mesh, layout, backend):
    """dispatch bit for bit; combine and a gradient within combine's bound."""
    inputs = make_inputs(SMALL, mesh.size, "uneven")
    expected = oracle.dispatch(*inputs, num_experts=SMALL.num_experts, layout=layout)
    route = expected.route
    y = random_rows(route, SMALL.hidden, SMALL.dtype)

    def step(y, x, topk_idx, topk_weights):
        def rows(x):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
            return recv.x, recv

        _, transpose, recv = jax.vjp(rows, x, has_aux=True)
        return recv, ep.combine(y, recv), transpose(y)[0]

    axis_name = mesh.axis_names[::-1] if len(mesh.axis_names) > 1 else "ep"
    by_rank = jax.sharding.PartitionSpec(axis_name)

    def on_device(*arguments):
        return jax.tree.map(lambda a: a[None], step(*(a[0] for a in arguments)))

    with make_group(mesh, backend=backend, axis_name=axis_name) as group:
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=by_rank, out_specs=by_rank)
        recv, out, dx = jax.jit(mapped)(*(shard(a, mesh, axis_name) for a in (y, *inputs)))
        jax.block_until_ready((recv, out, dx))
        group.check()
    assert_local_bits(recv.x, expected.x)
    assert_local_bits(recv.weights, expected.weights)
    assert_local_bits(recv.counts, route.counts)
    assert_local_bits(recv.num_dropped, route.num_dropped)
    assert_local_sum(out, *oracle.combine(y, expected.weights, route))
    assert_local_sum(dx, *oracle.combine(y, None, route))


def check_balanced_layer(mesh, layout, backend):
    """A plan, the rows that go along it and the copies of experts, bit for bit; a sum within combine's bound."""
    x, topk_idx, topk_weights = make_inputs(SMALL, mesh.size, "hot_expert")
    local = SMALL.num_experts // mesh.size
    plan = oracle.balance(topk_idx, num_experts=SMALL.num_experts, num_slots=local)
    assert (plan.slot_expert >= 0).any()
    capacity = None if layout == "expert" else SMALL.tokens * SMALL.top_k
    num_slots = 2 * SMALL.num_experts
    expected = oracle.dispatch(x, plan.topk_slot, topk_weights, num_experts=num_slots, layout=layout, capacity=capacity)
    y = random_rows(expected.route, SMALL.hidden, SMALL.dtype)
    w = np.arange(2 * SMALL.num_experts, dtype=np.float32).reshape(mesh.size, local, 2)

    def step(y, x, topk_idx, topk_weights, w):
        plan = ep.balance(topk_idx, group=group)
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, plan=plan, zero_pad=True)
        copied, transpose = jax.vjp(lambda w: ep.replicate(w, plan), w)
        return plan.slot_expert, recv, ep.combine(y, recv), copied, transpose(jnp.ones_like(copied))[0]

    axis_name = mesh.axis_names[::-1] if len(mesh.axis_names) > 1 else "ep"
    by_rank = jax.sharding.PartitionSpec(axis_name)

    def on_device(*arguments):
        return jax.tree.map(lambda a: a[None], step(*(a[0] for a in arguments)))

    with make_group(mesh, backend=backend, axis_name=axis_name, replicas=local) as group:
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=by_rank, out_specs=by_rank)
        arrays = (shard(a, mesh, axis_name) for a in (y, x, topk_idx, topk_weights, w))
        slot_expert, recv, out, copied, gradient = jax.block_until_ready(jax.jit(mapped)(*arrays))
        group.check()
    assert_local_bits(slot_expert, plan.slot_expert)
    assert_local_bits(recv.x, expected.x)
    assert_local_bits(recv.counts, expected.route.counts)
    assert_local_bits(recv.num_dropped, np.zeros(mesh.size, np.int32))
    assert_local_sum(out, *oracle.combine(y, expected.weights, expected.route))
    assert_local_bits(copied, oracle.replicate(w, plan.slot_expert))
    copies = np.array([np.sum(plan.slot_expert == expert) for expert in range(SMALL.num_experts)])
    assert_local_bits(gradient, np.broadcast_to(1 + copies.reshape(mesh.size, local, 1), w.shape).astype(np.float32))


def shard(array: np.ndarray, mesh: jax.sharding.Mesh, axis_name="ep") -> jax.Array:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis_name))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def assert_local_bits(actual: jax.Array, expected: np.ndarray) -> None:
    for local in actual.addressable_shards:
        assert_same_bits(local.data, expected[local.index])


def assert_local_sum(actual: jax.Array, total: np.ndarray, magnitude: np.ndarray) -> None:
    for local in actual.addressable_shards:
        error = np.linalg.norm(np.asarray(local.data.astype(jnp.float32)) - total[local.index])
        assert error <= COMBINE_BOUND[SMALL.dtype] * np.linalg.norm(magnitude[local.index])


# --- on GPUs, also emulated ones ------------------------------------------------------------------------------------


def gpus():
    return min(4, len(jax.local_devices()))


def kernels():
    """Of a program: the backend that runs the kernels."""
    return "cuda" if jax.default_backend() == "gpu" else "emulated"


emulated = pytest.mark.skipif(_native.emulated is None, reason="needs emulated GPUs")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), *(["emulated"] if _native.emulated else [])])
def kernel_backend(request):
    """Where the processes run the kernels. They have emulated GPUs of their own, and share memory like others."""
    return request.param


@pytest.fixture
def run_processes(kernel_backend):
    """run_processes(program, num_processes=None, devices=1); by default one process per GPU, or two emulated."""

    def run(program, num_processes=None, devices=1):
        if kernel_backend == "emulated":
            return run_program(program, num_processes or 2, devices=devices)
        return run_program(program, num_processes or gpus(), devices=devices, platform="gpu")

    return run


@pytest.fixture(params=["descriptor", "ipc", "fabric"])
def sharing(request, monkeypatch):
    """How the processes map each other's memory."""
    monkeypatch.setenv("JAX_EP_SHARING", request.param)
    if request.param == "fabric" and "emulated" not in request.node.name:
        try:
            _native.cuda.offer_fabric([0])
        except RuntimeError as error:
            pytest.skip(f"no fabric handles: {error}")
    return request.param


def test_a_layer_on_gpus(sharing, run_processes):
    run_processes("layers_on_gpus")


@pytest.mark.gpu
def test_doctor_on_gpus(sharing):
    done = launch(2, *JAX_EP, "doctor", platform="gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" 1   {sharing[0].upper()}" in done.stdout


def test_processes_of_two_gpus(run_processes, kernel_backend):
    if kernel_backend == "cuda" and gpus() < 4:
        pytest.skip("needs four GPUs")
    run_processes("layers_on_gpus", 2, devices=2)


def layers_on_gpus():
    devices = np.array(jax.devices())
    meshes = jax.sharding.Mesh(devices, ("ep",)), jax.sharding.Mesh(devices[::-1], ("ep",)), mesh_of_two_axes()
    for mesh in meshes:
        for layout in ("expert", "ragged"):
            check_layer(mesh, layout, kernels())


def test_balance_on_gpus(run_processes):
    run_processes("balance_on_gpus")


def balance_on_gpus():
    check_balanced_layer(jax.sharding.Mesh(jax.devices(), ("ep",)), "ragged", kernels())


def test_groups_are_made_again_and_again(sharing, run_processes):
    run_processes("groups_again_and_again")


def groups_again_and_again():
    """Two groups at a time, again and again, with mixed operations that give the same bits each time."""
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    x, topk_idx, _ = make_inputs(SMALL, mesh.size, "uneven")
    first_choices = topk_idx[..., 0] % SMALL.num_experts
    splits = np.array([np.bincount(choices, minlength=SMALL.num_experts) for choices in first_choices], np.int32)
    x, topk_idx, splits = (shard(a, mesh) for a in (x, topk_idx, splits))
    first = {}
    turns, calls_of_first_turn = (20, 50) if kernels() == "cuda" else (3, 8)
    for turn in range(turns):
        with make_group(mesh, backend=kernels()) as one, make_group(mesh, backend=kernels()) as other:
            results = []
            for group in (one, other):
                exchanged = jax.jit(spmd(partial(exchange_rows, group), mesh))
                results += [("exchange", exchanged(x, splits))]
                for layout in ("expert", "ragged"):
                    layer = jax.jit(spmd(partial(there_and_back, group, layout), mesh))
                    results += [(layout, layer(x, topk_idx)) for _ in range(calls_of_first_turn if turn == 0 else 2)]
            jax.block_until_ready(results)
            one.check()
            other.check()
            for name, result in results:
                here = [np.asarray(local.data) for local in result.addressable_shards]
                assert_trees_same_bits(here, first.setdefault(name, here))


@emulated
def test_ranks_of_two_hosts():
    run_program("ranks_of_two_hosts", 2, devices=2)


def ranks_of_two_hosts():
    """As if NVLink connected the GPUs of two hosts. The processes cannot exchange file descriptors."""
    me, mesh = jax.process_index(), jax.sharding.Mesh(jax.devices(), ("ep",))
    _processes.host = lambda: f"host {me}"
    _processes.send_descriptors = None
    layers_on_gpus()
    x, topk_idx = (shard(a, mesh) for a in make_inputs(SMALL, mesh.size, "uneven")[:2])
    with make_group(mesh, backend="emulated", timeout=5.0) as group:
        assert (group._impl.transport, group._impl._sharing) == ("fabric", "fabric")
        layer = jax.jit(spmd(partial(there_and_back, group, "ragged"), mesh))
        jax.block_until_ready(layer(x, topk_idx))
        if me == 0:  # rank 2 does not come
            expect_failure(
                group, layer, x, topk_idx, r"gave up waiting for rank [23]|rank 1 gave up, and rank 0 with it"
            )
        _processes.exchange("failed", None, [0, 1], 60.0)
        if me == 1:  # whose processes do not see the record
            with pytest.raises(ep.PeerTimeoutError, match=r"an operation: rank [01] gave up, and rank [23] with it"):
                group.check()
    with pytest.raises(ep.PeerTimeoutError, match="gave up"):
        group.check()

    # Closing a group keeps the failure of the other host.
    with make_group(mesh, backend="emulated", timeout=5.0) as group:
        layer = jax.jit(spmd(partial(there_and_back, group, "ragged"), mesh))
        if me == 0:
            expect_failure(group, layer, x, topk_idx, "gave up")
        _processes.exchange("failed", None, [0, 1], 60.0)
    with pytest.raises(ep.PeerTimeoutError, match="gave up"):
        group.check()


def expect_failure(group, layer, x, topk_idx, message):
    with emulated_patience(0.5), contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
        jax.block_until_ready(layer(x, topk_idx))
    with pytest.raises(ep.PeerTimeoutError, match=message):
        group.check()


@emulated
@pytest.mark.parametrize("way", ["ipc", "fabric"])
def test_memory_is_freed_when_all_have_closed(way, monkeypatch):
    monkeypatch.setenv("JAX_EP_SHARING", way)
    run_program("memory_freed_when_all_have_closed", 2)


def memory_freed_when_all_have_closed():
    me, mesh = jax.process_index(), jax.sharding.Mesh(jax.devices(), ("ep",))

    def num_arenas():
        """The files of emulated device memory, also mapped ones of the other process, without control memory."""
        files = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        emulated = [file.stat() for file in files if "jax_ep_emulated" in os.path.realpath(file)]
        return len({file.st_ino for file in emulated if file.st_size > 2 << 20})

    group = make_group(mesh, dataclasses.replace(SMALL, tokens=2048), backend="emulated")
    assert num_arenas() > 0
    closing = threading.Thread(target=group.close)
    if me == 0:
        closing.start()
        time.sleep(1)
        assert closing.is_alive()
        assert num_arenas() == 1  # its own
    _processes.exchange("looked", None, [0, 1], 60.0)
    if me == 1:
        closing.start()
    closing.join()
    assert num_arenas() == 0


def test_groups_in_other_order(run_processes):
    run_processes("groups_in_other_order")


def groups_in_other_order():
    """The first process calls two programs in another order than the others: an error, long before the time-out.

    Emulated GPUs keep their default patience: otherwise, the time of one process could jump to its time-out before the
    other process has waited for a second.
    """
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    inputs = make_inputs(SMALL, mesh.size, "uneven")
    x, topk_idx = shard(inputs.x, mesh), shard(inputs.topk_idx, mesh)
    groups = [make_group(mesh, backend=kernels(), timeout=200.0) for _ in range(2)]
    layers = [jax.jit(spmd(partial(there_and_back, group, "ragged"), mesh)) for group in groups]
    for layer in layers:
        jax.block_until_ready(layer(x, topk_idx))
    begun = time.monotonic()
    try:
        jax.block_until_ready([layer(x, topk_idx) for layer in layers[:: 1 if jax.process_index() else -1]])
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert kernels() == "emulated" and "its group has failed before" in str(error)
    assert time.monotonic() - begun < 60
    errors = []
    for group in groups:
        try:
            group.check()
        except ep.Error as error:
            errors.append(str(error))
    assert any("operations of this group and of another group in different order" in error for error in errors), errors


@pytest.fixture
def node_size(monkeypatch):
    """Half of the ranks, as if those of the other half were on another host."""
    if _network.obstacle(jax.sharding.Mesh(jax.local_devices()[:1], ("ep",))):
        pytest.skip("jax_ep has no network transport here")
    monkeypatch.setenv("JAX_EP_NODE_SIZE", str(gpus() // 2))
    monkeypatch.setenv("NVSHMEM_DEBUG", "WARN")  # it tells the reason to nobody but the log


@pytest.mark.gpu
def test_a_layer_over_a_network(node_size):
    run_program("layers_on_gpus", gpus(), platform="gpu")


@pytest.mark.gpu
def test_each_rank_on_a_host_of_its_own(node_size, monkeypatch):
    monkeypatch.setenv("JAX_EP_NODE_SIZE", "1")
    run_program("layers_on_gpus", gpus(), platform="gpu")


@pytest.mark.gpu
def test_groups_over_a_network_again_and_again(node_size):
    run_program("groups_again_and_again", gpus(), platform="gpu")


@pytest.mark.gpu
def test_a_network_gives_the_same_bits(node_size):
    run_program("same_bits_over_a_network", gpus(), platform="gpu")


def same_bits_over_a_network():
    """All operations, for few tokens and many, also with units that look as if they had not arrived.

    Sums of many tokens are added by node: they are the same on every run, but not those of a group inside a host.
    """
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    node_size = os.environ["JAX_EP_NODE_SIZE"]
    for tokens, hidden in ((2, 128), (8, 2048), (48, 1152), (200, 7168)):
        shape = dataclasses.replace(SMALL, tokens=tokens, hidden=hidden)
        operands = [shard(a, mesh) for a in inputs_of_every_operation(shape, mesh.size)]
        results = {}
        for size in (node_size, ""):
            os.environ["JAX_EP_NODE_SIZE"] = size
            with make_group(mesh, shape, backend="cuda") as group:
                run = jax.jit(spmd(partial(every_operation, group), mesh))
                for _ in range(10):
                    here = jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), run(*operands))
                    group.check()
                    assert_trees_same_bits(here, results.setdefault(size, here))
        for over_a_network, inside_a_host in zip(results[node_size], results[""], strict=True):
            assert_trees_same_bits(over_a_network, inside_a_host)
            if tokens > 32:
                break  # before the sums


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["1", "half"])
def test_order_of_sums_over_a_network(node_size, size, monkeypatch):
    if size != "half":
        monkeypatch.setenv("JAX_EP_NODE_SIZE", size)
    run_program("order_of_sums", gpus(), platform="gpu")


def order_of_sums():
    """combine and dispatch's gradient add within a node, then over nodes, bit for bit."""
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    shape = dataclasses.replace(SMALL, num_experts=32, top_k=8, tokens=40, hidden=1152)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)
    with make_group(mesh, shape, backend="cuda") as group:

        def sums(x, topk_idx, topk_weights):
            def rows(x):
                recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", zero_pad=True)
                return recv.x, recv

            y, transpose, recv = jax.vjp(rows, x, has_aux=True)
            weighted = (y * recv.weights[:, None]).astype(y.dtype)  # so that both sums have the same terms
            return ep.combine(y, recv), transpose(weighted)[0]

        results = jax.jit(spmd(sums, mesh))(*(shard(a, mesh) for a in (x, topk_idx, topk_weights)))
        jax.block_until_ready(results)
        group.check()
    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts)
    for result in results:
        assert_local_bits(result, oracle.sum_over_ranks(parts, int(os.environ["JAX_EP_NODE_SIZE"])))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 64])
def test_traffic(node_size, tokens):
    run_program(f"traffic_of_{tokens}", gpus(), platform="gpu")


def traffic_of_8():
    expect_traffic(tokens=8, by_node=False)


def traffic_of_64():
    expect_traffic(tokens=64, by_node=True)


def expect_traffic(tokens, by_node):
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    me, shape = jax.process_index(), dataclasses.replace(SMALL, tokens=tokens)
    inputs = make_inputs(shape, mesh.size, "uneven")
    expected = traffic(inputs.topk_idx, shape, int(os.environ["JAX_EP_NODE_SIZE"]), by_node=by_node)
    with make_group(mesh, shape, backend="cuda") as group:
        layer = jax.jit(spmd(partial(there_and_back, group, "ragged"), mesh))
        jax.block_until_ready(layer(shard(inputs.x, mesh), shard(inputs.topk_idx, mesh)))
        group.check()
        assert group._impl.traffic() == tuple(expected[me])


@pytest.mark.parametrize("when", ["between_operations", "in_a_kernel"])
def test_a_process_that_dies(when, kernel_backend):
    if kernel_backend == "cuda":
        expect_death_to_be_noticed(when, gpus(), "gpu")
    else:
        expect_death_to_be_noticed(when, 2, "cpu")


@emulated
def test_a_process_that_dies_with_fabric_handles(monkeypatch):
    monkeypatch.setenv("JAX_EP_SHARING", "fabric")
    done = expect_death_to_be_noticed("between_operations", 2, "cpu")
    assert "Group.close: its memory stays taken" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["between_operations", "in_a_kernel"])
def test_a_process_that_dies_over_a_network(node_size, when):
    expect_death_to_be_noticed(when, gpus(), "gpu")


def expect_death_to_be_noticed(when, num_processes, platform):
    """The others find out in time, and nothing hangs."""
    done = launch(num_processes, sys.executable, __file__, f"dies_{when}", platform=platform, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr  # 124: one hangs
    assert done.stdout.count("gave up") == num_processes - 1, done.stdout + done.stderr
    return done


def dies_between_operations():
    dies(in_a_kernel=False)


def dies_in_a_kernel():
    dies(in_a_kernel=True)


def dies(in_a_kernel):
    mesh = jax.sharding.Mesh(jax.devices()[::-1], ("ep",))  # rank 0 is not process 0, without which nobody can go on
    inputs = make_inputs(SMALL, mesh.size, "uneven")
    x, topk_idx = shard(inputs.x, mesh), shard(inputs.topk_idx, mesh)
    group = make_group(mesh, backend=kernels(), timeout=5.0)
    layer = jax.jit(spmd(partial(there_and_back, group, "ragged"), mesh))
    jax.block_until_ready(layer(x, topk_idx))
    if mesh.devices[0].process_index == jax.process_index():
        if in_a_kernel:
            threading.Thread(target=layer, args=(x, topk_idx), daemon=True).start()  # waits for the others
            time.sleep(1)
        os._exit(0)  # as if killed, but not so that the launcher ends the others
    time.sleep(3)  # until it has died
    begun = time.monotonic()
    with emulated_patience(0.5):
        try:
            jax.block_until_ready(layer(x, topk_idx))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # GPUs have the second operation in their queue when the first one fails.
            assert kernels() == "emulated" and "its group has failed before" in str(error)
    assert time.monotonic() - begun < group.timeout + 1
    told = r"gave up waiting for rank 0|rank \d gave up, and rank \d with it"
    with pytest.raises(ep.PeerTimeoutError, match=told) as error:
        group.check()
    print(error.value, flush=True)
    group.close()
    if jax.process_index() == 0:
        time.sleep(5)  # the others end if this one does
    os._exit(0)  # jax.distributed would wait for the dead


if __name__ == "__main__":
    faulthandler.dump_traceback_later(TIMEOUT_S - 20)  # where it hangs
    jax.distributed.initialize()
    globals()[sys.argv[1]]()
