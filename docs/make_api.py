"""Write docs/api.md, the API page of gem_kernels, from signatures and docstrings.

python -m docs.make_api            write docs/api.md
python -m docs.make_api --check    change nothing; exit code 1 when docs/api.md says something else
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kernels
from gem import record

PAGE = Path(__file__).with_name("api.md")
COMMAND = "python -m docs.make_api"
WIDTH = 100  # a longer signature gets one parameter a line
OPS = ("jagged_attention", "gdpa", "block_attention")
HEAD = """# API of gem_kernels

Generated from docstrings by `{command}`; do not edit. In a checkout the package is imported as `kernels`, from
the wheel as `gem_kernels`. What runs where: the support matrices of [jagged_attention](../kernels/jfa/README.md),
[gdpa](../kernels/gdpa/README.md) and [block_attention](../kernels/block_attention/README.md).
"""


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """(name, object) of the public functions and classes: those in __all__, else those that the module defines."""
    if hasattr(module, "__all__"):
        names = sorted(module.__all__)
    else:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield name, value


def signature(name: str, value: object) -> str:
    """`name(parameters) -> result` as code, one parameter a line where it is long."""
    try:
        found = inspect.signature(value)
    except ValueError:  # a class without a Python constructor
        return name
    if inspect.isclass(value):
        found = found.replace(return_annotation=inspect.Signature.empty)
    # Annotations are strings in the source; inspect quotes them.
    text = f"{name}{_unquoted(str(found))}"
    if len(text) <= WIDTH:
        return text
    parts, star = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_unquoted(str(parameter)))
    result = found.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {_unquoted(inspect.formatannotation(result))}"
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _unquoted(text: str) -> str:
    """Annotations as in the source (they are strings there), and strings in double quotes."""
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"""(: |-> |^)(?:'([^']*)'|"([^"]*)")(?=$|[,) ])""", lambda m: m[1] + (m[2] or m[3]), text)
    return text.replace("'", '"')


def prose(value: object) -> str:
    """The docstring as Markdown. ValueError for a public name that has none."""
    text = inspect.getdoc(value)
    generated = dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")
    if not text or generated:
        raise ValueError(f"{value.__module__}.{value.__name__}: has no docstring; allowed: a public name with one")
    return markdown(text)


def markdown(text: str) -> str:
    """A docstring's text with the signs escaped that Markdown would take for itself; indented code keeps its text."""
    lines, before, in_list = [], "", False
    for line in text.splitlines():
        if not line.startswith("    "):
            item = line.startswith("- ") and (in_list or not before or before.endswith(":"))
            in_list = item or (in_list and line.startswith("  "))
            parts = line.split("`")  # every second one is code
            parts[::2] = [re.sub(r"([<*]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts[::2]]
            line = "`".join(parts)
            if line.startswith("- ") and not item:  # a minus at the start of a wrapped line
                line = f"\\{line}"
        lines.append(line)
        before = line.strip()
    return "\n".join(lines)


def entry(name: str, value: object, level: int) -> list[str]:
    """Heading, signature and docstring; of a class also its public methods and properties."""
    lines = [f"{'#' * level} {name}", "", "```python", signature(name, value), "```", "", prose(value), ""]
    if inspect.isclass(value):
        for method, raw in vars(value).items():
            if method.startswith("_") or not (inspect.isfunction(raw) or isinstance(raw, property | staticmethod)):
                continue
            function = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
            if not function.__doc__:
                continue
            what = f"{name}.{method}" if isinstance(raw, property) else signature(f"{name}.{method}", function)
            lines += ["```python", what, "```", "", prose(function), ""]
    return lines


def page() -> str:
    """Text of docs/api.md."""
    lines = [HEAD.format(command=COMMAND)]
    names = [name for name in kernels.__all__ if not isinstance(getattr(kernels, name), ModuleType)]
    for name in [*OPS, *sorted(set(names) - set(OPS))]:
        lines += entry(name, getattr(kernels, name), 2)
    for name in sorted(set(kernels.__all__) - set(names)):
        module = getattr(kernels, name)
        lines += [f"## Module {name}", "", prose_of_module(module), ""]
        for item, value in public(module):
            if value is getattr(kernels, item, None):  # shown above
                continue
            lines += entry(f"{name}.{item}", value, 3)
    return "\n".join(lines).rstrip() + "\n"


def prose_of_module(module: ModuleType) -> str:
    if not module.__doc__:
        raise ValueError(f"{module.__name__}: has no docstring; allowed: a public module with one")
    return markdown(inspect.cleandoc(module.__doc__))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when the page is out of date")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/api.md)")
    options = parser.parse_args(arguments)
    try:
        text = page()
        if not options.check:
            record.write_text(options.page, text)
        elif not options.page.is_file() or options.page.read_text(encoding="utf-8") != text:
            raise ValueError(f"{options.page}: differs from the docstrings; allowed: after {COMMAND}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
