"""Costs of collectives against sums by hand, and which plans are refused."""

import math

import numpy as np
import pytest

from gem.parallel import topology as tiers
from gem.parallel.assumptions import Assumptions
from gem.parallel.mesh import Group, Mesh
from gem.parallel.topology import COLLECTIVES, Topology

# 100 B/s in a host of 8, 10 B/s in a zone of 32, 5 B/s across; starts 1 s, hops 0.1, 1 and 10 s
HAND = Assumptions().with_values(
    {
        "zone_gpus": 32, "host_bandwidth": 100, "zone_bandwidth": 10, "oversubscription": 2, "base_latency": 1,
        "host_latency": 0.1, "zone_latency": 1, "cross_latency": 10, "message_overhead": 0.01,
    }
)  # fmt: skip
NET = Topology(HAND)
HOST, ZONE, SPARSE, ACROSS = Group("h", 8, 1), Group("z", 32, 1), Group("s", 4, 8), Group("x", 64, 1)


@pytest.mark.parametrize(
    ("op", "group", "expected"),
    [
        # in a host: start, 7 hops, and 7/8 of 800 B at 100 B/s
        ("all_gather", HOST, 1 + 0.7 + 7),
        ("reduce_scatter", HOST, 1 + 0.7 + 7),
        # a tree of 3 levels up and down beats 7 hops twice; bytes count twice
        ("all_reduce", HOST, 1 + 2 * 0.3 + 14),
        ("all_to_all", HOST, 1 + 0.1 + 7 * 0.01 + 7),
        # 4 hosts: 28 hops inside, 3 between; a host takes 3/4 of 800 B through 8 ports, 75 B each at 10 B/s;
        # NVLink with 31/32 of 800 B at 100 B/s is slower
        ("all_gather", ZONE, 1 + 2.8 + 3 + 7.75),
        # one member a host: no NVLink, 3/4 of 800 B through one port
        ("all_gather", SPARSE, 1 + 3 + 60),
        ("all_reduce", SPARSE, 1 + 2 * 2 + 120),
        # two zones: 56 + 6 + 1 hops; a host's 8 ports take 7/8 of 800 B at 10 B/s, slower than NVLink (7.875 s) and
        # than the uplinks, 1/2 of 800 B over 32 at 5 B/s
        ("all_gather", ACROSS, 1 + 5.6 + 6 + 10 + 8.75),
        # all-to-all: 56/64 of 800 B leave the host at 10 B/s, 32/64 of them the zone at 5 B/s
        ("all_to_all", ACROSS, 1 + 10 + 63 * 0.01 + 80),
    ],
)
def test_seconds_by_hand(op, group, expected):
    assert float(NET.seconds(op, 800, group)) == pytest.approx(expected)


def test_logarithmic_latency_is_a_switch():
    network = Topology(HAND.with_values({"log_latency": 1}))
    assert float(network.seconds("all_gather", 800, ZONE)) == pytest.approx(1 + 0.3 + 2 + 7.75)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_one_rank_and_no_bytes_cost_nothing(op):
    assert float(NET.seconds(op, 800, Group("one", 1, 1))) == 0
    assert float(NET.seconds(op, 0, ZONE)) == 0


@pytest.mark.parametrize("op", COLLECTIVES)
def test_time_grows_with_bytes_and_group_and_falls_with_bandwidth(op):
    for group in (HOST, ZONE, SPARSE, ACROSS):
        seconds = NET.seconds(op, np.array([1, 10, 1e3, 1e6]), group)
        assert (np.diff(seconds) > 0).all()
    ranks = [float(NET.seconds(op, 1e4, Group("g", 2**power, 1))) for power in range(8)]
    assert (np.diff(ranks) > 0).all()
    for name in ("host_bandwidth", "zone_bandwidth"):
        faster = Topology(HAND.with_values({name: 1e3}))
        assert all(faster.seconds(op, 1e4, g) <= NET.seconds(op, 1e4, g) for g in (HOST, ZONE, SPARSE, ACROSS))
    worse = Topology(HAND.with_values({"oversubscription": 20}))
    assert worse.seconds(op, 1e6, ACROSS) > NET.seconds(op, 1e6, ACROSS)
    assert worse.seconds(op, 1e6, ZONE) == NET.seconds(op, 1e6, ZONE)


@pytest.mark.parametrize("group", [HOST, ZONE, SPARSE, ACROSS, Group("e", 2, 1), Group("r", 2, 32)])
def test_bytes_are_conserved(group):
    """An all-reduce is a reduce-scatter and an all-gather; bytes of an all-to-all split over tiers add up; all ranks'
    ports together carry what every host lacks."""
    size, n = 960.0, group.size
    reduced, gathered = NET.traffic("all_reduce", size, group), NET.traffic("all_gather", size, group)
    assert all(reduced[tier] == pytest.approx(2 * gathered[tier]) for tier in tiers.TIERS)
    spread = NET.traffic("all_to_all", size, group)
    assert float(spread["host"] + spread["zone"]) == pytest.approx(tiers.sum_of("all_to_all", size, n))
    span = NET.span(group)
    entered = float(gathered["zone"]) * n
    assert entered == pytest.approx(span.hosts * size * (1 - 1 / span.hosts))
    assert float(gathered["cross_zone"]) * n == pytest.approx(span.zones * size * (1 - 1 / span.zones))


def test_spans():
    assert [NET.span(group).tier for group in (HOST, ZONE, SPARSE, ACROSS, Group("r", 2, 32))] == [
        "host", "zone", "zone", "cross_zone", "cross_zone",
    ]  # fmt: skip
    span = NET.span(Group("experts", 64, 2))
    assert (span.in_host, span.in_zone, span.hosts, span.zones) == (4, 16, 16, 4)
    # 24 GPUs are three hosts of one zone; a job of 96 would cut zones of 32 in the middle of a group
    assert NET.span(Group("g", 24, 1, job=24)).hosts == 3
    for group in (Group("g", 24, 1, job=96), Group("g", 3, 4), Group("g", 6, 1), Group("g", 12, 1), Group("g", 4, 3)):
        with pytest.raises(ValueError, match="straddle"):
            NET.span(group)
    with pytest.raises(ValueError, match="unknown; allowed: all_gather"):
        NET.seconds("broadcast", 1, HOST)


@pytest.mark.parametrize(
    ("plan", "options", "part"),
    [
        (Mesh(64, 64, expert=16), {}, "leaves the host"),
        (Mesh(128, 64, 2), {}, "leaves the zone"),
        (Mesh(64, 32, 2, 4), {"num_experts": 2}, "does not divide the 2 experts"),
        (Mesh(64, 64, model_parallel=4), {}, "more than a host holds"),
        (Mesh(8, 1, 8), {"params": 10e9}, "160 GB of parameters and states"),
    ],
)
def test_impossible_plans_are_refused_in_one_line(plan, options, part):
    with pytest.raises(ValueError, match=r"^plan: ") as error:
        tiers.check_plan(plan, NET, **options)
    assert part in str(error.value) and "allowed" in str(error.value) and "\n" not in str(error.value)


def test_possible_plans_pass():
    for plan in (Mesh(64, 64), Mesh(64, 32, 2, 2, 8), Mesh(1, 1)):
        tiers.check_plan(plan, NET, params=1e9, num_experts=8)


def test_volume_meets_bandwidth():
    """Of all nestings the cheapest has the large messages of expert parallelism inside the host, the small ones of the
    replicas outside; with the volumes exchanged the places are exchanged."""
    gather, small = [("all_gather", 1e6)], [("all_reduce", 1e2)]
    axes = {"replica": (8, small), "expert": (8, gather)}
    best, worst = tiers.orders(axes, NET)
    assert best.axes == ("expert", "replica") and best.tiers == ("host", "cross_zone")
    assert worst.seconds > 5 * best.seconds
    swapped = {"replica": (8, gather), "expert": (8, small)}
    assert tiers.orders(swapped, NET)[0].axes == ("replica", "expert")


def test_a_placement_says_why():
    volumes = {"shard": ("shard", [("all_gather", 1e3)] * 2), "replica": ("replica", [("all_reduce", 10.0)])}
    shard, replica = tiers.place(Mesh(64, 32, 2), NET, volumes)
    assert (shard.axis, shard.tier, replica.tier) == ("shard", "zone", "cross_zone")
    assert shard.bytes == pytest.approx(2 * 1e3 * 31 / 32) and replica.bytes == pytest.approx(10)
    assert "RoCE inside a zone" in shard.reason and "shards make the message small" in replica.reason
    assert math.isclose(shard.seconds, 2 * float(NET.seconds("all_gather", 1e3, ZONE)))
