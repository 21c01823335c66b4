"""Records of three generations of sparse parallelism, modelled: bytes a GPU holds and sends, and balance of the load.

V1 shards the tables over all GPUs. V2 shards them over groups of GROUP GPUs, each group with a full copy, and
averages the copies every step. V3 is V2 with each shard split again over its replicas, which sit on one host:
gathered before the lookup, gathered again for the update, and scattered back, so that a GPU holds shard + shard /
replicas at the peak and shard / replicas between steps. So says the source; the numbers below are arithmetic on one
set of tables and no measurement.

Replicas of a shard are neighbours on a host (TorchRec's default, and what keeps copies on NVLink). Then every host has
one member of each group for `replicas` GPUs, so a group is spread over all hosts and all zones: its all-to-all
leaves the host and the zone with the same share of bytes as that of V1, and what groups save is peers, not
bytes: GROUP - 1 partners and messages gpus / GROUP times as long. The other placement, a group inside one zone, keeps
lookups in the zone and sends the copies across zones instead (`copies_across_zones`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from gem import record

EXPERIMENT = "sparse"
SOURCES = ("gem/bench/sparse_model.py",)
GROUP = 256  # GPUs that share one copy of the tables in V2 and V3, and GPUs of a zone
HOST = 8
GPUS = (256, 512, 1024, 2048)  # so that at most 8 replicas of a shard, and they fit on a host of 8


@dataclass(frozen=True)
class Tables:
    """A set of embedding tables and the batch that looks into them.

    sizes: bytes of each table. loads: relative lookup work of each. pieces: column shards of a table. rows:
    looked-up and pooled vectors a sample, each of dim bytes_per_value values. local_batch: samples a GPU and step.
    """

    sizes: np.ndarray
    loads: np.ndarray
    pieces: int = 4
    rows: int = 500
    dim: int = 128
    bytes_per_value: int = 2
    local_batch: int = 1024
    ids_per_sample: int = 5000


def standard_tables(count: int = 500, total: float = 2.0 * 2**40, seed: int = 0) -> Tables:
    """`count` tables of log-normal size, `total` bytes together, whose work is log-normal too."""
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(0.0, 1.5, count)
    return Tables(sizes / sizes.sum() * total, rng.lognormal(0.0, 0.5, count))


def placement_skew(loads: np.ndarray, pieces: int, ranks: int) -> float:
    """Largest over mean load when each table is cut in `pieces` and every piece, heaviest first, goes to the GPU
    that has least so far.
    """
    parts = np.sort(np.repeat(loads / pieces, pieces))[::-1]
    heap = [(0.0, rank) for rank in range(ranks)]
    for part in parts:
        load, rank = heapq.heappop(heap)
        heapq.heappush(heap, (load + float(part), rank))
    return max(load for load, _ in heap) / (float(parts.sum()) / ranks)


def model(tables: Tables, gpus: int) -> dict[str, dict[tuple[str, str], float]]:
    """Generation -> (metric, impl) -> value a GPU: bytes held (resident, peak), skew of the placement, and bytes sent a
    step: network, lookups that leave the host; across_zones, of those to other zones of GROUP GPUs; to_one_peer, of
    lookups to each member of the group; nvlink, copies inside the host; copies_across_zones, what the copies would
    send across zones if a group lay inside one zone.

    gpus must be a multiple of GROUP, at most 8 of them: the replicas of a shard share a host.
    """
    if gpus < GROUP or gpus % GROUP or gpus // GROUP > 8:
        raise ValueError(f"gpus: {gpus}; allowed: {GROUP} times 1 to 8")
    replicas, total = gpus // GROUP, float(tables.sizes.sum())
    shard = total / GROUP
    vectors = tables.local_batch * tables.rows * tables.dim * tables.bytes_per_value
    lookups = 2 * vectors + 8 * tables.local_batch * tables.ids_per_sample  # vectors out, gradients back, ids
    share = (replicas - 1) / replicas
    found = {}
    for name, ranks in (("v1", gpus), ("v2", GROUP), ("v3", GROUP)):
        held = {"v1": total / gpus, "v2": shard, "v3": shard / replicas}[name]
        peak = held + shard if name == "v3" and replicas > 1 else held
        moves = {"v1": 0.0, "v2": 2 * share * shard, "v3": 3 * share * shard}[name]

        def members(near: int, apart: int = gpus // ranks) -> float:
            """GPUs of this GPU's group among `near` neighbours: one in `apart`."""
            return near / apart

        found[name] = {
            ("memory_bytes", "resident"): held,
            ("memory_bytes", "peak"): peak,
            ("comm_bytes", "network"): lookups * (ranks - members(HOST)) / ranks,
            ("comm_bytes", "across_zones"): lookups * (ranks - members(GROUP)) / ranks,
            ("comm_bytes", "to_one_peer"): lookups / ranks,
            ("comm_bytes", "nvlink"): moves,
            ("comm_bytes", "copies_across_zones"): moves,
            ("skew", "model"): placement_skew(tables.loads, tables.pieces, ranks),
        }
    return found


def add_records(run: record.Run) -> None:
    """A case a number of GPUs, subjects v1, v2, v3."""
    tables = standard_tables()
    note = f"{len(tables.sizes)} tables, {tables.sizes.sum() / 2**40:.1f} TiB, groups of {GROUP}"
    for gpus in GPUS:
        for name, values in model(tables, gpus).items():
            for (metric, impl), value in values.items():
                base = {"case": f"gpus{gpus}", "subject": name, "impl": impl, "phase": "model", "scope": "modelled"}
                run.add(**base, metric=metric, p50=value, seed=0, note=note)
