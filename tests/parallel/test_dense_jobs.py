"""The command line of parallel training: a job under torchrun, and one that loses a rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gem.parallel import launch, train
from tests.gem import tiny

ROOT = Path(__file__).resolve().parents[2]
# Rank 1 is killed before its third step; both ranks are what torchrun starts.
DYING = """
import os, signal, sys
from gem.parallel import train
step = train.Trainer.step
def dies(self, batch, rows, counts, number):
    if number == 2 and self.rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, rows, counts, number)
train.Trainer.step = dies
sys.exit(train.main())
"""


def arguments(data: Path, output: Path, *more: str) -> list[str]:
    sizes = ["--seeds", "0", "--batch-size", "16", "--steps", "4", "--backend", "gloo", "--quiet", *more]
    return ["--variant", "full", "--tier", "smoke", "--data", str(data), "--output", str(output), *sizes]


@pytest.mark.timeout(180)
def test_a_dying_rank_ends_the_job_with_its_name_and_the_last_checkpoint(tmp_path):
    data = tiny.dataset(tmp_path / "data")
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    command = [sys.executable, "-W", "ignore", "-m", "gem.parallel.launch", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), *arguments(data, tmp_path / "out", "--checkpoint-every", "1", "--timeout", "60")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1
    line = next(line for line in done.stderr.splitlines() if line.startswith("gem.parallel: "))
    assert "rank 1 was ended by SIGKILL" in line
    assert line.endswith(f"last checkpoint: {tmp_path}/out/seed0/checkpoints/step-2; go on with --resume")


def test_bad_requests_end_before_any_work(tmp_path, capsys):
    data = tiny.dataset(tmp_path / "data")
    for more, text in (
        (["--mesh", "fsdp=2"], "divisor of 1 GPUs"),
        (["--gather", "int4"], "allowed: plain, float8, mx"),
        (["--run", "smoke"], "allowed: --output"),
        (["--sparse", "v1", "--mesh", "mp=2"], "allowed: a divisor of 1 GPUs"),
    ):
        assert train.main(arguments(data, tmp_path / "out", *more)) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("gem.parallel.train: ") and text in error and "\n" not in error
        launch.stop()
    assert not (tmp_path / "out" / "summary.json").exists()


def test_one_rank_without_torchrun_is_a_job_too(tmp_path, capsys):
    data = tiny.dataset(tmp_path / "data")
    assert train.main(arguments(data, tmp_path / "out")) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["ranks"] == 1 and summary["mesh"].startswith("shard 1 x replica 1")
    assert len((tmp_path / "out" / "seed0" / "metrics.jsonl").read_text().splitlines()) == 4
    assert "NE" in capsys.readouterr().out
