"""Sheets and schemas of config/, each row checked as it is read; errors name file, row, column and what is allowed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import jsonschema
import yaml

from gem import checks
from gem.digest import ROOT

SHEETS = {  # sheet -> its id column
    "variants": "variant",
    "kernels": "case",
    "figures": "id",
    "claims": "id",
    "metrics": "metric",
    "experiments": "job",
}


def read_sheet(name: str, root: Path = ROOT) -> dict[str, dict]:
    """Rows of config/<name>.tsv by id, each checked against workflow/schemas/<name>.yaml."""
    path, key = root / "config" / f"{name}.tsv", SHEETS[name]
    label = f"config/{name}.tsv"
    schema = schema_of(name, root)
    columns = list(schema["properties"])
    if not path.is_file():
        raise ValueError(f"{label}: the file is missing")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        for column in reader.fieldnames or []:
            if column not in columns:
                raise ValueError(f"{label}: column {column!r} is unknown; allowed: {', '.join(columns)}")
        for column in schema["required"]:
            if (reader.fieldnames or []).count(column) > 1:
                raise ValueError(f"{label}: column {column!r} occurs twice; allowed: once")
            if column not in (reader.fieldnames or []):
                raise ValueError(f"{label}: column {column!r} is missing; needed: {', '.join(schema['required'])}")
        rows: dict[str, dict] = {}
        for row in reader:
            where = f"{label}: row {row[key]}"
            if None in row or None in row.values():
                fields = len(reader.fieldnames)
                raise ValueError(f"{where}: has another number of fields than the header; allowed: {fields}")
            if row[key] in rows:
                raise ValueError(f"{where}: column {key}: the id occurs twice; allowed: unique ids")
            validate(row, schema, where)
            rows[row[key]] = row
    return rows


def schema_of(name: str, root: Path) -> dict:
    path = root / "workflow" / "schemas" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def validate(value: dict, schema: dict, where: str) -> None:
    """First violation of a schema as one line."""
    checks.finite(value, where)
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(value), key=lambda error: list(error.path))
    if not errors:
        return
    error = errors[0]
    place = ".".join(str(item) for item in error.path)
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        unknown = next(name for name in error.instance if name not in known)
        place = f"{place}.{unknown}".lstrip(".")
        raise ValueError(f"{where}: key {place} is unknown; allowed: {', '.join(known)}")
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        raise ValueError(f"{where}: key {f'{place}.{missing}'.lstrip('.')} is missing; allowed: see its schema")
    allowed = error.schema.get("description") or _allowed(error)
    what = "column" if where.startswith("config/") and ".tsv" in where else "key"
    raise ValueError(f"{where}: {what} {place}: {json.dumps(error.instance)}; allowed: {allowed}")


def _allowed(error: jsonschema.ValidationError) -> str:
    if error.validator == "enum":
        return ", ".join("(empty)" if item == "" else str(item) for item in error.validator_value)
    return f"{error.validator} {error.validator_value}"
