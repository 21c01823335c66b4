"""Named code breaks: a check that cannot fail proves nothing, so each break must make a named check fail.

An op's table lives in its own file, test_mutants_<op>.py (jagged attention's in test_mutants.py):

    MUTANTS = [Mutant("scale_is_lost", eager, "_scores", broken_scores, checks.toy_values, {"impl": "eager"})]
    test_mutant = mutant_test(MUTANTS)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutant:
    """Put `replacement` in place of `owner.attribute` and `check(**arguments)` must fail.

    replacement: the new value, or a function of the old one when `wraps` is set. The check fails with an
    AssertionError, or with one of `raises` where the break shows as an exception.
    """

    name: str
    owner: Any
    attribute: str
    replacement: Any
    check: Callable[..., None]
    arguments: dict = field(default_factory=dict)
    wraps: bool = False
    raises: tuple[type[BaseException], ...] = ()

    def kill(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """AssertionError if the check fails on the sound code, or passes on the broken one."""
        self.check(**self.arguments)
        original = getattr(self.owner, self.attribute)
        monkeypatch.setattr(self.owner, self.attribute, self.replacement(original) if self.wraps else self.replacement)
        try:
            self.check(**self.arguments)
        except (AssertionError, *self.raises):
            return
        finally:
            monkeypatch.undo()
        raise AssertionError(f"mutant {self.name!r} survives {self.check.__name__}")


def mutant_test(mutants: list[Mutant]):
    """A parametrised pytest function that kills every mutant of the table."""

    @pytest.mark.parametrize("mutant", mutants, ids=lambda mutant: mutant.name)
    def test_mutant(mutant, monkeypatch):
        mutant.kill(monkeypatch)

    return test_mutant
