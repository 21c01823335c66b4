"""Everything that the report says in numbers, as one file: values.json.

    python -m paper.values --tier smoke --output results/smoke/paper/values.json

The text under paper/sections holds no result. It asks for values by name, and a value that does not exist makes its
sentence say so or leaves it out. Values come from results/<tier> (records, claims.csv, figures, tables, benchmark
files of the jobs), from the frozen records, and from config/. For `frozen` only shipped files are read, so that the
report has the same bytes everywhere.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path

import pandas as pd

from figures.load import DEVICE_NAMES, ROOT, Source, available, best_device_first, select
from gem.cli import Parser
from gem.readme import range_text, reason, with_unit
from gem.stages import sizes, stages
from paper import step_summaries, summaries

VERDICTS = {  # verdict -> how a reader says it
    "reproduced": "reproduced",
    "exceeded": "exceeded",
    "partly": "partly",
    "not_reproduced": "not reproduced",
    "context": "context",
    "not_attempted": "not attempted",
}
FROZEN = "frozen"


def collect(run: str, results: Path, measured: Path, published: Path, root: Path = ROOT) -> dict:
    """Values of one run (a folder under `results`). ValueError when it has no claims.csv or no records."""
    folder = results / run
    source = Source(folder / "records", measured, published)
    claims = read_claims(folder / "claims" / "claims.csv", source)
    if not source.runs and run != FROZEN:
        raise ValueError(f"{folder / 'records'}: no runs.json there and none under {measured}; nothing was measured")
    figures, tables, missing = outputs(folder, measured, root, source)
    built = [item for make in (*summaries.ALL, *step_summaries.ALL) for item in make(source)]
    return {
        "run": run,
        "frozen": run == FROZEN,
        "claims": claims,
        "verdicts": count_verdicts(claims),
        "verdict_names": VERDICTS,
        "environments": environments(source),
        "figures": figures,
        "tables": tables,
        "missing": missing,
        "built": built,
        "facts": summaries.facts(source) | step_summaries.facts(source),
        "chips": chips(),
        "tiers": tiers(root),
        "published": published_tables(published),
        "stages": [] if run == FROZEN else stages(folder / "logs"),
        "sizes": [] if run == FROZEN else sizes(folder),
    }


def read_claims(path: Path, source: Source) -> list[dict]:
    """Rows of claims.csv, each with the device that its number was measured on."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; allowed: the output of python -m gem.claims")
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = {row["id"]: row for row in _sheet("claims")}
    for row in rows:
        rule = names.get(row["id"], {})
        row["device"] = device_of(row, source)
        row["stale"] = row["source_record"].endswith("(older sources)")
        parts = [rule.get("published_low", ""), rule.get("published_high", "")]
        parts = list(dict.fromkeys(part for part in parts if part))
        row["published_parts"] = [with_unit(part, rule.get("unit", "")) for part in parts]
        row["published_text"] = range_text(parts, rule.get("unit", ""))
        row["ours_text"] = with_unit(row["ours"], row["unit"])
        row["expected_text"] = with_unit(row["expected"], row["unit"])
        row["reason"] = reason(row["limiter"], judged=row["ours"] != "")
    return rows


def device_of(row: dict, source: Source) -> str:
    """ "H200", "CPU": where the record of a claim was measured; modelled numbers have no device."""
    record = row["source_record"].split(" (")[0]
    if not record:
        return ""
    if row["scope"] == "modelled":
        return "model"
    path = Path(record)
    if path.parent.name in DEVICE_NAMES:
        return DEVICE_NAMES[path.parent.name]
    runs = json.loads((path.parent / "runs.json").read_text(encoding="utf-8"))
    slugs = {info["device"]["slug"] for info in runs.values() if info["experiment"] == path.stem}
    return source.device_label(best_device_first(slugs)[0]) if slugs else ""


def count_verdicts(claims: list[dict]) -> dict[str, int]:
    """Claims by verdict; `judged` leaves out context and not attempted, `met` counts reproduced and exceeded."""
    counts = {name: sum(row["verdict"] == name for row in claims) for name in VERDICTS}
    judged = len(claims) - counts["context"] - counts["not_attempted"]
    return counts | {"total": len(claims), "judged": judged, "met": counts["reproduced"] + counts["exceeded"]}


def outputs(folder: Path, measured: Path, root: Path, source: Source) -> tuple[dict, dict, list[dict]]:
    """Figures and tables that this run has, and those that it has not with the reason."""
    figures, tables, missing = {}, {}, []
    for row in _sheet("figures", root):
        name, is_figure = row["id"], row["id"].startswith("F")
        path = folder / ("figures" if is_figure else "tables") / f"{name}{'.pdf' if is_figure else '.csv'}"
        ready, reason = available(name, folder / "records", measured, root)
        if name in ("T01", "T09"):  # typeset from claims.csv and runs.json themselves
            continue
        if not path.exists():
            why = "not drawn in this build" if ready else "not built yet" if "does not exist" in reason else reason
            missing.append({"id": name, "title": row["title"], "reason": why})
            continue
        item = {"title": row["title"], "caption": caption(row["script"]), "claims": row["claims"], "file": path.name}
        if is_figure:
            figures[name] = item | {"standing": standing(row["records"], path.with_suffix(".csv"), source)}
        else:
            header, rows, constant = without_constant(*read_table(path))
            tables[name] = item | {"header": header, "rows": rows, "constant": constant}
    return figures, tables, missing


def without_constant(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], str]:
    """Columns that say one thing in all of several rows, taken out; what they say, as text. Empty ones just go."""
    same = {i for i in range(len(header)) if len(rows) > 1 and len({row[i] for row in rows}) == 1}
    keep = [i for i in range(len(header)) if i not in same]
    if len(keep) < 2:
        return header, rows, ""
    said = ", ".join(f"{header[i]} {rows[0][i]}" for i in sorted(same) if rows[0][i])
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows], said


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return rows[0], [[_cell(text) for text in row] for row in rows[1:]]


def _cell(text: str) -> str:
    """Long decimals of a CSV cut to what a reader wants; everything else as it stands."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if "." not in text and "e" not in text.lower() else summaries.number(value, 4)


def caption(script: str) -> str:
    """CAPTION of a module of figures/: what to see, on which chip, what is modelled."""
    return importlib.import_module(f"figures.{script}").CAPTION


def standing(records: str, drawn: Path, source: Source) -> str:
    """Which devices the data of a figure come from, and whether some of it is emulated or modelled, as a sentence.

    records: experiments of its row in figures.tsv. drawn: its data as CSV; where it names devices, others are left out.
    """
    frames = [select(source.frame(name)) for name in records.split(";") if name and ":" not in name]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        return ""
    rows = pd.concat(frames)
    named = pd.read_csv(drawn, dtype=str)
    if "device" in named and set(named.device) & set(rows.device):
        rows = rows[rows.device.isin(set(named.device))]
    # a run that measures also carries what follows from its sizes: those rows make no panel of their own
    kinds = {run: set(scopes) for run, scopes in rows.groupby("run_id").scope}
    timed = [run for run, scopes in kinds.items() if "measured" in scopes]
    others = sorted(set().union(*(scopes for run, scopes in kinds.items() if run not in timed)))
    devices = best_device_first(rows[rows.run_id.isin(timed)].device)
    if not devices:
        return f"{' and '.join(others).capitalize()}, on no device."
    labels = " and ".join(source.device_label(device) for device in devices)
    rest = f"; in part {' and '.join(others)}" if others else ""
    return f"Measured on {labels}{rest}."


def environments(source: Source) -> list[dict]:
    """One row a device: hardware, software, commits, days and experiments of its runs."""
    found: dict[tuple, dict] = {}
    for info in source.runs.values():
        device, software = info["device"], info.get("software", {})
        key = (device["slug"], device.get("name"), device.get("driver"), software.get("torch"), software.get("triton"))
        row = found.setdefault(
            key,
            {
                "device": source.device_label(device["slug"]),
                "name": device.get("name") or "",
                "gpu": device["type"] == "cuda",
                "driver": device.get("driver") or "",
                "power": _watts(device),
                "torch": software.get("torch") or "",
                "triton": software.get("triton") or "",
                "cuda": software.get("cuda") or "",
                "python": software.get("python") or "",
                "commits": set(),
                "days": set(),
                "experiments": set(),
                "runs": 0,
                "dirty": False,
            },
        )
        row["commits"].add(str(info.get("commit", "unknown"))[:10])
        row["days"].add(str(info.get("utc", ""))[:10])
        row["experiments"].add(info["experiment"])
        row["runs"] += 1
        row["dirty"] |= bool(info.get("dirty"))
    rows = []
    for key in sorted(found, key=lambda key: (key[0] == "cpu", [str(part) for part in key])):
        row = found[key]
        rows.append(row | {name: sorted(row[name]) for name in ("commits", "days", "experiments")})
    return rows


def _watts(device: dict) -> str:
    try:
        return f"{summaries.number(device['power_limit_w'])} W"
    except (KeyError, TypeError, ValueError):
        return ""


def chips() -> dict[str, dict]:
    """Nominal figures of the chips that the text compares (kernels/bounds.py)."""
    from kernels.bounds import CHIPS

    rows = {}
    for name in ("h200", "b200"):
        chip = CHIPS[name]
        rows[name] = {
            "bf16": summaries.number(chip.bf16 / 1e12, 4),
            "fp8": summaries.number(chip.fp8 / 1e12, 4),
            "hbm": summaries.number(chip.hbm / 1e12),
            "sms": str(chip.sms),
            "intensity": summaries.number(chip.bf16 / chip.hbm),
        }
    rows["ratio"] = {
        "bf16": summaries.number(CHIPS["h200"].bf16 / CHIPS["b200"].bf16, 2),
        "hbm": summaries.number(CHIPS["h200"].hbm / CHIPS["b200"].hbm, 2),
    }
    return rows


def tiers(root: Path) -> list[dict]:
    """What each tier trains on and how: rows of the method section, from config/<tier>.yaml."""
    import yaml

    rows = []
    for name in ("smoke", "gpu"):
        config = yaml.safe_load((root / "config" / f"{name}.yaml").read_text(encoding="utf-8"))
        train = config["train"]
        data = config["data"] | train.get("data", {})  # what training replaces, as gem.config.of_training has it
        rows.append(
            {
                "tier": name,
                "device": {"cpu": "CPU", "cuda": "one GPU"}[config["device"]],
                "dtype": config["dtype"],
                "preset": train.get("preset", config["preset"]),
                "samples": summaries.number(data["samples"]),
                "eval_samples": summaries.number(data["eval_samples"]),
                "max_length": summaries.number(data["max_length"]),
                "fill": str(data["fill"]),
                "length_law": data["length_law"],
                "length_cv": str(data["length_cv"]),
                "batch": summaries.number(train["batch_size"]),
                "seeds": str(len(train["seeds"])),
            }
        )
    return rows


def published_tables(folder: Path) -> dict[str, dict]:
    """The source's own tables, as rows."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        header, rows = read_table(path)
        found[path.stem] = {"header": header, "rows": rows}
    return found


def _sheet(name: str, root: Path = ROOT) -> list[dict]:
    with open(root / "config" / f"{name}.tsv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m paper.values", description="Collect the numbers of the report.")
    parser.add_argument("--tier", required=True, help="folder under results: smoke, gpu, gpu2, frozen")
    parser.add_argument("--output", type=Path, required=True, help="values.json")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--measured", type=Path, default=Path("data/measured"), help="frozen records")
    parser.add_argument("--published", type=Path, default=Path("data/published"), help="numbers of the source")
    args = parser.parse_args(argv)
    try:
        values = collect(args.tier, args.results, args.measured, args.published)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counts = values["verdicts"]
    print(f"{args.output}: {counts['met']} of {counts['total']} claims reproduced, {len(values['figures'])} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
