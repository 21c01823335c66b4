"""Batches for timing a training step: a data set of a tier's length law in memory, with tables of production's order.

Values are drawn, not generated from the label law of `data.synthesize`: a step's time depends on lengths, on table
sizes and on how often ids repeat, and these follow the tier's data section and Zipf's law. Items, actions, times and
labels have the columns of a real data set, so that batches come out of the same reader and the same balancing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.lengths import LengthLaw
from data.parquet_io import fixed_lists, lists
from gem.dataset import CANDIDATE, Schema, Split
from gem.summary import synthetic_schema

CLICK_RATE, CONVERSION_RATE = 0.2, 0.3
NOW = 1_700_000_000


def schema_of(data: dict, table_rows: int) -> Schema:
    """Schema of the synthesiser with `table_rows` items and a tenth as many users.

    data: a tier's section `data`. The item table is shared by the histories and the impression's own item.
    """
    schema = synthetic_schema(data)
    sizes = {CANDIDATE: table_rows, "user": max(1, table_rows // 10)}
    sparse = {name: (sizes.get(name, size), pooling) for name, (size, pooling) in schema.sparse.items()}
    events = tuple(dataclasses.replace(event, num_items=table_rows) for event in schema.events)
    return dataclasses.replace(schema, name="in_memory", sparse=sparse, events=events)


def zipf_ids(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [count] in [0, size): popularity 1 / rank, popular ids scattered over the table."""
    rank = np.minimum(np.exp(rng.random(count) * np.log(size)).astype(np.int64), size) - 1
    return (rank * 2_654_435_761 + 12_345) % size  # a large prime scatters neighbours in rank


class MemorySplit(Split):
    """A split whose rows were drawn instead of read.

    schema: sizes. rows: samples. data: a tier's section `data` (length law, fill, cv). lengths: event -> int64 [rows]
    instead of drawn ones, for checks that need certain lengths.
    """

    def __init__(
        self, schema: Schema, rows: int, data: dict, seed: int = 0, lengths: dict[str, np.ndarray] | None = None
    ):
        self.directory, self.split, self.manifest = Path("in_memory"), "train", {}
        self.schema, self.num_rows = schema, rows
        self._load(_table(schema, rows, data, np.random.default_rng([seed, rows]), lengths or {}))


def _table(schema: Schema, rows: int, data: dict, rng: np.random.Generator, given: dict[str, np.ndarray]) -> pa.Table:
    columns = {"timestamp": pa.array(np.full(rows, NOW, np.int64))}
    for name, (size, _) in schema.sparse.items():
        counts = rng.integers(0, 4, rows) if name == "tag" else np.ones(rows, np.int64)
        columns[f"sparse_{name}"] = lists(zipf_ids(int(counts.sum()), size, rng), counts)
    columns["dense"] = fixed_lists(rng.standard_normal((rows, schema.num_dense)).astype(np.float32))
    # one activity a user, so that long histories are long in every event type, as in traffic
    activity = np.argsort(rng.random(rows))
    for event in schema.events:
        law = LengthLaw(data["length_law"], event.max_length, float(data["fill"]), float(data["length_cv"]))
        lengths = given[event.name] if event.name in given else np.sort(law.sample(rows, rng))[activity]
        total = int(lengths.sum())
        columns[f"{event.name}_item"] = lists(zipf_ids(total, event.num_items, rng), lengths)
        columns[f"{event.name}_action"] = lists(rng.integers(0, event.num_actions, total), lengths)
        gap = np.exp(rng.uniform(np.log(30.0), np.log(3600.0), rows)).astype(np.int64)
        ends = np.cumsum(lengths)
        newest_first = np.repeat(ends, lengths) - np.arange(total)  # 1 is the newest event
        columns[f"{event.name}_time"] = lists(NOW - np.repeat(gap, lengths) * newest_first, lengths)
    click = (rng.random(rows) < CLICK_RATE).astype(np.int8)
    columns["click"] = pa.array(click)
    columns["conversion"] = pa.array(click * (rng.random(rows) < CONVERSION_RATE).astype(np.int8))
    return pa.table(columns)


def draft(schema: Schema, settings: dict, data: dict, seed: int = 0, *, padded: bool = False) -> MemorySplit:
    """One batch to compile on while others compile: whole in samples, small in events.

    settings: a tier's section `step`. The compiler takes sizes it meets first for usual, and what it derives from them
    holds for a range: with few samples it would compile what works on samples once more for a whole batch. So there are
    `batch` samples, of which `draft` have histories of real lengths and the others none. padded: something in the model
    pads every sample to the longest, as GDPA in plain torch does; then there are four times `draft` samples.
    """
    full = min(settings["draft"], settings["batch"])
    rows = min(4 * full, settings["batch"]) if padded else settings["batch"]
    rng = np.random.default_rng([seed, full])
    lengths = {}
    for event in schema.events:
        law = LengthLaw(data["length_law"], event.max_length, float(data["fill"]), float(data["length_cv"]))
        lengths[event.name] = np.zeros(rows, np.int64)
        lengths[event.name][:full] = law.sample(full, rng)
    return MemorySplit(schema, rows, data, seed, lengths)
