"""F24: data flow of expert parallelism and of fully sharded tables: the collectives of a step in their order."""

import re
import sys

from matplotlib.patches import FancyBboxPatch

from figures import cli, style
from figures.load import need, select

ID = "F24"
CAPTION = (
    "Collectives of a step in the order in which a rank issues them, read from a profile of four processes over gloo "
    "on a CPU, with the group that takes part and the bytes that a rank sends at the toy size of that run. Left: an "
    "expert of a layer on 2 x 2 ranks, its parameters sharded over two, two experts side by side. Right: tables in "
    "fully sharded 2D: two ranks share a copy, two copies share the storage. Dashed boxes are what a rank computes in "
    "between; they are drawn from the code, not measured."
)
PANELS = {"experts": "Expert parallelism", "tables_v3": "Fully sharded tables (V3)"}
# What a rank computes after a collective, by case, phase and payload.
COMPUTE = {
    ("experts", "fwd", "activations"): "the rank's expert on the group's batch",
    ("experts", "bwd", "output_gradients"): "gradients of weights and inputs",
    ("tables_v3", "fwd", "table_shards"): "look up; free the copy",
    ("tables_v3", "bwd", "table_shards"): "update the rows of this copy",
}
AXES = {
    "expert_shard": "ranks of one expert",
    "expert": "experts of the layer",
    "model_parallel": "ranks of a copy",
    "table_replica": "copies of a shard",
}
KINDS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all"}
PASSES = {"fwd": "forward", "bwd": "backward"}


def draw(source):
    rows = need(select(source.frame("data_flow"), case=tuple(PANELS)), "data_flow")
    rows = rows.drop_duplicates(["case", "subject", "impl", "phase", "metric"])
    keys = ["case", "phase", "subject", "impl", "note"]
    table = rows.pivot_table(index=keys, columns="metric", values="p50").reset_index()
    table = table.sort_values(["case", "position"], ignore_index=True)
    figure, axes = style.panels(1, 2, height=4.3)
    for axis, (case, title) in zip(axes[0], PANELS.items(), strict=True):
        own = table[table.case == case]
        if own.empty:
            style.blank(axis, title)
            continue
        steps(axis, own)
        axis.set_title(title)
    return figure, table


def steps(axis, rows) -> None:
    """One box a collective, top down, and between them what a rank computes."""
    boxes = []
    for row in rows.itertuples():
        group, ranks = re.match(r"(\w+) of (\d+) ranks", row.note).groups()
        what = row.subject.replace("_", " ")
        text = f"{KINDS[row.impl]} of {what}\n{AXES[group]} ({ranks}), {size(row.comm_bytes)} sent"
        boxes.append((row.phase, text, style.look("collective", row.impl).color))
        if (row.case, row.phase, row.subject) in COMPUTE:
            boxes.append((row.phase, COMPUTE[row.case, row.phase, row.subject], None))
    axis.set(xlim=(0, 10), ylim=(len(boxes), 0))
    axis.axis("off")
    for place, (_, text, color) in enumerate(boxes):
        axis.add_patch(
            FancyBboxPatch(
                (1.0, place + 0.1), 8.8, 0.72, boxstyle="round,pad=0.02,rounding_size=0.12", facecolor="white",
                edgecolor=color or style.GREY, linewidth=1.6 if color else 0.8, linestyle="-" if color else "--",
            )
        )  # fmt: skip
        axis.text(5.4, place + 0.47, text, ha="center", va="center", fontsize=style.FONT, linespacing=1.1)
        if place:
            arrow = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", (5.4, place + 0.09), (5.4, place - 0.16), arrowprops=arrow)
    for phase, name in PASSES.items():
        places = [place for place, box in enumerate(boxes) if box[0] == phase]
        if places:
            axis.plot([0.6, 0.6], [places[0] + 0.1, places[-1] + 0.82], color=style.INK, linewidth=0.8)
            middle = (places[0] + places[-1] + 1) / 2
            axis.text(0.3, middle, name, rotation=90, ha="center", va="center", fontsize=style.FONT)


def size(count: float) -> str:
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count:.0f} B"


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
