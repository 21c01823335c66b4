"""Small tables of the report that are made here from records: data, quality, speed, label law, balance, kernels.

Each function returns tables as plain dictionaries: name, device (as a reader says it), header, rows of text. One table
a device, because numbers of two devices never share a table. An experiment without records gives no table.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from figures.load import Source, best_device_first, over_seeds, select


def number(value: float, digits: int = 3) -> str:
    """A number for prose and tables: significant digits, groups of three in large ones."""
    value = float(value)
    if value != value:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return str(int(value))
    return f"{value:.{digits}g}"


def fixed(value: float, decimals: int = 4) -> str:
    return "-" if value != value else f"{value:.{decimals}f}"


def scaled(value: float | None) -> str:
    """1,234,567 as "1.23 M"."""
    if value is None:
        return "-"
    for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value:.3g}"


def spread(row: pd.Series | None, decimals: int = 4) -> str:
    """Median with its 20 and 80 % quantiles, or a dash."""
    if row is None:
        return "-"
    if row["n"] > 1 and row["p20"] == row["p20"]:
        return f"{row['p50']:.{decimals}f} [{row['p20']:.{decimals}f}, {row['p80']:.{decimals}f}]"
    return f"{row['p50']:.{decimals}f}"


def table(name: str, device: str, header: list[str], rows: list[list[str]], note: str = "") -> dict:
    return {"name": name, "device": device, "header": header, "rows": rows, "note": note}


def data(source: Source) -> list[dict]:
    """What the data of this build are: one row a split and event type."""
    found = []
    frame = select(source.frame("data"))
    for device in best_device_first(frame.device):
        here = frame[frame.device == device]
        for name in sorted(set(here.subject)):
            values = {(row.case, row.metric): row.p50 for row in here[here.subject == name].itertuples()}
            rows = []
            for case in sorted({case for case, metric in values if metric == "mean_length"}, reverse=True):
                split, event = case.split("_", 1)
                row = [split, event]
                for metric, style in (("events", "n"), ("mean_length", "n"), ("length_cv", "f"), ("fill", "f")):
                    value = values.get((case, metric), float("nan"))
                    row.append(number(value) if style == "n" else fixed(value, 2))
                for unit in ("tokens", "pairs"):
                    row.append(fixed(values.get((f"{case}_{unit}", "waste"), float("nan")), 2))
                rows.append(row)
            if rows:
                header = ["split", "event type", "events", "mean length", "CV", "fill", "waste, tokens", "waste, pairs"]
                found.append(table("data", source.device_label(device), header, rows, f"data set {name}"))
    return found


def model(source: Source) -> list[dict]:
    """Parameters and forward FLOPs of a sample by module, for every preset. Computed, not measured."""
    frame = select(source.frame("model"))
    frame = frame[frame.device == best_device_first(frame.device)[0]] if len(frame) else frame
    values = {(row.case, row.subject, row.metric): row.p50 for row in frame.itertuples()}
    presets = [name for name in ("smoke", "quality", "base", "large") if (name, "total", "params") in values]
    if not presets:
        return []
    modules = [name for name in dict.fromkeys(frame.subject) if name not in ("total", "dense")] + ["total"]
    rows = []
    for module in modules:
        row = [module]
        for preset in presets:
            row += [scaled(values.get((preset, module, metric))) for metric in ("params", "flops_per_sample")]
        rows.append(row)
    header = ["module", *(f"{preset}: {what}" for preset in presets for what in ("params", "FLOPs"))]
    return [table("model", "computed", header, rows)]


def quality(source: Source) -> list[dict]:
    """NE, AUC, throughput and MFU of every trained variant: median over seeds with 20 and 80 % quantiles."""
    frame = select(source.frame("train"))
    found = []
    for device in best_device_first(frame.device):
        here = frame[frame.device == device]
        rows = []
        for variant in _in_sheet_order(here.subject):
            mine = here[here.subject == variant]
            values = _by_metric(mine)
            rows.append(
                [
                    variant,
                    spread(values.get("ne_ctr")),
                    spread(values.get("ne_cvr"), 3),
                    _one(values, "auc_ctr", lambda x: fixed(x, 4)),
                    _one(values, "flops_per_sample", lambda x: number(x / 1e6) + " M"),
                ]
            )
        if rows:
            header = ["variant", "NE click", "NE conversion", "AUC click", "FLOPs a sample"]
            floor = _by_metric(here[here.metric.str.startswith("ne_bayes")])
            notes = [
                f"best possible NE on these labels: {name} {fixed(floor[f'ne_bayes_{task}']['p50'])}"
                for task, name in (("ctr", "click"), ("cvr", "conversion"))
                if f"ne_bayes_{task}" in floor
            ]
            found.append(table("quality", source.device_label(device), header, rows, "; ".join(notes)))
    return found


def speed(source: Source) -> list[dict]:
    """Samples/s, MFU and memory of every trained variant, on the device that trained it."""
    frame = select(source.frame("train"))
    found = []
    for device in best_device_first(frame.device):
        here = frame[frame.device == device]
        rows = []
        for variant in _in_sheet_order(here.subject):
            values = _by_metric(here[here.subject == variant])
            impl = here[here.subject == variant].impl.iloc[0]
            rows.append(
                [
                    variant,
                    _one(values, "qps", number),
                    _one(values, "time_ms", lambda x: fixed(x, 2)),
                    _one(values, "mfu", lambda x: fixed(100 * x, 2)),
                    _one(values, "peak_mem_gib", lambda x: fixed(x, 2)),
                    impl,
                ]
            )
        if rows:
            header = ["variant", "samples/s", "step, ms", "MFU, %", "peak GiB", "what ran"]
            peaks = sorted(set(here[here.metric == "mfu"].note) - {""})
            peak = next((note for note in peaks if note.startswith("peak")), "")
            found.append(table("speed", source.device_label(device), header, rows, peak))
    return found


def label_law(source: Source) -> list[dict]:
    """NE on click of window, block and full attention, over the weight of interactions beyond 64 events."""
    frame = select(source.frame("quality"), metric="ne_ctr")
    found = []
    for device in best_device_first(frame.device):
        here = frame[frame.device == device]
        weights = sorted({m[1] for case in here.case if (m := re.fullmatch(r"long_range_([0-9.]+)", case))}, key=float)
        variants = _in_sheet_order(here.subject)
        if not weights:
            continue
        rows = []
        for variant in variants:
            cells = [here[(here.subject == variant) & (here.case == f"long_range_{weight}")] for weight in weights]
            rows.append([variant, *(spread(_by_metric(cell).get("ne_ctr")) for cell in cells)])
        header = ["variant", *(f"weight {weight}" for weight in weights)]
        found.append(table("label_law", source.device_label(device), header, rows))
    return found


def balance(source: Source) -> list[dict]:
    """Load skew (heaviest rank over mean) by number of ranks and scheme. A model, the same on every device."""
    frame = select(source.frame("balance"), metric="skew")
    frame = frame[frame.case.str.fullmatch(r"ranks\d+")]
    if frame.empty:
        return []
    device = best_device_first(frame.device)[0]
    here = frame[frame.device == device]
    schemes = [name for name in ("none", "local", "global") if name in set(here.subject)]
    schemes += sorted({name for name in here.subject if name.startswith("bbs_pool")}, key=lambda x: int(x[8:]))
    cases = sorted(set(here.case), key=lambda case: int(re.sub(r"\D", "", case) or 0))
    rows = []
    for case in cases:
        cells = [here[(here.case == case) & (here.subject == scheme)].p50 for scheme in schemes]
        rows.append([re.sub(r"\D", "", case) or case, *(fixed(c.median(), 3) if len(c) else "-" for c in cells)])
    header = ["ranks", *(scheme.replace("bbs_pool", "BBS, pool ") for scheme in schemes)]
    return [table("balance", "modelled", header, rows)]


def assumptions(source: Source) -> list[dict]:
    """Every constant behind the modelled jobs: value, unit, and the reason or record that it comes from."""
    runs = source.frame("simulate").run_id.unique()
    found = next(
        (source.runs[run]["config"] for run in runs if "assumptions" in source.runs[run].get("config", {})), None
    )
    if found is None:
        return []
    rows = [
        [
            row["name"],
            f"{row['value']:.4g}",
            row["unit"],
            f"record: {row['record']}" if row["record"] else row["source"],
        ]
        for row in found["assumptions"]
    ]
    rates = found.get("module_mfu", {})
    rows += [
        [f"MFU of {name}", f"{rate:.3g}", "fraction", "record: layers and step (one GPU)"]
        for name, rate in rates.items()
    ]
    return [
        table(
            "assumptions", "modelled", ["constant", "value", "unit", "where from"], rows, found.get("calibration", "")
        )
    ]


def kernels(source: Source) -> list[dict]:
    """Throughput of every implementation on every case of the kernel suite, forward and backward: best first."""
    frame = select(source.frame("kernels"), metric="tflops", phase=("fwd", "bwd"))
    found = []
    for device in best_device_first(set(frame.device) - {"cpu"}):  # what a CPU reaches says nothing about a kernel
        here = frame[frame.device == device]
        for subject in sorted(set(here.subject)):
            mine = here[here.subject == subject]
            impls = sorted(set(mine.impl))
            rows = []
            for case, phase in dict.fromkeys(zip(mine.case, mine.phase, strict=True)):
                cells = [mine[(mine.case == case) & (mine.phase == phase) & (mine.impl == i)].p50 for i in impls]
                rows.append([case, phase, *(number(c.median()) if len(c) else "-" for c in cells)])
            header = ["case", "phase", *impls]
            found.append(table(f"kernels_{subject}", source.device_label(device), header, rows))
    return found


def facts(source: Source) -> dict[str, dict]:
    """Single numbers for prose, key -> text and device. Local records first, so that prose and tables agree."""
    found: dict[str, dict] = {}
    frame = select(source.frame("train"))
    for device in sorted(set(frame.device), key=lambda slug: slug != "cpu"):
        here, label = frame[frame.device == device], source.device_label(device)
        for variant in set(here.subject):
            values = _by_metric(here[here.subject == variant])
            for metric, style in (
                ("ne_ctr", lambda x: fixed(x, 3)),
                ("ne_cvr", lambda x: fixed(x, 3)),
                ("ne_bayes_ctr", lambda x: fixed(x, 3)),
                ("ne_bayes_cvr", lambda x: fixed(x, 3)),
                ("mfu", lambda x: fixed(100 * x, 1)),
                ("qps", number),
                ("params", number),
                ("flops_per_sample", number),
            ):
                if metric in values and (key := f"{metric}.{variant}") not in found:
                    found[key] = {"text": style(values[metric]["p50"]), "device": label}
    ceilings = select(source.frame("ceilings"))
    for row in ceilings.itertuples():
        key = f"ceiling.{row.metric}"
        if row.device != "cpu" and key not in found:
            found[key] = {"text": number(row.p50), "device": source.device_label(row.device)}
    return found | gains(source)


# op, implementation, what it is compared with: throughput ratios for prose, over the cases that both have
GAINS = (
    ("jagged_attention", "v2", ("varlen_attn",)),
    ("jagged_attention", "v4", ("varlen_attn", "fa4", "sdpa_cudnn", "v2")),
    ("gdpa", "tlx", ("triton",)),
    ("block_attention", "triton", ("triton:eager_rotary", "triton:compiled_rotary")),
)


def gains(source: Source) -> dict[str, dict]:
    """Geometric mean of throughput over another's, "gain.<op>.<phase>.<impl>.<other>" -> text, device, cases."""
    found = {}
    frame = select(source.frame("kernels"), metric="tflops")
    for device in best_device_first(set(frame.device) - {"cpu"})[:1]:
        here = frame[frame.device == device]
        rates = here.groupby(["subject", "phase", "impl", "case"]).p50.median()
        for op, impl, others in GAINS:
            for phase in ("fwd", "bwd"):
                for other in others:
                    pair = [rates.get((op, phase, name), pd.Series(dtype=float)) for name in (impl, other)]
                    ratio = (pair[0] / pair[1]).dropna()
                    if len(ratio):
                        text = f"{np.exp(np.log(ratio).mean()):.3g}\u00d7"
                        key = f"gain.{op}.{phase}.{impl}.{other}"
                        cases = f"{len(ratio)} case{'s' if len(ratio) > 1 else ''}"
                        found[key] = {"text": text, "device": source.device_label(device), "cases": cases}
    return found


ALL = (data, model, quality, speed, label_law, balance, assumptions, kernels)


def _by_metric(frame: pd.DataFrame) -> dict[str, pd.Series]:
    if frame.empty:
        return {}
    return {row["metric"]: row for _, row in over_seeds(frame, ["metric"]).iterrows()}


def _one(values: dict, metric: str, style) -> str:
    return style(values[metric]["p50"]) if metric in values else "-"


def _in_sheet_order(subjects) -> list[str]:
    """Variants in the order of config/variants.tsv, others after them by name."""
    from gem.workflow import read_sheet

    order = {name: index for index, name in enumerate(read_sheet("variants"))}
    return sorted(set(subjects), key=lambda name: (order.get(name, len(order)), name))
