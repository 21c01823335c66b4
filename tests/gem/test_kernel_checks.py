"""Long checks of kernels: what passed is counted, what failed or hung says why, and both are on record."""

from __future__ import annotations

import json
import os

import pandas as pd
import pytest

from gem.bench import kernel_checks
from gem.bench.kernel_checks import Check, read_report

# As compute-sanitizer 2025.3 writes them, a program's own lines in between.
API_ERROR = """========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_NOT_PERMITTED (error 800) due to "not permitted" on CUDA API call to cuMemCreate.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: c10::cuda::CUDACachingAllocator::malloc(void**, int) in libc10_cuda.so
=========
gdpa shared 32 [5, 0, 140] finite
========= ERROR SUMMARY: 1 error
"""
ACCESS = """========= Invalid __global__ read of size 4 bytes
=========     at load_rows+0x1b0 in rows.py:{line}
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Access at 0x7f2c{thread:04d} is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2c0000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in driver.c:12
=========
"""
DEVICE_ERRORS = (
    "========= COMPUTE-SANITIZER\n"
    + "".join(ACCESS.format(line=12 + thread // 3, thread=thread) for thread in range(4))
    + API_ERROR.split("\n", 1)[1].replace("1 error", "5 errors")
)
RACES = """========= COMPUTE-SANITIZER
gdpa cross [0, 0] [3, 1] finite
========= Error: Race reported between Write access at backward_kernel+0x1b0 in tlx_backward_kernel.py:105
=========     and Read access at backward_kernel+0x2560 in tlx_backward_consumer.py:183 [128 hazards]
=========     and Read access at backward_kernel+0x2570 in tlx_backward_consumer.py:183 [64 hazards]
=========
========= Error: Race reported between Write access at backward_kernel+0x1b0 in tlx_backward_kernel.py:105
=========     and Read access at backward_kernel+0x2560 in tlx_backward_consumer.py:183 [32 hazards]
=========
========= Warning: Race reported between Read access at backward_kernel+0x90 in tlx_common.py:62
=========     and Write access at backward_kernel+0x80 in tlx_common.py:61 [8 hazards]
=========
jagged_attention shared 32 [5, 0, 140] finite
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
HAZARD = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x6000 in block (0,0,0) :
=========     Write Thread (129,0,0) at control_kernel+0x610 in sanitize.py:98
=========     Read Thread (3,0,0) at control_kernel+0x7a0 in sanitize.py:83
=========     Current Value : 0, Incoming Value : 0
=========
control exact
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = """========= COMPUTE-SANITIZER
control exact
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


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


def test_reports_are_read():
    """Distinct errors with their number; what differs between occurrences is left out."""
    report = read_report(API_ERROR)
    assert dict(report.api) == {"CUDA_ERROR_NOT_PERMITTED from cuMemCreate": 1}
    assert not report.device and report.total == 1
    report = read_report(DEVICE_ERRORS)
    access = "Invalid __global__ read of size 4 bytes at load_rows in rows.py:{} Access at an address is out of bounds"
    assert dict(report.device) == {access.format(12): 3, access.format(13): 1}
    assert report.api.total() == 1 and report.total == report.shown == 5
    report = read_report(RACES)
    race = "Race reported between Write access at backward_kernel in tlx_backward_kernel.py:105"
    race += " and Read access at backward_kernel in tlx_backward_consumer.py:183"
    assert report.device[f"Error: {race}"] == 2 and len(report.device) == 2 and report.total == 3
    (hazard,) = read_report(HAZARD).device
    assert "RAW" in hazard and "control_kernel in sanitize.py:98" in hazard and "sanitize.py:83" in hazard
    assert "129" not in hazard and "0x" not in hazard
    assert read_report(CLEAN).total == 0 and not read_report(CLEAN).device
    assert read_report("finite\n").total is None
    unshown = read_report("========= ERROR SUMMARY: 9 errors\n========= ERROR SUMMARY: 4 errors were not printed.\n")
    assert unshown.total == 9 and unshown.shown == 0


def sanitized(output: str, code: int, control: str = "", control_code: int = 0) -> kernel_checks.Outcome:
    """What becomes of a run under compute-sanitizer that printed `output`, with a control that printed `control`."""

    def script(text: str, number: int) -> str:
        return f"print({text!r}); raise SystemExit({number})"

    arguments = ("-c", script(control, control_code)) if control else ()
    check = Check(("-c", script(output, code)), r"^.* (?:finite|exact)$", each=True, sanitizer=True, control=arguments)
    return kernel_checks.perform(check, 20)


def test_the_tool_is_on_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho 'NVIDIA (R) Compute Sanitizer'; echo 'Version 2025.3.1.0 (build 1)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check = Check(("-c", f"print({CLEAN!r})"), "exact$", each=True, sanitizer=True)
    monkeypatch.setattr(kernel_checks, "CHECKS", {"races": check})
    assert kernel_checks.run_checks("try", ["races"], 20)
    (path,) = (tmp_path / "results/try/records/parts").glob("*.json")
    assert json.loads(path.read_text())["config"]["compute_sanitizer"] == "2025.3.1.0"


def test_failed_api_calls_are_no_device_errors():
    outcome = sanitized(API_ERROR, 9)
    assert outcome.reason == "" and outcome.covered == 1
    assert outcome.note == "handled by the program: 1 x CUDA_ERROR_NOT_PERMITTED from cuMemCreate"
    reason = sanitized(DEVICE_ERRORS, 9).reason
    assert reason.startswith("5 reported: 3 x Invalid __global__ read") and "rows.py:13" in reason
    assert reason.endswith("calls of the CUDA API that failed: 1 x CUDA_ERROR_NOT_PERMITTED from cuMemCreate")
    stopped = API_ERROR.replace("========= ERROR", "========= Target application returned an error\n========= ERROR")
    assert "Target application returned an error" in sanitized(stopped, 9).reason
    assert sanitized(API_ERROR, 1).reason.startswith("exit code 1")
    assert sanitized(API_ERROR.replace("1 error", "3 errors"), 9).reason.startswith("3 reported, 1 of them shown")
    assert "without a summary" in sanitized("gdpa finite", 0).reason


def test_hazards_are_compared_with_those_of_a_control():
    assert sanitized(CLEAN, 0).covered == 1
    reason = sanitized(RACES, 9, CLEAN).reason
    assert reason.startswith("3 reported: 2 x Error: Race reported between Write access at backward_kernel")
    assert "1 x Warning: Race" in reason and reason.endswith("a control that synchronises in the same ways is clean")
    outcome = sanitized(RACES, 9, HAZARD, 9)
    assert outcome.reason.startswith("not decided: the tool does not follow this synchronisation, it reports 1 in a")
    assert "sanitize.py:98" in outcome.reason and "in the kernels 3 reported: 2 x Error" in outcome.reason
    assert "control exact" in outcome.output and outcome.covered == 0
    assert "the control says nothing" in sanitized(RACES, 9, "no sanitizer here", 1).reason


def test_checks_get_their_environment(monkeypatch):
    monkeypatch.delenv("KERNEL_CHECK_SAYS", raising=False)
    check = python("import os; print(os.environ['KERNEL_CHECK_SAYS'], 'launches')", r"^(\d+) launches$")
    assert kernel_checks.perform(check, 20).covered == 0
    assert (
        kernel_checks.perform(kernel_checks.replace(check, environment=(("KERNEL_CHECK_SAYS", "7"),)), 20).covered == 7
    )
    assert dict(kernel_checks.CHECKS["memcheck"].environment)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


@pytest.mark.parametrize("arguments", [["--only", "memcheck,leaks"], ["--limit-s", "0"]])
def test_arguments(arguments, capsys):
    assert kernel_checks.main(["--tier", "gpu", *arguments]) == 1
    assert "allowed:" in capsys.readouterr().err
