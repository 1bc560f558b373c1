"""Runs a program in several processes of this machine, which jax.distributed.initialize() joins.

    python scripts/launch_local.py -n 4 python examples/multihost.py         # one GPU each, or one CPU device
    python scripts/launch_local.py -n 2 --devices 4 python train.py --steps 10
    python scripts/launch_local.py -n 2 --same-devices python test.py         # both processes use GPU 0

It sets the variables that Slurm sets, which jax.distributed.initialize() reads without arguments. Each line of output
begins with the number of its process. If a process fails, the others are ended, and its exit status is returned; 124 if
it takes longer than --timeout.
"""

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

GRACE_S = 5.0  # between asking a process to end and ending it


def environment(process: int, num_processes: int, devices: int, same: bool, address: str) -> dict[str, str]:
    first = 0 if same else process * devices
    return os.environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not to other machines
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + devices))),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "SLURM_JOB_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(num_processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own, so that what it starts can be ended with it, and Ctrl-C comes to the launcher only.
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def forward(process: int, running: subprocess.Popen[bytes]) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        sys.stdout.buffer.write(b"[%d] %s" % (process, line if line.endswith(b"\n") else line + b"\n"))
        sys.stdout.buffer.flush()


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> int:
    """Until all have ended, or one has failed: its exit status, as a shell gives it."""
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


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends each process with all that it has started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def launch(command: Sequence[str], num_processes: int, devices: int, same: bool, timeout: float | None) -> int:
    address = f"localhost:{free_port()}"
    processes = []
    threads = []
    try:
        for process in range(num_processes):
            processes.append(start(command, environment(process, num_processes, devices, same, address)))
            threads.append(threading.Thread(target=forward, args=(process, processes[-1]), daemon=True))
            threads[-1].start()
        return wait(processes, timeout)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        end(processes)
        for thread in threads:
            thread.join(GRACE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument("--devices", type=int, default=1, help="GPUs, or CPU devices, of each process (1)")
    parser.add_argument("--same-devices", action="store_true", help="all processes use the same GPUs: for tests")
    parser.add_argument("--timeout", type=float, help="seconds after which all processes are ended (none)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    options = parser.parse_args()
    for name in ("processes", "devices"):
        if (number := getattr(options, name)) < 1:
            parser.error(f"--{name} is {number}; it must be at least 1")
    if not options.command:
        parser.error("name a program, such as: python examples/multihost.py")
    if shutil.which(options.command[0]) is None:
        parser.error(f"there is no program {options.command[0]!r}")
    return launch(options.command, options.processes, options.devices, options.same_devices, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
