"""Every command in README and the other documents: run in small, or planned, or parsed by the program that it names.

A document's commands are the lines of its code blocks without a language, and inline code that begins with a program.
`RUN` lists those that are run here, with sizes cut down; whatever else names a module of ours goes through that
module's own command-line parser, Snakemake's through Snakemake's, make's through `make -n`. `ELSEWHERE` names the rest,
with the reason. A command that nothing here understands is an error, so that a new one cannot slip in untested.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gem.workflow import load, read_sheet

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("results", ".venv", ".scratch", ".pytest_cache")
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith((".", *LEFT_OUT))
)
PROGRAMS = "python snakemake make pip git pytest torchrun sbatch sha256sum tar rm ruff .venv/bin/pip .ci/run .".split()
ELSEWHERE = {
    r"git clone REPOSITORY": "the address is the reader's; a clone is what the tests of the workflow work on",
    r"cd gem$": "goes with the clone",
    r"\. \.venv/bin/activate": "needs the environment that make builds; .ci/run builds one and runs all of this in it",
    r"rm -rf \.venv": "takes away what runs this test",
    r"pip install \.( |$)": "tests/test_wheel.py builds the wheel and installs it",
    r"python examples/sequence_model.py": "tests/test_wheel.py runs it on the installed wheel",
    r"tar -xf archive\.tar|sha256sum --check": "tests/gem/test_archive.py unpacks, rebuilds and compares in Python",
    r"\.ci/run": "runs this suite",
    r"sbatch ": "needs a cluster; what it starts is parsed from the line above it, torchrun ... -m gem.parallel.train",
    r"ruff (check|format)$": "make lint is checked, and both run in .ci/run",
    r"python -m pytest tests/kernels/test_gdpa.py": "is part of the suite",
    r"(python -m )?pytest -m": "needs a GPU",
    r"python -m kernels\.jfa\.triton_sweep|python -m tests\.gpu\.sweep_triton": "needs a GPU from the first line on",
}


def joined(block: str) -> list[str]:
    """Lines of a code block, those that end with a backslash put together, comments cut off."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def commands_of(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```\w+\n.*?^```", "", text, flags=re.M | re.S)  # code of a language
    found = [line for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) for line in joined(block)]
    prose = re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S)
    inline = [code for code in re.findall(r"`([^`\n]+)`", prose) if words_of(code)[:1] and is_command(code)]
    return [piece.strip() for line in [*found, *inline] for piece in line.split(" && ")]


def is_command(code: str) -> bool:
    """Whether inline code is a command rather than a name: a program and at least one word, or .ci/run."""
    words = words_of(code)
    return words[0] in PROGRAMS and (len(words) > 1 or words[0] == ".ci/run")


def words_of(line: str) -> list[str]:
    """Words without comment, environment settings and placeholders such as `...`."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return [word for word in words if word != "..."]


COMMANDS = {
    command: str(path.relative_to(ROOT)) for path in reversed(DOCUMENTS) for command in dict.fromkeys(commands_of(path))
}


def kind(command: str) -> str:
    words = words_of(command)
    if any(re.match(pattern, command) for pattern in ELSEWHERE):
        return "elsewhere"
    if words[:2] == ["python", "-m"] or "torchrun" in words[:1]:
        return "module"
    if words and words[0].endswith("pip") and words[1:3] == ["install", "-r"]:
        return "pins"
    return {"snakemake": "snakemake", "make": "make"}.get(words[0] if words else "", "unknown")


def of_kind(name: str) -> list[str]:
    return [command for command in COMMANDS if kind(command) == name]


def test_every_command_is_understood_and_many_are_found():
    assert len(COMMANDS) >= 60 and {"README.md", "data/README.md", "profiles/README.md"} <= set(COMMANDS.values())
    assert {command: COMMANDS[command] for command in of_kind("unknown")} == {}
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, command) for command in COMMANDS), f"{pattern} stands in no document any more"


def main_of(module: str):
    """What `python -m module` calls."""
    return importlib.import_module({"gem.record": "gem.record_store"}.get(module, module)).main


class Parsed(Exception):
    """Raised in place of what a program does after it has read its command line."""


def parse(monkeypatch, module: str, words: list[str]) -> argparse.Namespace:
    """What `python -m module words` reads, by its own parser; nothing after that runs. SystemExit: a usage error."""
    read = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        raise Parsed(read(self, args, namespace))

    main = main_of(module)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            main(words)
    return caught.value.args[0]


def module_and_words(command: str) -> tuple[str, list[str]]:
    """torchrun and gem.parallel.launch start a module of their own: that one counts."""
    words = words_of(command)
    last = len(words) - 1 - words[::-1].index("-m")
    return words[last + 1], [{"HOST0:29400": "localhost"}.get(word, word) for word in words[last + 2 :]]


@pytest.mark.parametrize("command", of_kind("module"))
def test_a_module_reads_its_command_line(command, monkeypatch, capsys):
    module, words = module_and_words(command)
    if "..." in command or len(words) == 0:  # options are left out for the reader to fill in: those named must exist
        with pytest.raises(SystemExit):
            main_of(module)(["--help"])
        text = capsys.readouterr().out
        assert all(re.search(rf"{word}\b", text) for word in words if word.startswith("--")), command
        return
    read = parse(monkeypatch, module, words)
    known = {"variants": read_sheet("variants"), "cases": read_sheet("kernels"), "tier": ("smoke", "gpu", "gpu2")}
    for name, allowed in (known | {"variant": known["variants"]}).items():
        given = getattr(read, name, None) or []
        given = given.split(",") if isinstance(given, str) else list(given)
        assert set(given) <= set(allowed), f"{command}: {name}"


def test_a_wrong_command_line_is_found(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "gem.train", ["--variant", "full", "--data", "x", "--colour", "red"])
    assert "--colour" in capsys.readouterr().err
    assert parse(monkeypatch, "gem.train", ["--variant", "full", "--data", "x"]).variant == "full"


@pytest.mark.parametrize("command", of_kind("make"))
def test_make_plans_it(command):
    words = words_of(command)
    planned = subprocess.run(
        [*words, "-n", "VENV=/nowhere"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert planned.returncode == 0, planned.stderr
    # without a goal make prints its help; PYTHON=... alone is no goal
    assert ("pip install" in planned.stdout) == any("=" not in word for word in words[1:]), planned.stdout


@pytest.fixture(scope="module")
def snakemake_parser():
    from snakemake.cli import get_argument_parser

    return get_argument_parser()


@pytest.mark.parametrize("command", of_kind("snakemake"))
def test_snakemake_reads_it_and_knows_its_targets(command, snakemake_parser, tmp_path):
    words = [word.replace("<id>", "full").replace("<name>", "smoke") for word in words_of(command)[1:]]
    read = snakemake_parser.parse_args(words)
    if read.workflow_profile:
        assert (ROOT / read.workflow_profile / "config.yaml").exists()
    given = dict(item.split("=", 1) for item in read.config or []) if "..." not in command else {}
    given.pop("dataset", None)  # the reader's
    settings = load(given)
    settings.check_targets(map(str, read.targets))
    rules = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    for target in map(str, read.targets):
        known = target.partition("_")[0] in ("ablation", "figure", "table")
        assert known or f"rule {target}:" in rules, target
    for rule in read.forcerun or []:
        assert f"rule {rule}:" in rules, rule


def test_all_targets_together_make_a_plan(snakemake_parser):
    """What the documents ask of tier smoke by name, in one dry run: every rule exists and finds its inputs."""
    read = [snakemake_parser.parse_args(words_of(line)[1:]) for line in of_kind("snakemake") if "<" not in line]
    targets = {str(target) for each in read if not each.workflow_profile for target in each.targets}
    assert {"ablation_full", "figure_F04", "frozen", "archive"} <= targets
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "all", *sorted(targets)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("command", of_kind("pins"))
def test_pins_exist(command):
    assert (ROOT / words_of(command)[3]).exists()


# Run here, one after another in one folder, as a reader would: the beginning of the command, words set to other values
# (smaller sizes, folders that are there), and a file that it leaves or a text that it prints.
RUN = [
    ("python -m data.synthesize --output my-data", {"4000": "300", "1000": "200"}, "my-data/manifest.json"),
    ("python -m data.validate DIR", {"DIR": "my-data"}, "my-data: valid"),
    ("python -m gem.train --variant full --data my-data", {}, "my-run/summary.json"),
    ("python -m gem.summary --preset base", {}, "self_attention"),
    ("python -m data.import_log --input u.data --output my-log", {}, "my-log/manifest.json"),
    ("python -m gem.bench.replay --lengths lengths.txt", {}, "fastest"),
    ("python -m gem.balance --lengths lengths.txt", {}, "local"),
    ("python -m gem.record check data/measured/h200", {"data/measured/h200": f"{ROOT}/data/measured/h200"}, "rows"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A reader's folder with a log in the layout of MovieLens 100K and a list of lengths."""
    folder = tmp_path_factory.mktemp("desk")
    lines = [f"{7 * i % 40}\t{11 * i % 90}\t{1 + i * i % 5}\t{881250000 + 60 * i}" for i in range(1500)]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    (folder / "lengths.txt").write_text("".join(f"{1 + 37 * i % 900}\n" for i in range(256)))
    return folder


@pytest.mark.parametrize(("start", "instead", "proof"), RUN, ids=[start.split()[2] for start, _, _ in RUN])
def test_a_command_runs_as_printed(start, instead, proof, desk, monkeypatch, capsys):
    found = [words for words in map(words_of, of_kind("module")) if " ".join(words).startswith(start)]
    assert found, f"no document says {start}"
    module, words = found[0][2], [instead.get(word, word) for word in found[0][3:]]
    monkeypatch.chdir(desk)
    assert main_of(module)(words) in (0, None)
    assert (desk / proof).exists() or proof in capsys.readouterr().out
