"""Records of load balancing over ranks, modelled by gem.balance from the tier's length law (section `balance`).

    python -m gem.bench.balance --tier smoke

Cases are named by the number of ranks, subjects by scheme: none, global, local (at the largest pool; local_pool<N> at
smaller ones), and bbs_pool<N> for base-batch shuffling whose reader pools N sub-batches.

The load of a sample is half linear, half quadratic in its length, an assumption: what is not attention is linear. Where
frozen records have attention of several lengths, a cost a L + b L^2 is fitted to its times and brackets the assumption.
Case cost_ranks<N>, schemes none, global, and the others at the largest pool: <scheme>@attention is as if a step were
nothing but that kernel, <scheme>@linear as if it had none; quadratic@attention is the share of b L^2 in the fitted
load.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from data.lengths import LengthLaw
from gem import balance, record, workflow
from gem.cli import Parser

FILL, MAX_LENGTH = 0.29, 4096  # of the log-normal law whose CV the tier gives
QUADRATIC_SHARE = 0.5  # cost of a sample: half linear, half quadratic in its length
SEED, STEPS = 0, 4
# softmax self-attention in full, all sequences of one length: jfa_self_full_<length>
FITTED, CASE = "v4", re.compile(r"jfa_self_full_(\d+)")


def attention_times(records: pd.DataFrame, batches: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """(length, ms of a sample forward and backward) of the kernel FITTED, from records of experiment kernels.

    batches: case -> samples of its batch. Lengths without both phases are left out.
    """
    rows = records[(records.status == "ok") & (records.metric == "time_ms") & (records.impl == FITTED)]
    rows = rows[rows.case.isin([case for case in batches if CASE.fullmatch(case)]) & rows.phase.isin(("fwd", "bwd"))]
    times = rows.pivot_table(index="case", columns="phase", values="p50").reindex(columns=["fwd", "bwd"]).dropna()
    lengths = np.array([int(CASE.fullmatch(case)[1]) for case in times.index], float)
    return lengths, times.sum(axis=1).to_numpy() / np.array([batches[case] for case in times.index], float)


def fit(lengths: np.ndarray, times: np.ndarray) -> balance.Cost:
    """Cost a L + b L^2, neither negative, by least relative errors. ValueError with fewer than two lengths."""
    if len(np.unique(lengths)) < 2:
        raise ValueError(f"balance: attention of {len(np.unique(lengths))} lengths; allowed: at least 2")
    terms = np.stack([lengths, lengths**2], 1) / times[:, None]
    found = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    if found.min() < 0:  # the better of one term alone
        alone = [term.sum() / (term**2).sum() for term in terms.T]
        errors = [np.square(1 - term * value).sum() for term, value in zip(terms.T, alone, strict=True)]
        found = np.array(alone) * (np.arange(2) == np.argmin(errors))
    return balance.Cost(*map(float, found))


def fitted_cost(measured: Path) -> balance.Cost | None:
    """From frozen records of one H200; None where they have too few lengths."""
    path = measured / "h200" / "kernels.csv"
    if not path.exists():
        return None
    batches = {case: int(row["batch"]) for case, row in workflow.read_sheet("kernels").items()}
    lengths, times = attention_times(record.read(path), batches)
    return fit(lengths, times) if len(np.unique(lengths)) > 1 else None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.balance", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--measured", type=Path, default=Path("data/measured"), help="frozen records")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        section = settings.config["balance"]
        law = LengthLaw("lognormal", MAX_LENGTH, FILL, section["length_cv"])
        lengths = law.sample(200_000, np.random.default_rng(SEED))
        cost = balance.Cost.mixed(lengths, QUADRATIC_SHARE)
        attention = fitted_cost(args.measured)
        config = {"balance": section, "fill": FILL, "max_length": MAX_LENGTH, "quadratic_share": QUADRATIC_SHARE}
        sources = ("gem/balance.py", "data/lengths.py", "gem/bench/balance.py")
        with record.Run(args.run or settings.name, "balance", config=config, sources=sources) as run:
            for ranks in section["ranks"]:
                add_records(run, law, cost, ranks, section)
            if attention is not None:
                add_bracket(run, law, attention, section)
                share = float((attention.quadratic * lengths**2).sum() / attention(lengths).sum())
                note = f"fitted: {attention.linear:.3g} L + {attention.quadratic:.3g} L^2 ms a sample of 4 heads of 128"
                row = {"case": "cost_length_law", "subject": "quadratic@attention", "impl": FITTED, "phase": "model"}
                run.add(**row, metric="time_share", p50=share, scope="modelled", note=note)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def add_bracket(run: record.Run, law: LengthLaw, attention: balance.Cost, section: dict) -> None:
    """The schemes under the cost of attention alone and under one without it, at a middling number of ranks."""
    largest = section | {"pools": [max(section["pools"])]}
    ranks = sorted(section["ranks"])[len(section["ranks"]) // 2]
    for suffix, cost in (("@attention", attention), ("@linear", balance.Cost(1.0))):
        add_records(run, law, cost, ranks, largest, case=f"cost_ranks{ranks}", suffix=suffix)


def add_records(
    run: record.Run, law: LengthLaw, cost: balance.Cost, ranks: int, section: dict, *, case: str = "", suffix: str = ""
) -> None:
    """Skew and share of the optimum of every scheme at one number of ranks. suffix: of the subjects."""
    results = balance.simulate(
        law.sample,
        cost,
        ranks=ranks,
        batch=section["samples_per_rank"],
        pools=tuple(section["pools"]),
        sub_batch=section["sub_batch"],
        steps=STEPS,
        seed=SEED,
    )
    for result in results:
        subject = result.scheme if result.pool is None else f"{result.scheme}_pool{result.pool}"
        if subject == f"local_pool{max(section['pools'])}":
            subject = "local"  # what the scheme can do: its share of the optimum grows with the pool
        impl = "simulation" if result.pool is None else f"pool{result.pool}"
        row = {
            "case": case or f"ranks{ranks}",
            "subject": subject + suffix,
            "impl": impl,
            "phase": "model",
            "scope": "modelled",
        }
        run.add(**row, metric="skew", p50=result.skew, seed=SEED)
        if result.scheme != "none":
            run.add(**row, metric="share_of_optimum", p50=result.share, seed=SEED)


if __name__ == "__main__":
    sys.exit(main())
