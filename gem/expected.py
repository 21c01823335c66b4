"""What a chip should allow for a claim: the `expected` column of claims.csv.

A record of a kernel carries share_of_bound, the time that the chip allows for the case (kernels/bounds.py) over the
time it took. Replacing the optimised side of a comparison by its bound gives the value that a faultless kernel would
show. Claims that are no achievement (a share, a skew, a gap) and experiments without bounds have no expectation, so
it stays empty.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

ACHIEVEMENTS = {"speedup", "mfu_ratio;mfu", "mfu", "reduction", "utilisation", "ratio"}


def _ratio(pairs: pd.DataFrame) -> pd.Series:
    """Numerator's time over the denominator's time at its bound."""
    return pairs.numerator / (pairs.denominator * pairs.denominator_share)


def _one_minus_ratio(pairs: pd.DataFrame) -> pd.Series:
    """Reduction if the numerator ran at its bound."""
    return 1 - pairs.numerator * pairs.numerator_share / pairs.denominator


def _value(pairs: pd.DataFrame) -> pd.Series:
    """A rate or share of the GEMM rate, at the bound."""
    return pairs.numerator / pairs.numerator_share


def _peak_ratio(pairs: pd.DataFrame, device: str) -> pd.Series | None:
    """FP8 over bf16 tensor-core rate, nominal."""
    from kernels import bounds

    try:
        return pd.Series([bounds.peak_ratio(device, "fp8")])
    except ValueError:
        return None


# (transform, metric of the numerator) -> function of the paired values
FUNCTIONS: dict[tuple[str, str], Callable] = {
    ("ratio", "time_ms"): _ratio,
    ("one_minus_ratio", "time_ms"): _one_minus_ratio,
    ("value", "share_of_gemm"): _value,
}


def expected(rule: dict, metric: str, pairs: pd.DataFrame, device: str) -> pd.Series | None:
    """Expected value of each pair, or None where no bound is defined.

    pairs: columns numerator, denominator and the share_of_bound of both (NaN where a record has none).
    """
    if rule["metric"] not in ACHIEVEMENTS:
        return None
    if metric == "gemm_fp8_tflops":
        return _peak_ratio(pairs, device)
    function = FUNCTIONS.get((rule["transform"], metric))
    values = function(pairs).dropna() if function else None
    return values if values is not None and len(values) else None
