"""The numbers of gem.bench.replay: what lengths alone say, bounds, records of similar workloads, times on a GPU.

Host arithmetic on lengths but for `measure`, which runs the benchmark's own procedure on a case made from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gem import balance, hardware, record
from gem.bench import cases, kernels, peers
from gem.progress import Progress
from kernels import bounds, jagged
from kernels.schedule import ORDERS, skew, tile_schedule

TILE = 128
PARTS, POOL, STEPS = 8, 64, 8  # sub-batches a batch, sub-batches a pool, steps of the balancing simulation
NEVER_TIMED = ("reference", "padded")  # the specification; a copy of the SDPA peers
BENCH = {"warmup_ms": 25, "repeat_ms": 120}
WEIGHTS = {"mean queries": 1.0, "mean keys": 1.0, "cv of queries": 1.0, "cv of keys": 1.0, "head_dim": 1.0, "size": 0.5}


@dataclasses.dataclass(frozen=True)
class Lengths:
    """q, kv: int64 [N], lengths of queries and keys by sequence, in file order; kv is q itself for self-attention."""

    q: np.ndarray
    kv: np.ndarray
    batch: int

    @property
    def is_self(self) -> bool:
        return self.kv is self.q

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(q, kv) of consecutive batches, one array twice for self-attention; the last batch may be smaller."""
        cuts = [slice(i, i + self.batch) for i in range(0, len(self.q), self.batch)]
        queries = [self.q[cut] for cut in cuts]
        keys = queries if self.is_self else [self.kv[cut] for cut in cuts]
        return list(zip(queries, keys, strict=True))

    def typical(self) -> tuple[int, np.ndarray, np.ndarray]:
        """(index, q, kv) of the whole batch with the median number of pairs, the lower one of two."""
        found = [pair for pair in self.batches() if len(pair[0]) == self.batch]
        order = sorted(range(len(found)), key=lambda i: (int((found[i][0] * found[i][1]).sum()), i))
        index = order[(len(order) - 1) // 2]
        return index, *found[index]


# What lengths alone say


def statistics(lengths: np.ndarray) -> dict:
    """Distribution of lengths [N]; fill is mean / longest, cv standard deviation / mean."""
    p50, p90, p99 = (float(x) for x in np.quantile(lengths, (0.5, 0.9, 0.99)))
    mean, longest = float(lengths.mean()), int(lengths.max())
    return {
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "empty": int((lengths == 0).sum()),
        "mean": mean,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": longest,
        "cv": float(lengths.std()) / mean,
        "fill": mean / longest,
    }


def padding(lengths: Lengths) -> dict[str, dict[str, float]]:
    """Shares of padded tokens and of padded pairs that are padding: to the longest of the batch, and of all.

    Tokens are those of the queries, and with keys of their own those of both sides.
    """
    longest = {"longest of all": (int(lengths.q.max()), int(lengths.kv.max())), "longest of the batch": None}
    result = {}
    for name, fixed in longest.items():
        tokens = pairs = padded_tokens = padded_pairs = 0
        for q, kv in lengths.batches():
            q_max, kv_max = fixed or (int(q.max()), int(kv.max()))
            sides = ((q, q_max),) if lengths.is_self else ((q, q_max), (kv, kv_max))
            tokens += sum(int(side.sum()) for side, _ in sides)
            padded_tokens += len(q) * sum(to for _, to in sides)
            pairs += int((q * kv).sum())
            padded_pairs += len(q) * q_max * kv_max
        result[name] = {"tokens": 1 - tokens / padded_tokens, "pairs": 1 - pairs / padded_pairs}
    return result


def tile_skews(q: np.ndarray, kv: np.ndarray, programs: int) -> dict[str, dict[str, float | None]]:
    """Work of the busiest program over the mean and over the least one, by tile order; None: a program is idle."""
    result = {}
    for order in ORDERS:
        found = skew(tile_schedule(torch.from_numpy(q), torch.from_numpy(kv), TILE, TILE, programs, order).work)
        ratio = None if math.isinf(found.max_over_min) else found.max_over_min
        result[order] = {"max_over_mean": found.max_over_mean, "max_over_min": ratio}
    return result


def balancing(lengths: Lengths, ranks: int, quadratic_share: float, seed: int) -> dict:
    """Max / mean load over ranks by scheme, of batches drawn from these sequences with replacement.

    Load of a sequence: tokens and pairs, each scaled to mean 1 and weighted 1 - quadratic_share to quadratic_share. A
    step takes as long as its heaviest rank, so the gain is max / mean without balancing over max / mean with it. The
    batch is cut to whole sub-batches.
    """
    tokens = (lengths.q if lengths.is_self else lengths.q + lengths.kv).astype(np.float64)
    pairs = lengths.q.astype(np.float64) * lengths.kv
    load = (1 - quadratic_share) * tokens / tokens.mean() + quadratic_share * pairs / pairs.mean()
    parts = next(n for n in (PARTS, 4, 2, 1) if n <= lengths.batch)
    sub_batch = lengths.batch // parts

    def sample(count: int, rng: np.random.Generator) -> np.ndarray:
        return load[rng.integers(0, len(load), count)]

    found = balance.simulate(
        sample,
        balance.Cost(),
        ranks=ranks,
        batch=sub_batch * parts,
        pools=(POOL,),
        sub_batch=sub_batch,
        schemes=("none", "local", "bbs"),
        steps=STEPS,
        seed=seed,
    )
    none = found[0].skew
    return {
        "ranks": ranks,
        "batch": sub_batch * parts,
        "sub_batch": sub_batch,
        "pool": POOL,
        "quadratic_share": quadratic_share,
        "schemes": {r.scheme: {"max_over_mean": r.skew, "gain": none / r.skew} for r in found},
    }


# Ops: bound and best implementation


def ops_of(is_self: bool) -> tuple[str, ...]:
    """Ops that the lengths apply to: block attention has no keys of its own."""
    return cases.ATTENTION if is_self else ("jagged_attention", "gdpa")


def ceilings_of(folder: Path) -> bounds.Ceilings:
    """What plain library calls reached in the shipped records of a chip; nominal figures where there are none."""
    path = folder / "ceilings.csv"
    if not path.is_file():
        return bounds.NOMINAL
    return dataclasses.replace(bounds.Ceilings.from_records(path), source=f"measured, records of {folder.name}")


def bound_of(op: str, phase: str, q, kv, options: argparse.Namespace, ceilings: bounds.Ceilings) -> bounds.Bound:
    return bounds.bound(
        op,
        q,
        None if kv is q else kv,
        options.heads,
        options.dim,
        "bwd_kernel" if phase == "bwd" else phase,
        options.dtype,
        options.activation if op == "gdpa" else None,
        options.chip,
        ceilings=ceilings,
    )


class Records:
    """Times of a chip's shipped kernel records. Empty where the folder has none."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = record.read_rows(folder / "kernels.csv") if (folder / "kernels.csv").is_file() else []
        self.runs = record.read_runs(folder) if self.rows else {}
        timed = (row for row in self.rows if (row["metric"], row["status"]) == ("time_ms", "ok"))
        self.times: dict[tuple[str, str], dict[str, dict]] = {}
        for row in timed:
            self.times.setdefault((row["case"], row["phase"]), {})[row["impl"]] = row
        self.cases = {row["case"]: self.runs[row["run_id"]]["case_row"] for row in self.rows}
        self.shares = {
            (row["case"], row["phase"], row["impl"]): float(row["p50"])
            for row in self.rows
            if (row["metric"], row["status"]) == ("share_of_bound", "ok")
        }

    def candidates(self, op: str, is_self: bool, activation: str) -> list[dict]:
        """Case rows of the same operation that have a time: same op and activation, own or other keys, no more."""
        kind, timed = "self" if is_self else "cross", {case for case, _ in self.times}
        return [
            row
            for row in self.cases.values()
            if row["case"] in timed
            and (row["op"], row["kind"], row["window"]) == (op, kind, "")
            and row["activation"] in ("", activation)
            and "_rotary" not in row["impls"]
        ]

    def nearest(self, op: str, is_self: bool, activation: str, features: dict[str, float]) -> tuple[dict, dict] | None:
        """(case row, its features) with the least `distance`."""
        found = [(row, features_of(*_lengths_of(row), int(row["num_heads"]), int(row["head_dim"])))
                 for row in self.candidates(op, is_self, activation)]  # fmt: skip
        return min(found, key=lambda pair: (distance(features, pair[1]), pair[0]["case"]), default=None)


def _lengths_of(row: dict) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that a row was measured with, drawn again from its law and seed as cases.build draws them."""
    generator = torch.Generator().manual_seed(int(row["seed"]))
    sides = ("q",) if row["kind"] == "self" else ("q", "kv")
    drawn = [
        jagged.sample_lengths(
            row[f"{side}_law"],
            int(row["batch"]),
            int(row[f"{side}_max"]),
            float(row[f"{side}_fill"]) if row[f"{side}_fill"] else None,
            generator,
        ).numpy()
        for side in sides
    ]
    return drawn[0], drawn[-1]


def features_of(q: np.ndarray, kv: np.ndarray, heads: int, dim: int) -> dict[str, float]:
    """What decides which implementation is fast: a factor of two in a size counts as much as a cv apart by 1."""
    means = [max(float(side.mean()), 1e-9) for side in (q, kv)]
    cvs = [float(side.std()) / mean for side, mean in zip((q, kv), means, strict=True)]
    values = [*map(math.log2, means), *cvs, math.log2(dim), math.log2(len(q) * heads)]
    return dict(zip(WEIGHTS, values, strict=True))


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Weighted Euclidean distance of two workloads' features."""
    return math.sqrt(sum((weight * (a[name] - b[name])) ** 2 for name, weight in WEIGHTS.items()))


def best_of(records: Records, case: str, phase: str, bound_ms: float) -> dict | None:
    """Fastest implementation of a recorded case, and the time to expect here if it reaches the same share of the bound.

    Peers count; `ours` is the fastest of this repository's own. None: that phase was not measured.
    """
    times = records.times.get((case, phase))
    if not times:
        return None
    ranked = sorted(times, key=lambda impl: (float(times[impl]["p50"]), impl))
    share = records.shares.get((case, phase, ranked[0]))
    return {
        "impl": ranked[0],
        "ours": next((impl for impl in ranked if impl not in peers.PEERS), None),
        "recorded_ms": float(times[ranked[0]]["p50"]),
        "compared": ranked,
        "share_of_bound": share,
        "expected_ms": bound_ms / share if share else None,
    }


def describe_ops(q: np.ndarray, kv: np.ndarray, options: argparse.Namespace, folder: Path) -> dict:
    """op -> phase -> bound on the chip and the best implementation of the nearest recorded workload."""
    ceilings, records = ceilings_of(folder), Records(folder)
    features = features_of(q, kv, options.heads, options.dim)
    result = {}
    for op in ops_of(kv is q):
        found = records.nearest(op, kv is q, options.activation, features)
        near = None
        if found:
            row, values = found
            names = ("case", "batch", "num_heads", "head_dim", "dtype", "activation")
            near = {name: row[name] for name in names} | {"distance": distance(features, values), "features": values}
        phases = {}
        for phase in ("fwd", "bwd"):
            bound = bound_of(op, phase, q, kv, options, ceilings)
            best = best_of(records, near["case"], phase, bound.time_ms) if near else None
            phases[phase] = {"bound_ms": bound.time_ms, "limiter": bound.limiter, "tflops": bound.tflops, "best": best}
        result[op] = {"nearest": near, "phases": phases}
    return result


# On a GPU


class Collector:
    """Takes the place of a record.Run: keeps rows instead of writing them, since these are nobody's records."""

    def __init__(self):
        self.rows: list[dict] = []

    def add(self, **row) -> None:
        self.rows.append(row)

    def write(self) -> None:
        """Nothing to write."""


class Timer(kernels.Bench):
    """The benchmark's own procedure, correctness first, on a case that stands in no sheet."""

    def __init__(self, device: torch.device, ceilings: bounds.Ceilings, bench: dict):
        self.device, self.ceilings, self.config = device, ceilings, {"bench": bench}
        self.chip = hardware.device_name(device)


def case_of(op: str, q: np.ndarray, kv: np.ndarray, options: argparse.Namespace, device: torch.device) -> cases.Case:
    """A benchmark case with these lengths: values drawn on the device, rows of GDPA's q and k of unit length."""
    same = kv is q
    row = {"case": "replay", "op": op, "kind": "self" if same else "cross", "window": "", "impls": ""}
    row |= {"activation": options.activation if op == "gdpa" else "", "shared_q": "no", "dtype": options.dtype}
    draws = torch.Generator(device).manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)

    def rows(total: int, unit: bool = False) -> torch.Tensor:
        shape = (total, options.heads, options.dim)
        x = torch.randn(shape, generator=draws, device=device)
        return (torch.nn.functional.normalize(x, dim=-1) if unit else x).to(dtype)

    unit, total_q, total_kv = op == "gdpa", int(q.sum()), int(kv.sum())
    q_values, do = rows(total_q, unit), rows(total_q)
    k, v = rows(total_kv, unit), rows(total_kv)
    q_lengths = torch.from_numpy(q.copy())
    kv_lengths = q_lengths if same else torch.from_numpy(kv.copy())
    kv_offsets = jagged.lengths_to_offsets(kv_lengths, torch.int32).to(device)
    q_offsets = kv_offsets if same else jagged.lengths_to_offsets(q_lengths, torch.int32).to(device)
    features = frozenset() if same else frozenset({"cross"})
    return cases.Case(row, device, q_lengths, kv_lengths, q_values, k, v, do, q_offsets, kv_offsets, features=features)


def impls_of(op: str) -> list[str]:
    """What is timed: every implementation of ours but the slow specification, and for softmax the jagged peers."""
    registry = importlib.import_module(f"kernels.{cases.FOLDERS[op]}.api").REGISTRY
    ours = [name for name in registry.names if name not in NEVER_TIMED]
    return ours + (["varlen_attn", "fa4"] if op == "jagged_attention" else [])


def measure(
    q: np.ndarray,
    kv: np.ndarray,
    options: argparse.Namespace,
    device: torch.device,
    ceilings: bounds.Ceilings = bounds.NOMINAL,
    *,
    ops: Sequence[str] = (),
    impls: Sequence[str] = (),
    bench: dict = BENCH,
) -> list[dict]:
    """Times of a batch: one row an op, implementation and phase, with status and reason where there is none.

    ceilings: of this device, for the share of the bound. ops, impls: measure these only (default: all that apply).
    """
    timer = Timer(device, ceilings, bench)
    work = [(op, impl) for op in ops or ops_of(kv is q) for impl in impls or impls_of(op)]
    result = []
    with Progress(total=len(work), unit="cases", label="replay") as progress:
        for op in dict.fromkeys(op for op, _ in work):
            try:
                case = case_of(op, q, kv, options, device)
                exact = cases.exact(case, ("fwd", "bwd"))
            except torch.cuda.OutOfMemoryError:
                note = "inputs and their reference do not fit into the GPU's memory; take a smaller --batch"
                result += [{"op": op, "impl": "-", "phase": "-", "status": "oom", "time_ms": None, "note": note}]
                timer.release()
                continue
            for impl in (impl for name, impl in work if name == op):
                collector = Collector()
                timer.run_impl(collector, case, exact, impl, ("fwd", "bwd"))
                timer.release()
                result += _times(op, impl, collector.rows)
                progress.advance(1, case=f"{op} {impl}")
    return result


def _times(op: str, impl: str, rows: Sequence[dict]) -> list[dict]:
    result = []
    for row in rows:
        if row["metric"] != "time_ms":
            continue
        found = {"op": op, "impl": impl, "phase": row["phase"], "status": row.get("status", "ok")}
        found |= {"time_ms": row.get("p50"), "p20_ms": row.get("p20"), "p80_ms": row.get("p80")}
        same = {other["metric"]: other["p50"] for other in rows if other["phase"] == row["phase"] and "p50" in other}
        found |= {"tflops": same.get("tflops"), "share_of_bound": same.get("share_of_bound")}
        result.append(found | {"note": row.get("note", "")})
    return result
