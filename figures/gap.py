"""Benchmark against real traffic: shared by F02, F03, T02 and T03."""

from __future__ import annotations

import pandas as pd

from figures import style
from figures.load import NoDataError, Source, best_device_first, rate_unit, select

BINS = (200, 500, 1000)
CHARTS = {"fwd": "gap_forward", "bwd": "gap_backward"}
COLUMNS = ["device", "series", "max_length", "low", "high", "case", "impl"]


def published(source: Source, phase: str) -> pd.DataFrame:
    """The source's data table: series benchmark or traffic, max_length, low and high TFLOP/s."""
    chart = source.chart(CHARTS[phase])
    series = ["benchmark" if name.startswith("FMHA") else "traffic" for name in chart.series]
    low = chart.tflops_low if "tflops_low" in chart else chart.tflops
    high = chart.tflops_high if "tflops_high" in chart else chart.tflops
    frame = pd.DataFrame({"series": series, "max_length": chart.max_sequence_length, "low": low, "high": high})
    return frame.assign(device="B200 (source)", case="", impl="")[COLUMNS]


def ours(source: Source, phase: str) -> pd.DataFrame:
    """Our swarm in the same form; the benchmark is the fastest dense softmax kernel of each length."""
    rows = select(source.frame("traffic"), phase=phase, metric="tflops")
    length = rows.case.str.extract(r"_(200|500|1000)(?:_|$)")[0]
    rows = rows.assign(max_length=pd.to_numeric(length), low=rows.p50, high=rows.p50)[length.notna()]
    dense = rows[rows.subject == "jagged_attention"].sort_values("p50", ascending=False)
    dense = dense.groupby(["device", "case"], as_index=False).head(1).assign(series="benchmark")
    baseline = rows[(rows.subject == "gdpa") & (rows.impl == "triton:grid")].assign(series="traffic")
    return pd.concat([dense, baseline])[COLUMNS].sort_values(["device", "series", "max_length", "case"])


def draw(source: Source, phase: str):
    """Panels: the source's device, then each of ours."""
    mine = ours(source, phase)
    devices = best_device_first(mine.device)
    table = pd.concat([published(source, phase), mine], ignore_index=True) if len(mine) else published(source, phase)
    names = ["B200 (source)", *devices]
    figure, axes = style.panels(1, len(names), height=2.6)
    for axis, name in zip(axes[0], names, strict=True):
        factor, unit = rate_unit(name)
        part = table[table.device == name]
        for series in ("benchmark", "traffic"):
            look = style.look("traffic", series)
            points = part[part.series == series]
            for count, row in enumerate(points.itertuples()):
                # points of one bin stand side by side, in the order of the file
                shift = 0.0 if series == "benchmark" else ((count * 5) % 9 - 4) * 0.045
                at = BINS.index(row.max_length) + shift
                axis.plot([at, at], [row.low * factor, row.high * factor], color=look.color, linewidth=2.5, alpha=0.5)
                ends = [row.low * factor] if row.low == row.high else [row.low * factor, row.high * factor]
                axis.plot([at] * len(ends), ends, look.marker, color=look.color, markerfacecolor="white", linestyle="")
            axis.plot([], [], look.marker, color=look.color, markerfacecolor="white", linestyle="", label=look.label)
            if series == "benchmark" and len(points):
                top = points.sort_values("max_length")
                axis.plot([BINS.index(x) for x in top.max_length], top.high * factor, color=look.color, linestyle=":")
        axis.set_xticks(range(len(BINS)), [str(edge) for edge in BINS])
        axis.set(xlabel="longest sequence, tokens", ylabel=f"useful {unit}", xlim=(-0.5, 2.5))
        axis.set_ylim(bottom=0)
        axis.set_title(name if name.startswith("B200") else source.device_label(name))
    style.legend(figure, axes[0])
    return figure, table


def build(source: Source, phase: str) -> pd.DataFrame:
    """One row a bin: the source's benchmark, traffic and gap, and ours for every device with records."""
    mine = ours(source, phase)
    tables = {"B200 (source)": published(source, phase)}
    tables |= {source.device_label(slug): mine[mine.device == slug] for slug in best_device_first(mine.device)}
    rows = []
    for length in BINS:
        row: dict = {"longest sequence": length}
        for name, table in tables.items():
            part = table[table.max_length == length]
            dense, traffic = part[part.series == "benchmark"], part[part.series == "traffic"]
            if dense.empty or traffic.empty:
                continue
            top, low, high = dense.high.max(), traffic.low.min(), traffic.high.max()
            row |= {
                f"{name}: benchmark, TFLOP/s": float(top),
                f"{name}: traffic, TFLOP/s": f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}",
                f"{name}: worst gap, x": float(top / low),
            }
        rows.append(row)
    table = pd.DataFrame(rows)
    if table.shape[1] == 1:
        raise NoDataError("neither published nor measured numbers of the gap")
    if mine.empty:
        table["ours"] = "not measured here"
    return table
