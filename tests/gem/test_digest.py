"""Source digest: comments, docstrings and layout do not change it, code does."""

import pytest

from gem.digest import source_digest, text_digest

CODE = '''"""Module."""
import math

def area(radius):
    """Area of a disc."""
    return math.pi * radius ** 2  # exact

class Disc:
    """A disc."""
    size = 1
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# exact", "# nothing new"),
        ("Area of a disc.", "What a disc covers."),
        ('"""Module."""\n', ""),
        ("radius ** 2", "(radius\n        ** 2)"),
        ('    """A disc."""\n', ""),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(old, new):
    assert old in CODE
    assert text_digest(CODE.replace(old, new)) == text_digest(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("** 2", "** 3"), ("size = 1", "size = 2"), ("size = 1", "size = 1.0"), ("area(radius)", "area(radius=1)")],
)
def test_code_counts(old, new):
    assert text_digest(CODE.replace(old, new)) != text_digest(CODE)


def test_files_of_a_package_are_found_and_their_names_count(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    (package / "inner" / "b.py").write_text("y = 1\n")
    (package / "README.md").write_text("text")
    first = source_digest("package", root=tmp_path)
    (package / "README.md").write_text("other text")
    (package / "a.py").write_text("# why\nx = 1\n")
    assert source_digest("package", root=tmp_path) == first
    assert source_digest("package/inner", "package/a.py", root=tmp_path) == first
    (package / "inner" / "b.py").write_text("y = 2\n")
    second = source_digest("package", root=tmp_path)
    assert second != first
    (package / "inner" / "b.py").rename(package / "inner" / "c.py")
    assert source_digest("package", root=tmp_path) not in (first, second)


def test_missing_and_broken_sources_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="missing is no Python file"):
        source_digest("missing", root=tmp_path)
    (tmp_path / "bad.py").write_text("x = (\n")
    with pytest.raises(ValueError, match=r"bad\.py:1: does not parse"):
        source_digest("bad.py", root=tmp_path)


def test_digest_is_the_same_under_every_python():
    """A fixed value: a record frozen under Python 3.12 must be current under 3.11."""
    assert text_digest("def f(x):\n    return x + 1\n")[:16] == "8a3e4757247911fc"
