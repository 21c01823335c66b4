"""The long checks of the TLX attention kernels, run side by side on one GPU, with their outcome on record.

    python -m gem.bench.kernel_checks --tier gpu
    python -m gem.bench.kernel_checks --tier gpu --only memcheck,racecheck --limit-s 120

Records `kernel_checks`, one row a check: metric correct, n the cases, tests, launches or kernels it covered, the time
it took in the note. A check that fails, or that has not ended after --limit-s seconds, is a row with status failed and
the reason; the run then ends with exit code 1, its record written all the same. What a check printed is kept under
results/<run>/logs/kernel_checks.

The two checks by compute-sanitizer name every distinct error that the tool reports, with its kernel, line and number.
memcheck: an access out of bounds fails; calls of the CUDA API that failed, and that the program dealt with, are named
in the note. racecheck: any hazard fails; a control, right by construction, then shows whether the tool follows such
synchronisation at all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gem import hardware, record
from gem.cli import Parser
from gem.digest import ROOT

SOURCES = ("kernels", "tests/gpu/test_tlx_gpu.py", "tests/gpu/sanitize.py")
_SANITIZE = ("-m", "tests.gpu.sanitize")
# without the project's own options, one of which is -q: twice, it drops the closing line that is counted here
_TESTS = ("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "tests/gpu/test_tlx_gpu.py")


FOUND_ERRORS = 9  # exit code of compute-sanitizer when it has something to report
_SANITIZER = ("compute-sanitizer", "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "1000")
_NAMED = 12  # distinct errors that a note names


@dataclass(frozen=True)
class Check:
    """arguments follow the interpreter, prefix stands before it. done: what the output holds when all went well, its
    group 1 the number covered; each: counts matches of `done` instead. environment: variables set for it. sanitizer:
    the output is compute-sanitizer's. control: arguments of a program that must look the same to it.
    """

    arguments: tuple[str, ...]
    done: str
    prefix: tuple[str, ...] = ()
    each: bool = False
    covered: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    sanitizer: bool = False
    control: tuple[str, ...] = ()


CHECKS = {
    "memcheck": Check(
        _SANITIZE,
        r"^\w+ \w+ .* finite$",
        # "explicit" reports failed calls of the CUDA API beside device errors, in one sum and with one exit code, so
        # they are told apart by their text ("no" would also hide a fault that only a later call reports). Tiles that
        # TMA loads are beyond memcheck before version 2026.2; the tests with guarded neighbours look at them.
        (*_SANITIZER, "--report-api-errors", "explicit", "--padding", "512"),
        each=True,
        # An allocation a tensor: within a caching allocator's segments an access past a tensor is not out of bounds.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        sanitizer=True,
    ),
    "racecheck": Check(
        _SANITIZE,
        r"^\w+ \w+ .* finite$",
        # As many barriers as a block of the backward has and a few more: what the compiler says of their number, the
        # tool's default, may be too low, and barriers that are not tracked order nothing.
        (*_SANITIZER, "--tool", "racecheck", "--racecheck-report", "analysis", "--num-cuda-barriers", "32"),
        each=True,
        sanitizer=True,
        control=(*_SANITIZE, "--control"),
    ),
    "launches": Check((*_SANITIZE, "--launches", "10000"), r"^(10000) launches$"),
    "random_batches": Check(
        (*_TESTS, "-m", "gpu and slow", "-k", "thousand", "-n", "5"), r"(\d+) passed", covered=1000
    ),
    "default_tests": Check((*_TESTS, "-m", "gpu and not slow", "-n", "6"), r"(\d+) passed"),
}


@dataclass(frozen=True)
class Outcome:
    """covered: how many things the check saw; reason: why it failed, empty when it passed; note: what else is worth
    knowing of one that passed.
    """

    covered: int
    seconds: float
    reason: str
    output: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What compute-sanitizer printed: errors on the GPU (accesses, hazards) and failed calls of the CUDA API, each text
    with how often it came, and the number that its summary gives (None: it wrote no summary).
    """

    device: Counter[str]
    api: Counter[str]
    total: int | None

    @property
    def shown(self) -> int:
        return self.device.total() + self.api.total()


def _short(text: str) -> str:
    """Without what differs from one occurrence to the next: addresses, offsets, the number of pairs of threads."""
    text = re.sub(r"\+0x[0-9a-f]+|\s*\[\d+ hazards?\]", "", text)
    return re.sub(r"0x[0-9a-f]+", "an address", text).strip(" :.")


def read_report(output: str) -> Report:
    """compute-sanitizer's blocks in what a program under it printed, which may lie between the program's own lines.

    A block begins with a line of `=========` and text; lines indented further say where. Of those an access keeps the
    kernel and line, a race both sides (racecheck's analysis) or both threads' lines (its list of hazards).
    """
    blocks: list[list[str]] = []
    total = None
    for line in output.splitlines():
        match = re.match(r"^=========( +)(\S.*)$", line)
        if not match:
            continue
        indent, text = len(match[1]), match[2]
        summary = re.match(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
        if summary:  # a second one says what was not printed for its number
            total = max(total or 0, int(summary[1]))
        elif indent == 1 and not re.match(r"COMPUTE-SANITIZER|LEAK SUMMARY", text):
            blocks.append([text])
        elif indent > 1 and blocks:
            blocks[-1].append(text)
    device: Counter[str] = Counter()
    api: Counter[str] = Counter()
    for head, *rest in blocks:
        call = re.match(r"Program hit (?:error )?(\w+).*? on CUDA API call(?: to (\w+))?", head)
        if call:
            api[f"{call[1]} from {call[2] or 'a call'}"] += 1
            continue
        places = [line for line in rest if re.match(r"at |Access |Address |and (Read|Write)|(Read|Write) Thread", line)]
        places = [re.sub(r" Thread \([\d, ]+\)", "", place) for place in places]
        head = re.sub(r" in block \([\d, ]+\)", "", head)
        device[" ".join(dict.fromkeys(_short(text) for text in (head, *places)))] += 1
    return Report(device, api, total)


def describe(errors: Counter[str]) -> str:
    """`2 x first; 1 x second`, the most frequent first."""
    named = [f"{count} x {text}" for text, count in errors.most_common(_NAMED)]
    more = len(errors) - len(named)
    return "; ".join(named) + (f"; and {more} other kinds" if more > 0 else "")


def run_process(check: Check, limit_s: float) -> tuple[int | None, str]:
    """(exit code, what it printed) of a check's program; no exit code when it did not start or end, and then why."""
    command = [*check.prefix, sys.executable, *check.arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | dict(check.environment),
            capture_output=True,
            text=True,
            timeout=max(limit_s, 1e-3),
        )
    except subprocess.TimeoutExpired:
        return None, f"not done after {round(limit_s, 1):g} s"
    except OSError as error:
        return None, str(error)
    return done.returncode, done.stdout + done.stderr


def _last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-300:]


def _why_sanitizer(code: int, report: Report, output: str) -> str:
    """Why a run under compute-sanitizer does not count as passed; empty when it does."""
    if report.total is None:
        return f"exit code {code} without a summary: {_last_lines(output)}"
    if report.device:
        handled = f"; calls of the CUDA API that failed: {describe(report.api)}" if report.api else ""
        return f"{report.total} reported: {describe(report.device)}{handled}"
    if report.total != report.shown:
        return f"{report.total} reported, {report.shown} of them shown: {describe(report.api) or _last_lines(output)}"
    # a program that did not end well is reported as a block of its own, so this code is that of the failed calls
    if code and not (code == FOUND_ERRORS and report.api):
        return f"exit code {code}: {_last_lines(output)}"
    return ""


def _compared(reason: str, check: Check, limit_s: float) -> tuple[str, str]:
    """(the reason with what the tool says of the control, what the control printed)"""
    code, output = run_process(replace(check, arguments=check.control), limit_s)
    report = read_report(output)
    if code is None or report.total is None:
        return f"{reason}; the control says nothing: {output if code is None else _last_lines(output)}", output
    if not report.device:
        return f"{reason}; a control that synchronises in the same ways is clean", output
    return (
        f"not decided: the tool does not follow this synchronisation, it reports {report.total} in a control that is "
        f"right by construction ({describe(report.device)}); in the kernels {reason}",
        output,
    )


def perform(check: Check, limit_s: float) -> Outcome:
    """Run one check in a process of its own, and its control after it where the tool reported something."""
    start = time.monotonic()
    code, output = run_process(check, limit_s)
    if code is None:
        return Outcome(0, time.monotonic() - start, output)
    found = re.findall(check.done, output, re.MULTILINE)
    note = reason = ""
    if check.sanitizer:
        report = read_report(output)
        reason = _why_sanitizer(code, report, output)
        note = f"handled by the program: {describe(report.api)}" if report.api else ""
        if reason and report.device and check.control:
            reason, printed = _compared(reason, check, limit_s - (time.monotonic() - start))
            output += f"\n--- control ---\n{printed}"
    elif code:
        reason = f"exit code {code}: {_last_lines(output)}"
    if not reason and not found:
        reason = f"exit code {code}: {_last_lines(output)}"
    seconds = time.monotonic() - start
    if reason:
        return Outcome(0, seconds, reason, output)
    covered = check.covered or (len(found) if check.each else int(found[-1]))
    return Outcome(covered, seconds, "", output, note)


def sanitizer_version() -> str:
    """Which compute-sanitizer is on the path, as 2025.3.1.0; empty when there is none. Findings depend on it."""
    try:
        done = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"Version (\d[\w.]*)", done.stdout)
    return match[1] if match else ""


def run_checks(run_name: str, names: list[str], limit_s: float) -> bool:
    """Perform them side by side and record; True when all passed."""
    with ThreadPoolExecutor(len(names)) as pool:
        outcomes = dict(zip(names, pool.map(lambda name: perform(CHECKS[name], limit_s), names), strict=True))
    logs = Path("results", run_name, "logs", "kernel_checks")
    logs.mkdir(parents=True, exist_ok=True)
    for name, outcome in outcomes.items():
        (logs / f"{name}.log").write_text(outcome.output)
    config: dict[str, object] = {"limit_s": limit_s}
    if any(CHECKS[name].sanitizer for name in names):
        config["compute_sanitizer"] = sanitizer_version()
    with record.Run(run_name, "kernel_checks", name="kernel_checks-tlx", config=config, sources=SOURCES) as run:
        for name, outcome in outcomes.items():
            row = {"case": name, "subject": "attention", "impl": "tlx", "phase": "eval", "metric": "correct"}
            if outcome.reason:
                run.add(**row, status="failed", note=outcome.reason)
            else:
                note = "; ".join(part for part in (f"{outcome.seconds:.0f} s", outcome.note) if part)
                run.add(**row, p50=1, n=outcome.covered, note=note)
            print(f"{name}: {outcome.reason or f'passed, {outcome.covered}'} ({outcome.seconds:.0f} s)", flush=True)
    return not any(outcome.reason for outcome in outcomes.values())


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.kernel_checks", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"comma-separated, of {', '.join(CHECKS)}")
    parser.add_argument("--limit-s", type=float, default=280.0, help="seconds a check may take (default 280)")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    try:
        for name in names:
            if name not in CHECKS:
                raise ValueError(f"--only {name!r}; allowed: {', '.join(CHECKS)}")
        if args.limit_s <= 0:
            raise ValueError(f"--limit-s {args.limit_s:g}; allowed: more than 0")
        hardware.open_device("cuda")
        return 0 if run_checks(args.run or args.tier, names, args.limit_s) else 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
