"""Tasks for tests of gem.bench.farm, in a module of its own so that a new process has little to import."""

import os
import time
from pathlib import Path


class Task:
    """Writes when it prepares and measures; `how` says what goes wrong."""

    def __init__(self, folder: str, name: str, how: str = ""):
        self.folder, self.name, self.how = Path(folder), name, how

    def prepare(self) -> None:
        self.note("prepare")
        if self.how == "dies":
            os._exit(7)
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "slow":
            for _ in range(50):
                time.sleep(0.1)
                self.note("tick")
        if self.how == "raises":
            raise ValueError("prepare: two\nlines")

    def measure(self) -> str:
        self.note("begin")
        if self.how == "breaks":
            raise RuntimeError("measure")
        time.sleep(0.5 if self.name == "fast" else 0.05)
        self.note("end")
        return self.name.upper()

    def note(self, what: str) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(f"{time.monotonic_ns()} {what} {self.name}\n")
