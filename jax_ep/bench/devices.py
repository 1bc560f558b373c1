"""The devices that are timed."""

import os

VIRTUAL_CPUS = 8


def allow_virtual_cpus() -> None:
    """Several CPU devices, for want of an accelerator, unless the user chose their number; before JAX first looks."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={VIRTUAL_CPUS}"
