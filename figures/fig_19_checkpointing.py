"""F19: activation checkpointing, memory against time, and packed activations."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import best_device_first, need, over_seeds, select

ID = "F19"
CAPTION = (
    "Left: time of a training step over its peak memory, for uniform checkpointing budgets and for budgets by region "
    "at several memory limits; lower left is better. Middle: peak memory of a step whose saved activations wait for "
    "the backward in bf16, FP8 or MX4 (packing of MX4 is emulated). Right: NE of the click task of models trained with "
    "packed activations, minus the same model without packing, by seed. Measured; whiskers: 20 and 80 % quantiles."
)
POLICIES = {"checkpointing_uniform": "uniform", "checkpointing_region": "region"}
PACKED = {"saved_activations_bf16": "full", "saved_activations_fp8": "fp8", "saved_activations_mx4": "mx4"}
TRAINED = {"saved_fp8": "fp8", "saved_mx4": "mx4"}


def frontier(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (device, case, policy) with time and memory."""
    rows = select(frame, subject=list(POLICIES), metric=("time_ms", "peak_mem_gib"))
    keys = ["device", "case", "subject"]
    times = rows[rows.metric == "time_ms"].set_index(keys)[["p50", "p20", "p80"]]
    memory = rows[rows.metric == "peak_mem_gib"].set_index(keys).p50.rename("memory")
    table = times.join(memory, how="inner").reset_index()
    return table.assign(panel="frontier", name=table.subject.map(POLICIES)).rename(
        columns={"p50": "value", "p20": "low", "p80": "high"}
    )


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    rows = select(frame, subject=list(PACKED), metric="peak_mem_gib")
    return rows.assign(panel="memory", name=rows.subject.map(PACKED), value=rows.p50, low=rows.p20, high=rows.p80)


def quality(frame: pd.DataFrame) -> pd.DataFrame:
    """NE over that of `full`, seed by seed."""
    rows = select(frame, subject=["full", *TRAINED], metric="ne_ctr")
    rows = rows[rows.seed != ""]
    base = rows[rows.subject == "full"].set_index(["device", "case", "seed"]).p50
    rows = rows[rows.subject != "full"]
    keys = list(zip(rows.device, rows.case, rows.seed, strict=True))
    rows = rows[[key in base.index for key in keys]]
    change = [p - base[key] for p, key in zip(rows.p50, [key for key in keys if key in base.index], strict=True)]
    rows = rows.assign(p50=change, p20=None, p80=None)
    table = over_seeds(rows, ["device", "subject"]) if len(rows) else rows
    return table.assign(
        panel="quality", name=table.subject.map(TRAINED), value=table.p50, low=table.p20, high=table.p80
    )


def draw(source):
    steps = source.frame("step")
    parts = [frontier(steps), memory(steps)]
    need(parts[0], "checkpointing in step")
    parts.append(quality(source.frame("train")))
    devices = best_device_first(parts[0].device)
    figure, axes = style.panels(len(devices), 3, height=2.3)
    for row, device in zip(axes, devices, strict=True):
        points, packed, trained = (part[part.device == device] for part in parts)
        for name in POLICIES.values():
            style.line(
                row[0], points[points.name == name], "memory", "value", "checkpointing", name, low="low", high="high"
            )
        row[0].set(xlabel="peak memory, GiB", ylabel="step, ms", title=source.device_label(device))
        for axis, part, label in ((row[1], packed, "peak memory, GiB"), (row[2], trained, "NE minus full")):
            names = [name for name in style.FAMILIES["saved"] if name in set(part.name)]
            for at, name in enumerate(names):
                item = part[part.name == name].iloc[0]
                style.bar(axis, at, item.value, "saved", name, low=item.low, high=item.high)
            axis.set_xticks(range(len(names)), [style.look("saved", name).label for name in names])
            axis.set(ylabel=label)
            axis.axhline(0, color=style.INK, linewidth=0.6)
        row[1].set_title("packed activations")
        if trained.empty:
            style.blank(row[2], "no training with packed activations")
    style.legend(figure, [row[0] for row in axes])
    columns = ["panel", "device", "case", "subject", "name", "value", "low", "high", "memory"]
    return figure, pd.concat([part.reindex(columns=columns) for part in parts], ignore_index=True)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
