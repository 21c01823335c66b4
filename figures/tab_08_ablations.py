"""T08: ablations, add-one and drop-one, with NE, throughput and MFU."""

import sys

import pandas as pd

from figures import cli, training
from figures.load import need

ID = "T08"
CAPTION = (
    "Every variant against its base: held-out NE of both tasks, training throughput and MFU, medians over seeds; "
    "spread: 80 % minus 20 % quantile of NE. Changes of NE are means over seeds of the difference to the base with the "
    "same seed, \u00b1 half the width of their 95 % confidence interval (Student's t). MFU counts "
    "useful FLOPs on the variant's own mathematics, on a GPU over its bf16 peak; mixed MFU divides the FLOPs of each "
    "precision by its own peak. Rows whose case is a preset are steps timed alone on a GPU at one local batch; the "
    "others come from training runs."
)
METRICS = ("ne_ctr", "ne_cvr", "qps", "mfu", "mfu_mixed", "time_ms", "peak_mem_gib", "flops_per_sample")


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

    bases = dict(zip(table.subject, table.base, strict=True))

    def change(metric):
        found = training.paired(source, "train", metric, bases)
        own = list(zip(table.device, table.case, table.subject, strict=True))
        return [[found.get(key, (float("nan"),) * 2)[part] for key in own] for part in (0, 1)]

    click, conversion = change("ne_ctr"), change("ne_cvr")
    spread = table.get("ne_ctr_high", float("nan")) - table.get("ne_ctr_low", float("nan"))
    return table.assign(
        **{
            "device": [source.device_label(slug) for slug in table.device],
            "variant": table.subject,
            "NE click": table.ne_ctr,
            "spread": spread,
            "change of NE click": click[0],
            "\u00b1 click": click[1],
            "NE conversion": table.ne_cvr,
            "change of NE conversion": conversion[0],
            "\u00b1 conversion": conversion[1],
            "samples/s": table.qps,
            "throughput / base": table.qps / of_base("qps"),
            "MFU, %": 100 * table.mfu,
            "mixed MFU, %": 100 * table.mfu_mixed,
            "step, ms": table.time_ms,
            "peak memory, GiB": table.peak_mem_gib,
            "FLOPs a sample / base": table.flops_per_sample / of_base("flops_per_sample"),
        }
    )[[*COLUMNS]].round({name: 4 for name in COLUMNS if "NE" in name or name == "spread" or "\u00b1" in name})


COLUMNS = [
    "device", "case", "variant", "group", "base", "NE click", "spread", "change of NE click", "\u00b1 click",
    "NE conversion", "change of NE conversion", "\u00b1 conversion", "samples/s", "throughput / base", "MFU, %",
    "mixed MFU, %", "step, ms", "peak memory, GiB", "FLOPs a sample / base",
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
