"""Command-line helpers: checked numbers, and one line for every error that a user can cause."""

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable


def _whole(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {minimum}")
    return value


def positive(text: str) -> int:
    return _whole(text, 1)


def non_negative(text: str) -> int:
    return _whole(text, 0)


def _number(text: str, good: Callable[[float], bool], allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and good(value)):
        raise argparse.ArgumentTypeError(f"{text!r} must be {allowed}")
    return value


def positive_float(text: str) -> float:
    return _number(text, lambda x: x > 0, "a number above 0")


def non_negative_float(text: str) -> float:
    return _number(text, lambda x: x >= 0, "a number of at least 0")


def fraction(text: str) -> float:
    return _number(text, lambda x: 0 < x <= 1, "a number in (0, 1]")


def rate(text: str) -> float:
    return _number(text, lambda x: 0 < x < 1, "a number in (0, 1)")


def run(main: Callable[[], int]) -> None:
    """Exit with main()'s code; ValueError and OSError become one line on stderr and exit code 1."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        code = 1
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written under the output's name", file=sys.stderr)
        code = 130
    sys.exit(code)


def describe_os_error(error: OSError) -> str:
    """One line; a full disk and a quota are named as such."""
    text = " ".join(str(error).split())
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text:
        return f"no space left while writing; nothing was written under the output's name ({text})"
    return text
