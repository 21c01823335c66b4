"""Small tables and facts of the report about timed training steps: variants, components, each at its largest batch."""

from __future__ import annotations

import pandas as pd

from figures import steps
from figures.load import Source, best_device_first, select
from paper.summaries import fixed, number, table

COMPONENTS = ("attention", "gdpa", "gemm", "norm", "elementwise", "embedding", "optimizer", "copies", "idle")


def timed(source: Source) -> list[dict]:
    """Every variant at the local batch that all share, in the order of the waterfall, others after it."""
    device, values = steps.gpu_steps(source)
    if not device:
        return []
    rows = []
    layers = _of_layers(source, device)
    ratios = steps.scaling_ratios(source).query("device == @device").groupby("subject").p50.median()
    for name in _ordered(values.index):
        own = values.loc[name]
        parts = layers.get((name, "parts_ms"))
        rows.append(
            [
                name,
                _cell(own, "time_ms", 1),
                number(own["qps"]) if "qps" in own and own["qps"] == own["qps"] else "-",
                _cell(own, "mfu", 1, 100),
                _cell(own, "mfu_mixed", 1, 100) if name in steps.LOW_PRECISION else "-",
                _cell(own, "hfu", 1, 100),
                "-" if (name, "mfu") not in layers else fixed(100 * layers[name, "mfu"], 1),
                fixed(ratios.get(name, float("nan")), 3),
                "-" if parts is None else fixed(parts / own["time_ms"], 3),
                _cell(own, "peak_mem_gib", 1),
            ]
        )
    header = ["variant", "step, ms", "samples/s", "MFU, %", "mixed MFU, %", "HFU, %", "local MFU, %", "scaling ratio",
              "parts / step", "peak GiB"]  # fmt: skip
    note = f"local batch {_batch(source, device)}; parts: layers one by one and the optimiser"
    if set(steps.LOW_PRECISION) & set(values.index):
        note += "; mixed MFU: FLOPs in 8 bits over the peak of 8 bits"
    return [table("steps", source.device_label(device), header, rows, note)]


def components(source: Source) -> list[dict]:
    """Milliseconds of a step by component, from the profiler."""
    device, _ = steps.gpu_steps(source)
    found = steps.components(source, device) if device else pd.DataFrame()
    if found.empty:
        return []
    rows = [
        [name, *(fixed(found.loc[name].get(part, 0.0), 2) for part in COMPONENTS)] for name in _ordered(found.index)
    ]
    return [table("step_components", source.device_label(device), ["variant", *(f"{p}, ms" for p in COMPONENTS)], rows)]


def largest(source: Source) -> list[dict]:
    """Variants at the largest local batch that fits each."""
    rows = steps.whole_steps(source, "step_largest")
    found = []
    for device in [name for name in best_device_first(rows.device) if name != "cpu"][:1]:
        own = rows[rows.device == device]
        values = own.pivot_table(index="subject", columns="metric", values="p50", aggfunc="median")
        lines = [
            [
                name,
                _cell(values.loc[name], "local_batch", 0),
                number(values.loc[name]["qps"]),
                _cell(values.loc[name], "mfu", 1, 100),
                _cell(values.loc[name], "peak_mem_gib", 1),
            ]
            for name in _ordered(values.index)
        ]
        header = ["variant", "local batch", "samples/s", "MFU, %", "peak GiB"]
        found.append(table("steps_largest", source.device_label(device), header, lines))
    return found


ALL = (timed, components, largest)
PAIRS = (
    ("full", "baseline_padded"), ("full", "baseline_varlen"), ("full_same_math", "baseline_varlen"),
    ("same_math_eager", "baseline_varlen"), ("full", "drop_graph"), ("drop_balance", "rung_hsp"),
    *((name, "full") for name in steps.LOW_PRECISION),
)  # fmt: skip


def facts(source: Source) -> dict[str, dict]:
    """For prose: step.<metric>.<variant>, step.<metric>_ratio.<variant>.<baseline>, and at the largest local batch that
    fits step.largest_<metric>.<variant>, each with its device."""
    device, values = steps.gpu_steps(source)
    if not device:
        return {}
    label = source.device_label(device)
    found = {}
    share = lambda x: f"{100 * x:.1f} %"  # noqa: E731
    for name in values.index:
        for metric, style in (("mfu", share), ("mfu_mixed", share), ("qps", number), ("time_ms", number)):
            value = values.loc[name].get(metric, float("nan"))
            if value == value:
                found[f"step.{metric}.{name}"] = {"text": style(value), "device": label}
    for name, base in PAIRS:
        for metric in ("mfu", "qps"):
            if {name, base} <= set(values.index) and metric in values:
                ratio = values.loc[name, metric] / values.loc[base, metric]
                found[f"step.{metric}_ratio.{name}.{base}"] = {"text": f"{ratio:.3g}\u00d7", "device": label}
    rows = steps.whole_steps(source, "step_largest")
    rows = rows[(rows.device == device) & rows.metric.isin(("mfu", "local_batch"))]
    commits = {name: commits_of(source, own) for name, own in steps.whole_steps(source).groupby("subject")}
    for _, row in rows.iterrows():
        if commits_of(source, rows[rows.run_id == row.run_id]) != commits.get(row.subject):
            continue  # of another state of the code: a table may show it, a sentence must not set it beside the step
        text = share(row.p50) if row.metric == "mfu" else number(row.p50)
        found[f"step.largest_{row.metric}.{row.subject}"] = {"text": text, "device": label}
    checked = steps.predicted(source, device)
    if len(checked) > 1:
        checked = checked[checked.judged]
        off = (checked.predicted_ms / checked.step_ms - 1).abs()
        found["step.predicted_off"] = {"text": f"{100 * off.max():.1f} %", "device": label}
        found["step.predicted_count"] = {"text": str(len(checked)), "device": label}
    return found


def commits_of(source: Source, rows: pd.DataFrame) -> set[str]:
    """Commits of the runs of these rows."""
    return {source.runs.get(run, {}).get("commit", "") for run in rows.run_id}


def _of_layers(source: Source, device: str) -> dict[tuple[str, str], float]:
    """(variant, "mfu" of its layers or "parts_ms") -> value. The sums of experiment layers, where a variant has one,
    since they are of kernels alone."""
    rows = select(source.frame("step"), device=device)
    alone = select(source.frame("layers"), device=device, metric="mfu", phase="step").groupby("subject").p50.median()
    found = {}
    for subject, metric, name in (("layers@", "mfu", "mfu"), ("parts@", "time_ms", "parts_ms")):
        own = rows[rows.subject.str.startswith(subject) & (rows.metric == metric)]
        for variant, value in own.groupby(own.subject.str.removeprefix(subject)).p50.median().items():
            found[variant, name] = value
    return found | {(variant, "mfu"): value for variant, value in alone.items()}


def _batch(source: Source, device: str) -> str:
    rows = select(source.frame("step"), device=device, metric="local_batch", subject=tuple(steps.WATERFALL))
    return number(rows.p50.median()) if len(rows) else "-"


def _cell(values: pd.Series, metric: str, decimals: int, factor: float = 1.0) -> str:
    value = values.get(metric, float("nan"))
    return fixed(factor * value, decimals)


def _ordered(names) -> list[str]:
    order = {name: index for index, name in enumerate([*steps.WATERFALL, *steps.SAME_MATH, *steps.LOW_PRECISION])}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))
