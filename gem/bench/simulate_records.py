"""Records of jobs of 8 to 8,192 GPUs, modelled: python -m gem.bench.simulate_records --tier smoke

Every row is modelled. impl says whether the constants are `calibrated` on records or `assumed`; what is missing stands
in the notes. Cases are <preset>_gpus<N>; subjects:

dense_1d, dense_2d, dense_2d_ep    dense parallelism alone changes; dense_2d_ep_256 has shard groups of 256
sparse_v1, sparse_v2, sparse_v3    sparse parallelism alone changes
full, without_<dimension>, none    all dimensions, all but one, none of them; <subject>:<part> shares of the step
<dense>@<assumption>               the same at another value of one constant, case ..._x<factor>
axis_<axis>                        bytes and time of an axis a step, its tier in the note
all_gather_<tier>                  time of an all-gather of a size on a tier, case bytes<N>
"""

from __future__ import annotations

import dataclasses
import sys

from gem import record, workflow
from gem.cli import Parser
from gem.parallel import calibration, simulate, topology
from gem.parallel.assumptions import Assumptions
from gem.parallel.mesh import Group
from gem.parallel.simulate import DENSE, DIMENSIONS, Result, Scenario, scenario
from gem.parallel.workload import Workload, of_preset

EXPERIMENT = "simulate"
SOURCES = (
    "gem/bench/simulate_records.py", "gem/bench/sparse_model.py", "gem/parallel/assumptions.py",
    "gem/parallel/calibration.py", "gem/parallel/mesh.py", "gem/parallel/simulate.py", "gem/parallel/topology.py",
    "gem/parallel/workload.py", "gem/balance.py", "gem/summary.py", "gem/config.py", "gem/sizes.py",
    "gem/model.py", "gem/counts.py", "data/lengths.py",
)  # fmt: skip
PRESETS = ("base", "large")
GPUS = tuple(2**power for power in range(3, 14))
TARGET = 4096  # the size of the source's job, several thousand
SENSITIVITY = {
    "zone_bandwidth": (0.25, 0.5, 1, 2, 4),
    "oversubscription": (1 / 7, 0.5, 1, 2, 4),
    "zone_latency": (0.25, 0.5, 1, 2, 4),
}
EXPERT_SCALES = (1, 2, 4, 8)
FAST_PEAK = 2250e12  # dense bf16 of a B200, the generation that the source's siblings name
GATHER_SIZES = tuple(2**power for power in range(16, 35, 2))
TIER_GROUPS = {"host": 8, "zone": 128, "cross_zone": 4096}


class Book:
    """Adds rows that share impl, phase, scope and note."""

    def __init__(self, run: record.Run, found: calibration.Calibration):
        self.run, self.found = run, found

    def add(self, case: str, subject: str, values: dict[str, float], note: str = "") -> None:
        note = f"{note}; {self.found.text()}" if note else self.found.text()
        for metric, number in values.items():
            self.run.add(
                case=case, subject=subject, impl=self.found.label, phase="model", metric=metric, p50=number,
                scope="modelled", seed=0, note=note,
            )  # fmt: skip

    def result(self, case: str, subject: str, result: Result) -> None:
        values = {
            "time_ms": result.step * 1e3,
            "exposed_ms": result.exposed * 1e3,
            "scaling_ratio": result.scaling_ratio,
            "mfu": result.mfu,
            "skew": result.skew,
            "comm_bytes": sum(result.sent.values()),
            "memory_bytes": result.memory,
        }
        self.add(case, subject, values)

    def shares(self, case: str, subject: str, result: Result) -> None:
        parts = {
            "compute": result.mean_compute,
            "wait": result.max_compute - result.mean_compute,
            "contention": result.contention,
            "exposed": result.exposed,
        }
        for name, seconds in parts.items():
            self.add(case, f"{subject}:{name}", {"time_share": seconds / result.step})


def larger_experts(work: Workload, factor: float) -> Workload:
    """The workload with experts of `factor` times the parameters and FLOPs."""
    units = tuple(
        dataclasses.replace(
            unit, params=unit.params * factor, flops={name: flops * factor for name, flops in unit.flops.items()}
        )
        if unit.experts
        else unit
        for unit in work.units
    )
    return dataclasses.replace(work, units=units)


def add_sizes(book: Book, work: Workload, value: Assumptions) -> None:
    """Every dense and sparse generation, and the shares of the step, over the number of GPUs."""
    for gpus in GPUS:
        case = f"{work.preset}_gpus{gpus}"
        for name, without in DENSE.items():
            book.result(case, name, simulate.simulate(work, scenario(gpus, without), value))
        book.result(case, "dense_2d_ep_256", simulate.simulate(work, scenario(gpus, shard=256), value))
        for generation in simulate.GENERATIONS:
            job = scenario(gpus, ("sparse",)) if generation == "v1" else scenario(gpus, generation=generation)
            book.result(case, f"sparse_{generation}", simulate.simulate(work, job, value))
        book.shares(case, "full", simulate.simulate(work, scenario(gpus), value))
        book.shares(case, "none", simulate.simulate(work, scenario(gpus, DIMENSIONS), value))


def add_dimensions(book: Book, work: Workload, value: Assumptions) -> None:
    """What every dimension gives at the size of the source's job."""
    case = f"{work.preset}_gpus{TARGET}"
    jobs: dict[str, Scenario] = {"full": scenario(TARGET), "none": scenario(TARGET, DIMENSIONS)}
    jobs |= {f"without_{name}": scenario(TARGET, (name,)) for name in DIMENSIONS}
    for name, job in jobs.items():
        book.result(case, name, simulate.simulate(work, job, value))


def add_sensitivity(book: Book, work: Workload, value: Assumptions) -> None:
    """Exposed communication and step at other values of a constant, and with larger experts on two kinds of chip."""

    def both(subject: str, case: str, own: Workload, changed: Assumptions) -> None:
        for name, without in DENSE.items():
            result = simulate.simulate(own, scenario(TARGET, without), changed)
            book.add(case, f"{name}@{subject}", {"exposed_ms": result.exposed * 1e3, "time_ms": result.step * 1e3})

    for name, factors in SENSITIVITY.items():
        for factor in factors:
            changed = value.with_values(
                {name: max(1.0, value[name] * factor) if name[0] == "o" else value[name] * factor}
            )
            both(name, f"{work.preset}_gpus{TARGET}_x{factor:.3g}", work, changed)
    both("log_latency", f"{work.preset}_gpus{TARGET}_x1", work, value.with_values({"log_latency": 1}))
    fast = value.with_values({"peak_flops": FAST_PEAK})
    for factor in EXPERT_SCALES:
        case, own = f"{work.preset}_gpus{TARGET}_x{factor}", larger_experts(work, factor)
        both("experts", case, own, value)
        both("experts_fast_chip", case, own, fast)


def add_placement(book: Book, work: Workload, value: Assumptions) -> None:
    """Which axis lies on which tier at the size of the source's job, and what a tier costs."""
    network, plan = topology.Topology(value), scenario(TARGET).plan
    for item in topology.place(plan, network, simulate.volumes(work, plan, value)):
        numbers = {"comm_bytes": item.bytes, "time_ms": item.seconds * 1e3}
        book.add(f"{work.preset}_gpus{TARGET}", f"axis_{item.axis}", numbers, f"{item.tier}: {item.reason}")


def add_tiers(book: Book, value: Assumptions) -> None:
    network = topology.Topology(value)
    for tier, ranks in TIER_GROUPS.items():
        for size in GATHER_SIZES:
            seconds = float(network.seconds("all_gather", size, Group(tier, ranks, 1)))
            book.add(f"bytes{size}", f"all_gather_{tier}", {"time_ms": seconds * 1e3}, f"{ranks} ranks")


def add_records(run: record.Run, found: calibration.Calibration) -> None:
    book, value = Book(run, found), found.values
    for preset in PRESETS:
        work = of_preset(preset, value["param_bytes"])
        add_sizes(book, work, value)
        add_dimensions(book, work, value)
        add_placement(book, work, value)
    add_sensitivity(book, of_preset("large", value["param_bytes"]), value)
    add_tiers(book, value)
    if found.held_out is not None:
        book.add("gpus2", "held_out", {"rel_err": found.held_out})


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.simulate_records", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--measured", default="data/measured", help="frozen records (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        found = calibration.load(args.measured)
        rows = [dataclasses.asdict(row) for row in found.values.rows]
        config = {"assumptions": rows, "module_mfu": found.values.module_mfu, "calibration": found.text()}
        with record.Run(args.run or settings.name, EXPERIMENT, config=config, sources=SOURCES) as run:
            add_records(run, found)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(found.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
