"""The native extension modules: loads them and registers their XLA FFI targets, once, when jax_ep is imported.

An extension that is missing never fails the import: what needs it says why it is missing, or runs in pure JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jax


def _load(name: str, platform: str) -> tuple[ModuleType | None, ImportError | None]:
    """The extension module jax_ep.<name> with its targets registered for `platform`, or why it does not load."""
    try:
        module = importlib.import_module(f"jax_ep.{name}")
    except ImportError as error:
        return None, error
    for target, handler in module.targets().items():
        # On CPUs dispatch_layout stays that of _cpu.
        if name != "_emulated" or target != "jax_ep_dispatch_layout":
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return module, None


cpu, _cpu_error = _load("_cpu", "cpu")
cuda, _cuda_error = _load("_cuda", "CUDA")
grouped_matmul, _ = _load("_grouped_matmul", "CUDA")  # built where CUTLASS's headers are
emulated, _ = _load("_emulated", "cpu")  # built for tests only


def cuda_reason() -> str | None:
    """Why the CUDA extension is missing, as a sentence that says what to do; None when it is loaded."""
    if cuda is not None:
        return None
    if not isinstance(_cuda_error, ModuleNotFoundError):
        return f"the CUDA extension does not load ({_cuda_error}); reinstall jax_ep on this machine"
    if cpu is not None:
        return f"jax_ep has no CUDA extension: {cpu.cuda_absence}"
    if not isinstance(_cpu_error, ModuleNotFoundError):
        return f"the native extensions do not load ({_cpu_error}); reinstall jax_ep on this machine"
    return (
        "jax_ep has no native extensions: it was installed without a C++ compiler, or Python imports the folder "
        "jax_ep/ of a checkout; install it where a compiler and nvcc are, and start Python in another folder than the "
        "checkout"
    )


def grouped_matmul_reason(devices: Iterable[Any] = ()) -> str | None:
    """Why the grouped GEMM cannot run on these devices; None if it can."""
    if grouped_matmul is None:
        return "jax_ep has no grouped GEMM: it was built without nvcc or without CUTLASS"
    for device in devices:
        if getattr(device, "compute_capability", None) != "9.0":
            return f"{device.device_kind} is no Hopper GPU (compute capability 9.0)"
    return None
