"""Long runs: windows are recorded, and a drift or a growth shows."""

from __future__ import annotations

import pandas as pd
import pytest

from gem.bench import soak
from gem.bench.loop import Loop
from gem.watch import DivergedError


def rows_of(place):
    (path,) = (place / "results/try/records/parts").glob("*.csv")
    return pd.read_csv(path)


def test_windows_drift_and_growth(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    peaks = iter([5.0, *[2.0] * 8, 2.5])
    monkeypatch.setattr(soak.hardware, "peak_memory_gib", lambda device: next(peaks))

    class Slowing:
        calls = 0

        def run(self, calls):
            for call in calls:
                call()
            self.calls += 1
            return [10.0 * self.calls] * len(calls)

    clock, steps, one = Slowing(), [], Loop.one
    monkeypatch.setattr(soak, "clock_for", lambda *given, **named: clock)
    monkeypatch.setattr(Loop, "one", lambda self: steps.append(1) or (one(self) if len(steps) == 1 else None))
    assert soak.main(["--tier", "smoke", "--run", "try", "--steps", "20", "--batch", "16"]) == 0
    rows = rows_of(tmp_path)
    assert len(steps) == 20 and set(rows.status) == {"ok"}
    assert rows.note.str.startswith("local batch 16").all()
    times = rows[rows.metric == "time_ms"].set_index("case").p50
    assert list(times.index) == [f"steps_{n}" for n in range(2, 21, 2)] and times["steps_20"] == 100
    assert rows[rows.metric == "time_drift"].p50.item() == pytest.approx(100 / 20)
    assert rows[rows.metric == "memory_growth"].p50.item() == 0.5 * 2**30


def test_a_run_that_is_stopped_leaves_the_windows_that_it_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Stopped:
        calls = 0

        def run(self, calls):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return [10.0] * len(calls)

    clock = Stopped()
    monkeypatch.setattr(soak, "clock_for", lambda *given, **named: clock)
    with pytest.raises(KeyboardInterrupt):
        soak.main(["--tier", "smoke", "--run", "try", "--steps", "40", "--batch", "16"])
    rows = rows_of(tmp_path)
    assert list(rows[rows.metric == "time_ms"].case) == ["steps_4", "steps_8", "steps_12"]
    assert not {"time_drift", "memory_growth"} & set(rows.metric) and rows.note.str.endswith("of 40 steps").all()


def test_a_batch_must_have_samples(capsys):
    assert soak.main(["--tier", "smoke", "--batch", "0"]) == 1
    assert capsys.readouterr().err == "error: --batch 0; allowed: 1 or more\n"


@pytest.mark.parametrize("steps", ["10", "25", "0"])
def test_steps_must_fill_windows(steps, capsys):
    assert soak.main(["--tier", "smoke", "--steps", steps]) == 1
    assert "allowed: multiples of 10, 20 or more" in capsys.readouterr().err


def test_divergence_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    steps = []

    def one(self):
        steps.append(1)
        if len(steps) == 5:
            raise DivergedError("step 4: loss is nan")

    monkeypatch.setattr(soak.hardware, "peak_memory_gib", lambda device: 1.0)
    monkeypatch.setattr(Loop, "one", one)
    assert soak.main(["--tier", "smoke", "--run", "try", "--steps", "20", "--batch", "16"]) == 1
    assert "step 4: loss is nan" in capsys.readouterr().err
    rows = rows_of(tmp_path)
    bad = rows[rows.status == "failed"]
    assert bad.case.item() == "steps_20" and bad.note.item() == "step 4: loss is nan"
    assert {"steps_2", "steps_4"} <= set(rows.case)


def test_a_shared_device_leaves_no_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soak.hardware, "peak_memory_gib", lambda device: 1.0)
    monkeypatch.setattr(Loop, "one", lambda self: None)
    assert soak.main(["--tier", "smoke", "--run", "try", "--steps", "20", "--batch", "16", "--untimed"]) == 0
    assert set(rows_of(tmp_path).metric) == {"peak_mem_gib", "memory_growth"}
