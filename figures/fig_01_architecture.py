"""F01: architecture of the miniature GEM, drawn from the configuration that the model records carry."""

import sys

from matplotlib.patches import FancyBboxPatch

from figures import cli, style
from figures.load import need, select

ID = "F01"
CAPTION = (
    "Left: data flow with the sizes of one preset: ids and dense features become non-sequence "
    "tokens X, event histories become jagged sequences S; every layer runs a branch an event type and the experts "
    "over X, its summary and the summaries H of the histories. Right: share of forward FLOPs a sample by part, "
    "for every preset, computed from the modules and the tier's length law. Nothing here is measured."
)
PARTS = ("embedding", "feed_forward", "self_attention", "pooling", "summary", "interaction", "heads")


def draw(source):
    rows = need(select(source.frame("model"), metric="flops_per_sample"), "model")
    rows = rows[rows.subject.isin(PARTS)].drop_duplicates(["case", "subject"])
    config = next((source.runs[run]["config"] for run in rows.run_id if run in source.runs), {})
    drawn = config.get("drawn") or rows.case.iloc[0]
    figure, axes = style.panels(1, 2, height=3.7, width_ratios=[2.2, 1])
    diagram(axes[0, 0], drawn, config.get("presets", {}).get(drawn, {}))
    right = axes[0, 1]
    total = rows.groupby("case").p50.sum()
    presets = list(total.sort_values().index)
    start = dict.fromkeys(presets, 0.0)
    for part in PARTS:
        for row in rows[rows.subject == part].itertuples():
            share = 100 * row.p50 / total[row.case]
            at = presets.index(row.case)
            style.bar(
                right, at, share, "module", part, label=row.case == rows.case.iloc[0], start=start[row.case], width=0.7
            )
            start[row.case] += share
    labels = [f"{name}\n{engineering(total[name])}" for name in presets]
    right.set_xticks(range(len(presets)), labels)
    right.set(ylabel="share of forward FLOPs a sample, %", ylim=(0, 100), title="Where the FLOPs are")
    style.legend(figure, [right])
    table = rows[["case", "subject", "metric", "unit", "p50"]].assign(share=rows.p50 / rows.case.map(total))
    return figure, table


def engineering(value: float) -> str:
    """1234567 -> 1.2M."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2g}{letter}" if value < 100 * factor else f"{value / factor:.0f}{letter}"
    return f"{value:.0f}"


def diagram(axis, preset: str, sizes: dict) -> None:
    """Boxes and arrows in a 10 x 10 field."""
    axis.set(xlim=(0, 10), ylim=(0, 10))
    axis.axis("off")
    axis.set_title(f"Preset {preset}")

    def size(name: str) -> str:
        return f"{sizes[name]:,}" if name in sizes else "?"

    events = sizes.get("events", [])
    widths = " / ".join(str(event["width"]) for event in events) or "?"
    heads = " / ".join(str(event["num_heads"]) for event in events) or "?"
    depth = " / ".join(str(event["num_layers"]) for event in events) or "?"
    windows = " / ".join(str(event["window"]) for event in events) or "?"

    def box(x, y, w, h, text, family="#ffffff", edge=style.INK):
        patch = FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.15", facecolor=family, edgecolor=edge, linewidth=0.9
        )
        axis.add_patch(patch)
        axis.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=style.FONT, linespacing=1.15)

    def arrow(x0, y0, x1, y1):
        axis.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "-|>", "color": style.INK, "linewidth": 0.9})

    box(0.1, 0.1, 4.6, 1.15, "sparse ids, dense features\nembedding bags, MLP", "#f2f2f2")
    box(5.3, 0.1, 4.6, 1.15, "event histories\nembeddings, time-aware rotary", "#f2f2f2")
    arrow(2.4, 1.3, 2.4, 2.2)
    arrow(7.6, 1.3, 7.6, 2.2)
    axis.text(2.55, 1.72, f"X: {size('num_tokens')} tokens of {size('width')}", va="center", fontsize=style.FONT)
    axis.text(7.75, 1.72, "S: jagged", va="center", fontsize=style.FONT)
    box(0.0, 2.2, 10.0, 5.9, "", "#fbfbfb", style.GREY)
    axis.text(0.2, 7.75, f"layer, {size('num_layers')} times", fontsize=style.FONT, va="center")
    box(0.3, 2.5, 4.0, 1.0, f"summary X_sum\n{size('num_summary')} tokens", "#dcedf8")
    box(5.2, 2.5, 4.5, 1.0, f"GDPA feed-forward, {size('num_kv')} K/V\nfrom X_sum", "#d4e4f1")
    box(5.2, 3.95, 4.5, 1.65, f"self-attention\nwidth {widths}\nwindow {windows}", "#fbeacb")
    box(5.2, 6.0, 4.5, 1.2, f"pooling to H: {size('num_seeds')} tokens\nlayers {depth}, heads {heads}", "#cfeae2")
    box(
        0.3,
        5.0,
        4.0,
        2.1,
        f"{size('num_experts')} Wukong experts over\n[X, X_sum, H]\nhidden {size('expert_hidden')}",
        "#f7dfcf",
    )
    arrow(4.35, 3.0, 5.15, 3.0)
    arrow(7.45, 3.55, 7.45, 3.9)
    arrow(7.45, 5.65, 7.45, 5.95)
    arrow(5.15, 6.4, 4.35, 6.4)
    arrow(2.3, 3.55, 2.3, 4.95)
    arrow(2.3, 7.15, 2.3, 8.55)
    axis.text(2.45, 8.3, "X after the last layer", fontsize=style.FONT, va="center")
    box(0.3, 8.6, 4.0, 1.15, f"heads: click, conversion\nhidden {size('head_hidden')}", "#f3e0eb")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
