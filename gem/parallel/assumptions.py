"""Constants of the model of large jobs, one row each with where it comes from, to be argued with and overridden.

None of them is a result. `gem.parallel.calibration` replaces those that records can give; `python -m
gem.parallel.simulate --assumptions` prints the table, `--set name=value` changes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """A constant: value, unit, and the reason for the value; `record` when it came from a measurement."""

    name: str
    value: float
    unit: str
    source: str
    record: str = ""


NCCL = "NCCL's own cost table for rings, protocol Simple (src/graph/tuning.cc)"
ROWS = (
    Assumption("host_gpus", 8, "GPUs", "the source: 8 GPUs a host on NVLink"),
    Assumption("zone_gpus", 1024, "GPUs", "ours: a non-blocking RoCE zone, smaller than the 3,072 of arXiv 2407.21783 "
               "so that thousands of GPUs span zones"),
    Assumption("host_bandwidth", 250e9, "bytes/s", "a GPU's rate in collectives over NVLink 4, about 55 % of 450e9 a "
               "direction"),
    Assumption("zone_bandwidth", 40e9, "bytes/s", "one 400 Gbit/s port a GPU at 80 %"),
    Assumption("oversubscription", 7, "ratio", "between zones; 1:7 is reported for a 24K-GPU RoCE cluster (arXiv "
               "2407.21783)"),
    Assumption("base_latency", 8.4e-6, "s", NCCL),
    Assumption("host_latency", 3.4e-6, "s", f"a hop over NVLink; {NCCL}"),
    Assumption("zone_latency", 9.6e-6, "s", f"a hop over the network; {NCCL}"),
    Assumption("cross_latency", 15e-6, "s", "ours: a network hop, two more switch layers and their queues"),
    Assumption("log_latency", 0, "0 or 1", "0: a gather has n - 1 hops, as in a ring; 1: log2 n, as in NCCL's PAT"),
    Assumption("message_overhead", 0.5e-6, "s", "ours: a peer's message in an all-to-all"),
    Assumption("peak_flops", 989e12, "FLOP/s", "dense bf16 of an H200, the denominator of MFU"),
    Assumption("local_mfu", 0.35, "fraction", "of every module; what this project aims at for one GPU's step"),
    Assumption("hbm_bytes", 141e9, "bytes", "an H200"),
    Assumption("collective_sms", 24, "SMs", "the source: about 24 SMs a collective"),
    Assumption("free_sms", 1, "SMs", "the source: an all-gather by copy engines holds one"),
    Assumption("contention", 0.15, "fraction", "the source: collectives cost the compute beside them up to 15 %"),
    Assumption("prefetch", 2, "units", "ours: parameter gathers are issued so many units ahead"),
    Assumption("param_bytes", 2, "bytes", "bf16 parameters, gradients and activations on the wire"),
    Assumption("state_bytes", 16, "bytes", "float32 parameter, gradient and two Adam states a parameter"),
    Assumption("local_batch", 1024, "samples", "the source: about 1k samples a GPU"),
    Assumption("pool", 64, "sub-batches", "ours: that a reader pools for base-batch shuffling"),
)  # fmt: skip


class Assumptions(Mapping):
    """name -> value (float), with the rows behind them. `with_values` gives a changed copy.

    module_mfu: measured MFU of modules (names of gem.summary); others run at `local_mfu`.
    """

    def __init__(self, rows: tuple[Assumption, ...] = ROWS, module_mfu: Mapping[str, float] | None = None):
        self.rows = rows
        self.module_mfu = dict(module_mfu or {})
        self._values = {row.name: float(row.value) for row in rows}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_values(self, values: Mapping[str, float], *, source: str = "given", record: str = "") -> Assumptions:
        """A copy with other values; ValueError for an unknown name or a number that cannot be."""
        for name, value in values.items():
            if name not in self._values:
                raise ValueError(f"assumption {name!r} is unknown; allowed: {', '.join(self._values)}")
            check(name, value)
        rows = tuple(
            Assumption(row.name, float(values[row.name]), row.unit, source, record) if row.name in values else row
            for row in self.rows
        )
        return Assumptions(rows, self.module_mfu)

    def text(self) -> str:
        lines = [f"{row.name:<17}{row.value:>11.5g} {row.unit:<12} {row.record or row.source}" for row in self.rows]
        return "\n".join(lines)


MAY_BE_ZERO = {"base_latency", "host_latency", "zone_latency", "cross_latency", "log_latency", "message_overhead"}
MAY_BE_ZERO |= {"contention", "free_sms", "prefetch"}
AT_MOST_ONE = {"log_latency", "local_mfu", "contention"}
WHOLE = {"host_gpus", "zone_gpus", "prefetch", "local_batch", "pool"}


def check(name: str, value: float) -> None:
    """ValueError unless `value` makes sense for `name`."""
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise ValueError(f"assumption {name} is {value}; allowed: a number above 0{' or 0' * (name in MAY_BE_ZERO)}")
    if name in AT_MOST_ONE and value > 1:
        raise ValueError(f"assumption {name} is {value}; allowed: at most 1")
    if name in WHOLE and value != int(value):
        raise ValueError(f"assumption {name} is {value}; allowed: a whole number")
    if name == "oversubscription" and value < 1:
        raise ValueError(f"assumption {name} is {value}; allowed: at least 1")


def parse(text: str) -> tuple[str, float]:
    """name=value of a command line."""
    name, found, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        found = ""
    if not found:
        raise ValueError(f"{text!r}; allowed: name=number, names as --assumptions prints them")
    return name, number
