"""F20: load skew over ranks, and what rebalancing removes of it."""

import sys

from figures import balancing, cli, style

ID = "F20"
CAPTION = (
    "Left: load of the heaviest rank over the mean, by number of data-parallel ranks, for batches as they come, "
    "for base-batch shuffling and for local rebalancing with the largest pool, and for an all-to-all of samples; "
    "the source's 15 % is the dotted line. Right: share of the avoidable skew that is removed, by the number of "
    "128-sample sub-batches that a rank pools, at the largest number of ranks. Simulated from a heavy-tailed "
    "length law; no clock is involved."
)
PUBLISHED_SKEW = 1.15


def draw(source):
    rows = balancing.rows_of(source)
    figure, axes = style.panels(1, 2, height=2.7)
    left, right = axes[0]
    for scheme in (name for name in style.FAMILIES["balance"] if name in set(rows.scheme)):
        part = rows[rows.scheme == scheme]
        widest = part[part.pool.isna() | (part.pool == part.pool.max())]
        style.line(left, widest, "ranks", "skew", "balance", scheme, size=8 if scheme == "local" else 4)
        top = part[part.ranks == rows.ranks.max()]
        if scheme == "global" and len(top):
            look = style.look("balance", scheme)
            right.axhline(top.share.iloc[0], color=look.color, linestyle=look.line)
        elif top.pool.notna().any():
            style.line(right, top, "pool", "share", "balance", scheme, size=8 if scheme == "local" else 4)
    left.axhline(PUBLISHED_SKEW, color=style.INK, linestyle=":", linewidth=0.8)
    left.annotate("source: 15 % above the mean", (rows.ranks.min(), PUBLISHED_SKEW), va="bottom")
    style.powers(left, rows.ranks)
    left.set(xlabel="ranks", ylabel="heaviest / mean rank", title="Skew over ranks")
    style.powers(right, rows.pool.dropna())
    right.set(xlabel="sub-batches in the pool of a rank", ylabel="share of the optimum", ylim=(0, 1.03))
    right.set_title(f"Share of the optimum, {int(rows.ranks.max()):,} ranks")
    style.legend(figure, [left])
    return figure, rows


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
