"""Lists of work of the TLX kernels, built by plain Triton in its interpreter (a process of its own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_lists_in_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.work_lists_checks"], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [
        "forward_lists_hold_every_valid_tile_longest_keys_first",
        "backward_lists_name_every_key_tile_once",
    ]
