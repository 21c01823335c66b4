"""What an edit reruns: package code but no comment, a config key only what depends on it; GPU jobs one at a time."""

import itertools
import re
import time

import pytest

from gem import job, record_store

from .conftest import Workplace

BENCHES = {
    f"bench_{name}"
    for name in ("activations", "balance", "kernels", "modelled", "mx_errors", "simulate", "windows", "data_flow")
}
MEASURED = ("train", "bench", "ablations")


@pytest.fixture
def undo(finished):
    """Edits made by a test, taken back after it."""
    saved = {}

    def edit(path, old, new):
        saved.setdefault(path, (finished.folder / path).read_text())
        finished.edit(path, old, new)

    yield edit
    for path, text in saved.items():
        (finished.folder / path).write_text(text)


def test_a_finished_run_has_nothing_to_do_soon(finished):
    start = time.monotonic()
    assert finished.planned(*MEASURED) == {}
    assert time.monotonic() - start < 60  # 15 s on an idle machine; tests share theirs


def test_comments_and_docs_rerun_nothing_but_code_does(finished, undo):
    undo("kernels/registry.py", "import importlib", "import importlib  # a new thought")
    (finished.folder / "kernels" / "NOTES.md").write_text("words")
    assert finished.planned(*MEASURED) == {}
    undo("kernels/registry.py", "import importlib  # a new thought", "EDITED = True\nimport importlib")
    jobs = finished.planned(*MEASURED)
    bench_of_kernels = ("bench_kernels", "bench_windows")
    assert jobs == {"train_variant": 2, "train_quality": 1, "ablation": 2} | dict.fromkeys(bench_of_kernels, 1)


def test_thawed_jobs_stay_finished_although_their_data_are_still_to_be_made(finished):
    receipt = finished.folder / "results/smoke/records/jobs/train-full.json"
    text, data = receipt.read_text(), finished.folder / "results/smoke/data/base"
    metadata = finished.folder / ".snakemake/metadata"
    try:
        data.rename(data.with_name("away"))
        metadata.rename(metadata.with_name("away"))
        assert finished.planned("data", "train")["train_variant"] == 2
        receipt.write_text(text.replace('"job"', '"thawed_from": "h200",\n "job"'))
        assert finished.planned("data", "train")["train_variant"] == 1
    finally:
        receipt.write_text(text)
        data.with_name("away").rename(data)
        metadata.with_name("away").rename(metadata)


def test_code_of_one_step_reruns_that_step(finished, undo):
    undo("gem/ablation.py", "METRICS = {", "EDITED = True\nMETRICS = {")
    assert finished.planned(*MEASURED) == {"ablation": 2}


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        ("config/smoke.yaml", "repeat_ms: 100", "repeat_ms: 50", BENCHES),
        ("config/smoke.yaml", "batch_size: 128", "batch_size: 64", {"train_variant", "train_quality", "ablation"}),
        ("config/smoke.yaml", "fill: 0.3", "fill: 0.4", {"synthesize", "train_variant", "train_quality", "ablation"}),
        ("config/kernels.tsv", "smoke_length_full_128\twindows\tjagged_attention\tself\t16",
         "smoke_length_full_128\twindows\tjagged_attention\tself\t8", {"bench_windows"}),
    ],
)  # fmt: skip
def test_a_config_value_reruns_what_depends_on_it_and_nothing_else(finished, undo, path, old, new, expected):
    undo(path, old, new)
    jobs = finished.planned(*MEASURED)
    assert set(jobs) - {"data_records"} == expected


def test_one_row_retrains_one_variant_and_a_new_row_trains_itself(finished, undo):
    undo("config/variants.tsv", "everything: block", "all of it: block")
    assert finished.planned(*MEASURED) == {"train_variant": 1, "train_quality": 1, "ablation": 1}
    undo("config/variants.tsv", "all of it: block", "everything: block")
    sheet = finished.folder / "config/variants.tsv"
    row = next(line for line in sheet.read_text().splitlines() if line.startswith("drop_hsp\t"))
    undo("config/variants.tsv", row, f"{row}\n{row.replace('drop_hsp', 'my_variant', 1)}")
    undo("config/smoke.yaml", "variants: [baseline_padded, full]", "variants: [baseline_padded, full, my_variant]")
    jobs = finished.planned("ablation_my_variant")
    assert jobs["train_variant"] >= 1 and jobs["ablation"] == 1


def test_ablation_report_and_records_of_the_stubs(finished):
    text = (finished.folder / "results/smoke/ablations/full.md").read_text()
    assert "| layout | padded | jagged |" in text
    assert re.search(r"\| samples/s \| 115 .* \| 104 .* \| -9\.57 % \| higher \|", text)
    done = finished.snakemake("--cores", "2", "results/smoke/records/train.csv")
    assert done.returncode == 0, done.stdout[-3000:]
    assert record_store.check(finished.folder / "results/smoke/records")[0] >= 8


def test_a_job_without_a_record_or_with_a_failing_command_leaves_no_receipt(tmp_path, capsys):
    receipt = tmp_path / "records/jobs/x.json"
    assert job.main([str(receipt), "--", "true"]) == 1
    assert "wrote no record" in capsys.readouterr().err
    assert job.main([str(receipt), "--", "false"]) == 1
    assert not receipt.exists() and job.started_marker(receipt).exists()


def test_gpu_jobs_run_one_at_a_time_under_the_profile_and_would_overlap_without(tmp_path):
    place = Workplace(tmp_path, stubs=True)
    train = (place.folder / "gem/train.py").read_text()
    slow = 'import time\nprint("began", time.time())\n' + train + '\ntime.sleep(1.0)\nprint("ended", time.time())\n'
    (place.folder / "gem/train.py").write_text(slow)
    text = (place.folder / "config/gpu.yaml").read_text()
    for old, new in (
        ("variants: all", "variants: [baseline_padded, full, no_sequence]"),
        ("long_range_weights: .*", "long_range_weights: []"),
        ("sizes: .*", ""),
        ("size_variants: .*", ""),
        ("hopper: .*", ""),
    ):
        text, count = re.subn(f"(?m)^  {old}$", f"  {new}" if new else "", text)
        assert count == 1, old
    (place.folder / "config/gpu.yaml").write_text(text)

    def overlaps(*words: str) -> bool:
        done = place.snakemake("--workflow-profile", "profiles/gpu", "--cores", "4", *words)
        assert done.returncode == 0, done.stdout[-3000:]
        logs = [path.read_text() for path in (place.folder / "results/gpu/logs/train").glob("*.log")]
        spans = sorted(tuple(float(re.search(rf"{word} (\S+)", log)[1]) for word in ("began", "ended")) for log in logs)
        assert len(spans) == 3
        return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))

    assert not overlaps("train")
    assert overlaps("train", "--forcerun", "train_variant", "--resources", "gpu=4")
