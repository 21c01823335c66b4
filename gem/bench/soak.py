"""A thousand training steps in a row: does their time or memory drift, does their loss diverge?

    python -m gem.bench.soak --tier gpu --variant full --steps 1000
    python -m gem.bench.soak --tier gpu --variant mxfp8_full --steps 2000 --batch 256 --untimed

The steps are those of `gem.bench.step`, on real batches with the reader, the balancer and prefetching of training; a
loss or gradient that is not finite ends the run with its step. The samples are those of a rotation of `gem.bench.step`,
few enough to be learnt by heart: a loss that falls to nothing is expected, one that rises is not. Records `soak`, one
row a window of a tenth of the steps (case steps_<last step>): median time of a step, peak memory (of variants with CUDA
graphs beside what the graphs hold, but for windows in which one is captured), mean loss; and over
the run `time_drift` and `memory_growth`, the last window against the second, since the first compiles and grows the
allocator's pools.
"""

from __future__ import annotations

import sys

import numpy as np

from gem import config as configuration
from gem import hardware, record, report, train
from gem.bench import batches
from gem.bench.loop import Loop, with_batch
from gem.bench.step import SOURCES as STEP_SOURCES
from gem.bench.step import section_of
from gem.bench.timing import Timing, clock_for
from gem.cli import Parser
from gem.optim import Optimizers
from gem.train import Data
from gem.watch import DivergedError

WINDOWS = 10
SOURCES = (*STEP_SOURCES, "gem/bench/soak.py")


def soak(
    variant: str,
    tier: str,
    run_name: str,
    steps: int,
    preset: str | None = None,
    batch: int | None = None,
    timed: bool = True,
) -> None:
    """Run and record. steps: a multiple of WINDOWS, at least two a window. batch: the local batch, None: the tier's.
    timed: False leaves out times, for a device that others use as well."""
    section, data = section_of(tier), configuration.load_tier(tier)["data"]
    rows = section["batch"] * section["batches"]
    section = section | {"batch": batch or section["batch"]}
    config = with_batch(configuration.load(variant, tier, preset), section["batch"])
    device = hardware.open_device(config.device)
    schema = batches.schema_of(data, section["table_rows"])
    split = batches.MemorySplit(schema, max(rows, section["batch"]), data, 0)
    model = train.build(config, Data(split, split), 0, device)
    model.train()
    loop = Loop(model, Optimizers(model, config, steps), config, split, device)
    losses: list[float] = []
    if loop.watch is not None:
        loop.watch.add = keeping(loop.watch.add, losses)
        loop.watch.flush = keeping(loop.watch.flush, losses)
    clock, found = clock_for(device.type, flush_bytes=0), []
    settings = config.to_dict() | {"step": section, "steps": steps}
    run = record.Run(
        run_name, "soak", name=f"soak-{variant}", case_row=config.row, config=settings, sources=SOURCES
    )  # fmt: skip
    base = {"subject": variant, "impl": report.implementation(config), "phase": "step"}
    note = f"local batch {section['batch']}"
    try:
        for window in range(WINDOWS):
            hardware.reset_peak_memory(device)
            times = clock.run([loop.one] * (steps // WINDOWS))
            for _ in loop.watch.flush() if loop.watch is not None else ():
                pass
            timing, memory = Timing.of(times, 0), hardware.peak_memory_gib(device)
            found.append((timing, memory))
            done = (window + 1) * steps // WINDOWS
            row = base | {"case": f"steps_{done}", "note": f"{note}, of {steps} steps"}
            if timed:
                run.add(**row, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80, n=timing.n)
            run.add(**row, metric="peak_mem_gib", p50=memory)
            if losses:
                run.add(**row, metric="loss", p50=float(np.mean(losses)), n=len(losses))
            losses.clear()
            run.write()  # a run that is stopped leaves the windows that it did
            print(f"{done} steps: {timing.p50:.2f} ms, {memory:.2f} GiB", flush=True)
    except DivergedError as error:
        run.add(**base, case=f"steps_{steps}", metric="loss", status="failed", note=" ".join(str(error).split()))
        run.write()
        raise
    finally:
        loop.close()
    (early, before), (late, after) = found[1], found[-1]
    whole = base | {"case": config.preset, "note": f"{note}; last tenth of {steps} steps against the second"}
    if timed:
        run.add(**whole, metric="time_drift", p50=late.p50 / early.p50)
    run.add(**whole, metric="memory_growth", p50=(after - before) * 2**30)
    run.write()


def keeping(call, losses: list[float]):
    """The same generator of finished steps, which leaves their losses behind."""

    def kept(*given):
        for done in call(*given):
            losses.append(done.loss)
            yield done

    return kept


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml; its section `step` has the sizes")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--variant", default="full", help="id of config/variants.tsv (default full)")
    parser.add_argument("--preset", help="size of the model (default: the tier's)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default 1000)")
    parser.add_argument("--batch", type=int, help="the local batch (default: the tier's)")
    parser.add_argument("--untimed", action="store_true", help="no times in the records: the device is shared")
    args = parser.parse_args(argv)
    try:
        if args.batch is not None and args.batch < 1:
            raise ValueError(f"--batch {args.batch}; allowed: 1 or more")
        if args.steps < 2 * WINDOWS or args.steps % WINDOWS:
            raise ValueError(f"--steps {args.steps}; allowed: multiples of {WINDOWS}, {2 * WINDOWS} or more")
        soak(args.variant, args.tier, args.run or args.tier, args.steps, args.preset, args.batch, not args.untimed)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
