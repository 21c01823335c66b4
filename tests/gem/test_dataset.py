"""The loader: every value where it belongs, the last events kept, bad data named in one line."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem import dataset
from gem.dataset import Split, check_ids, checked_kjt
from gem.sampler import batch_rows
from tests.gem import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data") / "d", shards=3)


def test_batches_hold_the_rows_values(folder):
    split, raw = Split(folder, "train"), tiny.columns(64, 1)
    rows = np.array([5, 0, 63, 17, 5])
    batch = split.batch(rows)
    assert batch.size == 5 and batch.sparse.keys() == list(tiny.SPARSE)
    for name in tiny.SPARSE:
        ids = batch.sparse[name].to_dense()
        assert [x.tolist() for x in ids] == [raw[f"sparse_{name}"][r] for r in rows]
    candidate = batch.sequence["item"].to_dense()
    assert [x.tolist() for x in candidate] == [raw["sparse_item"][r] for r in rows]
    for event, (_, _, longest) in tiny.EVENTS.items():
        for part in ("item", "action"):
            values = batch.sequence[f"{event}_{part}"].to_dense()
            assert [x.tolist() for x in values] == [raw[f"{event}_{part}"][r][-longest:] for r in rows]
        lengths = [len(raw[f"{event}_item"][r][-longest:]) for r in rows]
        assert batch.lengths[event].tolist() == lengths and batch.longest[event] == max(lengths)
        ages = [raw["timestamp"][r] - t for r in rows for t in raw[f"{event}_time"][r][-longest:]]
        assert batch.ages[event].tolist() == ages
    assert batch.labels["ctr"].tolist() == [raw["click"][r] for r in rows]
    assert (
        batch.weights["cvr"].tolist() == [raw["click"][r] for r in rows] and batch.weights["ctr"].tolist() == [1.0] * 5
    )
    np.testing.assert_array_equal(batch.dense.numpy(), np.array(raw["dense"], np.float32)[rows])


def test_truncation_keeps_the_last_events(tmp_path):
    data = tiny.columns(4, 3)
    data["click_item"][1], data["click_action"][1] = list(range(9)), [0] * 9
    data["click_time"][1] = [data["timestamp"][1] - 90 + 10 * i for i in range(9)]
    split = Split(tiny.write(tmp_path / "d", {"train": data, "eval": data}), "train")
    batch = split.batch(np.array([1]))
    assert batch.sequence["click_item"].values().tolist() == [4, 5, 6, 7, 8]
    assert batch.ages["click"].tolist() == [50, 40, 30, 20, 10]


def test_no_python_loop_over_rows(folder, tmp_path):
    """The number of Python calls does not depend on the number of rows."""

    def calls(rows):
        split, count = Split(tiny.dataset(tmp_path / str(rows), rows=rows), "train"), 0

        def tick(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(tick)
        try:
            split.batch(np.arange(rows))
        finally:
            sys.setprofile(None)
        return count

    assert calls(256) == calls(16)


def test_order_is_a_function_of_seed_and_epoch(folder):
    split = Split(folder, "train")

    def order(seed, epoch, start=0, balance="none"):
        return [batch.sparse["user"].values().tolist() for batch in split.epoch(8, seed, epoch, balance, start)]

    assert order(0, 0) == order(0, 0) and len(order(0, 0)) == 8
    assert order(0, 0) != order(1, 0) and order(0, 0) != order(0, 1)
    assert order(0, 1, start=5) == order(0, 1)[5:]
    assert order(0, 0, balance="bbs") == order(0, 0, balance="bbs")


@pytest.mark.parametrize("balance", ["none", "local", "bbs"])
def test_batches_use_each_row_at_most_once_and_balancing_evens_them(balance):
    lengths = np.random.default_rng(0).lognormal(3, 1.0, 2048).astype(int)
    rows = batch_rows(lengths, 64, 0, 0, balance)
    assert rows.shape == (32, 64) and len(np.unique(rows)) == rows.size
    loads, plain = lengths[rows].sum(1), lengths[batch_rows(lengths, 64, 0, 0)].sum(1)
    if balance != "none":
        assert loads.std() < 0.6 * plain.std()


def test_too_few_rows_and_unknown_balance():
    with pytest.raises(ValueError, match="too few rows: 5 rows do not fill one batch of 8"):
        batch_rows(np.ones(5), 8, 0, 0)
    with pytest.raises(ValueError, match="unknown value 'best'; allowed: none, local, bbs"):
        batch_rows(np.ones(16), 8, 0, 0, "best")
    with pytest.raises(ValueError, match="batch size 12 is not divisible"):
        batch_rows(np.ones(24), 12, 0, 0, "bbs")


@pytest.mark.parametrize("bad", [10, -1, 2**31])
def test_ids_out_of_range_name_table_position_id_and_size(bad):
    check_ids("item", np.array([0, 9]), 10)
    with pytest.raises(ValueError, match=rf"table 'item': id {bad} at position 1 is out of range; allowed: 0\.\.9"):
        check_ids("item", torch.tensor([9, bad, 3]), 10)


@pytest.mark.parametrize(("column", "bad"), [("sparse_user", 20), ("click_item", 30), ("impression_action", -1)])
def test_ids_out_of_range_in_a_file(tmp_path, column, bad):
    data = tiny.columns(8, 4)
    row = next(i for i, values in enumerate(data[column]) if values)
    data[column][row][0] = bad
    with pytest.raises(ValueError, match=rf"table '{column.removeprefix('sparse_')}': id {bad} at position"):
        Split(tiny.write(tmp_path / "d", {"train": data, "eval": data}), "train")


def test_kjt_out_of_step():
    with pytest.raises(ValueError, match="lengths count 8 is not a multiple of 3 keys"):
        checked_kjt(["a", "b", "c"], torch.arange(8), torch.ones(8, dtype=torch.int64))
    keys = list("abcdefg")
    lengths = torch.tensor([1, 1, 1, 1, 1, 0, 1])  # the sixth feature's lengths are lost, its values are not
    with pytest.raises(ValueError, match="sum of lengths 6 differs from value count 7"):
        checked_kjt(keys, torch.arange(7), lengths)
    with pytest.raises(ValueError, match="negative length -1 at 1"):
        checked_kjt(["a"], torch.arange(1), torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="unique"):
        checked_kjt(["a", "a"], torch.arange(2), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"table 'b': id 5 at position 0 .* 0\.\.4"):
        checked_kjt(["a", "b"], torch.tensor([5, 5]), torch.tensor([1, 1]), sizes={"a": 6, "b": 5})


def test_kjt_lengths_and_offsets_must_agree():
    values = torch.arange(3)
    with pytest.raises(ValueError, match="lengths and offsets contradict each other"):
        checked_kjt(["a"], values, torch.tensor([2, 1, 0]), torch.tensor([0, 1, 3, 3]))
    with pytest.raises(ValueError, match="neither lengths nor offsets"):
        checked_kjt(["a"], values)
    both = checked_kjt(["a"], values, torch.tensor([2, 1, 0]), torch.tensor([0, 2, 3, 3]))
    alone = checked_kjt(["a"], values, offsets=torch.tensor([0, 2, 3, 3]))
    assert both.lengths().tolist() == alone.lengths().tolist() == [2, 1, 0]


def test_kjt_round_trip_to_dict_and_back():
    made = checked_kjt(["a", "b"], torch.arange(6), torch.tensor([2, 0, 1, 3]))
    back = KeyedJaggedTensor.from_jt_dict(made.to_dict())
    assert back.keys() == made.keys()
    assert torch.equal(back.values(), made.values()) and torch.equal(back.lengths(), made.lengths())


def test_imported_logs_have_other_names_and_no_conversion(tmp_path):
    shape = {"events": {"rating": (9, 5, 6)}, "sparse": {"user": 4, "item": 9}, "tasks": ("ctr",), "num_dense": 0}
    split = Split(tiny.dataset(tmp_path / "d", **shape), "eval")
    assert split.schema.tasks == ("ctr",) and split.schema.has_candidate
    batch = next(split.in_order(16))
    assert batch.sequence.keys() == ["item", "rating_item", "rating_action"]
    assert batch.dense.shape == (16, 0) and set(batch.labels) == {"ctr"} and batch.bayes == {}
    assert sum(batch.size for batch in split.in_order(16)) == split.num_rows == 40


def test_missing_and_damaged_datasets(tmp_path):
    def fails(folder, words):
        with pytest.raises(ValueError, match=words) as info:
            Split(folder, "train")
        assert "\n" not in str(info.value)

    fails(tmp_path / "absent", "no manifest.json")
    folder = tiny.dataset(tmp_path / "d")
    shard, manifest = folder / "train-00000.parquet", folder / "manifest.json"
    whole, text = shard.read_bytes(), manifest.read_text()
    shard.write_bytes(whole[: len(whole) // 2])
    fails(folder, "train-00000.parquet is unreadable")
    shard.unlink()
    fails(folder, "train-00000.parquet is missing")
    shard.write_bytes(whole)
    entry = json.loads(text)
    entry["splits"]["train"]["shards"][0]["rows"] = 65
    manifest.write_text(json.dumps(entry))
    fails(folder, "has 64 rows, the manifest says 65")
    entry = json.loads(text)
    entry["event_types"]["view"] = entry["event_types"].pop("click")
    manifest.write_text(json.dumps(entry))
    fails(folder, "column 'view_item' is missing")
    del entry["tasks"]
    manifest.write_text(json.dumps(entry))
    fails(folder, "key 'tasks' is missing")
    manifest.write_text("{")
    fails(folder, "unreadable")
    manifest.write_text('{"format": 2}')
    fails(folder, "format 2; this version reads format 1")


def test_inconsistent_columns(tmp_path):
    data = tiny.columns(8, 5)
    data["click_action"][3] = data["click_action"][3] + [0]
    with pytest.raises(ValueError, match="click_item and click_action differ in lengths"):
        Split(tiny.write(tmp_path / "a", {"train": data, "eval": data}), "train")
    data = tiny.columns(8, 5)
    row = next(i for i, values in enumerate(data["click_time"]) if values)
    data["click_time"][row][-1] = data["timestamp"][row] + 5
    with pytest.raises(ValueError, match="a click event lies after its impression"):
        Split(tiny.write(tmp_path / "b", {"train": data, "eval": data}), "train")
    data = tiny.columns(8, 5)
    data["dense"][2] = [1.0]
    with pytest.raises(ValueError, match="row 2 has 1 dense values, not 3"):
        Split(tiny.write(tmp_path / "c", {"train": data, "eval": data}), "train")


def test_lengths_for_balancing_are_those_the_model_reads(folder):
    split = Split(folder, "train")
    batch = split.batch(np.arange(split.num_rows))
    assert split.sequence_lengths().tolist() == sum(batch.lengths.values()).tolist()


def test_gather_index_on_empty_input():
    index, lengths = dataset.gather_index(np.array([0, 2, 2]), np.array([], dtype=np.int64), None)
    assert index.size == 0 and lengths.size == 0
