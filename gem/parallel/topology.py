"""Tiers of the network, what a collective costs on them, and which axis of a job goes where.

The source: hosts of 8 GPUs on NVLink, zones of hosts on RoCE, zones joined by oversubscribed RoCE; the volume of an
axis is matched to the bandwidth of a tier, and where a collective limits a tier, a further axis shrinks its message or
its group.

A collective costs latency + bytes / bandwidth. Latency: a start, and a hop a member for rings (n - 1; twice that or,
where cheaper, a tree for all-reduce), each hop at the latency of the tier that it crosses. Bytes: what one rank's links
carry in each tier, the slowest tier counts, since a pipelined collective keeps all of them busy. Groups that span hosts
use the network ports of all their members.

    python -m gem.parallel.topology --gpus 4096 --plan fsdp=128,ddp=32,ep=2 --preset large
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from data.cli import positive, run
from gem.cli import Parser
from gem.parallel import assumptions, mesh
from gem.parallel.mesh import Group, Mesh

TIERS = ("host", "zone", "cross_zone")
TIER_NAMES = {
    "host": "NVLink inside a host",
    "zone": "RoCE inside a zone",
    "cross_zone": "oversubscribed RoCE across zones",
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Span:
    """How a group lies on the tiers: members in a host, in a zone, in all."""

    size: int
    in_host: int
    in_zone: int

    @property
    def hosts(self) -> int:
        return self.size // self.in_host

    @property
    def zones(self) -> int:
        return self.size // self.in_zone

    @property
    def tier(self) -> str:
        """The widest tier that the group uses."""
        return "host" if self.hosts == 1 else "zone" if self.zones == 1 else "cross_zone"


@dataclass(frozen=True)
class Topology:
    """Tiers from assumptions; see gem.parallel.assumptions for units and sources."""

    values: Mapping[str, float]

    def span(self, group: Group) -> Span:
        """ValueError when a group straddles hosts or zones unevenly: its slowest member would set the pace."""
        inside = []
        for tier in ("host", "zone"):
            room = int(self.values[f"{tier}_gpus"])
            block = group.size * group.stride
            members = group.size if block <= room else max(1, room // group.stride)
            if block <= room:
                even = room % block == 0 or 0 < group.job <= room
            else:
                even = room % group.stride == 0 or group.stride % room == 0
            if not even or group.size % members:
                raise ValueError(
                    f"topology: {group.name} groups of {group.size}, {group.stride} apart, straddle {tier}s of {room} "
                    f"GPUs unevenly; allowed: sizes that divide {room} or are multiples of it"
                )
            inside.append(members)
        return Span(group.size, *inside)

    def bandwidth(self, tier: str) -> float:
        """Bytes/s that a GPU's link carries in a tier, each direction."""
        if tier == "cross_zone":
            return self.values["zone_bandwidth"] / self.values["oversubscription"]
        return self.values[f"{tier}_bandwidth"]

    def traffic(self, op: str, size, group: Group) -> dict[str, np.ndarray]:
        """Bytes that a rank's link of each tier sends (and receives) in a collective.

        size: bytes; of the gathered result (all_gather), of a rank's input (reduce_scatter, all_reduce, all_to_all).
        May be an array.
        """
        check_op(op)
        span, size = self.span(group), np.asarray(size, np.float64)
        n, h, z = span.size, span.in_host, span.in_zone
        if op == "all_to_all":
            shares = {"host": (h - 1) / n, "zone": (n - h) / n, "cross_zone": (n - z) / n}
        else:
            # a ring visits a host once: a host's ports share what enters it, a zone's uplinks what enters the zone
            shares = {
                "host": (n - 1) / n if h > 1 else 0.0,
                "zone": (1 - 1 / span.hosts) / h,
                "cross_zone": (1 - 1 / span.zones) / z,
            }
        times = 2 if op == "all_reduce" else 1
        return {tier: times * share * size for tier, share in shares.items()}

    def latency(self, op: str, group: Group) -> float:
        """Seconds before bytes count; 0 for a group of one."""
        check_op(op)
        span, value = self.span(group), self.values
        if span.size == 1:
            return 0.0
        hop = {"host": value["host_latency"], "zone": value["zone_latency"], "cross_zone": value["cross_latency"]}
        if op == "all_to_all":
            return value["base_latency"] + hop[span.tier] + (span.size - 1) * value["message_overhead"]
        ring = (span.size - span.hosts) * hop["host"] + (span.hosts - span.zones) * hop["zone"]
        ring += (span.zones - 1) * hop["cross_zone"]
        tree = math.log2(span.in_host) * hop["host"] + math.log2(span.hosts / span.zones) * hop["zone"]
        tree += math.log2(span.zones) * hop["cross_zone"]
        if op == "all_reduce":
            return value["base_latency"] + 2 * min(ring, tree)
        return value["base_latency"] + (tree if value["log_latency"] else ring)

    def seconds(self, op: str, size, group: Group) -> np.ndarray:
        """Time of a collective; size as in `traffic`. 0 for a group of one or for no bytes."""
        size = np.asarray(size, np.float64)
        if group.size == 1:
            check_op(op)
            return np.zeros_like(size)
        moved = self.traffic(op, size, group)
        slowest = np.max([amount / self.bandwidth(tier) for tier, amount in moved.items()], axis=0)
        return np.where(size > 0, self.latency(op, group) + slowest, 0.0)


def check_op(op: str) -> None:
    if op not in COLLECTIVES:
        raise ValueError(f"topology: collective {op!r} is unknown; allowed: {', '.join(COLLECTIVES)}")


@dataclass(frozen=True)
class Placement:
    """An axis: its groups, bytes a rank sends a step, the tier it lies on, seconds a step there, and why."""

    axis: str
    group: Group
    collectives: str
    bytes: float
    tier: str
    seconds: float
    reason: str


def check_plan(plan: Mesh, topology: Topology, params: float = 0.0, num_experts: int | None = None) -> None:
    """ValueError, one line, for a plan that cannot run or that no one would want to.

    params: dense parameters of the model. num_experts: experts of a layer, which expert parallelism splits.
    """
    value = topology.values
    host, zone = int(value["host_gpus"]), int(value["zone_gpus"])
    if plan.expert > host:
        raise ValueError(
            f"plan: expert={plan.expert} leaves the host; activations need NVLink; allowed: at most {host}"
        )
    if num_experts is not None and num_experts % plan.expert:
        raise ValueError(
            f"plan: expert={plan.expert} does not divide the {num_experts} experts of a layer; allowed: a divisor"
        )
    if plan.replica > 1 and plan.shard > zone:
        raise ValueError(
            f"plan: shard={plan.shard} leaves the zone although parameters are replicated {plan.replica} times; "
            f"allowed: at most {zone}"
        )
    for name in ("shard", "expert_shard", "replica", "expert", "model_parallel", "table_replica"):
        topology.span(plan.group(name))
    if plan.table_replicas > host:
        raise ValueError(
            f"plan: model_parallel={plan.model_parallel} makes {plan.table_replicas} replicas of a table shard, more "
            f"than a host holds; allowed: at least {plan.gpus // host}"
        )
    states, room = params * value["state_bytes"], value["hbm_bytes"]
    if states / plan.shard > room:
        raise ValueError(
            f"plan: shard={plan.shard} leaves {states / plan.shard / 1e9:.0f} GB of parameters and states on a GPU of "
            f"{room / 1e9:.0f} GB; allowed: at least {math.ceil(states / room)}"
        )


def place(
    plan: Mesh, topology: Topology, volumes: Mapping[str, tuple[str, list[tuple[str, float]]]]
) -> list[Placement]:
    """Axes with most bytes first. volumes: axis -> (group name, [(collective, size), ...] of a step)."""
    found = []
    for axis, (name, calls) in volumes.items():
        group = plan.group(name)
        if group.size == 1:
            continue
        tier = topology.span(group).tier
        sent = sum(sum_of(op, size, group.size) for op, size in calls)
        seconds = float(sum(topology.seconds(op, size, group) for op, size in calls))
        names = ", ".join(dict.fromkeys(op for op, _ in calls)).replace("_", "-")
        found.append(Placement(axis, group, names, sent, tier, seconds, ""))
    found.sort(key=lambda item: -item.bytes)
    return [explain(item, topology, volumes[item.axis][1]) for item in found]


def sum_of(op: str, size: float, members: int) -> float:
    """Bytes that a rank sends in a collective, wherever they go."""
    check_op(op)
    return (2 if op == "all_reduce" else 1) * size * (members - 1) / members


def explain(item: Placement, topology: Topology, calls: list[tuple[str, float]]) -> Placement:
    """The reason for a tier: what the same messages would take one tier further out, or why they cannot stay in."""
    wider = {"host": "zone", "zone": "cross_zone"}.get(item.tier)
    host, zone = (int(topology.values[f"{tier}_gpus"]) for tier in ("host", "zone"))
    rate = topology.bandwidth(item.tier) / 1e9
    reason = f"{item.bytes / 1e9:.3g} GB a rank and step over {TIER_NAMES[item.tier]} ({rate:.3g} GB/s)"
    if wider:
        step = host if wider == "zone" else zone
        moved = Group(item.axis, item.group.size, step)
        seconds = float(sum(topology.seconds(op, size, moved) for op, size in calls))
        reason += f": {item.seconds * 1e3:.3g} ms; one member a {item.tier} would take {seconds * 1e3:.3g} ms"
    else:
        reason += f": {item.seconds * 1e3:.3g} ms; groups of {item.group.size} cannot stay in a zone of {zone}"
        if item.group.stride > 1:
            reason += f" with members {item.group.stride} apart; shards make the message small"
    return Placement(item.axis, item.group, item.collectives, item.bytes, item.tier, item.seconds, reason)


@dataclass(frozen=True)
class Order:
    """Axes from the inside out, the tier of each, and seconds a step of all their collectives."""

    axes: tuple[str, ...]
    tiers: tuple[str, ...]
    seconds: float


def orders(axes: Mapping[str, tuple[int, list[tuple[str, float]]]], topology: Topology) -> list[Order]:
    """Every nesting of axes over the job's ranks, cheapest first. axes: name -> (size, [(collective, size), ...]).

    This is how volume meets bandwidth: the axis whose messages cost most per tier ends up innermost.
    """
    found = []
    for nesting in itertools.permutations(axes):
        stride, tiers, seconds = 1, [], 0.0
        for name in nesting:
            size, calls = axes[name]
            group = Group(name, size, stride)
            tiers.append(topology.span(group).tier)
            seconds += float(sum(topology.seconds(op, amount, group) for op, amount in calls))
            stride *= size
        found.append(Order(nesting, tuple(tiers), seconds))
    return sorted(found, key=lambda order: order.seconds)


def main(arguments: list[str] | None = None) -> int:
    from gem.parallel import calibration, simulate

    parser = Parser(prog="python -m gem.parallel.topology", description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=positive, default=4096, help="default %(default)s")
    parser.add_argument("--plan", default="fsdp=128,ep=2", help="sizes of axes (default %(default)s)")
    parser.add_argument("--preset", default="large", help="model whose messages are placed (default %(default)s)")
    parser.add_argument("--measured", default="data/measured", help="frozen records (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change an assumption")
    options = parser.parse_args(arguments)
    found = calibration.load(options.measured)
    given = dict(assumptions.parse(item) for item in options.set)
    values = found.values.with_values(given, source="given on the command line")
    plan, topology = mesh.parse(options.plan, options.gpus), Topology(values)
    for line in simulate.placement_text(options.preset, plan, topology):
        print(line)
    print(found.text())
    return 0


if __name__ == "__main__":
    run(main)
