"""F04: generations of jagged flash attention over length and fill, and what padding wastes."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import NoDataError, best_device_first, rate_unit, select, with_case

ID = "F04"
CAPTION = (
    "Useful throughput of jagged softmax attention, forward and backward, by implementation: our generations v1 "
    "to v4, padded SDPA and peers. A GPU's rows show length on the x axis (all sequences full, then uniform "
    "lengths with mean fill 0.5); a CPU's row shows its small cases and says nothing about a GPU. Last row: share "
    "of a padded batch that is padding, in tokens and in attention pairs, computed from lengths. Whiskers: 20 and "
    "80 % quantiles."
)
PHASES = {"fwd": "forward", "bwd": "backward"}
LAWS = {"full": "all sequences full", "uniform": "mean fill 0.5"}
COLUMNS = [
    "panel",
    "device",
    "case",
    "subject",
    "impl",
    "phase",
    "law",
    "kind",
    "length",
    "value",
    "low",
    "high",
    "unit",
]


def speed(source) -> pd.DataFrame:
    """Rates with quantiles: those of a rate are those of the time, turned around."""
    frame = source.frame("kernels")
    frame = frame[~frame.case.str.startswith("fp8_")]  # 8 bits against 16 is F12
    rows = select(frame, subject="jagged_attention", metric="tflops")
    times = select(frame, subject="jagged_attention", metric="time_ms")
    key = ["device", "case", "impl", "phase"]
    times = times[[*key, "p50", "p20", "p80"]].rename(columns={"p50": "t50", "p20": "t20", "p80": "t80"})
    rows = with_case(rows, source, "kind", "q_law", "q_max").merge(times, on=key, how="left")
    rows = rows.assign(low=rows.p50 * rows.t50 / rows.t80, high=rows.p50 * rows.t50 / rows.t20)
    return rows.rename(columns={"p50": "value", "q_law": "law", "q_max": "length"}).assign(panel="speed")


def waste(source) -> pd.DataFrame:
    rows = select(source.frame("data"), metric="waste").copy()
    parts = rows.case.str.extract(r"^(?:train_)?(?P<what>.*)_(?P<target>tokens|pairs)$")
    rows = rows.assign(law=parts.what, kind=parts.target, value=rows.p50)[parts.target.notna()]
    rows = rows[~rows.law.str.startswith("eval_")]
    return rows.assign(panel="waste", length=float("nan"), low=float("nan"), high=float("nan"))


def draw(source):
    fast, lost = speed(source), waste(source)
    if fast.empty and lost.empty:
        raise NoDataError("no records of kernels (jagged_attention) or of data (waste)")
    devices = best_device_first(fast.device)
    rows = []
    for device in devices:
        own = fast[(fast.device == device) & (fast.kind == "self")]
        several = own.groupby("law").length.nunique().max() > 1 if len(own) else False
        rows += [(device, law) for law in LAWS if law in set(own.law)] if several else [(device, None)]
    figure, axes = style.panels(len(rows) + bool(len(lost)), 2, height=2.0)
    for line, (device, law) in enumerate(rows):
        factor, unit = rate_unit(device)
        for axis, phase in zip(axes[line], PHASES, strict=True):
            part = fast[(fast.device == device) & (fast.phase == phase)].assign(plot=lambda f, s=factor: f.value * s)
            part = part.assign(low_=part.low * factor, high_=part.high * factor)
            if law:
                lengths(axis, part[(part.kind == "self") & (part.law == law)])
            else:
                cases(axis, part)
            axis.set(ylabel=f"useful {unit}", ylim=(0, None))
            what = LAWS[law] if law else "small cases"
            axis.set_title(f"{source.device_label(device)}, {PHASES[phase]}: {what}")
    if len(lost):
        grid = axes[-1, 0].get_gridspec()
        for axis in axes[-1]:
            axis.remove()
        bottom = figure.add_subplot(grid[-1, :])
        wasted(bottom, lost)
    shown = [axis for row in axes[: len(rows)] for axis in row]
    style.legend(figure, [*shown, *([bottom] if len(lost) else [])], columns=3)
    return figure, pd.concat([fast, lost], ignore_index=True)[COLUMNS]


def lengths(axis, part):
    for impl in order(part):
        style.line(axis, part[part.impl == impl], "length", "plot", "impl", impl, low="low_", high="high_")
    style.powers(axis, part.length)
    axis.set_xlabel("length of the longest sequence, tokens")


def cases(axis, part):
    names = sorted(set(part.case), key=lambda name: ("self" not in name, name))
    impls = order(part)
    width = 0.8 / max(1, len(impls))
    for index, impl in enumerate(impls):
        for row in part[part.impl == impl].itertuples():
            at = names.index(row.case) + (index - (len(impls) - 1) / 2) * width
            style.bar(axis, at, row.plot, "impl", impl, width=width, low=row.low_, high=row.high_)
    axis.set_xticks(range(len(names)), [short(name) for name in names])


def short(case: str) -> str:
    """smoke_jfa_cross_kv16_128 -> cross kv16, on two lines."""
    words = [word for word in case.split("_") if word not in ("smoke", "jfa", "gdpa")]
    return "\n".join(words[:2])


def order(part) -> list[str]:
    """Implementations in the order of the palette, those with options after the plain one."""
    known = list(style.FAMILIES["impl"])
    return sorted(set(part.impl), key=lambda name: (known.index(name.partition(":")[0]), name))


def wasted(axis, lost):
    names = sorted(set(lost.law), key=lambda name: (name.startswith("law_"), name))
    for index, target in enumerate(("tokens", "pairs")):
        for row in lost[lost.kind == target].drop_duplicates("law").itertuples():
            style.bar(axis, names.index(row.law) + (index - 0.5) * 0.38, row.value, "target", target, width=0.38)
    axis.set_xticks(range(len(names)), [name.removeprefix("law_").replace("_", ", fill ") for name in names])
    axis.set(ylabel="share that is padding", ylim=(0, 1))
    axis.set_title("Waste of padding to the longest, from lengths")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
