"""One variant against its base: what was changed, and what that changed. Reads records alone.

    python -m gem.ablation --run smoke --variant full --base baseline_padded --output results/smoke/ablations/full.md

The numbers come from the parts of the training jobs of these two variants, so that an ablation needs no other training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

from gem import record
from gem.cli import Parser
from gem.record_store import load_parts
from gem.workflow import read_sheet

METRICS = {  # metric -> title, decimals
    "ne_ctr": ("NE, click", 4),
    "ne_cvr": ("NE, conversion", 4),
    "auc_ctr": ("AUC, click", 4),
    "qps": ("samples/s", 0),
    "mfu": ("MFU", 4),
    "time_ms": ("step, ms", 2),
    "peak_mem_gib": ("peak memory, GiB", 2),
    "flops_per_sample": ("FLOPs a sample", 0),
    "params": ("parameters", 0),
}
NOT_COMPARED = ("variant", "group", "base", "note")


def rows_of(folder: Path, variant: str) -> pd.DataFrame:
    """Rows that the training job of a variant recorded, read from its parts. ValueError where there are none."""
    receipt = folder / "jobs" / f"train-{variant}.json"
    if not receipt.exists():
        raise ValueError(f"{receipt}: no such file; allowed: a variant that was trained (snakemake {receipt})")
    runs = json.loads(receipt.read_text(encoding="utf-8"))["runs"]
    parts = load_parts(folder / "parts", warn=lambda line: None)
    rows = [row for run in runs if run in parts for row in parts[run][0]]
    frame = pd.DataFrame(rows, columns=record.COLUMNS)
    frame["p50"] = pd.to_numeric(frame.p50.replace("", None))
    frame = frame[(frame.subject == variant) & (frame.experiment == "train")]
    if frame.empty:
        raise ValueError(f"{receipt}: its runs hold no record of {variant}")
    return frame


def seeds_of(frame: pd.DataFrame, metric: str) -> pd.Series:
    """Values of a metric over seeds; a metric that does not depend on the seed gives one value."""
    rows = frame[(frame.metric == metric) & (frame.status == "ok")]
    return rows[rows.seed != ""].p50 if (rows.seed != "").any() else rows.p50


def table(mine: pd.DataFrame, base: pd.DataFrame, metrics: dict) -> list[str]:
    """Markdown lines of the comparison; a metric that neither side has is left out."""
    lines = ["| metric | base | variant | change | better when |", "|---|---:|---:|---:|---|"]
    for name, (title, decimals) in METRICS.items():
        left, right = seeds_of(base, name), seeds_of(mine, name)
        if left.empty and right.empty:
            continue
        change = "n/a"
        if len(left) and len(right) and left.median():
            change = f"{(right.median() / left.median() - 1) * 100:+.2f} %"
        better = metrics[name]["direction"]
        lines.append(f"| {title} | {_spread(left, decimals)} | {_spread(right, decimals)} | {change} | {better} |")
    return lines


def _spread(values: pd.Series, decimals: int) -> str:
    if values.empty:
        return "n/a"
    text = f"{values.median():,.{decimals}f}"
    if len(values) > 1:
        text += f" ({values.min():,.{decimals}f} to {values.max():,.{decimals}f})"
    return text


def report(folder: Path, variant: str, base: str) -> str:
    """The Markdown report."""
    sheet, metrics = read_sheet("variants"), read_sheet("metrics")
    for name in (variant, base):
        if name not in sheet:
            raise ValueError(f"variant {name!r} is unknown; allowed: {', '.join(sheet)}")
    mine, other = rows_of(folder, variant), rows_of(folder, base)
    changed = {
        column: (sheet[base][column], sheet[variant][column])
        for column in sheet[variant]
        if column not in NOT_COMPARED and sheet[base][column] != sheet[variant][column]
    }
    lines = [f"# {variant} against {base}", "", f"{sheet[variant]['note']}.", ""]
    if changed:
        lines += ["| column | base | variant |", "|---|---|---|"]
        lines += [f"| {name} | {before} | {after} |" for name, (before, after) in changed.items()]
    else:
        lines.append("Nothing differs: this variant is a baseline and stands for itself.")
    lines += ["", "Median over seeds (smallest to largest).", "", *table(mine, other, metrics), ""]
    impls = {name: ", ".join(sorted(frame.impl.unique())) for name, frame in ((base, other), (variant, mine))}
    lines += [f"Ran as: {name}: {impl}." for name, impl in impls.items()]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.ablation", description=__doc__.split("\n")[0])
    parser.add_argument("--run", required=True, help="folder under results, such as smoke")
    parser.add_argument("--variant", required=True)
    parser.add_argument("--base", help="default: the variant's base in config/variants.tsv")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        base = args.base or read_sheet("variants")[args.variant]["base"] or args.variant
        record.write_text(args.output, report(Path("results") / args.run / "records", args.variant, base))
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
