"""Which rows make up which batch: a seeded shuffle, or load balancing on top of it.

The source sorts reader sub-batches by total sequence length and merges the heaviest with the lightest, so that every
training batch costs about the same. On one device this evens out memory and step time; across ranks it removes the
wait.
"""

from __future__ import annotations

import numpy as np

from gem import balance as balancing

SUB_BATCHES = 8  # of a batch: the source merges sub-batches of 128 samples into batches of about 1k
POOL_BATCHES = 8  # a reader buffers at most this many batches' worth of sub-batches


def batch_rows(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, balance: str = "none") -> np.ndarray:
    """Rows of every batch of one epoch: int64 [num_batches, batch_size].

    lengths: total sequence length of a row, int [num_rows]. balance: "none" keeps the shuffle; "local" and "bbs" deal
    samples or sub-batches of an eighth of a batch, pool by pool, as gem/balance.py has it. The order is a function of
    the arguments alone. ValueError if there are fewer rows than one batch needs, or a batch that eighths do not
    divide.
    """
    num_rows = len(lengths)
    num_batches = num_rows // batch_size
    if num_batches == 0:
        raise ValueError(f"too few rows: {num_rows} rows do not fill one batch of {batch_size}")
    rows = np.random.default_rng([seed, epoch]).permutation(num_rows)[: num_batches * batch_size]
    if balance == "none":
        return rows.reshape(num_batches, batch_size)
    if balance not in ("local", "bbs"):
        raise ValueError(f"balance: unknown value {balance!r}; allowed: none, local, bbs")
    if batch_size % SUB_BATCHES:
        raise ValueError(f"balance {balance}: batch size {batch_size} is not divisible by {SUB_BATCHES} sub-batches")
    whole = num_batches - num_batches % POOL_BATCHES
    batches = []
    for part, (first, last) in enumerate(((0, whole), (whole, num_batches))):  # full pools, then what is left
        if first == last:
            continue
        own = rows[first * batch_size : last * batch_size]
        plan = balancing.plan(
            np.asarray(lengths)[own][None],
            batch_size,
            balance,
            pool=min(POOL_BATCHES, last - first) * SUB_BATCHES,
            sub_batch=batch_size // SUB_BATCHES,
            rng=np.random.default_rng([seed, epoch, 1 + part]),
        )
        batches.append(own[plan[:, 0]])
    return np.concatenate(batches)
