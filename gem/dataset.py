"""Parquet shards -> batches of KeyedJaggedTensor, without a Python loop over rows.

Everything is built from the dataset's manifest: names, table sizes, event types, tasks. A split is held in memory as
packed columns (values and offsets, as Parquet lists have them); a batch is gathered from them with vectorised index
arithmetic. Histories longer than the event type's max_length keep their LAST events, the ones nearest to the
impression.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem.sampler import batch_rows
from kernels import jagged

CANDIDATE = "item"  # the sparse feature whose ids share the event types' item vocabulary


@dataclass(frozen=True)
class EventSchema:
    """One event type: vocabulary sizes and the longest history that the model reads."""

    name: str
    num_items: int
    num_actions: int
    max_length: int


@dataclass(frozen=True)
class Schema:
    """What a model needs to know of a dataset. sparse: name -> (num_embeddings, pooling)."""

    name: str
    num_dense: int
    sparse: dict[str, tuple[int, str]]
    events: tuple[EventSchema, ...]
    tasks: tuple[str, ...]

    @property
    def has_candidate(self) -> bool:
        """Whether the impression's own item can be looked up in the events' item table."""
        return CANDIDATE in self.sparse and all(e.num_items == self.sparse[CANDIDATE][0] for e in self.events)

    @property
    def history_tables(self) -> dict[str, tuple[int, list[str]]]:
        """Tables of the histories: name -> (num_embeddings, features that look them up), the candidate first.

        Batches hold the features in this order, so that those of one table lie side by side.
        """
        by_size: dict[int, list[str]] = {}
        for event in self.events:
            by_size.setdefault(event.num_items, []).append(f"{event.name}_item")
        if self.has_candidate and self.events:
            by_size[self.sparse[CANDIDATE][0]].insert(0, CANDIDATE)
        tables = {f"table_items_{size}": (size, names) for size, names in by_size.items()}
        return tables | {f"table_{e.name}_action": (e.num_actions, [f"{e.name}_action"]) for e in self.events}

    @staticmethod
    def from_manifest(manifest: dict) -> Schema:
        try:
            return Schema(
                name=str(manifest["name"]),
                num_dense=int(manifest["num_dense"]),
                sparse={k: (int(v["num_embeddings"]), v["pooling"]) for k, v in manifest["sparse_features"].items()},
                events=tuple(
                    EventSchema(k, int(v["num_items"]), int(v["num_actions"]), int(v["max_length"]))
                    for k, v in manifest["event_types"].items()
                ),
                tasks=tuple(manifest["tasks"]),
            )
        except KeyError as error:
            raise ValueError(f"manifest: key {error.args[0]!r} is missing") from None


def load_manifest(directory: str | Path) -> dict:
    """manifest.json of a dataset; a missing or unreadable one is a ValueError of one line."""
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise ValueError(
            f"dataset {directory}: no manifest.json there; make one with data.synthesize or data.import_log"
        )
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset {directory}: manifest.json is unreadable ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"dataset {directory}: manifest format {found!r}; this version reads format 1")
    return manifest


def checked_kjt(
    keys: list[str],
    values: torch.Tensor,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    *,
    sizes: dict[str, int] | None = None,
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor whose keys, lengths, offsets and ids have been checked against each other.

    values [total] integer ids, key-major; lengths [num_keys * batch] or offsets [num_keys * batch + 1], or both if they
    agree. sizes: key -> number of rows of its table; ids must be in [0, size). ValueError names what is out of step.
    """
    if lengths is None and offsets is None:
        raise ValueError("keyed jagged tensor: neither lengths nor offsets given; one of them is needed")
    if offsets is not None:
        if offsets.numel() == 0 or int(offsets[0]) != 0:
            raise ValueError("keyed jagged tensor: offsets must start with 0")
        derived = offsets[1:] - offsets[:-1]
        if lengths is not None and not torch.equal(derived.to(torch.int64), lengths.to(torch.int64)):
            raise ValueError(
                "keyed jagged tensor: lengths and offsets contradict each other: lengths "
                f"{lengths.tolist()[:8]}, from offsets {derived.tolist()[:8]}"
            )
        lengths = derived
    if len(set(keys)) != len(keys) or not keys:
        raise ValueError(f"keyed jagged tensor: keys must be unique and not empty, got {keys}")
    if lengths.numel() % len(keys):
        raise ValueError(
            f"keyed jagged tensor: lengths count {lengths.numel()} is not a multiple of {len(keys)} keys {keys}"
        )
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"keyed jagged tensor: negative length {int(lengths.min())} at {int(lengths.argmin())}")
    total = int(lengths.sum())
    if total != values.numel():
        raise ValueError(f"keyed jagged tensor: sum of lengths {total} differs from value count {values.numel()}")
    per_key = lengths.view(len(keys), -1).sum(1).tolist()
    if sizes is not None:
        start = 0
        for key, count in zip(keys, per_key, strict=True):
            check_ids(key, values[start : start + count], sizes[key])
            start += count
    # known here, so that splitting by key needs no look at the device later
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, length_per_key=per_key)


def check_ids(table: str, ids: torch.Tensor | np.ndarray, size: int) -> None:
    """ValueError naming table, position, id and size if an id is outside [0, size). Nothing is clamped or wrapped."""
    if len(ids) == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        bad = (ids < 0) | (ids >= size)
        position = int(bad.nonzero()[0][0])
        raise ValueError(
            f"table {table!r}: id {int(ids[position])} at position {position} is out of range; allowed: 0..{size - 1}"
        )


@dataclass
class JaggedColumn:
    """A list column: row i holds values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.offsets[1:] - self.offsets[:-1]

    def take(self, rows: np.ndarray, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Values and lengths of `rows`, in their order; at most the last `max_length` values of each row."""
        index, lengths = gather_index(self.offsets, rows, max_length)
        return self.values[index], lengths


def gather_index(offsets: np.ndarray, rows: np.ndarray, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the (last max_length) values of `rows` in a packed column, and the lengths."""
    ends = offsets[rows + 1]
    lengths = ends - offsets[rows]
    if max_length is not None:
        lengths = np.minimum(lengths, max_length)
    packed = np.cumsum(lengths)
    total = int(packed[-1]) if len(packed) else 0
    # row r's values sit at ends[r] - lengths[r] ..; its first slot in the batch is packed[r] - lengths[r]
    shift = np.repeat(ends - packed, lengths)
    return shift + np.arange(total), lengths


@dataclass
class Batch:
    """One batch on one device.

    sparse: KJT of the sparse features. sequence: KJT whose keys are the candidate item (if the data have one),
    <event>_item and <event>_action, in the order of Schema.history_tables; None when there are no event types. offsets:
    event (and the candidate) -> int32 [B + 1], made and checked on the host. ages: event -> seconds between event and
    impression, float32 [T]. lengths: event -> int64 [B] on the CPU, for FLOP counts and shapes. longest: event ->
    int. dense float32 [B, num_dense]. labels: task -> float32 [B]. weights: task -> float32 [B]; CVR counts clicked
    rows only. bayes: task -> float32 [B], the true probabilities, where known.
    """

    sparse: KeyedJaggedTensor
    sequence: KeyedJaggedTensor | None
    offsets: dict[str, torch.Tensor]
    ages: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]
    longest: dict[str, int]
    dense: torch.Tensor
    labels: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    bayes: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        return self.dense.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`; `lengths` stay on the CPU. Copies from pinned memory do not wait for the device.

        The kernels are told what the offsets hold (kernels.jagged.remember), so that no check reads them back.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return self
        moved = self._each(lambda item: item.to(device, non_blocking=True))
        for name, offsets in moved.offsets.items():
            jagged.remember(offsets, self.offsets[name].clone())  # of page-locked memory, which is wanted back
        return moved

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory, from which copies to a GPU run beside computation."""
        return self._each(lambda item: item.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a batch that was copied on another stream until `stream` has done what it has queued."""
        self._each(lambda item: item.record_stream(stream))

    def _each(self, change) -> Batch:
        """A batch of change(x) for everything that lives on the device: tensors and KJTs."""
        named = ("offsets", "ages", "labels", "weights", "bayes")
        return replace(
            self,
            sparse=change(self.sparse),
            sequence=None if self.sequence is None else change(self.sequence),
            dense=change(self.dense),
            **{field: {name: change(item) for name, item in getattr(self, field).items()} for field in named},
        )


class Split:
    """All rows of one split in memory, as packed columns.

    directory: a dataset with manifest.json. split: "train" or "eval". max_rows cuts the split (None: all).
    ValueError, one line, for a missing shard, an unreadable shard, a row count that differs from the manifest, or an
    id out of range.
    """

    def __init__(self, directory: str | Path, split: str, max_rows: int | None = None):
        self.directory = Path(directory)
        manifest = load_manifest(directory)
        self.manifest = manifest
        self.schema = Schema.from_manifest(manifest)
        if split not in manifest.get("splits", {}):
            raise ValueError(
                f"dataset {directory}: no split {split!r}; allowed: {', '.join(manifest.get('splits', {}))}"
            )
        shards = [self._read(self.directory / shard["file"], shard) for shard in manifest["splits"][split]["shards"]]
        table = pa.concat_tables(shards)
        if max_rows is not None:
            table = table.slice(0, max_rows)
        if table.num_rows == 0:
            raise ValueError(f"dataset {directory}: split {split!r} has no rows")
        self.split = split
        self.num_rows = table.num_rows
        self._load(table)

    def _read(self, path: Path, shard: dict) -> pa.Table:
        if not path.is_file():
            raise ValueError(f"dataset {self.directory}: shard {path.name} is missing")
        # data.validate compares digests, the pipeline runs it first; a size costs nothing and finds a cut file by name
        size = path.stat().st_size
        if shard.get("bytes") and size != shard["bytes"]:
            raise ValueError(
                f"dataset {self.directory}: shard {path.name} has {size} bytes, the manifest says {shard['bytes']}"
            )
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"dataset {self.directory}: shard {path.name} is unreadable ({reason})") from None
        if table.num_rows != shard["rows"]:
            raise ValueError(
                f"dataset {self.directory}: shard {path.name} has {table.num_rows} rows, "
                f"the manifest says {shard['rows']}"
            )
        return table

    def _load(self, table: pa.Table) -> None:
        names = set(table.column_names)
        schema = self.schema

        def column(name):
            if name not in names:
                raise ValueError(f"dataset {self.directory}: column {name!r} is missing in split {self.split!r}")
            return table.column(name)

        timestamps = column("timestamp").to_numpy().astype(np.int64)
        self.sparse = {}
        for name, (size, _) in schema.sparse.items():
            self.sparse[name] = _jagged(column(f"sparse_{name}"), np.int64)
            check_ids(name, self.sparse[name].values, size)
        dense = _jagged(column("dense"), np.float32)
        if (dense.lengths != schema.num_dense).any():
            bad = int((dense.lengths != schema.num_dense).argmax())
            raise ValueError(
                f"dataset {self.directory}: row {bad} has {dense.lengths[bad]} dense values, not {schema.num_dense}"
            )
        self.dense = dense.values.reshape(self.num_rows, schema.num_dense)
        self.items, self.actions, self.ages = {}, {}, {}
        for event in schema.events:
            items = _jagged(column(f"{event.name}_item"), np.int64)
            actions = _jagged(column(f"{event.name}_action"), np.int64)
            times = _jagged(column(f"{event.name}_time"), np.int64)
            for other, name in ((actions, "action"), (times, "time")):
                if not np.array_equal(items.offsets, other.offsets):
                    raise ValueError(
                        f"dataset {self.directory}: columns {event.name}_item and {event.name}_{name} differ in lengths"
                    )
            check_ids(f"{event.name}_item", items.values, event.num_items)
            check_ids(f"{event.name}_action", actions.values, event.num_actions)
            # seconds before the impression fit float32 exactly up to 194 days, absolute seconds do not
            ages = (np.repeat(timestamps, items.lengths) - times.values).astype(np.float32)
            if len(ages) and ages.min() < 0:
                raise ValueError(f"dataset {self.directory}: a {event.name} event lies after its impression")
            self.items[event.name] = JaggedColumn(items.values.astype(np.int32), items.offsets)
            self.actions[event.name] = JaggedColumn(actions.values.astype(np.int32), items.offsets)
            self.ages[event.name] = JaggedColumn(ages, items.offsets)
        click = column("click").to_numpy().astype(np.float32)
        self.labels = {"ctr": click}
        self.weights = {"ctr": np.ones(self.num_rows, np.float32)}
        if "cvr" in schema.tasks:
            self.labels["cvr"] = column("conversion").to_numpy().astype(np.float32)
            self.weights["cvr"] = click
        self.bayes = {
            task: column(f"bayes_{task}").to_numpy().astype(np.float32)
            for task in schema.tasks
            if f"bayes_{task}" in names
        }

    def sequence_lengths(self) -> np.ndarray:
        """Events the model reads per row, all event types together: int64 [num_rows]. What load balancing sorts by."""
        total = np.zeros(self.num_rows, np.int64)
        for event in self.schema.events:
            total += np.minimum(self.items[event.name].lengths, event.max_length)
        return total

    def batch(self, rows: np.ndarray) -> Batch:
        """The batch of `rows` (int64 [B]), in their order, on the CPU."""
        schema = self.schema
        sparse = {name: column.take(rows) for name, column in self.sparse.items()}
        features = {CANDIDATE: sparse[CANDIDATE]} if schema.has_candidate and schema.events else {}
        offsets = {name: _offsets(lengths) for name, (_, lengths) in features.items()}
        ages, lengths, longest = {}, {}, {}
        for event in schema.events:
            index, event_lengths = gather_index(self.items[event.name].offsets, rows, event.max_length)
            features[f"{event.name}_item"] = (self.items[event.name].values[index], event_lengths)
            features[f"{event.name}_action"] = (self.actions[event.name].values[index], event_lengths)
            offsets[event.name] = _offsets(event_lengths)
            ages[event.name] = torch.from_numpy(self.ages[event.name].values[index])
            lengths[event.name] = torch.from_numpy(event_lengths.astype(np.int64))
            longest[event.name] = int(event_lengths.max()) if len(event_lengths) else 0
        features = {name: features[name] for _, names in schema.history_tables.values() for name in names}
        return Batch(
            sparse=_kjt(sparse),
            sequence=_kjt(features) if features else None,
            offsets=offsets,
            ages=ages,
            lengths=lengths,
            longest=longest,
            dense=torch.from_numpy(self.dense[rows]),
            labels={name: torch.from_numpy(values[rows]) for name, values in self.labels.items()},
            weights={name: torch.from_numpy(values[rows]) for name, values in self.weights.items()},
            bayes={name: torch.from_numpy(values[rows]) for name, values in self.bayes.items()},
        )

    def epoch(self, batch_size: int, seed: int, epoch: int, balance: str = "none", start: int = 0) -> Iterator[Batch]:
        """Shuffled batches of one pass; the order is a function of (seed, epoch) alone, so that a run can resume.

        The last rows that do not fill a batch are dropped, as everywhere where steps must cost the same. start: index
        of the first batch wanted.
        """
        order = batch_rows(self.sequence_lengths(), batch_size, seed, epoch, balance)
        for rows in order[start:]:
            yield self.batch(rows)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Every row once, in file order, the last batch partial: for evaluation."""
        for start in range(0, self.num_rows, batch_size):
            yield self.batch(np.arange(start, min(start + batch_size, self.num_rows)))


def _offsets(lengths: np.ndarray) -> torch.Tensor:
    """int32 [B + 1] on the host. ValueError past 2^31 - 1 rows."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"batch: {ends[-1]} events of one type; allowed: at most {np.iinfo(np.int32).max}")
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int32), ends.astype(np.int32)]))


def _kjt(features: dict[str, tuple[np.ndarray, np.ndarray]]) -> KeyedJaggedTensor:
    values = np.concatenate([values for values, _ in features.values()], dtype=np.int64)
    lengths = np.concatenate([lengths for _, lengths in features.values()], dtype=np.int64)
    # ids were checked when the split was read, so only the book-keeping is checked here
    return checked_kjt(list(features), torch.from_numpy(values), torch.from_numpy(lengths))


def _jagged(column: pa.ChunkedArray, dtype) -> JaggedColumn:
    """A list column as packed numpy arrays, straight from Arrow's own offsets and values."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if array.null_count:
        raise ValueError(f"a list column holds {array.null_count} nulls; empty lists are allowed, nulls are not")
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return JaggedColumn(values.astype(dtype, copy=False), offsets - offsets[0])
