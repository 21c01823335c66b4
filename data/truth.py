"""The process that the labels come from: known factors of items, users and context, so that the best possible NE is
known.

The logit of a click is `bias + static + crossing + recent + long_range`, each part standardised on a pilot sample and
weighted:

static      appeal of the item, of the user and one dense feature: first-order effects.
crossing    a random table [category, context], the product of two dense features and user factor x category factor.
recent      affinity of the candidate's category factor with the last `recent` impressions and clicks (weights decay
            with the number of events since, stronger actions count more) plus what these events' categories say about
            the user's mood whatever the candidate is.
long_range  the same affinity with the impressions more than `gap` events before every recent one, and a motif in two
            parts that are more than `gap` events apart: how much of the recent events' category mix returns from that
            older stretch. 0 without old events, mean 0 over the rows that have some. No attention over a window or
            block of `gap` tokens sees both parts at once.

The logit of a conversion given a click has the same form with its own tables; its recent part reads conversions too.
"""

from dataclasses import dataclass, field

import numpy as np

PARTS = ("static", "crossing", "recent", "long_range")
FACTORS = 4


@dataclass(frozen=True)
class Weights:
    """Standard deviation of each part in the logit."""

    static: float
    crossing: float
    recent: float
    long_range: float


@dataclass
class Rows:
    """What the labels of a chunk depend on; arrays with one row per sample."""

    user: np.ndarray  # int64 [B]
    item: np.ndarray  # int64 [B]
    category: np.ndarray  # int64 [B]
    context: np.ndarray  # int64 [B]
    dense: np.ndarray  # float32 [B, num_dense]
    recent_mix: dict[
        str, np.ndarray
    ]  # event type -> float32 [B, categories], weighted shares of the newest events (sum <= 1)
    old_mix: np.ndarray  # float32 [B, categories], shares of the long-range impressions; zeros without any


@dataclass
class Process:
    """Factors drawn once from a seed; `calibrate` fixes scales and biases, then `probabilities` is the truth."""

    num_users: int
    num_items: int
    num_categories: int
    num_contexts: int
    rng: np.random.Generator
    weights: dict[str, Weights]
    tables: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    moments: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    bias: dict[str, float] = field(default_factory=dict)
    old_mean: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        rng, K = self.rng, self.num_categories

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        for task in self.weights:
            self.tables[task] = {
                "category_appeal": normal(K),
                "item_appeal": normal(self.num_items),
                "user_appeal": normal(self.num_users),
                "context": normal(K, self.num_contexts),
                "user_factor": normal(self.num_users, 2),
                "candidate_factor": normal(K, FACTORS),
                "event_factor": normal(K, FACTORS),
                "mood": normal(K),
                "old_factor": normal(K, FACTORS),
                "old_mood": normal(K),
            }

    def parts(self, task: str, rows: Rows) -> dict[str, np.ndarray]:
        """The unscaled parts of the task's logit, each float32 [B]."""
        t, dense = self.tables[task], rows.dense
        width = dense.shape[1]
        first, second, third = dense[:, 0], dense[:, 1 % width], dense[:, 2 % width]
        item = t["category_appeal"][rows.category] + 0.5 * t["item_appeal"][rows.item]
        static = item + 0.5 * t["user_appeal"][rows.user] + 0.7 * first
        candidate = t["candidate_factor"][rows.category]
        user_category = np.einsum("bf,bf->b", t["user_factor"][rows.user], candidate[:, :2])
        crossing = t["context"][rows.category, rows.context] + 0.7 * second * third + 0.5 * user_category
        shares = {"ctr": {"impression": 0.6, "click": 0.4}, "cvr": {"click": 0.6, "conversion": 0.4}}[task]
        mix = sum(share * rows.recent_mix[event] for event, share in shares.items())
        # Mostly mood: a model has to find the events' categories first, and this says so in one product.
        recent = 5.0 * (mix @ t["mood"]) + np.einsum("bf,bf->b", mix @ t["event_factor"], candidate)
        motif = np.einsum("bk,bk->b", rows.recent_mix["impression"], rows.old_mix)
        old = rows.old_mix @ t["old_mood"] + 0.5 * np.einsum("bf,bf->b", rows.old_mix @ t["old_factor"], candidate)
        # Centred over the rows that have old events: otherwise the length alone would tell some of this part.
        present = rows.old_mix.any(1)
        long_range = np.where(present, old + 4.0 * motif - self.old_mean.get(task, 0.0), 0.0)
        return {"static": static, "crossing": crossing, "recent": recent, "long_range": long_range}

    def calibrate(self, rows: Rows, base_rates: dict[str, float]) -> None:
        """Standardises the parts on pilot rows and finds the biases that give these mean probabilities (cvr: over
        clicks)."""
        weight = np.ones(len(rows.user))
        for task, rate in base_rates.items():
            present = rows.old_mix.any(1)
            if present.any():
                self.old_mean[task] = float(self.parts(task, rows)["long_range"][present].mean())
            parts = self.parts(task, rows)
            self.moments[task] = {name: (float(x.mean()), float(x.std())) for name, x in parts.items()}
            self.bias[task] = 0.0
            logits = self.logits(task, parts)
            low, high = -40.0, 40.0
            for _ in range(60):
                middle = 0.5 * (low + high)
                mean = np.average(sigmoid(logits + middle), weights=weight)
                low, high = (middle, high) if mean < rate else (low, middle)
            self.bias[task] = 0.5 * (low + high)
            weight = weight * sigmoid(logits + self.bias[task])

    def scaled(self, task: str, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Parts with mean 0 and the weight as standard deviation on the pilot; a part that never varies is 0."""
        out = {}
        for name, x in parts.items():
            mean, std = self.moments[task][name]
            out[name] = (x - mean) * (getattr(self.weights[task], name) / std if std > 1e-6 else 0.0)
        return out

    def logits(self, task: str, parts: dict[str, np.ndarray]) -> np.ndarray:
        return sum(self.scaled(task, parts).values()) + self.bias[task]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, np.float64)))


def entropy(p: np.ndarray) -> np.ndarray:
    """-p ln p - (1-p) ln (1-p), 0 at 0 and 1."""
    p = np.asarray(p, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.where(p > 0, p * np.log(p), 0.0) - np.where(p < 1, (1 - p) * np.log1p(-p), 0.0)


def normalised_entropy(cross_entropy: float, rate: float) -> float | None:
    """Cross entropy / entropy of the mean; None where the mean is 0 or 1 (undefined)."""
    return cross_entropy / float(entropy(rate)) if 0.0 < rate < 1.0 else None


def recalibrated_ne(logits: np.ndarray, truth: np.ndarray) -> float | None:
    """Expected NE of sigmoid(a + b * logits) against true probabilities, a and b chosen best (Newton on the expected
    loss)."""
    logits, truth = np.asarray(logits, np.float64), np.asarray(truth, np.float64)
    if len(truth) < 2 or logits.std() == 0:
        return None if len(truth) < 2 else 1.0
    design = np.stack([np.ones_like(logits), (logits - logits.mean()) / logits.std()])
    rate = truth.mean()
    coefficients = np.array([np.log(rate / (1 - rate)), 0.0])
    for _ in range(25):
        p = sigmoid(coefficients @ design)
        hessian = (design * (p * (1 - p))) @ design.T + 1e-9 * np.eye(2)
        coefficients = coefficients + np.linalg.solve(hessian, design @ (truth - p))
    z = coefficients @ design
    loss = np.mean(np.logaddexp(0.0, z) - truth * z)
    return normalised_entropy(float(loss), float(rate))


class Bound:
    """Streams true probabilities and labels of the eval split; `result` is the manifest's entry for one task."""

    def __init__(self, keep: int = 200_000):
        self.keep, self.rows, self.kept = keep, 0, 0
        self.entropy_sum = self.probability_sum = self.loss_sum = self.label_sum = 0.0
        self.parts: list[dict[str, np.ndarray]] = []
        self.truths: list[np.ndarray] = []

    def add(self, p: np.ndarray, label: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        p = np.clip(p, 1e-7, 1 - 1e-7)
        self.rows += len(p)
        self.entropy_sum += float(entropy(p).sum())
        self.probability_sum += float(p.sum())
        self.loss_sum += float(-np.where(label == 1, np.log(p), np.log1p(-p)).sum())
        self.label_sum += float(label.sum())
        if self.kept < self.keep:
            take = slice(0, self.keep - self.kept)
            self.parts.append({name: x[take] for name, x in parts.items()})
            self.truths.append(p[take])
            self.kept += len(p[take])

    def result(self) -> dict:
        """ne: expected NE of the true probabilities, the floor for any model; ne_realised: theirs on the drawn labels;
        base_rate: mean true probability; without: NE when a part of the logit is unknown (best recalibration of the
        others);
        variance_share: of the logit, by part. Undefined values are None."""
        if self.rows == 0:
            return {"ne": None, "ne_realised": None, "base_rate": None, "rows": 0, "without": {}, "variance_share": {}}
        rate = self.probability_sum / self.rows
        truth = np.concatenate(self.truths)
        parts = {name: np.concatenate([chunk[name] for chunk in self.parts]) for name in PARTS}
        groups = {name: (name,) for name in PARTS} | {"sequence": ("recent", "long_range")}
        variances = {name: float(np.var(x)) for name, x in parts.items()}
        whole = sum(variances.values())
        return {
            "ne": normalised_entropy(self.entropy_sum / self.rows, rate),
            "ne_realised": normalised_entropy(self.loss_sum / self.rows, self.label_sum / self.rows),
            "base_rate": rate,
            "rows": self.rows,
            "without": {
                group: recalibrated_ne(sum(x for name, x in parts.items() if name not in hidden), truth)
                for group, hidden in groups.items()
            },
            "variance_share": {name: value / whole if whole else 0.0 for name, value in variances.items()},
        }
