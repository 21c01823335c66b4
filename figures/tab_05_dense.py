"""T05: dense dimensions of parallelism, with the messages that our presets would send."""

import sys

import pandas as pd

from figures import cli
from figures.load import need, select

ID = "T05"
CAPTION = (
    "What the source says of each dimension: collectives, what they carry, the tier of the network that "
    "they use; beside them the MiB that a step of each of our presets would send on each rank at bf16, computed "
    "from module sizes: FSDP gathers parameters twice and scatters gradients once over a shard group of 128, DDP "
    "reduces a shard over 8 groups, 2-way expert parallelism sends activations of a local batch of 1,024 to its "
    "peer and leaves half of the experts' parameters to gather. Outputs of experts return as disjoint tokens; a "
    "reduce-scatter of them among zeros, which our code offers as the source's form, sends each once more for every "
    "other expert. Modelled, but for the last column, which stands where two GPUs of one host were measured."
)
SHARD, REPLICAS, EXPERTS, BYTES, LOCAL_BATCH = 128, 8, 2, 2, 1024
GATHERS = {"gather_plain": "bf16", "gather_float8": "8 bits, a scale a row", "gather_mx": "8 bits, MX blocks"}
EXPERT_FORMS = {"fsdp2": "on every rank", "reduce_scatter": "one a rank, reduce-scatter", "all_to_all": "all-to-all"}
DIMENSIONS = {
    "expert parallelism": ("all-gather, reduce-scatter of activations", "inside a host, NVLink"),
    "FSDP, all parameters": ("all-gather, reduce-scatter of parameters and gradients", "between hosts, in a zone"),
    "FSDP with 2-way expert parallelism": (
        "all-gather, reduce-scatter of parameters and gradients",
        "between hosts, in a zone",
    ),
    "DDP across shard groups": ("all-reduce of a shard of gradients", "between hosts, across zones"),
}


def build(source):
    rows = need(select(source.frame("model"), metric="params"), "model (params)").drop_duplicates(["case", "subject"])
    sizes = rows.pivot_table(index="case", columns="subject", values="p50", sort=False)
    lost = {"dense", "interaction"} - set(sizes.columns)
    if lost:
        raise ValueError(f"model records without subject {', '.join(sorted(lost))}")
    table = pd.DataFrame(
        [(name, *text) for name, text in DIMENSIONS.items()],
        columns=["dimension", "collectives", "tier of the network"],
    )
    config = next((source.runs[run].get("config", {}) for run in rows.run_id if run in source.runs), {})
    presets = config.get("presets", {})
    for preset, row in sizes.sort_values("dense").iterrows():
        rest = row.dense - row.interaction * (1 - 1 / EXPERTS)
        gather = 3 * BYTES * (SHARD - 1) / SHARD / 2**20
        sent = [
            activations(presets.get(preset)),
            gather * row.dense,
            gather * rest,
            2 * (REPLICAS - 1) / REPLICAS * BYTES * row.dense / SHARD / 2**20,
        ]
        table[f"{preset}, MiB"] = sent
    found = measured(source.frame("dense"))
    if found:
        table["measured on two GPUs"] = [found.get(name, "") for name in table.dimension]
    return table


def measured(rows: pd.DataFrame) -> dict[str, str]:
    """Dimension -> what two GPUs took for it (gem.bench.dense), in words; empty without records."""
    times = select(rows, metric="time_ms")
    found = {}
    gathers = times[times.subject.isin(GATHERS)]
    if len(gathers):
        early = {"prequantised": ", quantised before"}
        words = (f"{GATHERS[row.subject]}{early.get(row.impl, '')} {row.p50:.2f} ms" for row in gathers.itertuples())
        found["FSDP, all parameters"] = "one gather of all units: " + ", ".join(words)
    layers = times[(times.case == f"batch{LOCAL_BATCH}") & times.subject.str.startswith("experts_")]
    if len(layers):
        words = (f"{EXPERT_FORMS.get(row.impl, row.impl)} {row.p50:.2f} ms" for row in layers.itertuples())
        found["expert parallelism"] = "experts of a layer, forward and backward: " + ", ".join(words)
    return found


def activations(sizes: dict | None) -> float | None:
    """MiB that a rank sends a step in 2-way expert parallelism: the experts' inputs to its peer and outputs back, and
    the same again with gradients. None when the records do not hold the sizes of the preset.
    """
    if not sizes:
        return None
    inputs = sizes["num_tokens"] + sizes["num_summary"] + len(sizes["events"]) * sizes["num_seeds"]
    outputs = sizes["num_tokens"] / EXPERTS
    return 2 * sizes["num_layers"] * LOCAL_BATCH * (inputs + outputs) * sizes["width"] * BYTES / 2**20


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
