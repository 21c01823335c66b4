"""F03: backward gap between a benchmark of dense softmax attention and real-traffic shapes."""

import sys

from figures import cli, gap

ID = "F03"
CAPTION = (
    "Backward throughput of dense softmax attention in a benchmark and of the baseline GDPA kernel on "
    "real-traffic shapes, by bin of the longest sequence. Left: the source's B200 (data table 2). Beside it: our "
    "devices, measured, useful pairs only; each panel has its own scale."
)


def draw(source):
    return gap.draw(source, "bwd")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
