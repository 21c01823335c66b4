"""Calibration on synthetic records: what it fits, what it never sees, and when a result may be called calibrated."""

import numpy as np
import pandas as pd
import pytest

from gem import record
from gem.parallel import calibration
from gem.parallel.assumptions import Assumptions
from gem.parallel.calibration import MODULES, calibrate, fit_line, predict

DEFAULT = Assumptions()


def frame(*rows: dict) -> pd.DataFrame:
    base = dict.fromkeys(record.COLUMNS, "") | {"status": "ok", "impl": "x", "case": "base", "phase": "step"}
    return pd.DataFrame([base | row for row in rows], columns=record.COLUMNS)


def layers(mfu: dict[str, float]):
    return [{"experiment": "layers", "subject": name, "metric": "mfu", "p50": value} for name, value in mfu.items()]


def gathers(latency: float, bandwidth: float):
    found = []
    for size in (2**20, 2**24, 2**28):
        common = {"experiment": "topology", "subject": "all_gather_bf16", "case": f"bytes{size}"}
        found.append(common | {"metric": "comm_bytes", "p50": float(size)})
        found.append(common | {"metric": "time_ms", "p50": 1e3 * (latency + size / bandwidth)})
    return found


def two_gpu_step(milliseconds: float):
    return {"experiment": "step", "subject": "full", "metric": "time_ms", "p50": milliseconds}


SINGLE = frame(*layers(dict.fromkeys(MODULES, 0.4)))


def test_a_line_is_found_again():
    size = np.array([1e3, 1e5, 1e7, 1e9])
    assert fit_line(size, 2e-5 + size / 3e11) == pytest.approx((2e-5, 3e11))
    # noise of 3 % moves the bandwidth by about as much, and latency is never negative
    noisy = (2e-5 + size / 3e11) * (1 + 0.03 * np.array([1, -1, 1, -1]))
    assert fit_line(size, noisy)[1] == pytest.approx(3e11, rel=0.1)
    assert fit_line(size, np.maximum(size / 3e11 - 1e-9, 1e-9))[0] >= 0
    for wrong in (([1e3, 1e3], [1, 1]), ([1e3, 1e9], [2.0, 1.0])):
        with pytest.raises(ValueError, match="calibration"):
            fit_line(*wrong)


def test_records_replace_assumptions():
    beside = [
        {"experiment": "topology", "subject": name, "metric": "time_ms", "p50": ms}
        for name, ms in (("gemm_beside_24_sms", 11.2), ("gemm_alone", 10.0))
    ]
    found = calibrate(SINGLE, frame(*gathers(3e-5, 3e11), *beside))
    value = found.values
    assert value.module_mfu == dict.fromkeys(MODULES, 0.4)
    assert value["host_bandwidth"] == pytest.approx(3e11)
    assert value["base_latency"] + value["host_latency"] == pytest.approx(3e-5)
    assert value["contention"] == pytest.approx(0.12)
    assert value["zone_bandwidth"] == DEFAULT["zone_bandwidth"]
    assert [row.record for row in value.rows if row.name == "host_bandwidth"] == ["topology (two GPUs)"]
    assert found.fitted == ("layers", "topology", "contention")


def test_a_step_of_one_gpu_stands_in_for_layers():
    step = frame({"experiment": "step", "subject": "full", "metric": "mfu", "p50": 0.3})
    found = calibrate(step, frame())
    assert found.values["local_mfu"] == 0.3 and "layers or step on one GPU" not in found.missing
    some = calibrate(frame(*layers({"heads": 0.1})), frame())
    assert "layers or step on one GPU" in some.missing


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_modelled_step_of_one_gpu_is_the_real_one(factor):
    """Modules one by one take `factor` of what they take in a step: the rates follow the step."""
    alone = predict(calibrate(SINGLE, frame()).values, "base", 1) * 1e3
    times = {"experiment": "step", "subject": "full", "metric": "time_ms", "p50": alone / factor}
    found = calibrate(pd.concat([SINGLE, frame(times)]), frame()).values
    assert predict(found, "base", 1) * 1e3 == pytest.approx(alone / factor, rel=1e-6)
    assert found.module_mfu == pytest.approx(dict.fromkeys(MODULES, 0.4 * factor))
    assert predict(found, "base", 2) > predict(found, "base", 1)
    # a step of another model says nothing of this one
    other = calibrate(pd.concat([SINGLE, frame(times | {"case": "small_toy"})]), frame()).values
    assert other.module_mfu == dict.fromkeys(MODULES, 0.4)


@pytest.mark.parametrize(("error", "good"), [(0.0, True), (0.1, True), (0.2, False), (-0.2, False)])
def test_held_out_step_times_decide(error, good):
    """Two-GPU steps are made from the model itself, off by `error`; 15 % is the limit."""
    pair = gathers(3e-5, 3e11)
    fitted = calibrate(SINGLE, frame(*pair)).values
    measured = predict(fitted, "base") * 1e3 / (1 + error)
    found = calibrate(SINGLE, frame(*pair, two_gpu_step(measured)))
    assert found.held_out == pytest.approx(abs(error), abs=1e-9)
    assert found.calibrated is good and found.label == ("calibrated" if good else "assumed")
    assert found.text().startswith("calibrated: held-out error" if good else "not calibrated: held-out error")
    # the held-out times change no constant
    assert dict(found.values) == dict(fitted)


def test_without_records_every_result_says_so():
    found = calibrate(frame(), frame())
    assert not found.calibrated and found.label == "assumed" and dict(found.values) == dict(DEFAULT)
    assert found.text() == (
        "not calibrated: no record of layers or step on one GPU; no record of all-gathers of two GPUs; "
        "no record of step times of two GPUs"
    )
    # a small error alone does not make up for constants that were never measured
    alone = frame(two_gpu_step(predict(DEFAULT, "base") * 1e3))
    assert calibrate(frame(), alone).held_out < 1e-9 and not calibrate(frame(), alone).calibrated


def test_records_that_failed_do_not_count():
    failed = frame(*layers(dict.fromkeys(MODULES, 0.4))).assign(status="failed")
    assert calibrate(failed, frame()).fitted == ()


def test_frozen_files_are_read(tmp_path):
    for device, rows in (("h200", layers({"heads": 0.4})), ("h200x2", gathers(3e-5, 3e11))):
        with record.Run(device, rows[0]["experiment"], config={}, results=tmp_path, name=f"t-{device}") as run:
            for row in rows:
                run.add(
                    case=row.get("case", "base"), subject=row["subject"], impl="x", phase="step", metric=row["metric"],
                    p50=row["p50"],
                )  # fmt: skip
        (tmp_path / "measured" / device).mkdir(parents=True)
        part = tmp_path / device / "records" / "parts" / f"t-{device}.csv"
        part.rename(tmp_path / "measured" / device / f"{rows[0]['experiment']}.csv")
    found = calibration.load(tmp_path / "measured")
    assert found.fitted == ("layers", "topology") and found.values.module_mfu == {"heads": 0.4}
    with pytest.raises(ValueError, match="no such folder"):
        calibration.load(tmp_path / "none")


def test_records_of_simulate_say_whether_they_are_calibrated(tmp_path, monkeypatch):
    """The writer's rows: modelled, impl and note by calibration; exposed_ms of the dense subjects in every case."""
    from gem.bench import simulate_records

    monkeypatch.setattr(simulate_records, "GPUS", (8, 64))
    monkeypatch.setattr(simulate_records, "PRESETS", ("base",))
    monkeypatch.setattr(simulate_records, "TARGET", 64)
    found = calibrate(frame(), frame())
    with record.Run("t", "simulate", config={}, results=tmp_path, name="simulate-test") as run:
        simulate_records.add_records(run, found)
    rows = record.read(tmp_path / "t" / "records" / "parts" / "simulate-test.csv")
    assert set(rows.scope) == {"modelled"} and set(rows.impl) == {"assumed"}
    assert rows.note.str.contains("not calibrated: ").all()
    dense = rows[(rows.metric == "exposed_ms") & rows.case.isin(["base_gpus8", "base_gpus64"])]
    assert {"dense_1d", "dense_2d", "dense_2d_ep", "sparse_v1", "sparse_v3"} <= set(dense.subject)
    shares = rows[(rows.metric == "time_share") & (rows.case == "base_gpus64") & rows.subject.str.startswith("full:")]
    assert shares.p50.sum() == pytest.approx(1)
    assert not rows.duplicated(["case", "subject", "metric"]).any()
