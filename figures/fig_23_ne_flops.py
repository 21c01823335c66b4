"""F23: normalised entropy against training FLOPs, and against the weight of long-range interactions."""

import math
import sys

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from figures import cli, style, training
from figures.load import NoDataError, best_device_first, select

ID = "F23"
CAPTION = (
    "Left: held-out NE of the click task against the FLOPs of the whole training run, one point a variant, median "
    "over seeds with 20 and 80 % quantiles; the dashed line is the NE of the true probabilities, which no model "
    "can beat. Diamonds: the variant with everything at several sizes of the model on the same data, and a power law "
    "fitted to their NE above that line. Lower left is better. Right: NE above that floor for full, window and block "
    "self-attention (full: black), over the weight that the label law gives to interactions with events more than 64 "
    "back. Synthetic data, small models; a row of panels a device, each with data of its own."
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
    """A row of panels a device: devices train on data of their own, whose floors differ."""
    tables = [against_flops(source), against_size(source), against_weight(source)]
    devices = best_device_first(pd.concat([table.device for table in tables]).dropna().unique())
    if not devices:
        raise NoDataError("no records of train or quality (ne_ctr)")
    figure, axes = style.panels(len(devices), 2, height=2.9 if len(devices) == 1 else 2.4)
    parts = []
    for row, device in zip(axes, devices, strict=True):
        trained, sizes, weights = (table[table.device == device] for table in tables)
        floor = select(source.frame("train"), metric="ne_bayes_ctr", device=device).p50
        fit = left_panel(row[0], trained, sizes, floor.median() if len(floor) else None)
        right_panel(row[1], weights)
        row[0].set_title(f"{source.device_label(device)}: NE against FLOPs")
        row[1].set_title("Length of attention")
        parts += [trained, weights, sizes.reindex(columns=COLUMNS), pd.DataFrame(fit, columns=COLUMNS)]
    style.legend(figure, axes.flat)
    return figure, pd.concat([part for part in parts if len(part)], ignore_index=True)[COLUMNS]


def left_panel(axis, trained: pd.DataFrame, sizes: pd.DataFrame, floor: float | None) -> list[dict]:
    """NE over FLOPs of one device; returns the row of the fit over sizes, if there is one."""
    for row in trained.itertuples():
        look = style.look("group", row.group)
        error = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        axis.errorbar(row.x, row.value, yerr=error, fmt=look.marker, color=look.color, elinewidth=0.8, label=look.label)
        if row.subject in NAMED:
            *offset, side = NAMED[row.subject]
            axis.annotate(row.subject, (row.x, row.value), xytext=offset, textcoords="offset points", ha=side)
    if floor is not None:
        axis.axhline(floor, color=style.INK, linestyle="--", linewidth=0.8, label="true probabilities")
    fit = []
    if len(sizes):
        part = sizes.sort_values("x")
        axis.plot(part.x, part.value, color=style.INK, marker="D", markersize=3, linestyle="", label="sizes of full")
        law = power_law(part.x, part.value - part.floor)
        if law is not None:
            x, lowest, (factor, exponent) = np.geomspace(part.x.min(), part.x.max(), 50), part.floor.median(), law
            label = rf"floor + $a\,C^{{{exponent:.2f}}}$"
            axis.plot(x, lowest + factor * x**exponent, color=style.INK, linewidth=0.8, label=label)
            fit.append(
                {"panel": "fit", "device": part.device.iloc[0], "subject": "full", "x": exponent, "value": factor}
            )
    axis.set(xscale="log", xlabel="FLOPs of the training run", ylabel="NE (click), held out")
    # Runs of one tier often lie within a decade, where a logarithmic axis by itself labels nothing.
    low, high = axis.get_xlim()
    axis.set_xlim(low / (high / low) ** 0.5, high)  # names stand to the left of their points
    axis.xaxis.set_major_locator(FixedLocator(round_numbers(*axis.get_xlim())))
    axis.xaxis.set_major_formatter(FuncFormatter(scientific))
    axis.xaxis.set_minor_formatter(NullFormatter())
    return fit


def right_panel(axis, weights: pd.DataFrame) -> None:
    """NE above the floor over the weight of far interactions, of one device."""
    for mode in ("full", "window", "block"):
        part = weights[weights["group"] == mode]
        if len(part):
            style.line(axis, part, "x", "value", "attention", mode, low="low", high="high")
    if weights.empty:
        style.blank(axis)
    axis.set(xlabel="weight of interactions beyond 64 events", ylabel="NE above the floor")


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
