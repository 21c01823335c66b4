"""Records of training and of timed steps by variant: shared by F21, F23 and T08."""

from __future__ import annotations

import math

import pandas as pd

from figures.load import Source, over_seeds, select

KEY = ["device", "case", "subject", "impl", "metric"]
GROUPS = ("baseline", "add_one", "waterfall", "drop_one", "full", "quality")


def by_variant(source: Source, experiment: str, metrics: tuple[str, ...]) -> pd.DataFrame:
    """One row a device, case, variant and metric, with p50, p20, p80, n over seeds; group and base of the variant.

    The group and the base are those of the variant's row when it ran.
    """
    rows = select(source.frame(experiment), metric=metrics)
    rows = rows[~rows.subject.str.contains("[@:]")]  # parts and components of a step
    table = over_seeds(rows, KEY)
    run_of = rows.drop_duplicates("subject").set_index("subject").run_id
    variant = {name: source.runs.get(run, {}).get("case_row", {}) for name, run in run_of.items()}
    table["group"] = [variant[name].get("group") or guess(name) for name in table.subject]
    table["base"] = [variant[name].get("base", "") for name in table.subject]
    return table


# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1 on; beyond, the normal one is close enough.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(differences: pd.Series) -> tuple[float, float]:
    """(mean, half width of its 95 % confidence interval) of independent differences; NaN where fewer than two."""
    n = len(differences)
    if n < 2:
        return (float(differences.mean()) if n else math.nan), math.nan
    quantile = STUDENT_95[min(n - 1, len(STUDENT_95)) - 1]
    return float(differences.mean()), float(quantile * differences.std(ddof=1) / math.sqrt(n))


def paired(source: Source, experiment: str, metric: str, base_of: dict[str, str]) -> dict[tuple, tuple[float, float]]:
    """(device, case, variant) -> `interval` of the metric over that of its base, seed by seed.

    Seeds fix the order of the data and the first parameters, so that what a seed does to both sides cancels.
    """
    rows = select(source.frame(experiment), metric=metric)
    rows = rows[rows.seed != ""].drop_duplicates(["device", "case", "subject", "seed"])
    values = {key: part.set_index("seed").p50 for key, part in rows.groupby(["device", "case", "subject"], sort=False)}
    found = {}
    for (device, case, subject), own in values.items():
        base = values.get((device, case, base_of.get(subject, "")))
        change = (own - base).dropna() if base is not None else own[:0]
        if len(change):
            found[(device, case, subject)] = interval(change)
    return found


def guess(name: str) -> str:
    """Group of a variant whose run does not say: from its name."""
    start = name.partition("_")[0]
    known = {"add": "add_one", "drop": "drop_one", "rung": "waterfall"} | {name: name for name in GROUPS}
    return known.get(start, "quality")


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Columns <metric>, <metric>_low, <metric>_high, <metric>_n; one row a device, case and variant."""
    index = ["device", "case", "subject", "group", "base"]
    parts = []
    for value, suffix in (("p50", ""), ("p20", "_low"), ("p80", "_high"), ("n", "_n")):
        part = table.pivot_table(index=index, columns="metric", values=value, sort=False, dropna=False)
        part = part.dropna(how="all")
        parts.append(part.add_suffix(suffix))
    return pd.concat(parts, axis=1).reset_index()


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Baselines, what is added to them alone and in order, everything together, what is dropped from it, the quality
    studies."""
    order = ("baseline", "add_one", "waterfall", "full", "drop_one", "quality")
    rank = {name: index for index, name in enumerate(order)}
    place = [rank.get(group, len(rank)) for group in table.group]
    return table.assign(place=place).sort_values("place", kind="stable").drop(columns="place").reset_index(drop=True)
