"""data.import_log: no leakage (checked against a loop), ties, unseen ids, ways to name columns, errors."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data import import_log
from data.import_log import Source, number_actions, split_point
from data.manifest import DataError
from data.validate import validate

ROOT = Path(__file__).parents[2]
MOVIELENS = Path(os.environ.get("GEM_ML100K", ROOT.parent / "shared" / "data" / "ml-100k-u.data"))


def write_log(path, rows=600, users=25, items=40, times=150, seed=0):
    """Many ties in time and repeated items; returns the lines as written, not in time order."""
    rng = np.random.default_rng(seed)
    lines = [
        (f"u{rng.integers(users)}", f"i{rng.integers(items)}", int(rng.integers(1, 6)), 1000 + int(rng.integers(times)))
        for _ in range(rows)
    ]
    path.write_text("user,item,rating,time\n" + "".join(",".join(map(str, line)) + "\n" for line in lines))
    return lines


def rows_of(directory, split):
    return [
        row for file in sorted(Path(directory).glob(f"{split}-*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_histories_against_a_loop(tmp_path):
    lines = write_log(tmp_path / "log.csv")
    source = Source(tmp_path / "log.csv", positive_at_least=4)
    manifest = import_log.import_log(source, tmp_path / "d", eval_share=0.2, max_length=9, quiet=True)
    assert validate(tmp_path / "d") == manifest and manifest["tasks"] == ["ctr"] and manifest["bayes"] is None
    ordered = sorted(lines, key=lambda line: line[3])  # stable, as the importer's
    train, held = rows_of(tmp_path / "d", "train"), rows_of(tmp_path / "d", "eval")
    assert len(train) + len(held) == 600 and train[-1]["timestamp"] < held[0]["timestamp"]
    ids = {}
    for _, item, _, _ in ordered[: len(train)]:
        ids.setdefault(item, len(ids) + 1)
    for row, (user, item, rating, when) in zip(train + held, ordered, strict=True):
        before = [line for line in ordered if line[0] == user and line[3] < when]
        for event, events in (("history", before), ("positive", [line for line in before if line[2] >= 4])):
            events = events[-9:]
            assert row[f"{event}_item"] == [ids.get(line[1], 0) for line in events]
            assert row[f"{event}_time"] == [line[3] for line in events]
            assert row[f"{event}_action"] == [line[2] - 1 for line in events]
        assert row["click"] == (rating >= 4) and row["conversion"] == 0
        assert row["timestamp"] == when and row["sparse_item"] == [ids.get(item, 0)]


def test_features_do_not_see_the_present_or_the_future(tmp_path):
    """Changing every rating from a time on leaves all features of the samples up to that time as they were."""
    lines = sorted(write_log(tmp_path / "a.csv"), key=lambda line: line[3])
    cut = lines[500][3]
    changed = [(u, i, r if t < cut else 6 - r, t) for u, i, r, t in lines]
    for name, content in (("a", lines), ("b", changed)):
        text = "user,item,rating,time\n" + "".join(",".join(map(str, line)) + "\n" for line in content)
        (tmp_path / f"{name}.csv").write_text(text)
        source = Source(tmp_path / f"{name}.csv", positive_at_least=4)
        # Train ends before the cut, so that its mean and deviation are the same in both.
        import_log.import_log(source, tmp_path / name, eval_share=0.3, quiet=True)
    seen = 0
    for split in ("train", "eval"):
        for one, two in zip(rows_of(tmp_path / "a", split), rows_of(tmp_path / "b", split), strict=True):
            if one["timestamp"] <= cut:
                ignored = {"click"} if one["timestamp"] == cut else set()
                assert {k: v for k, v in one.items() if k not in ignored} == {
                    k: v for k, v in two.items() if k not in ignored
                }
                seen += 1
    assert seen > 500


def test_unseen_ids_are_zero_in_samples_and_histories(tmp_path):
    lines = [f"u{k % 3},i{k % 5},5,{k}\n" for k in range(100)] + [f"new,late{k},5,{200 + k}\n" for k in range(10)]
    (tmp_path / "log.csv").write_text("user,item,rating,time\n" + "".join(lines))
    source = Source(tmp_path / "log.csv", positive_at_least=4)
    manifest = import_log.import_log(source, tmp_path / "d", eval_share=10 / 110, quiet=True)
    assert (
        manifest["sparse_features"]["user"]["num_embeddings"] == 4
        and manifest["sparse_features"]["item"]["num_embeddings"] == 6
    )
    held = rows_of(tmp_path / "d", "eval")
    assert [row["sparse_user"] + row["sparse_item"] for row in held] == [[0, 0]] * 10
    assert held[9]["history_item"] == [0] * 9 and len({row["user_id"] for row in held}) == 1


@pytest.mark.parametrize(
    "times,share,expected",
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.2, 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 8, 10], 0.2, 9),  # the tie at the border stays in train
        ([1, 2, 3, 3, 3, 3, 3, 3, 3, 3], 0.2, 10),  # nothing is left for eval: the caller's error
        ([1, 2], 0.9, 0),
    ],
)
def test_split_point(times, share, expected):
    assert split_point(np.array(times), share) == expected


def test_actions_are_levels_or_quantile_bins():
    actions, count = number_actions(np.array([1.0, 5.0, 3.0, 4.0, 0.0]), 3)
    assert count == 3 and actions.tolist() == [0, 2, 1, 1, 0]
    actions, count = number_actions(np.random.default_rng(0).normal(size=1000), 900)
    assert count == 16 and np.bincount(actions).min() > 40


def test_ways_to_name_columns(tmp_path):
    lines = write_log(tmp_path / "a.csv")
    digests = []
    separators = {"\t": "tab", "::": "colons", ";": "semicolon"}
    for separator, name in separators.items():
        text = "".join(separator.join(map(str, (line[3], line[0], "x", line[1], line[2]))) + "\n" for line in lines)
        (tmp_path / f"{name}.log").write_text(text)
        named = Source(
            tmp_path / f"{name}.log", positive_at_least=4, columns=("time", "user", "junk", "item", "rating")
        )
        placed = Source(tmp_path / f"{name}.log", "1", "3", "0", rating="4", positive_at_least=4, header=False)
        for source in (named, placed):
            manifest = import_log.import_log(source, tmp_path / "d", quiet=True)
            digests.append([s["sha256"] for split in manifest["splits"].values() for s in split["shards"]])
    first = import_log.import_log(Source(tmp_path / "a.csv", positive_at_least=4), tmp_path / "d", quiet=True)
    digests.append([s["sha256"] for split in first["splits"].values() for s in split["shards"]])
    assert all(digest == digests[0] for digest in digests)


def test_label_column_and_further_features(tmp_path):
    rng = np.random.default_rng(1)
    text = "who,what,when,bought,device\n"
    text += "".join(f"{rng.integers(9)},{rng.integers(9)},{k},{rng.integers(2)},{'ab'[k % 2]}\n" for k in range(200))
    (tmp_path / "log.csv").write_text(text)
    source = Source(tmp_path / "log.csv", "who", "what", "when", label="bought", features=("device",))
    manifest = import_log.import_log(source, tmp_path / "d", quiet=True)
    validate(tmp_path / "d")
    assert manifest["sparse_features"]["device"] == {"num_embeddings": 3, "pooling": "mean"}
    assert manifest["event_types"]["history"]["num_actions"] == 2
    clicks = [row["click"] for split in ("train", "eval") for row in rows_of(tmp_path / "d", split)]
    assert clicks == [int(line.split(",")[3]) for line in text.splitlines()[1:]]


@pytest.mark.parametrize(
    "content,arguments,text",
    [
        (None, [], "no such file"),
        ("user,item,rating,time\n" + "a,b,3,4\n" * 5, [], "5 rows; at least 100 are needed"),
        (
            "user,item,rating,time\n" + "a,b,3,4\n" * 200,
            [],
            "1 different times leave train with 200 rows and eval with 0",
        ),
        ("user,item,rating,time\n" + "a,b,3,4\n" * 200, ["--user", "customer"], "no column 'customer' for --user"),
        ("user,item,rating,time\n" + "a,b,3,4\n" * 200, ["--features", "color"], "no column 'color' for --features"),
        (
            "user,item,rating,time\n" + "a,b,3,4\n" * 200,
            ["--columns", "user,item"],
            "--columns names 2 columns, the file has 4",
        ),
        ("user,item,rating,time\na,b,3,4\na,b,3,soon\n", [], "row 2: --time is 'soon'; it must be a number"),
        ("user,item,rating,time\na,b,3,4\na,,3,5\n", [], "row 2: item is empty"),
        ("user,item,rating,time\na,b,3,4\n", ["--label", "rating", "--positive-at-least", ""], "--positive-at-least"),
        ("abc\n", [], "give --separator"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, content, arguments, text):
    from data.cli import run

    if content is not None:
        (tmp_path / "log.csv").write_text(content)
    base = ["--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "d"), "--positive-at-least", "4"]
    with pytest.raises(SystemExit) as stop:
        run(lambda: import_log.main(base + arguments))
    error = capsys.readouterr().err
    assert stop.value.code in (1, 2) and text in error and "Traceback" not in error
    assert len(error[error.index("error:") :].splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"log.csv"}


def test_what_is_positive_must_be_said(tmp_path):
    write_log(tmp_path / "log.csv")
    with pytest.raises(DataError, match="--positive-at-least is missing"):
        import_log.import_log(Source(tmp_path / "log.csv"), tmp_path / "d", quiet=True)
    with pytest.raises(DataError, match=r"label is [2-5]; allowed: 0, 1"):
        import_log.import_log(Source(tmp_path / "log.csv", label="rating"), tmp_path / "d", quiet=True)


@pytest.mark.skipif(
    not MOVIELENS.is_file(), reason=f"{MOVIELENS.name} is absent; set GEM_ML100K to MovieLens-100k's u.data"
)
def test_movielens(tmp_path):
    command = [sys.executable, "-m", "data.import_log", "--input", MOVIELENS, "--output", tmp_path / "d"]
    command += ["--columns", "user,item,rating,time", "--positive-at-least", "4"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = validate(tmp_path / "d")
    assert sum(split["rows"] for split in manifest["splits"].values()) == 100_000
    users = {
        user
        for split in ("train", "eval")
        for user in pq.read_table(tmp_path / "d" / f"{split}-00000.parquet")["user_id"].to_pylist()
    }
    assert len(users) == 943
    clicks = sum(
        pq.read_table(tmp_path / "d" / f"{split}-00000.parquet")["click"].to_numpy().sum()
        for split in ("train", "eval")
    )
    assert clicks == 55_375
