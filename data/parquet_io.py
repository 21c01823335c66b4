"""Streams a dataset to Parquet shards; the folder appears under its name only when it is whole.

Everything is written to a hidden folder beside the target and renamed at the end, the manifest last. A killed run or a
full disk leaves at most that hidden folder, which no reader takes for a dataset and which the next run of the same
name removes.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.lengths import describe
from data.manifest import SPLITS, DataError, check, schema

OWN_FILES = re.compile(r"manifest\.json|(train|eval)-\d{5}\.parquet")


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """A list column without copying: row i holds the next lengths[i] of `values`."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def fixed_lists(values: np.ndarray) -> pa.ListArray:
    """A list column from an array [rows, n]: every row has n values."""
    return lists(values.reshape(-1), np.full(len(values), values.shape[1]))


class DatasetWriter:
    """Context manager: `write(split, columns)` any number of times, then `finish(...)`.

    target: the dataset folder; it may exist if it is empty or holds nothing but an older dataset, which is replaced at
    the end.
    header: the manifest without "splits" and "bayes" (a dict with every other key). with_bayes: whether true
    probabilities are columns.
    shard_events: a new shard starts once the current one holds this many events (all types together) and rows are
    bounded likewise. Row groups are the chunks that `write` gets, so the caller bounds memory.
    """

    def __init__(self, target: str | Path, header: dict, with_bayes: bool, *, shard_events: int = 50_000_000):
        self.target = Path(target)
        self.header, self.shard_events = header, shard_events
        self.schema = schema({**header, "bayes": {} if with_bayes else None})
        self.events = list(header["event_types"])
        self.splits = {
            split: {"rows": 0, "shards": [], "sums": {e: [0, 0, 0] for e in self.events}} for split in SPLITS
        }
        self.writer, self.split, self.path = None, None, None
        self.events_written = 0

    def __enter__(self) -> "DatasetWriter":
        check_target(self.target)
        parent = self.target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(self.target)
        self.work = parent / f".{self.target.name}.tmp-{os.getpid()}"
        self.work.mkdir()
        return self

    def write(self, split: str, columns: dict[str, pa.Array]) -> None:
        """One row group. columns: exactly those of the schema, same number of rows each."""
        table = pa.table([columns[name] for name in self.schema.names], schema=self.schema)
        if self.writer is None or self.split != split or self.shard_count >= self.shard_events:
            self._close_shard()
            number = len(self.splits[split]["shards"])
            self.split, self.path = split, self.work / f"{split}-{number:05d}.parquet"
            # Times ascend within a history: deltas are a third of the size. Dictionaries pay for ids and actions alone.
            times = [f"{event}_time.list.element" for event in self.events] + ["timestamp", "sample_id"]
            ids = [f"{event}_{part}.list.element" for event in self.events for part in ("item", "action")]
            ids += [f"sparse_{name}.list.element" for name in self.header["sparse_features"]]
            self.writer = pq.ParquetWriter(
                self.path,
                self.schema,
                compression="lz4",
                use_dictionary=ids,
                column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
                write_statistics=False,
            )
            self.shard_count = self.shard_rows = 0
        self.writer.write_table(table, row_group_size=max(len(table), 1))
        entry = self.splits[split]
        entry["rows"] += len(table)
        self.shard_rows += len(table)
        self.shard_count += len(table)
        for event in self.events:
            lengths = np.diff(columns[f"{event}_item"].offsets.to_numpy().astype(np.int64))
            total = int(lengths.sum())
            sums = entry["sums"][event]
            sums[0] += total
            sums[1] += int((lengths**2).sum())
            sums[2] = max(sums[2], int(lengths.max(initial=0)))
            self.shard_count += total
            self.events_written += total

    def finish(self, bayes: dict | None) -> dict:
        """Writes the manifest, renames the folder to its target and returns the manifest."""
        self._close_shard()
        types = self.header["event_types"]
        splits = {}
        for split, entry in self.splits.items():
            length = {
                event: describe(first, second, longest, entry["rows"], types[event]["max_length"])
                for event, (first, second, longest) in entry["sums"].items()
            }
            events = {event: sums[0] for event, sums in entry["sums"].items()}
            splits[split] = {"rows": entry["rows"], "shards": entry["shards"], "events": events, "length": length}
        manifest = {**self.header, "splits": splits, "bayes": bayes}
        check(manifest, self.target / "manifest.json")
        path = self.work / "manifest.json"
        with open(path, "w") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        replace(self.work, self.target)
        return manifest

    def _close_shard(self) -> None:
        if self.writer is None:
            return
        self.writer.close()
        self.writer = None
        self.splits[self.split]["shards"].append(
            {
                "file": self.path.name,
                "rows": self.shard_rows,
                "bytes": self.path.stat().st_size,
                "sha256": sha256(self.path),
            }
        )

    def __exit__(self, kind, value, traceback) -> None:
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError:  # the disk is full; the first error is the one to show
                pass
        shutil.rmtree(self.work, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_target(target: Path) -> None:
    """DataError when `target` holds anything that a dataset does not consist of: it would be lost."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise DataError(f"{target}: exists and is no folder; name a new folder or one that holds an older dataset")
    if target.is_dir():
        foreign = sorted(entry.name for entry in target.iterdir() if not OWN_FILES.fullmatch(entry.name))
        if foreign:
            raise DataError(
                f"{target}: holds {foreign[0]!r}, which is no part of a dataset; name an empty or a new folder"
            )


def replace(source: Path, target: Path) -> None:
    """Renames `source` to `target`; an older dataset there is moved away first and removed afterwards."""
    if target.exists():
        old = source.with_name(source.name + "-old")
        os.rename(target, old)
        os.rename(source, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(source, target)


def remove_stale(target: Path) -> None:
    """Removes what killed runs with this target left behind; a run that is still alive keeps its folder."""
    for path in target.absolute().parent.glob(f".{target.name}.tmp-*"):
        pid = re.fullmatch(re.escape(f".{target.name}.tmp-") + r"(\d+)(-old)?", path.name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
