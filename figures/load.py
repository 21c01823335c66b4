"""The data of figures and tables: record files, frozen records of other devices, the source's numbers. pandas only.

Records are read as they stand on disk (gem/record.py writes them); nothing here imports the code that made them. Every
row gets the device that it was measured on, and a figure never mixes absolute speeds of two devices on one axis.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "experiment,case,subject,impl,phase,metric,unit,p50,p20,p80,n,seed,status,scope,run_id,note".split(",")
DEVICE_NAMES = {"cpu": "CPU", "h200": "H200", "h200x2": "2 x H200"}


class NoDataError(ValueError):
    """Nothing to draw: which records are missing."""


@dataclass(frozen=True)
class Source:
    """Where a figure reads: a folder of merged records, frozen records by device, numbers of the source."""

    records: Path
    measured: Path
    published: Path

    @cached_property
    def runs(self) -> dict[str, dict]:
        """run_id -> provenance, local runs over frozen ones."""
        found: dict[str, dict] = {}
        for folder in (*self._frozen_folders(), self.records):
            path = folder / "runs.json"
            if path.exists():
                found |= json.loads(path.read_text(encoding="utf-8"))
        return found

    def _frozen_folders(self) -> list[Path]:
        return sorted(path for path in self.measured.glob("*") if path.is_dir()) if self.measured.exists() else []

    def frame(self, experiment: str) -> pd.DataFrame:
        """Rows of one experiment from this tier and from frozen records, with column `device` (a slug such as h200).

        Numbers are floats. Where this tier has records of a device, its frozen ones are left out. An experiment without
        records gives an empty frame.
        """
        local = self._read(self.records / f"{experiment}.csv", None)
        parts = [local]
        for folder in self._frozen_folders():
            frozen = self._read(folder / f"{experiment}.csv", folder.name)
            parts.append(frozen[~frozen.device.isin(set(local.device))])
        parts = [part for part in parts if len(part)]
        return pd.concat(parts, ignore_index=True) if parts else local

    def _read(self, path: Path, device: str | None) -> pd.DataFrame:
        if not path.exists():
            return pd.DataFrame(columns=[*COLUMNS, "device"])
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        if list(frame.columns) != COLUMNS:
            raise ValueError(f"{path}: header {','.join(frame.columns)!r}; allowed: {','.join(COLUMNS)}")
        for column in ("p50", "p20", "p80", "n"):
            frame[column] = pd.to_numeric(frame[column].replace("", None)).astype(float)
        return frame.assign(device=[device or self.slug_of(run) for run in frame.run_id])

    def slug_of(self, run_id: str) -> str:
        """Device slug of a run; a run without provenance counts as this machine's CPU."""
        return self.runs.get(run_id, {}).get("device", {}).get("slug", "cpu")

    def device_label(self, slug: str) -> str:
        """Name of a device for a reader."""
        return DEVICE_NAMES.get(slug, slug.replace("_", " "))

    def chart(self, name: str) -> pd.DataFrame:
        """Numbers of the source: data/published/<name>.csv."""
        path = self.published / f"{name}.csv"
        if not path.exists():
            raise NoDataError(f"{path}: no such file of published numbers")
        return pd.read_csv(path)

    def claims(self) -> pd.DataFrame:
        """Verdicts of this run: ../claims/claims.csv beside the records."""
        path = self.records.parent / "claims" / "claims.csv"
        if not path.exists():
            raise NoDataError(f"{path}: no claims there; make them with python -m gem.claims")
        return pd.read_csv(path, dtype=str, keep_default_na=False)


def select(frame: pd.DataFrame, **wanted) -> pd.DataFrame:
    """Rows of status ok whose columns have the given values (a tuple or list: one of them)."""
    frame = frame[frame.status == "ok"]
    for column, value in wanted.items():
        frame = frame[frame[column].isin(value) if isinstance(value, (list, tuple, set)) else frame[column] == value]
    return frame


def with_case(frame: pd.DataFrame, source: Source, *columns: str) -> pd.DataFrame:
    """The frame with columns of each run's row of kernels.tsv or variants.tsv: numbers where they are, else text."""
    frame = frame.copy()
    rows = {run: source.runs.get(run, {}).get("case_row", {}) for run in frame.run_id.unique()}
    for column in columns:
        values = [rows[run].get(column, "") for run in frame.run_id]
        numbers = pd.to_numeric(pd.Series(values, index=frame.index, dtype=object), errors="coerce")
        frame[column] = numbers if len(numbers) and numbers.notna().all() else values
    return frame


def rate_unit(device: str) -> tuple[float, str]:
    """Factor on TFLOP/s and unit that suit a device: a CPU's rates are shown in GFLOP/s."""
    return (1e3, "GFLOP/s") if device == "cpu" else (1.0, "TFLOP/s")


def best_device_first(slugs) -> list[str]:
    """GPU records before those of a CPU."""
    return sorted(set(slugs), key=lambda slug: (slug == "cpu", slug))


def need(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """The frame itself; NoDataError naming `what` when it is empty."""
    if frame.empty:
        raise NoDataError(f"no records of {what}")
    return frame


def over_seeds(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row a group: the row over all seeds where there is one, else median and 20/80 % quantiles of the seeds' rows.

    Columns `by`, p50, p20, p80, n.
    """
    rows = []
    for key, group in frame.groupby(by, sort=False):
        total = group[group.seed == ""]
        if len(total):
            values = total.iloc[-1][["p50", "p20", "p80", "n"]].to_dict()
        else:
            values = {"p50": group.p50.median(), "p20": group.p50.quantile(0.2), "p80": group.p50.quantile(0.8)}
            values["n"] = len(group)
        rows.append(dict(zip(by, key, strict=True)) | values)
    return pd.DataFrame(rows, columns=[*by, "p50", "p20", "p80", "n"])


def figure_rows(root: Path = ROOT) -> dict[str, dict]:
    """Rows of config/figures.tsv by id."""
    with open(root / "config" / "figures.tsv", newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def available(figure_id: str, records: str | Path, measured: str | Path, root: Path = ROOT) -> tuple[bool, str]:
    """Whether a figure or table of config/figures.tsv can be drawn, and why not.

    It needs its script and one of its experiments, in this tier or frozen; the source's own numbers are enough for
    those that show them.
    """
    rows = figure_rows(root)
    if figure_id not in rows:
        raise ValueError(f"figure {figure_id!r} is unknown; allowed: {', '.join(rows)}")
    row = rows[figure_id]
    if not (root / "figures" / f"{row['script']}.py").exists():
        return False, f"figures/{row['script']}.py does not exist: nothing measures {row['records']} yet"
    needs = [item for item in row["records"].split(";") if item]
    if any(item.startswith("published:") for item in needs):
        return True, "the source's numbers are shipped"
    places = [Path(records), *sorted(Path(measured).glob("*"))]
    have = {item for item in needs for place in places if (place / f"{item}.csv").exists()}
    if "claims" in needs and (Path(records).parent / "claims" / "claims.csv").exists():
        have.add("claims")
    if "runs" in needs and any((place / "runs.json").exists() for place in places):
        have.add("runs")
    return (True, f"records of {', '.join(sorted(have))}") if have else (False, f"no records of {', '.join(needs)}")
