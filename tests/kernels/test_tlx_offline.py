"""The TLX kernels compile for sm_90a in every configuration, without a GPU, and do not spill.

fbtriton replaces stock Triton, so it is looked for in a folder of its own and used in a subprocess:
    pip install --no-deps --target DIR fbtriton==3.7.4 ; GEM_FBTRITON=DIR pytest tests/kernels/test_tlx_offline.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FBTRITON = os.environ.get("GEM_FBTRITON", "")
pytestmark = pytest.mark.skipif(
    not (Path(FBTRITON) / "triton/language/extra/tlx").is_dir() or not FBTRITON,
    reason="GEM_FBTRITON names no folder with fbtriton",
)

# Bytes of local memory a thread. The backward has none in its loop over query tiles; what it spills is kept for a tile.
FORWARD_BYTES, BACKWARD_BYTES = 0, 128

SCRIPT = """
import sys
import torch
from tests.kernels.triton_offline import compiling
from kernels import tlx_backward
from kernels.gdpa import tlx
from kernels.jfa import v4_tlx
from tests.gpu import sanitize

def run(what, dim):
    q = torch.empty(256, 4, dim, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(5, dtype=torch.int64, device="meta")
    with compiling() as compiled:
        if what == "gdpa":
            for config in {tlx.forward_config(dim, None), tlx.forward_config(dim, 32), *tlx.candidates(dim)}:
                for activation in tlx.ACTIVATIONS if config == tlx.forward_config(dim, None) else ("gelu_tanh",):
                    tlx.forward_with(config, q, q, q, offsets, offsets, activation=activation, scale=0.1)
        elif what == "attention":
            for config in {v4_tlx.forward_config(dim, None), v4_tlx.forward_config(dim, 32), *v4_tlx.candidates(dim)}:
                v4_tlx.forward_with(config, q, q, q, offsets, offsets, scale=0.1)
            v4_tlx.forward_with(v4_tlx.forward_config(dim, None), q, q, q, offsets, offsets, scale=0.1, window=100)
        elif what == "control":
            sanitize.control("meta")
        else:
            for activation in (*tlx.ACTIVATIONS, "softmax"):
                for rows in (None, 100, 32):  # queries of their own, shared by all, few shared by all
                    do = q if rows is None else q.new_empty(4 * rows, 4, dim)
                    statistics = torch.empty(4, do.shape[0], device="meta")
                    tlx_backward.backward_with(
                        tlx_backward.default_config(rows), do, q[:rows], q, q, None if rows else offsets, offsets,
                        activation=activation, scale=0.1, lse=statistics, delta=statistics)
            for config in (tlx_backward.Config(chunks=True), tlx_backward.Config(fold_scale=False)):
                tlx_backward.backward_with(config, q, q, q, q, offsets, offsets, activation="gelu_tanh", scale=0.1)
    for c in compiled:
        print(c.name, c.registers, c.local_bytes, c.shared_bytes)

run(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "what,dim,allowed",
    [
        ("gdpa", 64, FORWARD_BYTES),
        ("gdpa", 128, FORWARD_BYTES),
        ("attention", 64, FORWARD_BYTES),
        ("attention", 128, FORWARD_BYTES),
        ("backward", 128, BACKWARD_BYTES),
        ("control", 64, FORWARD_BYTES),
    ],
)
def test_compiles_without_spilling(what, dim, allowed):
    env = os.environ | {"PYTHONPATH": f"{FBTRITON}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, str(dim)], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    names = ("gdpa_fwd_kernel", "attention_fwd_kernel", "backward_kernel", "control_kernel")
    kernels = [row for row in rows if row[0] in names]
    assert kernels
    for name, _, spilled, shared in kernels:
        assert int(spilled) <= allowed, f"{name}: {spilled} bytes of local memory"
        assert int(shared) <= 232448, f"{name}: {shared} bytes of shared memory"
