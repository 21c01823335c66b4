"""Many training jobs at once: order, sharing, what a failure or the end of time costs; results are the rules' own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gem import record, workflow
from gem.bench import trainings
from gem.digest import ROOT


class Body:
    """Stands for gem.train in a process: notes what it was asked; `how` says which job does what else."""

    def __init__(self, folder, **how):
        self.folder, self.how = str(folder), how

    def __call__(self, name, folder, argv, gpu):
        what = argv[argv.index("--seeds") + 1] if "--seeds" in argv else "all"
        with open(Path(self.folder, "log"), "a") as file:
            file.write(f"{name} {'record' if '--run' in argv else 'train'} {what} {gpu}\n")
        if "--run" not in argv:
            time.sleep({"slow": 60.0, "brief": 0.3}.get(self.how.get(name), 0.0))
        os._exit(3 if self.how.get(name) == "fails" and what == "1" else 0)


def work(*names, seeds=(0, 1)):
    training = [workflow.Training(name, "base", ("--variant", name)) for name in names]
    return [trainings.Work(job, "folder", "run", list(seeds)) for job in training]


def farm(folder, items, processes=2, limit_s=60.0, gpus=("7",), **how):
    return trainings.Farm(
        items, list(gpus), processes, limit_s, target=Body(folder, **how), seeds=2, say=lambda line: None
    )


def log(folder):
    return [tuple(line.split()) for line in (folder / "log").read_text().splitlines()]


def test_every_seed_is_trained_then_its_job_recorded(tmp_path):
    items = work("a", "b")
    assert farm(tmp_path, items, processes=1, gpus=("7", "8")).run()
    lines = log(tmp_path)
    for name in "ab":
        mine = [(what, seed) for job, what, seed, _ in lines if job == name]
        assert sorted(mine[:2]) == [("train", "0"), ("train", "1")] and mine[2:] == [("record", "all")]
    assert {gpu for *_, gpu in lines} == {"7", "8"}
    assert all(item.recorded and item.done and not item.failed for item in items)


def test_one_process_a_gpu_never_overlaps_and_four_do(tmp_path):
    for processes, least, most in ((1, 1.2, 60.0), (4, 0.0, 1.1)):
        items = work("a", "b", seeds=(0, 1))
        for item in items:
            item.recorded = True
        began = time.monotonic()
        assert farm(tmp_path, items, processes=processes, a="brief", b="brief").run()
        assert least <= time.monotonic() - began < most


def test_a_failed_seed_fails_its_job_alone(tmp_path):
    items = work("bad", "good")
    assert farm(tmp_path, items, processes=1, bad="fails").run()
    assert [(item.failed, item.recorded) for item in items] == [(True, False), (False, True)]
    assert ("bad", "record", "all", "7") not in log(tmp_path)


def test_when_time_is_up_what_is_done_of_a_job_is_recorded(tmp_path):
    items = work("slow", "brief")
    items[0].done, items[0].todo = [0], [1]
    began = time.monotonic()
    assert not farm(tmp_path, items, processes=1, limit_s=1.0, slow="slow").run()
    assert time.monotonic() - began < 20
    assert ("slow", "record", "0", "7") in log(tmp_path)  # with the seed that was done
    assert not any(name == "brief" for name, *_ in log(tmp_path))
    assert not items[1].recorded and items[0].done == [0]


def test_jobs_come_in_the_order_of_the_globs_and_without_those_that_have_a_receipt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = workflow.load({"tier": "gpu"})
    picked = trainings.chosen(settings, ["quality-size_*", "train-full", "train-*"], again=False)
    assert [job.name for job in picked[:5]] == [
        "quality-size_quality_quarter-full", "quality-size_quality_half-full", "quality-size_quality-full",
        "quality-size_quality_double-full", "train-full",
    ]  # fmt: skip
    assert len(picked) == len({job.name for job in picked}) == 4 + len(settings.variants)
    receipt = tmp_path / "results/gpu/records/jobs/train-full.json"
    receipt.parent.mkdir(parents=True)
    receipt.write_text("{}")
    assert "train-full" not in {job.name for job in trainings.chosen(settings, [], again=False)}
    assert "train-full" in {job.name for job in trainings.chosen(settings, [], again=True)}
    with pytest.raises(ValueError, match="--jobs 'trian-\\*'; allowed: a glob that matches"):
        trainings.chosen(settings, ["trian-*"], again=False)


def test_a_tiny_tier_trains_and_records_as_the_rules_do(tmp_path, monkeypatch):
    from tests.gem import tiny

    monkeypatch.chdir(tmp_path)
    tiny.dataset(Path("results/smoke/data/base"), rows=300)
    # a process of its own, as a user's: this one has threads, which a fork does not survive
    command = [sys.executable, "-m", "gem.bench.trainings", "--tier", "smoke", "--jobs", "train-no_sequence"]
    done = subprocess.run(
        [*command, "--processes", "2"], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    run = "train-no_sequence"
    info = json.loads(Path(f"results/smoke/records/parts/{run}.json").read_text())
    assert info["job"] == run and info["command"].startswith("python -m gem.train --tier smoke --variant no_sequence")
    rows = record.read(Path(f"results/smoke/records/parts/{run}.csv"))
    assert set(rows[rows.metric == "ne_ctr"].seed.dropna()) == {0, 1, 2}
    assert not set(rows.metric) & {"qps", "time_ms", "mfu"}
    receipt = json.loads(Path(f"results/smoke/records/jobs/{run}.json").read_text())
    assert receipt["runs"] == [run]
    # the same job by the command that the rule runs has the same numbers
    from gem import train

    assert train.main(["--tier", "smoke", "--variant", "no_sequence", "--data", "results/smoke/data/base",
                       "--output", "alone", "--seeds", "1", "--quiet"]) == 0  # fmt: skip
    alone = json.loads(Path("alone/summary.json").read_text())["seeds"][0]["ne_ctr"]
    assert rows[(rows.metric == "ne_ctr") & (rows.seed == 1)].p50.item() == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0; allowed: an integer >= 1"),
        (["--limit-s", "0"], "--limit-s 0.0; allowed: a number of seconds above 0"),
        (["--jobs", "nothing"], "--jobs 'nothing'; allowed: a glob"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert trainings.main(["--tier", "smoke", *arguments]) == 1
    assert message in capsys.readouterr().err
