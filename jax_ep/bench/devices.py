"""The devices that the bench uses."""

import os

VIRTUAL_CPUS = 8


def allow_virtual_cpus() -> None:
    """Gives JAX several CPU devices, unless the user has set their number. Call it before JAX looks for devices.

    JAX uses them if the machine has no accelerator.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={VIRTUAL_CPUS}"
