"""The kernel benchmark: no time without a right answer, a status with a reason otherwise, a part an implementation."""

import dataclasses

import pytest
import torch

from gem import record, record_store, workflow
from gem.bench import cases, kernels, peers
from kernels.bounds import Ceilings
from kernels.kept import kept

ROW = {
    "case": "tiny",
    "experiment": "kernels",
    "op": "jagged_attention",
    "kind": "self",
    "batch": "4",
    "num_heads": "2",
    "head_dim": "8",
    "q_law": "uniform",
    "q_max": "16",
    "q_fill": "0.5",
    "kv_law": "",
    "kv_max": "",
    "kv_fill": "",
    "shared_q": "no",
    "window": "",
    "activation": "",
    "dtype": "float32",
    "impls": "eager",
    "phases": "fwd,bwd",
    "tiers": "smoke",
    "seed": "1",
}
PMA = {
    "kind": "pma",
    "q_law": "full",
    "q_max": "3",
    "kv_law": "uniform",
    "kv_max": "16",
    "kv_fill": "0.5",
    "shared_q": "yes",
}
CROSS = PMA | {"kind": "cross", "shared_q": "no"}
CONFIG = {"device": "cpu", "bench": {"warmup_ms": 0.0, "repeat_ms": 1.0}}


@pytest.fixture(autouse=True)
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "_ids_of_this_process", set())
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_: Ceilings())
    return kernels.Bench("kernels", "smoke", CONFIG)


def rows(tmp_path):
    parts = record_store.load_parts(tmp_path / "results/smoke/records/parts")
    return [row for part, _ in parts.values() for row in part]


def values(tmp_path, impl, metric):
    return {row["phase"]: row for row in rows(tmp_path) if (row["impl"], row["metric"]) == (impl, metric)}


@pytest.mark.parametrize("change", [{}, PMA, CROSS, {"window": "3"}, {"op": "gdpa", "activation": "gelu_tanh"}])
def test_a_right_result_gets_time_rates_and_errors(bench, tmp_path, change):
    row = ROW | change
    bench.run_case(row, ["eager", "reference"])
    for impl in ("eager", "reference"):
        times, correct = values(tmp_path, impl, "time_ms"), values(tmp_path, impl, "correct")
        assert {row["status"] for row in times.values()} == {"ok"} and set(times) == {"fwd", "bwd"}
        assert [row["p50"] for row in correct.values()] == ["1", "1"]
        flops = cases.build(row, "cpu").flops("bwd")
        rate = float(values(tmp_path, impl, "tflops")["bwd"]["p50"])
        assert rate == pytest.approx(flops / float(times["bwd"]["p50"]) / 1e9, rel=1e-3)
        assert float(values(tmp_path, impl, "rel_err")["fwd"]["p50"]) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"op": "block_attention", "q_max": "70"},
        {"op": "rotary", "impls": "eager"},
        {"op": "layer_norm", "impls": "eager"},
        {"op": "rms_norm", "impls": "eager"},
    ],
)
def test_other_ops_run_too(bench, tmp_path, change):
    bench.run_case(ROW | change, ["eager"])
    assert [row["status"] for row in values(tmp_path, "eager", "time_ms").values()] == ["ok", "ok"], rows(tmp_path)


def test_building_lists_has_a_time_of_its_own(bench, tmp_path, monkeypatch):
    """A call that finds the lists of its batch ready says beside its time what they cost."""
    real, built = peers.prepare, []

    def make(_, offsets, block):
        built.append(block)
        return offsets // block

    def listed(case, impl):
        call = real(case, "eager")

        def forward():
            kept(make, None, case.kv_offsets, 16), kept(make, None, case.kv_offsets, 32)
            return call.forward()

        return dataclasses.replace(call, forward=forward)

    monkeypatch.setattr(peers, "prepare", listed)
    bench.run_case(ROW, ["eager"])
    found = values(tmp_path, "eager", "schedule_ms")
    assert set(found) == {"fwd"} and found["fwd"]["note"] == "2 lists, once a batch"
    assert float(found["fwd"]["p50"]) > 0 and int(found["fwd"]["n"]) >= 5
    assert built[:2] == [16, 32] and len(built) >= 2 + 2 * int(found["fwd"]["n"])


def test_block_attention_by_softmax_attention_under_a_block_mask(bench, tmp_path):
    """Right where the mask is: with a wrong one (no mask, other borders) "correct" fails and there is no time."""
    row = ROW | {"op": "block_attention", "q_max": "150"}
    bench.run_case(row, ["eager:block_mask"])
    times = values(tmp_path, "eager:block_mask", "time_ms")
    assert {phase: row["status"] for phase, row in times.items()} == {"fwd": "ok", "bwd": "ok"}, rows(tmp_path)
    with pytest.raises(peers.Unsupported, match="no rotary"):
        peers.prepare(cases.build(row | {"impls": "eager:eager_rotary"}, "cpu"), "eager:block_mask")
    with pytest.raises(peers.Unsupported, match="CUDA"):
        peers.prepare(cases.build(row, "cpu"), "v2:block_mask")


def test_a_wrong_result_has_no_time(bench, tmp_path, monkeypatch):
    real = peers.prepare

    def wrong(case, impl):
        call = real(case, "eager")
        if impl == "small_error":
            return dataclasses.replace(call, unpack=lambda name, x: x * (1 + 1e-4))
        return dataclasses.replace(call, unpack=lambda name, x: x / 0 if name == "dk" else x)

    monkeypatch.setattr(peers, "prepare", wrong)
    bench.run_case(ROW, ["small_error", "nan_in_dk"])
    times = values(tmp_path, "small_error", "time_ms")
    assert all(row["status"] == "failed" and not row["p50"] for row in times.values())
    assert "above the budget" in times["fwd"]["note"]
    times = values(tmp_path, "nan_in_dk", "time_ms")
    assert times["fwd"]["status"] == "ok" and times["bwd"]["status"] == "failed"
    assert "dk: " in times["bwd"]["note"] and "not finite" in times["bwd"]["note"]
    assert not values(tmp_path, "small_error", "tflops")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (peers.Unsupported("needs sm_90"), "unsupported", "needs sm_90"),
        (torch.cuda.OutOfMemoryError("out of memory"), "oom", "out of memory"),
        (RuntimeError("a kernel\nbroke"), "failed", "RuntimeError: a kernel broke"),
    ],
)
def test_what_cannot_run_is_a_row_with_status_and_reason(bench, tmp_path, monkeypatch, error, status, reason):
    def fail(case, impl):
        raise error

    monkeypatch.setattr(peers, "prepare", fail)
    bench.run_case(ROW, ["v4"])
    found = values(tmp_path, "v4", "time_ms")
    assert {(row["status"], row["note"], row["p50"]) for row in found.values()} == {(status, reason, "")}


def test_gpu_kernels_and_peers_say_why_they_do_not_run_on_a_cpu(bench, tmp_path):
    impls = ["v4", "varlen_attn", "fa4", "sdpa_cudnn", "flex"]
    bench.run_case(ROW, impls)
    for impl in impls:
        row = values(tmp_path, impl, "time_ms")["fwd"]
        assert row["status"] == "unsupported" and row["note"], impl
    with pytest.raises(ValueError, match=r"impl 'v9' of jagged_attention; allowed: v4, v2"):
        peers.prepare(cases.build(ROW, "cpu"), "v9")


def test_an_interrupted_job_goes_on_where_it_stopped(bench, tmp_path, monkeypatch):
    bench.run_case(ROW, ["eager"])
    stamp = (tmp_path / "results/smoke/records/parts/kernels-tiny-eager.csv").stat().st_mtime_ns
    monkeypatch.setenv("GEM_RESUME", "1")
    record._ids_of_this_process.clear()
    bench.run_case(ROW, ["eager", "reference"])
    assert (tmp_path / "results/smoke/records/parts/kernels-tiny-eager.csv").stat().st_mtime_ns == stamp
    assert values(tmp_path, "reference", "time_ms")
    assert not record.already_measured("smoke", "kernels-tiny-eager", ROW | {"seed": "2"})


def test_filters_and_bad_arguments(capsys):
    row = {"impls": "v3:split,v3:atomic,v4,fa4"}
    assert kernels.chosen_impls(row, []) == ["v3:split", "v3:atomic", "v4", "fa4"]
    assert kernels.chosen_impls(row, ["v3", "fa4"]) == ["v3:split", "v3:atomic", "fa4"]
    assert kernels.chosen_impls(row, ["v3:split"]) == ["v3:split"]
    assert kernels.main(["--tier", "smoke", "--experiment", "nothing"]) == 1
    assert "no row of config/kernels.tsv in tier smoke" in capsys.readouterr().err


def test_every_implementation_named_in_the_sheet_is_known():
    for row in workflow.read_sheet("kernels").values():
        for impl in row["impls"].split(","):
            name = impl.partition(":")[0]
            if name in (*peers.PEERS, peers.low_precision.NAME) or row["op"] not in cases.ATTENTION:
                continue
            op = "jagged_attention" if impl.endswith(":block_mask") else row["op"]
            assert name in peers._registry(op).entries, (row["case"], impl)


def test_every_row_is_compiled_anew(bench, monkeypatch):
    """torch.compile gives up on a function after eight shapes and runs it plainly under the same name."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    bench.run_case(ROW | {"case": "first"}, ["eager", "compiled_eager", "flex"])
    assert len(resets) == 2
