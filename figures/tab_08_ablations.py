"""T08: ablations, add-one and drop-one, with NE, throughput and MFU."""

import sys

import pandas as pd

from figures import cli, training
from figures.load import need

ID = "T08"
CAPTION = (
    "Every variant against its base: held-out NE of both tasks, training throughput and MFU, medians over seeds; "
    "spread: 80 % minus 20 % quantile of NE. Changes are those against the variant named as base. MFU counts "
    "useful FLOPs on the variant's own mathematics. Rows whose case is a preset are steps timed alone on a GPU at one "
    "local batch; the others come from training runs."
)
METRICS = ("ne_ctr", "ne_cvr", "qps", "mfu", "time_ms", "peak_mem_gib", "flops_per_sample")


def build(source):
    table = pd.concat([training.by_variant(source, name, METRICS) for name in ("train", "step")], ignore_index=True)
    table = training.ordered(training.wide(need(table, "train or step")))
    for name in METRICS:
        if name not in table:
            table[name] = float("nan")
    base = table.set_index(["device", "case", "subject"])
    keys = list(zip(table.device, table.case, table.base, strict=True))

    def of_base(metric):
        return [base[metric].get(key, float("nan")) for key in keys]

    spread = table.get("ne_ctr_high", float("nan")) - table.get("ne_ctr_low", float("nan"))
    return table.assign(
        **{
            "device": [source.device_label(slug) for slug in table.device],
            "variant": table.subject,
            "NE click": table.ne_ctr,
            "spread": spread,
            "change of NE click": table.ne_ctr - of_base("ne_ctr"),
            "NE conversion": table.ne_cvr,
            "change of NE conversion": table.ne_cvr - of_base("ne_cvr"),
            "samples/s": table.qps,
            "throughput / base": table.qps / of_base("qps"),
            "MFU, %": 100 * table.mfu,
            "step, ms": table.time_ms,
            "peak memory, GiB": table.peak_mem_gib,
            "FLOPs a sample / base": table.flops_per_sample / of_base("flops_per_sample"),
        }
    )[[*COLUMNS]]


COLUMNS = [
    "device", "case", "variant", "group", "base", "NE click", "spread", "change of NE click", "NE conversion",
    "change of NE conversion", "samples/s", "throughput / base", "MFU, %", "step, ms", "peak memory, GiB",
    "FLOPs a sample / base",
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
