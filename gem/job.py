"""Run a measuring step as a job of the pipeline and leave a receipt that names its runs.

    python -m gem.job results/smoke/records/jobs/train-full.json -- python -m gem.train --tier smoke --variant full

The step writes its records as it does by hand; it finds the job's name in the environment (GEM_JOB) and every run keeps
it. Here it is checked that the step really left whole parts; the receipt is what Snakemake sees as the job's output.

Parts outlive a failed job: while a job runs, RECEIPT.started stands beside its receipt, and a job that finds it there
tells the step to go on where it stopped (GEM_RESUME=1, see `record.already_measured`). A job that ended well starts
afresh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

USAGE = "usage: python -m gem.job RECEIPT.json -- COMMAND [ARGUMENT ...]"


def runs_of(parts: Path, job: str) -> dict[str, dict]:
    """run_id -> provenance of the parts that job wrote."""
    infos = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(parts.glob("*.json")))
    return {info["run_id"]: info for info in infos if info.get("job") == job}


def write_receipt(receipt: Path, runs: dict[str, dict], thawed_from: str | None = None) -> None:
    """Write a receipt over the given runs, as a whole. thawed_from: device whose frozen records stand for the job."""
    lines = {
        "job": receipt.stem,
        "runs": sorted(runs),
        "digests": sorted({str(run["digest"]) for run in runs.values()}),
    }
    if thawed_from:
        lines["thawed_from"] = thawed_from
    receipt.parent.mkdir(parents=True, exist_ok=True)
    partial = receipt.with_name(f".{receipt.name}.partial")
    partial.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, receipt)


def started_marker(receipt: Path) -> Path:
    """The file that stands beside a receipt from a job's start to its good end."""
    return receipt.with_suffix(".started")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) < 3 or argv[1] != "--" or not argv[0].endswith(".json"):
        print(USAGE, file=sys.stderr)
        return 2
    receipt, command = Path(argv[0]), argv[2:]
    parts = receipt.parent.parent / "parts"
    marker = started_marker(receipt)
    resume = marker.exists()
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    started = time.time()
    environment = os.environ | {"GEM_JOB": receipt.stem, "GEM_RESUME": "1" if resume else "0"}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        print(f"error: job {receipt.stem}: its command ended with exit code {code}", file=sys.stderr)
        return code if code > 0 else 1
    runs = runs_of(parts, receipt.stem)
    fresh = [run for run in runs if (parts / f"{run}.csv").stat().st_mtime >= started - 1]
    if not (fresh or (resume and runs)):
        print(f"error: job {receipt.stem}: its command ended well but wrote no record into {parts}", file=sys.stderr)
        return 1
    write_receipt(receipt, runs)
    marker.unlink()
    print(f"job {receipt.stem}: {len(runs)} runs, {time.time() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
