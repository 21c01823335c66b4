"""The report compiles with and without figures, has the same bytes twice, and its text types no result."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paper import build, values
from tests.paper import tiny

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "paper"
SECTIONS = sorted((PAPER / "sections").glob("*.typ"))

# Definitions, not results: block and MX sizes, quantiles, names of dimensions.
ALLOWED = (
    "August 2026",
    "20 % and 80 %",
    "64-token",
    "64 tokens",
    "64 events",
    "block of 64",
    "32 consecutive",
    "32 by 32",
    "2-D",
    '"5D"',
    "2D",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """results/smoke with values.json and one figure, made with matplotlib as figures/ does."""
    from matplotlib.figure import Figure

    root = tmp_path_factory.mktemp("report")
    tiny.frozen_kernels(root / "measured")
    folder = tiny.results(root) / "smoke"
    (folder / "figures").mkdir()
    figure = Figure(figsize=(6.6, 2.0))
    figure.subplots().plot([0, 1], [1, 0])
    figure.savefig(folder / "figures" / "F20.pdf", metadata={"CreationDate": None})
    (folder / "figures" / "F20.csv").write_text("ranks,skew\n8,1.05\n")
    arguments = ["--tier", "smoke", "--results", str(root / "results"), "--measured", str(root / "measured")]
    output = str(folder / "paper" / "values.json")
    assert values.main([*arguments, "--published", str(ROOT / "data" / "published"), "--output", output]) == 0
    return folder


def test_two_builds_have_the_same_bytes(run, tmp_path):
    first, second = tmp_path / "a.pdf", tmp_path / "b.pdf"
    for path in (first, second):
        build.build(run / "paper" / "values.json", run / "figures", path)
    assert first.read_bytes().startswith(b"%PDF-")
    assert first.read_bytes() == second.read_bytes()


def test_a_figure_of_this_build_is_in_the_pdf_and_an_absent_one_is_named(run, tmp_path):
    found = json.loads((run / "paper" / "values.json").read_text())
    assert list(found["figures"]) == ["F20"] and found["figures"]["F20"]["caption"]
    with_figure = build.build(run / "paper" / "values.json", run / "figures", tmp_path / "with.pdf")
    found["missing"].append({"id": "F20", "title": found["figures"].pop("F20")["title"], "reason": "taken out"})
    changed = tmp_path / "values.json"
    changed.write_text(json.dumps(found))
    assert build.build(changed, run / "figures", tmp_path / "without.pdf") < with_figure - 2000


def test_numbers_in_the_text_come_from_values(run, tmp_path):
    """Changing a value changes the report: nothing of it was typed."""
    found = json.loads((run / "paper" / "values.json").read_text())
    path = tmp_path / "values.json"
    sizes = {}
    for text in ("0.970", "0.111"):
        found["facts"]["ne_ctr.no_sequence"]["text"] = text
        path.write_text(json.dumps(found))
        build.build(path, run / "figures", tmp_path / "report.pdf")
        sizes[text] = (tmp_path / "report.pdf").read_bytes()
    assert sizes["0.970"] != sizes["0.111"]


def test_a_value_that_is_asked_for_and_missing_is_an_error(run, tmp_path):
    found = json.loads((run / "paper" / "values.json").read_text())
    found["claims"] = [row for row in found["claims"] if row["id"] != "C05"]
    path = tmp_path / "values.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="C05") as error:
        build.build(path, run / "figures", tmp_path / "report.pdf")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report.pdf").exists()


def test_a_missing_figure_file_or_values_file_is_one_line(run, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"F20\.pdf"):
        build.build(run / "paper" / "values.json", tmp_path, tmp_path / "report.pdf")
    assert build.main(["--tier", "smoke", "--output", str(tmp_path / "report.pdf")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "paper.values" in error and error.count("\n") == 1


def test_command_line_builds_beside_values(run):
    output = run / "paper" / "report.pdf"
    assert build.main(["--tier", "smoke", "--results", str(run.parent), "--output", str(output)]) == 0
    assert output.stat().st_size > 50_000
    output.unlink()


def test_frozen_builds_without_stages(run, tmp_path):
    found = json.loads((run / "paper" / "values.json").read_text()) | {"frozen": True, "run": "frozen", "stages": []}
    path = tmp_path / "values.json"
    path.write_text(json.dumps(found))
    assert build.build(path, run / "figures", tmp_path / "report.pdf") > 50_000


def typed_numbers(text: str) -> list[str]:
    """Numbers in the prose of a section: not in formulas, strings, layout, names such as FP8, or definitions."""
    text = re.sub(r"//.*", "", text)
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    text = re.sub(r"\$[^$]*\$", "", text)  # formulas
    text = re.sub(r'"[^"]*"', "", text)  # file names, ids
    text = re.sub(r"(==|<=|>=|<|>|\+)\s*\d+", "", text)  # comparisons in code
    text = re.sub(r"[\w-]+:\s*\(?[\d.]+(pt|mm|em|fr)?", "", text)  # named arguments
    text = re.sub(r"update\(0\)|slice\(1\)|[\d.]+(pt|mm|em|fr)\b", "", text)
    return re.findall(r"(?<![\w.@-])\d[\d.,]*(?:\s*(?:%|TFLOP/s|GB/s|ms|x\b))?", text)


@pytest.mark.parametrize("path", SECTIONS, ids=[path.stem for path in SECTIONS])
def test_no_result_is_typed(path):
    assert typed_numbers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "sentence", ["reaches 512 TFLOP/s", "NE falls to 0.91.", "is 28 % slower", "about 1.3x, or so"]
)
def test_a_typed_result_would_be_found(sentence):
    assert typed_numbers(f"We see that it {sentence}")


def test_every_section_is_included_and_every_reference_is_cited():
    report = (PAPER / "report.typ").read_text(encoding="utf-8")
    for path in SECTIONS:
        assert f'"sections/{path.name}"' in report
    text = report + "".join(path.read_text(encoding="utf-8") for path in SECTIONS)
    keys = re.findall(r"^@\w+\{(\w+),", (PAPER / "refs.bib").read_text(encoding="utf-8"), re.M)
    assert len(keys) == len(set(keys)) >= 12
    for key in keys:
        assert f"@{key}" in text, f"{key} is in refs.bib and never cited"


def test_every_claim_and_every_figure_has_a_place_in_the_text():
    text = "".join(path.read_text(encoding="utf-8") for path in SECTIONS)
    for row in values._sheet("claims"):
        assert f'"{row["id"]}"' in text, f"claim {row['id']} stands in no section"
    for row in values._sheet("figures"):
        name = row["id"]
        assert f'fig("{name}")' in text or f'tab("{name}"' in text or f"*{name}." in text, f"{name} has no place"


def test_no_package_is_downloaded_and_no_date_is_written():
    for path in PAPER.rglob("*.typ"):
        text = path.read_text(encoding="utf-8")
        assert "@preview" not in text and "datetime.today" not in text
    assert "date: none" in (PAPER / "lib.typ").read_text(encoding="utf-8")


def test_the_text_is_staged_from_a_copy(run, tmp_path, monkeypatch):
    """The build does not depend on where the repository or the results lie."""
    shutil.copytree(run, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "elsewhere"
    build.build(here / "paper" / "values.json", here / "figures", tmp_path / "moved.pdf")
    build.build(run / "paper" / "values.json", run / "figures", tmp_path / "home.pdf")
    assert (tmp_path / "moved.pdf").read_bytes() == (tmp_path / "home.pdf").read_bytes()


def test_no_semicolon_is_swallowed():
    """In typst a semicolon right after an expression ends the code and is not printed."""
    for path in SECTIONS:
        found = re.search(r"#[\w-]+\([^()\n]*\)(\.[\w()]+)*;\s", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found[0]!r}; write \\;"
