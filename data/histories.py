"""Event histories, drawn flat for a whole chunk: items, actions and time stamps of all rows one after the other."""

from dataclasses import dataclass

import numpy as np


@dataclass
class History:
    """Flat events of all rows: int64 item, int64 action, int64 category, int64 row, and how many events of the row
    come after it."""

    item: np.ndarray
    action: np.ndarray
    category: np.ndarray
    row: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class HistoryLaw:
    """Gaps between events: exponential with mean `within` seconds in a session, with mean `between` where a new
    session starts.

    A share `session_share` of the gaps starts a session, so that time stamps come in bursts.
    """

    within: float
    between: float
    session_share: float

    def gaps(self) -> np.ndarray:
        """int64 [65536]: equally likely gaps (>= 1 s), the inverse distribution function of the mixture."""
        grid = np.expm1(np.linspace(0.0, np.log1p(12.0 * self.between), 20_000))
        cdf = (
            1.0
            - (1 - self.session_share) * np.exp(-grid / self.within)
            - self.session_share * np.exp(-grid / self.between)
        )
        quantiles = (np.arange(65_536) + 0.5) / 65_536
        return np.maximum(np.interp(quantiles, cdf, grid), 1.0).astype(np.int64)

    def times(self, rng: np.random.Generator, lengths: np.ndarray, timestamp: np.ndarray) -> np.ndarray:
        """int64 [sum lengths]: ascending within a row, the last at least a second before the row's time stamp."""
        total = int(lengths.sum())
        gaps = np.take(self.gaps(), rng.integers(0, 65_536, total, dtype=np.uint16))
        elapsed = np.cumsum(gaps)  # seconds up to the moment after each event
        ends = np.cumsum(lengths)
        at_end = np.concatenate([[0], elapsed])[ends]
        elapsed -= gaps
        elapsed += np.repeat(timestamp - at_end, lengths)
        return elapsed


def zipf_items(rng: np.random.Generator, count: int, num_items: int, exponent: float) -> np.ndarray:
    """Ids in [0, num_items): a power law on [1, num_items + 1) with that exponent, cut to whole numbers; id 0 is the
    most frequent."""
    uniform = rng.random(count, dtype=np.float32)
    if abs(exponent - 1.0) < 1e-6:
        rank = np.exp(uniform * np.float32(np.log(num_items + 1.0)))
    else:
        power = 1.0 - exponent
        rank = (uniform * np.float32((num_items + 1.0) ** power - 1.0) + np.float32(1.0)) ** np.float32(1.0 / power)
    return np.minimum(rank.astype(np.int64) - 1, num_items - 1).clip(0)


def sample_history(rng, lengths, new_taste, old_taste, p, num_actions: int, wide: bool) -> History:
    """Zipf items; half of the events are moved to the category of the row's taste at that time.

    wide: long-range events (p.long_range_start or more events before the end) follow old_taste, newer ones new_taste;
    otherwise all follow new_taste. Items of category c are those with id % num_categories == c.
    """
    total, K = int(lengths.sum()), p.num_categories
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    after = np.repeat(np.cumsum(lengths), lengths) - np.arange(1, total + 1)
    item = zipf_items(rng, total, p.num_items, p.zipf)
    noise = rng.integers(0, 65_536, total, dtype=np.uint16)
    taste = new_taste[row]
    if wide:
        np.copyto(taste, old_taste[row], where=after >= p.long_range_start)
    category = item % K
    favoured = (noise & 1) == 0
    moved = item - category + taste
    moved -= K * (moved >= p.num_items)
    np.copyto(item, moved, where=favoured & (moved >= 0))
    np.remainder(item, K, out=category)
    action = ((noise >> 1).astype(np.int64) * num_actions) >> 15
    return History(item, action, category, row, after)


def recent_mix(history: History, lengths: np.ndarray, recent: int, num_categories: int) -> np.ndarray:
    """float32 [rows, categories]: shares of the newest `recent` events, weight (1 + action) * 2^(-age / (recent / 2)).

    Normalised by the weight of a full set of middling events, so that short histories say less.
    """
    near = np.flatnonzero(history.after < recent)
    weight = (1.0 + history.action[near]) * np.exp2(-history.after[near] / (recent / 2))
    slot = history.row[near] * np.int64(num_categories) + history.category[near]
    mix = np.bincount(slot, weight, minlength=len(lengths) * num_categories).reshape(len(lengths), num_categories)
    return (mix / np.maximum(mix.sum(1, keepdims=True), 2.0)).astype(np.float32)


def category_mix(history: History, lengths: np.ndarray, start: int, num_categories: int) -> np.ndarray:
    """float32 [rows, categories]: category shares of the events with at least `start` later ones; zeros where there
    are none."""
    far = np.flatnonzero(history.after >= start)
    slot = history.row[far] * np.int64(num_categories) + history.category[far]
    mix = np.bincount(slot, minlength=len(lengths) * num_categories).reshape(len(lengths), num_categories)
    return (mix / np.maximum(mix.sum(1, keepdims=True), 1.0)).astype(np.float32)
