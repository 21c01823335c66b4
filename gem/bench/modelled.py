"""Records that need no clock, in one process: python -m gem.bench.modelled --tier smoke

model     parameters, bytes and FLOPs of every preset
schedule  skew of tile schedules
sparse    memory, communication and balance of sparse parallelism
data      waste of padding under length laws
"""

from __future__ import annotations

import sys

from gem import record, workflow
from gem.bench import length_waste, model_records, schedule_skew, sparse_model
from gem.cli import Parser

PARTS = {"model": model_records, "schedule": schedule_skew, "sparse": sparse_model, "data": length_waste}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.modelled", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--experiments", default=",".join(PARTS), help="separated by commas (default: all of them)")
    args = parser.parse_args(argv)
    try:
        names = args.experiments.split(",")
        for name in names:
            if name not in PARTS:
                raise ValueError(f"--experiments: {name!r} is unknown; allowed: {', '.join(PARTS)}")
        settings = workflow.load({"tier": args.tier})
        for name in names:
            write(args.run or settings.name, name, args.tier)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(folder: str, name: str, tier: str, results: str = "results") -> None:
    """One part of the records of an experiment."""
    part = PARTS[name]
    arguments = (tier,) if name == "model" else ()
    config = part.run_config(tier) if name == "model" else {}
    run_name = f"{part.EXPERIMENT}-{part.__name__.rpartition('.')[2]}"
    with record.Run(
        folder, part.EXPERIMENT, name=run_name, config=config, sources=part.SOURCES, results=results
    ) as run:
        part.add_records(run, *arguments)


if __name__ == "__main__":
    sys.exit(main())
