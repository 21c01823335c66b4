"""Typeset the report: paper/*.typ + values.json + figures -> report.pdf, the same bytes for the same inputs.

    python -m paper.build --tier smoke --output results/smoke/paper/report.pdf

values.json is read beside the output (python -m paper.values writes it), figures from results/<tier>/figures. All of it
is put side by side in a temporary folder, so that paths in the text do not depend on where results lie.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import typst

from gem.cli import Parser

PAPER = Path(__file__).resolve().parent


def build(values: Path, figures: Path, output: Path) -> int:
    """Compile; returns the size of the PDF in bytes. Typesetting faults are a ValueError of one line."""
    if not values.exists():
        raise ValueError(f"{values}: no such file; allowed: the output of python -m paper.values")
    wanted = [item["file"] for item in json.loads(values.read_text(encoding="utf-8"))["figures"].values()]
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name)
        for path in PAPER.rglob("*"):
            if path.suffix in (".typ", ".bib"):
                target = stage / path.relative_to(PAPER)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        shutil.copyfile(values, stage / "values.json")
        (stage / "figures").mkdir()
        for file in wanted:
            if not (figures / file).exists():
                raise ValueError(f"{figures / file}: named in {values} and not there; allowed: values.json made anew")
            shutil.copyfile(figures / file, stage / "figures" / file)
        try:
            pdf = typst.compile(str(stage / "report.typ"), root=str(stage), ignore_system_fonts=True)
        except RuntimeError as error:
            raise ValueError(f"paper/report.typ: {_one_line(error)}") from None
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(pdf)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return len(pdf)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m paper.build", description="Typeset the report.")
    parser.add_argument("--tier", required=True, help="folder under results: smoke, gpu, gpu2, frozen")
    parser.add_argument("--output", type=Path, required=True, help="report.pdf; values.json lies beside it")
    parser.add_argument("--results", type=Path, default=Path("results"))
    args = parser.parse_args(argv)
    try:
        size = build(args.output.with_name("values.json"), args.results / args.tier / "figures", args.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
