"""Checkpoints: everything that the next step depends on, written so that a killed run leaves the old file or the new
one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

FORMAT = 1


def save(path: Path, state: dict) -> None:
    """Write `state` beside `path`, force it to disk, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            torch.save({"format": FORMAT, **state}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, identity: dict) -> dict:
    """Read a checkpoint. identity: what the run must agree on with it (variant, seed, data, ...); ValueError if not."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds for a damaged file
        raise ValueError(f"checkpoint {path}: unreadable ({str(error).splitlines()[0]})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: not a checkpoint of format {FORMAT}")
    for key, value in identity.items():
        if state["identity"].get(key) != value:
            raise ValueError(
                f"checkpoint {path}: {key} is {state['identity'].get(key)!r}, this run has {value!r}; "
                "remove it or drop --resume"
            )
    return state


def random_state(device: torch.device) -> dict:
    """State of the generators that a step may draw from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
