"""Records of how unevenly tile schedules load the programs of a persistent kernel: arithmetic on lengths, no kernel.

Workloads: a batch small enough to follow by hand, whose plain grid gives two programs 12 and 2 key blocks, the skew
of the source's example (its lengths are not published); and the public benchmark's length laws at its batch and
lengths, on the 132 multiprocessors of an H200.
"""

from __future__ import annotations

import torch

from gem import record
from kernels.jagged import sample_lengths
from kernels.schedule import ORDERS, skew, tile_schedule

EXPERIMENT = "schedule"
SOURCES = ("kernels/schedule.py", "kernels/jagged.py", "gem/bench/schedule_skew.py")
TILE, PROGRAMS, SEED = 128, 132, 2025
BATCH = 1152
# Three sequences of 1, 1 and 2 query tiles with 5, 5 and 2 key blocks. Dealt over ceil(longest / tile) = 2 slots a
# sequence, every second slot of the first two is empty, and program 0 gets 5 + 5 + 2 blocks, program 1 gets 2.
BY_HAND = ((1, 1, 2), (5, 5, 2))
# case -> (law of the queries, longest, fill) and the same of the keys; None: keys are as many as queries
CASES = {
    "tiles_self_full_512": (("full", 512, 1.0), None),
    "tiles_self_uniform_512": (("uniform", 512, 0.5), None),
    "tiles_self_uniform_1024": (("uniform", 1024, 0.5), None),
    "tiles_self_longtail_1024": (("longtail", 1024, None), None),
    "tiles_cross_uniform_1024": (("uniform", 1024, 0.5), ("uniform", 256, 0.5)),
}


def lengths(law: tuple, seed: int) -> torch.Tensor:
    name, longest, fill = law
    return sample_lengths(name, BATCH, longest, fill, torch.Generator().manual_seed(seed))


def workloads() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """case -> (query lengths, key lengths), both int64 [B]."""
    found = {}
    for index, (name, (queries, keys)) in enumerate(CASES.items()):
        q = lengths(queries, SEED + index)
        found[name] = (q, q if keys is None else lengths(keys, SEED + 100 + index))
    return found


def add_case(run: record.Run, case: str, q: torch.Tensor, kv: torch.Tensor, programs: int) -> None:
    for order in ORDERS:
        result = skew(tile_schedule(q, kv, TILE, TILE, programs, order).work)
        row = {
            "case": case,
            "subject": "tile_schedule",
            "impl": order,
            "phase": "fwd",
            "scope": "modelled",
            "seed": SEED,
        }
        note = f"tiles {TILE}x{TILE}, {programs} programs"
        run.add(**row, metric="skew", p50=result.max_over_mean, note=note)
        if result.max_over_min == float("inf"):
            run.add(**row, metric="skew_max_min", status="failed", note="a program has no work: the ratio is infinite")
        else:
            run.add(**row, metric="skew_max_min", p50=result.max_over_min, note=note)


def add_records(run: record.Run) -> None:
    """Skew of every workload under every order."""
    for case, (q, kv) in workloads().items():
        add_case(run, case, q, kv, PROGRAMS)
    by_hand = (torch.tensor(tiles) * TILE for tiles in BY_HAND)
    add_case(run, "tiles_by_hand", *by_hand, 2)
