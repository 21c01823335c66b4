"""The table of presets: complete, consistent with the model, and base as the design fixes it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gem import config as configuration
from gem import summary
from gem.config import PRESETS
from gem.counts import Counts
from gem.dataset import Split
from gem.model import GEM
from tests.gem import tiny


def test_rows_add_up_to_the_model(tmp_path):
    split = Split(tiny.dataset(tmp_path / "d"), "train")
    config = tiny.config(pooling="hsp")
    batch = split.batch(np.arange(20))
    counts = Counts(batch.size, batch.lengths)
    model, rows = GEM(config, split.schema), summary.summarise(config, split.schema, counts)
    whole = summary.total(rows)
    assert whole.params == sum(p.numel() for p in model.parameters()) and whole.param_bytes == 4 * whole.params
    assert whole.flops == pytest.approx(sum(model.flops(counts).values()) / 20)
    tables = next(row for row in rows if row.name == "tables")
    assert tables.params == sum(p.numel() for p in model.table_parameters().values()) and tables.flops == 0
    assert all(row.params > 0 for row in rows)
    assert len(summary.text(rows).splitlines()) == len(rows) + 2


@pytest.mark.parametrize("variant", ["baseline_varlen", "full", "full_same_math"])
def test_experts_of_base_take_at_most_forty_percent(variant):
    data = configuration.load_tier("gpu")["data"]
    schema = summary.synthetic_schema(data)
    counts = Counts(256, summary.drawn_lengths(schema, data, 256))
    rows = summary.summarise(configuration.load(variant, "gpu", "base"), schema, counts)
    assert 0.02 < summary.expert_share(rows) <= 0.40


def test_command(capsys):
    for preset in PRESETS:
        assert summary.main(["--preset", preset, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[-1]["name"] == "total"
    assert summary.main(["--preset", "smoke"]) == 0
    assert "MFLOP/sample" in capsys.readouterr().out
    assert summary.main(["--preset", "huge"]) == 1
    assert "unknown preset 'huge'" in capsys.readouterr().err
