"""Records: the one format for everything that is measured, emulated or modelled, and its only writer.

Long form, one row a number. A process opens a `Run`, adds rows and closes it; that leaves one *part*, a CSV and a
JSON with the provenance, under results/<tier>/records/parts. A part is whole or absent: both files are written beside
their place and renamed, the JSON last, and the JSON holds the digest of its CSV.

    with record.Run("smoke", "train", case_row=row, config=config, sources=("kernels", "gem")) as run:
        run.add(case="train", subject="full", impl="eager", phase="eval", metric="ne_ctr", p50=0.83, n=3)

    python -m gem.record merge  --tier smoke        parts -> records/<experiment>.csv and records/runs.json
    python -m gem.record check  data/measured/h200  header, metrics, units, statuses, and a run for every row
    python -m gem.record freeze --tier gpu          merged records -> data/measured/<device>
    python -m gem.record thaw   --tier gpu --device h200   frozen parts whose sources are unchanged -> finished outputs
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from gem import provenance
from gem.digest import ROOT, source_digest

COLUMNS = "experiment,case,subject,impl,phase,metric,unit,p50,p20,p80,n,seed,status,scope,run_id,note".split(",")
PHASES = ("fwd", "bwd", "step", "eval", "model")
STATUSES = ("ok", "oom", "unsupported", "failed")
SCOPES = ("measured", "emulated", "modelled")
FORMAT = 1
_NUMBERS = ("p50", "p20", "p80")
_SLUG = re.compile(r"[a-z0-9_][a-z0-9_.+-]*")
_ids_of_this_process: set[str] = set()
_BEGAN = datetime.now(UTC).isoformat(timespec="seconds")


def metric_units(path: Path | None = None) -> dict[str, str]:
    """Metric name -> unit, from config/metrics.tsv."""
    path = path or ROOT / "config" / "metrics.tsv"
    with open(path, newline="", encoding="utf-8") as file:
        return {row["metric"]: row["unit"] for row in csv.DictReader(file, delimiter="\t")}


class Run:
    """One measuring process (or one case of it): its rows and where they came from.

    tier: folder under `results` ("smoke", "gpu", "smoke-ml-100k", ...). experiment: name of the merged file.
    case_row: the full row of variants.tsv or kernels.tsv. config: everything else that decided the numbers, JSON-
    able. sources: files and folders whose code made the numbers; their digest tells later whether the numbers are
    current. num_devices: GPUs used (default: WORLD_SIZE, else 1). name: run id; the default is "<experiment>-<case or
    variant of case_row>" or, in a job of the pipeline, follows the job's name. A second run of the same name in one
    process gets "-2"; the same name in a later process replaces the earlier part.

    Used as a context manager: leaving it normally writes the part, leaving it by an exception writes nothing.
    """

    def __init__(
        self,
        tier: str,
        experiment: str,
        *,
        command: str | None = None,
        config: Mapping | None = None,
        case_row: Mapping | None = None,
        sources: Iterable[str] = (),
        num_devices: int | None = None,
        name: str | None = None,
        results: str | Path = "results",
    ):
        self.folder = Path(results) / tier / "records" / "parts"
        self.experiment = _slug(experiment, "experiment")
        job = os.environ.get("GEM_JOB")
        self.run_id = _unique(_slug(name or _default_name(experiment, case_row, config, job), "run name"))
        self._units = metric_units()
        self._rows: list[dict] = []
        sources = sorted(sources)
        commit, dirty = provenance.commit()
        self.info = {
            "format": FORMAT,
            "run_id": self.run_id,
            "tier": tier,
            "experiment": experiment,
            "job": job,
            "commit": commit,
            "dirty": dirty,
            "sources": sources,
            "digest": source_digest(*sources) if sources else None,
            "case_row": dict(case_row or {}),
            "command": command or command_line(),
            "config": dict(config or {}),
            "device": provenance.device(num_devices or int(os.environ.get("WORLD_SIZE", "1"))),
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        json.dumps(self.info)  # a config that JSON cannot hold fails here, not after an hour of measuring

    def add(
        self,
        *,
        case: str,
        subject: str,
        impl: str,
        phase: str,
        metric: str,
        p50: float | None = None,
        p20: float | None = None,
        p80: float | None = None,
        n: int = 1,
        seed: int | None = None,
        status: str = "ok",
        scope: str = "measured",
        note: str = "",
    ) -> None:
        """Add one number.

        The unit is that of config/metrics.tsv. A status other than ok has no number and says why in `note`.
        """
        if metric not in self._units:
            raise ValueError(f"record {self.run_id}: metric {metric!r} is not in config/metrics.tsv")
        row = {"experiment": self.experiment, "case": case, "subject": subject, "impl": impl, "phase": phase}
        row |= {"metric": metric, "unit": self._units[metric], "p50": _text(p50), "p20": _text(p20), "p80": _text(p80)}
        row |= {"n": str(n), "seed": "" if seed is None else str(seed), "status": status, "scope": scope}
        row |= {"run_id": self.run_id, "note": " ".join(str(note).split())}
        _check_row(row, self._units, f"record {self.run_id}")
        self._rows.append(row)

    def write(self) -> Path:
        """Write the part; returns the path of its CSV. May be called again: the part is replaced as a whole."""
        if not self._rows:
            raise ValueError(
                f"record {self.run_id}: no rows were added; a run that measured nothing must say so with a status"
            )
        self.info["software"] = provenance.software()
        if kept := self._measured_meanwhile():
            print(f"record {self.run_id}: kept what was measured before: {self._rows[0]['note']}", file=sys.stderr)
            return kept
        return write_part(self.folder, self._rows, self.info)

    def _measured_meanwhile(self) -> Path | None:
        """The part of this name with numbers, from a process that this one started; asked for where there is nothing
        but a failure to write: what went wrong afterwards must not cost what was measured."""
        path = self.folder / f"{self.run_id}.csv"
        if any(row["status"] == "ok" for row in self._rows) or not path.with_suffix(".json").exists():
            return None
        fresh = json.loads(path.with_suffix(".json").read_text())["utc"] >= _BEGAN
        return path if fresh and any(row["status"] == "ok" for row in read_rows(path)) else None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            self.write()


def write_part(folder: Path, rows: list[dict], info: Mapping) -> Path:
    """Write <run_id>.csv, then <run_id>.json that vouches for it. Killed in between, the part does not count."""
    text = to_csv(rows)
    info = dict(info) | {"num_rows": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    path = folder / f"{info['run_id']}.csv"
    write_text(path, text)
    write_text(path.with_suffix(".json"), json.dumps(info, indent=1, sort_keys=True) + "\n")
    return path


def to_csv(rows: Iterable[Mapping]) -> str:
    """CSV text of rows in the fixed column order."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all (no space left, killed): beside its place, flushed to disk, then
    renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | Path) -> pd.DataFrame:
    """Rows of one record CSV, or of all CSVs of a folder, checked; numbers are floats, seed a nullable integer.

    A file or folder that does not exist, a wrong header, an unknown metric, unit, phase, status or scope, or a number
    where the status is not ok, is a ValueError naming file, line and what is allowed.
    """
    path = Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not path.exists():
        raise ValueError(f"{path}: no such record file or folder")
    rows = [row for file in files for row in read_rows(file)]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    for column in _NUMBERS:
        frame[column] = pd.to_numeric(frame[column].replace("", None)).astype(float)
    frame["n"] = frame["n"].astype(int)
    frame["seed"] = pd.to_numeric(frame["seed"].replace("", None)).astype("Int64")
    return frame


def read_rows(path: Path, units: Mapping[str, str] | None = None) -> list[dict]:
    """Rows of one CSV as strings, each checked against the schema."""
    units = units or metric_units()
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if header != COLUMNS:
            raise ValueError(f"{path}:1: header {','.join(header)!r}; allowed: {','.join(COLUMNS)}")
        rows = []
        for line, values in enumerate(reader, start=2):
            if len(values) != len(COLUMNS):
                raise ValueError(f"{path}:{line}: {len(values)} fields; allowed: {len(COLUMNS)}")
            rows.append(dict(zip(COLUMNS, values, strict=True)))
            _check_row(rows[-1], units, f"{path}:{line}")
    return rows


def read_runs(folder: str | Path) -> dict[str, dict]:
    """run_id -> provenance of a folder with runs.json; {} where there is none."""
    path = Path(folder) / "runs.json"
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}; allowed: one JSON object of run_id: run") from None


def is_current(info: Mapping) -> bool:
    """True while the sources that made a run are what they were then."""
    try:
        return bool(info.get("sources")) and source_digest(*info["sources"]) == info["digest"]
    except ValueError:
        return False


def already_measured(tier: str, run_id: str, case_row: Mapping, results: str | Path = "results") -> bool:
    """True when an interrupted job goes on (GEM_RESUME=1) and the part of `run_id` is whole, current and of this
    very row.
    """
    if os.environ.get("GEM_RESUME") != "1":
        return False
    path = Path(results) / tier / "records" / "parts" / f"{run_id}.csv"
    meta = path.with_suffix(".json")
    if not path.exists() or not meta.exists():
        return False
    info = json.loads(meta.read_text(encoding="utf-8"))
    whole = hashlib.sha256(path.read_bytes()).hexdigest() == info.get("sha256")
    return whole and is_current(info) and info["case_row"] == dict(case_row)


def command_line() -> str:
    """The command of this process as a reader would type it: python -m module arguments, no absolute paths."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {Path(sys.argv[0]).name}"
    words = (word.replace(f"{ROOT}{os.sep}", "") for word in sys.argv[1:])
    return " ".join([program, *(shlex.quote(word) for word in words)])


def _check_row(row: Mapping[str, str], units: Mapping[str, str], where: str) -> None:
    metric = row["metric"]
    if metric not in units:
        raise ValueError(f"{where}: metric {metric!r} is not in config/metrics.tsv")
    if row["unit"] != units[metric]:
        raise ValueError(f"{where}: metric {metric} has unit {row['unit']!r}; allowed: {units[metric]!r}")
    for column, allowed in (("phase", PHASES), ("status", STATUSES), ("scope", SCOPES)):
        if row[column] not in allowed:
            raise ValueError(f"{where}: {column} {row[column]!r}; allowed: {', '.join(allowed)}")
    for column in ("experiment", "case", "subject", "impl", "run_id"):
        if not row[column]:
            raise ValueError(f"{where}: {column} is empty; allowed: a name")
    for column in _NUMBERS:
        if row[column] and not _is_finite(row[column]):
            raise ValueError(f"{where}: {column} {row[column]!r}; allowed: a finite number or nothing")
    if row["status"] == "ok" and not row["p50"]:
        raise ValueError(
            f"{where}: status ok without p50; allowed: a number, or another status with the reason in note"
        )
    if row["status"] != "ok" and (row["p50"] or not row["note"]):
        raise ValueError(f"{where}: status {row['status']} needs a reason in note and no number")
    if not row["n"].isdigit() or (row["seed"] and not row["seed"].lstrip("-").isdigit()):
        raise ValueError(f"{where}: n {row['n']!r}, seed {row['seed']!r}; allowed: integers, seed may be empty")


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _text(value: float | None) -> str:
    return "" if value is None else format(float(value), ".9g")


def _default_name(experiment: str, case_row: Mapping | None, config: Mapping | None, job: str | None) -> str:
    prefix = experiment if job is None or job.startswith(experiment) else f"{experiment}-{job}"
    if job and job.startswith(f"{experiment}-"):
        return job
    for column in ("case", "variant", "id"):
        if case_row and case_row.get(column):
            return f"{prefix}-{case_row[column]}"
    if job:
        return prefix
    content = json.dumps([dict(case_row or {}), dict(config or {})], sort_keys=True, default=str)
    return f"{experiment}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _slug(text: str, what: str) -> str:
    if not _SLUG.fullmatch(text):
        raise ValueError(f"record: {what} {text!r}; allowed: lower-case letters, digits, . _ + -")
    return text


def _unique(name: str) -> str:
    candidate, count = name, 1
    while candidate in _ids_of_this_process:
        count += 1
        candidate = f"{name}-{count}"
    _ids_of_this_process.add(candidate)
    return candidate


if __name__ == "__main__":
    from gem.record_store import main

    sys.exit(main())
