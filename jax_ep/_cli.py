"""The command `jax-ep`: its first argument names a module of this package, whose `run` gets the other arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import jax_ep as ep

_COMMANDS = {  # name -> module, help
    "doctor": ("jax_ep.doctor", "say what jax_ep finds on this machine, and which backend a Group would use"),
    "bench": ("jax_ep.bench.__main__", "time dispatch and combine on this machine's devices"),
    "launch": ("jax_ep.launch", "run a program in several processes of this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status."""
    name, *arguments = _parse(sys.argv[1:] if argv is None else argv)
    module, _ = _COMMANDS[name]
    return importlib.import_module(module).run(arguments)


def _parse(argv: Sequence[str]) -> Sequence[str]:
    """Returns `argv` if its first argument is a command. Otherwise prints help or an error, and exits."""
    lines = [f"  {name:8}{description}" for name, (_, description) in _COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="jax-ep",
        usage="%(prog)s COMMAND [ARGUMENT ...]",
        description="\n".join(["Expert-parallel dispatch and combine for JAX. Commands:", "", *lines]),
        epilog="jax-ep COMMAND --help lists the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=ep.__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.parse_args(argv[:1])
    return argv
