"""How the processes that make a group together exchange values and file descriptors.

Processes exchange values through `jax.distributed`'s key-value store, and file descriptors through sockets. A single
process needs neither.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ep import _compat
from jax_ep._errors import Error

_MOST_DESCRIPTORS = 253  # Linux passes at most this many in one message

_RULE_OF_GROUPS = (
    "Every process that owns devices of the mesh must make the same groups in the same order, with the same backend; "
    "see whether that process is alive, or raise the group's timeout if it is only late."
)
_RULE_OF_PROGRAMS = "All processes must run it, in the same way; see whether that process is alive."
_PROGRAMS_TIMEOUT = 300.0  # seconds

_num_rendezvous: Counter[str] = Counter()  # how many there have been for each occasion


def join() -> bool:
    """Joins the other processes of this program, if there are any. Returns True if there are.

    jax-ep launch, srun and mpirun describe the processes in the environment. Call this before any function of JAX.
    """
    # A job of one task must not call initialize(): it has no process to join, and JAX would use only its first GPU.
    of_several = (int(os.environ.get(name, 1)) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if "JAX_COORDINATOR_ADDRESS" not in os.environ and not any(of_several):
        return False
    jax.distributed.initialize()
    return True


def owners(mesh: jax.sharding.Mesh) -> list[int]:
    """Returns the processes that own devices of `mesh`."""
    return sorted({device.process_index for device in mesh.devices.flat})


def ep_groups(mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...]) -> np.ndarray:
    """Returns the devices of `mesh` as [EP groups, ranks]. An EP group is the devices along `axis_name`.

    If `axis_name` is a tuple of axes, a rank is the position along the flattened axes, the first axis major.
    """
    axes = [mesh.axis_names.index(name) for name in ((axis_name,) if isinstance(axis_name, str) else axis_name)]
    num_ranks = math.prod(mesh.devices.shape[axis] for axis in axes)
    return np.moveaxis(mesh.devices, axes, range(-len(axes), 0)).reshape(-1, num_ranks)


def local_ordinals(devices: np.ndarray) -> list[int]:
    """Returns the CUDA ordinals of this process's devices in `devices`."""
    me = jax.process_index()
    return [device.local_hardware_id for device in devices.flat if device.process_index == me]


def peers(ep_groups: np.ndarray) -> list[int]:
    """Returns the other processes that share an EP group with this process."""
    me = jax.process_index()
    owners = [{device.process_index for device in ep_group} for ep_group in ep_groups]
    return sorted(set().union(*(processes for processes in owners if me in processes)) - {me})


def host() -> str:
    """Returns a name of this host. Processes with the same name share a kernel and a network namespace.

    Abstract Unix sockets connect only processes of one network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # some sandboxes have no such files
        return socket.gethostname()


class Rendezvous:
    """A point at which `processes` exchange values, for example while they make a group.

    The n-th rendezvous of an occasion is the same one in all processes. As a context manager, a rendezvous that ends
    without an error waits until all processes have ended it, and leaves nothing in the store. If a process raises an
    error inside, the rendezvous publishes it, and the other processes raise it at their next exchange.

    Error messages name `program`. Without it, they say that a group was being made.
    """

    def __init__(self, occasion: str, processes: Sequence[int], timeout: float, program: str | None = None) -> None:
        self.key = f"jax_ep/{occasion}/{_num_rendezvous[occasion]}"
        _num_rendezvous[occasion] += 1
        self.processes = processes
        self.timeout = timeout
        self._program = program
        self._rounds = 0

    def exchange(self, value: Any) -> dict[int, Any]:
        """Publishes `value`, which JSON must be able to hold. Returns the value of each process in this round.

        Raises:
            Error: a process has not come within the time-out, or has published an error.
        """
        me = jax.process_index()
        if len(self.processes) == 1:
            return {me: value}
        key = self._round()
        _compat.publish(f"{key}/{me}", json.dumps([value, None]))
        deadline = time.monotonic() + self.timeout
        texts = {
            process: _compat.look_up(f"{key}/{process}", deadline - time.monotonic()) for process in self.processes
        }
        answers = {process: json.loads(text) for process, text in texts.items() if text is not None}
        # Check before the next round begins: a process that comes late then finds the error in this round.
        _expect_all(self.processes, answers, self.timeout, self._program)
        self._rounds += 1
        for process, (_, error) in answers.items():
            if error is not None:
                raise Error(f"process {process}: {error}")
        return {process: value for process, (value, _) in answers.items()}

    def wait_for_all(self) -> None:
        """Returns when all processes have called it the same number of times.

        Raises:
            Error: a process has not come within the time-out.
        """
        if len(self.processes) == 1:
            return
        place, me = f"{self._round()}/all", jax.process_index()
        _compat.publish(f"{place}/{me}", "here")
        all_came = _compat.barrier(place, self.processes, self.timeout)
        _compat.forget(f"{place}/{me}")  # also on failure: a process that comes later must not find it
        if all_came:
            return
        come = [process for process in self.processes if _compat.look_up(f"{place}/{process}", 0) is not None]
        _expect_all(self.processes, [me, *come], self.timeout, self._program)
        raise Error(f"{self._program or 'Group'}: processes {self.processes} have not come at the same time")

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        me = jax.process_index()
        if len(self.processes) == 1:
            return
        if error is not None:
            _compat.publish(f"{self._round()}/{me}", json.dumps([None, str(error)]))
            return
        self.wait_for_all()
        for finished in range(self._rounds):
            _compat.forget(f"{self.key}/{finished}/{me}")

    def _round(self) -> str:
        return f"{self.key}/{self._rounds}"


def exchange(occasion: str, value: Any, processes: Sequence[int], timeout: float) -> dict[int, Any]:
    """Runs a rendezvous of one round while a group is made. Returns the value of each of `processes`."""
    with Rendezvous(occasion, processes, timeout) as rendezvous:
        return rendezvous.exchange(value)


def exchange_among_all(program: str, what: str, value: Any) -> dict[int, Any]:
    """Runs a `rendezvous_of_all` of one round. Returns the value of each process."""
    with rendezvous_of_all(program, what) as rendezvous:
        return rendezvous.exchange(value)


def rendezvous_of_all(program: str, what: str) -> Rendezvous:
    """Returns a rendezvous of all processes of `program`, such as jax_ep.bench. `what` names the occasion."""
    return Rendezvous(f"{program}/{what}", list(range(jax.process_count())), _PROGRAMS_TIMEOUT, program)


class Mailbox:
    """A socket to which processes of this host send file descriptors. It has a name, but no file."""

    def __init__(self) -> None:
        name = f"jax_ep-{secrets.token_hex(8)}"
        self._password = secrets.token_hex(16)  # every user of the host can see the socket's name
        self.address = f"{name} {self._password}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{name}")
        self._socket.listen()

    def receive(self, senders: Sequence[int], timeout: float) -> dict[int, list[int]]:
        """Returns the file descriptors that each process of `senders` sends. The caller must close them."""
        received: dict[int, list[int]] = {}
        self._socket.settimeout(timeout)
        while len(received) < len(senders):
            try:
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(timeout)
                    letter, descriptors, _, _ = socket.recv_fds(
                        connection, 1024, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
            except TimeoutError:
                break
            except ConnectionError:  # the sender has died; _expect_all finds out if it is one of `senders`
                continue
            password, _, sender = letter.decode(errors="replace").partition(" ")
            if password == self._password:
                received[int(sender)] = descriptors
            else:
                close(descriptors)
        try:
            _expect_all(senders, received, timeout)
        except Error:
            close(descriptor for descriptors in received.values() for descriptor in descriptors)
            raise
        return received

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


def send_descriptors(address: str, descriptors: Sequence[int], timeout: float) -> None:
    """Sends copies of `descriptors` to the `Mailbox` with this address. Does not wait until they are received."""
    name, password = address.split()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(f"\0{name}")
            socket.send_fds(connection, [f"{password} {jax.process_index()}".encode()], descriptors)
        except OSError as error:
            raise Error(f"Group: a process of this host has gone, or does not answer: {error}") from error


def close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _expect_all(expected: Sequence[int], come: Iterable[int], timeout: float, program: str | None = None) -> None:
    if missing := sorted(set(expected) - set(come)):
        who, rule = (program, _RULE_OF_PROGRAMS) if program else ("Group", _RULE_OF_GROUPS)
        raise Error(f"{who}: process {', '.join(map(str, missing))} has not come within {timeout:g} s. {rule}")
