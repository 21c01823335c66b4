"""Where a NaN or an infinity came from: the first bad tensor in the order in which a step makes them."""

from __future__ import annotations

import torch

from gem.attention import Events
from gem.config import Config
from gem.dataset import Batch
from gem.heads import batch_loss
from gem.model import GEM


def _bad(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    if isinstance(value, Events):
        return _bad(value.values)
    if isinstance(value, dict):
        return any(_bad(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(_bad(item) for item in value)
    values = getattr(value, "values", None)  # TorchRec's jagged and keyed tensors
    return _bad(values()) if callable(values) else False


@torch.no_grad()
def first_bad_tensor(model: GEM, batch: Batch, config: Config) -> str:
    """One name: an input, else a parameter, else the module whose output turns bad first when the forward is
    repeated."""
    inputs = {"dense": batch.dense, **{f"age of {name}": ages for name, ages in batch.ages.items()}}
    inputs |= {f"label {name}": value for name, value in batch.labels.items()}
    for name, value in inputs.items():
        if _bad(value):
            return f"input {name}"
    for name, value in model.named_parameters():
        if _bad(value):
            return f"parameter {name}"
    found: list[str] = []

    def look(name):
        def hook(module, arguments, output):
            if not found and _bad(output):
                found.append(f"output of {name or 'the model'}")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        # compiled layers run their hooks while they are traced, so the repetition is not compiled
        with torch.compiler.set_stance("force_eager"), _autocast(batch, config):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "loss"


def bad_gradient(model: GEM, batch: Batch, config: Config) -> str:
    """Name of the first dense parameter whose gradient is bad; without gradients at hand the step is repeated."""
    dense = model.dense_parameters()
    if all(value.grad is None for value in dense.values()):
        with torch.compiler.set_stance("force_eager"):
            with _autocast(batch, config):
                logits = model(batch)
            batch_loss(logits, batch).backward()
    return next((name for name, value in dense.items() if value.grad is not None and _bad(value.grad)), "?")


def _autocast(batch: Batch, config: Config):
    return torch.autocast(batch.dense.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
