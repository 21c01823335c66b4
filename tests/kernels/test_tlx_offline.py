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
    ],
)
def test_compiles_without_spilling(what, dim, allowed):
    env = os.environ | {"PYTHONPATH": f"{FBTRITON}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, str(dim)], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    kernels = [row for row in rows if row[0] in ("gdpa_fwd_kernel", "attention_fwd_kernel", "backward_kernel")]
    assert kernels
    for name, _, spilled, shared in kernels:
        assert int(spilled) <= allowed, f"{name}: {spilled} bytes of local memory"
        assert int(shared) <= 232448, f"{name}: {shared} bytes of shared memory"


LISTS = """
import torch
from kernels.jagged import lengths_to_offsets
from kernels.tlx_backward import tile_list, unit_list

g = torch.Generator().manual_seed(0)
for case in range(30):
    batch, spare, dense = int(torch.randint(1, 8, (1,), generator=g)), case % 4, case % 3 == 0
    q_lengths = torch.randint(0, 400, (batch,), generator=g)
    kv_lengths = torch.randint(0, 400, (batch,), generator=g) * torch.randint(0, 2, (batch,), generator=g)
    kv = lengths_to_offsets(kv_lengths)
    q = None if dense else lengths_to_offsets(q_lengths)
    q_rows, kv_rows = 32 if dense else int(q_lengths.sum()) + spare, int(kv_lengths.sum()) + spare
    expected = [(0, 0, int(kv[-1]), spare, 0)]  # keys past the last sequence: gradients of zero
    for i in range(batch):
        first = i * q_rows if dense else int(q[i])
        rows = (0, q_rows) if dense else (first, int(q_lengths[i]))
        expected.append((*rows, int(kv[i]), int(kv_lengths[i]), first))
    expected = [(*e[2:4], *e[:2], e[4]) for e in expected for _ in range(-(-e[3] // 128))]
    table, count = tile_list(q, kv, q_rows, kv_rows)
    table, owners = table[: int(count)].tolist(), {}
    assert sorted(tuple(row[:5]) for row in table) == sorted(expected), case
    start = 0
    for i, row in enumerate(table):  # the tiles of a sequence follow one another
        start = i if row[5] == i else start
        assert row[5] == start and row[6] == -(-row[1] // 128) and i < start + row[6], case
        for m in range(-(-row[3] // 64)):  # no two sequences share a counter, and all counters exist
            assert owners.setdefault(row[7] + m, row[4]) == row[4], case
            assert row[7] + m <= (batch * q_rows if dense else q_rows) // 64 + batch + 2, case
    assert all(a[3] >= b[3] for a, b in zip(table, table[1:], strict=False)), case
    units, number = unit_list(q, kv, q_rows, kv_rows)
    assert int(number) == batch + 2 and sum(units[:, 6].tolist()) == len(table), case
print("lists hold")
"""


def test_lists_of_the_backward_name_every_key_tile_once():
    """Every tile of 128 keys of every sequence once, next to its neighbours, with counters of its own."""
    env = os.environ | {"PYTHONPATH": f"{FBTRITON}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "lists hold"
