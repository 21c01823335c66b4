"""data.synthesize: reproducible, of the asked shape, with a known truth; nothing half-written is taken for whole."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data import parquet_io, synthesize
from data.manifest import DataError, schema
from data.synthesize import Generator, Parameters
from data.truth import Bound, normalised_entropy, recalibrated_ne, sigmoid
from data.validate import validate

ROOT = Path(__file__).parents[2]


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "data.synthesize", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def read(directory, split):
    files = sorted(Path(directory).glob(f"{split}-*.parquet"))
    return [pq.read_table(file) for file in files]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "set"
    manifest = synthesize.synthesize(Parameters(20_000, 5_000, seed=3), str(path), quiet=True)
    return path, manifest


def test_valid_and_of_the_asked_shape(dataset):
    path, manifest = dataset
    assert validate(path) == manifest == json.loads((path / "manifest.json").read_text())
    table = read(path, "train")[0]
    assert table.schema.equals(schema(manifest))
    assert manifest["splits"]["train"]["rows"] == 20_000 and manifest["splits"]["eval"]["rows"] == 5_000
    for event in ("impression", "click", "conversion"):
        assert abs(manifest["splits"]["train"]["length"][event]["fill"] / 0.35 - 1) < 0.03
        assert manifest["splits"]["train"]["length"][event]["max"] == manifest["event_types"][event]["max_length"]


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    digests = []
    for number, seed in enumerate((5, 5, 6)):
        manifest = synthesize.synthesize(Parameters(300, 100, seed=seed), str(tmp_path / str(number)), quiet=True)
        digests.append([shard["sha256"] for split in manifest["splits"].values() for shard in split["shards"]])
    assert digests[0] == digests[1] and not set(digests[0]) & set(digests[2])


def test_items_follow_the_power_law(dataset):
    path, _ = dataset
    items = np.bincount(read(path, "train")[0]["sparse_item"].combine_chunks().flatten().to_numpy(), minlength=500)

    # Expected ratio of ids 0..9 to ids 90..99 under the cut power law with exponent 1.05.
    def mass(a, b):
        return (a + 1.0) ** -0.05 - (b + 1.0) ** -0.05

    ratio = items[:10].sum() / items[90:100].sum()
    assert abs(ratio / (mass(0, 10) / mass(90, 100)) - 1) < 0.15


def test_times_are_bursty_and_before_the_sample(dataset):
    path, _ = dataset
    table = read(path, "train")[0]
    column = table["impression_time"].combine_chunks()
    offsets = column.offsets.to_numpy()
    gaps = np.diff(column.flatten().to_numpy())
    inside = np.ones(len(gaps), bool)
    inside[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] <= len(gaps))] - 1] = False
    gaps = gaps[inside]
    assert gaps.min() >= 1
    assert gaps.std() / gaps.mean() > 2  # a Poisson process would have 1


def test_base_rates_and_bound(dataset):
    path, manifest = dataset
    p = np.concatenate([t["bayes_ctr"].to_numpy() for t in read(path, "eval")]).astype(np.float64)
    q = np.concatenate([t["bayes_cvr"].to_numpy() for t in read(path, "eval")]).astype(np.float64)
    click = np.concatenate([t["click"].to_numpy() for t in read(path, "eval")])
    conversion = np.concatenate([t["conversion"].to_numpy() for t in read(path, "eval")])
    assert abs(p.mean() - 0.2) < 0.015 and abs(q[click == 1].mean() - 0.3) < 0.03
    # Labels are draws from these probabilities: the standardised difference of sums is a standard normal number.
    for label, truth in ((click, p), (conversion[click == 1], q[click == 1])):
        assert abs((label - truth).sum()) / np.sqrt((truth * (1 - truth)).sum()) < 4
    rate = p.mean()
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean() / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    bayes = manifest["bayes"]["ctr"]
    assert abs(bayes["ne"] - entropy) < 1e-5 and abs(bayes["base_rate"] - rate) < 1e-6
    assert 0.6 < bayes["ne"] < 0.85 and abs(bayes["ne_realised"] - bayes["ne"]) < 0.05
    assert all(value > bayes["ne"] + 0.01 for value in bayes["without"].values())
    assert bayes["without"]["sequence"] > max(bayes["without"]["recent"], bayes["without"]["long_range"]) > bayes["ne"]
    assert abs(sum(bayes["variance_share"].values()) - 1) < 1e-9


def test_long_range_weight_moves_what_a_short_memory_loses():
    losses = []
    for weight in (0.0, 0.8, 2.0):
        generator = Generator(Parameters(1, 1, seed=1, long_range_weight=weight))
        bound = Bound()
        _, tasks = generator.chunk("eval", 0, 0, 4000, np.full(4000, 1_700_000_000))
        probability, label, parts, _ = tasks["ctr"]
        bound.add(probability, label, parts)
        result = bound.result()
        losses.append(result["without"]["long_range"] - result["ne"])
    assert abs(losses[0]) < 1e-3 and 0.02 < losses[1] < losses[2]


def test_long_range_part_ignores_events_near_the_end():
    """Rewriting the newest gap + recent - 1 events changes the recent part and leaves the old mix alone."""
    from data.histories import History, category_mix, recent_mix

    lengths = np.array([200, 70, 0])
    after = np.concatenate([np.arange(n)[::-1] for n in lengths])
    row = np.repeat(np.arange(3), lengths)
    rng = np.random.default_rng(0)
    category = rng.integers(0, 8, 270)
    other = np.where(after < 80, (category + 1) % 8, category)
    first, second = (History(c, np.zeros(270, int), c, row, after) for c in (category, other))
    old = category_mix(first, lengths, 80, 8)
    np.testing.assert_array_equal(old, category_mix(second, lengths, 80, 8))
    np.testing.assert_allclose(old.sum(1), [1, 0, 0], atol=1e-6)
    expected = np.bincount(category[:120], minlength=8) / 120
    np.testing.assert_allclose(old[0], expected, rtol=1e-6)
    assert np.abs(recent_mix(first, lengths, 16, 8) - recent_mix(second, lengths, 16, 8))[:2].max() > 0.05
    assert (recent_mix(first, lengths, 16, 8)[2] == 0).all()


def test_length_alone_says_nothing_about_the_long_range_part():
    generator = Generator(Parameters(1, 1, seed=2))
    rows, _ = generator.draw(20_000, np.random.default_rng(9), None)
    part = generator.process.scaled("ctr", generator.process.parts("ctr", rows))["long_range"]
    present = rows.old_mix.any(1)
    assert 0.2 < present.mean() < 0.6
    assert abs(part[present].mean()) < 0.05 and np.ptp(part[~present]) == 0 and abs(part[~present]).max() < 1e-3
    assert abs(part.std() - 0.8) < 0.05


def test_recalibrated_ne_of_the_truth_is_the_bound():
    p = sigmoid(np.random.default_rng(0).normal(-1, 1.5, 5000))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    logits = np.log(p / (1 - p))
    assert abs(recalibrated_ne(3 * logits + 5, p) - normalised_entropy(entropy, p.mean())) < 1e-6
    assert abs(recalibrated_ne(np.random.default_rng(1).normal(size=5000), p) - 1) < 5e-3
    assert normalised_entropy(0.3, 0.0) is None


def test_rate(tmp_path):
    """A million events a second of CPU time, writing included; an idle core makes several times that."""
    began = time.process_time()
    manifest = synthesize.synthesize(
        Parameters(12_000, 1_000, max_length=1024, click_max_length=256), str(tmp_path / "d"), quiet=True
    )
    seconds = time.process_time() - began
    events = sum(sum(split["events"].values()) for split in manifest["splits"].values())
    assert events > 4_000_000
    assert events / seconds > 1_000_000, f"{events / seconds:,.0f} events a CPU second"


def test_several_shards_and_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(synthesize, "CHUNK_EVENTS", 20_000)
    monkeypatch.setattr(
        synthesize, "DatasetWriter", lambda *a, **k: parquet_io.DatasetWriter(*a, **k, shard_events=50_000)
    )
    manifest = synthesize.synthesize(Parameters(2_000, 500), str(tmp_path / "d"), quiet=True)
    shards = manifest["splits"]["train"]["shards"]
    assert len(shards) > 2 and sum(shard["rows"] for shard in shards) == 2_000
    assert pq.ParquetFile(tmp_path / "d" / shards[0]["file"]).num_row_groups > 1
    validate(tmp_path / "d")


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet_io.pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        synthesize.synthesize(Parameters(100, 10), str(tmp_path / "d"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_line():
    from data.cli import describe_os_error

    text = describe_os_error(OSError(errno.ENOSPC, "No space left on device"))
    assert text.startswith("no space left while writing") and "\n" not in text


def test_killed_run_leaves_no_dataset_and_the_next_run_cleans_up(tmp_path):
    target = tmp_path / "d"
    arguments = ["--output", str(target), "--samples", "2000000", "--eval-samples", "10", "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "data.synthesize", *arguments], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".d.tmp-*/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists() and list(tmp_path.glob(".d.tmp-*"))
    with pytest.raises(DataError, match="no such dataset"):
        validate(target)
    synthesize.synthesize(Parameters(100, 10), str(target), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_older_dataset_is_replaced_and_other_files_are_kept(tmp_path):
    target = tmp_path / "d"
    synthesize.synthesize(Parameters(100, 10), str(target), quiet=True)
    synthesize.synthesize(Parameters(50, 10), str(target), quiet=True)
    assert validate(target)["splits"]["train"]["rows"] == 50
    (target / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt"):
        synthesize.synthesize(Parameters(50, 10), str(target), quiet=True)
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments,text",
    [
        (["--samples", "-5"], "'-5' must be an integer of at least 1"),
        (["--samples", "1.5"], "'1.5' must be an integer"),
        (["--fill", "0"], "in (0, 1]"),
        (["--fill", "1.01"], "in (0, 1]"),
        (["--length-law", "gauss"], "full, uniform, lognormal"),
        (["--length-law", "full", "--fill", "0.5"], "fill 1 only"),
        (["--length-law", "lognormal", "--fill", "1"], "attainable: (0, 0.95]"),
        (["--num-items", "4"], "at most one category per item"),
        (["--ctr", "1"], "in (0, 1)"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, arguments, text):
    defaults = ["--output", str(tmp_path / "d"), "--samples", "10", "--eval-samples", "10", "--quiet"]
    with pytest.raises(SystemExit) as stop:
        from data.cli import run

        run(lambda: synthesize.main(defaults + arguments))
    error = capsys.readouterr().err
    assert stop.value.code in (1, 2) and text in error and "Traceback" not in error
    assert len(error[error.index("error:") :].splitlines()) == 1
    assert not (tmp_path / "d").exists() and os.listdir(tmp_path) == []


def test_command_line(tmp_path):
    done = command("--output", tmp_path / "d", "--samples", 500, "--eval-samples", 100, "--max-length", 32)
    assert done.returncode == 0, done.stderr
    assert "events/s" in done.stdout and "500" in done.stdout
    assert "synthesize: 600/600 rows (100 %)" in done.stderr
    manifest = validate(tmp_path / "d")
    assert manifest["event_types"]["click"]["max_length"] == 8 and "--max-length 32" in manifest["command"]
