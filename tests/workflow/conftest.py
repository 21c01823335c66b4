"""A small copy of the repository whose slow steps are stubs, for tests that run Snakemake."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNAKEMAKE = [sys.executable, "-m", "snakemake"]

STUB_TRAIN = """
import argparse
from gem import record, workflow

p = argparse.ArgumentParser()
for name in ("tier", "variant", "data", "run", "case"):
    p.add_argument(f"--{name}")
p.add_argument("--experiment", default="train")
a, _ = p.parse_known_args()
row = workflow.read_sheet("variants")[a.variant]
with record.Run(a.run, a.experiment, case_row=row, sources=("gem/train.py",)) as run:
    for seed in (0, 1):
        for metric, value in (("ne_ctr", 0.9 + seed / 100), ("qps", 100.0 + len(a.variant))):
            row = {"case": a.case or "base", "subject": a.variant, "impl": "stub", "phase": "step", "metric": metric}
            run.add(**row, p50=value, seed=seed)
"""
STUB_BENCH = """
import argparse
from gem import record

p = argparse.ArgumentParser()
for name in ("tier", "experiment", "run"):
    p.add_argument(f"--{name}")
a, _ = p.parse_known_args()
with record.Run(a.run, a.experiment or NAME, sources=("gem/job.py",)) as run:
    run.add(case="c", subject="gdpa", impl="eager", phase="fwd", metric="time_ms", p50=1.0)
"""
STUB_DATA = """
import json, sys
from pathlib import Path

if "--output" in sys.argv:
    folder = Path(sys.argv[sys.argv.index("--output") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(sys.argv))
print("ok")
"""
STUBS = {
    "gem/train.py": STUB_TRAIN,
    "gem/bench/kernels.py": STUB_BENCH,
    "gem/bench/balance.py": STUB_BENCH.replace("NAME", '"balance"'),
    "gem/bench/data_flow.py": STUB_BENCH.replace("NAME", '"data_flow"'),
    "gem/bench/activations.py": STUB_BENCH.replace("NAME", '"activations"'),
    "gem/bench/mx_errors.py": STUB_BENCH.replace("NAME", '"mx"'),
    "gem/bench/modelled.py": STUB_BENCH.replace("NAME", '"model"'),
    "gem/bench/simulate_records.py": STUB_BENCH.replace("NAME", '"simulate"'),
    "data/synthesize.py": STUB_DATA,
    "data/validate.py": STUB_DATA,
}


class Workplace:
    """A copy of the repository in which Snakemake may run."""

    def __init__(self, folder: Path, *, stubs: bool):
        self.folder = folder
        for name in ("config", "workflow", "profiles", "envs", "gem", "kernels", "data", "figures", "paper"):
            # shipped records decide which figures exist; stubs never make what they could be drawn beside
            left_out = ("__pycache__", "*.egg-info", "build", *(["measured"] if stubs else []))
            ignore = shutil.ignore_patterns(*left_out)
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        shutil.copy(ROOT / "Snakefile", folder)
        for path, text in (STUBS if stubs else {}).items():
            (folder / path).write_text(text)

    def snakemake(self, *words: str) -> subprocess.CompletedProcess:
        """Run Snakemake here; output and errors together in stdout."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return subprocess.run(
            [*SNAKEMAKE, *words],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
        )

    def planned(self, *words: str) -> dict[str, int]:
        """Rule -> number of jobs that a dry run of `words` would execute; targets themselves are left out."""
        done = self.snakemake("-n", "--cores", "2", *words)
        assert done.returncode == 0, done.stdout[-3000:]
        table = re.search(r"^job +count\n[- ]+\n(.*?)^total", done.stdout, re.S | re.M)
        jobs = (
            {} if table is None else {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table[1], re.M)}
        )
        return {name: count for name, count in jobs.items() if name not in words}

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (self.folder / path).write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Workplace:
    """The repository as it is, for dry runs."""
    return Workplace(tmp_path_factory.mktemp("real"), stubs=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Workplace:
    """A finished run with stubs: two variants, one sweep point, all benches of tier smoke."""
    place = Workplace(tmp_path_factory.mktemp("finished"), stubs=True)
    place.edit("config/smoke.yaml", "variants: all", "variants: [baseline_padded, full]")
    place.edit("config/smoke.yaml", "long_range_weights: [0.0, 1.5]", "long_range_weights: [1.0]")
    place.edit("config/smoke.yaml", "variants: [drop_block, drop_block_for_window, full]", "variants: [full]")
    done = place.snakemake("--cores", "2", "train", "bench", "ablations")
    assert done.returncode == 0, done.stdout[-5000:]
    return place
