"""`jax-ep launch`: runs a program in several processes of this machine. See --help."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_DESCRIPTION = """\
Runs a program in several processes of this machine. jax.distributed.initialize(), without arguments, joins them.

  jax-ep launch -n 4 python train.py                    one GPU each, or one CPU device
  jax-ep launch -n 2 --devices 4 python train.py        four devices each
  jax-ep launch -n 2 --same-devices python test.py      both processes use GPU 0

The launcher sets the variables that Slurm sets. Each line of output begins with the number of its process. If a process
fails, the launcher ends the others and returns the exit status of the process that failed.
"""
_GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL


def _environment(process: int, num_processes: int, devices: int, same: bool, address: str) -> dict[str, str]:
    first = 0 if same else process * devices
    return os.environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # other machines cannot connect
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + devices))),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "SLURM_JOB_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(num_processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # The process gets its own session. So the launcher can end it with its children, and only the launcher gets Ctrl-C.
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def _forward(process: int, running: subprocess.Popen[bytes]) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        sys.stdout.buffer.write(b"[%d] %s" % (process, line if line.endswith(b"\n") else line + b"\n"))
        sys.stdout.buffer.flush()


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> int:
    """Waits until all processes have ended or one has failed. Returns the exit status, as a shell would."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        if deadline is not None and time.monotonic() > deadline:
            return 124
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends each process, and the processes that it has started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def launch(command: Sequence[str], num_processes: int, devices: int, same: bool, timeout: float | None) -> int:
    """Runs `command` in each process. Returns the exit status."""
    address = f"localhost:{_free_port()}"
    processes = []
    threads = []
    try:
        for process in range(num_processes):
            processes.append(_start(command, _environment(process, num_processes, devices, same, address)))
            threads.append(threading.Thread(target=_forward, args=(process, processes[-1]), daemon=True))
            threads[-1].start()
        return _wait(processes, timeout)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(processes)
        for thread in threads:
            thread.join(_GRACE_S)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jax-ep launch",
        usage="%(prog)s -n N [options] PROGRAM [ARGUMENT ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--processes", metavar="N", type=int, required=True, help="number of processes")
    add("--devices", metavar="N", type=int, default=1, help="GPUs, or CPU devices, of each process (default: 1)")
    add("--same-devices", action="store_true", help="give all processes the same GPUs: for tests")
    add("--timeout", metavar="S", type=float, help="end all processes after S seconds and return 124 (default: never)")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program to run, then its arguments")
    options = parser.parse_args(argv)
    for name in ("processes", "devices"):
        if (number := getattr(options, name)) < 1:
            parser.error(f"--{name} is {number}; it must be at least 1")
    if not options.program:
        parser.error("name a program, such as: python train.py")
    if shutil.which(options.program[0]) is None:
        parser.error(f"there is no program {options.program[0]!r}")
    return options


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command `jax-ep launch`. Returns its exit status."""
    options = _parse(argv)
    # The processes are in sessions of their own. Without this handler, they would outlive a launcher that gets SIGTERM.
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return launch(options.program, options.processes, options.devices, options.same_devices, options.timeout)
    finally:
        signal.signal(signal.SIGTERM, former)


if __name__ == "__main__":
    sys.exit(run())
