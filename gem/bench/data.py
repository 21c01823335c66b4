"""Records of what a data set is: sizes, lengths, what padding it would waste, and the Bayes-optimal quality.

    python -m gem.bench.data --data results/smoke/data/base --run smoke

All of it stands in the data set's manifest. `waste` is the share of a padded batch that is padding, for tokens and,
since a sequence's attention pairs grow with its square, for pairs of the stated length law.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gem import record
from gem.cli import Parser


def pair_waste(mean: float, cv: float, longest: float) -> float:
    """Share of padded attention pairs that are padding: 1 - E[n^2] / max^2, with E[n^2] = mean^2 (1 + cv^2)."""
    return 1.0 - mean**2 * (1.0 + cv**2) / longest**2


def add_records(run: record.Run, manifest: dict) -> None:
    """Rows of one manifest: a case a split and event type, metrics of config/metrics.tsv."""
    name = manifest["name"]

    def add(case: str, metric: str, value: float | None, **extra) -> None:
        if value is not None:
            row = {"case": case, "subject": name, "impl": "data", "phase": "model", "metric": metric}
            run.add(**row, p50=value, **extra)

    for split, content in manifest["splits"].items():
        add(split, "rows", content["rows"])
        for event, length in content["length"].items():
            case = f"{split}_{event}"
            add(case, "events", content["events"][event])
            add(case, "mean_length", length["mean"])
            add(case, "length_cv", length["cv"])
            add(case, "fill", length["fill"])
            if length["max"]:
                add(f"{case}_tokens", "waste", 1.0 - length["mean"] / length["max"])
                add(f"{case}_pairs", "waste", pair_waste(length["mean"], length["cv"], length["max"]))
    for task, best in (manifest.get("bayes") or {}).items():
        add("eval", f"ne_bayes_{task}", best.get("ne"), scope="modelled")
        add(f"eval_{task}", "base_rate", best.get("base_rate"))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.data", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with manifest.json")
    parser.add_argument("--run", required=True, help="folder under results for the records")
    args = parser.parse_args(argv)
    try:
        manifest = json.loads((args.data / "manifest.json").read_text(encoding="utf-8"))
        config = {"generator": manifest["generator"], "seed": manifest["seed"]}
        with record.Run(args.run, "data", name="data", config=config, sources=("gem/bench/data.py",)) as run:
            add_records(run, manifest)
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {args.data}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
