"""The command-line parser of every module: an error is one line, as everywhere."""

from __future__ import annotations

import argparse
import gc

from gem import USUAL_PACE


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser whose errors are one line without the usage text; --help has that. Exit code 2."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if gc.get_threshold() != USUAL_PACE:  # a command has its imports behind it, and they stay
            gc.freeze()
            gc.set_threshold(*USUAL_PACE)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; allowed: see --help\n")
