"""Evaluation on the held-out split: NE, AUC and calibration a task, against the Bayes floor where the data know it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gem import metrics
from gem.dataset import Batch, Split


@torch.no_grad()
def predict(
    forward: Callable[[Batch], dict[str, torch.Tensor]], split: Split, batch_size: int, device: torch.device
) -> dict[str, np.ndarray]:
    """Probabilities of every row in file order, task -> float32 [rows]."""
    parts: dict[str, list[np.ndarray]] = {task: [] for task in split.schema.tasks}
    for batch in split.in_order(batch_size):
        for task, logits in forward(batch.to(device)).items():
            parts[task].append(logits.float().sigmoid().cpu().numpy())
    return {task: np.concatenate(items) for task, items in parts.items()}


def score(probabilities: dict[str, np.ndarray], split: Split) -> dict[str, metrics.Score]:
    """ne_<task>, auc_<task>, calibration_<task>, and ne_bayes_<task>: the NE that the true probabilities reach on the
    same rows and labels, which no model beats except by chance."""
    scores = {}
    for task, p in probabilities.items():
        labels, weights = split.labels[task], split.weights[task]
        scores[f"ne_{task}"] = metrics.normalised_entropy(p, labels, weights)
        scores[f"auc_{task}"] = metrics.auc(p, labels, weights)
        scores[f"calibration_{task}"] = metrics.calibration(p, labels, weights)
        if task in split.bayes:
            scores[f"ne_bayes_{task}"] = metrics.normalised_entropy(split.bayes[task], labels, weights)
    return scores


def bayes_floor(manifest: dict) -> dict[str, float | None]:
    """Expected NE of the true probabilities, as the data's maker computed it: task -> NE, empty for imported logs."""
    return {task: entry.get("ne") for task, entry in (manifest.get("bayes") or {}).items()}
