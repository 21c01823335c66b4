"""The wheel gem-kernels stands alone: built, installed into an empty folder, used where nothing of this repository is.

Also the example of examples/, run on the wheel, and the API page, held to the docstrings.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from docs import make_api

ROOT = Path(__file__).resolve().parents[1]
# The interpreter that runs these starts isolated (-I): no PYTHONPATH, no user site, no working directory on its path.
# numpy is hidden, as in an environment of torch and triton alone.
PRELUDE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
os.environ["TRITON_INTERPRET"] = "0"
sys.modules["numpy"] = None
import warnings
warnings.filterwarnings("ignore", message=".*NumPy.*")
import torch
"""
USE = (
    PRELUDE
    + """
import gem_kernels
from gem_kernels import block_attention, gdpa, jagged, jagged_attention

torch.manual_seed(0)
offsets = jagged.lengths_to_offsets(torch.tensor([3, 0, 70, 7]))
results = {}
for name, op in (("jagged_attention", jagged_attention), ("gdpa", gdpa), ("block_attention", block_attention)):
    q, k, v = (torch.randn(80, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    values = {}
    for impl in ("auto", "reference"):
        o = op(q, k, v, offsets, impl=impl)
        values[impl] = [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]
    results[name] = max(float((a - b).abs().max()) for a, b in zip(*values.values()))
    assert all(bool(x.isfinite().all()) and float(x.abs().sum()) > 0 for x in values["auto"]), name
lone = sorted(name for name in sys.modules if name.split(".")[0] in ("gem", "kernels", "data", "tests"))
print(json.dumps({"file": gem_kernels.__file__, "errors": results, "ours": lone, "path": sys.path}))
"""
)
IMPORT_ALL = (
    PRELUDE
    + """
import importlib
answers = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
        answers[name] = ""
    except ImportError as error:
        answers[name] = error.name or str(error)
print(json.dumps(answers))
"""
)


def sources(tree: Path) -> dict[str, Path]:
    """Path in the wheel -> file of kernels/ that must be there: every module, every README and tuning log."""
    files = [path for pattern in ("*.py", "*.md") for path in (tree / "kernels").rglob(pattern)]
    return {f"gem_kernels/{path.relative_to(tree / 'kernels').as_posix()}": path for path in files}


def undeclared(tree: Path) -> set[str]:
    """Folders with modules that pyproject.toml does not list as packages."""
    declared = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(Path(name).parts[:-1]) for name in sources(tree) if name.endswith(".py")}
    return found - set(declared)


def copy_tree(target: Path) -> Path:
    """What a build reads, in a folder of its own, since a build leaves files beside its sources."""
    shutil.copytree(ROOT / "kernels", target / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def pip(*words: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-2000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    required = Requirement(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"][0])
    for name in ("pip", required.name):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed here, and the wheel is built offline")
    if Version(version(required.name)) not in required.specifier:
        pytest.skip(f"setuptools is {version(required.name)} here; the build needs {required}")
    folder = tmp_path_factory.mktemp("wheel")
    tree = copy_tree(folder / "tree")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An empty folder with the wheel alone in it."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def run_isolated(code: str, installed: Path, *arguments: str) -> dict:
    command = [sys.executable, "-I", "-c", code, str(installed), *arguments]
    result = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_wheel_holds_every_module_and_document_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    files = {name for name in packed if ".dist-info/" not in name}
    assert files == set(sources(ROOT))
    assert {"gem_kernels/jfa/v4_tlx.py", "gem_kernels/gdpa/tlx.py", "gem_kernels/jfa/README.md"} <= files
    assert all(packed[name] == path.read_bytes() for name, path in sources(ROOT).items())


def test_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert (metadata["Name"], metadata["License-Expression"]) == ("gem-kernels", "Apache-2.0")
    assert any(name.endswith("licenses/LICENSE") for name in names)
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    always = {requirement.name for requirement in requirements if "extra" not in str(requirement.marker)}
    assert always == {"torch", "triton"}
    assert metadata.get_payload() == (ROOT / "kernels" / "README.md").read_text()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_every_folder_of_kernels_is_declared(tmp_path):
    assert undeclared(ROOT) == set(), "add these to [tool.setuptools] packages in pyproject.toml"
    tree = copy_tree(tmp_path)
    (tree / "kernels" / "new_op").mkdir()
    (tree / "kernels" / "new_op" / "api.py").touch()
    assert undeclared(tree) == {"gem_kernels.new_op"}


def test_wheel_runs_alone(installed):
    found = run_isolated(USE, installed)
    assert found["file"] == str(installed / "gem_kernels" / "__init__.py")
    assert found["ours"] == [], "a module of the repository was imported"
    outside = [path for path in found["path"] if Path(path).resolve() == ROOT]
    assert outside == []
    assert set(found["errors"]) == {"jagged_attention", "gdpa", "block_attention"}
    assert all(error < 1e-10 for error in found["errors"].values()), found["errors"]


def test_imports_are_relative_or_torch_or_triton():
    """Also those inside functions, which only a GPU would reach."""
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    others = set()
    for name, path in sources(ROOT).items():
        for node in ast.walk(ast.parse(path.read_text())) if name.endswith(".py") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            others |= {(name, top) for top in (full.split(".")[0] for full in names) if top not in allowed}
    assert not others


def test_every_module_of_the_wheel_imports_with_torch_and_triton_alone(installed):
    """What cannot be imported names what it needs: TLX its compiler, kernels in Triton Triton."""
    names = [name.removesuffix(".py").replace("/", ".") for name in sources(ROOT) if name.endswith(".py")]
    names = [name.removesuffix(".__init__") for name in names]
    missing = {name: what for name, what in run_isolated(IMPORT_ALL, installed, *names).items() if what}
    allowed = ("triton.language.extra.tlx",) if importlib.util.find_spec("triton") else ("triton",)
    for name, what in missing.items():
        assert what.startswith(allowed), f"{name} needs {what}"
    assert len(missing) < len(names) // 2


def test_the_example_learns_on_the_wheel(installed):
    """A model that ignored the history would be right as often as the more frequent label: six times in ten."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import json, torch; torch.set_num_threads(1)\n"
        "import sequence_model\n"
        "accuracy = sequence_model.main(120)\n"
        "ours = [name for name in sys.modules if name.split('.')[0] in ('gem', 'kernels')]\n"
        "print(json.dumps({'accuracy': accuracy, 'ours': ours}))\n"
    )
    found = run_isolated(code, installed, str(ROOT / "examples"))
    assert found["ours"] == []
    assert found["accuracy"] > 0.8


def test_api_page_is_current(capsys):
    """Fails when a docstring or signature changed and docs/api.md did not: python -m docs.make_api."""
    assert make_api.main(["--check"]) == 0, capsys.readouterr().err


def test_a_drift_of_the_api_page_is_found(tmp_path, capsys, monkeypatch):
    page = tmp_path / "api.md"
    assert make_api.main(["--check", "--page", str(page)]) == 1
    assert make_api.main(["--page", str(page)]) == 0
    assert make_api.main(["--check", "--page", str(page)]) == 0
    assert page.read_text() == (ROOT / "docs" / "api.md").read_text()
    import kernels

    monkeypatch.setattr(kernels.explain, "__doc__", "Something else.")
    capsys.readouterr()
    assert make_api.main(["--check", "--page", str(page)]) == 1
    error = capsys.readouterr().err
    assert "differs from the docstrings; allowed: after python -m docs.make_api" in error and error.count("\n") == 1
    monkeypatch.setattr(kernels.explain, "__doc__", None)
    assert make_api.main(["--check", "--page", str(page)]) == 1
    assert "kernels.explain: has no docstring" in capsys.readouterr().err


def test_api_page_shows_the_public_names():
    import kernels

    text = (ROOT / "docs" / "api.md").read_text()
    for name in kernels.__all__:
        assert f"\n## {name}\n" in text or f"\n## Module {name}\n" in text, name
    for name in ("flops.gdpa", "bounds.bound", "mxfp8.linear", "schedule.tile_schedule", "jagged.pad"):
        assert f"\n### {name}\n" in text, name
    assert sysconfig.get_paths()["purelib"] not in text and " at 0x" not in text
