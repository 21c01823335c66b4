"""The command-line parser of every module: an error is one line, as everywhere."""

from __future__ import annotations

import argparse


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser whose errors are one line without the usage text; --help has that. Exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; allowed: see --help\n")
