"""Results of cells kept one by one, so that a layer suite that is stopped loses nothing that it has timed.

A process keeps its cell's result as soon as it is there. A run that goes on (GEM_RESUME=1) takes what is whole and was
made by the present sources, settings and device; the record is then written from all of them together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gem import record
from gem.bench.timing import Timing


@dataclass(frozen=True)
class Store:
    """Results under `folder`. key: a digest of everything that they depend on."""

    folder: Path
    key: str

    @staticmethod
    def of(folder: Path, digest: str, depends: dict) -> Store:
        """digest: of the sources. depends: what else decides a result; anything that JSON can hold."""
        text = json.dumps([digest, depends], sort_keys=True, default=str)
        return Store(folder, hashlib.sha256(text.encode()).hexdigest()[:16])

    def path(self, name: str) -> Path:
        return self.folder / f"{name.replace(', ', '-').replace(' ', '_').replace(':', '.')}.json"

    def keep(self, name: str, found: dict) -> None:
        """Store a result: event (int) or part (str) -> Measured. As a whole or not at all; nothing that failed. A disk
        that takes no file is reported and costs the run nothing that it has timed."""
        if not found or any(item.status[0] != "ok" for item in found.values()):
            return
        items = [[event, dataclasses.asdict(item)] for event, item in found.items()]
        try:
            text = json.dumps({"key": self.key, "sha256": _digest(items), "found": items})
            record.write_text(self.path(name), text)
        except OSError as error:
            print(f"{name}: not kept: {type(error).__name__}: {error}", file=sys.stderr)

    def load(self, name: str, kind: type) -> dict | None:
        """A stored result as a dict of `kind`; None without GEM_RESUME=1, or if it is not there, damaged or of another
        key."""
        if os.environ.get("GEM_RESUME") != "1":
            return None
        try:
            kept = json.loads(self.path(name).read_text(encoding="utf-8"))
            if kept["key"] != self.key or kept["sha256"] != _digest(kept["found"]):
                return None
            return {event: _measured(kind, dict(values)) for event, values in kept["found"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _digest(items: list) -> str:
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()


def _measured(kind: type, values: dict):
    for name in ("fwd", "both"):
        values[name] = None if values[name] is None else Timing(**values[name])
    return kind(**values | {"status": tuple(values["status"])})
