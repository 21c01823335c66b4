"""README keeps its word: commands exist, paths exist, the generated parts are those of the shipped records."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gem import readme
from gem.workflow import read_sheet
from tests.paper import tiny

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GENERATED = {"paper/report.pdf"}
TEXTS = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}


def commands(text: str) -> list[list[str]]:
    """Words of every command in code blocks and inline code, comments cut off."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"(snakemake|python|make|pip) ", line)]
    return [words for words in found if words and not any("<" in word or word == "..." for word in words)]


def run(*words: str) -> str:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def modules() -> dict[str, set[str]]:
    """Module -> options that README and CONTRIBUTING pass to it, with the verbs of gem.record apart."""
    found: dict[str, set[str]] = {}
    for words in (words for text in TEXTS.values() for words in commands(text)):
        if words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("data", "gem", "paper", "figures"):
            rest = words[3:]
            verb = f" {rest[0]}" if words[2] == "gem.record" and rest else ""
            found.setdefault(words[2] + verb, set()).update(word for word in rest if word.startswith("--"))
    return found


def test_commands_are_found():
    """The extraction sees what it should; an empty list would pass everything."""
    assert ["make", "reproduce"] in commands(README)
    assert len(commands(README)) >= 15
    assert {"gem.train", "data.import_log", "gem.bench.kernels", "gem.record freeze"} <= set(modules())


@pytest.mark.parametrize("module", sorted(modules()))
def test_options_of_modules_exist(module):
    help_text = run(sys.executable, "-m", *module.split(), "--help")
    for option in modules()[module]:
        assert re.search(rf"{option}\b", help_text), f"python -m {module} has no option {option}"


def test_targets_of_snakemake_exist_and_plan():
    """Every target that README names is a rule, and all of them together make a plan."""
    snakemake = str(Path(sys.executable).with_name("snakemake"))
    rules = set(run(snakemake, "--list-target-rules").split())
    with_value = {"--cores", "--workflow-profile", "--forcerun", "--config", "--report"}
    targets = set()
    for words in (words for text in TEXTS.values() for words in commands(text) if words[0] == "snakemake"):
        rest = iter(words[1:])
        for word in rest:
            if word in with_value:
                value = next(rest)
                if word == "--forcerun":
                    assert (ROOT / "workflow" / "rules" / "train.smk").read_text().count(f"rule {value}:") == 1
                if word == "--workflow-profile":
                    assert (ROOT / value / "config.yaml").exists(), value
            elif not word.startswith("-"):
                targets.add(word)
    assert {"ablation_full", "figure_F04", "frozen"} <= targets
    assert targets <= rules, f"no such targets: {sorted(targets - rules)}"
    assert "ablation_full" in run(snakemake, "-n", "--cores", "all", "ablation_full")


def test_make_targets_and_tiers_exist():
    makefile = (ROOT / "Makefile").read_text()
    for words in (words for text in TEXTS.values() for words in commands(text) if words[0] == "make"):
        for word in words[1:]:
            name, _, value = word.partition("=")
            if value:
                assert re.search(rf"^{name} \?=", makefile, re.M), word
                assert name != "TIER" or (ROOT / "config" / f"{value}.yaml").exists(), word
            else:
                assert re.search(rf"^{word}:", makefile, re.M), f"make {word}"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_links_and_paths_exist(name):
    text = TEXTS[name]
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:kernels|gem|data|config|figures|paper|tests|envs|profiles|workflow)/[\w./]*)`", text):
        # data/measured appears with the first GPU record, the others are made under results/
        assert path.startswith("data/measured") or path in GENERATED or (ROOT / path).exists(), path


def test_every_module_is_on_the_map():
    """The module map is true: each module of gem/ is named in it."""
    for path in sorted((ROOT / "gem").glob("*.py")):
        assert path.stem == "__init__" or f"{path.name}`" in CONTRIBUTING, f"gem/{path.name} is not on the module map"


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
