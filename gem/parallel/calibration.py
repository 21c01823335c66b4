"""Constants of the model of large jobs from records of one GPU and of a pair, and its error on what it has not seen.

Read from frozen records (data/measured/<device>), all optional:

layers    one GPU: metric mfu by subject, a module of gem.summary -> the rate of that module
step      one GPU: metric mfu of subject full -> the rate of modules without a record of their own; time_ms -> one
          factor on all rates, so that the modelled step of one GPU takes as long as the real one, optimiser and all
topology  two GPUs: time_ms and comm_bytes of subjects all_gather* by size -> latency and bandwidth inside a host;
          time_ms of gemm_beside_24_sms and gemm_alone -> cost of SMs lent to collectives
step      two GPUs, never used to fit: time_ms of subject full; the model must come within 15 %

Only then is a result called calibrated; otherwise it says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gem import record
from gem.parallel.assumptions import Assumptions

TOLERANCE = 0.15
SINGLE, PAIR = "h200", "h200x2"
MODULES = ("embedding", "feed_forward", "self_attention", "pooling", "summary", "interaction", "heads")


@dataclass(frozen=True)
class Calibration:
    """values: assumptions with what records gave. fitted: what that was. held_out: largest relative error of predicted
    step times of two GPUs, None without such records. missing: what stands between this and a calibrated model."""

    values: Assumptions
    fitted: tuple[str, ...] = ()
    held_out: float | None = None
    missing: tuple[str, ...] = ()

    @property
    def calibrated(self) -> bool:
        return not self.missing and self.held_out is not None and self.held_out <= TOLERANCE

    @property
    def label(self) -> str:
        """How records name it: impl of every row."""
        return "calibrated" if self.calibrated else "assumed"

    def text(self) -> str:
        """One line that stands under every result."""
        error = "" if self.held_out is None else f"held-out error {self.held_out:.1%} on two-GPU step times"
        if self.calibrated:
            return f"calibrated: {error}, from {', '.join(self.fitted)}"
        reasons = [f"no record of {name}" for name in self.missing]
        if self.held_out is not None:
            reasons.append(error + (f", more than {TOLERANCE:.0%}" if self.held_out > TOLERANCE else ""))
        return f"not calibrated: {'; '.join(reasons)}"


def fit_line(size: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(latency in s, bandwidth in bytes/s) of seconds = latency + size / bandwidth, by least relative errors.

    latency >= 0. ValueError with fewer than two sizes, or when time does not grow with size.
    """
    size, seconds = np.asarray(size, np.float64), np.asarray(seconds, np.float64)
    if len(np.unique(size)) < 2:
        raise ValueError(f"calibration: {len(np.unique(size))} sizes of a collective; allowed: at least 2")
    rows = np.stack([np.ones_like(size), size], 1) / seconds[:, None]
    latency, slope = np.linalg.lstsq(rows, np.ones_like(size), rcond=None)[0]
    if latency < 0:
        latency, slope = 0.0, float((rows[:, 1]).sum() / (rows[:, 1] ** 2).sum())
    if slope <= 0:
        raise ValueError("calibration: times of a collective do not grow with size; allowed: records of growing size")
    return float(latency), 1.0 / float(slope)


def calibrate(single: pd.DataFrame, pair: pd.DataFrame, base: Assumptions | None = None) -> Calibration:
    """From record rows (columns of gem.record) of one GPU and of two."""
    value, fitted, missing = base or Assumptions(), [], []
    layers = ok(single, experiment="layers", metric="mfu")
    layers = layers[layers.subject.isin(MODULES)].groupby("subject").p50.median().to_dict()
    step = ok(single, experiment="step", metric="mfu", subject="full").p50
    if len(step):
        value = value.with_values({"local_mfu": float(step.median())}, source="record", record="step (one GPU)")
        fitted.append("step")
    if layers:
        value = Assumptions(value.rows, layers)
        fitted.append("layers")
    if len(step) == 0 and set(layers) != set(MODULES):
        missing.append("layers or step on one GPU")
    value = as_in_a_step(value, ok(single, experiment="step", metric="time_ms", subject="full"))
    lines = pairs_of(ok(pair, experiment="topology"))
    if len(lines):
        latency, bandwidth = fit_line(lines.comm_bytes, lines.time_ms / 1e3)
        share = latency / (value["base_latency"] + value["host_latency"])
        found = {
            "host_bandwidth": bandwidth,
            "base_latency": value["base_latency"] * share,
            "host_latency": value["host_latency"] * share,
        }
        value = value.with_values(found, source="record", record="topology (two GPUs)")
        fitted.append("topology")
    else:
        missing.append("all-gathers of two GPUs")
    times = ok(pair, experiment="topology", metric="time_ms")
    times = pd.concat([times, ok(single, experiment="topology", metric="time_ms")])
    beside, alone = (times[times.subject == name].p50 for name in ("gemm_beside_24_sms", "gemm_alone"))
    if len(beside) and len(alone):
        loss = min(1.0, max(0.0, float(beside.median() / alone.median()) - 1))
        value = value.with_values({"contention": loss}, source="record", record="topology (GEMM beside 24 SMs)")
        fitted.append("contention")
    held_out = held_out_error(value, ok(pair, experiment="step", metric="time_ms", subject="full"))
    if held_out is None:
        missing.append("step times of two GPUs")
    return Calibration(value, tuple(fitted), held_out, tuple(missing))


def held_out_error(value: Assumptions, rows: pd.DataFrame) -> float | None:
    """Largest |predicted - measured| / measured over step records of two GPUs whose case is a preset; None without."""
    from gem.config import PRESETS

    rows = rows[rows.case.isin(PRESETS)]
    errors = [
        abs(predict(value, case) * 1e3 / measured - 1) for case, measured in zip(rows.case, rows.p50, strict=True)
    ]
    return max(errors) if errors else None


def as_in_a_step(value: Assumptions, rows: pd.DataFrame) -> Assumptions:
    """All rates times one factor, the median over step records of one GPU whose case is a preset: modelled time over
    real time. A step has more than its layers, and they may also be faster in a row than one by one."""
    from gem.config import PRESETS

    rows = rows[rows.case.isin(PRESETS)]
    if rows.empty:
        return value
    factor = float(
        np.median([predict(value, case, 1) * 1e3 / ms for case, ms in zip(rows.case, rows.p50, strict=True)])
    )
    note = "step (one GPU)"
    changed = value.with_values({"local_mfu": value["local_mfu"] * factor}, source="record", record=note)
    return Assumptions(changed.rows, {name: rate * factor for name, rate in value.module_mfu.items()})


def predict(value: Assumptions, preset: str, gpus: int = 2) -> float:
    """Seconds of a step of `preset` on a few GPUs of one host, as gem.bench.scaling runs it: FSDP over all of them one
    unit ahead, tables sharded, every rank with its own batches."""
    from gem.parallel.mesh import Mesh
    from gem.parallel.simulate import Scenario, simulate
    from gem.parallel.workload import of_preset

    # memory is the real job's affair: the tables of the large jobs' model do not lie on two GPUs
    value = value.with_values({"prefetch": 1, "hbm_bytes": 1e15})
    job = Scenario(Mesh(gpus, gpus), "v1", "none", sm_free=False)
    return simulate(of_preset(preset, value["param_bytes"]), job, value).step


def ok(frame: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    frame = frame[frame.status == "ok"]
    for column, name in wanted.items():
        frame = frame[frame[column] == name]
    return frame


def pairs_of(topology: pd.DataFrame) -> pd.DataFrame:
    """time_ms and comm_bytes of the same all-gather, one row a case."""
    rows = topology[topology.subject.str.startswith("all_gather") & topology.metric.isin(("time_ms", "comm_bytes"))]
    rows = rows[~rows.subject.str.contains("fp8")]
    wide = rows.pivot_table(index=["case", "subject", "impl"], columns="metric", values="p50", aggfunc="median")
    return wide.dropna().reset_index() if {"time_ms", "comm_bytes"} <= set(wide) else wide.iloc[:0]


def load(measured: str | Path) -> Calibration:
    """From frozen records; folders that do not exist count as empty, a `measured` that does not exist is an error."""
    measured = Path(measured)
    if not measured.is_dir():
        raise ValueError(f"{measured}: no such folder of records; allowed: a folder such as data/measured")
    frames = []
    for device in (SINGLE, PAIR):
        paths = [measured / device / f"{name}.csv" for name in ("layers", "step", "topology")]
        found = [record.read(path) for path in paths if path.exists()]
        frames.append(pd.concat(found) if found else pd.DataFrame(columns=record.COLUMNS))
    return calibrate(*frames)
