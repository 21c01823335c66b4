"""A measuring job compiles side by side beforehand, ends in time, and says where it stopped."""

import pytest

from gem import record
from gem.bench import kernels, precompile

ARGUMENTS = ["--tier", "smoke", "--experiment", "kernels", "--cases", "smoke_jfa_*"]


class Bench:
    """In place of kernels.Bench: remembers rows."""

    rows: list = []

    def __init__(self, *given):
        Bench.rows = []

    def run_case(self, row, impls):
        Bench.rows.append(row["case"])


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(kernels, "Bench", Bench)


def test_time_that_is_up_stops_before_the_next_row(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 100.0, 100.0])
    monkeypatch.setattr(kernels.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(kernels, "Progress", Quiet)
    assert kernels.main([*ARGUMENTS, "--limit-s", "50"]) == kernels.OUT_OF_TIME
    assert len(Bench.rows) == 1
    assert "stopped after 50 s, before smoke_jfa_" in capsys.readouterr().err


class Quiet:
    def __init__(self, **keywords):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def advance(self, *given, **named):
        pass


def test_nothing_is_compiled_beforehand_on_a_cpu(monkeypatch):
    monkeypatch.setattr(precompile, "run", lambda *given: pytest.fail("compiled"))
    assert kernels.main([*ARGUMENTS, "--processes", "4"]) == 0 and len(Bench.rows) >= 2


def test_what_is_measured_is_not_compiled_and_full_shapes_come_first(monkeypatch):
    seen = []
    monkeypatch.setattr(precompile, "run", lambda jobs, device, processes: seen.append((jobs, device, processes)))
    monkeypatch.setattr(record, "already_measured", lambda run, name, row: name.endswith("-v2"))
    row = {"experiment": "kernels", "case": "c"}
    kernels.compile_beforehand([(row, ["v2", "v4", "flex"])], "gpu", "cuda", 14)
    assert seen == [([(row, "flex"), (row, "v4")], "cuda", 14)]


@pytest.mark.parametrize("words", [["--processes", "0"], ["--limit-s", "0"], ["--limit-s", "nan"]])
def test_bad_limits_are_one_line(words, capsys):
    assert kernels.main([*ARGUMENTS, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --processes") and error.count("\n") == 1
