"""values.json: what the report says in numbers comes from records, claims and configuration, with its device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from figures.load import Source
from gem import record, record_store
from gem.readme import range_text, reason, with_unit
from paper import summaries, values
from tests.paper import tiny

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "data" / "published"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A results folder of tier smoke, and shipped records of one H200 run."""
    root = tmp_path_factory.mktemp("values")
    tiny.frozen_kernels(root / "measured")
    tiny.results(root)
    return root


@pytest.fixture(scope="module")
def found(root) -> dict:
    return values.collect("smoke", root / "results", root / "measured", PUBLISHED)


def table(found: dict, name: str) -> dict:
    (item,) = [item for item in found["built"] if item["name"] == name]
    return item


def test_quality_is_the_record_over_seeds(found):
    quality = table(found, "quality")
    assert quality["device"] == "CPU"
    rows = {row[0]: dict(zip(quality["header"], row, strict=True)) for row in quality["rows"]}
    assert rows["baseline_varlen"]["NE click"] == "0.9000 [0.8990, 0.9020]"
    assert list(rows)[:2] == ["baseline_padded", "baseline_varlen"], "rows follow config/variants.tsv"
    assert "0.7400" in quality["note"], "the Bayes floor is stated"
    assert found["facts"]["ne_ctr.no_sequence"] == {"text": "0.970", "device": "CPU"}


def test_data_and_label_law_and_balance(found):
    assert ["train", "impression", "235,008", "38.2", "0.91", "0.30", "0.70", "0.84"] in table(found, "data")["rows"]
    law = table(found, "label_law")
    assert law["header"] == ["variant", "weight 0", "weight 1"]
    assert law["rows"][-1] == ["no_sequence", "0.9700 [0.9690, 0.9720]", "0.9700 [0.9690, 0.9720]"]
    balance = table(found, "balance")
    assert balance["device"] == "modelled"
    assert balance["rows"][-1] == ["4096", "1.160", "1.016", "1.000", "1.032"]


def test_a_claim_carries_the_device_of_its_record(found):
    claims = {row["id"]: row for row in found["claims"]}
    c08 = claims["C08"]  # v4 over v2: 3.0 / 1.5
    assert (c08["ours_text"], c08["device"], c08["verdict"]) == ("2\u00d7", "H200", "reproduced")
    assert c08["expected_text"] == "2.67\u00d7", "3.0 / (1.5 * 0.75): the faster side at its bound"
    assert c08["published_text"] == "1.4\u20132.4\u00d7"
    assert claims["C04"]["device"] == "CPU"
    assert not claims["C04"]["stale"]
    assert claims["C40"]["device"] == "model"
    assert claims["C01"]["device"] == "" and claims["C01"]["reason"] == "needs a GPU record of step"


def test_a_record_of_older_sources_is_marked(root):
    path = root / "results" / "smoke" / "claims" / "claims.csv"
    text = path.read_text()
    path.write_text(text.replace("h200/kernels.csv", "h200/kernels.csv (older sources)"))
    rows = values.read_claims(path, Source(path.parents[1] / "records", root / "measured", PUBLISHED))
    path.write_text(text)
    marked = {row["id"]: (row["stale"], row["device"]) for row in rows}
    assert marked["C08"] == (True, "H200") and marked["C04"] == (False, "CPU")


def test_verdicts_add_up(found):
    counts = found["verdicts"]
    assert counts["total"] == len(found["claims"])
    assert counts["judged"] == sum(counts[name] for name in ("reproduced", "exceeded", "partly", "not_reproduced"))
    assert counts["met"] == counts["reproduced"] + counts["exceeded"] >= 2


def test_environments_name_every_device(found):
    gpu, cpu = found["environments"]
    assert (gpu["device"], gpu["name"], gpu["power"], gpu["driver"]) == ("H200", "NVIDIA H200", "700 W", "580.1")
    assert gpu["experiments"] == ["kernels"] and not cpu["gpu"]
    kernels = table(found, "kernels_jagged_attention")
    assert kernels["device"] == "H200" and kernels["rows"] == [["jfa_self_uniform_1024", "fwd", "200", "240", "400"]]


def test_gains_are_geometric_means_over_common_cases(found, root):
    """v4 over v2 at 400 and 200 TFLOP/s; nothing where the other side was not measured."""
    fact = found["facts"]["gain.jagged_attention.fwd.v4.v2"]
    assert fact == {"text": "2\u00d7", "device": "H200", "cases": "1 case"}
    assert "gain.jagged_attention.fwd.v4.fa4" not in found["facts"]


def test_absent_outputs_have_a_reason(found):
    missing = {row["id"]: row["reason"] for row in found["missing"]}
    assert not found["figures"] and "F05" in missing and "T01" not in missing
    assert all(missing.values())
    assert not any("figures/" in text for text in missing.values()), "reasons are for readers, not paths"


def test_an_output_that_exists_is_used(root):
    folder = root / "results" / "smoke" / "tables"
    folder.mkdir()
    (folder / "T08.csv").write_text("device,variant,NE click,note\nCPU,full,0.912345678,x\nCPU,drop_gdpa,0.9,y\n")
    found = values.collect("smoke", root / "results", root / "measured", PUBLISHED)
    shutil.rmtree(folder)
    item = found["tables"]["T08"]
    assert item["constant"] == "device CPU", "a column of one value stands in the caption"
    assert item["rows"][0] == ["full", "0.9123", "x"]
    assert item["caption"], "captions come from the module that made the table"


def test_stages_come_from_benchmark_files_and_not_for_frozen(root, found):
    assert found["stages"] == [{"stage": "train", "jobs": "1", "seconds": "12", "rss": "0.88"}]
    shutil.copytree(root / "results" / "smoke", root / "results" / "frozen")
    frozen = values.collect("frozen", root / "results", root / "measured", PUBLISHED)
    shutil.rmtree(root / "results" / "frozen")
    assert frozen["stages"] == [] and frozen["sizes"] == [] and frozen["frozen"]


def test_the_peak_ratio_is_the_chips(found):
    assert found["chips"]["h200"]["bf16"] == "989" and found["chips"]["b200"]["bf16"] == "2,250"
    assert found["chips"]["ratio"]["bf16"] == "0.44"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        ("0.28", "fraction", "28 %"),
        ("1.185", "x", "1.19\u00d7"),
        ("830", "TFLOP/s", "830 TFLOP/s"),
        ("0.32", "share of bf16 peak", "32 % of peak"),
        ("1145", "TFLOP/s", "1,145 TFLOP/s"),
        ("0.002", "", "0.002"),
        ("", "x", ""),
    ],
)
def test_units(value, unit, text):
    assert with_unit(value, unit) == text


def test_ranges_and_reasons():
    assert range_text(["0.5", "0.5"], "fraction") == "50 %"
    assert range_text(["1.21", "1.4"], "x") == "1.21\u20131.4\u00d7"
    assert reason("needs a GPU record of step (no record of step fits metric=mfu)", judged=False) == (
        "needs a GPU record of step"
    )
    assert reason("", judged=True) == "" and reason("", judged=False)
    assert reason("hbm", judged=True) == "hbm"


def test_sizes_of_presets_are_a_table(tmp_path):
    with record.Run("smoke", "model", results=tmp_path, command="made up") as part:
        for module, params, operations in (("pooling", 2500, 1.5e6), ("dense", 2500, 1.5e6), ("total", 4500, 1.5e6)):
            common = {"case": "smoke", "subject": module, "impl": "closed_form", "phase": "model"}
            part.add(**common, metric="params", p50=params)
            part.add(**common, metric="param_bytes", p50=4 * params)
            part.add(**common, metric="flops_per_sample", p50=operations)
    record_store.merge(tmp_path / "smoke" / "records")
    (item,) = summaries.model(Source(tmp_path / "smoke" / "records", tmp_path / "none", PUBLISHED))
    assert item["header"] == ["module", "smoke: params", "smoke: FLOPs"]
    assert item["rows"] == [["pooling", "2.5 k", "1.5 M"], ["total", "4.5 k", "1.5 M"]]


def test_numbers_for_readers():
    assert [summaries.number(x) for x in (0.123456, 12.0, 1234.5, float("nan"))] == ["0.123", "12", "1,234", "-"]


def test_errors_are_one_line(root, tmp_path, capsys):
    arguments = ["--tier", "gpu", "--results", str(root / "results"), "--output", str(tmp_path / "values.json")]
    assert values.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "claims.csv" in error
    assert not (tmp_path / "values.json").exists()


def test_command_line_writes_the_file(root, tmp_path):
    output = tmp_path / "paper" / "values.json"
    arguments = ["--tier", "smoke", "--results", str(root / "results"), "--measured", str(root / "measured")]
    assert values.main([*arguments, "--published", str(PUBLISHED), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["run"] == "smoke"


def test_no_table_without_records(tmp_path):
    source = Source(tmp_path, tmp_path, PUBLISHED)
    assert [make(source) for make in summaries.ALL] == [[]] * len(summaries.ALL)
    assert summaries.facts(source) == {}


def test_assumptions_are_those_of_the_run_that_modelled():
    rows = [
        {"name": "zone_bandwidth", "value": 4e10, "unit": "bytes/s", "source": "one port", "record": ""},
        {"name": "host_bandwidth", "value": 2.3e11, "unit": "bytes/s", "source": "", "record": "topology (two GPUs)"},
    ]
    config = {"assumptions": rows, "module_mfu": {"heads": 0.1}, "calibration": "not calibrated: no record of x"}
    source = SimpleNamespace(
        frame=lambda name: pd.DataFrame({"run_id": ["simulate-1"] if name == "simulate" else []}),
        runs={"simulate-1": {"config": config}},
    )
    made = summaries.assumptions(source)[0]
    assert made["rows"][:2] == [
        ["zone_bandwidth", "4e+10", "bytes/s", "one port"],
        ["host_bandwidth", "2.3e+11", "bytes/s", "record: topology (two GPUs)"],
    ]
    assert made["rows"][2][:2] == ["MFU of heads", "0.1"] and made["note"] == config["calibration"]
    source.runs["simulate-1"] = {"config": {}}
    assert summaries.assumptions(source) == []


def test_a_figure_says_where_its_data_are_from(root, tmp_path):
    """Devices of the records that it draws, its own column of devices before that, and what no clock was behind."""
    source = Source(root / "results" / "smoke" / "records", root / "measured", PUBLISHED)
    drawn = tmp_path / "F04.csv"
    drawn.write_text("panel,value\na,1\n")
    assert values.standing("kernels", drawn, source) == "Measured on H200."
    assert values.standing("kernels;data;published:gdpa_charts", drawn, source) == "Measured on H200 and CPU."
    assert values.standing("kernels;balance", drawn, source) == "Measured on H200; in part modelled."
    assert values.standing("balance", drawn, source) == "Modelled, on no device."
    assert values.standing("published:gdpa_charts", drawn, source) == ""
    drawn.write_text("device,value\nB200 (source),1\nh200,2\n")
    assert values.standing("kernels;data", drawn, source) == "Measured on H200."
