"""Step times of jobs: closed forms of tiny workloads, limits, conservation, and code breaks that must be noticed."""

import dataclasses
import time

import numpy as np
import pytest
import torch

from gem.parallel import simulate as model
from gem.parallel.assumptions import Assumptions
from gem.parallel.mesh import Mesh
from gem.parallel.simulate import Scenario, Timeline, scenario, simulate
from gem.parallel.topology import sum_of
from gem.parallel.workload import Unit, Workload, bbs_loads, of_preset, rank_loads, table_traffic

# One FLOP/s and one byte/s: a unit of 1 FLOP a sample takes 1 s forward; a gather of P parameters, n ranks of a host,
# P (n - 1) / n seconds. No latency, no SMs taken.
PLAIN = Assumptions().with_values(
    {
        "host_bandwidth": 1, "zone_bandwidth": 1, "oversubscription": 1, "base_latency": 0, "host_latency": 0,
        "zone_latency": 0, "cross_latency": 0, "message_overhead": 0, "peak_flops": 1, "local_mfu": 1, "contention": 0,
        "prefetch": 1, "param_bytes": 1, "local_batch": 1, "hbm_bytes": 1e12,
    }
)  # fmt: skip
DEFAULT = Assumptions()


def work(*units: Unit, inputs=0.0, outputs=0.0, lookup=0.0) -> Workload:
    return Workload("tiny", units, inputs, outputs, 8, lookup, 0.0)


def unit(name="a", params=0.0, flops=1.0, experts=False, module="heads") -> Unit:
    return Unit(name, params, {module: flops}, experts)


def equal(gpus: int) -> np.ndarray:
    return np.ones((1, gpus))


def run(job_work, plan, value=PLAIN, *, loads=None, generation="v1", sm_free=False):
    job = Scenario(plan, generation, "none", sm_free)
    return simulate(job_work, job, value, loads=equal(plan.gpus) if loads is None else loads)


def test_one_gpu_does_not_communicate():
    for preset in ("base", "large"):
        result = simulate(
            of_preset(preset), Scenario(Mesh(1, 1), "v1", "none"), DEFAULT.with_values({"hbm_bytes": 1e12})
        )
        assert result.communication == 0 and result.sent == {} and result.exposed == pytest.approx(0, abs=1e-12)
        assert result.scaling_ratio == pytest.approx(1) and result.mfu == pytest.approx(DEFAULT["local_mfu"])


def test_fsdp_by_hand():
    """Two units of 1 s forward and 2 s backward on 2 GPUs, gathers of 1 s (2 parameters, half of them missing).

    Forward: gathers until 1 and 2, compute 1-2 and 2-3. Backward: gather of b until 4, of a until 5; b computes 4-6,
    its scatter 6-7; a computes 6-8, its scatter 8-9.
    """
    result = run(work(unit("a", 2), unit("b", 2)), Mesh(2, 2))
    assert (result.step, result.mean_compute, result.exposed) == pytest.approx((9, 6, 3))
    assert result.communication == pytest.approx(6)


def test_without_prefetch_every_gather_is_exposed():
    """Each gather waits for the compute before it, and in backward for the scatter before it too."""
    value = PLAIN.with_values({"prefetch": 0})
    result = run(work(unit("a", 2), unit("b", 2)), Mesh(2, 2), value)
    # forward until 4; b: gather 4-5, compute 5-7, scatter 7-8; a: gather queues 8-9, compute 9-11, scatter 11-12
    assert result.step == pytest.approx(12)


def test_replicas_reduce_a_shard():
    """2 x 2: the scatter of 2 bytes is 1 s, the all-reduce of the 1 byte that is left another 1 s."""
    result = run(work(unit("a", 2)), Mesh(4, 2, 2))
    assert result.sent == pytest.approx(
        {"shard:all_gather": 2, "shard:reduce_scatter": 1, "replica:all_reduce": 1.0}
    )  # fmt: skip
    # gather 0-1, compute 1-2, gather 2-3, compute 3-5, scatter 5-6, all-reduce 6-7
    assert result.step == pytest.approx(7)


def test_replicas_alone_wait_for_nothing_but_the_end():
    """DDP on 2 GPUs: no gathers; the all-reduce of b (2 bytes, 2 s) runs beside a's backward, that of a behind it."""
    result = run(work(unit("a", 2), unit("b", 2)), Mesh(2, 1, 2))
    assert result.step == pytest.approx(2 + 4 + 2) and set(result.sent) == {"replica:all_reduce"}


def test_expert_parallelism_by_hand():
    """4 ranks, 2-way: half the parameters are gathered over 2 ranks, activations travel four times."""
    value, plan = PLAIN, Mesh(4, 4, expert=2)
    tiny = work(unit("x", 8, experts=True), inputs=3.0, outputs=1.0)
    result = run(tiny, plan, value)
    # parameters: 4 bytes over 2 ranks, 2 s a gather; forward in: 2 x 3 bytes gathered, 3 s; out: 1 byte, 0.5 s
    forward = 2 + 3 + 1 + 0.5
    backward = 2 + 0.5 + 2 + 3 + 2  # gather, gradients of outputs, compute, gradients of inputs, scatter
    assert result.step == pytest.approx(forward + backward)
    sent = {"expert_shard:all_gather": 4, "expert:all_gather": 3.5, "expert:reduce_scatter": 3.5}
    assert result.sent == pytest.approx(sent | {"expert_shard:reduce_scatter": 2})


def test_the_sequence_of_the_source_16_by_2():
    """Forward AG(parameters, 16), AG(activations, 2), RS(outputs, 2); backward AG(parameters, 16), AG(output gradients,
    2), RS(input gradients, 2), RS(parameter gradients, 16), with the sizes that follow."""
    value, plan = PLAIN.with_values({"local_batch": 10, "param_bytes": 2}), Mesh(32, 32, expert=2)
    found = model.messages(work(unit("x", 100, experts=True), inputs=6.0, outputs=4.0), plan, value)
    assert [item[0] for item in found] == [
        "expert_shard", "expert", "expert", "expert_shard", "expert", "expert", "expert_shard",
    ]  # fmt: skip
    assert [item[2] for item in found] == [
        "all_gather", "all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter",
    ]  # fmt: skip
    # one of two experts: 100 parameters of 2 bytes / 2; 2 x 10 samples of 6 bytes; half of 2 x 10 samples of 4 bytes
    assert [item[3] for item in found] == [100, 120, 40, 100, 40, 120, 100]
    assert plan.group("expert_shard").size == 16 and plan.group("expert").size == 2


@pytest.mark.parametrize("plan", [Mesh(64, 64), Mesh(64, 16, 4), Mesh(64, 16, 4, 2), Mesh(32, 32, expert=2)])
def test_what_is_sent_is_what_the_messages_say(plan):
    """Conservation: bytes booked while time runs are those of the list of messages, axis by axis."""
    large = of_preset("large")
    result = simulate(large, Scenario(plan, "v1", "none"), DEFAULT, loads=equal(plan.gpus))
    listed: dict[str, float] = {}
    for axis, _, op, size in model.messages(large, plan, DEFAULT):
        key = f"{axis}:{op}"
        listed[key] = listed.get(key, 0.0) + sum_of(op, size, plan.group(axis).size)
    dense = {key: value for key, value in result.sent.items() if not key.startswith(("model_parallel", "table"))}
    assert dense == pytest.approx(listed)


def test_bytes_of_parameters_are_those_of_the_model():
    from gem import config as configuration
    from gem.model import GEM
    from gem.parallel.workload import TIER, VARIANT
    from gem.summary import synthetic_schema

    schema = synthetic_schema(configuration.load_tier(TIER)["data"])
    with torch.device("meta"):  # 34 GB otherwise
        built = GEM(configuration.load(VARIANT, TIER, "large"), schema, "meta")
    large = of_preset("large")
    assert large.params == sum(value.numel() for value in built.dense_parameters().values())
    assert large.flops == pytest.approx(52122.45e6, rel=1e-4)
    sent = simulate(large, Scenario(Mesh(64, 64), "v1", "none"), DEFAULT, loads=equal(64)).sent
    assert sent["shard:all_gather"] == pytest.approx(2 * 2 * large.params * 63 / 64)
    assert sent["shard:reduce_scatter"] == pytest.approx(2 * large.params * 63 / 64)


def test_a_step_lasts_as_long_as_its_slowest_rank():
    loads = np.array([[0.5, 1.0, 1.5, 1.0]])
    tiny = work(unit("a", 4, module="self_attention"))
    result = run(tiny, Mesh(4, 4), loads=loads)
    assert (result.max_compute, result.mean_compute) == pytest.approx((4.5, 3))
    assert result.skew == pytest.approx(1.5) and result.step >= result.max_compute
    # modules that do not follow the length do not see the load
    assert run(work(unit("a", 4)), Mesh(4, 4), loads=loads).skew == pytest.approx(1)


def test_the_parts_make_the_step():
    for without in ((), ("2d",), ("ep",), model.DIMENSIONS):
        result = simulate(of_preset("large"), scenario(512, without), DEFAULT)
        assert result.step == pytest.approx(result.max_compute + result.contention + result.exposed)
        assert result.exposed > 0 and result.contention > 0 and result.max_compute > result.mean_compute
        flops = 3 * of_preset("large").flops * DEFAULT["local_batch"]
        assert result.mfu == pytest.approx(flops / (result.step * DEFAULT["peak_flops"]), rel=1e-6)
        longest = max(result.max_compute, 0.0)
        assert longest <= result.step <= result.max_compute + result.contention + result.communication + 1e-9


def test_sms_lent_to_collectives_cost_what_is_assumed():
    """A gather of 1 s beside a unit of 10 s with 10 % loss: 0.1 s; copy engines hold 1 of 24 SMs."""
    value = PLAIN.with_values({"contention": 0.1, "prefetch": 1})
    tiny = work(unit("a", 0, 10), unit("b", 2, 10))
    held, free = (run(tiny, Mesh(2, 2), value, sm_free=free) for free in (False, True))
    # forward: b's gather beside a; backward: b's scatter beside a
    assert held.contention == pytest.approx(0.1 + 0.1)
    assert free.contention == pytest.approx(0.1 / 24 + 0.1)


def test_slower_networks_never_help():
    large = of_preset("large")
    for without in model.DENSE.values():
        job = scenario(2048, without)
        for name, factors in (
            ("zone_bandwidth", (4, 2, 1, 0.5)),
            ("oversubscription", (1, 2, 4)),
            ("zone_latency", (1, 4)),
        ):
            steps = [simulate(large, job, DEFAULT.with_values({name: DEFAULT[name] * f})).step for f in factors]
            assert (np.diff(steps) >= 0).all(), (without, name, steps)


def test_dimensions_at_thousands_of_gpus():
    """Directions that the model's constants imply: groups shrink the hops of a gather; one expert a rank halves its
    bytes; batches of equal load end the wait."""
    large = of_preset("large")
    full, flat = simulate(large, scenario(4096), DEFAULT), simulate(large, scenario(4096, ("2d",)), DEFAULT)
    assert full.exposed < flat.exposed
    plain = simulate(large, scenario(4096, ("ep",)), DEFAULT)
    ep = sum(size for key, size in full.sent.items() if key.startswith(("shard", "expert_shard")))
    assert ep < 0.6 * sum(size for key, size in plain.sent.items() if key.startswith("shard"))
    assert full.skew < simulate(large, scenario(4096, ("balance",)), DEFAULT).skew


def test_from_8_to_8192_gpus_in_seconds():
    large = of_preset("large")
    start = time.perf_counter()
    results = [simulate(large, scenario(2**power), DEFAULT) for power in range(3, 14)]
    assert time.perf_counter() - start < 20
    assert all(0 < result.scaling_ratio <= 1 for result in results)


def test_loads_come_from_the_length_law():
    none, bbs = rank_loads(256, 1024, "none", 64), rank_loads(256, 1024, "bbs", 64)
    assert none.mean() == pytest.approx(1, abs=0.01) and bbs.mean() == pytest.approx(1, abs=0.01)
    peaks = [(loads.max(1) / loads.mean(1)).mean() for loads in (none, bbs)]
    assert 1.08 < peaks[0] < 1.2 and peaks[1] < 1 + 0.7 * (peaks[0] - 1)
    assert np.array_equal(rank_loads(64, 1024, "none", 64), none[:, :64])
    with pytest.raises(ValueError, match="pool"):
        rank_loads(8, 1024, "bbs", 12)
    # every sub-batch lands in one batch
    load = np.random.default_rng(0).random((3, 16 * 128 * 2)).astype(np.float32)
    assert bbs_loads(load, 512, 16).sum() == pytest.approx(load.sum(), rel=1e-5)


def test_generations_of_sparse_parallelism():
    v1, v2, v3 = (table_traffic(name, 2048, 256) for name in ("v1", "v2", "v3"))
    assert v1.skew > 1.5 > 1.2 > v2.skew == v3.skew
    assert v2.resident == pytest.approx(8 * v3.resident) and v3.peak == pytest.approx(v3.resident + v2.resident)
    assert (v1.moved, v2.moved) == (0, pytest.approx(2 * 7 / 8 * v2.resident))


def test_copies_of_tables_cost_what_does_not_fit_beside_the_step():
    """512 GPUs, 256 shards: V2 moves 2 x 1/2 of a shard, V3 3 x 1/2, at 1 GB/s; 3 s of compute hide a part."""
    value, shard = PLAIN.with_values({"host_bandwidth": 1e9}), table_traffic("v2", 512, 256).resident / 1e9
    for generation, transfers in (("v2", 2), ("v3", 3)):
        result = run(work(unit("a")), Mesh(512, 512, model_parallel=256), value, generation=generation)
        assert result.exposed == pytest.approx(transfers / 2 * shard - 3)
        assert result.sent == {"table_replica:copies": pytest.approx(transfers / 2 * shard * 1e9)}


# Code breaks; each must make a named check fail.


def broken_queue(self, op, size, group, ready):
    """The all-reduce over replicas is forgotten."""
    return (0.0, ready) if op == "all_reduce" else Timeline_queue(self, op, size, group, ready)


Timeline_queue = Timeline.queue

MUTANTS = {
    "forgets the replica all-reduce": (Timeline, "queue", broken_queue, test_replicas_reduce_a_shard),
    "ranks do not wait for each other": (model, "synchronised", lambda times, group: times, None),
    "gathers whole experts": (
        model, "parameter_bytes", lambda unit, plan, value: (unit.params * value["param_bytes"], plan.group("shard")),
        test_expert_parallelism_by_hand,
    ),
    "activations stay": (
        model, "activation_bytes", lambda work, plan, value, backward: (0.0, 0.0), test_expert_parallelism_by_hand,
    ),
    "backward as cheap as forward": (
        Timeline, "seconds_of", lambda self, unit, factor, old=Timeline.seconds_of: old(self, unit, 1.0),
        test_fsdp_by_hand,
    ),
    "copy engines hold 24 SMs": (
        Timeline, "loss", lambda self, op: self.value["contention"], test_sms_lent_to_collectives_cost_what_is_assumed,
    ),
}  # fmt: skip


def test_a_collective_waits_for_the_last_rank_of_its_group():
    """Rank 0 of 2 computes 3 s before b's gather, rank 1 1 s: without prefetch both get b 1 s after the slower one."""
    value = PLAIN.with_values({"prefetch": 0})
    tiny = work(unit("a", 0, module="self_attention"), unit("b", 2, 0.0))
    result = run(tiny, Mesh(2, 2), value, loads=np.array([[1.5, 0.5]]))
    # forward: a until 1.5, gather until 2.5; backward: gather until 3.5, scatter until 4.5, a (3 s) until 6.5
    assert result.step == pytest.approx(6.5)
    late = run(
        work(unit("b", 2, 0.0), unit("a", 0, module="self_attention")), Mesh(2, 2), value, loads=np.array([[1.5, 0.5]])
    )
    # forward: gather until 1, a until 2.5; backward: a until 5.5, gather until 6.5, scatter until 7.5
    assert late.step == pytest.approx(7.5)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name, monkeypatch):
    owner, attribute, broken, check = MUTANTS[name]
    (check or ranks_wait)()
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(AssertionError):
        (check or ranks_wait)()


def ranks_wait():
    """Time of the light rank alone: it must wait for the heavy one in the gather."""
    job = Scenario(Mesh(2, 2), "v1", "none", False)
    line = Timeline(work(unit("a", 2, 0.0)), job, PLAIN, model.Topology(PLAIN), np.ones((1, 2)))
    line.compute = np.array([[3.0, 1.0]])
    line.queue("all_gather", 2, job.plan.group("shard"), line.compute)
    assert line.link.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: scenario(64, ("tensor",)), "allowed: 2d"),
        (lambda: Scenario(Mesh(8, 8), "v4"), "allowed: v1"),
        (lambda: Scenario(Mesh(8, 8, model_parallel=4), "v1"), "one copy of the tables"),
        (lambda: simulate(of_preset("base"), scenario(8), DEFAULT, loads=np.ones((1, 4))), "loads have shape"),
        (lambda: DEFAULT.with_values({"bandwidth": 1}), "unknown; allowed: host_gpus"),
        (lambda: DEFAULT.with_values({"zone_bandwidth": 0}), "above 0"),
        (lambda: DEFAULT.with_values({"local_mfu": 1.5}), "at most 1"),
        (lambda: DEFAULT.with_values({"oversubscription": 0.5}), "at least 1"),
        (lambda: DEFAULT.with_values({"prefetch": 1.5}), "whole number"),
    ],
)
def test_bad_input_is_one_line(call, part):
    with pytest.raises(ValueError) as error:
        call()
    assert part in str(error.value) and "\n" not in str(error.value)


def test_the_command_line_prints_the_decomposition_and_its_standing(capsys, tmp_path):
    arguments = ["--gpus", "512", "--plan", "fsdp=128,ddp=4,ep=2", "--measured", str(tmp_path)]
    assert model.main(arguments) == 0
    out = capsys.readouterr().out
    assert "cheapest nesting from the inside out: expert (host), expert_shard (zone), replica" in out
    assert "E2E MFU" in out and "expert_shard" in out and out.strip().splitlines()[-1].startswith("not calibrated: ")
    changed = model.main([*arguments, "--set", "zone_bandwidth=10e9", "--sparse", "v2", "--gathers", "sm"])
    assert changed == 0 and capsys.readouterr().out != out
    assert model.main(["--assumptions", "--measured", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(row.name in printed and row.source in printed for row in DEFAULT.rows)
    with pytest.raises(ValueError, match="product of 4096 GPUs"):
        model.main(["--gpus", "4096", "--plan", "fsdp=128,ddp=8", "--measured", str(tmp_path)])
    with pytest.raises(ValueError, match="no such folder"):
        model.main(["--measured", str(tmp_path / "none")])


def test_results_are_repeatable():
    first, second = (simulate(of_preset("base"), scenario(64), DEFAULT) for _ in range(2))
    assert dataclasses.asdict(first) == dataclasses.asdict(second)


@pytest.mark.parametrize("preset", ["base", "large"])
def test_activations_of_expert_parallelism_are_those_of_t05(preset):
    """The table of the report counts the same bytes from the preset's sizes alone."""
    from figures import tab_05_dense
    from gem.config import PRESETS

    plan = Mesh(128, 128, expert=tab_05_dense.EXPERTS)
    calls = model.volumes(of_preset(preset), plan, DEFAULT)["expert"][1]
    sent = sum(sum_of(op, size, plan.expert) for op, size in calls)
    assert sent / 2**20 == pytest.approx(tab_05_dense.activations(dataclasses.asdict(PRESETS[preset])))
