"""The manifest of a dataset: what it must hold, and how it is read.

A dataset is a folder with manifest.json and the Parquet shards that it lists. The manifest is written last and the
folder gets its name last, so a folder with a manifest is whole; `data.validate` checks the rest.
"""

import json
from pathlib import Path

import pyarrow as pa

FORMAT = 1
SPLITS = ("train", "eval")
TASKS = (["ctr", "cvr"], ["ctr"])
KEYS = (
    "format",
    "name",
    "seed",
    "command",
    "generator",
    "num_dense",
    "sparse_features",
    "event_types",
    "tasks",
    "splits",
    "bayes",
)


class DataError(ValueError):
    """One line: what is wrong, where, what is allowed."""


def schema(manifest: dict) -> pa.Schema:
    """The columns of every shard, in order."""
    ids = pa.list_(pa.int64())
    fields = [pa.field(name, pa.int64()) for name in ("sample_id", "user_id", "timestamp")]
    fields += [pa.field(f"sparse_{name}", ids) for name in manifest["sparse_features"]]
    fields.append(pa.field("dense", pa.list_(pa.float32())))
    for event in manifest["event_types"]:
        fields += [pa.field(f"{event}_{part}", ids) for part in ("item", "action", "time")]
    fields += [pa.field("click", pa.int8()), pa.field("conversion", pa.int8())]
    if manifest["bayes"] is not None:
        fields += [pa.field("bayes_ctr", pa.float32()), pa.field("bayes_cvr", pa.float32())]
    return pa.schema(fields)


def read(directory: str | Path) -> dict:
    """manifest.json of a dataset, its keys checked; DataError when it is missing, unreadable or incomplete."""
    directory = Path(directory)
    path = directory / "manifest.json"
    if not directory.is_dir():
        raise DataError(f"{directory}: no such dataset folder")
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{directory}: no manifest.json, so this is no complete dataset") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from None
    check(manifest, path)
    return manifest


def check(manifest: dict, path: str | Path) -> None:
    """DataError unless the manifest has every key with a value of the right kind."""
    if not isinstance(manifest, dict):
        raise DataError(f"{path}: holds no JSON object")
    missing = [key for key in KEYS if key not in manifest]
    if missing:
        raise DataError(f"{path}: key {missing[0]!r} is missing; a manifest has {', '.join(KEYS)}")
    if manifest["format"] != FORMAT:
        raise DataError(f"{path}: format is {manifest['format']!r}; this version reads {FORMAT}")
    if manifest["tasks"] not in TASKS:
        raise DataError(f"{path}: tasks is {manifest['tasks']!r}; allowed: {' or '.join(map(str, TASKS))}")
    _whole(manifest["num_dense"], f"{path}: num_dense", 0)
    for kind, required in (
        ("sparse_features", ("num_embeddings",)),
        ("event_types", ("num_items", "num_actions", "max_length")),
    ):
        if not isinstance(manifest[kind], dict) or not manifest[kind]:
            raise DataError(f"{path}: {kind} must be a JSON object that names at least one")
        for name, entry in manifest[kind].items():
            for key in required:
                _whole(entry.get(key) if isinstance(entry, dict) else None, f"{path}: {kind}.{name}.{key}", 1)
    for name, entry in manifest["sparse_features"].items():
        if entry.get("pooling") not in ("mean", "sum"):
            raise DataError(f"{path}: sparse_features.{name}.pooling is {entry.get('pooling')!r}; allowed: mean, sum")
    if not isinstance(manifest["splits"], dict) or sorted(manifest["splits"]) != sorted(SPLITS):
        raise DataError(f"{path}: splits must be exactly {' and '.join(SPLITS)}")
    for split, entry in manifest["splits"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("shards"), list) or not entry["shards"]:
            raise DataError(f"{path}: splits.{split}.shards must list at least one shard")
        _whole(entry.get("rows"), f"{path}: splits.{split}.rows", 1)
        for shard in entry["shards"]:
            if not isinstance(shard, dict) or {"file", "rows", "bytes", "sha256"} - set(shard):
                raise DataError(f"{path}: a shard of {split} lacks one of file, rows, bytes, sha256")
            if Path(str(shard["file"])).name != shard["file"]:
                raise DataError(f"{path}: shard file {shard['file']!r} must be a plain file name")


def _whole(value, what: str, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise DataError(f"{what} is {value!r}; it must be an integer of at least {minimum}")
