"""The long checks of the TLX attention kernels, run side by side on one GPU, with their outcome on record.

    python -m gem.bench.kernel_checks --tier gpu
    python -m gem.bench.kernel_checks --tier gpu --only memcheck,racecheck --limit-s 120

Records `kernel_checks`, one row a check: metric correct, n the cases, tests, launches or kernels it covered, the time
it took in the note. A check that fails, or that has not ended after --limit-s seconds, is a row with status failed and
the reason; the run then ends with exit code 1, its record written all the same. What a check printed is kept under
results/<run>/logs/kernel_checks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gem import hardware, record
from gem.cli import Parser
from gem.digest import ROOT

SOURCES = ("kernels", "tests/gpu/test_tlx_gpu.py", "tests/gpu/sanitize.py")
_SANITIZE = ("-m", "tests.gpu.sanitize")
# without the project's own options, one of which is -q: twice, it drops the closing line that is counted here
_TESTS = ("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "tests/gpu/test_tlx_gpu.py")


@dataclass(frozen=True)
class Check:
    """arguments follow the interpreter, prefix stands before it. done: what the output holds when all went well, its
    group 1 the number covered; each: counts matches of `done` instead.
    """

    arguments: tuple[str, ...]
    done: str
    prefix: tuple[str, ...] = ()
    each: bool = False
    covered: int | None = None


CHECKS = {
    "memcheck": Check(_SANITIZE, r"^\w+ \w+ .* finite$", ("compute-sanitizer", "--error-exitcode", "9"), each=True),
    "racecheck": Check(
        _SANITIZE,
        r"^\w+ \w+ .* finite$",
        ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9"),
        each=True,
    ),
    "launches": Check((*_SANITIZE, "--launches", "10000"), r"^(10000) launches$"),
    "random_batches": Check(
        (*_TESTS, "-m", "gpu and slow", "-k", "thousand", "-n", "5"), r"(\d+) passed", covered=1000
    ),
    "default_tests": Check((*_TESTS, "-m", "gpu and not slow", "-n", "6"), r"(\d+) passed"),
}


@dataclass(frozen=True)
class Outcome:
    """covered: how many things the check saw; reason: why it failed, empty when it passed."""

    covered: int
    seconds: float
    reason: str
    output: str = ""


def perform(check: Check, limit_s: float) -> Outcome:
    """Run one check in a process of its own."""
    start = time.monotonic()
    command = [*check.prefix, sys.executable, *check.arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Outcome(0, time.monotonic() - start, f"not done after {limit_s:g} s")
    except OSError as error:
        return Outcome(0, time.monotonic() - start, str(error))
    seconds, output = time.monotonic() - start, done.stdout + done.stderr
    found = re.findall(check.done, output, re.MULTILINE)
    if done.returncode or not found:
        lines = [line for line in output.splitlines() if line.strip()]
        return Outcome(0, seconds, f"exit code {done.returncode}: {' / '.join(lines[-3:])[-300:]}", output)
    covered = check.covered or (len(found) if check.each else int(found[-1]))
    return Outcome(covered, seconds, "", output)


def run_checks(run_name: str, names: list[str], limit_s: float) -> bool:
    """Perform them side by side and record; True when all passed."""
    with ThreadPoolExecutor(len(names)) as pool:
        outcomes = dict(zip(names, pool.map(lambda name: perform(CHECKS[name], limit_s), names), strict=True))
    logs = Path("results", run_name, "logs", "kernel_checks")
    logs.mkdir(parents=True, exist_ok=True)
    for name, outcome in outcomes.items():
        (logs / f"{name}.log").write_text(outcome.output)
    with record.Run(
        run_name, "kernel_checks", name="kernel_checks-tlx", config={"limit_s": limit_s}, sources=SOURCES
    ) as run:
        for name, outcome in outcomes.items():
            row = {"case": name, "subject": "attention", "impl": "tlx", "phase": "eval", "metric": "correct"}
            if outcome.reason:
                run.add(**row, status="failed", note=outcome.reason)
            else:
                run.add(**row, p50=1, n=outcome.covered, note=f"{outcome.seconds:.0f} s")
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
