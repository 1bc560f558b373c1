"""jax-ep doctor."""

import json
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import jax
import pytest

import jax_ep as ep
from helpers import ROOT, TESTS, open_group
from jax_ep import _hardware, _native, doctor
from shapes import Shape

needs_native = pytest.mark.skipif(_native.cpu is None, reason="the native extensions are not built")
SIZES = doctor.Sizes()
# As nvidia-smi prints it.
TOPOLOGY = (
    "\x1b[4m\tGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t0-47\n\nLegend:\n\n  X = Self\n"
)


def test_json_tells_what_the_package_finds(capsys):
    doctor.main(["--json"])
    findings = json.loads(capsys.readouterr().out)
    assert findings["versions"]["jax_ep"] == ep.__version__
    assert findings["versions"]["jax"] == jax.__version__
    assert sum(findings["devices"]["kinds"].values()) == len(jax.devices())
    assert {name: ep.BackendStatus(**status) for name, status in findings["backends"].items()} == ep.backends()
    assert findings["auto"]["backend"] in ep.backends()
    assert findings["memory"]["ranks"] == len(jax.devices())


def test_report_tells_why_a_backend_is_missing(monkeypatch):
    missing = {"cuda": ep.BackendStatus(False, "no driver; install one"), "reference": ep.BackendStatus(True, "")}
    monkeypatch.setattr(ep, "backends", lambda: missing)
    text = doctor.report(doctor.examine(SIZES))
    assert "cuda: no, no driver; install one" in text
    assert "reference: yes" in text


def test_a_machine_without_devices_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(jax, "devices", fail)
    findings = doctor.examine(SIZES)
    assert findings["auto"]["backend"] is None
    assert "the driver is too old" in doctor.report(findings)


def test_what_no_group_would_take_is_a_finding(monkeypatch):
    def fail(*arguments):
        raise ValueError("JAX_EP_NODE_SIZE is 'two'")

    monkeypatch.setattr(doctor._backends, "choose", fail)
    findings = doctor.examine(SIZES)
    assert findings["auto"] == dict.fromkeys(("reason", "transport"), "JAX_EP_NODE_SIZE is 'two'") | {"backend": None}


def test_runs_as_a_command():
    module = [sys.executable, "-m", "jax_ep.doctor"]
    done = subprocess.run(module, cwd=TESTS, capture_output=True, text=True, check=True)
    assert f"jax_ep {ep.__version__}" in done.stdout


def test_the_drivers_version(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert "nvidia driver" not in doctor.examine(SIZES)["versions"]
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    assert doctor.examine(SIZES)["versions"]["nvidia driver"] == "580.95.05"


def test_extensions_are_told_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_ep._nvshmem", None)  # as if it had not been built
    assert not doctor.examine(SIZES)["extensions"]["_nvshmem"]
    monkeypatch.setitem(sys.modules, "jax_ep._nvshmem", ModuleType("jax_ep._nvshmem"))
    findings = doctor.examine(SIZES)
    assert findings["extensions"] == {
        "_cpu": _native.cpu is not None,
        "_cuda": _native.cuda is not None,
        "_nvshmem": True,
        "_grouped_matmul": _native.grouped_matmul is not None,
    }
    assert "_nvshmem: loaded" in doctor.report(findings)


# Links


def test_links_that_cannot_be_measured():
    links = doctor._links(jax.devices("cpu"))
    assert links["pairs"] == []
    assert "not measured: there are no GPUs" in doctor._links_lines(links)


def test_links_as_the_driver_tells_them(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat <<'end'\n{TOPOLOGY}end\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [line.split() for line in doctor._topology()] == [
        ["GPU0", "GPU1", "CPU", "Affinity"],
        ["GPU0", "X", "NV18", "0-47"],
        ["GPU1", "NV18", "X", "0-47"],
    ]


def test_report_of_links():
    """A matrix; what has no number says below why."""
    there = {"from": 0, "to": 1, "gb_per_s": 371.4, "least_us": 3.06, "error": None}
    back = {"from": 1, "to": 0, "gb_per_s": None, "least_us": None, "error": "peer access is not supported"}
    lines = doctor._links_lines({"topology": ["GPU0 NV18"], "reason": None, "pairs": [there, back]})
    assert [line.split() for line in lines] == [
        ["GPU0", "NV18"],
        ["measured,", "GB/s", "|", "us:"],
        ["from", "\\", "to", "0", "1"],
        ["0", "371", "|", "3.1"],
        ["1", "-"],
        ["from", "1", "to", "0:", "peer", "access", "is", "not", "supported"],
    ]


@pytest.mark.gpu
def test_every_link_is_measured():
    links = doctor._links(jax.devices()[:2])
    assert links["reason"] is None
    assert len(links["pairs"]) == 2
    for pair in links["pairs"]:
        assert pair["error"] is None
        assert 1 < pair["gb_per_s"] < 2000
        assert 0.5 < pair["least_us"] < 100


# Memory


@needs_native
def test_memory_is_that_of_docs_design():
    """Section 6 there: 57.4 MiB for 128 tokens per rank, 918.5 for 4096."""
    for tokens, expected in ((128, "57.4 MiB per device"), (4096, "918.5 MiB per device")):
        memory = doctor._memory(SIZES._replace(tokens=tokens, ranks=8), num_devices=1)
        assert doctor._memory_line(memory).startswith(expected)


@needs_native
def test_memory_is_that_of_a_group(largest_mesh, kernel_backend):
    sizes = doctor.Sizes(tokens=24, hidden=128, experts=16, top_k=2, dtype="float32", ranks=largest_mesh.size)
    shape = Shape("sizes", num_experts=16, top_k=2, hidden=128, tokens=24, dtype="float32")
    with open_group(largest_mesh, shape, backend=kernel_backend) as group:
        assert doctor._memory(sizes, num_devices=1)["bytes_per_device"] == group.memory_bytes


@needs_native
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"experts": 256, "ranks": 6}, "experts is 256; it must be a multiple of the 6 ranks"),
        ({"ranks": 512}, "there are 512 devices, and a group has at most 256 ranks; give --ranks"),
        ({"hidden": 100, "ranks": 8}, "hidden is 100, a row of 200 bytes; it must be a multiple of 16 bytes"),
    ],
)
def test_sizes_of_no_group(sizes, reason):
    memory = doctor._memory(SIZES._replace(**sizes), num_devices=1)
    assert memory["bytes_per_device"] is None
    assert memory["reason"] == reason


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", "0", "--tokens is 0; it must be at least 1"),
        ("--top-k", "33", "--top-k is 33; it must be 1 to 32"),
        ("--ranks", "257", "--ranks is 257; it must be 1 to 256"),
    ],
)
def test_options_that_do_not_fit(capsys, option, value, message):
    with pytest.raises(SystemExit):
        doctor.main([option, value])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kind", "capability", "row"),
    [
        ("NVIDIA H200", "9.0", "hopper"),
        ("NVIDIA H100 80GB HBM3", "9.0", "hopper"),
        ("NVIDIA H100 PCIe", "9.0", "other_hopper"),
        ("NVIDIA H20", "9.0", "other_hopper"),
        ("NVIDIA H200 NVL", "9.0", "other_hopper"),
        ("NVIDIA GH200 480GB", "9.0", "other_hopper"),
        ("NVIDIA B200", "10.0", "blackwell"),
        ("NVIDIA GeForce RTX 5090", "12.0", "small_blackwell"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "older"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", "mig"),
        ("AMD Instinct MI300X", "gfx942", "other"),
    ],
)
def test_hardware_is_told_apart(kind, capability, row):
    gpu = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    assert _hardware.find(gpu) == _hardware.HARDWARE[row]


def test_the_report_names_the_hardware():
    (row,) = doctor.examine(SIZES)["devices"]["hardware"]
    assert row == str(_hardware.find(jax.devices()[0]))
    assert f"hardware\n  {row}" in doctor.report(doctor.examine(SIZES))


def test_the_documents_table_is_the_doctors():
    assert _hardware.table() in (ROOT / "docs" / "hardware.md").read_text()
