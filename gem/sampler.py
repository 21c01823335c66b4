"""Which rows make up which batch: a seeded shuffle, or base-batch shuffling on top of it.

The source sorts reader sub-batches by total sequence length and merges the heaviest with the lightest, so that every
training batch costs about the same. On one device this evens out memory and step time; across ranks it removes the wait.
"""

from __future__ import annotations

import numpy as np

SUB_BATCHES_PER_BATCH = 8  # the source merges sub-batches of 128 samples into batches of about 1k


def batch_rows(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, balance: str = "none") -> np.ndarray:
    """Rows of every batch of one epoch: int64 [num_batches, batch_size].

    lengths: cost of a row, int [num_rows]. balance: "none" keeps the shuffle; "bbs" cuts it into sub-batches, sorts them by
    total length and deals them to the batches in zigzag order; "local" deals single rows that way. The order is a function of
    the arguments alone. ValueError if there are fewer rows than one batch needs.
    """
    num_rows = len(lengths)
    num_batches = num_rows // batch_size
    if num_batches == 0:
        raise ValueError(f"too few rows: {num_rows} rows do not fill one batch of {batch_size}")
    rows = np.random.default_rng([seed, epoch]).permutation(num_rows)[: num_batches * batch_size]
    if balance == "none":
        return rows.reshape(num_batches, batch_size)
    if balance == "bbs":
        size = batch_size // SUB_BATCHES_PER_BATCH if batch_size % SUB_BATCHES_PER_BATCH == 0 else 1
    elif balance == "local":
        size = 1
    else:
        raise ValueError(f"balance: unknown value {balance!r}; allowed: none, local, bbs")
    units = rows.reshape(-1, size)
    cost = np.asarray(lengths)[units].sum(axis=1)
    by_cost = np.argsort(-cost, kind="stable").reshape(-1, num_batches)
    by_cost[1::2] = by_cost[1::2, ::-1]  # heaviest row of units left to right, the next right to left
    batches = units[by_cost.T].reshape(num_batches, batch_size)
    # sorted dealing must not turn into an order over time: heavy batches first would be a curriculum
    return batches[np.random.default_rng([seed, epoch, 1]).permutation(num_batches)]
