"""A tiny dataset written by hand, in the format that gem/dataset.py reads, and small configs. Not the synthesiser's:
the reader is tested against the format."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.config import Config, EventSize, ModelConfig, load_tier

SPARSE = {"user": 20, "item": 30, "tag": 7}
EVENTS = {"impression": (30, 4, 12), "click": (30, 3, 5)}

ROW = {
    "variant": "tiny", "group": "baseline", "base": "", "layout": "jagged", "attention_impl": "varlen",
    "gdpa_impl": "eager",
    "self_attention": "full", "rotary": "separate", "norm": "separate", "compskip": "off", "pooling": "pma",
    "sequence": "on", "precision": "bf16", "mx_recipe": "none", "checkpointing": "none", "saved_activations": "full",
    "balance": "none",
    "compile": "off", "optimizer": "foreach", "launch": "eager", "note": "",
}  # fmt: skip

MODEL = ModelConfig(
    width=16, num_layers=2, events=(EventSize(16, 2, 2, 3), EventSize(8, 1, 1, 2)), num_tokens=4, num_summary=2,
    num_kv=6,
    num_seeds=2, num_hsp_seeds=4, kron_rank=2, num_experts=2, expert_rank=3, expert_hidden=16, head_hidden=8,
    dense_hidden=8, table_dim=8, block_size=4,
)  # fmt: skip


def config(batch_size: int = 8, model: ModelConfig = MODEL, train: dict | None = None, **columns: str) -> Config:
    """Config of the row above with some columns changed, at a tiny size."""
    made = Config.from_variant(ROW | columns, load_tier("smoke"), "smoke")
    changes = {"batch_size": batch_size, "seeds": (0,), "epochs": 1, "eval_batch_size": 16} | (train or {})
    return dataclasses.replace(made, model=model, train=dataclasses.replace(made.train, **changes))


def columns(rows: int, seed: int, *, events=EVENTS, sparse=SPARSE, tasks=("ctr", "cvr"), num_dense: int = 3) -> dict:
    """Plain Python lists a column. Some histories are empty, some longer than max_length, row 0 has none at all."""
    rng = np.random.default_rng(seed)
    now = 1_700_000_000 + np.arange(rows) * 60
    data = {"sample_id": list(range(rows)), "user_id": rng.integers(0, 20, rows).tolist(), "timestamp": now.tolist()}
    for name, size in sparse.items():
        data[f"sparse_{name}"] = [
            rng.integers(0, size, rng.integers(0, 3) if name == "tag" else 1).tolist() for _ in range(rows)
        ]
    data["dense"] = rng.standard_normal((rows, num_dense)).astype(np.float32).tolist()
    for name, (num_items, num_actions, max_length) in events.items():
        lengths = rng.integers(0, max_length + 4, rows)
        lengths[0] = 0
        data[f"{name}_item"] = [rng.integers(0, num_items, n).tolist() for n in lengths]
        data[f"{name}_action"] = [rng.integers(0, num_actions, n).tolist() for n in lengths]
        data[f"{name}_time"] = [
            np.sort(t - rng.integers(1, 90_000, n)).tolist() for n, t in zip(lengths, now, strict=True)
        ]
    click = (rng.random(rows) < 0.4).astype(np.int8)
    data["click"] = click.tolist()
    data["conversion"] = (click * (rng.random(rows) < 0.5)).astype(np.int8).tolist()
    if tasks == ("ctr", "cvr"):
        data["bayes_ctr"], data["bayes_cvr"] = [0.4] * rows, [0.5] * rows
    return data


def write(
    folder: Path,
    splits: dict[str, dict],
    *,
    events=EVENTS,
    sparse=SPARSE,
    tasks=("ctr", "cvr"),
    num_dense: int = 3,
    shards: int = 1,
):
    """Write columns as a dataset folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = pa.list_(pa.int64())
    listed = {}
    for split, data in splits.items():
        kinds = {k: ids for k in data if k.startswith("sparse_") or k.rpartition("_")[2] in ("item", "action", "time")}
        kinds |= {"dense": pa.list_(pa.float32()), "click": pa.int8(), "conversion": pa.int8()}
        kinds |= {"bayes_ctr": pa.float32(), "bayes_cvr": pa.float32()}
        table = pa.table({k: pa.array(v, type=kinds.get(k, pa.int64())) for k, v in data.items()})
        listed[split] = {"rows": table.num_rows, "shards": []}
        cuts = np.linspace(0, table.num_rows, shards + 1).astype(int)
        for index, (start, end) in enumerate(itertools.pairwise(cuts)):
            name = f"{split}-{index:05d}.parquet"
            pq.write_table(table.slice(start, end - start), folder / name)
            listed[split]["shards"].append({"file": name, "rows": int(end - start), "bytes": 0, "sha256": ""})
    manifest = {
        "format": 1, "name": "tiny", "seed": 0, "command": "", "generator": {}, "num_dense": num_dense,
        "sparse_features": {k: {"num_embeddings": n, "pooling": "mean"} for k, n in sparse.items()},
        "event_types": {k: {"num_items": a, "num_actions": b, "max_length": c} for k, (a, b, c) in events.items()},
        "tasks": list(tasks), "splits": listed, "bayes": None,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def dataset(folder: Path, rows: int = 64, eval_rows: int = 40, **kwargs) -> Path:
    """A valid dataset of random rows."""
    shards = kwargs.pop("shards", 1)
    splits = {"train": columns(rows, 1, **kwargs), "eval": columns(eval_rows, 2, **kwargs)}
    return write(folder, splits, shards=shards, **kwargs)
