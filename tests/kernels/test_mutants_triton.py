"""Code breaks of the Triton kernels, each of which a named check must catch, in Triton's interpreter.

A break is a text replacement in a copy of the sources, in a process of its own, since the interpreter reads a kernel's
source when it is decorated. Breaks of the TLX kernels would need a GPU: the interpreter does not know them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, BROKEN = 0, 1, 2


@dataclass(frozen=True)
class Break:
    """In kernels/`file`, `old` becomes `new` wherever it stands; check `check` of tests/kernels/`module` must fail."""

    name: str
    file: str
    old: str
    new: str
    module: str
    check: str


JFA, GDPA, BLOCK, PFFN = "jfa_triton_checks", "test_gdpa_triton", "test_block_triton", "test_fused_norm_triton"
BREAKS = [
    Break("v2_ragged_end_unmasked", "jfa/triton_forward.py", 'return tl.where(seen, s, float("-inf"))', "return s",
          JFA, "by hand v2"),
    Break("v2_window_one_too_narrow", "jfa/triton_forward.py", "<= window)", "< window)", JFA, "windows"),
    Break("v2_first_tile_missing_from_the_list", "triton_common.py", "tl.cumsum(mine, 0) - mine", "tl.cumsum(mine, 0)",
          JFA, "tile list"),
    Break("v2_start_of_a_window_unmasked", "jfa/triton_forward.py", "(n < whole_lo) | (n >= whole_hi)", "n >= whole_hi",
          JFA, "descriptors"),
    Break("v2_last_keys_of_dq_unmasked", "jfa/triton_backward.py", "(n < whole_lo) | (n >= whole_hi)", "n < whole_lo",
          JFA, "descriptors"),
    Break("v3_surplus_kept", "jfa/v3_subtraction.py", "l -= surplus", "l -= 0.0 * surplus", JFA, "patterns v3"),
    Break("v3_subtracts_outside_its_domain", "jfa/v3_subtraction.py", "surplus * FLOOR, 0) <= 0",
          "surplus * FLOOR, 0) <= -1e38", JFA, "subtraction domain"),
    Break("gdpa_second_key_tile_meets_the_first_values", "gdpa/triton_forward.py", "tl.dot(p, v1, acc",
          "tl.dot(p, v0, acc", GDPA, "resident"),
    Break("gdpa_hint_that_lies_is_not_poisoned", "gdpa/triton_forward.py",
          'tl.where(k_len > KV_TILES * BLOCK_N, float("nan"), 0.0)', "0.0", GDPA, "lying hint"),
    Break("gdpa_zigzag_drops_the_rest", "gdpa/triton_forward.py",
          "(tl.load(count) * num_heads + programs - 1) // programs", "tl.load(count) * num_heads // programs",
          GDPA, "patterns zigzag split"),
    Break("gdpa_grid_leaves_the_rest", "gdpa/triton_forward.py", "store_rows(o, tile * BLOCK_M", "store_rows(o, length",
          GDPA, "patterns grid owner"),
    Break("gdpa_slope_is_the_value", "gdpa/triton_backward.py", "ds = (dp * slope)", "ds = (dp * p)",
          GDPA, "activations"),
    Break("gdpa_owner_forgets_earlier_keys", "gdpa/triton_backward.py", "known = tl.where(n > 0, q_len, 0)",
          "known = q_len * 0", GDPA, "patterns grid owner"),
    Break("block_partial_block_unmasked", "block_attention/triton_kernels.py", "(columns < count)[None, :]",
          "(columns >= 0)[None, :]", BLOCK, "lengths plain"),
    Break("block_gradients_turned_forward", "block_attention/triton_kernels.py", "_turn(a, b, c, -s)",
          "_turn(a, b, c, s)", BLOCK, "lengths interleaved"),
    Break("rotary_second_half_mirrored", "rotary/triton_kernels.py", "b * cos + a * sin", "b * cos - a * sin",
          "test_rotary_triton", "interleaved"),
    Break("norm_mean_kept", "rotary/triton_kernels.py", "        a = a - mean\n", "", "test_norm_triton",
          "layer over head rotary False"),
    Break("pffn_input_not_added", "fused_norm/triton_pffn.py", "y + s, COLUMNS", "y, COLUMNS", PFFN, "feed-forward"),
    Break("pffn_gradient_along_the_norm_kept", "fused_norm/triton_pffn.py", "(dy - n * along)", "dy",
          PFFN, "feed-forward"),
    Break("pffn_query_path_lost", "fused_norm/triton_pffn.py",
          "_read(DQ, first, real, COLUMNS, ROWS, BLOCK) + _read(DU", "_read(DU", PFFN, "feed-forward"),
    Break("pffn_padding_columns_counted", "fused_norm/triton_pffn.py", "if BLOCK != COLUMNS:", "if BLOCK < COLUMNS:",
          PFFN, "columns not a power of two"),
    Break("pffn_spare_rows_enter", "fused_norm/triton_pffn.py", "return first, exist, real",
          "return first, exist, exist", PFFN, "spare rows"),
]  # fmt: skip
SOUND = Break("sound", "triton_common.py", "LOG2E = ", "LOG2E = ", "test_rotary_triton", "interleaved")


def _run(broken: Break) -> int:
    """In a fork that has imported torch and triton but nothing of this project: run the check on the broken copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("kernels", "tests/kernels"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
        shutil.copy(ROOT / "tests/__init__.py", copy / "tests")
        source = copy / "kernels" / broken.file
        text = source.read_text()
        if broken.old not in text:
            print(f"{broken.name}: {broken.old!r} is not in {broken.file}", file=sys.stderr)
            return BROKEN
        source.write_text(text.replace(broken.old, broken.new))
        pid = os.fork()
        if pid == 0:
            os._exit(_check(broken, copy))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _check(broken: Break, copy: Path) -> int:
    import importlib

    for name in [name for name in sys.modules if name.split(".")[0] in ("kernels", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    os.chdir(copy)
    try:
        module = importlib.import_module(f"tests.kernels.{broken.module}")
        assert Path(module.__file__).is_relative_to(copy)
        importlib.import_module("tests.kernels.triton_interpreted").unsanitized()
        check = getattr(module, "INTERPRETED", None) or module.CHECKS
        check = check[broken.check]
    except Exception as error:
        print(f"{broken.name}: {error!r}", file=sys.stderr)
        return BROKEN
    try:
        check()
    except AssertionError:
        return KILLED
    except Exception as error:
        print(f"{broken.name}: {error!r}", file=sys.stderr)
        return BROKEN
    return SURVIVED


@pytest.fixture(scope="module")
def outcomes():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.test_mutants_triton"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_harness_passes_sound_code(outcomes):
    assert outcomes[0]["sound"] == SURVIVED, outcomes[1]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_a_check_catches(outcomes, broken):
    assert outcomes[0][broken.name] == KILLED, f"{broken.check} of {broken.module} does not notice; {outcomes[1]}"


if __name__ == "__main__":
    import torch  # once, before the forks
    import triton  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps({broken.name: _run(broken) for broken in (SOUND, *BREAKS)}))
