"""Records of timed steps and layers as F21, F22 and T08 read them."""

from __future__ import annotations

import pandas as pd

from figures.load import Source, best_device_first, select

# The source's order, each rung on top of the one before; what a rung is called where it is added.
WATERFALL = {
    "baseline_padded": "padded baseline",
    "add_jagged": "+ no padding",
    "baseline_varlen": "+ compile, fused optimiser (varlen baseline)",
    "add_jfa_v2": "+ JFA v2",
    "add_jfa_v4": "+ JFA v4",
    "rung_gdpa": "+ GDPA",
    "rung_window": "+ sliding window",
    "rung_block": "+ 64-token blocks",
    "rung_rotary": "+ fused rotary",
    "rung_norms": "+ fused norms",
    "rung_compskip": "+ CompSkip",
    "rung_hsp": "+ seed pooling",
    "drop_graph": "+ balanced batches",
    "full": "+ CUDA graphs (full)",
}
SAME_MATH = {
    "same_math_eager": "kernels alone, mathematics of the baseline",
    "full_same_math": "the same with CUDA graphs",
}
# on top of full; attention in 8 bits spares blocks, which have no 8-bit kernel
LOW_PRECISION = {
    "mxfp8_attention": "full, attention in 8 bits",
    "mxfp8_mlp": "full, linear layers in 8 bits",
    "mxfp8_full": "full, both in 8 bits",
}
COLUMNS = {
    "attention_impl": "attention kernels", "gdpa_impl": "GDPA kernel", "self_attention": "64-token blocks",
    "rotary": "fused rotary", "norm": "fused norms", "compskip": "CompSkip", "pooling": "seed pooling",
}  # fmt: skip


def whole_steps(source: Source, experiment: str = "step") -> pd.DataFrame:
    """Rows of whole steps of variants: parts (name@variant) and components (variant:name) left out."""
    rows = select(source.frame(experiment))
    return rows[~rows.subject.str.contains("[@:]")] if len(rows) else rows


def gpu_steps(source: Source) -> tuple[str, pd.DataFrame]:
    """(device, metrics by variant) of the first GPU with a waterfall: index variant, columns metrics; median over
    runs. ("", empty) without."""
    rows = whole_steps(source)
    rows = rows[(rows.phase == "step") & (rows.device != "cpu")] if len(rows) else rows
    for device in best_device_first(rows.device):
        own = rows[(rows.device == device) & rows.subject.isin({*WATERFALL, *SAME_MATH})]
        if len(own):
            every = rows[rows.device == device]
            return device, every.pivot_table(index="subject", columns="metric", values="p50", aggfunc="median")
    return "", pd.DataFrame()


def components(source: Source, device: str) -> pd.DataFrame:
    """Milliseconds of components by variant: index variant, columns components, from the profiler."""
    rows = select(source.frame("step"), metric="time_ms", device=device)
    rows = rows[rows.subject.str.contains(":")]
    if rows.empty:
        return pd.DataFrame()
    names = rows.subject.str.split(":", n=1, expand=True)
    return rows.assign(variant=names[0], part=names[1]).pivot_table(
        index="variant", columns="part", values="p50", aggfunc="median"
    )


def predicted(source: Source, device: str) -> pd.DataFrame:
    """Variants whose layers were added up from modules and whose step was timed: columns layers_ms (sum of modules),
    rest_ms (the same for all: median of step less layers), step_ms, predicted_ms, and judged: whether the step was a
    CUDA graph, where there are such, since others also wait for the host. The median is of those that are judged."""
    layers = select(source.frame("layers"), metric="time_ms", phase="model", device=device)
    layers = layers[~layers.subject.str.contains("[@:]")].groupby("subject").p50.median()
    timed = select(whole_steps(source), metric="time_ms", phase="step", device=device)
    both = pd.DataFrame({"layers_ms": layers, "step_ms": timed.groupby("subject").p50.median()}).dropna()
    graphs = both.index.isin(timed[timed.impl.str.contains("launch:graph")].subject)
    both["judged"] = graphs | (graphs.sum() < 2)
    judged = both[both.judged]
    both["rest_ms"] = (judged.step_ms - judged.layers_ms).median() if len(both) else 0.0
    return both.assign(predicted_ms=both.layers_ms + both.rest_ms)


def scaling_ratios(source: Source) -> pd.DataFrame:
    """MFU of a step over that of its layers one by one: device, subject, p50 and more. The layers are those of
    experiment `layers`, which times every module without the host, or else what the step's own process measured."""
    own, keys = select(source.frame("step"), metric="scaling_ratio"), ["device", "subject"]
    whole = select(whole_steps(source), metric="mfu", phase="step").groupby(keys).p50.median()
    local = select(source.frame("layers"), metric="mfu", phase="step").groupby(keys).p50.median()
    found = (whole / local).dropna().rename("p50").reset_index()
    rest = own[~own.set_index(keys).index.isin(found.set_index(keys).index)]
    return pd.concat([found.assign(metric="scaling_ratio", scope="measured"), rest], ignore_index=True)


def shares(source: Source, device: str) -> pd.Series:
    """Milliseconds that each toggle saves on average over all orders, by column of variants.tsv."""
    rows = select(source.frame("layers"), metric="time_ms", device=device)
    rows = rows[rows.subject.str.startswith("shapley:")]
    found = rows.assign(name=rows.subject.str.removeprefix("shapley:")).groupby("name", sort=False).p50.median()
    return found.reindex([name for name in COLUMNS if name in found.index])
