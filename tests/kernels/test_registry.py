"""Choice among implementations: a named one runs or raises, auto takes the best that can, every reason is told."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import kernels
from kernels.registry import Case, Implementation, Registry

CASE = Case("cpu", (0, 0), torch.float32, 64)


@pytest.fixture
def registry(monkeypatch):
    """Three entries: `fast` refuses bfloat16, `slow` takes all, `absent` cannot be imported."""

    def module(name, unsupported):
        made = types.ModuleType(f"tests_registry_{name}")
        made.IMPLEMENTATION = Implementation(name, lambda: name, lambda: name, unsupported)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made.__name__

    registry = Registry("toy", None)
    registry.add("slow", module("slow", lambda case: None), 1)
    registry.add("fast", module("fast", lambda case: "has no bfloat16" if case.dtype == torch.bfloat16 else None), 2)
    registry.add("absent", "tests_registry_absent", 3)
    return registry


def test_auto_takes_the_best_that_can_run(registry):
    assert registry.names == ["absent", "fast", "slow"]
    assert registry.select("auto", CASE).name == "fast"
    assert registry.select("auto", Case("cpu", (0, 0), torch.bfloat16, 64)).name == "slow"


def test_a_named_one_runs_or_raises(registry):
    assert registry.select("slow", CASE).name == "slow"
    with pytest.raises(ValueError, match="toy: impl 'fast' has no bfloat16"):
        registry.select("fast", Case("cpu", (0, 0), torch.bfloat16, 64))
    with pytest.raises(ValueError, match=r"toy: impl 'absent' cannot be imported \(No module named"):
        registry.select("absent", CASE)
    with pytest.raises(ValueError, match="toy: unknown impl 'other'; allowed: auto, absent, fast, slow"):
        registry.select("other", CASE)


def test_every_candidate_has_its_line(registry):
    assert registry.explain(CASE).splitlines() == [
        "toy: absent cannot be imported (No module named 'tests_registry_absent')",
        "toy: fast <- chosen",
        "toy: slow could run, lower priority",
    ]


def test_nothing_that_runs_is_an_error_with_reasons():
    registry = Registry("toy", None)
    registry.add("absent", "tests_registry_absent", 1)
    with pytest.raises(ValueError, match=r"toy: no implementation runs .*cannot be imported"):
        registry.select("auto", CASE)


def test_importing_the_package_imports_no_kernel():
    """Kernel modules are loaded on first use; public names are functions, not the subpackages they live in."""
    code = """
import sys, kernels, kernels.gdpa.eager, kernels.block_attention.eager, kernels.jfa.eager
names = [m.rsplit(".", 1)[1] for m in sys.modules if m.startswith("kernels.")]
kernel = [name for name in names if name.startswith(("triton_", "v1", "v2", "v3", "v4", "tlx"))]
assert not kernel, kernel
assert all(callable(f) for f in (kernels.gdpa, kernels.block_attention, kernels.jagged_attention, kernels.explain))
assert kernels.flops.GEMMS and kernels.schedule.ORDERS and set(kernels.__all__) <= set(dir(kernels))
try:
    kernels.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no AttributeError")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_readme_example_runs_and_prints_what_it_says(monkeypatch, capsys):
    text = (Path(kernels.__file__).parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.setitem(sys.modules, "gem_kernels", kernels)
    exec(compile(code, "README.md", "exec"), {})
    claimed = re.search(r"# ([\d,]+): useful pairs only", code).group(1).replace(",", "")
    assert capsys.readouterr().out.splitlines()[-1] == claimed


def test_every_public_name_of_the_readme_exists():
    text = (Path(kernels.__file__).parent / "README.md").read_text()
    table = text.split("## What is in it")[1].split("## Conventions")[0]
    details = {"pad", "unpad", "concatenate", "time_buckets", "grid", "valid", "zigzag", "act"}
    names = set(re.findall(r"`(\w+)", table)) - details
    assert names <= set(kernels.__all__), names - set(kernels.__all__)
    assert set(kernels.__all__) <= names, set(kernels.__all__) - names
