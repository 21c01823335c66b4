"""Long checks of kernels: what passed is counted, what failed or hung says why, and both are on record."""

from __future__ import annotations

import pandas as pd
import pytest

from gem.bench import kernel_checks
from gem.bench.kernel_checks import Check


def python(code: str, done: str, **keywords) -> Check:
    return Check(("-c", code), done, **keywords)


def test_outcomes_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernel_checks.hardware, "open_device", lambda kind: None)
    checks = {
        "counts": python("print('300 launches'); print('700 launches')", r"^(\d+) launches$"),
        "each": python("print('a finite'); print('b finite')", r"finite$", each=True),
        "fixed": python("print('10 passed')", r"(\d+) passed", covered=1000),
        "fails": python("print('3 launches'); raise SystemExit('other bits')", r"^(\d+) launches$"),
        "silent": python("pass", r"^(\d+) launches$"),
        "hangs": python("import time; time.sleep(60)", "never"),
        "missing": Check((), "never", ("no-such-sanitizer",)),
    }
    monkeypatch.setattr(kernel_checks, "CHECKS", checks)
    arguments = ["--tier", "gpu", "--run", "try", "--limit-s", "4", "--only", ",".join(checks)]
    assert kernel_checks.main(arguments) == 1
    (path,) = (tmp_path / "results/try/records/parts").glob("*.csv")
    rows = pd.read_csv(path).set_index("case")
    assert list(rows.index) == list(checks) and set(rows.metric) == {"correct"}
    passed = rows[rows.status == "ok"]
    assert dict(passed.n) == {"counts": 700, "each": 2, "fixed": 1000} and set(passed.p50) == {1.0}
    failed = rows[rows.status == "failed"]
    assert failed.p50.isna().all()
    for name, reason in {"fails": "other bits", "silent": "exit code 0", "hangs": "not done after 4 s"}.items():
        assert reason in failed.note[name]
    assert "no-such-sanitizer" in failed.note["missing"]
    assert (tmp_path / "results/try/logs/kernel_checks/counts.log").read_text() == "300 launches\n700 launches\n"
    assert kernel_checks.main([*arguments[:-1], "counts,each"]) == 0


def test_a_run_of_pytest_is_counted():
    """By its closing line, which the project's own options would drop: so on a file of the project."""
    check, options = kernel_checks.CHECKS["default_tests"], kernel_checks._TESTS[:-1]
    assert check.arguments[: len(options)] == options
    outcome = kernel_checks.perform(Check((*options, "tests/gem/test_cli.py"), check.done), 120)
    assert outcome.covered > 0 and outcome.reason == ""


@pytest.mark.parametrize("arguments", [["--only", "memcheck,leaks"], ["--limit-s", "0"]])
def test_arguments(arguments, capsys):
    assert kernel_checks.main(["--tier", "gpu", *arguments]) == 1
    assert "allowed:" in capsys.readouterr().err
