"""Verdicts: every verdict by rule, pairing, aggregates, expectations, which records may judge, and what stays open."""

import csv
import io

import pandas as pd
import pytest

from gem import claims, record
from gem.expected import expected

DIRECTIONS = {"time_ms": "lower", "tflops": "higher", "skew": "lower", "mfu": "higher", "share_of_gemm": "higher"}
RULE = {
    "id": "C08",
    "statement": "v4 over v2",
    "metric": "speedup",
    "published_low": "1.4",
    "published_high": "2.4",
    "unit": "x",
    "scope": "measured",
    "figure": "F04",
    "aggregate": "geomean",
    "direction": "higher",
    "experiment": "kernels",
    "numerator": "subject=jfa;impl=v2;phase=fwd;metric=time_ms",
    "denominator": "subject=jfa;impl=v4;phase=fwd;metric=time_ms",
    "transform": "ratio",
    "match": "",
    "case_filter": "jfa_*",
    "reproduced_at": "1.4",
    "partly_at": "1.2",
    "not_attempted_reason": "",
}


def row(case="jfa_a", impl="v2", metric="time_ms", p50=1.0, **more):
    base = {"experiment": "kernels", "case": case, "subject": "jfa", "impl": impl, "phase": "fwd", "metric": metric}
    base |= {"p50": p50, "status": "ok", "scope": "measured", "run_id": "r", "note": "", "seed": None, "device": "cuda"}
    return base | more


def source(*rows, name="data/measured/h200", device="NVIDIA H200"):
    runs = {"r": {"device": {"name": device, "type": "cuda"}, "command": "python -m gem.bench.kernels", "digest": None}}
    return claims.Source(name, pd.DataFrame(list(rows)), runs)


def judge(*rows, **changes):
    return claims.judge(RULE | changes, [source(*rows)], DIRECTIONS)


def test_a_side_may_be_of_another_experiment():
    changes = {"numerator": "subject=full;metric=mfu", "denominator": "experiment=layers;subject=full;metric=mfu"}
    changes |= {"experiment": "step", "case_filter": "", "published_low": "", "published_high": ""}
    base = {"case": "base", "subject": "full", "metric": "mfu", "phase": "step"}
    rows = [row(**base, p50=value, experiment=name) for name, value in (("step", 0.2), ("layers", 0.25))]
    assert float(judge(*rows, **changes)["ours"]) == pytest.approx(0.8)
    assert judge(rows[0], **changes)["verdict"] == "not_attempted"


@pytest.mark.parametrize(
    ("fast", "verdict"),
    [(0.4, "exceeded"), (0.5, "reproduced"), (1 / 1.4, "reproduced"), (0.8, "partly"), (0.9, "not_reproduced")],
)
def test_each_rank_of_a_speedup(fast, verdict):
    result = judge(row(p50=1.0), row(impl="v4", p50=fast))
    assert result["verdict"] == verdict
    assert float(result["ours"]) == pytest.approx(1 / fast, rel=5e-3)
    assert result["published"] == "1.4-2.4" and result["unit"] == "x"
    assert float(result["ratio"]) == pytest.approx(1 / fast / 1.4, rel=5e-3)


def test_lower_is_better_and_a_property_is_never_exceeded():
    changes = {"metric": "skew", "direction": "lower", "published_low": "6.0", "published_high": "1.0"}
    changes |= {"numerator": "subject=jfa;metric=skew", "denominator": "", "transform": "value"}
    changes |= {"reproduced_at": "1.2", "partly_at": "2.0"}
    verdicts = [judge(row(metric="skew", p50=value), **changes)["verdict"] for value in (0.9, 1.2, 1.5, 2.5)]
    assert verdicts == ["reproduced", "reproduced", "partly", "not_reproduced"]


def test_context_and_claims_without_a_rule():
    bare = {"experiment": "", "numerator": "", "denominator": "", "transform": "", "not_attempted_reason": "a fact"}
    context = claims.judge(RULE | bare | {"scope": "context"}, [], DIRECTIONS)
    assert (context["verdict"], context["limiter"]) == ("context", "a fact")
    assert claims.judge(RULE | bare, [], DIRECTIONS)["verdict"] == "not_attempted"


def test_without_gpu_records_a_speed_claim_is_not_attempted_and_says_so():
    result = judge(row(device="cpu"), row(impl="v4", p50=0.5, device="cpu"))
    assert result["verdict"] == "not_attempted" and "needs a GPU record of kernels" in result["limiter"]
    assert claims.judge(RULE, [], DIRECTIONS)["verdict"] == "not_attempted"


def test_what_does_not_depend_on_the_chip_is_judged_from_a_cpu():
    changes = {
        "experiment": "data",
        "numerator": "metric=waste",
        "denominator": "",
        "transform": "value",
        "case_filter": "",
    }
    rows = [row(metric="waste", experiment="data", p50=0.7, device="cpu")]
    result = claims.judge(
        RULE | changes, [source(*rows, name="results/smoke/records")], DIRECTIONS | {"waste": "lower"}
    )
    assert result["ours"] == "0.7" and result["source_record"].startswith("results/smoke/records/data.csv")
    modelled = [row(metric="skew", experiment="simulate", p50=1.5, device="cpu", scope="modelled")]
    changes |= {"experiment": "simulate", "numerator": "metric=skew"}
    assert claims.judge(RULE | changes, [source(*modelled)], DIRECTIONS)["scope"] == "modelled"


def test_what_was_measured_comes_before_what_a_gpu_host_modelled_and_devices_stay_apart():
    modelled = [row(scope="modelled"), row(impl="v4", p50=0.25, scope="modelled")]
    one = source(*modelled, name="data/measured/h200")
    two = source(row(), row(impl="v4", p50=0.5), name="data/measured/h200x2")
    result = claims.judge(RULE, [one, two], DIRECTIONS)
    assert (result["ours"], result["scope"]) == ("2", "measured")
    assert result["source_record"].startswith("data/measured/h200x2/kernels.csv")
    assert claims.judge(RULE, [one], DIRECTIONS)["ours"] == "4"


def test_own_gpu_records_come_before_frozen_ones():
    mine = source(row(), row(impl="v4", p50=0.5), name="results/gpu/records")
    frozen = source(row(), row(impl="v4", p50=0.9))
    result = claims.judge(RULE, [mine, frozen], DIRECTIONS)
    assert result["ours"] == "2" and result["source_record"].startswith("results/gpu/records/kernels.csv")


def test_cases_are_paired_and_aggregated():
    rows = [row("jfa_a"), row("jfa_a", "v4", p50=0.5), row("jfa_b"), row("jfa_b", "v4", p50=0.125)]
    rows += [row("other"), row("other", "v4", p50=0.01), row("jfa_alone")]
    values = {name: float(judge(*rows, aggregate=name)["ours"]) for name in ("geomean", "median", "max", "all")}
    assert values == {"geomean": 4.0, "median": 5.0, "max": 8.0, "all": 2.0}


def test_a_regular_expression_pairs_unlike_cases_and_the_best_implementation_stands_for_a_case():
    rows = [row("fmha_500", "fa4", "tflops", 600.0), row("fmha_500", "varlen", "tflops", 300.0)]
    rows += [row("traffic_pma_500", "grid", "tflops", 100.0, subject="gdpa")]
    rows += [row("traffic_self_500_f3", "grid", "tflops", 300.0, subject="gdpa")]
    changes = {"numerator": "subject=jfa;phase=fwd;metric=tflops", "case_filter": "", "aggregate": "max"}
    changes |= {"denominator": "subject=gdpa;phase=fwd;metric=tflops", "match": r"_(200|500)(?:_|$)"}
    assert judge(*rows, **changes)["ours"] == "6"
    two = {"case_filter": "numerator=length_window_*;denominator=length_full_*", "match": r"_(\d+)$"}
    two |= {"numerator": "impl=v2;phase=fwd;metric=time_ms", "denominator": "impl=v2;phase=fwd;metric=time_ms"}
    rows = [row("length_window_512", p50=0.25), row("length_full_512"), row("length_full_1024")]
    assert judge(*rows, **two, transform="one_minus_ratio")["ours"] == "0.75"


@pytest.mark.parametrize(
    ("transform", "value"), [("ratio", 2.0), ("one_minus_ratio", -1.0), ("ratio_minus_one", 1.0), ("difference", 0.5)]
)
def test_transforms(transform, value):
    result = judge(row(), row(impl="v4", p50=0.5), transform=transform)
    assert float(result["ours"]) == pytest.approx(value)


def test_share_of_peak_uses_the_dense_bf16_peak_of_the_device():
    changes = {"transform": "share_of_peak", "denominator": "", "numerator": "subject=jfa;metric=tflops"}
    changes |= {"metric": "tflops", "unit": "TFLOP/s", "published_low": "450", "published_high": "830"}
    result = judge(row(metric="tflops", p50=494.5), **changes)
    assert (result["ours"], result["unit"], result["ratio"]) == ("0.5", "share of bf16 peak", "")
    unknown = claims.judge(RULE | changes, [source(row(metric="tflops"), device="Some Chip")], DIRECTIONS)
    assert unknown["verdict"] == "not_attempted" and "Some Chip" in unknown["limiter"]


def test_a_status_other_than_ok_gives_its_reason():
    bad = row(impl="v4", p50=None, status="unsupported", note="needs sm_90")
    result = judge(row(), bad)
    assert (result["verdict"], result["limiter"]) == ("not_attempted", "unsupported: needs sm_90")


def test_expected_replaces_the_fast_side_by_its_bound_and_names_the_limiter():
    rows = [row(), row(impl="v4", p50=0.5), row(impl="v4", metric="share_of_bound", p50=0.8)]
    rows += [row(impl="v4", metric="bound_ms", p50=0.4, note="exp", scope="modelled")]
    result = judge(*rows)
    assert (result["expected"], result["limiter"], result["scope"]) == ("2.5", "exp", "measured")
    pairs = pd.DataFrame(
        {"numerator": [1.0], "denominator": [0.5], "denominator_share": [0.8], "numerator_share": [0.5]}
    )
    assert expected(RULE | {"metric": "share"}, "time_ms", pairs, "NVIDIA H200") is None
    assert expected(RULE, "gemm_fp8_tflops", pairs, "NVIDIA H200").iloc[0] == pytest.approx(2.0, rel=1e-2)


def test_records_of_older_sources_are_marked():
    assert judge(row(), row(impl="v4", p50=0.5))["source_record"].endswith("kernels.csv (older sources)")


def test_the_table_has_every_claim_once_with_an_allowed_verdict(tmp_path):
    (tmp_path / "records").mkdir()
    assert claims.main(["--records", str(tmp_path / "records"), "--output", str(tmp_path / "claims.csv")]) == 0
    text = (tmp_path / "claims.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == claims.COLUMNS
    assert [r["id"] for r in rows] == [f"C{n:02d}" for n in range(1, 45)]
    assert {r["verdict"] for r in rows} <= set(claims.VERDICTS)
    assert all(r["limiter"] for r in rows if r["verdict"] == "not_attempted")


def test_a_broken_record_is_one_line(tmp_path, capsys):
    (tmp_path / "kernels.csv").write_text("a,b\n")
    assert claims.main(["--records", str(tmp_path), "--output", str(tmp_path / "x.csv")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "header 'a,b'; allowed: " + ",".join(record.COLUMNS) in error
