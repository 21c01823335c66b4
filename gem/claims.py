"""Verdicts on the claims of the source, by rules that are data (config/claims.tsv) fixed before the measurements.

    python -m gem.claims --records results/smoke/records --output results/smoke/claims/claims.csv
    python -m gem.claims --output results/frozen/claims/claims.csv      from the shipped records alone

A rule selects records for a numerator and, for a comparison, a denominator; pairs them case by case; transforms and
aggregates; and compares with reproduced_at and partly_at. Numbers of a chip's speed come from a GPU: from this tier's
own records when they are a GPU's, else from the frozen ones under data/measured,
else the claim is not attempted and says why. Records of two devices are never put together: the first device that has
what a rule asks for is judged, what was measured before what was modelled beside it.
What does not depend on the chip (data, balance, quality) may come from a CPU.

verdict: reproduced, exceeded (an achievement beyond the source's best figure), partly, not_reproduced, context,
not_attempted. `limiter` is what bounds the case on this chip or, where nothing was judged, the reason.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from gem import record
from gem.cli import Parser
from gem.expected import ACHIEVEMENTS, expected
from gem.workflow import read_sheet

COLUMNS = "id,statement,published,expected,ours,unit,ratio,scope,verdict,limiter,source_record,figure,command".split(
    ","
)
VERDICTS = ("reproduced", "exceeded", "partly", "not_reproduced", "context", "not_attempted")
# Experiments whose numbers say nothing about a chip's speed, so that a CPU's records can be judged.
CHIP_FREE = {"data", "train", "quality", "activations", "mx", "balance"}
PREFERRED_DEVICES = ("h200", "h200x2")


@dataclass(frozen=True)
class Source:
    """A folder of merged records: name for the reader, rows, and the runs behind them."""

    name: str
    frame: pd.DataFrame
    runs: dict[str, dict]

    @staticmethod
    def of(folder: Path) -> Source:
        frame = record.read(folder)
        runs = record.read_runs(folder)
        kind = frame.run_id.map(lambda run: runs.get(run, {}).get("device", {}).get("type", "cpu"))
        return Source(folder.as_posix(), frame.assign(device=kind), runs)


def sources_of(records: Path | None, measured: Path) -> list[Source]:
    """This tier's records where there are any, then the frozen ones, the reference device first."""
    rank = {name: index for index, name in enumerate(PREFERRED_DEVICES)}
    folders = sorted(
        (path for path in measured.glob("*") if (path / "runs.json").exists()),
        key=lambda path: (rank.get(path.name, 99), path.name),
    )
    own = [records] if records and records.exists() else []
    return [Source.of(folder) for folder in [*own, *folders]]


def judge(rule: dict, sources: Iterable[Source], directions: dict[str, str]) -> dict:
    """The row of claims.csv for one rule. directions: metric -> "higher" or "lower" is better."""
    row = dict.fromkeys(COLUMNS, "") | {"id": rule["id"], "statement": rule["statement"], "figure": rule["figure"]}
    row |= {"published": _published(rule), "unit": rule["unit"], "scope": rule["scope"]}
    if not rule["experiment"]:
        verdict = "context" if rule["scope"] == "context" else "not_attempted"
        return row | {"verdict": verdict, "limiter": rule["not_attempted_reason"]}
    reason = f"no record of {rule['experiment']} fits {rule['numerator']}"
    best_chip, best_free = None, None
    for source in sources:
        rows = source.frame[source.frame.experiment.isin(experiments(rule))]
        gpu = rows[rows.device == "cuda"]
        free = rows[rows.device != "cuda"]
        free = free if rule["experiment"] in CHIP_FREE else free[free.scope == "modelled"]
        for usable, chip in ((gpu, True), (free, False)):
            pairs, why = pair(rule, usable, directions)
            if pairs is None:
                reason = why or reason
            elif chip and _measured(usable, pairs):
                return row | _verdict(rule, source, usable, pairs)
            elif chip:  # modelled on a host with a GPU
                best_chip = best_chip or (source, usable, pairs)
            else:
                best_free = best_free or (source, usable, pairs)
    if best_chip or best_free:
        return row | _verdict(rule, *(best_chip or best_free))
    if (rule["experiment"] not in CHIP_FREE) and "fits" in reason:
        reason = f"needs a GPU record of {rule['experiment']} ({reason})"
    return row | {"verdict": "not_attempted", "limiter": rule["not_attempted_reason"] or reason}


def _wanted(rule: dict, side: str) -> dict[str, str]:
    """Columns and values that a side of a rule takes; the rule's experiment, unless the side names another."""
    return {"experiment": rule["experiment"]} | dict(item.split("=", 1) for item in rule[side].split(";"))


def experiments(rule: dict) -> set[str]:
    """Experiments whose records a rule reads."""
    return {_wanted(rule, side)["experiment"] for side in ("numerator", "denominator") if rule[side]}


def _measured(rows: pd.DataFrame, pairs: pd.DataFrame) -> bool:
    """Whether a number of the rule's numerator was measured or emulated, not modelled alone."""
    return bool((rows[rows.run_id.isin(pairs.run_id)].scope != "modelled").any())


def pair(rule: dict, rows: pd.DataFrame, directions: dict[str, str]) -> tuple[pd.DataFrame | None, str | None]:
    """Values of a rule, one row a pair: numerator, denominator, their share_of_bound, case. (None, reason) where none.

    Rows without an implementation in the rule are represented by the best one of each case; seeds by their median.
    """
    filters = _filters(rule["case_filter"])
    sides = {}
    for side in ("numerator", "denominator"):
        if not rule[side]:
            continue
        wanted = _wanted(rule, side)
        found = rows[[fnmatchcase(case, filters[side]) for case in rows.case]] if len(rows) else rows
        for column, value in wanted.items():
            found = found[found[column] == value]
        if len(found) and not (found.status == "ok").any():
            return None, f"{found.iloc[0].status}: {found.iloc[0].note}"
        sides[side] = _by_case(found[found.status == "ok"], rows, rule["match"], directions[wanted["metric"]])
        if sides[side].empty:
            return None, None
    numerator = sides["numerator"]
    if "denominator" not in sides:
        return numerator.assign(denominator=np.nan, denominator_share=np.nan).rename(columns=_NUMERATOR), None
    denominator = sides["denominator"]
    if not set(numerator["key"]) & set(denominator["key"]) and len(numerator) == len(denominator) == 1:
        denominator = denominator.assign(key=numerator["key"].iloc[0])
    joined = numerator.rename(columns=_NUMERATOR).merge(denominator.rename(columns=_DENOMINATOR), on=["key", "phase"])
    return (joined, None) if len(joined) else (None, "numerator and denominator have no case in common")


_NUMERATOR = {"p50": "numerator", "share": "numerator_share", "limiter": "numerator_limiter"}
_DENOMINATOR = {"p50": "denominator", "share": "denominator_share", "limiter": "limiter", "case": "denominator_case"}
_DENOMINATOR |= {"run_id": "denominator_run"}


def _by_case(found: pd.DataFrame, rows: pd.DataFrame, match: str, direction: str) -> pd.DataFrame:
    """One row a case and phase: key, p50, share_of_bound and limiter of the same implementation, run."""
    if match:
        keys = found.case.map(lambda case: "|".join(hit.groups()) if (hit := re.search(match, case)) else None)
        found = found.assign(key=keys)[keys.notna()]
    else:
        found = found.assign(key=found.case)
    if found.empty:
        return found.assign(share=[], limiter=[])
    who = ["case", "subject", "impl", "phase"]
    merged = found.groupby([*who, "key"], as_index=False).agg(p50=("p50", "median"), run_id=("run_id", "first"))
    merged = merged.sort_values("p50", ascending=direction == "lower").groupby(["case", "phase", "key"]).head(1)
    shares = rows[(rows.metric == "share_of_bound") & (rows.status == "ok")].groupby(who).p50.median().rename("share")
    limits = rows[rows.metric == "bound_ms"].groupby(who).note.first().rename("limiter")
    merged = merged.merge(shares, how="left", left_on=who, right_index=True)
    return merged.merge(limits, how="left", left_on=who, right_index=True).drop(columns=["subject", "impl"])


def _verdict(rule: dict, source: Source, rows: pd.DataFrame, pairs: pd.DataFrame) -> dict:
    run = source.runs.get(pairs.run_id.iloc[0], {})
    device = run.get("device", {}).get("name", "")
    values = _transform(rule["transform"], pairs, device)
    if values is None:
        return {"verdict": "not_attempted", "limiter": f"no nominal peak is known for {device}"}
    ours = _aggregate(rule, values)
    metric = dict(item.split("=", 1) for item in rule["numerator"].split(";"))["metric"]
    allowed = expected(rule, metric, pairs, device)
    limiters = pairs["limiter" if "limiter" in pairs else "numerator_limiter"].dropna()
    unit = "share of bf16 peak" if rule["transform"] == "share_of_peak" else rule["unit"]
    published = _number(rule["published_low"])
    scopes = sorted(rows[rows.run_id.isin(pairs.run_id)].scope.unique())
    stale = "" if not run or record.is_current(run) else " (older sources)"
    return {
        "expected": "" if allowed is None else _format(_aggregate(rule, allowed)),
        "ours": _format(ours),
        "unit": unit,
        "ratio": _format(ours / published) if published and rule["transform"] != "share_of_peak" else "",
        "scope": scopes[0] if len(scopes) == 1 else rule["scope"],
        "verdict": _rank(rule, ours),
        "limiter": limiters.mode().iloc[0] if len(limiters) else "",
        "source_record": f"{source.name}/{rule['experiment']}.csv{stale}",
        "command": run.get("command", ""),
    }


def _transform(name: str, pairs: pd.DataFrame, device: str) -> pd.Series | None:
    numerator, denominator = pairs.numerator, pairs.denominator
    if name == "value":
        return numerator
    if name == "ratio":
        return numerator / denominator
    if name == "one_minus_ratio":
        return 1 - numerator / denominator
    if name == "ratio_minus_one":
        return numerator / denominator - 1
    if name == "difference":
        return numerator - denominator
    from kernels import bounds  # share_of_peak

    try:
        return numerator * 1e12 / bounds.peak_flops(device)
    except ValueError:
        return None


def _aggregate(rule: dict, values: pd.Series) -> float:
    name = rule["aggregate"]
    if name == "geomean":
        return float(np.exp(np.log(values).mean())) if (values > 0).all() else float(values.mean())
    if name == "median":
        return float(values.median())
    if name == "max":
        return float(values.max())
    return float(values.min() if rule["direction"] == "higher" else values.max())  # all: the worst case counts


def _rank(rule: dict, ours: float) -> str:
    sign = 1 if rule["direction"] == "higher" else -1
    best = max(
        (sign * x for name in ("published_low", "published_high") if (x := _number(rule[name])) is not None),
        default=None,
    )
    beats = rule["metric"] in ACHIEVEMENTS and rule["transform"] != "share_of_peak"
    if beats and best is not None and sign * ours > best:
        return "exceeded"
    if sign * ours >= sign * float(rule["reproduced_at"]):
        return "reproduced"
    return "partly" if sign * ours >= sign * float(rule["partly_at"]) else "not_reproduced"


def _filters(text: str) -> dict[str, str]:
    if "=" in text:
        given = dict(item.split("=", 1) for item in text.split(";"))
        return {side: given.get(side, "*") for side in ("numerator", "denominator")}
    return {"numerator": text or "*", "denominator": text or "*"}


def _published(rule: dict) -> str:
    low, high = rule["published_low"], rule["published_high"]
    return f"{low}-{high}" if high and high != low else low


def _number(text: str) -> float | None:
    return float(text) if text else None


def _format(value: float) -> str:
    return format(value, ".3g")


def table(rules: Iterable[dict], sources: list[Source]) -> str:
    """claims.csv as text."""
    directions = {name: row["direction"] for name, row in read_sheet("metrics").items()}
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(judge(rule, sources, directions) for rule in rules)
    return buffer.getvalue()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.claims", description="Judge the claims of the source.")
    parser.add_argument("--records", type=Path, help="merged records of a tier (without: shipped records alone)")
    parser.add_argument(
        "--measured", type=Path, default=Path("data/measured"), help="frozen records, one folder a device"
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        text = table(read_sheet("claims").values(), sources_of(args.records, args.measured))
        record.write_text(args.output, text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counts = pd.read_csv(io.StringIO(text)).verdict.value_counts()
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
