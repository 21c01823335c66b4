"""Checks of a tier's configuration beyond the schemas, before any work, without torch; errors are one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import yaml

from gem.config import Config, of_training
from gem.digest import ROOT


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice, where YAML would let the last one win."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} is not text; allowed: quotes around it")
            if keys.count(key) > 1:
                raise ValueError(f"key {key} occurs twice; allowed: once")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, label: str):
    """The parsed file; not YAML, a key given twice, or a key that is no text (on, off without quotes) is an error."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{label}{where}: no valid YAML: {getattr(error, 'problem', error)}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{label}: {error}") from None


def finite(value, where: str, place: str = "") -> None:
    """NaN and infinity pass every comparison of a schema, so they are refused here."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: key {place}: {value}; allowed: a finite number")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        finite(item, where, f"{place}.{key}".lstrip("."))


def variants(config: dict, rows: dict[str, dict]) -> None:
    """Every row must make a Config in this tier: toggles that go together, sizes, and what each toggle runs as."""
    for row in rows.values():
        try:
            Config.from_variant(row, config)
            Config.from_variant(row, of_training(config))
        except ValueError as error:
            place = "config/variants.tsv" if str(error).startswith("variant ") else f"config/{config['tier']}.yaml"
            raise ValueError(f"{place}: {error}") from None


def generated_data(config: dict, label: str) -> None:
    """The length law must reach its fill, and a split must fill one batch."""
    from data.lengths import LengthLaw

    batch = config["train"]["batch_size"]
    own = config["train"].get("data", {})
    for section, changes in (("data", {}), ("train.data", own), ("quality.data", config["quality"].get("data", {}))):
        data = config["data"] | (own if section == "quality.data" else {}) | changes
        try:
            LengthLaw(data["length_law"], data["max_length"], float(data["fill"]), float(data["length_cv"]))
        except ValueError as error:
            raise ValueError(f"{label}: section {section}: {error}") from None
        if data["samples"] < batch:
            raise ValueError(
                f"{label}: key {section}.samples: too few rows: {data['samples']} do not fill one batch; "
                f"allowed: at least train.batch_size, {batch}"
            )
    for weight in config["quality"]["long_range_weights"]:
        if not re.fullmatch(r"[0-9.]+", f"{weight:g}"):
            raise ValueError(f"{label}: key quality.long_range_weights: {weight}; allowed: 0, or from 0.0001 to 99999")


def dataset(given, config: dict, tier: str) -> Path:
    """Folder of --config dataset=PATH, its manifest read and its rows counted."""
    from data import manifest

    text = "" if given is None else str(given)
    path = Path(text)
    if not text or not (path / "manifest.json").is_file():
        raise ValueError(
            f"config: dataset {text!r} has no manifest.json; allowed: a folder written by "
            "python -m data.import_log or python -m data.synthesize"
        )
    rows, batch = manifest.read(path)["splits"]["train"]["rows"], config["train"]["batch_size"]
    if rows < batch:
        raise ValueError(
            f"config: dataset {text!r}: too few rows: {rows} training rows do not fill one batch; allowed: "
            f"at least train.batch_size of config/{tier}.yaml, {batch}"
        )
    return path


def module(name: str, where: str) -> None:
    """A module of this repository must exist."""
    if not (ROOT / f"{name.replace('.', '/')}.py").is_file():
        raise ValueError(f"{where}: {json.dumps(name)}: no such file; allowed: a module of this repository")


def kernel_case(row: dict, where: str) -> None:
    """Columns of kernels.tsv that must go together."""
    own = [row[name] for name in ("kv_law", "kv_max", "kv_fill")]
    if row["kind"] == "self" and any(own):
        raise ValueError(f"{where}: column kv_law, kv_max, kv_fill: {own}; allowed: nothing where kind is self")
    if row["kind"] != "self" and not (row["kv_law"] and row["kv_max"]):
        raise ValueError(
            f"{where}: column kv_law, kv_max: empty; allowed: a law and a size where kind is {row['kind']}"
        )
    if row["window"] and row["kind"] != "self":
        raise ValueError(f"{where}: column window: {row['window']}; allowed: nothing unless kind is self")
    for side in ("q", "kv"):
        law, fill = row[f"{side}_law"], row[f"{side}_fill"]
        if law == "full" and fill and float(fill) != 1:
            raise ValueError(f"{where}: column {side}_fill: {fill}; allowed: 1, or nothing, where {side}_law is full")
