"""F21: throughput and MFU as each optimisation is added, and what each is worth whatever the order."""

import sys

import pandas as pd
from matplotlib.ticker import MaxNLocator

from figures import cli, steps, style, training
from figures.load import NoDataError, best_device_first

ID = "F21"
CAPTION = (
    "On a GPU: training throughput (left) and MFU (right) of one model at one local batch as each optimisation is "
    "put on top of those before it, in the source's order; both baselines and the variant with the baseline's own "
    "mathematics beside them; last, everything with attention (forward), linear layers (but gradients of weights) or "
    "both in 8 bits. Below, milliseconds of a step that each optimisation saves after those before it (step by step, "
    "measured) and on average over all orders (Shapley values of sums of modules timed alone), and those sums "
    "against real steps: the dashed lines are 5 % off, and steps launched kernel by kernel also wait for the host. "
    "Elsewhere: a baseline plus one optimisation, in training; on a CPU everything runs in plain torch, so its bars "
    "show what changes the mathematics or the padding, not kernels. MFU counts useful model FLOPs only, on a GPU "
    "over its bf16 dense peak, on a CPU over its measured rate of matrix products; ticks divide the FLOPs of each "
    "precision by its own peak. Variants that skip work have other FLOPs, so read MFU and throughput together. "
    "Whiskers: 20 and 80 % quantiles."
)
SHOWN = ("baseline", "add_one", "full")
TALLEST = 5.6  # inches of bars, so that the figure and its caption fit a page
# rungs of the waterfall that each column of variants.tsv stands for
RUNGS = {
    "attention_impl": ("baseline_varlen", "add_jfa_v4"), "gdpa_impl": ("add_jfa_v4", "rung_gdpa"),
    "self_attention": ("rung_gdpa", "rung_block"), "rotary": ("rung_block", "rung_rotary"),
    "norm": ("rung_rotary", "rung_norms"), "compskip": ("rung_norms", "rung_compskip"),
    "pooling": ("rung_compskip", "rung_hsp"),
}  # fmt: skip


def draw(source):
    device, timed = steps.gpu_steps(source)
    rungs = waterfall(source, device) if device else pd.DataFrame()
    trained = training.by_variant(source, "train", ("qps", "mfu"))
    trained = training.ordered(trained[trained.group.isin(SHOWN)])
    blocks = [] if rungs.empty else [rungs]
    blocks += [trained[trained.device == name] for name in best_device_first(trained.device) if name != device]
    if not blocks:
        raise NoDataError("no records of train or step (qps, mfu)")
    saved, checked = savings(timed, steps.shares(source, device)), steps.predicted(source, device) if device else None
    below = len(saved) > 0 or (checked is not None and len(checked) > 1)
    counts = [max(4, block.subject.nunique()) for block in blocks] + ([9] if below else [])
    a_bar = min(0.19, TALLEST / sum(counts))
    figure, axes = style.panels(len(counts), 2, height=a_bar * sum(counts) / len(counts) + 0.6, height_ratios=counts)
    for row, block in zip(axes, blocks, strict=False):
        bars(row, block, source.device_label(block.device.iloc[0]))
    tables = [block.assign(panel="throughput") for block in blocks]
    if below:
        tables += [attribution(axes[-1][0], saved), prediction(axes[-1][1], checked)]
    style.legend(figure, axes.flat, columns=3)
    columns = ["panel", "device", "case", "subject", "group", "metric", "p50", "p20", "p80", "n"]
    return figure, pd.concat(tables, ignore_index=True).reindex(columns=columns)


def waterfall(source, device: str) -> pd.DataFrame:
    """Rows of qps and mfu of the rungs in order, then of the variant of the same mathematics and of those in 8 bits,
    which have mfu_mixed too; column label."""
    rows = training.by_variant(source, "step", ("qps", "mfu", "mfu_mixed"))
    rows = rows[rows.device == device]
    order = steps.WATERFALL | steps.SAME_MATH | steps.LOW_PRECISION
    rows = rows[rows.subject.isin(order) & ((rows.metric != "mfu_mixed") | rows.subject.isin(steps.LOW_PRECISION))]
    place = {name: index for index, name in enumerate(order)}
    # a row of the sheet serves two ends: what is added alone, or left out of full, is also a rung
    group = ["waterfall" if name not in ("baseline", "full") else name for name in rows.group]
    group = ["low" if name in steps.LOW_PRECISION else own for name, own in zip(rows.subject, group, strict=True)]
    return rows.assign(group=group, label=rows.subject.map(order), place=rows.subject.map(place)).sort_values(
        ["place", "metric"], kind="stable"
    )


def bars(row, block: pd.DataFrame, device: str) -> None:
    names = list(dict.fromkeys(block.subject))
    labels = dict(zip(block.subject, block.label, strict=True)) if "label" in block else {}
    for axis, metric in zip(row, ("qps", "mfu"), strict=True):
        factor = 100 if metric == "mfu" else 1
        for item in block[block.metric == metric].itertuples():
            style.bar(
                axis, names.index(item.subject), item.p50 * factor, "group", item.group, horizontal=True,
                low=item.p20 * factor, high=item.p80 * factor,
            )  # fmt: skip
        mixed = block[block.metric == "mfu_mixed"] if metric == "mfu" else block[:0]
        if len(mixed):
            places = [names.index(name) for name in mixed.subject]
            axis.plot(mixed.p50 * factor, places, "|", color=style.INK, markersize=7, label="peak of each precision")
        axis.set_yticks(range(len(names)), [labels.get(name, name) for name in names] if metric == "qps" else [])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value / 1e3:g}k")
        axis.set_xlabel("samples a second" if metric == "qps" else "MFU, %")
    row[0].set_title(f"{device}: throughput")
    row[1].set_title("MFU, useful FLOPs")


def savings(timed: pd.DataFrame, shapley: pd.Series) -> pd.DataFrame:
    """Milliseconds of a step saved by each optimisation: in_order (measured rungs) and any_order (Shapley)."""
    ms = timed["time_ms"] if "time_ms" in timed else pd.Series(dtype=float)
    in_order = {
        name: ms[before] - ms[after] for name, (before, after) in RUNGS.items() if {before, after} <= set(ms.index)
    }
    return pd.DataFrame({"in_order": pd.Series(in_order, dtype=float), "any_order": shapley}).reindex(
        [name for name in RUNGS if name in in_order or name in shapley.index]
    )


def attribution(axis, saved: pd.DataFrame) -> pd.DataFrame:
    for index, (kind, color, hatch, label) in enumerate(
        (("in_order", style.SKY, "//", "saved after those before it"),
         ("any_order", style.BLUE, "xx", "saved on average over all orders"))
    ):  # fmt: skip
        places = [place + (index - 0.5) * 0.38 for place in range(len(saved))]
        axis.barh(places, saved[kind], 0.38, color=color, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)
    axis.set_yticks(range(len(saved)), [steps.COLUMNS[name] for name in saved.index])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="ms of a step", title="What each saves")
    long = saved.rename_axis("subject").reset_index().melt("subject", var_name="metric", value_name="p50")
    return long.assign(panel="saved")


def prediction(axis, checked: pd.DataFrame | None) -> pd.DataFrame:
    if checked is None or len(checked) < 2:
        style.blank(axis, "sums of modules")
        return pd.DataFrame()
    low, high = checked.step_ms.min() * 0.9, checked.step_ms.max() * 1.1
    for own, color, label in ((True, style.BLUE, "one CUDA graph"), (False, style.GREY, "launched kernel by kernel")):
        some = checked[checked.judged == own]
        if len(some):
            axis.plot(some.step_ms, some.predicted_ms, "o", color=color, markersize=4, label=label)
    axis.plot([low, high], [low, high], color=style.INK, linewidth=0.8)
    for factor in (0.95, 1.05):
        axis.plot([low, high], [low * factor, high * factor], color=style.GREY, linestyle="--", linewidth=0.7)
    axis.set(xlabel="step, measured, ms", ylabel="from modules, ms", title=f"{len(checked)} variants")
    long = (
        checked.drop(columns="judged")
        .rename_axis("subject")
        .reset_index()
        .melt("subject", var_name="metric", value_name="p50")
    )
    return long.assign(panel="predicted")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
