"""F07: forward throughput of GDPA against its peers."""

import sys

from figures import cli, gdpa_panels

ID = "F07"
CAPTION = (
    "Forward throughput of GDPA kernels and of softmax kernels at the same shapes, over the query length: "
    "self-attention with full sequences, with mean fill 0.5, and cross-attention with short K/V. First row: the "
    "source's B200, read off its charts. Then one row a device of ours, measured, useful pairs only, each with "
    "its own scale; without a GPU, a CPU's small cases, which say nothing about one."
)


def draw(source):
    return gdpa_panels.draw(source, "fwd")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
