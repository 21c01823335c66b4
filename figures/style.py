"""How every figure looks: one colour one meaning, readable in grey, the same bytes every time.

Colours are those of Okabe and Ito, safe for colour-blind readers, and darker or lighter shades of them. What must be
told apart in one figure differs in a second channel too: marker and line style in line charts, hatch in bars.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

WIDTH = 6.6  # inches: the text width of the report, so that font sizes are those on paper
FONT = 8.0  # points, the smallest size used anywhere
GREY, LIGHT_GREY, INK = "#7f7f7f", "#d9d9d9", "#222222"

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#d6c915", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip


class Look(NamedTuple):
    """Colour, marker, line style and hatch of one subject, and the name that a reader sees."""

    color: str
    marker: str
    line: str
    hatch: str
    label: str


# Family -> name in the records -> look. Within a family every colour and every marker occurs once.
FAMILIES: dict[str, dict[str, Look]] = {
    "impl": {
        "reference": Look("#bdbdbd", "x", ":", "", "reference loop"),
        "eager": Look("#8c8c8c", "s", "-", "..", "eager, vectorised"),
        "compiled_eager": Look("#595959", "P", "--", "xx", "padded eager, compiled"),
        "padded": Look(BLACK, "o", "--", "//", "padded SDPA"),
        "sdpa_cudnn": Look("#7a5c00", "v", "--", "\\\\", "padded SDPA, cuDNN"),
        "sdpa_flash": Look("#b58900", "<", "--", "--", "padded SDPA, flash"),
        "flex": Look(PURPLE, "h", ":", "++", "FlexAttention"),
        "varlen_attn": Look("#8f4a73", "D", "-.", "oo", "torch varlen"),
        "fa4": Look(GREEN, "^", "-.", "OO", "FA4 (CuTe)"),
        "v1": Look(YELLOW, ">", ":", "", "v1 masked"),
        "v2": Look(ORANGE, "H", "--", "//", "v2 tuned"),
        "v3": Look(SKY, "8", "-.", "\\\\", "v3 subtraction"),
        "v4": Look(BLUE, "*", "-", "", "v4 TLX"),
        "triton": Look("#a63603", "X", "-", "xx", "Triton"),
        "tlx": Look("#084594", "p", "-", "", "TLX"),
        "triton_taylor6": Look("#fd8d3c", "1", "--", "", "Triton, Taylor 6"),
        "tlx_taylor6": Look("#4292c6", "d", "--", "", "TLX, Taylor 6"),
        "bound": Look(LIGHT_GREY, "_", "-", "", "bound of the chip"),
    },
    "published": {
        "Triton GDPA": Look("#a63603", "X", "-", "xx", "Triton GDPA"),
        "CUTLASS FMHA": Look("#7a5c00", "v", "--", "\\\\", "CUTLASS FMHA (dense softmax)"),
        "FA4": Look(GREEN, "^", "-.", "OO", "FA4"),
        "CuteDSL GDPA": Look("#084594", "p", "-", "", "CuTe-DSL GDPA"),
    },
    "traffic": {
        "benchmark": Look(BLACK, "D", "-", "", "dense softmax in a benchmark"),
        "traffic": Look(VERMILION, "o", "", "//", "baseline GDPA, real-traffic shapes"),
    },
    "balance": {
        "none": Look(GREY, "o", "-", "", "none"),
        "local": Look(GREEN, "s", "--", "//", "local, inside a rank"),
        "bbs": Look(BLUE, "^", "-", "\\\\", "base-batch shuffling"),
        "global": Look(ORANGE, "D", ":", "xx", "global all-to-all"),
    },
    "order": {
        "grid": Look(GREY, "o", "-", "", "grid over the longest"),
        "valid": Look(SKY, "s", "--", "//", "valid tiles"),
        "zigzag": Look(BLUE, "^", "-", "xx", "valid tiles, zigzag"),
        "resident": Look(ORANGE, "D", "-.", "..", "K/V resident"),
        "zigzag_resident": Look(GREEN, "v", "-", "++", "zigzag, K/V resident"),
    },
    "activation": {
        "gelu": Look(BLACK, "o", "-", "", "GELU, erf"),
        "gelu_tanh": Look(ORANGE, "s", "--", "//", "GELU, tanh"),
        "gelu_taylor6": Look(BLUE, "^", "-", "xx", "GELU, Taylor 6"),
        "silu": Look(GREEN, "D", "-.", "..", "SiLU"),
        "relu": Look(PURPLE, "v", ":", "\\\\", "ReLU"),
        "relu2": Look(SKY, "<", ":", "++", "ReLU squared"),
        "identity": Look(GREY, "x", ":", "oo", "identity"),
    },
    "attention": {
        "full": Look(BLACK, "o", "-", "", "full"),
        "window": Look(ORANGE, "s", "--", "//", "sliding window"),
        "block": Look(BLUE, "^", "-", "xx", "64-token blocks"),
    },
    "mask": {
        "mask2d": Look(VERMILION, "o", "-", "//", "-inf mask"),
        "subtraction": Look(SKY, "s", "--", "\\\\", "subtraction"),
        "none": Look(GREY, "D", ":", "", "no mask"),
    },
    "scheme": {
        "atomic": Look(VERMILION, "o", "-", "//", "atomic dQ"),
        "serial": Look(GREY, "s", "--", "..", "serial"),
        "recompute": Look(ORANGE, "D", "-.", "\\\\", "recompute"),
        "split": Look(BLUE, "^", "-", "xx", "split dQ | dK, dV"),
        "owner": Look(GREEN, "v", ":", "++", "one owner a sequence"),
    },
    "recipe": {
        "naive": Look(VERMILION, "o", "-", "//", "naive (floor scales)"),
        "rceil": Look(GREY, "s", "--", "..", "RCEIL scales"),
        "hadamard": Look(GREEN, "D", "-.", "\\\\", "RCEIL + Hadamard"),
        "stochastic": Look(PURPLE, "v", ":", "++", "RCEIL + stochastic"),
        "wgrad_high": Look(SKY, "<", "--", "oo", "RCEIL + WGrad high"),
        "late_bf16": Look(ORANGE, "P", "-.", "xx", "RCEIL + late layers high"),
        "full": Look(BLUE, "^", "-", "", "full recipe"),
    },
    "low_precision": {
        "hopper_fp8": Look(BLUE, "o", "-", "xx", "8 bits, quantisation inside"),
        "hopper_fp8:kernel": Look(SKY, "s", "--", "//", "8-bit kernel alone"),
        "hopper_fp8:wgrad_high": Look(ORANGE, "^", "-.", "..", "8 bits, weight gradient in bf16"),
    },
    "quantise": {
        "separate": Look(GREY, "o", "--", "..", "norm, then quantise"),
        "fused": Look(BLUE, "s", "-", "xx", "one kernel"),
        "bound": Look(LIGHT_GREY, "_", "-", "", "bound of one pass"),
        "jagged_attention": Look(SKY, "^", "-", "//", "softmax attention"),
        "gdpa": Look(GREEN, "D", "-", "\\\\", "GDPA"),
    },
    "sparse": {
        "v1": Look(GREY, "o", "-", "..", "V1: 1D model parallel"),
        "v2": Look(ORANGE, "s", "--", "//", "V2: 2D"),
        "v3": Look(BLUE, "^", "-", "xx", "V3: fully sharded 2D"),
    },
    "sparse_step": {
        "fwd": Look(GREEN, "o", "-", "//", "forward"),
        "bwd": Look(PURPLE, "s", "--", "", "backward and update"),
        "sync": Look(VERMILION, "^", ":", "xx", "sync of replicas"),
    },
    "gather": {
        "none": Look(GREY, "o", "-", "..", "no gather"),
        "nccl": Look(VERMILION, "s", "--", "//", "NCCL"),
        "nccl_ctas": Look(ORANGE, "D", "-.", "\\\\", "NCCL, blocks limited"),
        "copy_engine": Look(BLUE, "^", "-", "xx", "copy engines"),
    },
    "collective": {
        "all_gather": Look(VERMILION, "s", "--", "", "all-gather, NCCL"),
        "reduce_scatter": Look(ORANGE, "D", "-.", "", "reduce-scatter, NCCL"),
        "all_reduce": Look(GREEN, "v", ":", "", "all-reduce, NCCL"),
        "all_to_all": Look(PURPLE, "P", "--", "", "all-to-all, NCCL"),
        "gather_copy_engine": Look(BLUE, "^", "-", "", "all-gather, copy engines"),
    },
    "dense": {
        "dense_1d": Look(GREY, "o", "-", "..", "1D: FSDP over all GPUs"),
        "dense_2d": Look(ORANGE, "s", "--", "//", "2D: FSDP x DDP"),
        "dense_2d_ep": Look(BLUE, "^", "-", "xx", "2D and experts, groups of 128"),
        "dense_2d_ep_256": Look(SKY, "D", ":", "\\\\", "2D and experts, groups of 256"),
    },
    "step_part": {
        "compute": Look(BLUE, "o", "-", "", "compute"),
        "wait": Look(ORANGE, "s", "--", "//", "wait for the heaviest rank"),
        "contention": Look(PURPLE, "D", "-.", "..", "SMs lent to collectives"),
        "exposed": Look(VERMILION, "^", ":", "xx", "communication not hidden"),
    },
    "tier": {
        "host": Look(GREEN, "o", "-", "", "NVLink, 8 GPUs of a host"),
        "zone": Look(SKY, "s", "--", "//", "RoCE, 128 GPUs of a zone"),
        "cross_zone": Look(VERMILION, "^", "-.", "xx", "across zones, 4,096 GPUs"),
    },
    "module": {
        "tables": Look(LIGHT_GREY, "o", "-", "", "embedding tables"),
        "embedding": Look(GREY, "s", "-", "..", "embedding, projections"),
        "feed_forward": Look(BLUE, "^", "-", "//", "GDPA feed-forward"),
        "self_attention": Look(ORANGE, "D", "-", "\\\\", "self-attention"),
        "pooling": Look(GREEN, "v", "-", "xx", "pooling to a summary"),
        "summary": Look(SKY, "<", "-", "++", "summary of X"),
        "interaction": Look(VERMILION, "P", "-", "", "interaction experts"),
        "heads": Look(PURPLE, "X", "-", "oo", "heads"),
    },
    "group": {
        "baseline": Look(BLACK, "D", "-", "//", "baseline"),
        "add_one": Look(SKY, "o", "-", "", "baseline + one"),
        "waterfall": Look(GREEN, "P", "-", "..", "added in order"),
        "drop_one": Look(ORANGE, "v", "-", "\\\\", "full - one"),
        "full": Look(BLUE, "*", "-", "xx", "full"),
        "quality": Look(PURPLE, "s", "-", "..", "quality study"),
        "low": Look(VERMILION, "X", "-", "++", "full in 8 bits"),
    },
    "checkpointing": {
        "uniform": Look(GREY, "s", "--", "..", "one budget for all regions"),
        "region": Look(BLUE, "o", "", "xx", "a budget for each region"),
    },
    "saved": {
        "full": Look(GREY, "o", "-", "", "bf16"),
        "fp8": Look(BLUE, "s", "--", "//", "FP8"),
        "mx4": Look(ORANGE, "^", ":", "xx", "MX4"),
    },
    "target": {
        "tokens": Look(SKY, "o", "-", "", "tokens"),
        "pairs": Look(BLUE, "s", "--", "//", "attention pairs"),
    },
}  # fmt: skip


def look(family: str, name: str) -> Look:
    """Look of a subject; "name:option" looks like its name. ValueError for a name without one."""
    known = FAMILIES[family]
    key = name if name in known else name.partition(":")[0]
    if key not in known:
        raise ValueError(f"style: {family} {name!r} has no colour; allowed: {', '.join(known)}")
    return known[key]


def setup() -> None:
    """Set fonts, grid and the constants that make output repeatable. Called once before drawing."""
    sns.set_theme(context="paper", style="ticks", font="DejaVu Sans")
    plt.rcParams.update(
        {
            "font.size": FONT, "axes.titlesize": FONT + 0.5, "axes.labelsize": FONT, "xtick.labelsize": FONT,
            "ytick.labelsize": FONT, "legend.fontsize": FONT, "legend.title_fontsize": FONT,
            "figure.titlesize": FONT + 1,
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
            "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "axes.linewidth": 0.7, "lines.linewidth": 1.4,
            "lines.markersize": 5, "hatch.linewidth": 0.5, "legend.frameon": False, "legend.handlelength": 2.4,
            "figure.constrained_layout.use": True, "svg.hashsalt": "gem", "svg.fonttype": "path", "pdf.fonttype": 42,
            "savefig.dpi": 200, "axes.titlelocation": "left", "errorbar.capsize": 2,
        }
    )  # fmt: skip


def panels(rows: int = 1, columns: int = 1, height: float = 2.3, **keywords):
    """A figure of text width with rows x columns axes, always a 2-D array of axes. height: inches a row."""
    return plt.subplots(rows, columns, figsize=(WIDTH, height * rows + 0.35), squeeze=False, **keywords)


def line(
    axis,
    frame,
    x: str,
    y: str,
    family: str,
    name: str,
    *,
    low: str | None = None,
    high: str | None = None,
    size: float = 5,
) -> None:
    """One subject over x, with whiskers from `low` to `high` where both are known. size: of the markers; a larger one
    stays visible under a line that runs over it.
    """
    style, frame = look(family, name), frame.sort_values(x)
    inside = "white" if style.marker in "osD^v<" else style.color
    axis.plot(
        frame[x], frame[y], color=style.color, marker=style.marker, linestyle=style.line, label=style.label,
        markersize=size + 3 if style.marker == "*" else size, markeredgecolor=style.color, markerfacecolor=inside,
    )  # fmt: skip
    if low and high:
        known = frame[frame[low].notna() & frame[high].notna()]
        errors = [(known[y] - known[low]).clip(lower=0), (known[high] - known[y]).clip(lower=0)]
        axis.errorbar(known[x], known[y], yerr=errors, fmt="none", ecolor=style.color, elinewidth=0.8)


def bar(
    axis,
    position,
    value,
    family: str,
    name: str,
    *,
    width: float = 0.8,
    label: bool = True,
    horizontal: bool = False,
    low=None,
    high=None,
    start=0.0,
) -> None:
    """One bar (or several of one subject) in its colour and hatch, whiskers from `low` to `high`."""
    style = look(family, name)
    keywords = {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "linewidth": 0.3}
    keywords["label"] = style.label if label else None
    if horizontal:
        axis.barh(position, value, height=width, left=start, **keywords)
    else:
        axis.bar(position, value, width=width, bottom=start, **keywords)
    if low is not None and high is not None and low == low and high == high:
        error = [[max(0.0, value - low)], [max(0.0, high - value)]]
        along = {"xerr": error} if horizontal else {"yerr": error}
        at = (value, position) if horizontal else (position, value)
        axis.errorbar(*at, fmt="none", ecolor=INK, elinewidth=0.8, **along)


def powers(axis, values) -> None:
    """x axis in powers of two that are in the data, written out."""
    ticks = sorted({int(value) for value in values})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()


def plain_log(axis) -> None:
    """Ticks of a logarithmic axis (an axis.xaxis or axis.yaxis) written out: 1, 2, 5 of every decade, 1 alone where the
    data span three or more. Call it after the data are drawn.
    """
    low, high = axis.get_data_interval()
    wide = low > 0 and high >= 1000 * low
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e5 else f"{value:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def blank(axis, name: str = "") -> None:
    """An empty place where a device has no records of this panel."""
    axis.set_axis_off()
    axis.text(
        0.5,
        0.5,
        f"{name}: no record" if name else "no record",
        transform=axis.transAxes,
        ha="center",
        va="center",
        color=GREY,
    )


def legend(figure, axes, *, columns: int = 4) -> None:
    """One legend under the figure, every label once in the order of first appearance, in at most `columns` columns."""
    found: dict[str, object] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        fitting = next(n for n in range(min(columns, len(found)), 0, -1) if n == 1 or legend_width(found, n) <= WIDTH)
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=fitting)


def legend_width(labels, columns: int) -> float:
    """About how many inches a legend takes: 0.058 a letter at FONT, 0.36 a sample, 0.22 between columns."""
    labels = list(labels)
    least, longer = divmod(len(labels), columns)  # as matplotlib fills columns: the first ones get one more
    lengths, start = [], 0
    for column in range(columns):
        end = start + least + (column < longer)
        lengths.append(max(len(label) for label in labels[start:end]))
        start = end
    return 0.058 * sum(lengths) + 0.36 * columns + 0.22 * (columns - 1)


def save(figure, prefix: Path) -> list[Path]:
    """Write PREFIX.pdf, .svg and .png without dates, so that the same data give the same bytes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }
    paths = []
    for suffix, values in metadata.items():
        paths.append(prefix.parent / f"{prefix.name}.{suffix}")
        figure.savefig(paths[-1], metadata=values)
    plt.close(figure)
    return paths
