"""Run the Triton checks of a test module in one process of their own, under Triton's interpreter.

The interpreter is chosen when a kernel is decorated, so it cannot be switched on in a process that has imported
kernels. A module lists its checks in CHECKS (name -> function without arguments) and ends with `main(CHECKS)` under
__main__.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback


def results(module: str, timeout: int = 250) -> dict[str, str | None]:
    """Failure text, or None, of every check of `module`."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr[-2000:]
    return {line["check"]: line["failure"] for line in map(json.loads, run.stdout.splitlines())}


def unsanitized() -> None:
    """Switch off the interpreter's check of every 32-bit sum and product for overflow, a third of its time.

    Compiled kernels have no such check, and the shapes here are far from overflowing; addresses of large tensors are
    tested on a GPU.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def main(checks: dict) -> None:
    """Print one JSON line a check."""
    unsanitized()
    for name, check in checks.items():
        try:
            check()
            failure = None
        except Exception:
            failure = traceback.format_exc()[-1500:]
        print(json.dumps({"check": name, "failure": failure}), flush=True)
