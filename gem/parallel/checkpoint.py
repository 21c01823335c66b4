"""Checkpoints of parallel runs, by torch.distributed.checkpoint: every rank writes its shards, any mesh reads them.

A checkpoint is a folder step-<N> with the tensors and a run.json (step, losses, mesh, what the run must agree on). It
is written under another name and renamed when all ranks are done, so a killed job leaves the last whole one; the one
before it is kept too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

FORMAT = 1
KEPT = 2
RUN = "run.json"


def save(folder: Path, step: int, state: dict[str, Tensor], run: dict) -> Path:
    """Write `state` (names -> DTensors, or tensors that ranks share) as folder/step-<step>. Collective.

    run: JSON-able, the same on all ranks: what `load` returns and compares.
    """
    path, partial = folder / f"step-{step}", folder / f".step-{step}.partial"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=str(partial))
    if dist.get_rank() == 0:
        (partial / RUN).write_text(json.dumps({"format": FORMAT, "step": step, **run}) + "\n")
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
        for old in _all(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return path


def last(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder, None without one."""
    return next(reversed(_all(folder)), None)


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and (path / RUN).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_run(path: Path, identity: dict) -> dict:
    """run.json of a checkpoint; ValueError if it is unreadable or differs from `identity` in one of its keys."""
    try:
        run = json.loads((path / RUN).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path}: {RUN} is unreadable ({str(error).splitlines()[0]})") from None
    if run.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: format {run.get('format')!r}; allowed: {FORMAT}")
    for key, value in identity.items():
        found = run.get("identity", {}).get(key)
        if found != value:
            raise ValueError(
                f"checkpoint {path}: {key} is {found!r}, this run has {value!r}; remove it or drop --resume"
            )
    return run


def load(path: Path, state: dict[str, Tensor]) -> None:
    """Read a checkpoint into the tensors of `state`, whatever mesh wrote it. Collective. ValueError: a damaged one."""
    try:
        dcp.load(state, checkpoint_id=str(path))
    except Exception as error:  # torch raises several kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {path}: unreadable ({reason})") from error


def describe_last(arguments: Sequence[str]) -> str:
    """Words for the end of a lost job: the newest checkpoint below the --output of its command line."""
    reader = argparse.ArgumentParser(add_help=False)
    reader.add_argument("--output")
    output = reader.parse_known_args(list(arguments))[0].output
    found = (
        [path for seed in sorted(Path(output).glob("seed*")) if (path := last(seed / "checkpoints"))] if output else []
    )
    if not found:
        return "no checkpoint was written yet"
    return f"last checkpoint: {', '.join(map(str, found))}; go on with --resume"
