"""T03: the source's data table 2 (backward gap) with ours beside it."""

import sys

from figures import cli, gap

ID = "T03"
CAPTION = (
    "Backward: dense softmax attention in a benchmark, baseline GDPA on real-traffic shapes, and the worst gap, "
    "useful TFLOP/s. The source's B200 first, then each of our devices. Absolute rates of two chips are not "
    "comparable; gaps are."
)


def build(source):
    return gap.build(source, "bwd")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
