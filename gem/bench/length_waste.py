"""Records of what padding wastes under length laws: share of a padded batch that is padding, in tokens and in pairs.

The source says that padding to the longest wastes up to half; how much depends on the law and on the fill alone, so
this is a simulation of lengths. The waste of the data set at hand stands beside it (gem/bench/data.py).
"""

from __future__ import annotations

import numpy as np

from data.lengths import LengthLaw
from gem import record

EXPERIMENT = "data"
SOURCES = ("data/lengths.py", "gem/bench/length_waste.py")
MAX_LENGTH, SAMPLES, SEED = 4096, 400_000, 0
LAWS = {
    "law_uniform_0.7": LengthLaw("uniform", MAX_LENGTH, 0.7),
    "law_uniform_0.5": LengthLaw("uniform", MAX_LENGTH, 0.5),
    "law_lognormal_0.3": LengthLaw("lognormal", MAX_LENGTH, 0.3, 1.3),
}


def waste(lengths: np.ndarray, longest: int) -> dict[str, float]:
    """Shares of padded tokens and of padded attention pairs that are padding. lengths [N] >= 0, longest >= 1."""
    share = lengths.astype(np.float64) / longest
    return {"tokens": float(1 - share.mean()), "pairs": float(1 - (share**2).mean())}


def add_records(run: record.Run) -> None:
    """A case a law and a target; subject: the law."""
    for name, law in LAWS.items():
        lengths = law.sample(SAMPLES, np.random.default_rng(SEED))
        for target, value in waste(lengths, MAX_LENGTH).items():
            base = {"case": f"{name}_{target}", "subject": law.law, "impl": "length_law", "phase": "model"}
            run.add(**base, metric="waste", p50=value, seed=SEED, scope="modelled", note=f"{SAMPLES} lengths")
