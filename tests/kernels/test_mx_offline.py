"""The 8-bit attention kernel compiles for sm_90a without a GPU: on the 8-bit tensor cores, P handed over in registers.

fbtriton replaces stock Triton, so it is used in a subprocess; see test_tlx_offline.py.
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

SCRIPT = """
import sys
import torch
from kernels.mxfp8 import attention_tlx
from kernels.mxfp8.hopper_attention import Operands
from tests.kernels.triton_offline import compiling

activation, scales = sys.argv[1:]
low, offsets = torch.float8_e4m3fn, torch.empty(5, dtype=torch.int32, device="meta")
q, v = (torch.empty(shape, dtype=low, device="meta") for shape in ((256, 4, 128), (512, 1024)))
row, tile, fine = (torch.empty(shape, device="meta") for shape in ((4, 256), (8, 4), (8, 4, 128)))
of_rows = torch.empty(4, 1024, device="meta")
operands = Operands(q, row, q, *((of_rows, v, fine) if scales == "fine" else (tile, v, tile)))
with compiling(sass=True) as compiled:
    attention_tlx.forward_with(attention_tlx.Config(), operands, offsets, offsets,
                               activation=activation, scale=0.1, dtype=torch.bfloat16)
kernel = next(c for c in compiled if c.name == "attention8_kernel")
count = lambda name: kernel.sass.count(name + ".")
print(kernel.local_bytes, kernel.shared_bytes, *(count(name) for name in ("QGMMA", "HGMMA", "SHFL")))
"""


@pytest.mark.parametrize("activation", ("softmax", "gelu_tanh"))
@pytest.mark.parametrize("scales", ("fine", "tile"))
def test_compiles_to_8_bit_products(activation, scales):
    env = os.environ | {"PYTHONPATH": f"{FBTRITON}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, activation, scales], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    spilled, shared, low, high, shuffles = map(int, done.stdout.split())
    assert shared <= 232448 and low > 0 and high == 0
    # Shuffles are those of the row maxima and sums alone: none moves an element of P to another thread.
    assert shuffles <= 50
    # Softmax keeps the masks of a ragged last tile in local memory; no other tile reads them.
    assert spilled <= (600 if activation == "softmax" else 256)
