"""Producers of records that need no clock, and of errors: against arithmetic by hand and against the ops' own words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gem import record, workflow
from gem.bench import activations, length_waste, modelled, mx_errors, schedule_skew, sparse_model
from kernels.mxfp8 import RECIPES
from kernels.schedule import tile_schedule


def written(name: str, tmp_path):
    modelled.write("smoke", name, "smoke", results=str(tmp_path))
    part = modelled.PARTS[name]
    return record.read(
        tmp_path / "smoke" / "records" / "parts" / f"{part.EXPERIMENT}-{part.__name__.split('.')[-1]}.csv"
    )


def test_schedule_by_hand_is_twelve_against_two(tmp_path):
    tiles = (torch.tensor(part) * 128 for part in schedule_skew.BY_HAND)
    assert tile_schedule(*tiles, 128, 128, 2, "grid").work.tolist() == [12, 2]
    rows = written("schedule", tmp_path)
    hand = rows[rows.case == "tiles_by_hand"].set_index(["impl", "metric"]).p50
    assert hand[("grid", "skew_max_min")] == 6.0 and hand[("zigzag", "skew_max_min")] == 1.0
    assert hand[("grid", "skew")] == pytest.approx(12 / 7)
    assert set(rows.scope) == {"modelled"}
    worst = rows[rows.metric == "skew"].pivot(index="case", columns="impl", values="p50")
    assert (worst.zigzag <= worst.grid + 1e-9).all() and worst.zigzag.max() < 1.03 and worst.grid.max() > 1.4


def test_model_records_hold_every_preset_and_add_up(tmp_path):
    rows = written("model", tmp_path)
    flops = rows[rows.metric == "flops_per_sample"].pivot(index="case", columns="subject", values="p50")
    parts = flops.drop(columns=["total", "dense"])
    assert set(flops.index) == {"smoke", "quality", "base", "large"}
    np.testing.assert_allclose(parts.sum(axis=1), flops.total)
    params = rows[rows.metric == "params"].pivot(index="case", columns="subject", values="p50")
    np.testing.assert_allclose(params.dense + params.tables, params.total)
    assert (params.loc["base"] > params.loc["smoke"]).all()


def test_waste_of_padding_follows_the_law(tmp_path):
    assert length_waste.waste(np.array([1, 3, 4]), 4) == pytest.approx({"tokens": 1 / 3, "pairs": 1 - 26 / 48})
    rows = written("data", tmp_path).set_index("case").p50
    # uniform on [0, max] wastes a half of the tokens and two thirds of the pairs
    assert rows["law_uniform_0.5_tokens"] == pytest.approx(1 / 2, abs=0.003)
    assert rows["law_uniform_0.5_pairs"] == pytest.approx(2 / 3, abs=0.003)
    assert rows["law_lognormal_0.3_tokens"] == pytest.approx(0.7, abs=0.003)


def test_sparse_generations_by_hand(tmp_path):
    tables = sparse_model.Tables(np.full(512, 2.0**20), np.ones(512), pieces=1, rows=2, dim=4, local_batch=8)
    values = sparse_model.model(tables, 512)
    total, shard = 512 * 2**20, 2 * 2**20
    held = {name: part[("memory_bytes", "resident")] for name, part in values.items()}
    assert held == {"v1": total / 512, "v2": shard, "v3": shard / 2}
    assert values["v3"][("memory_bytes", "peak")] == shard + shard / 2
    assert values["v2"][("comm_bytes", "nvlink")] == 2 * shard / 2
    assert values["v3"][("comm_bytes", "nvlink")] == 3 * shard / 2
    lookups = 2 * 8 * 2 * 4 * 2 + 8 * 8 * 5000
    # two replicas of a shard are neighbours, so of 8 GPUs of a host 4 belong to a group of 256, of 256 in a zone 128
    assert values["v1"][("comm_bytes", "network")] == pytest.approx(lookups * (512 - 8) / 512)
    for name in ("v2", "v3"):
        assert values[name][("comm_bytes", "network")] == pytest.approx(lookups * (256 - 4) / 256)
        assert values[name][("comm_bytes", "across_zones")] == pytest.approx(lookups * (256 - 128) / 256)
    assert values["v1"][("comm_bytes", "across_zones")] == pytest.approx(lookups / 2)
    assert [values[name][("comm_bytes", "to_one_peer")] * n for name, n in (("v1", 512), ("v3", 256))] == [lookups] * 2
    one = sparse_model.model(tables, 256)
    assert all(part[("comm_bytes", "across_zones")] == 0 for part in one.values()), "one zone, one group"
    assert all(part[("skew", "model")] == 1.0 for part in values.values())
    with pytest.raises(ValueError, match="4096"):
        sparse_model.model(tables, 4096)
    rows = written("sparse", tmp_path)
    assert set(rows.scope) == {"modelled"} and set(rows.subject) == {"v1", "v2", "v3"}


def test_placement_skew_of_a_table_that_cannot_be_split():
    loads = np.array([3.0, 1.0, 1.0, 1.0])
    assert sparse_model.placement_skew(loads, 1, 2) == 1.0
    assert sparse_model.placement_skew(loads, 1, 4) == 2.0
    assert sparse_model.placement_skew(loads, 4, 4) == 1.0


def test_taylor_error_is_that_of_the_expansion():
    error = activations.errors("gelu_taylor6", 1.0)
    # first omitted term of the expansion at 0: s^8 / (336 sqrt(2 pi)) = 1.19e-3, less the next one
    assert error["fwd"] == pytest.approx(1.09e-3, rel=0.05)
    assert activations.errors("gelu_taylor6", 2.0)["fwd"] == pytest.approx(0.22, rel=0.05)
    assert activations.errors("gelu_tanh", 3.0)["fwd"] < 6e-4
    assert activations.errors("gelu", 3.0)["fwd"] < 1e-6


def test_mx_errors_rank_scale_rules_and_spare_what_stays_high():
    drawn = mx_errors.tensors(torch.Generator().manual_seed(0))
    right = mx_errors.exact(drawn)

    def error(recipe: str, case: str) -> float:
        value = mx_errors.with_recipe(drawn, RECIPES[recipe])[case].double()
        return float((value - right[case]).norm() / right[case].norm())

    assert 0.02 < error("rceil", "linear_y") < error("naive", "linear_y") < 0.1
    assert error("wgrad_high", "linear_dw") < 1e-5 < error("rceil", "linear_dw")
    assert 0.01 < error("rceil", "attention_dq") < 0.2


def test_unknown_experiment_and_tier_are_one_line(capsys):
    assert modelled.main(["--tier", "smoke", "--experiments", "nothing"]) == 1
    assert modelled.main(["--tier", "no_such_tier"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "allowed: model, schedule, sparse, data" in lines[0] and "no_such_tier" in lines[1]
    assert workflow.load({"tier": "smoke"}).name == "smoke"
