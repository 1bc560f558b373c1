"""The CUDA backend on emulated GPUs (ffi/emulator/), for tests. Each CPU device is an emulated GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import jax

from jax_ep import _native
from jax_ep._backends.cuda import CudaBackend
from jax_ep._errors import Error
from jax_ep._settings import GroupSettings
from jax_ep._transport import Transport


class EmulatedBackend(CudaBackend):
    def __init__(self, group: GroupSettings, transport: Transport) -> None:
        super().__init__(group, cast(ModuleType, _native.emulated), transport)

    def _start_network(self, hosts: dict[int, str]) -> Any:
        if len(hosts) > 1:
            raise Error(f"Group: the emulated network joins the devices of one process; {len(hosts)} make this group")
        return self._native.network()

    def _processing_element(self, device: jax.Device) -> int:
        return self._ordinal(device)

    def _ordinal(self, device: jax.Device) -> int:
        return device.id  # XLA:CPU gives handlers this id, also with several processes
