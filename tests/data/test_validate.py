"""data.validate: a good dataset passes; each kind of damage is one clear line and exit code 1."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.manifest import DataError
from data.parquet_io import sha256
from data.synthesize import Parameters, synthesize
from data.validate import validate

ROOT = Path(__file__).parents[2]
SHARD = "train-00000.parquet"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("validate") / "good"
    synthesize(Parameters(200, 50, max_length=32, click_max_length=8, conversion_max_length=4), str(path), quiet=True)
    return path


@pytest.fixture
def dataset(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "set"))


def edit_manifest(dataset, change):
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edit_column(dataset, name, change, shard=SHARD):
    """Rewrites one column (its values as a list) and the manifest's size and digest: only the content is wrong."""
    path = dataset / shard
    table = pq.read_table(path)
    values = table[name].to_pylist()
    change(values)
    index = table.schema.get_field_index(name)
    table = table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    resign(dataset, table, shard)


def resign(dataset, table, shard=SHARD):
    path = dataset / shard
    pq.write_table(table, path)

    def update(manifest):
        for split in manifest["splits"].values():
            for entry in split["shards"]:
                if entry["file"] == shard:
                    entry |= {"bytes": path.stat().st_size, "sha256": sha256(path), "rows": len(table)}

    edit_manifest(dataset, update)


def test_good(good):
    assert validate(good)["splits"]["train"]["rows"] == 200


def test_truncated_shard_is_one_line_and_exit_code_1(dataset):
    path = dataset / SHARD
    path.write_bytes(path.read_bytes()[:-100])
    done = subprocess.run(
        [sys.executable, "-m", "data.validate", str(dataset)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{SHARD}: truncated" in done.stderr


def test_flipped_byte(dataset):
    path = dataset / SHARD
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{SHARD}: corrupt, its SHA-256"):
        validate(dataset)


def test_garbage_with_a_matching_digest(dataset):
    path = dataset / SHARD
    path.write_bytes(b"PAR1 this is no parquet file PAR1")

    def sign(manifest):
        manifest["splits"]["train"]["shards"][0] |= {"bytes": path.stat().st_size, "sha256": sha256(path)}

    edit_manifest(dataset, sign)
    with pytest.raises(DataError, match=f"{SHARD}: corrupt Parquet"):
        validate(dataset)


def test_missing_shard(dataset):
    (dataset / SHARD).unlink()
    with pytest.raises(DataError, match="no such file"):
        validate(dataset)


def test_unlisted_shard(dataset):
    shutil.copy(dataset / SHARD, dataset / "train-00001.parquet")
    with pytest.raises(DataError, match=r"train-00001\.parquet: is not in the manifest"):
        validate(dataset)


def longest(values):
    return max(range(len(values)), key=lambda row: len(values[row]))


def set_first(value):
    def change(values):
        values[longest(values)][0] = value

    return change


def late(values):
    values[longest(values)][-1] = 2**40


def descending(values):
    values[longest(values)].reverse()


def one_more(values):
    values[0] = values[0] + [0]


def all_clicks(values):
    values[:] = [0] * len(values)


def some_conversion(values):
    values[:] = [1] * len(values)


@pytest.mark.parametrize(
    "column,change,text",
    [
        ("sparse_item", set_first(500), r"'sparse_item', row \d+: id 500 at position 0; allowed: 0..499"),
        ("impression_item", set_first(-1), r"'impression_item', row \d+: id -1 at position 0"),
        ("click_action", set_first(3), r"id 3 at position 0; allowed: 0..2"),
        ("impression_time", late, r"'impression_time', row \d+: the last event is at or after"),
        ("impression_time", descending, "event times descend"),
        ("click_action", one_more, r"'click_action', row 0: \d+ events where click_item has"),
        ("impression_item", lambda v: v.__setitem__(0, [0] * 33), "33 events"),
        ("dense", lambda v: v[7].pop(), "'dense', row 7: 7 values; num_dense is 8"),
        ("dense", lambda v: v[7].__setitem__(2, float("nan")), "'dense', row 7: a value is not finite"),
        ("click", lambda v: v.__setitem__(4, 2), "'click', row 4: label 2; allowed: 0, 1"),
        ("conversion", some_conversion, "a conversion without a click"),
        ("timestamp", lambda v: v.__setitem__(9, 2**33), "'timestamp', row 10: is earlier than the sample before"),
        ("sample_id", lambda v: v.__setitem__(9, 3), "'sample_id', row 9: 3 does not exceed"),
        ("bayes_ctr", lambda v: v.__setitem__(2, 1.5), "'bayes_ctr', row 2: probability 1.5"),
        ("user_id", lambda v: v.__setitem__(2, None), "'user_id' holds a null"),
    ],
)
def test_bad_content(dataset, column, change, text):
    edit_column(dataset, column, change)
    with pytest.raises(DataError, match=text):
        validate(dataset)


def test_eval_must_follow_train(dataset):
    edit_column(dataset, "timestamp", lambda v: v.__setitem__(0, v[0] - 10**9), shard="eval-00000.parquet")
    with pytest.raises(DataError, match=r"eval-00000\.parquet: column 'timestamp', row 0"):
        validate(dataset)


def test_schema(dataset):
    table = pq.read_table(dataset / SHARD)
    resign(dataset, table.drop_columns(["click_time"]))
    with pytest.raises(DataError, match="column 'click_time' is missing"):
        validate(dataset)
    resign(dataset, table.append_column("extra", pa.array([0] * len(table))))
    with pytest.raises(DataError, match="column 'extra' is not in the manifest"):
        validate(dataset)
    resign(dataset, table.set_column(table.schema.get_field_index("click"), "click", table["click"].cast(pa.int64())))
    with pytest.raises(DataError, match="column 'click' is int64; it must be int8"):
        validate(dataset)


def test_counts(dataset):
    edit_manifest(dataset, lambda m: m["splits"]["eval"].__setitem__("rows", 51))
    with pytest.raises(DataError, match="eval have 50 rows, the manifest says 51"):
        validate(dataset)
    edit_manifest(dataset, lambda m: m["splits"]["eval"].__setitem__("rows", 50))
    edit_manifest(dataset, lambda m: m["splits"]["train"]["events"].__setitem__("click", 1))
    with pytest.raises(DataError, match="click events, the manifest says 1"):
        validate(dataset)


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda m: m.pop("tasks"), "key 'tasks' is missing"),
        (lambda m: m.__setitem__("format", 2), "format is 2; this version reads 1"),
        (lambda m: m.__setitem__("tasks", ["cvr"]), "tasks is"),
        (lambda m: m.__setitem__("num_dense", -1), "num_dense is -1"),
        (
            lambda m: m["event_types"]["click"].__setitem__("num_items", 3),
            "num_items is 3, sparse feature item has 500",
        ),
        (lambda m: m["splits"].pop("eval"), "exactly train and eval"),
        (lambda m: m["splits"]["eval"]["shards"][0].__setitem__("file", "../x.parquet"), "plain file name"),
    ],
)
def test_bad_manifest(dataset, change, text):
    edit_manifest(dataset, change)
    with pytest.raises(DataError, match=text):
        validate(dataset)


def test_no_dataset(tmp_path):
    with pytest.raises(DataError, match="no such dataset folder"):
        validate(tmp_path / "none")
    with pytest.raises(DataError, match=r"no manifest\.json"):
        validate(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not readable as JSON"):
        validate(tmp_path)
