"""Every module's command line answers a mistake with one line and exit code 2, and --help with its options."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for name in ("data", "gem", "figures", "paper") for path in sorted((ROOT / name).rglob("*.py"))]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in SOURCES
    if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.M) and re.search(r"= Parser\(", path.read_text())
]


def exits(module: str, *words: str, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    return stopped.value.code


@pytest.mark.parametrize("module", MODULES)
def test_a_mistake_is_one_line(module, monkeypatch, capsys):
    assert exits(module, "--no-such-option", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.match(r"[\w .-]+: error: .*; allowed: see --help$", error.strip()), error
    assert exits(module, "--help", monkeypatch=monkeypatch) == 0
    assert "usage: " in capsys.readouterr().out


def test_modules_are_found():
    assert {"data.synthesize", "data.import_log", "gem.train", "gem.bench.kernels", "paper.values"} <= set(MODULES)
