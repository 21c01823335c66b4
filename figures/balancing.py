"""Balance records as both F20 and T07 read them."""

from __future__ import annotations

import pandas as pd

from figures.load import Source, need, select


def rows_of(source: Source) -> pd.DataFrame:
    """Columns ranks, scheme (none, local, bbs, global), pool (sub-batches or NaN), skew, share."""
    frame = select(source.frame("balance"), metric=("skew", "share_of_optimum"))
    frame = need(frame[frame.case.str.fullmatch(r"ranks\d+")], "balance")
    frame = frame.drop_duplicates(["case", "subject", "impl", "metric"])
    parts = frame.subject.str.extract(r"^(?P<scheme>[a-z]+)(?:_pool(?P<pool>\d+))?$")
    frame = frame.assign(ranks=frame.case.str[5:].astype(int), scheme=parts.scheme, pool=pd.to_numeric(parts.pool))
    by_impl = pd.to_numeric(frame.impl.str.extract(r"^pool(\d+)$")[0])
    frame["pool"] = frame.pool.fillna(by_impl)
    wide = frame.pivot_table(index=["ranks", "scheme", "pool"], columns="metric", values="p50", dropna=False)
    wide = wide.reset_index().rename(columns={"share_of_optimum": "share"})
    if "share" not in wide:
        wide["share"] = float("nan")
    wide["share"] = wide.share.round(9) + 0.0  # a rounding error of an equal skew is no share
    wide = wide[wide["skew"].notna()].sort_values(["ranks", "scheme", "pool"])
    return wide[["ranks", "scheme", "pool", "skew", "share"]].reset_index(drop=True)
