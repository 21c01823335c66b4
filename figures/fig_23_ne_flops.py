"""F23: normalised entropy against training FLOPs, and against the weight of long-range interactions."""

import math
import sys

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from figures import cli, style, training
from figures.load import NoDataError, select

ID = "F23"
CAPTION = (
    "Left: held-out NE of the click task against the FLOPs of the whole training run, one point a variant, median "
    "over seeds with 20 and 80 % quantiles; the dashed line is the NE of the true probabilities, which no model "
    "can beat. Diamonds: the variant with everything at several sizes of the model on the same data, and a power law "
    "fitted to their NE above that line. Lower left is better. Right: NE above that floor for full, window and block "
    "self-attention, over the weight that the label law gives to interactions with events more than 64 back. "
    "Synthetic data, small models."
)
MODES = {"drop_block": "full", "drop_block_for_window": "window", "full": "block"}
# variant -> where its name stands: offset in points, and which end of the text is at the point
NAMED = {
    "baseline_padded": (-6, -11, "right"),
    "baseline_varlen": (-6, -21, "right"),
    "full": (-6, 7, "right"),
    "no_sequence": (6, -3, "left"),
}
COLUMNS = ["panel", "device", "case", "subject", "group", "x", "value", "low", "high", "n"]


def draw(source):
    left_rows, right_rows, sizes = against_flops(source), against_weight(source), against_size(source)
    if left_rows.empty and right_rows.empty and sizes.empty:
        raise NoDataError("no records of train or quality (ne_ctr)")
    figure, axes = style.panels(1, 2, height=2.9)
    left, right = axes[0]
    for row in left_rows.itertuples():
        look = style.look("group", row.group)
        error = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        left.errorbar(row.x, row.value, yerr=error, fmt=look.marker, color=look.color, elinewidth=0.8, label=look.label)
        if row.subject in NAMED:
            *offset, side = NAMED[row.subject]
            left.annotate(row.subject, (row.x, row.value), xytext=offset, textcoords="offset points", ha=side)
    floor = select(source.frame("train"), metric="ne_bayes_ctr").p50
    if len(floor):
        left.axhline(floor.median(), color=style.INK, linestyle="--", linewidth=0.8, label="true probabilities")
    fits = []
    for device, part in sizes.groupby("device", sort=False):
        part = part.sort_values("x")
        left.plot(part.x, part.value, color=style.INK, marker="D", markersize=3, linestyle="", label="sizes of full")
        law = power_law(part.x, part.value - part.floor)
        if law is not None:
            x = np.geomspace(part.x.min(), part.x.max(), 50)
            floor, (factor, exponent) = part.floor.median(), law
            label = rf"floor + $a\,C^{{{exponent:.2f}}}$"
            left.plot(x, floor + factor * x**exponent, color=style.INK, linewidth=0.8, label=label)
            fits.append({"panel": "fit", "device": device, "subject": "full", "x": exponent, "value": factor})
    left.set(xscale="log", xlabel="FLOPs of the training run", ylabel="NE (click), held out", title="NE against FLOPs")
    # Runs of one tier often lie within a decade, where a logarithmic axis by itself labels nothing.
    left.xaxis.set_major_locator(FixedLocator(round_numbers(*left.get_xlim())))
    left.xaxis.set_major_formatter(FuncFormatter(scientific))
    left.xaxis.set_minor_formatter(NullFormatter())
    for mode in ("full", "window", "block"):
        part = right_rows[right_rows["group"] == mode]
        if len(part):
            style.line(right, part, "x", "value", "attention", mode, low="low", high="high")
    if right_rows.empty:
        style.blank(right)
    right.set(
        xlabel="weight of interactions beyond 64 events", ylabel="NE above the floor", title="Length of attention"
    )
    style.legend(figure, [left, right])
    parts = [left_rows, right_rows, sizes.reindex(columns=COLUMNS), pd.DataFrame(fits, columns=COLUMNS)]
    return figure, pd.concat([part for part in parts if len(part)], ignore_index=True)[COLUMNS]


def power_law(x: pd.Series, excess: pd.Series) -> tuple[float, float] | None:
    """(a, b) of excess = a x^b by least squares of logarithms; None for fewer than three points above 0."""
    keep = (x > 0) & (excess > 0)
    if keep.sum() < 3:
        return None
    exponent, logarithm = np.polyfit(np.log(x[keep]), np.log(excess[keep]), 1)
    return math.exp(logarithm), float(exponent)


def round_numbers(low: float, high: float) -> list[float]:
    """At most five round numbers in [low, high], for a logarithmic axis of any length."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 5:
            break
    return found


def scientific(value: float, _=None) -> str:
    """1.5e10 as a product with a power of ten."""
    exponent = math.floor(math.log10(value) + 1e-9)
    digit = f"{value / 10**exponent:.2g}"
    return rf"$10^{{{exponent}}}$" if digit == "1" else rf"${digit}\cdot 10^{{{exponent}}}$"


def against_flops(source) -> pd.DataFrame:
    table = training.by_variant(source, "train", ("ne_ctr", "train_flops"))
    if table.empty:
        return pd.DataFrame(columns=COLUMNS)
    table = training.wide(table)
    table = table[table.get("train_flops", pd.Series(dtype=float)).notna() & table.ne_ctr.notna()]
    table = table.assign(panel="flops", x=table.train_flops, value=table.ne_ctr, low=table.ne_ctr_low)
    return table.assign(high=table.ne_ctr_high, n=table.ne_ctr_n)[COLUMNS]


def against_size(source) -> pd.DataFrame:
    """NE of the variants of study size_<preset> with the floor of the same labels (column floor)."""
    table = training.by_variant(source, "quality", ("ne_ctr", "ne_bayes_ctr", "train_flops"))
    if table.empty or not table.case.str.startswith("size_").any():
        return pd.DataFrame(columns=[*COLUMNS, "floor"])
    table = training.wide(table[table.case.str.startswith("size_")])
    table = table[table.ne_ctr.notna() & table.train_flops.notna()]
    table = table.assign(panel="size", x=table.train_flops, value=table.ne_ctr, low=table.ne_ctr_low)
    floor = table.get("ne_bayes_ctr", pd.Series(float("nan"), index=table.index))
    return table.assign(high=table.ne_ctr_high, n=table.ne_ctr_n, floor=floor)[[*COLUMNS, "floor"]]


def against_weight(source) -> pd.DataFrame:
    table = training.by_variant(source, "quality", ("ne_ctr", "ne_bayes_ctr"))
    if table.empty:
        return pd.DataFrame(columns=COLUMNS)
    table = training.wide(table)
    table = table[table.subject.isin(list(MODES))].assign(group=lambda f: f.subject.map(MODES), panel="weight")
    table["x"] = pd.to_numeric(table.case.str.extract(r"^long_range_([0-9.]+)$")[0])
    floor = table.get("ne_bayes_ctr", pd.Series(float("nan"), index=table.index))
    table = table.assign(value=table.ne_ctr - floor, low=table.ne_ctr_low - floor, high=table.ne_ctr_high - floor)
    return table.assign(n=table.ne_ctr_n).dropna(subset=["x", "value"])[COLUMNS]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
