"""Checks the options of train_moe.py and decode.py. An error names the option and a correct value."""

import argparse
import math
from collections.abc import Callable, Iterator

import jax_ep as ep


def positive(kind: type) -> Callable:
    """Returns a parser of an option that must be above 0. `kind` is int or float."""

    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} must be {'1 or more' if kind is int else 'more than 0'}")
        return value

    parse.__name__ = kind.__name__  # argparse shows this name in its error
    return parse


def model_mismatches(options: argparse.Namespace, ranks: int) -> Iterator[str]:
    """Yields a message for each option that is wrong for a model whose experts are split over `ranks` devices."""
    unit = math.lcm(2 * options.heads, 8)
    if options.hidden % unit:
        yield (
            f"--hidden {options.hidden} must be a multiple of {unit} with --heads {options.heads} (an even number of "
            f"channels in each head, 16 bytes in bfloat16), such as {-(-options.hidden // unit) * unit}"
        )
    if options.experts % ranks:
        yield (
            f"--experts {options.experts} must be a multiple of the {ranks} devices that share them, such as "
            f"{-(-options.experts // ranks) * ranks}"
        )
    if options.top_k > min(options.experts, 32):
        yield f"--top-k {options.top_k} must be at most {min(options.experts, 32)}, with --experts {options.experts}"
    status = ep.backends().get(options.backend)  # "auto" has no status
    if status and not status.available:
        yield f"--backend {options.backend} cannot be used here: {status.reason}; use --backend auto"
