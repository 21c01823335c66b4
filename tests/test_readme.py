"""README keeps its word: paths exist, and the generated parts are those of the shipped records."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gem import readme
from gem.workflow import read_sheet
from tests.paper import tiny
from tests.test_commands import DOCUMENTS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEXTS = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_and_paths_exist(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target
    for name in re.findall(r"`((?:kernels|gem|data|config|figures|paper|tests|envs|profiles|workflow)/[\w./]*)`", text):
        # paper/report.pdf lies under results/, data/mine is a reader's own
        assert name in ("paper/report.pdf", "data/mine") or (ROOT / name).exists(), name


def test_every_module_is_on_the_map():
    """The module map is true: each module of these folders is named in it, and each name is a file there."""
    rows = "\n".join(line for line in CONTRIBUTING.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"[\w/]*?(\w+\.py)`", rows))
    folders = ("gem", "gem/parallel", "gem/bench", "kernels", "paper")
    files = {path.name: path for folder in folders for path in (ROOT / folder).glob("*.py")}
    missing = sorted(set(files) - named - {"__init__.py"})
    assert not missing, f"not on the module map of CONTRIBUTING.md: {', '.join(missing)}"
    elsewhere = {path.name for folder in ("data", "figures", "kernels") for path in (ROOT / folder).rglob("*.py")}
    assert named <= set(files) | elsewhere, f"on the module map and nowhere else: {named - set(files) - elsewhere}"


def test_the_library_example_runs(monkeypatch):
    import kernels

    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.setitem(sys.modules, "gem_kernels", kernels)
    scope: dict = {}
    exec(code, scope)
    assert tuple(scope["o"].shape) == (110, 4, 64)


def test_messages_in_troubleshooting_are_ours():
    """Messages that this code writes stand in this code, so that a reader who searches finds them."""
    sources = (ROOT / "Makefile").read_text() + "".join(path.read_text() for path in (ROOT / "gem").glob("*.py"))
    for message in ("needs an NVIDIA GPU with its driver", "is unknown; allowed: ", "has no manifest.json"):
        assert message in README and message in sources
    assert "verdict line or claims differ" in README and "verdict line or claims differ" in sources


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_machine_paths_and_no_package_hosts(name):
    for pattern in (
        r"/work\b",
        r"/root\b",
        r"/home/",
        r"/tmp/",
        r"pypi\.org",
        r"download\.pytorch",
        r"localhost",
        r"\b10\.\d+\.",
    ):
        assert not re.search(pattern, TEXTS[name]), pattern


def test_generated_parts_are_current(capsys):
    """Fails when records or rules changed and README did not: python -m gem.readme."""
    assert readme.main(["--check"]) == 0, capsys.readouterr().err


def test_a_drift_is_found(tmp_path, capsys):
    copy = tmp_path / "README.md"
    copy.write_text(README, encoding="utf-8")
    assert readme.main(["--readme", str(copy)]) == 0
    current = copy.read_text(encoding="utf-8")
    assert readme.main(["--check", "--readme", str(copy)]) == 0
    copy.write_text(current.replace("| C05 |", "| C05 | better than ever", 1), encoding="utf-8")
    assert readme.main(["--check", "--readme", str(copy)]) == 1
    error = capsys.readouterr().err
    assert "differ" in error and error.count("\n") == 1
    assert readme.main(["--readme", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == current


def test_markers_must_be_there(tmp_path, capsys):
    copy = tmp_path / "README.md"
    copy.write_text(README.replace("<!-- claims:end -->", ""), encoding="utf-8")
    assert readme.main(["--readme", str(copy)]) == 1
    assert "claims:end" in capsys.readouterr().err


def test_shipped_gpu_records_reach_verdict_line_and_table(tmp_path):
    tiny.frozen_kernels(tmp_path / "measured")
    rows, runs = readme.shipped(tmp_path / "measured")
    line = readme.verdict_line(rows, runs)
    assert line.startswith("**2 of 44 claims reproduced**"), line  # v4 over v2 is 2.0x, v4 over v3 1.67x
    assert "NVIDIA H200, commit" in line
    table = readme.claims_table(rows)
    assert (
        "| C08 | v4 over v2: +40-140 % TFLOP/s at fill 0.5 | 1.4\u20132.4\u00d7 | 2.67\u00d7 | 2\u00d7 | **reproduced**"
        in table
    )
    assert table.count("\n") == len(read_sheet("claims")) + 1


def test_claims_and_records_of_a_run_can_be_shown(tmp_path):
    results = tiny.results(tmp_path)
    copy = tmp_path / "README.md"
    copy.write_text(README, encoding="utf-8")
    arguments = ["--claims", f"{results}/smoke/claims/claims.csv", "--records", f"{results}/smoke/records"]
    assert readme.main([*arguments, "--readme", str(copy)]) == 0
    assert "no GPU records are shipped" in copy.read_text(encoding="utf-8")
    assert (
        "| C04 | Padding to the maximum wastes up to 50 % of compute | 50 % |  | 84 % | **reproduced**"
        in copy.read_text(encoding="utf-8")
    )


def test_times_and_disk_come_from_benchmark_files(tmp_path, capsys):
    results = tiny.results(tmp_path)  # one job of stage train, 12.5 s and 900 MB
    copy = tmp_path / "README.md"
    copy.write_text(README, encoding="utf-8")
    assert readme.main(["--readme", str(copy), "--stages", str(results / "smoke")]) == 0
    text = copy.read_text(encoding="utf-8")
    part = text.partition("<!-- stages:begin -->")[2].partition("<!-- stages:end -->")[0]
    assert "| train | 1 | 12 | 0.88 |" in part and part.count("\n| ") == 2 and "Disk in MB: " in part
    assert readme.main(["--readme", str(copy), "--stages", str(tmp_path / "none")]) == 1
    assert "allowed: a finished run such as results/smoke" in capsys.readouterr().err


def test_stages_in_readme_are_those_of_the_workflow():
    part = README.partition("<!-- stages:begin -->")[2].partition("<!-- stages:end -->")[0]
    shown = set(re.findall(r"^\| (\w+) \|", part, re.M)) - {"stage"}
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    files = re.findall(r"/logs/([\w/{}.+-]+)\.benchmark\.jsonl", rules)
    known = {name.split("/")[0] for name in files}
    assert {"train", "bench", "figures", "paper"} <= shown <= known, shown - known
