"""The TLX block attention compiles for sm_90a in every configuration, without a GPU, and no tile changes its layout.

fbtriton replaces stock Triton, so it is looked for in a folder of its own and used in a subprocess:
    pip install --no-deps --target DIR fbtriton==3.7.4 ; GEM_FBTRITON=DIR pytest tests/kernels/test_block_tlx_offline.py
"""

import json
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
LAYOUTS = {"plain": None, "interleaved": True, "half": False}

# Bytes of local memory a thread: the backward keeps the tables beside a gradient in registers.
MAX_LOCAL = {("bwd", 128, "interleaved"): 16, ("bwd", 128, "half"): 16}
# wgmma instructions of both consumers, 16 deep: q k^T and dO v^T over the head size, three products over 64 rows, of
# which the one in the loop of dv and dk stands once.
PRODUCTS = {("fwd", 64): 16, ("fwd", 128): 24, ("bwd", 64): 32, ("bwd", 128): 48}

SCRIPT = """
import json, re, sys
import torch
from tests.kernels.triton_offline import compiling
from kernels.block_attention import tlx
from kernels.rotary import Rotary

phase, dim, half = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fp16"
rows = torch.empty(256, 4, dim, dtype=torch.float16 if half else torch.bfloat16, device="meta")
offsets = torch.empty(5, dtype=torch.int64, device="meta")
table = torch.empty(256, dim // 2, device="meta")
for layout, interleaved in json.loads(sys.argv[4]).items():
    rotary = None if interleaved is None else Rotary(table, table, interleaved)
    settings = {"block_size": 64, "scale": 0.1, "rotary": rotary}
    for config in tlx.candidates(phase, dim) if not half else [None]:
        with compiling(sass=True) as found:
            if phase == "fwd":
                tlx.forward_with(config, rows, rows, rows, offsets, **settings)
            else:
                tlx.backward_with(config, rows, rows, rows, rows, offsets, **settings)
        kernel = found[-1]
        count = {name: len(re.findall(rf"\\b{name}\\b", kernel.sass)) for name in ("HGMMA", "STS", "LDS")}
        print(json.dumps([layout, str(config), kernel.local_bytes, kernel.shared_bytes, count]))
"""


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("phase", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiles_without_moving_a_tile_through_scratch(phase, dim, dtype):
    env = os.environ | {"PYTHONPATH": f"{FBTRITON}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, phase, str(dim), dtype, json.dumps(LAYOUTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == set(LAYOUTS)
    for layout, config, local, shared, count in rows:
        assert local <= MAX_LOCAL.get((phase, dim, layout), 0), (layout, config, local)
        assert shared <= 232448, (layout, config, shared)
        assert count["HGMMA"] == PRODUCTS[phase, dim], (layout, config, count)
        # Tiles go by ldmatrix and stmatrix; a change of layout would show as many plain stores and loads.
        assert count["STS"] < 16, (layout, config, count)
