"""Bench sessions under a time limit, and the compile pass before them: steps, limits, resuming, and what breaks."""

import pytest

from gem import record, record_store, workflow
from gem.bench import cases, kernels, precompile, session
from kernels.bounds import Ceilings

CASES = "smoke_jfa_pma_q8_128", "smoke_gdpa_pma_q8_128"
STEP = f"kernels=eager@{CASES[0]}+{CASES[1]}"
QUICK = ("--warmup-ms", "0", "--repeat-ms", "1")


@pytest.fixture(scope="module")
def settings():
    return workflow.load({"tier": "smoke"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Records go to a temporary folder; no part counts as written by this process yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "_ids_of_this_process", set())
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_: Ceilings())
    monkeypatch.delenv("GEM_RESUME", raising=False)
    return tmp_path / "results/smoke/records/parts"


def run(*arguments, limit="60"):
    record._ids_of_this_process.clear()
    return session.main(["--tier", "smoke", "--limit-s", limit, *QUICK, *arguments])


def stamps(folder):
    return {path.stem: path.stat().st_mtime_ns for path in folder.glob("*.csv")}


def test_a_step_names_rows_and_implementations(settings):
    step = session.parse_step("kernels=all@smoke_jfa_pma*+smoke_block_128", settings)
    assert [(row["case"], names) for row, names in step.work] == [
        ("smoke_jfa_pma_q8_128", ["eager", "padded", "reference"]),
        ("smoke_block_128", ["eager", "reference"]),
    ]
    assert step.size == 5
    step = session.parse_step("kernels=padded,reference@smoke_gdpa_pma*+smoke_jfa_pma*", settings)
    assert {row["case"]: names for row, names in step.work} == {
        "smoke_gdpa_pma_q8_128": ["reference"],
        "smoke_jfa_pma_q8_128": ["padded", "reference"],
    }
    assert {row["experiment"] for row, _ in session.parse_step("windows=all", settings).work} == {"windows"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels"], "step 'kernels'; allowed: EXPERIMENT=all"),
        (["kernels="], "step 'kernels='; allowed: EXPERIMENT=all"),
        (["traffic=all"], "experiment 'traffic'; allowed in tier smoke: kernels, windows"),
        (["kernels=v4"], "impl 'v4'; allowed there: all, eager, padded, reference"),
        (["kernels=padded@smoke_block_128"], "impl 'padded'; allowed there: all, eager, reference"),
        (["kernels=eager@smoke_jfa*+jfa_none"], "cases 'jfa_none'; allowed: a glob that a case of kernels matches"),
        (["--limit-s", "0", STEP], "--limit-s 0.0; allowed"),
        (["--limit-s", "nan", STEP], "--limit-s nan; allowed"),
        (["--repeat-ms", "-1", STEP], "--repeat-ms -1.0; allowed"),
        (["--tier", "none", STEP], "none"),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_runs(folder, capsys, arguments, message):
    assert run(*arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and message in text and text.count("\n") == 1, text
    assert not folder.exists()


def test_a_session_measures_its_steps_and_goes_on_where_it_stopped(folder):
    assert run(STEP) == 0
    first = stamps(folder)
    assert set(first) == {f"kernels-{case}-eager" for case in CASES}
    parts = record_store.load_parts(folder)
    for rows, info in parts.values():
        times = [row["status"] for row in rows if row["metric"] == "time_ms"]
        assert times == ["ok", "ok"] and {row["impl"] for row in rows} == {"eager"}
        assert info["config"]["bench"] == {"warmup_ms": 0.0, "repeat_ms": 1.0}
    assert run(f"kernels=eager,reference@{CASES[1]}", STEP) == 0
    second = stamps(folder)
    assert set(second) - set(first) == {f"kernels-{CASES[1]}-reference"}
    assert {name: second[name] for name in first} == first
    assert run("--again", STEP, f"kernels=eager@{CASES[1]}") == 0
    assert set(stamps(folder)) == set(second), "what two steps name is measured once"
    assert all(stamps(folder)[name] > first[name] for name in first)


def test_no_row_begins_after_the_limit(folder, settings, capsys):
    seconds = iter([0.0, 1.0, 9.0])
    steps = [session.parse_step(STEP, settings)]
    config = session.timing_config(settings.config, 0.0, 1.0)
    limited = session.Session("smoke", config, 5.0, clock=lambda: next(seconds))
    assert limited.run(steps) == f"{STEP} at {CASES[1]}"
    assert set(stamps(folder)) == {f"kernels-{CASES[0]}-eager"}
    assert run(STEP, limit="1e-9") == session.OUT_OF_TIME
    assert "the same command goes on there" in capsys.readouterr().err


def test_a_row_that_breaks_is_named_and_the_next_one_runs(folder, monkeypatch, capsys):
    real = cases.exact

    def exact(case, phases):
        if case.row["case"] == CASES[0]:
            raise RuntimeError("out of\nmemory")
        return real(case, phases)

    monkeypatch.setattr(cases, "exact", exact)
    assert run(STEP) == 1
    assert f"error: {CASES[0]}: RuntimeError: out of memory" in capsys.readouterr().err
    assert set(stamps(folder)) == {f"kernels-{CASES[1]}-eager"}


def test_a_lost_device_ends_the_session(folder, monkeypatch, capsys):
    def lost(*_):
        raise kernels.DeviceLostError("illegal memory access")

    monkeypatch.setattr(kernels.Bench, "run_case", lost)
    assert run(STEP) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: illegal memory access"


def test_jobs_come_once_full_shapes_first(settings):
    gpu = workflow.load({"tier": "gpu"})
    steps = [session.parse_step(text, gpu) for text in ("kernels=all@jfa_self_full_256", "kernels=v2,flex@jfa_self*")]
    jobs = precompile.jobs_of(steps)
    names = [(row["case"], impl) for row, impl in jobs]
    assert len(set(names)) == len(names) and ("jfa_self_full_256", "v2") in names
    full = [precompile.at_full_shape(impl) for _, impl in jobs]
    assert full == sorted(full, reverse=True) and 0 < sum(full) < len(full)
    assert precompile.at_full_shape("triton:compiled_rotary") and not precompile.at_full_shape("v3:split")


def test_one_job_runs_small_unless_its_shape_matters(settings, monkeypatch):
    row = settings.sheets["kernels"]["smoke_jfa_pma_q8_128"]
    built = []
    monkeypatch.setattr(cases, "build", lambda row, device, real=cases.build: built.append(row) or real(row, device))
    assert precompile.compile_one(row, "eager", "cpu") == ("ok", "")
    status, reason = precompile.compile_one(row, "v9", "cpu")
    assert status == "unsupported" and "impl 'v9'" in reason
    assert precompile.compile_one(row, "v4", "cpu")[0] == "unsupported"
    assert precompile.compile_one(row, "flex", "cpu")[0] == "unsupported"
    small = str(precompile.small_batch(row))
    assert [row["batch"] for row in built] == [small, small, small, row["batch"]]
    assert precompile.compile_one(row | {"q_law": "no law"}, "eager", "cpu")[0] != "ok"


@pytest.mark.parametrize("batch", [16, 36, 1152, 7])
def test_the_small_batch_is_of_the_kind_of_the_full_one(batch):
    """Triton compiles apart for sizes that are multiples of 16 and for others."""
    small = precompile.small_batch({"batch": str(batch)})
    assert 0 < small < 32 and (small % 16 == 0) == (batch % 16 == 0)


def test_a_pass_over_processes(capsys):
    assert precompile.main(["--tier", "smoke", "--processes", "1", f"kernels=eager,padded@{CASES[0]}"]) == 0
    assert capsys.readouterr().out == "2 ok, 0 unsupported, 0 failed\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "smoke", "--processes", "0", STEP], "--processes 0; allowed: 1 or more"),
        (["--tier", "smoke", "kernels=none"], "impl 'none'; allowed there"),
        (["--tier", "gpu", "kernels=v2"], "no NVIDIA GPU"),
    ],
)
def test_bad_arguments_of_the_pass_are_one_line(capsys, arguments, message):
    import torch

    if "gpu" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert precompile.main(arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and message in text and text.count("\n") == 1, text
