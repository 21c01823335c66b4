"""GDPA against its peers over length: shared by F07 and F08."""

from __future__ import annotations

import pandas as pd

from figures import style
from figures.load import Source, best_device_first, rate_unit, select, with_case

PANELS = {"self_full": "self, all full", "self_jagged": "self, mean fill 0.5", "cross": "cross"}
SOFTMAX_PEERS = ("fa4", "varlen_attn", "sdpa_cudnn")
COLUMNS = ["device", "panel", "family", "impl", "length", "kv_length", "value", "unit"]


def published(source: Source, phase: str) -> pd.DataFrame:
    """The source's bars, read off its charts: about 3 TFLOP/s either way."""
    chart = source.chart("gdpa_charts")
    chart = chart[chart.phase == phase]
    panel = ["cross" if a == "cross256" else "self_full" if f == 1 else "self_jagged"
             for a, f in zip(chart.attention, chart.fill, strict=True)]  # fmt: skip
    frame = pd.DataFrame({"panel": panel, "impl": chart.kernel, "length": chart.q_length, "value": chart.tflops})
    frame["kv_length"] = [256 if name == "cross" else float("nan") for name in panel]
    return frame.assign(device="B200 (source)", family="published", unit="TFLOP/s")[COLUMNS]


def ours(source: Source, phase: str) -> pd.DataFrame:
    """Rates of our kernels, of every activation that was measured, and of softmax kernels at the same shapes."""
    frame = source.frame("kernels")
    frame = frame[~frame.case.str.startswith("fp8_")]  # 8 bits against 16 is F12
    rows = select(frame, phase=phase, metric="tflops", subject=("gdpa", "jagged_attention"))
    if rows.empty:
        return pd.DataFrame(columns=COLUMNS)
    rows = with_case(rows, source, "kind", "q_law", "q_max", "kv_max", "activation")
    peer = (rows.subject == "jagged_attention") & rows.impl.isin(SOFTMAX_PEERS)
    rows = rows[(rows.subject == "gdpa") | peer]
    taylor = (rows.subject == "gdpa") & (rows.activation == "gelu_taylor6")
    rows = rows.assign(impl=[f"{i}_taylor6" if t else i for i, t in zip(rows.impl, taylor, strict=True)])
    panel = pd.Series("", index=rows.index)
    panel[(rows.kind == "self") & (rows.q_law == "full")] = "self_full"
    panel[(rows.kind == "self") & (rows.q_law == "uniform")] = "self_jagged"
    panel[rows.kind == "cross"] = "cross"
    rows = rows.assign(panel=panel, family="impl", length=rows.q_max, value=rows.p50)
    rows["kv_length"] = pd.to_numeric(rows.kv_max, errors="coerce")
    return rows[rows.panel != ""][COLUMNS].sort_values(["device", "panel", "impl", "length"])


def draw(source: Source, phase: str):
    """A row of panels a device, the source's first; a CPU's small cases only where no GPU was measured."""
    table = pd.concat([part for part in (published(source, phase), ours(source, phase)) if len(part)])
    found = best_device_first(set(table.device) - {"B200 (source)"})
    devices = ["B200 (source)", *([name for name in found if name != "cpu"] or found)]
    figure, axes = style.panels(len(devices), len(PANELS), height=1.9)
    for row, device in zip(axes, devices, strict=True):
        factor, unit = rate_unit(device)
        for axis, (panel, title) in zip(row, PANELS.items(), strict=True):
            part = table[(table.device == device) & (table.panel == panel)]
            part = part.assign(plot=part.value * factor)
            name = device if device.startswith("B200") else source.device_label(device)
            family = "published" if device.startswith("B200") else "impl"
            for impl in (name for name in style.FAMILIES[family] if name in set(part.impl)):
                style.line(axis, part[part.impl == impl], "length", "plot", family, impl)
            if part.empty:
                style.blank(axis, name)
                continue
            style.powers(axis, part.length)
            axis.set_ylim(bottom=0)
            if panel == "cross" and part.kv_length.notna().any():
                title = f"cross, K/V {int(part.kv_length.dropna().iloc[0])}"
            axis.set(
                title=title, xlabel="query length, tokens", ylabel=f"{name}\nuseful {unit}" if axis is row[0] else None
            )
    style.legend(figure, axes.flat, columns=3)
    return figure, table
