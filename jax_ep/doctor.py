"""Says what jax_ep finds on this machine: versions, devices, backends, and which one a `Group` would use.

python -m jax_ep.doctor [--json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

import jax_ep as ep
from jax_ep import _backends, _native


def examine() -> dict[str, Any]:
    """All findings: strings, numbers, booleans and None, in lists and dicts."""
    return {
        "versions": {
            "jax_ep": ep.__version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        },
        "extensions": {"_cpu": _native.cpu is not None, "_cuda": _native.cuda is not None},
        "backends": {name: status._asdict() for name, status in ep.backends().items()},
        **_devices_and_choice(),
    }


def _devices_and_choice() -> dict[str, Any]:
    """The devices that JAX sees, and what `Group(backend="auto")` would use on them."""
    try:
        devices = jax.devices()
    except Exception as error:  # JAX raises several kinds, AssertionError among them, where a platform does not start
        nothing = f"JAX finds no devices ({type(error).__name__}: {error})"
        return {"devices": {"error": nothing}, "auto": {"backend": None, "reason": nothing}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = _backends.choose("auto", jax.sharding.Mesh(devices, ("ep",)), "ep")
    return {
        "devices": {
            "error": None,
            "platform": devices[0].platform,
            "kinds": dict(Counter(device.device_kind for device in devices)),
            "process": jax.process_index(),
            "processes": jax.process_count(),
        },
        "auto": {
            "backend": backend,
            "reason": str(caught[0].message) if caught else f"the best on platform {devices[0].platform!r}",
        },
    }


def report(findings: dict[str, Any]) -> str:
    """`findings` for people."""
    devices, auto = findings["devices"], findings["auto"]
    if devices["error"] is None:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in devices["kinds"].items())
        found = f"{kinds} (platform {devices['platform']}), process {devices['process']} of {devices['processes']}"
    else:
        found = devices["error"]
    sections = {
        "versions": [f"{name} {version}" for name, version in findings["versions"].items()],
        "devices": [found],
        "extensions": [
            f"{name}: {'loaded' if is_loaded else 'no'}" for name, is_loaded in findings["extensions"].items()
        ],
        "backends": [
            f"{name}: {'yes' if status['available'] else 'no, ' + status['reason']}"
            for name, status in findings["backends"].items()
        ],
        'backend="auto" takes': [f"{auto['backend']}: {auto['reason']}"],
    }
    return "\n".join("\n  ".join([heading, *lines]) for heading, lines in sections.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_ep.doctor", description="Says what jax_ep finds here.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(argv).json
    findings = examine()
    print(json.dumps(findings, indent=1) if as_json else report(findings))


if __name__ == "__main__":
    main()
