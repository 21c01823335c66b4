"""Digest of Python sources that an edit of code changes and an edit of comments, docstrings or layout does not.

Snakemake reruns a rule when its parameters change, but does not look into the modules that a step imports. Rules
therefore carry this digest as a parameter, and a record keeps the digest of the sources that it measured, so that a
number made by older code can be told from a current one. The digest is the same under every supported Python version:
syntax-tree fields that are empty are left out, because newer versions add some.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Modules of gem/ whose code cannot change what training computes; all others count as its sources.
NOT_TRAINING = (
    *("ablation", "archive", "checks", "claims", "cli", "digest", "expected", "job", "progress", "provenance"),
    *("readme", "record", "record_store", "sheets", "stages", "workflow"),
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_digest(*sources: str | Path, root: Path = ROOT) -> str:
    """16 hex digits over all Python files of `sources` (files or folders, relative to `root`).

    Files enter in order of their relative path, so the order of `sources` does not matter. ValueError: a source does
    not exist, a folder has no Python file, or a file does not parse.
    """
    state = hashlib.sha256()
    for path in sorted(set(_files(sources, root))):
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        stat = path.stat()
        state.update(f"{name}\0{_file_digest(str(path), stat.st_mtime_ns, stat.st_size)}\0".encode())
    return state.hexdigest()[:16]


def text_digest(source: str, name: str = "<text>") -> str:
    """Digest of one source text; ValueError with file and line where it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{name}:{error.lineno}: does not parse ({error.msg}); allowed: valid Python") from None
    return hashlib.sha256(_dump(tree).encode()).hexdigest()


def _files(sources: Iterable[str | Path], root: Path) -> Iterable[Path]:
    for source in sources:
        path = root / source
        if path.is_file():
            yield path
            continue
        found = sorted(p for p in path.rglob("*.py") if "__pycache__" not in p.parts and "build" not in p.parts)
        if not found:
            raise ValueError(f"source_digest: {source} is no Python file and no folder with one; looked in {root}")
        yield from found


@lru_cache(maxsize=4096)
def _file_digest(path: str, mtime_ns: int, size: int) -> str:
    return text_digest(Path(path).read_text(encoding="utf-8"), path)


def _dump(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, _DOCUMENTED):
                value = _without_docstring(value)
            if value is None or value == [] or name in ("kind", "type_comment"):
                continue
            fields.append(f"{name}={_dump(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_dump(item) for item in node)}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
