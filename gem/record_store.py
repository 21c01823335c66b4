"""Folders of records: merge parts, check a folder, freeze measured records into the repository, thaw them into results.

The command line is ``python -m gem.record``; see there.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import yaml

from gem import job, record
from gem.cli import Parser
from gem.digest import ROOT

MEASURED = ROOT / "data" / "measured"
_KEYS = {"variants": "variant", "kernels": "case"}


def load_parts(folder: Path, warn: Callable[[str], None] = print) -> dict[str, tuple[list[dict], dict]]:
    """run_id -> (rows, provenance) of every whole part in `folder`.

    A half-written part is named by `warn` and left out.
    """
    units = record.metric_units()
    parts = {}
    for path in sorted(folder.glob("*.csv")):
        meta = path.with_suffix(".json")
        if not meta.exists():
            warn(f"{path}: left out, its writer was stopped before {meta.name}")
            continue
        info = json.loads(meta.read_text(encoding="utf-8"))
        if hashlib.sha256(path.read_bytes()).hexdigest() != info.get("sha256"):
            warn(f"{path}: left out, it is not the file that {meta.name} was written for")
            continue
        parts[info["run_id"]] = (record.read_rows(path, units), info)
    return parts


def merge(
    folder: Path,
    *,
    experiments: Iterable[str] = (),
    config: Path = ROOT / "config",
    warn: Callable[[str], None] = print,
) -> list[Path]:
    """parts/* of `folder` -> <experiment>.csv and runs.json. Returns the CSVs.

    experiments: write these CSVs only (an experiment without rows is then an error); runs.json always covers every
    part. Without it, every experiment is written and CSVs that have no part any more are removed. Parts of a variant
    or case that is no longer a row of its sheet are left out and named. Merges of one folder wait for one another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".merge.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _merge(folder, list(experiments), config, warn)


def _merge(folder: Path, wanted: list[str], config: Path, warn: Callable[[str], None]) -> list[Path]:
    ids = {name: _ids(config / f"{name}.tsv") for name in ("variants", "kernels")}
    rows, runs = defaultdict(list), {}
    for run_id, (part, info) in load_parts(folder / "parts", warn).items():
        gone = _gone(info["case_row"], ids)
        if gone:
            warn(f"{run_id}: left out, {gone}")
            continue
        runs[run_id] = info
        for row in part:
            rows[row["experiment"]].append(row)
    for name in wanted:
        if name not in rows:
            raise ValueError(
                f"{folder / 'parts'}: no record of {name!r}; there are: {', '.join(sorted(rows)) or 'none'}"
            )
    paths = _write(folder, {name: rows[name] for name in wanted} if wanted else rows, runs)
    for path in () if wanted else set(folder.glob("*.csv")) - set(paths):
        path.unlink()
    return paths


def check(folder: Path) -> tuple[int, int]:
    """Check a folder of merged records; returns (rows, runs). A row without its run is a ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of records")
    runs = record.read_runs(folder)
    count = 0
    for path in sorted(folder.glob("*.csv")):
        for line, row in enumerate(record.read_rows(path), start=2):
            if row["run_id"] not in runs:
                raise ValueError(f"{path}:{line}: run_id {row['run_id']!r} is not in {folder / 'runs.json'}")
            count += 1
    return count, len(runs)


def freeze(source: Path, measured: Path, *, device: str | None = None, experiments: Iterable[str] = ()) -> Path:
    """Copy merged records of one device into measured/<device>. A run of the same id is replaced, others stay.

    device: slug such as h200; the default is the device of the records. Records of several devices, or of another
    device than named, are a ValueError: chips never mix.
    """
    wanted = set(experiments)
    rows, runs = defaultdict(list), {}
    for run_id, (part, info) in _merged(source).items():
        if not wanted or wanted & {row["experiment"] for row in part}:
            runs[run_id] = info
            for row in part:
                rows[row["experiment"]].append(row)
    if not runs:
        raise ValueError(f"{source}: nothing to freeze; allowed: a folder made by `python -m gem.record merge`")
    slugs = {info["device"]["slug"] for info in runs.values()}
    if len(slugs) > 1 or (device and device not in slugs):
        raise ValueError(f"{source}: records of {', '.join(sorted(slugs))}; allowed: {device or 'one device'}")
    target = measured / slugs.pop()
    for run_id, (part, info) in (_merged(target) if target.exists() else {}).items():
        if run_id not in runs:
            runs[run_id] = info
            for row in part:
                rows[row["experiment"]].append(row)
    _write(target, rows, runs)
    return target


def thaw(source: Path, folder: Path, *, config: Path = ROOT / "config") -> tuple[list[str], list[str]]:
    """Frozen runs -> parts of `folder` and receipts of their jobs, as if measured here.

    Returns (thawed run ids, "run id: reason" of those left out). A run is thawed when its sources are unchanged and its
    row is still the row of its sheet. A job all of whose runs are there gets its receipt and counts as finished; any
    other is marked as started, so that it measures only what is left. Receipts of an earlier thaw are taken back first:
    thaw again after an edit.
    """
    for receipt in (folder / "jobs").glob("*.json"):
        if json.loads(receipt.read_text(encoding="utf-8")).get("thawed_from"):
            receipt.unlink()
    sheets = {name: {row[key]: row for row in _sheet(config / f"{name}.tsv")} for name, key in _KEYS.items()}
    thawed, left = [], []
    for run_id, (part, info) in _merged(source).items():
        reason = None
        if not record.is_current(info):
            reason = f"its sources ({', '.join(info['sources'])}) have changed"
        for name, key in _KEYS.items():
            row = info["case_row"]
            if key in row and _decisive(sheets[name].get(row[key], row)) != _decisive(row):
                reason = f"its row of {name}.tsv has changed"
        if reason:
            left.append(f"{run_id}: {reason}")
        else:
            record.write_part(folder / "parts", part, info | {"thawed_from": source.name, "job": _job_of(info)})
            thawed.append(run_id)
    incomplete = {_job_of(info) for run_id, (_, info) in _merged(source).items() if run_id not in thawed}
    cases = defaultdict(set)
    for row in sheets["kernels"].values():
        if folder.parent.name in row["tiers"].split(","):
            runs = (f"{row['experiment']}-{row['case']}-{impl.replace(':', '.')}" for impl in row["impls"].split(","))
            cases[row["experiment"]].update(runs)
    tier = config / f"{folder.parent.name}.yaml"
    steps = yaml.safe_load(tier.read_text(encoding="utf-8")).get("step", {}) if tier.exists() else {}
    cases["step"].update(f"step-{name}" for name in steps.get("variants", ()))
    for name in sorted({_job_of(_merged_info(folder, run_id)) for run_id in thawed}):
        receipt = folder / "jobs" / f"{name}.json"
        runs = job.runs_of(folder / "parts", name)
        if name in incomplete or not cases[name] <= set(runs):
            receipt.parent.mkdir(parents=True, exist_ok=True)
            job.started_marker(receipt).touch()
        else:
            job.write_receipt(receipt, runs, thawed_from=source.name)
    return thawed, left


def collect(measured: Path, folder: Path) -> list[Path]:
    """Frozen records of every device as one folder of merged records; a run keeps its device in runs.json."""
    rows, runs = defaultdict(list), {}
    for source in sorted(path for path in measured.glob("*") if path.is_dir()):
        for run_id, (part, info) in _merged(source).items():
            name = run_id if run_id not in runs else f"{run_id}@{source.name}"
            runs[name] = info
            for row in part:
                rows[row["experiment"]].append(row | {"run_id": name})
    if not runs:
        raise ValueError(
            f"{measured}: nothing is frozen there; allowed: a folder filled by python -m gem.record freeze"
        )
    return _write(folder, rows, runs)


def _decisive(row: Mapping) -> dict:
    """The columns of a row that decide numbers: which implementations and tiers it names, and notes, do not."""
    return {key: value for key, value in row.items() if key not in ("impls", "tiers", "note", "group")}


def _job_of(info: Mapping) -> str:
    """Job that a run belongs to; for a run made by hand, the job that would have made it."""
    experiment, variant = info["experiment"], info["case_row"].get("variant")
    if info.get("job"):
        return info["job"]
    if experiment == "train":
        return f"{experiment}-{variant}"
    return {"step_largest": "step"}.get(experiment, experiment)


def _merged_info(folder: Path, run_id: str) -> dict:
    return json.loads((folder / "parts" / f"{run_id}.json").read_text(encoding="utf-8"))


def _merged(folder: Path) -> dict[str, tuple[list[dict], dict]]:
    check(folder)
    runs = record.read_runs(folder)
    rows = defaultdict(list)
    for path in sorted(folder.glob("*.csv")):
        for row in record.read_rows(path):
            rows[row["run_id"]].append(row)
    return {run_id: (rows[run_id], runs[run_id]) for run_id in rows}


def _write(folder: Path, rows: Mapping[str, list[dict]], runs: Mapping[str, dict]) -> list[Path]:
    order = ("case", "subject", "impl", "phase", "metric", "seed", "run_id")
    paths = []
    # runs.json first: a reader that comes in between finds runs without rows, never rows without a run.
    record.write_text(folder / "runs.json", json.dumps(runs, indent=1, sort_keys=True) + "\n")
    for experiment, items in sorted(rows.items()):
        paths.append(folder / f"{experiment}.csv")
        record.write_text(paths[-1], record.to_csv(sorted(items, key=lambda row: [row[name] for name in order])))
    return paths


def _sheet(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _ids(path: Path) -> set[str]:
    rows = _sheet(path)
    return {next(iter(row.values())) for row in rows}


def _gone(case_row: Mapping, ids: Mapping[str, set[str]]) -> str | None:
    for name, key in _KEYS.items():
        # Only full rows of the sheet count: a free-form case_row may use the same key for something else.
        full = len(case_row) > 10 and key in case_row
        if full and ids[name] and case_row[key] not in ids[name]:
            return f"{case_row[key]!r} is no row of config/{name}.tsv any more"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.record", description="Merge, check, freeze and thaw records.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("merge", "parts -> one CSV an experiment, and runs.json"),
        ("check", "schema, and a run for every row"),
        ("freeze", "merged records -> data/measured/<device>"),
        ("thaw", "frozen records that are current -> parts"),
        ("collect", "frozen records of all devices -> one folder"),
    ):
        sub = verbs.add_parser(verb, help=text)
        if verb == "check":
            sub.add_argument("folders", nargs="+", type=Path)
            continue
        if verb == "collect":
            sub.add_argument("--measured", type=Path, default=MEASURED)
            sub.add_argument("--output", type=Path, required=True)
            continue
        sub.add_argument("--tier", required=True, help="folder under results, such as gpu")
        sub.add_argument("--results", type=Path, default=Path("results"))
        if verb != "merge":
            sub.add_argument("--device", required=verb == "thaw", help="folder under data/measured, such as h200")
            sub.add_argument("--measured", type=Path, default=MEASURED)
        if verb != "thaw":
            sub.add_argument("--experiments", nargs="*", default=(), help="only these (default: all)")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.verb == "check":
        for folder in args.folders:
            count, runs = check(folder)
            print(f"{folder}: {count} rows of {runs} runs are sound")
        return 0
    if args.verb == "collect":
        paths = collect(args.measured, args.output)
        print(f"{args.output}: {len(paths)} experiments")
        return 0
    folder = args.results / args.tier / "records"
    if args.verb == "merge":
        paths = merge(folder, experiments=args.experiments)
        print(f"{folder}: {len(paths)} experiments: {', '.join(path.stem for path in paths)}")
    elif args.verb == "freeze":
        print(f"frozen into {freeze(folder, args.measured, device=args.device, experiments=args.experiments)}")
    else:
        thawed, left = thaw(args.measured / args.device, folder)
        for line in left:
            print(line)
        print(f"thawed {len(thawed)} runs into {folder / 'parts'}; {len(left)} left to measure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
