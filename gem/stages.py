"""Time, memory and disk of a run by stage, from the benchmark files that Snakemake keeps beside the logs of jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def stages(logs: Path) -> list[dict]:
    """Wall time summed over jobs (seconds) and memory of the largest job (rss, GiB) by stage, the longest first."""
    found: dict[str, dict] = {}
    for path in sorted(logs.rglob("*.benchmark.jsonl")):
        stage = path.parent.name if path.parent != logs else path.name.split(".")[0]
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            row = found.setdefault(stage, {"stage": stage, "jobs": 0, "seconds": 0.0, "rss": 0.0})
            row["jobs"] += 1
            row["seconds"] += float(values.get("s") or 0)
            memory = values.get("max_rss")
            row["rss"] = max(row["rss"], float(memory) if str(memory).replace(".", "", 1).isdigit() else 0.0)
    rows = []
    for row in sorted(found.values(), key=lambda row: -row["seconds"]):
        rss = f"{row['rss'] / 1024:.2f}" if row["rss"] else "-"
        rows.append({"stage": row["stage"], "jobs": str(row["jobs"]), "seconds": f"{row['seconds']:.0f}", "rss": rss})
    return rows


def sizes(folder: Path) -> list[dict]:
    """Disk that each folder of the run holds, in MB."""
    rows = []
    for path in sorted(item for item in folder.iterdir() if item.is_dir() and item.name != "paper"):
        size = sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
        rows.append({"folder": path.name, "mb": f"{size / 1e6:.1f}"})
    return rows


def markdown(folder: Path) -> str:
    """Both as README shows them, with the machine and the commit of the run. ValueError: the run has no such files."""
    rows = stages(folder / "logs")
    runs = folder / "records" / "runs.json"
    if not rows or not runs.exists():
        raise ValueError(f"{folder}: no benchmark files or no records; allowed: a finished run such as results/smoke")
    lines = ["| stage | jobs | seconds, summed | GiB, largest job |", "|---|---|---|---|"]
    lines += [f"| {row['stage']} | {row['jobs']} | {row['seconds']} | {row['rss']} |" for row in rows]
    disk = ", ".join(f"{row['folder']} {row['mb']}" for row in sizes(folder) if float(row["mb"]) >= 0.1)
    return "\n".join([*lines, "", f"{_where(json.loads(runs.read_text(encoding='utf-8')))} Disk in MB: {disk}."])


def _where(runs: Mapping[str, Mapping]) -> str:
    """ "Commit 1a2b3c4, 2026-11-30, 2 cores of AMD EPYC." from the newest run."""
    latest: Mapping = max(runs.values(), key=lambda info: info.get("utc", ""))
    device = latest.get("device", {})
    cores = f"{device['cores']} cores of " if device.get("cores") else ""
    words: Sequence[str] = (f"Commit {str(latest['commit'])[:7]}", latest["utc"][:10], cores + str(device.get("name")))
    return ", ".join(words) + "."
