"""F14: stability of MX recipes, error of each product and change of NE."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import NoDataError, need, select

ID = "F14"
CAPTION = (
    "Left: signal over error power of each matrix product of a linear layer and of each gradient of attention, by "
    "recipe, on tensors with outlier channels and heavy-tailed gradients; MX numerics are emulated exactly in "
    "float32; a product that a recipe leaves in high precision has no point. Right, where such variants were "
    "trained: held-out NE of the click task minus that of the same model in full precision with the same seed; "
    "point: median over seeds, whiskers: 20 and 80 % quantiles. Lower is better on the right, 0 is no regression."
)
ORDER = ("linear_y", "linear_dx", "linear_dw", "attention_o", "attention_dq", "attention_dk", "attention_dv")
HIGH_DB = 60.0  # a product that a recipe leaves in full precision
COLUMNS = ["panel", "case", "recipe", "value", "low", "high", "n"]


def draw(source):
    errors, quality = error_rows(source), quality_rows(source)
    if errors.empty and quality.empty:
        raise NoDataError("no records of mx, and none of train for the MX variants")
    figure, axes = style.panels(1, 1 + (len(quality) > 0), height=3.0)
    draw_errors(axes[0, 0], errors)
    if len(quality):
        draw_quality(axes[0, 1], quality)
    style.legend(figure, [axes[0, 0]])
    return figure, need(pd.concat([errors, quality], ignore_index=True), "mx")


def draw_errors(left, errors: pd.DataFrame) -> None:
    cases = [name for name in ORDER if name in set(errors.case)]
    cases += sorted(set(errors.case) - set(cases))
    recipes = [name for name in style.FAMILIES["recipe"] if name in set(errors.recipe)]
    for index, recipe in enumerate(recipes):
        look, part = style.look("recipe", recipe), errors[errors.recipe == recipe]
        part = part[part.value < HIGH_DB]
        at = [cases.index(case) + (index - (len(recipes) - 1) / 2) * 0.11 for case in part.case]
        left.plot(part.value, at, look.marker, color=look.color, linestyle="", label=look.label)
    left.set_yticks(range(len(cases)), [case.replace("_", " ") for case in cases])
    left.invert_yaxis()
    left.set(xlabel="signal / error power, dB (higher is better)", title="Error of each product")


def draw_quality(right, quality: pd.DataFrame) -> None:
    names = list(dict.fromkeys(quality.case))
    for at, row in enumerate(quality.itertuples()):
        look = style.look("recipe", row.recipe)
        error = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        right.errorbar(row.value, at, xerr=error, color=look.color, marker=look.marker, linestyle="", elinewidth=1)
    right.axvline(0, color=style.INK, linewidth=0.8)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xlabel="NE (click) minus full precision", title="Quality")
    right.locator_params(axis="x", nbins=4)  # plain numbers: a common factor would lie on the label
    right.ticklabel_format(axis="x", style="plain")


def error_rows(source) -> pd.DataFrame:
    rows = select(source.frame("mx"), metric="snr_db")
    rows = rows.drop_duplicates(["case", "impl"])
    rows = rows.assign(panel="error", recipe=rows.impl, value=rows.p50, low=float("nan"), high=float("nan"))
    return rows.reindex(columns=COLUMNS)


def quality_rows(source) -> pd.DataFrame:
    """Differences of NE seed by seed, over the seeds of each MX variant."""
    rows = select(source.frame("train"), metric="ne_ctr")
    rows = rows[rows.seed != ""]
    key = ["device", "case", "seed"]
    base = rows[rows.subject == "full"][[*key, "p50"]].rename(columns={"p50": "base"})
    rows = rows[rows.subject.str.startswith("mx")].merge(base, on=key)
    found = []
    for (_, subject), part in rows.groupby(["device", "subject"], sort=False):
        delta = part.p50 - part.base
        recipe = source.runs.get(part.run_id.iloc[0], {}).get("case_row", {}).get("mx_recipe") or subject[3:]
        spread = {"value": delta.median(), "low": delta.quantile(0.2), "high": delta.quantile(0.8), "n": len(delta)}
        found.append({"panel": "quality", "case": subject, "recipe": recipe} | spread)
    return pd.DataFrame(found, columns=COLUMNS)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
