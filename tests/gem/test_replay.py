"""gem.bench.replay: numbers by hand, the nearest record, correctness before times, and every bad row named."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from gem import balance, record
from gem.bench import cases, peers, replay
from gem.bench import replay_numbers as numbers
from gem.bench.length_waste import waste
from kernels.bounds import NOMINAL

ROW = {
    "case": "near",
    "experiment": "kernels",
    "op": "jagged_attention",
    "kind": "self",
    "batch": "4",
    "num_heads": "2",
    "head_dim": "16",
    "q_law": "full",
    "q_max": "8",
    "q_fill": "1.0",
    "kv_law": "",
    "kv_max": "",
    "kv_fill": "",
    "shared_q": "no",
    "window": "",
    "activation": "",
    "dtype": "bfloat16",
    "impls": "v2,v4,fa4",
    "phases": "fwd,bwd",
    "tiers": "gpu",
    "seed": "7",
}


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def options(path, *words):
    return replay.parse(["--lengths", str(path), "--chip", "h200", *map(str, words)])


@pytest.fixture
def lengths(tmp_path):
    return write(tmp_path / "lengths.txt", 2, 4, 0, 2)


# Lengths, padding, tiles, balance


def test_statistics_and_padding_by_hand(lengths):
    """Batches (2, 4) and (0, 2): 8 tokens of 16 or 12 slots, 24 pairs of 64 or 40."""
    loaded = replay.load(options(lengths, "--batch", 2))
    stats = numbers.statistics(loaded.q)
    assert {name: stats[name] for name in ("sequences", "tokens", "empty", "mean", "p50", "max", "fill")} == {
        "sequences": 4, "tokens": 8, "empty": 1, "mean": 2.0, "p50": 2.0, "max": 4, "fill": 0.5,
    }  # fmt: skip
    assert stats["cv"] == pytest.approx(math.sqrt(2) / 2)
    found = numbers.padding(loaded)
    assert found["longest of all"] == pytest.approx({"tokens": 1 - 8 / 16, "pairs": 1 - 24 / 64})
    assert found["longest of the batch"] == pytest.approx({"tokens": 1 - 8 / 12, "pairs": 1 - 24 / 40})
    assert found["longest of all"] == pytest.approx(waste(loaded.q, 4))
    index, q, kv = loaded.typical()
    assert index == 1 and q.tolist() == [0, 2] and kv is q  # 20 and 4 pairs: the lower of two


def test_padding_of_two_sides_by_hand(tmp_path):
    """3 + 4 queries and keys over (1, 3) and (4, 2): 10 tokens of 6 + 8 slots, 10 pairs of 2 * 3 * 4."""
    table = write(tmp_path / "log.csv", "user,history,items", "a,1,4", 'b," 3",2')
    loaded = replay.load(options(table, "--column", "history", "--kv-lengths", table, "--kv-column", "items"))
    assert loaded.q.tolist() == [1, 3] and loaded.kv.tolist() == [4, 2] and not loaded.is_self
    expected = {"tokens": 1 - 10 / 14, "pairs": 1 - 10 / 24}
    assert numbers.padding(loaded) == {
        "longest of all": pytest.approx(expected),
        "longest of the batch": pytest.approx(expected),
    }
    assert numbers.ops_of(loaded.is_self) == ("jagged_attention", "gdpa")


def test_a_last_batch_that_is_smaller_is_counted_but_not_typical(tmp_path):
    loaded = replay.load(options(write(tmp_path / "l", 1, 3, 5, 5, 9), "--batch", 2))
    assert [q.tolist() for q, _ in loaded.batches()] == [[1, 3], [5, 5], [9]]
    assert loaded.typical()[0] == 0
    assert numbers.padding(loaded)["longest of the batch"]["tokens"] == pytest.approx(1 - 23 / (6 + 10 + 9))


def test_tile_skew_by_hand():
    """1, 1 and 2 query tiles with 5, 5 and 2 key blocks on two programs: the grid gives them 12 and 2."""
    q, kv = (np.array(tiles) * numbers.TILE for tiles in ((1, 1, 2), (5, 5, 2)))
    found = numbers.tile_skews(q, kv, 2)
    assert found["grid"] == pytest.approx({"max_over_mean": 12 / 7, "max_over_min": 6.0})
    assert found["valid"] == found["zigzag"] == {"max_over_mean": 1.0, "max_over_min": 1.0}
    assert numbers.tile_skews(q[:1], kv[:1], 2)["zigzag"] == {"max_over_mean": 2.0, "max_over_min": None}


def test_balance_is_that_of_gem_balance():
    drawn = np.random.default_rng(0).integers(0, 200, 500)
    found = numbers.balancing(numbers.Lengths(drawn, drawn, 64), 16, 0.5, 3)
    assert (found["batch"], found["sub_batch"]) == (64, 8)
    direct = balance.simulate(
        lambda count, rng: drawn[rng.integers(0, len(drawn), count)],
        balance.Cost.mixed(drawn, 0.5),
        ranks=16,
        batch=64,
        pools=(numbers.POOL,),
        sub_batch=8,
        schemes=("none", "local", "bbs"),
        steps=numbers.STEPS,
        seed=3,
    )
    for result in direct:
        assert found["schemes"][result.scheme]["max_over_mean"] == pytest.approx(result.skew)
        assert found["schemes"][result.scheme]["gain"] == pytest.approx(direct[0].skew / result.skew)
    assert found["schemes"]["local"]["gain"] > 1.02


@pytest.mark.parametrize(("batch", "whole"), [(1, 1), (3, 2), (7, 4), (13, 8)])
def test_balance_of_equal_lengths_gains_nothing_and_any_batch_is_cut(batch, whole):
    same = np.full(20, 5)
    found = numbers.balancing(numbers.Lengths(same, same, batch), 2, 0.5, 0)
    assert found["batch"] == whole
    assert all(value == pytest.approx({"max_over_mean": 1.0, "gain": 1.0}) for value in found["schemes"].values())


# Bounds and records


def test_bound_by_hand(tmp_path):
    """Four sequences of 1,024, four heads of 128, nothing but GEMMs: 4 H D pairs over B200's 2,250 TFLOP/s."""
    given = options(write(tmp_path / "l", *[1024] * 4), "--activation", "identity", "--chip", "b200")
    q = np.full(4, 1024)
    found = numbers.describe_ops(q, q, given, tmp_path)
    forward = found["gdpa"]["phases"]["fwd"]
    assert forward["bound_ms"] == pytest.approx(4 * 4 * 128 * 4 * 1024**2 / 2250e12 * 1e3)
    assert forward["limiter"] == "tensor" and forward["tflops"] == pytest.approx(2250)
    backward = found["gdpa"]["phases"]["bwd"]  # with the scores computed again, all of it useful
    assert backward["bound_ms"] == pytest.approx(2.5 * forward["bound_ms"])
    assert backward["tflops"] == pytest.approx(2250)
    assert found["gdpa"]["nearest"] is None and forward["best"] is None
    assert set(found) == {"jagged_attention", "gdpa", "block_attention"}


def frozen(folder, *items):
    """A folder of records: (case row, impl, phase, metric, value, status) each."""
    rows, runs = [], {}
    for row, impl, phase, metric, value, status in items:
        name = f"kernels-{row['case']}-{impl}"
        runs[name] = {"case_row": row}
        units = record.metric_units()
        base = dict.fromkeys(record.COLUMNS, "") | {"experiment": "kernels", "case": row["case"], "subject": row["op"]}
        base |= {"impl": impl, "phase": phase, "metric": metric, "unit": units[metric], "p50": value, "n": "1"}
        rows.append(base | {"status": status, "scope": "measured", "run_id": name, "note": "" if value else "why"})
    folder.mkdir()
    (folder / "kernels.csv").write_text(record.to_csv(rows))
    (folder / "runs.json").write_text(json.dumps(runs))
    return folder


def test_best_implementation_of_the_nearest_record(tmp_path, lengths):
    far = ROW | {"case": "far", "q_max": "512"}
    other = ROW | {"case": "a_window", "window": "4"}
    untimed = ROW | {"case": "a_failure"}
    folder = frozen(
        tmp_path / "h200",
        (ROW, "v2", "fwd", "time_ms", "3", "ok"),
        (ROW, "v4", "fwd", "time_ms", "2", "ok"),
        (ROW, "fa4", "fwd", "time_ms", "1", "ok"),
        (ROW, "fa4", "fwd", "share_of_bound", "0.25", "ok"),
        (ROW, "v4", "bwd", "time_ms", "", "oom"),
        (far, "v2", "fwd", "time_ms", "0.5", "ok"),
        (other, "v3", "fwd", "time_ms", "0.1", "ok"),
        (untimed, "v3", "fwd", "time_ms", "", "failed"),
    )
    q = np.array([8, 8, 8, 8])
    given = options(lengths, "--heads", 2, "--dim", 16)
    found = numbers.describe_ops(q, q, given, folder)["jagged_attention"]
    assert found["nearest"]["case"] == "near" and found["nearest"]["distance"] == 0
    best = found["phases"]["fwd"]["best"]
    assert (best["impl"], best["ours"], best["compared"]) == ("fa4", "v4", ["fa4", "v4", "v2"])
    assert best["recorded_ms"] == 1 and best["expected_ms"] == pytest.approx(4 * found["phases"]["fwd"]["bound_ms"])
    assert found["phases"]["bwd"]["best"] is None
    q = np.full(4, 400)
    found = numbers.describe_ops(q, q, given, folder)["jagged_attention"]
    assert found["nearest"]["case"] == "far" and found["nearest"]["distance"] == pytest.approx(
        math.sqrt(2) * math.log2(512 / 400)
    )
    assert found["phases"]["fwd"]["best"]["impl"] == "v2" and found["phases"]["fwd"]["best"]["expected_ms"] is None
    other_keys = np.full(4, 3)
    assert numbers.describe_ops(q, other_keys, given, folder)["jagged_attention"]["nearest"] is None


def test_distance_by_hand():
    a = numbers.features_of(np.array([4, 4]), np.array([4, 4]), 4, 128)
    b = numbers.features_of(np.array([8, 8, 8, 8]), np.array([4, 4, 4, 4]), 4, 64)
    assert numbers.distance(a, b) == pytest.approx(math.sqrt(1 + 1 + 0.25))  # twice the queries, half the dim, twice B
    c = numbers.features_of(np.array([2, 6]), np.array([4, 4]), 4, 128)
    assert numbers.distance(a, c) == pytest.approx(0.5)  # cv 0 and 0.5


@pytest.mark.parametrize("name", ["jfa_self_uniform_512", "gdpa_cross_kv256_1024"])
def test_a_recorded_workload_is_nearest_to_itself(name):
    folder = replay.MEASURED / "h200"
    row = numbers.Records(folder).cases[name]
    q, kv = numbers._lengths_of(row)
    built = cases.build(row | {"num_heads": "1", "head_dim": "1", "dtype": "bfloat16"}, "cpu")
    assert np.array_equal(q, built.q_lengths.numpy()) and np.array_equal(kv, built.kv_lengths.numpy())
    kv = q if row["kind"] == "self" else kv
    found = numbers.describe_ops(q, kv, options("unused"), folder)[row["op"]]
    assert found["nearest"]["case"] == name and found["nearest"]["distance"] == 0
    best = found["phases"]["fwd"]["best"]
    assert best["expected_ms"] == pytest.approx(best["recorded_ms"], rel=0.15)  # ceilings differ between experiments


# Times


TINY = {"warmup_ms": 0, "repeat_ms": 1}


@pytest.mark.parametrize("op", cases.ATTENTION)
def test_a_case_of_lengths_is_that_of_the_benchmark(op):
    row = ROW | {"op": op, "activation": "relu" if op == "gdpa" else "", "dtype": "float32", "q_law": "longtail"}
    built = cases.build(row, "cpu")
    given = options("unused", "--heads", 2, "--dim", 16, "--seed", 7, "--activation", "relu")
    given.dtype = "float32"
    lengths = built.q_lengths.numpy()
    case = numbers.case_of(op, lengths, lengths, given, torch.device("cpu"))
    for name in ("q", "k", "v", "do", "q_offsets", "kv_offsets", "q_lengths", "kv_lengths"):
        assert torch.equal(getattr(case, name), getattr(built, name)), name
    assert case.features == built.features and case.is_self and case.keywords() == built.keywords()


def measured(impls, ops=("gdpa",), kv=None):
    given = options("unused", "--heads", 1, "--dim", 8)
    given.dtype = "float32"
    q = np.array([5, 0, 3])
    return numbers.measure(
        q, q if kv is None else kv, given, torch.device("cpu"), NOMINAL, ops=ops, impls=impls, bench=TINY
    )


def test_times_come_with_their_status():
    found = {(row["impl"], row["phase"]): row for row in measured(["eager", "tlx"])}
    assert set(found) == {(impl, phase) for impl in ("eager", "tlx") for phase in ("fwd", "bwd")}
    for phase in ("fwd", "bwd"):
        assert found["eager", phase]["status"] == "ok" and found["eager", phase]["time_ms"] > 0
        assert found["eager", phase]["p20_ms"] <= found["eager", phase]["p80_ms"]
        assert found["tlx", phase]["status"] == "unsupported" and found["tlx", phase]["time_ms"] is None
        assert found["tlx", phase]["note"]
    assert [row["status"] for row in measured(["eager"], ("jagged_attention",), np.array([2, 4, 0]))] == ["ok", "ok"]


def test_a_wrong_result_gets_no_time(monkeypatch):
    right = peers.prepare

    def wrong(case, impl):
        call = right(case, impl)
        return peers.Call(lambda: call.forward() * 1.01, call.backward)

    monkeypatch.setattr(peers, "prepare", wrong)
    forward, backward = measured(["eager"])
    assert (forward["status"], forward["time_ms"]) == ("failed", None) and "budget" in forward["note"]
    assert backward["status"] == "ok"


def test_what_is_timed_on_a_gpu():
    assert numbers.impls_of("jagged_attention") == ["v4", "v2", "v3", "v1", "eager", "varlen_attn", "fa4"]
    assert numbers.impls_of("gdpa") == ["tlx", "triton", "eager"]
    assert "reference" not in numbers.impls_of("block_attention")


# Command line


def test_text_and_json(lengths, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out.json"
    words = ["--lengths", str(lengths), "--batch", "2", "--heads", "2", "--dim", "64", "--ranks", "4"]
    assert replay.main([*words, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "4 sequences of" in text and "2 heads of 64, bfloat16" in text
    assert "to the longest of all             50.0%      62.5%" in text
    assert "to the longest of the batch       33.3%      40.0%" in text
    assert "by the records of" in text and "head_dim 64 is not that of these records" in text
    assert text.endswith("measured times: need an NVIDIA GPU, and torch sees none here\n")
    found = json.loads(out.read_text())
    assert found["padding"]["longest of all"] == {"tokens": 0.5, "pairs": 0.625}
    assert (found["chip"], found["heads"], found["head_dim"]) == ("h200", 2, 64)
    assert found["batch"] == {"size": 2, "count": 2, "typical": 1}
    assert set(found["tiles"]["orders"]) == {"grid", "valid", "zigzag"} and found["tiles"]["programs"] == 132
    assert set(found["balance"]["schemes"]) == {"none", "local", "bbs"}
    assert found["ops"]["jagged_attention"]["phases"]["fwd"]["best"]["impl"]
    assert found["times"] == {"device": None, "reason": "need an NVIDIA GPU, and torch sees none here", "rows": None}
    assert replay.main(words) == 0
    assert capsys.readouterr().out == text  # the same twice
    assert replay.main(["--lengths", str(lengths), "--ranks", "4"]) == 0
    assert "not that of these records" not in capsys.readouterr().out
    assert replay.main([*words, "--chip", "a100", "--kv-lengths", str(lengths)]) == 0
    assert "no shipped records of a100" in (text := capsys.readouterr().out)
    assert "queries" in text and "keys" in text and "block_attention" not in text


def test_times_are_shown(capsys):
    rows = measured(["eager", "tlx"])
    lines = list(replay._text_of_times({"device": "a CPU, here", "reason": None, "rows": rows}))
    assert len(lines) == 2 + len(rows)
    assert f"{rows[0]['time_ms']:.4g}" in lines[2] and "unsupported: " in lines[-1]


def test_measured_times_stand_beside_what_was_expected():
    rows = measured(["eager", "tlx"])
    best = {"impl": "eager", "expected_ms": 0.25}
    ops = {"gdpa": {"phases": {"fwd": {"bound_ms": 0.125, "best": best}, "bwd": {"bound_ms": 0.5, "best": None}}}}
    times = replay.beside_the_model({"device": "a CPU, here", "reason": None, "rows": rows}, ops)
    found = {(row["impl"], row["phase"]): (row["bound_ms"], row["expected_ms"]) for row in times["rows"]}
    assert found[("eager", "fwd")] == (0.125, 0.25) and found[("eager", "bwd")] == (0.5, None)
    assert found[("tlx", "fwd")] == (0.125, None)
    line = list(replay._text_of_times(times))[2].split()
    assert line[-1] == "0.25" and "0.125" in line
    assert replay.beside_the_model({"device": None, "reason": "why", "rows": None}, ops)["rows"] is None


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("3\nx\n5\n", (), "line 2: 'x'; allowed: a whole number of 0 to 1,048,576"),
        ("3\n\n-5\n", (), "line 2: ''; allowed: a whole number of 0 to 1,048,576; 1 more such lines"),
        ("3\n1.5\n", (), "line 2: '1.5'; allowed: a whole"),
        ("1048577\n", (), "line 1: '1048577'; allowed: a whole"),
        ("99999999999999999999999\n", (), "line 1: '99999999999999999999999'; allowed: a whole"),
        ("a,b\n1,2\n", (), "1,048,576; the column of a CSV is named with --column; 1 more such lines"),
        ("", (), "holds no length; allowed: at least one length above 0"),
        ("0\n0\n", (), "all lengths are 0; allowed: at least one length above 0"),
        ("a,b\n1,2\n3\n", ("--column", "b"), "line 3: ''; allowed: a whole"),
        ("a,b\n1,2\n", ("--column", "c"), "line 1: no single column 'c'; allowed: a, b"),
        ("a,a\n1,2\n", ("--column", "a"), "line 1: no single column 'a'; allowed: a, a"),
        ("a\n", ("--column", "a"), "holds no length"),
        ("3\n", ("--batch", "2"), "--batch: 2; allowed: 1 to 1, the lengths in"),
        ("3\n", ("--kv-column", "a"), "--kv-column: without --kv-lengths; allowed"),
        ("3\n", ("--json", "nowhere/out.json"), "--json: nowhere is no folder; allowed"),
        ("3\n", ("--records", "nowhere"), "--records: nowhere has no kernels.csv; allowed"),
        ("3\n", ("--kv-lengths", "nowhere"), "nowhere: no such file; allowed"),
    ],
)
def test_bad_input_is_named_before_any_work(tmp_path, monkeypatch, text, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay, "report", lambda *_: pytest.fail("work began"))
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ValueError) as error:
        replay.main(["--lengths", "lengths.txt", *words])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_keys_must_fit_queries(tmp_path):
    queries, keys = write(tmp_path / "q", 3, 0), write(tmp_path / "kv", 0, 5)
    with pytest.raises(ValueError, match="no sequence has both queries and keys; allowed"):
        replay.load(options(queries, "--kv-lengths", keys))
    with pytest.raises(ValueError, match="kv: 1 lengths; allowed: 2, as in"):
        replay.load(options(queries, "--kv-lengths", write(tmp_path / "kv", 5)))


def test_files_are_read_as_they_come(tmp_path):
    path = tmp_path / "l"
    path.write_bytes(b"\xef\xbb\xbf3\r\n 4 \r\n\n")
    assert replay.read_lengths(path).tolist() == [3, 4]
    path.write_bytes(b"3\n\xff\n")
    with pytest.raises(ValueError, match="byte 2 is no UTF-8 text; allowed"):
        replay.read_lengths(path)


@pytest.mark.gpu
def test_times_on_a_gpu(tmp_path, capsys):
    out, path = tmp_path / "out.json", write(tmp_path / "l", *range(1, 65))
    assert replay.main(["--lengths", str(path), "--heads", "2", "--dim", "64", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["times"]["rows"]
    found = {(row["op"], row["impl"], row["phase"]): row for row in rows}
    for op, impl in (("jagged_attention", "v2"), ("gdpa", "triton"), ("block_attention", "triton")):
        for phase in ("fwd", "bwd"):
            assert found[op, impl, phase]["status"] == "ok" and found[op, impl, phase]["time_ms"] > 0
    assert "measured on NVIDIA" in capsys.readouterr().out
