"""T07: local against global rebalancing."""

import sys

from figures import balancing, cli, style

ID = "T07"
CAPTION = (
    "Load of the heaviest rank above the mean, and the share of the avoidable skew that each scheme removes, by "
    "number of ranks and by the 128-sample sub-batches that a rank pools; simulated from a heavy-tailed length "
    "law. local: the source says about 90 % of the optimum without communication."
)
COMMUNICATION = {"none": "none", "local": "none", "bbs": "none", "global": "all-to-all of samples a step"}


def build(source):
    rows = balancing.rows_of(source)
    table = rows.assign(
        scheme=[style.look("balance", name).label for name in rows.scheme],
        communication=[COMMUNICATION[name] for name in rows.scheme],
        above=(100 * (rows["skew"] - 1)).round(2),
        gain=(100 * rows.share).round(1),
    )
    names = {"pool": "pool, sub-batches", "above": "heaviest rank above the mean, %", "gain": "share of the optimum, %"}
    return table[["ranks", "scheme", "pool", "communication", "above", "gain"]].rename(columns=names)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
