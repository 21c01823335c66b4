"""Balance of the load over data-parallel ranks: a step lasts as long as its heaviest rank.

Schemes, all of which train on every sample exactly once:

none    a rank's batch is what its reader delivers.
local   a rank buffers a pool of its own samples and deals them, sorted by load, to its coming batches in zigzag order:
as good as any
        scheme without communication can be expected to be with that pool.
bbs     base-batch shuffling: readers emit sub-batches of 128 samples; a rank sorts a pool of them by total load, pairs
the heaviest
        with the lightest and merges the pairs into its coming batches. No communication, no sample looked at on its
        own.
global  before each step an all-to-all deals all samples of the step, sorted by load, to the ranks in zigzag order.

The source reports the heaviest rank about 15 % above the mean each iteration, near the optimum with rebalancing inside
a rank, and 4 % more samples a second from base-batch shuffling. What a pool gains is bounded by chance between pools:
the mean load of a rank's pool differs from that of the next rank's, and no scheme without communication removes that.

Load of a sample of length L: linear * L + quadratic * L^2. `python -m gem.balance --help` prints the table for a law
or a file of lengths.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.cli import fraction, non_negative, non_negative_float, positive, positive_float, run
from data.lengths import LAWS, LengthLaw
from gem.cli import Parser
from gem.progress import Progress

SCHEMES = ("none", "local", "bbs", "global")
SUB_BATCH = 128
CHUNK_SAMPLES = 4_000_000


@dataclass(frozen=True)
class Cost:
    """Load of a sample: linear * L + quadratic * L^2, in any unit. At least one coefficient is positive, none
    negative."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self):
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic <= 0:
            terms = f"{self.linear} L + {self.quadratic} L^2"
            raise ValueError(f"cost is {terms}; no coefficient may be negative, one must be positive")

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    @classmethod
    def mixed(cls, lengths: np.ndarray, quadratic_share: float) -> "Cost":
        """Mean load 1 on `lengths`, of which the quadratic term makes up `quadratic_share` (in [0, 1])."""
        lengths = np.asarray(lengths, np.float64)
        if not 0 <= quadratic_share <= 1:
            raise ValueError(f"quadratic share is {quadratic_share}; it must lie in [0, 1]")
        if lengths.size == 0 or not lengths.any():
            raise ValueError("lengths are all 0, so there is no load to balance")
        return cls((1 - quadratic_share) / lengths.mean(), quadratic_share / (lengths**2).mean())


def check_sizes(scheme: str, batch: int, pool: int, sub_batch: int, steps: int) -> None:
    """ValueError unless `steps` batches of `batch` samples are whole pools of `pool` sub-batches (schemes local and
    bbs)."""
    if scheme not in SCHEMES:
        raise ValueError(f"balance scheme {scheme!r} is unknown; allowed: {', '.join(SCHEMES)}")
    for name, value in (("batch", batch), ("pool", pool), ("sub-batch", sub_batch), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if scheme in ("local", "bbs"):
        parts = batch // sub_batch
        if batch % sub_batch or (parts % 2 and parts > 1):
            raise ValueError(f"batch is {batch}; it must be {sub_batch} (one sub-batch) or an even number of those")
        if pool % parts:
            raise ValueError(f"pool is {pool} sub-batches; it must be a multiple of the {parts} that make a batch")
        if steps % (pool // parts):
            raise ValueError(f"steps is {steps}; it must be a multiple of {pool // parts}, the batches of a pool")


def zigzag(order: np.ndarray, bins: int) -> np.ndarray:
    """Deals [..., n] items, heaviest first, to `bins` in turn, direction reversed each round: [..., bins, n / bins]."""
    dealt = order.reshape(*order.shape[:-1], -1, bins).copy()
    dealt[..., 1::2, :] = dealt[..., 1::2, ::-1]
    return np.swapaxes(dealt, -1, -2)


def merge_pairs(loads: np.ndarray, bins: int) -> np.ndarray:
    """Merges sub-batches [..., n] into `bins` batches, each of n / bins: indices [..., bins, n / bins].

    Heaviest and lightest make a pair, second heaviest and second lightest the next; each round deals every batch
    one pair, the heaviest of the round to the batch that is lightest so far.
    """
    count = loads.shape[-1]
    order = np.argsort(-loads, axis=-1, kind="stable")
    if count == bins:
        return order[..., None]
    half = count // 2
    pairs = np.stack([order[..., :half], order[..., : half - 1 : -1]], -1)  # [..., n / 2, 2]
    pair_loads = np.take_along_axis(loads[..., None, :], pairs, -1).sum(-1)
    by_load = np.argsort(-pair_loads, axis=-1, kind="stable")
    by_load = by_load.reshape(*by_load.shape[:-1], -1, bins)  # [..., rounds, bins]
    dealt = np.empty_like(by_load)
    totals = np.zeros((*loads.shape[:-1], bins))
    for round_number in range(by_load.shape[-2]):
        chosen = by_load[..., round_number, :]
        lightest_first = np.argsort(totals, axis=-1, kind="stable")
        np.put_along_axis(dealt[..., round_number, :], lightest_first, chosen, -1)
        gained = np.take_along_axis(totals, lightest_first, -1) + np.take_along_axis(pair_loads, chosen, -1)
        np.put_along_axis(totals, lightest_first, gained, -1)
    flat = np.swapaxes(dealt, -1, -2).reshape(*dealt.shape[:-2], -1)  # batch after batch
    picked = np.take_along_axis(pairs, flat[..., None], -2)
    return picked.reshape(*loads.shape[:-1], bins, -1)


def plan(
    load: np.ndarray,
    batch: int,
    scheme: str,
    *,
    pool: int = 64,
    sub_batch: int = SUB_BATCH,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Which sample trains where and when.

    load: [ranks, steps * batch], a row is what a rank's reader delivers in order. Returns int64 [steps, ranks, batch]:
    indices into load.reshape(-1), each exactly once. pool, sub_batch: samples are pooled pool * sub_batch at a time
    (local, bbs). rng: a pool's batches come in random order, since sorted dealing would else be an order over time
    (default seed 0). ValueError when sizes do not divide.
    """
    load = np.asarray(load, np.float64)
    if load.ndim != 2:
        raise ValueError(f"load has shape {load.shape}; it must be [ranks, steps * batch]")
    ranks, samples = load.shape
    if batch < 1 or samples % batch or samples == 0:
        raise ValueError(f"a rank has {samples} samples; it must have a positive multiple of the batch, {batch}")
    steps = samples // batch
    check_sizes(scheme, batch, pool, sub_batch, steps)
    ids = np.arange(load.size).reshape(ranks, steps, batch)
    if scheme == "none":
        return ids.transpose(1, 0, 2)
    if scheme == "global":
        ids = ids.transpose(1, 0, 2).reshape(steps, -1)
        order = np.argsort(-load.reshape(-1)[ids], axis=1, kind="stable")
        return np.take_along_axis(ids, zigzag(order, ranks).reshape(steps, -1), 1).reshape(steps, ranks, batch)
    rng = np.random.default_rng(0) if rng is None else rng
    per_pool = pool * sub_batch
    bins = per_pool // batch
    pooled = load.reshape(ranks, -1, per_pool)
    if scheme == "local":
        picked = zigzag(np.argsort(-pooled, axis=-1, kind="stable"), bins)
    else:
        totals = pooled.reshape(ranks, -1, pool, sub_batch).sum(-1)
        merged = merge_pairs(totals, bins)  # [ranks, pools, bins, sub-batches of a batch]
        picked = (merged[..., None] * sub_batch + np.arange(sub_batch)).reshape(*merged.shape[:-1], batch)
    shuffled = rng.permuted(np.tile(np.arange(bins), (ranks, pooled.shape[1], 1)), axis=-1)
    picked = np.take_along_axis(picked, shuffled[..., None], 2)
    first = np.arange(ranks)[:, None] * samples + np.arange(pooled.shape[1]) * per_pool
    rows = picked + first[..., None, None]
    return rows.reshape(ranks, steps, batch).transpose(1, 0, 2)


def step_loads(load: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Load of each rank in each step, [steps, ranks], for a plan."""
    return np.asarray(load, np.float64).reshape(-1)[rows].sum(-1)


def skew(loads: np.ndarray) -> float:
    """max / mean over ranks, averaged over steps: loads [steps, ranks]."""
    return float((loads.max(1) / loads.mean(1)).mean())


def share_of_optimum(none: float, balanced: float) -> float:
    """(none - x) / (none - 1): 1 = all ranks equal, 0 = as without balancing; NaN where nothing can be gained."""
    return (none - balanced) / (none - 1.0) if none > 1.0 else float("nan")


@dataclass(frozen=True)
class Result:
    """Scheme and pool (sub-batches; None: no pool), max / mean over ranks, share of the optimum."""

    scheme: str
    pool: int | None
    skew: float
    share: float


def simulate(
    sample: Callable[[int, np.random.Generator], np.ndarray],
    cost: Cost,
    *,
    ranks: int = 4096,
    batch: int = 1024,
    pools: tuple[int, ...] = (8, 64, 256),
    sub_batch: int = SUB_BATCH,
    schemes: tuple[str, ...] = SCHEMES,
    steps: int = 8,
    seed: int = 0,
    quiet: bool = True,
) -> list[Result]:
    """Skew of each scheme (and pool) over `ranks` ranks with `batch` samples each, independent samples of the length
    law `sample(n, rng)`.

    Averaged over at least `steps` steps; a pool that makes more batches than that is simulated whole. Ranks are drawn
    in chunks, so memory holds some million samples (the global scheme: all samples of one step).
    """
    for name, value in (("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    parts = max(1, batch // sub_batch)
    cases: list[tuple[str, int | None]] = [("none", None)]
    cases += [(scheme, pool) for scheme in schemes if scheme in ("local", "bbs") for pool in pools]
    cases += [("global", None)] if "global" in schemes else []
    for scheme, pool in cases:
        check_sizes(scheme, batch, pool or parts, sub_batch, max(1, (pool or parts) // parts))
    skews = {}
    with Progress(len(cases), "cases", "balance", quiet=quiet) as progress:
        for scheme, pool in cases:
            rng = np.random.default_rng([seed, ranks, batch])
            if scheme == "global":
                values = [_global_step(sample, cost, ranks, batch, rng) for _ in range(min(steps, 2))]
                skews[scheme, pool] = float(np.mean(values))
            else:
                bins = 1 if pool is None else pool // parts
                rounds = -(-steps // bins) * bins
                loads = []
                chunk = max(1, CHUNK_SAMPLES // (rounds * batch))
                for first in range(0, ranks, chunk):
                    count = min(chunk, ranks - first)
                    load = cost(sample(count * rounds * batch, rng)).reshape(count, -1)
                    options = {} if pool is None else {"pool": pool, "sub_batch": sub_batch, "rng": rng}
                    loads.append(step_loads(load, plan(load, batch, scheme, **options)))
                skews[scheme, pool] = skew(np.concatenate(loads, 1))
            progress.advance()
    none = skews["none", None]
    return [Result(scheme, pool, value, share_of_optimum(none, value)) for (scheme, pool), value in skews.items()]


def _global_step(sample, cost: Cost, ranks: int, batch: int, rng: np.random.Generator) -> float:
    load = cost(sample(ranks * batch, rng)).reshape(ranks, batch)
    return skew(step_loads(load, plan(load, batch, "global")))


def read_lengths(path: Path) -> np.ndarray:
    """One whole number of at least 0 a line; ValueError with the line that is none, or when there are none."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    lines = path.read_text().split()
    for number, line in enumerate(lines, 1):
        if not line.isdecimal():
            raise ValueError(f"{path}: value {number} is {line!r}; it must be a whole number of at least 0")
    if not lines:
        raise ValueError(f"{path}: holds no length")
    return np.array(lines, np.int64)


def share(text: str) -> float:
    value = non_negative_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must lie in [0, 1]")
    return value


def pool_sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m gem.balance",
        description="Max / mean load over data-parallel ranks by balancing scheme, for a law or or lengths in a file.",
    )
    add = parser.add_argument
    add("--lengths", type=Path, metavar="FILE", help="draw from these lengths, one a line, instead of a law")
    add("--length-law", default="lognormal", metavar="LAW", help=f"{', '.join(LAWS)} (default %(default)s)")
    add(
        "--length-cv",
        type=positive_float,
        default=1.3,
        help="of the log-normal law before clipping (default %(default)s)",
    )
    add("--fill", type=fraction, help="mean / max length (default 0.29; 1 for the law full)")
    add("--max-length", type=positive, default=4096, help="default %(default)s")
    add("--quadratic-share", type=share, default=0.5, help="of the mean load, the rest is linear (default %(default)s)")
    add("--ranks", type=positive, default=4096, help="default %(default)s")
    add("--batch", type=positive, default=1024, help="samples a rank and step (default %(default)s)")
    add(
        "--sub-batch",
        type=positive,
        default=SUB_BATCH,
        help="samples that a reader emits at once (default %(default)s)",
    )
    add(
        "--pool",
        type=pool_sizes,
        default=(8, 64, 256),
        metavar="N,N,...",
        help="sub-batches a rank pools (default 8,64,256)",
    )
    add("--steps", type=positive, default=8, help="average over at least so many (default %(default)s)")
    add("--seed", type=non_negative, default=0)
    add("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    if options.lengths is not None:
        lengths = read_lengths(options.lengths)

        def sample(count: int, rng: np.random.Generator) -> np.ndarray:
            return lengths[rng.integers(0, len(lengths), count)]

        pilot, what = lengths, f"{len(lengths):,} lengths of {options.lengths}"
    else:
        fill = options.fill or (1.0 if options.length_law == "full" else 0.29)
        law = LengthLaw(options.length_law, options.max_length, fill, options.length_cv)
        sample, what = law.sample, f"{law.law} lengths up to {law.max_length}, fill {law.fill:g}"
        pilot = law.sample(200_000, np.random.default_rng(options.seed))
    cost = Cost.mixed(pilot, options.quadratic_share)
    load = cost(pilot)
    results = simulate(
        sample,
        cost,
        ranks=options.ranks,
        batch=options.batch,
        pools=options.pool,
        sub_batch=options.sub_batch,
        steps=options.steps,
        seed=options.seed,
        quiet=options.quiet,
    )
    print(f"{what}: length CV {pilot.std() / pilot.mean():.2f}, load CV {load.std() / load.mean():.2f}")
    print(f"{options.ranks:,} ranks, {options.batch:,} samples each, sub-batches of {options.sub_batch}")
    print(f"{'scheme':<8}{'pool':>6}{'max/mean':>10}{'share of optimum':>18}")
    for result in results:
        pool = "-" if result.pool is None else result.pool
        print(f"{result.scheme:<8}{pool:>6}{result.skew:>10.4f}{result.share:>18.3f}")
    return 0


if __name__ == "__main__":
    run(main)
