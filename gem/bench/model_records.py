"""Records of what the model is: parameters, bytes and FLOPs a sample by module, for every preset (gem/summary.py)."""

from __future__ import annotations

import dataclasses

from gem import config as configuration
from gem import record, summary
from gem.counts import Counts

EXPERIMENT = "model"
SOURCES = (
    "gem/summary.py",
    "gem/config.py",
    "gem/sizes.py",
    "gem/model.py",
    "gem/counts.py",
    "gem/bench/model_records.py",
)
VARIANT, BATCH = "full", 4096
TABLES = "tables"


def run_config(tier: str) -> dict:
    """Sizes of every preset, for the figure that draws them; the preset that the tier trains is the one drawn."""
    presets = {name: dataclasses.asdict(model) for name, model in configuration.PRESETS.items()}
    parsed = configuration.load_tier(tier)
    return {"presets": presets, "drawn": parsed["preset"], "variant": VARIANT, "data": parsed["data"]}


def add_records(run: record.Run, tier: str) -> None:
    """A case a preset; subjects: modules, dense (all but tables), total. FLOPs are those of the forward pass."""
    data = configuration.load_tier(tier)["data"]
    schema = summary.synthetic_schema(data)
    counts = Counts(BATCH, summary.drawn_lengths(schema, data, BATCH))
    for preset in configuration.PRESETS:
        rows = summary.summarise(configuration.load(VARIANT, tier, preset), schema, counts)
        whole = summary.total(rows)
        dense = summary.total([row for row in rows if row.name != TABLES])
        for row in [*rows, dataclasses.replace(dense, name="dense"), whole]:
            base = {"case": preset, "subject": row.name, "impl": "closed_form", "phase": "model", "scope": "modelled"}
            run.add(**base, metric="params", p50=row.params)
            run.add(**base, metric="param_bytes", p50=row.param_bytes)
            run.add(**base, metric="flops_per_sample", p50=row.flops, note="forward")
