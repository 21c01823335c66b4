"""Step time of jobs of 8 to 8,192 GPUs, by arithmetic: python -m gem.parallel.simulate --gpus 4096 --plan fsdp=128,ep=2

The source's model: a step lasts as long as its slowest rank, and a rank as long as the longer of compute and
communication. Here that maximum is taken unit by unit, as FSDP runs: a unit's parameters are gathered `prefetch` units
ahead of its compute, gradients are scattered behind it and then reduced over replicas, one queue for all of these; what
the compute of the units in between does not cover is exposed. Expert parallelism stops its group twice a pass, as in
the source's sequence. Ranks differ in load, drawn from the length law through gem.balance; a collective waits for the
last rank of its group and takes SMs from the compute beside it.

    E2E MFU = local MFU x scaling ratio,   scaling ratio = mean compute of the ranks / step

Left out: the optimiser, kernel launches, stragglers other than by load, and other jobs on the network.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from data.cli import positive, run
from gem.cli import Parser
from gem.parallel import assumptions, calibration, mesh
from gem.parallel import topology as tiers
from gem.parallel.assumptions import Assumptions
from gem.parallel.mesh import Group, Mesh
from gem.parallel.topology import Topology
from gem.parallel.workload import FOLLOWS_LENGTH, Unit, Workload, of_preset, rank_loads, table_traffic

GENERATIONS = ("v1", "v2", "v3")


@dataclass(frozen=True)
class Scenario:
    """A job: its mesh, generation of sparse parallelism, balancing scheme, and whether gathers leave the SMs alone."""

    plan: Mesh
    generation: str = "v3"
    balance: str = "bbs"
    sm_free: bool = True

    def __post_init__(self):
        if self.generation not in GENERATIONS:
            raise ValueError(f"sparse generation {self.generation!r} is unknown; allowed: {', '.join(GENERATIONS)}")
        if self.generation == "v1" and self.plan.model_parallel != self.plan.gpus:
            raise ValueError(
                f"sparse generation v1 has one copy of the tables; model_parallel is {self.plan.model_parallel}, "
                f"allowed: {self.plan.gpus}"
            )


@dataclass(frozen=True)
class Result:
    """Means over steps, seconds. mean_compute and max_compute: over ranks, alone on the SMs; contention: what
    collectives on the SMs add to it; step = max_compute + contention + exposed. sent: collective -> bytes that a rank
    sends a step. local_mfu, mfu: of one GPU's layers, and of the job."""

    step: float
    mean_compute: float
    max_compute: float
    contention: float
    communication: float
    sent: dict[str, float]
    local_mfu: float
    memory: float

    @property
    def exposed(self) -> float:
        return self.step - self.max_compute - self.contention

    @property
    def skew(self) -> float:
        return self.max_compute / self.mean_compute

    @property
    def scaling_ratio(self) -> float:
        return self.mean_compute / self.step

    @property
    def mfu(self) -> float:
        return self.local_mfu * self.scaling_ratio


def synchronised(times: np.ndarray, group: Group) -> np.ndarray:
    """Every rank's time replaced by the latest of its group: times [steps, ranks]."""
    if group.size == 1:
        return times
    steps, ranks = times.shape
    blocks = times.reshape(steps, ranks // (group.size * group.stride), group.size, group.stride)
    return np.broadcast_to(blocks.max(2, keepdims=True), blocks.shape).reshape(steps, ranks)


def parameter_bytes(unit: Unit, plan: Mesh, value: Assumptions) -> tuple[float, Group]:
    """Bytes of a unit's gathered parameters, and the groups that gather them: an expert's are one rank's share."""
    if unit.experts and plan.expert > 1:
        return unit.params * value["param_bytes"] / plan.expert, plan.group("expert_shard")
    return unit.params * value["param_bytes"], plan.group("shard")


def activation_bytes(work: Workload, plan: Mesh, value: Assumptions, backward: bool) -> tuple[float, float]:
    """Sizes of the all-gather before an expert and of the reduce-scatter behind it.

    Every sample visits every expert: the group's inputs come together, and each rank's experts give their own tokens
    of all these samples back. Backward: gradients of the outputs come, those of the inputs go.
    """
    inputs = work.expert_inputs * value["local_batch"] * plan.expert
    outputs = work.expert_outputs * value["local_batch"]  # a rank's experts make 1 / expert of the output tokens
    return (outputs, inputs) if backward else (inputs, outputs)


def volumes(work: Workload, plan: Mesh, value: Assumptions) -> dict[str, tuple[str, list[tuple[str, float]]]]:
    """Axis -> (group, [(collective, size), ...]) of one step, in the order in which a unit issues them.

    The sequence of expert parallelism: forward all-gather of the expert's parameters, all-gather of activations, local
    expert on the larger batch, reduce-scatter of outputs; backward all-gather of parameters, all-gather of output
    gradients, reduce-scatter of input gradients, reduce-scatter of parameter gradients.
    """
    found: dict[str, tuple[str, list[tuple[str, float]]]] = {}
    for axis, _, op, size in messages(work, plan, value):
        found.setdefault(axis, (axis, []))[1].append((op, size))
    return found


def messages(work: Workload, plan: Mesh, value: Assumptions) -> list[tuple[str, str, str, float]]:
    """(axis, unit, collective, size) of one step: forward over the units, backward over them reversed."""
    found = []
    for backward in (False, True):
        for unit in reversed(work.units) if backward else work.units:
            size, group = parameter_bytes(unit, plan, value)
            found.append((group.name, unit.name, "all_gather", size))
            if unit.experts and plan.expert > 1:
                gathered, scattered = activation_bytes(work, plan, value, backward)
                found.append(("expert", unit.name, "all_gather", gathered))
                found.append(("expert", unit.name, "reduce_scatter", scattered))
            if backward:
                found.append((group.name, unit.name, "reduce_scatter", size))
                if plan.replica > 1:
                    found.append(("replica", unit.name, "all_reduce", size / group.size))
    return found


def simulate(work: Workload, job: Scenario, value: Assumptions, *, loads: np.ndarray | None = None) -> Result:
    """One job. loads: relative load [steps, ranks], mean 1; drawn from the length law when not given. ValueError for an
    impossible plan."""
    plan, network = job.plan, Topology(value)
    tiers.check_plan(plan, network, work.params, work.num_experts)
    batch = int(value["local_batch"])
    if loads is None:
        loads = rank_loads(plan.gpus, batch, job.balance, int(value["pool"]))
    if loads.ndim != 2 or loads.shape[1] != plan.gpus:
        raise ValueError(f"loads have shape {loads.shape}; allowed: [steps, {plan.gpus}]")
    return Timeline(work, job, value, network, loads / loads.mean()).run()


class Timeline:
    """The clocks of every rank in every step, [steps, ranks]: `compute` of its stream, `link` of the queue of parameter
    collectives."""

    def __init__(self, work: Workload, job: Scenario, value: Assumptions, network: Topology, loads: np.ndarray):
        self.work, self.job, self.plan, self.value, self.network = work, job, job.plan, value, network
        self.loads = loads
        self.tables = table_traffic(job.generation, job.plan.gpus, job.plan.model_parallel)
        self.compute = np.zeros(loads.shape)
        self.link = np.zeros(loads.shape)
        self.alone = np.zeros(loads.shape)  # compute as if nothing else ran on the SMs
        self.added = np.zeros(loads.shape)  # what contention adds
        self.communication = 0.0
        self.sent: dict[str, float] = {}

    def run(self) -> Result:
        units, batch = self.work.units, self.value["local_batch"]
        lookups = batch * self.tables.skew  # the busiest rank serves this many samples' worth
        group = self.plan.group("model_parallel")
        self.stop_for("all_to_all", lookups * self.work.lookup_bytes, group)
        self.sweep(units, backward=False)
        # ids of the next batch: nothing waits for them, but gradients queue behind them
        self.queue("all_to_all", lookups * self.work.id_bytes, group, self.compute)
        self.sweep(units[::-1], backward=True)
        dense = np.maximum(self.compute, self.link)
        self.stop_for("all_to_all", lookups * self.work.lookup_bytes, group)
        self.compute = self.compute + self.exposed_copies(dense)
        step = np.maximum(self.compute, self.link).max(1)
        compute = self.alone.max(1)
        mean = float(self.alone.mean())
        return Result(
            step=float(step.mean()),
            mean_compute=mean,
            max_compute=float(compute.mean()),
            contention=float(((self.alone + self.added).max(1) - compute).mean()),
            communication=self.communication,
            sent=self.sent,
            local_mfu=3 * self.work.flops * batch / (mean * self.value["peak_flops"]),
            memory=self.work.params * self.value["state_bytes"] / self.plan.shard + self.tables.peak,
        )

    def exposed_copies(self, dense: np.ndarray) -> np.ndarray:
        """Copies of tables move inside hosts beside the dense step; what does not fit beside it is exposed."""
        if not self.tables.moved:
            return np.zeros(self.loads.shape)
        seconds = self.tables.moved / self.network.bandwidth("host")
        self.sent["table_replica:copies"] = self.tables.moved
        self.communication += seconds
        return np.maximum(0.0, seconds - dense)

    def seconds_of(self, unit: Unit, factor: float) -> np.ndarray:
        """Compute of a unit on every rank, alone on the SMs; factor 1 forward, 2 backward."""
        total = np.zeros(self.loads.shape)
        for name, flops in unit.flops.items():
            rate = self.value["peak_flops"] * self.value.module_mfu.get(name, self.value["local_mfu"])
            seconds = factor * flops * self.value["local_batch"] / rate
            total = total + seconds * (self.loads if name in FOLLOWS_LENGTH else 1.0)
        return total

    def collective(self, op: str, size: float, group: Group) -> float:
        """Seconds of a collective, which are booked."""
        seconds = float(self.network.seconds(op, size, group))
        if group.size > 1 and size > 0:
            self.sent[f"{group.name}:{op}"] = self.sent.get(f"{group.name}:{op}", 0.0) + tiers.sum_of(
                op, size, group.size
            )
        self.communication += seconds
        return seconds

    def queue(self, op: str, size: float, group: Group, ready: np.ndarray) -> tuple[float, np.ndarray]:
        """Put a collective on the link once all members are ready; its seconds, and when every rank is done with it."""
        seconds = self.collective(op, size, group)
        if group.size == 1 or size == 0:
            return seconds, ready
        self.link = synchronised(np.maximum(self.link, ready), group) + seconds
        return seconds, self.link

    def stop_for(self, op: str, size: float, group: Group) -> None:
        """A collective that compute waits for."""
        seconds = self.collective(op, size, group)
        if group.size > 1 and size > 0:
            self.compute = synchronised(self.compute, group) + seconds

    def sweep(self, units: tuple[Unit, ...], *, backward: bool) -> None:
        """One pass over the units in their order of execution."""
        ahead, plan, value = int(self.value["prefetch"]), self.plan, self.value
        gathered: list[np.ndarray] = []
        behind = 0.0  # seconds of gradient collectives that run beside the next unit
        for index, unit in enumerate(units):
            beside = 0.0
            while len(gathered) <= min(index + ahead, len(units) - 1):
                size, group = parameter_bytes(units[len(gathered)], plan, value)
                seconds, done = self.queue("all_gather", size, group, self.compute)
                beside += seconds * self.loss("all_gather") if len(gathered) > index else 0.0
                gathered.append(done)
            self.compute = np.maximum(self.compute, gathered[index])
            expert = unit.experts and plan.expert > 1
            gathered_bytes, scattered_bytes = activation_bytes(self.work, plan, value, backward)
            if expert:
                self.stop_for("all_gather", gathered_bytes, plan.group("expert"))
            own = self.seconds_of(unit, 2.0 if backward else 1.0)
            # time that collectives on SMs run beside this unit costs it a share of that time
            slowed = np.minimum(beside + behind, own * self.loss("reduce_scatter"))
            self.compute = self.compute + own + slowed
            self.alone, self.added = self.alone + own, self.added + slowed
            if expert:
                self.stop_for("reduce_scatter", scattered_bytes, plan.group("expert"))
            if backward:
                size, group = parameter_bytes(unit, plan, value)
                scatter, _ = self.queue("reduce_scatter", size, group, self.compute)
                reduction, _ = self.queue("all_reduce", size / group.size, plan.group("replica"), self.compute)
                behind = (scatter + reduction) * self.loss("reduce_scatter")

    def loss(self, op: str) -> float:
        """Share of the compute beside a collective that its SMs cost."""
        sms = self.value["free_sms"] if self.job.sm_free and op == "all_gather" else self.value["collective_sms"]
        return min(1.0, self.value["contention"] * sms / self.value["collective_sms"])


SHARD_GROUP, EXPERT_GROUP, TABLE_GROUP = (
    128,
    2,
    256,
)  # the source: shard groups of 128-256, 2-way experts, groups of 256
DIMENSIONS = ("2d", "ep", "sparse", "balance", "sm_free")


def scenario(gpus: int, without: tuple[str, ...] = (), *, shard: int = SHARD_GROUP, generation: str = "v3") -> Scenario:
    """A job with every dimension, less those in `without` (names of DIMENSIONS).

    2d: FSDP over all GPUs instead of groups of `shard`. ep: no expert parallelism. sparse: V1. balance: batches as they
    come. sm_free: gathers on the SMs. Copies of tables: at most as many as a host has GPUs.
    """
    for name in without:
        if name not in DIMENSIONS:
            raise ValueError(f"dimension {name!r} is unknown; allowed: {', '.join(DIMENSIONS)}")
    size = gpus if "2d" in without else min(shard, gpus)
    expert = 1 if "ep" in without else min(EXPERT_GROUP, gpus)
    generation = "v1" if "sparse" in without else generation
    tables = gpus if generation == "v1" else min(gpus, max(TABLE_GROUP, gpus // 8))
    plan = Mesh(gpus, size, gpus // size, expert, tables)
    return Scenario(plan, generation, "none" if "balance" in without else "bbs", "sm_free" not in without)


# What F16 compares: dense parallelism alone changes, everything else is as in the full job.
DENSE = {"dense_1d": ("2d", "ep"), "dense_2d": ("ep",), "dense_2d_ep": ()}


def placement_text(preset: str, plan: Mesh, network: Topology) -> list[str]:
    """Lines that say which axis lies on which tier, and why; ValueError for an impossible plan."""
    value = network.values
    work = of_preset(preset, value["param_bytes"])
    tiers.check_plan(plan, network, work.params, work.num_experts)
    sent = volumes(work, plan, value)
    placed = tiers.place(plan, network, sent)
    lines = [f"preset {preset}, {plan.gpus:,} GPUs: {plan.describe()}"]
    lines += [f"{item.axis:<13}{item.group.size:>5} ranks, {item.tier:<11}{item.reason}" for item in placed]
    # axes that nest freely: parameters that all experts share lie on two of them at once
    sizes = {"expert": plan.expert, "expert_shard": plan.shard // plan.expert, "replica": plan.replica}
    axes = {name: (size, sent[name][1]) for name, size in sizes.items() if size > 1 and name in sent}
    if len(axes) > 1:
        best, *_, worst = tiers.orders(axes, network)
        places = ", ".join(f"{name} ({tier})" for name, tier in zip(best.axes, best.tiers, strict=True))
        lines.append(
            f"cheapest nesting from the inside out: {places}: {best.seconds * 1e3:.3g} ms, the dearest "
            f"{worst.seconds * 1e3:.3g} ms"
        )
    return lines


def text(result: Result) -> list[str]:
    ms = {
        "compute, mean of ranks": result.mean_compute,
        "waiting for the heaviest rank": result.max_compute - result.mean_compute,
        "SMs lent to collectives": result.contention,
        "communication not hidden": result.exposed,
        "step": result.step,
    }
    lines = [f"{name:<31}{seconds * 1e3:>10.2f} ms {seconds / result.step:>7.1%}" for name, seconds in ms.items()]
    lines.append(f"communication, hidden or not    {result.communication * 1e3:>9.2f} ms")
    lines.append(f"sent a rank and step            {sum(result.sent.values()) / 1e9:>9.2f} GB")
    lines.append(f"dense states, tables at the peak{result.memory / 1e9:>9.2f} GB")
    lines.append(
        f"E2E MFU {result.mfu:.3f} = local MFU {result.local_mfu:.3f} x scaling ratio {result.scaling_ratio:.3f}"
    )
    return lines


def parser() -> Parser:
    found = Parser(prog="python -m gem.parallel.simulate", description=__doc__.split("\n")[0])
    add = found.add_argument
    add("--gpus", type=positive, default=4096, help="default %(default)s")
    add("--plan", help="fsdp=N,ddp=N,ep=N,mp=N; what is left out is filled up (default: groups of the source)")
    add("--preset", default="large", help="model, as in gem.summary (default %(default)s)")
    add("--sparse", choices=GENERATIONS, help="generation of sparse parallelism (default v3, v1 without table copies)")
    add("--balance", choices=("none", "local", "bbs", "global"), default="bbs", help="default %(default)s")
    add("--gathers", choices=("copy_engine", "sm"), default="copy_engine", help="default %(default)s")
    add("--measured", default="data/measured", help="folder of frozen records for calibration (default %(default)s)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="change an assumption; may be repeated")
    add("--assumptions", action="store_true", help="print every constant with its source, and end")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    found = calibration.load(options.measured)
    given = dict(assumptions.parse(item) for item in options.set)
    value = found.values.with_values(given, source="given on the command line")
    if options.assumptions:
        print(value.text())
        return 0
    job = scenario(options.gpus)
    plan = mesh.parse(options.plan, options.gpus) if options.plan else job.plan
    if options.plan and "mp=" not in options.plan and "model_parallel=" not in options.plan and options.sparse != "v1":
        plan = dataclasses.replace(plan, model_parallel=job.plan.model_parallel)
    if options.sparse == "v1" and not options.plan:
        plan = dataclasses.replace(plan, model_parallel=options.gpus)
    generation = options.sparse or "v3"
    job = Scenario(plan, generation, options.balance, options.gathers == "copy_engine")
    for line in placement_text(options.preset, plan, Topology(value)):
        print(line)
    for line in text(simulate(of_preset(options.preset, value["param_bytes"]), job, value)):
        print(line)
    print(found.text())
    return 0


if __name__ == "__main__":
    run(main)
