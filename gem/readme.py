"""The generated parts of README.md, between markers: the verdict line, the table of claims, times and disk of a run.

    python -m gem.readme                           from the shipped records (data/measured)
    python -m gem.readme --claims results/gpu/claims/claims.csv --records results/gpu/records
    python -m gem.readme --stages results/smoke    and time, memory and disk by stage from that run's benchmark files
    python -m gem.readme --check                   exit code 1 when README.md says something else

Markers are HTML comments, `<!-- verdict:begin -->` and `<!-- verdict:end -->`, and the same with `claims` and
`stages`. Benchmark files are not shipped, so that part stays what it is until --stages names a run.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gem import claims, record, stages
from gem.cli import Parser
from gem.digest import ROOT
from gem.workflow import read_sheet

WORDS = {"not_reproduced": "not reproduced", "not_attempted": "not attempted"}
MAX_REASON = 90


def verdict_line(rows: Sequence[Mapping], runs: Mapping[str, Mapping]) -> str:
    """One sentence: how many claims are reproduced, on which GPU, at which commit, when."""
    count = {name: sum(row["verdict"] == name for row in rows) for name in claims.VERDICTS}
    judged = len(rows) - count["context"] - count["not_attempted"]
    met = count["reproduced"] + count["exceeded"]
    line = (
        f"**{met} of {len(rows)} claims reproduced** ({count['exceeded']} of them exceeded), {count['partly']} partly, "
        f"{count['not_reproduced']} not, {len(rows) - judged} not judged"
    )
    gpu = [info for info in runs.values() if info.get("device", {}).get("type") == "cuda"]
    if not gpu:
        return f"{line}; no GPU records are shipped yet."
    names = sorted({info["device"]["name"] for info in gpu})
    latest = max(gpu, key=lambda info: info.get("utc", ""))
    return f"{line}; {', '.join(names)}, commit {str(latest['commit'])[:10]}, {latest.get('utc', '')[:10]}."


def claims_table(rows: Sequence[Mapping]) -> str:
    """Markdown table, one row a claim: published, expected on the chip, ours, verdict, and why."""
    lines = ["| id | claim of the source | published | expected | ours | verdict | figure | bound or reason |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    rules = read_sheet("claims")
    for row in rows:
        rule = rules[row["id"]]
        verdict = WORDS.get(row["verdict"], row["verdict"])
        if row["verdict"] in ("reproduced", "exceeded"):
            verdict = f"**{verdict}**"
        cells = [
            row["id"],
            row["statement"],
            range_text([rule["published_low"], rule["published_high"]], rule["unit"]),
            with_unit(row["expected"], row["unit"]),
            with_unit(row["ours"], row["unit"]),
            verdict,
            row["figure"],
            _short(reason(row["limiter"], judged=row["ours"] != "")),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3].rstrip() + "..."


def with_unit(value: str, unit: str) -> str:
    """A number of claims.csv as a reader says it: "28 %" for a fraction, "1.4x" for a factor; nothing for nothing."""
    if not value:
        return ""
    number = float(value)
    if unit == "fraction":
        return f"{100 * number:.3g} %"
    if unit == "share of bf16 peak":
        return f"{100 * number:.3g} % of peak"
    if unit == "x":
        return f"{number:.3g}\u00d7"
    return f"{number:,.0f} {unit}".strip() if number >= 1000 else f"{number:.3g} {unit}".strip()


def range_text(parts: Sequence[str], unit: str) -> str:
    """One published number, or two as a range with the unit once: "1.21-1.4x"."""
    texts = [with_unit(part, unit) for part in dict.fromkeys(parts) if part]
    if len(texts) < 2:
        return "".join(texts)
    return f"{re.match(r'[0-9.,]+', texts[0])[0]}\u2013{texts[1]}"


def reason(text: str, *, judged: bool) -> str:
    """What limits, or why nothing was judged; which columns found nothing is for who edits the rule."""
    text = re.sub(r" ?\(?no record of \w+ fits .*", "", text)
    return text or ("" if judged else "no record of this experiment")


def replace(text: str, name: str, content: str) -> str:
    """Text with what stands between the markers of `name` replaced. ValueError unless there is one pair of them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md: needs the markers {begin} and {end} once, in this order")
    head, tail = text[: text.index(begin)], text[text.index(end) :]
    return f"{head}{begin}\n{content}\n{tail}"


def generate(text: str, rows: Sequence[Mapping], runs: Mapping[str, Mapping]) -> str:
    """README's text with both generated parts made anew."""
    return replace(replace(text, "verdict", verdict_line(rows, runs)), "claims", claims_table(rows))


def shipped(measured: Path) -> tuple[list[dict], dict[str, dict]]:
    """Rows of claims.csv and runs, from the shipped records alone."""
    sources = claims.sources_of(None, measured)
    text = claims.table(read_sheet("claims").values(), sources)
    return list(csv.DictReader(io.StringIO(text))), {k: v for source in sources for k, v in source.runs.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.readme", description="Fill the generated parts of README.md.")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--claims", type=Path, help="a claims.csv (default: judge the shipped records)")
    parser.add_argument("--records", type=Path, help="records behind --claims, for the device and the commit")
    parser.add_argument("--stages", type=Path, metavar="DIR", help="a finished run, for time and disk by stage")
    parser.add_argument("--measured", type=Path, default=ROOT / "data" / "measured", help="shipped records")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 when README.md is out of date"
    )
    args = parser.parse_args(argv)
    try:
        rows, runs = shipped(args.measured)
        if args.claims:
            with open(args.claims, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        if args.records:
            runs = json.loads((args.records / "runs.json").read_text(encoding="utf-8"))
        old = args.readme.read_text(encoding="utf-8")
        new = generate(old, rows, runs)
        if args.stages:
            new = replace(new, "stages", stages.markdown(args.stages))
        if args.check and new != old:
            raise ValueError(f"{args.readme.name}: verdict line or claims differ; allowed: after python -m gem.readme")
        if not args.check:
            record.write_text(args.readme, new)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.readme.name}: {verdict_line(rows, runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
