"""python -m jax_ep.doctor."""

import json
import subprocess
import sys

import jax

import jax_ep as ep
from jax_ep import doctor


def test_json_tells_what_the_package_finds(capsys):
    doctor.main(["--json"])
    findings = json.loads(capsys.readouterr().out)
    assert findings["versions"]["jax_ep"] == ep.__version__
    assert findings["versions"]["jax"] == jax.__version__
    assert sum(findings["devices"]["kinds"].values()) == len(jax.devices())
    assert {name: ep.BackendStatus(**status) for name, status in findings["backends"].items()} == ep.backends()
    assert findings["auto"]["backend"] in ep.backends()


def test_report_tells_why_a_backend_is_missing(monkeypatch):
    missing = {"cuda": ep.BackendStatus(False, "no driver; install one"), "reference": ep.BackendStatus(True, "")}
    monkeypatch.setattr(ep, "backends", lambda: missing)
    text = doctor.report(doctor.examine())
    assert "cuda: no, no driver; install one" in text
    assert "reference: yes" in text


def test_a_machine_without_devices_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(jax, "devices", fail)
    findings = doctor.examine()
    assert findings["auto"]["backend"] is None
    assert "the driver is too old" in doctor.report(findings)


def test_runs_as_a_command():
    done = subprocess.run([sys.executable, "-P", "-m", "jax_ep.doctor"], capture_output=True, text=True, check=True)
    assert f"jax_ep {ep.__version__}" in done.stdout
