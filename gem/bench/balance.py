"""Records of load balancing over ranks, modelled by gem.balance from the tier's length law (section `balance`).

    python -m gem.bench.balance --tier smoke

Cases are named by the number of ranks, subjects by scheme: none, global, local (at the largest pool; local_pool<N> at
smaller ones), and bbs_pool<N> for base-batch shuffling whose reader pools N sub-batches.
"""

from __future__ import annotations

import sys

import numpy as np

from data.lengths import LengthLaw
from gem import balance, record, workflow
from gem.cli import Parser

FILL, MAX_LENGTH = 0.29, 4096  # of the log-normal law whose CV the tier gives
QUADRATIC_SHARE = 0.5  # cost of a sample: half linear, half quadratic in its length
SEED, STEPS = 0, 4


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.balance", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        section = settings.config["balance"]
        law = LengthLaw("lognormal", MAX_LENGTH, FILL, section["length_cv"])
        cost = balance.Cost.mixed(law.sample(200_000, np.random.default_rng(SEED)), QUADRATIC_SHARE)
        config = {"balance": section, "fill": FILL, "max_length": MAX_LENGTH, "quadratic_share": QUADRATIC_SHARE}
        sources = ("gem/balance.py", "data/lengths.py")
        with record.Run(args.run or settings.name, "balance", config=config, sources=sources) as run:
            for ranks in section["ranks"]:
                add_records(run, law, cost, ranks, section)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def add_records(run: record.Run, law: LengthLaw, cost: balance.Cost, ranks: int, section: dict) -> None:
    """Skew and share of the optimum of every scheme at one number of ranks."""
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
        row = {"case": f"ranks{ranks}", "subject": subject, "impl": impl, "phase": "model", "scope": "modelled"}
        run.add(**row, metric="skew", p50=result.skew, seed=SEED)
        if result.scheme != "none":
            run.add(**row, metric="share_of_optimum", p50=result.share, seed=SEED)


if __name__ == "__main__":
    sys.exit(main())
