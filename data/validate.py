"""Checks a dataset against its manifest: `python -m data.validate DIR`.

Files (present, size, SHA-256, readable), schema, row and event counts, id ranges, history lengths, order in time
(samples ascend within a split, eval starts where train ends or later, a history ascends and ends before its sample)
and the logic of labels. The first violation is one line that names file, column and row, exit code 1. Memory is
bounded by the largest row group.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.cli import run
from data.manifest import SPLITS, DataError, read, schema
from data.parquet_io import OWN_FILES, sha256
from gem.cli import Parser
from gem.progress import Progress


def validate(directory: str | Path, *, quiet: bool = True) -> dict:
    """The manifest of a dataset that holds what it says; DataError with one line otherwise."""
    directory = Path(directory)
    manifest = read(directory)
    check_features(manifest, directory / "manifest.json")
    listed = {shard["file"] for split in SPLITS for shard in manifest["splits"][split]["shards"]} | {"manifest.json"}
    for path in sorted(directory.iterdir()):
        if OWN_FILES.fullmatch(path.name) and path.name not in listed:
            raise DataError(f"{path}: is not in the manifest")
    rows = sum(manifest["splits"][split]["rows"] for split in SPLITS)
    clock, last_id = -(2**63), -(2**63)
    with Progress(rows, "rows", "validate", quiet=quiet) as progress:
        for split in SPLITS:
            entry = manifest["splits"][split]
            seen, events = 0, dict.fromkeys(manifest["event_types"], 0)
            for shard in entry["shards"]:
                path = directory / shard["file"]
                for table, first in read_shard(path, shard, schema(manifest)):
                    clock, last_id = check_table(table, manifest, f"{path}", first, clock, last_id)
                    for event in events:
                        events[event] += len(column(table, f"{event}_item", str(path), first).flatten())
                    progress.advance(len(table))
                seen += shard["rows"]
            if seen != entry["rows"]:
                raise DataError(
                    f"{directory}: the shards of {split} have {seen} rows, the manifest says {entry['rows']}"
                )
            for event, count in events.items():
                said = entry["events"].get(event)
                if count != said:
                    raise DataError(f"{directory}: {split} has {count} {event} events, the manifest says {said}")
    return manifest


def check_features(manifest: dict, path: Path) -> None:
    """Event types share the vocabulary of sparse feature "item"."""
    item = manifest["sparse_features"].get("item")
    if item is None:
        raise DataError(f"{path}: sparse_features has no 'item'")
    for event, entry in manifest["event_types"].items():
        if entry["num_items"] != item["num_embeddings"]:
            sizes = f"{entry['num_items']}, sparse feature item has {item['num_embeddings']}"
            raise DataError(f"{path}: event_types.{event}.num_items is {sizes}; they must be equal")


def read_shard(path: Path, shard: dict, expected: pa.Schema):
    """Yields (table, index of its first row) per row group; DataError if the file is not the one written."""
    if not path.is_file():
        raise DataError(f"{path}: the manifest lists this shard and there is no such file")
    size = path.stat().st_size
    if size != shard["bytes"]:
        kind = "truncated" if size < shard["bytes"] else "longer than written"
        raise DataError(f"{path}: {kind}, {size} bytes and the manifest says {shard['bytes']}")
    if sha256(path) != shard["sha256"]:
        raise DataError(f"{path}: corrupt, its SHA-256 is not the manifest's")
    try:
        file = pq.ParquetFile(path)
        found = file.schema_arrow
        for field in expected:
            index = found.get_field_index(field.name)
            if index < 0:
                raise DataError(f"{path}: column {field.name!r} is missing")
            if found.field(index).type != field.type:
                raise DataError(f"{path}: column {field.name!r} is {found.field(index).type}; it must be {field.type}")
        extra = sorted(set(found.names) - set(expected.names))
        if extra:
            raise DataError(f"{path}: column {extra[0]!r} is not in the manifest")
        if file.metadata.num_rows != shard["rows"]:
            raise DataError(f"{path}: {file.metadata.num_rows} rows and the manifest says {shard['rows']}")
        first = 0
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=expected.names)
            yield table, first
            first += len(table)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: corrupt Parquet ({' '.join(str(error).split())})") from None


def column(table: pa.Table, name: str, path: str, first: int):
    """One array for a column; DataError when it holds nulls."""
    chunked = table[name]
    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    if array.null_count or (pa.types.is_list(array.type) and array.flatten().null_count):
        raise DataError(
            f"{path}: column {name!r} holds a null in rows {first}..{first + len(array) - 1}; none is allowed"
        )
    return array


def ragged(array: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets [rows + 1] that start at 0."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def check_table(table: pa.Table, manifest: dict, path: str, first: int, clock: int, last_id: int) -> tuple[int, int]:
    """Checks one row group; returns its last time stamp and sample id (at least those given when it is empty)."""

    def fail(name: str, row: int, text: str):
        raise DataError(f"{path}: column {name!r}, row {first + int(row)}: {text}")

    def in_range(name: str, values: np.ndarray, offsets: np.ndarray, size: int) -> None:
        bad = np.flatnonzero((values < 0) | (values >= size))
        if len(bad):
            row = np.searchsorted(offsets, bad[0], side="right") - 1
            fail(name, row, f"id {values[bad[0]]} at position {bad[0] - offsets[row]}; allowed: 0..{size - 1}")

    def get(name: str):
        return column(table, name, path, first)

    stamp, ids = get("timestamp").to_numpy(), get("sample_id").to_numpy()
    users = get("user_id").to_numpy()
    if len(users) and users.min() < 0:
        fail("user_id", np.argmin(users), f"{users.min()} is negative")
    back = (
        np.flatnonzero(np.diff(stamp, prepend=clock) < 0)
        if len(stamp) and clock > -(2**63)
        else np.flatnonzero(np.diff(stamp) < 0) + 1
    )
    if len(back):
        fail("timestamp", back[0], "is earlier than the sample before; samples must ascend in time, eval after train")
    repeated = np.flatnonzero(ids <= np.concatenate([[last_id], ids[:-1]]))
    if len(repeated):
        fail("sample_id", repeated[0], f"{ids[repeated[0]]} does not exceed the id before; ids must ascend")

    for name, entry in manifest["sparse_features"].items():
        values, offsets = ragged(get(f"sparse_{name}"))
        in_range(f"sparse_{name}", values, offsets, entry["num_embeddings"])

    dense, offsets = ragged(get("dense"))
    width = np.diff(offsets)
    if (width != manifest["num_dense"]).any():
        row = np.argmax(width != manifest["num_dense"])
        fail("dense", row, f"{width[row]} values; num_dense is {manifest['num_dense']}")
    if not np.isfinite(dense).all():
        fail("dense", np.argmin(np.isfinite(dense)) // max(manifest["num_dense"], 1), "a value is not finite")

    for event, entry in manifest["event_types"].items():
        items, offsets = ragged(get(f"{event}_item"))
        lengths = np.diff(offsets)
        if lengths.max(initial=0) > entry["max_length"]:
            fail(f"{event}_item", np.argmax(lengths), f"{lengths.max()} events; max_length is {entry['max_length']}")
        actions, action_offsets = ragged(get(f"{event}_action"))
        times, time_offsets = ragged(get(f"{event}_time"))
        for part, other in (("action", action_offsets), ("time", time_offsets)):
            if not np.array_equal(offsets, other):
                row = np.argmax(np.diff(offsets) != np.diff(other))
                fail(
                    f"{event}_{part}",
                    row,
                    f"{np.diff(other)[row]} events where {event}_item has {np.diff(offsets)[row]}",
                )
        in_range(f"{event}_item", items, offsets, entry["num_items"])
        in_range(f"{event}_action", actions, offsets, entry["num_actions"])
        descends = np.diff(times) < 0
        starts = offsets[1:-1]
        starts = starts[(starts > 0) & (starts < len(times))]
        descends[starts - 1] = False
        if descends.any():
            row = np.searchsorted(offsets, np.argmax(descends) + 1, side="right") - 1
            fail(f"{event}_time", row, "event times descend; they must ascend")
        some = np.flatnonzero(lengths)
        late = some[times[offsets[some + 1] - 1] >= stamp[some]]
        if len(late):
            fail(f"{event}_time", late[0], f"the last event is at or after the sample's time stamp {stamp[late[0]]}")

    click, conversion = get("click").to_numpy(), get("conversion").to_numpy()
    for name, values in (("click", click), ("conversion", conversion)):
        bad = np.flatnonzero((values != 0) & (values != 1))
        if len(bad):
            fail(name, bad[0], f"label {values[bad[0]]}; allowed: 0, 1")
    if (conversion > click).any():
        fail("conversion", np.argmax(conversion > click), "a conversion without a click")
    if manifest["bayes"] is not None:
        for name in ("bayes_ctr", "bayes_cvr"):
            p = get(name).to_numpy()
            bad = np.flatnonzero(~((p >= 0) & (p <= 1)))
            if len(bad):
                fail(name, bad[0], f"probability {p[bad[0]]}; allowed: 0..1")
    return (int(stamp[-1]), int(ids[-1])) if len(stamp) else (clock, last_id)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m data.validate", description="Check a dataset against its manifest.")
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    manifest = validate(options.directory, quiet=options.quiet)
    sizes = ", ".join(
        f"{split} {entry['rows']:,} rows / {sum(entry['events'].values()):,} events"
        for split, entry in manifest["splits"].items()
    )
    print(f"{options.directory}: valid ({sizes})")
    return 0


if __name__ == "__main__":
    run(main)
