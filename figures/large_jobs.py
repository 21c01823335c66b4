"""Records of modelled jobs of thousands of GPUs as F15, F16 and F22 read them."""

from __future__ import annotations

import pandas as pd

from figures.load import Source, need, select

PRESETS = ("large", "base", "quality", "smoke")  # the one drawn is the first that has records


def rows_of(source: Source) -> pd.DataFrame:
    """Rows of `simulate` once each, calibrated before assumed ones, with preset, gpus and factor from the case."""
    rows = need(select(source.frame("simulate"), scope="modelled"), "simulate")
    rows = rows.sort_values("impl", key=lambda impl: impl != "calibrated", kind="stable")
    rows = rows.drop_duplicates(["case", "subject", "metric"])
    parts = rows.case.str.extract(r"^(?P<preset>[a-z]+)_gpus(?P<gpus>\d+)(?:_x(?P<factor>[0-9.]+))?$")
    numbers = {name: pd.to_numeric(parts[name]) for name in ("gpus", "factor")}
    return rows.assign(preset=parts.preset, **numbers)


def drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the largest preset."""
    preset = next((name for name in PRESETS if (rows.preset == name).any()), None)
    return need(rows[rows.preset == preset], "simulate (jobs)")


def standing(rows: pd.DataFrame) -> str:
    """What a figure says of its constants."""
    return "calibrated" if len(rows) and (rows.impl == "calibrated").all() else "not calibrated"


def over_gpus(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One metric of whole jobs, no changed constants: columns gpus, subject, p50."""
    return rows[(rows.metric == metric) & rows.factor.isna() & ~rows.subject.str.contains("[@:]")]
