"""The command line that all figure and table modules share.

A figure module has ID, CAPTION and draw(source) -> (matplotlib figure, DataFrame of what is plotted); a table module
has ID, CAPTION and build(source) -> DataFrame of strings and numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from figures.load import Source


class Parser(argparse.ArgumentParser):
    """Errors of one line, as everywhere. Figures import nothing of gem, so the class stands here again."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; allowed: see --help\n")


def main(module, argv: list[str] | None = None) -> int:
    """Run a module; the exit code. Missing data or a bad path: one line, exit code 1."""
    parser = Parser(prog=f"python -m {module.__spec__.name}", description=module.CAPTION)
    parser.add_argument("--records", type=Path, help="folder of merged records, results/<tier>/records")
    parser.add_argument(
        "--measured", type=Path, default=Path("data/measured"), help="frozen records (default %(default)s)"
    )
    parser.add_argument("--published", type=Path, default=Path("data/published"), help="numbers of the source")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="writes PREFIX.pdf, ... and PREFIX.csv")
    parser.add_argument("--caption", action="store_true", help="print the caption and end")
    args = parser.parse_args(argv)
    if args.caption:
        print(module.CAPTION)
        return 0
    for name in ("records", "output"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is needed")
    try:
        source = Source(args.records, args.measured, args.published)
        if hasattr(module, "draw"):
            from figures import style

            style.setup()
            figure, table = module.draw(source)
            paths = [*style.save(figure, args.output), write_csv(table, args.output)]
        else:
            table = module.build(source)
            paths = [write_csv(table, args.output), write_markdown(table, args.output)]
    except (ValueError, OSError) as error:
        print(f"error: {module.ID}: {error}", file=sys.stderr)
        return 1
    print(f"{module.ID}: {len(table)} rows -> {', '.join(str(path) for path in paths)}")
    return 0


def write_csv(table: pd.DataFrame, prefix: Path) -> Path:
    """PREFIX.csv, numbers with nine digits."""
    path = prefix.parent / f"{prefix.name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")
    return path


def write_markdown(table: pd.DataFrame, prefix: Path) -> Path:
    """PREFIX.md: a table with numbers as a reader wants them."""
    path = prefix.parent / f"{prefix.name}.md"
    lines = ["| " + " | ".join(str(name) for name in table.columns) + " |", "|" + " --- |" * len(table.columns)]
    for row in table.itertuples(index=False):
        lines.append("| " + " | ".join(text(value) for value in row) + " |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def text(value) -> str:
    """A cell: four significant digits, large whole numbers in groups of three, nothing for a missing value."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, bool) or isinstance(value, str):
        return str(value).replace("|", "\\|").replace("\n", " ")
    number = float(value)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"
