"""Timing of steps on a CPU: batches, the check before a time, the clock, parts, largest batch, and what is recorded."""

import dataclasses
import math
import time

import numpy as np
import pandas as pd
import pytest
import torch

from gem import config as configuration
from gem import record, train
from gem.bench import batches, farm, loop, model_work, parity, step, units
from gem.config import Checkpointing, Implementations
from gem.counts import Counts, linear_flops
from gem.optim import Optimizers
from gem.train import Data
from kernels import flops

CPU = torch.device("cpu")
DATA = configuration.load_tier("smoke")["data"]
OPTIONS = step.Options("smoke", "trial", batch=8, repeat_ms=1.0)


def split(rows=32, seed=0, table_rows=50):
    return batches.MemorySplit(batches.schema_of(DATA, table_rows), rows, DATA, seed)


@pytest.fixture(scope="module")
def config():
    return loop.with_batch(configuration.load("full", "smoke"), 8)


@pytest.fixture(scope="module")
def model(config):
    small = parity.small_split(DATA)
    return train.build(config, Data(small, small), 0, CPU)


# Batches


def test_rows_follow_the_tiers_law_and_the_readers_format():
    made = batches.MemorySplit(batches.schema_of(DATA, 5000), 4000, DATA, seed=1)
    longest = made.schema.events[0].max_length
    lengths = made.items["impression"].lengths
    assert longest == DATA["max_length"] == lengths.max()
    assert lengths.mean() == pytest.approx(DATA["fill"] * longest, rel=0.05)
    assert np.corrcoef(lengths, made.items["click"].lengths)[0, 1] > 0.9  # active users are active everywhere
    ids, counts = np.unique(made.items["impression"].values, return_counts=True)
    assert ids.min() >= 0 and ids.max() < 5000 and counts.max() > 20 * np.median(counts)
    batch = made.batch(np.arange(4))
    first = batch.ages["impression"][: int(batch.lengths["impression"][0])]
    assert (first > 0).all() and (first.diff() < 0).all()  # oldest first
    again = batches.MemorySplit(made.schema, 4000, DATA, seed=1)
    assert np.array_equal(again.items["click"].values, made.items["click"].values)


def test_tables_have_the_asked_size():
    schema = batches.schema_of(DATA, 5000)
    assert schema.sparse["item"][0] == 5000 and schema.sparse["user"][0] == 500 and schema.has_candidate


# The check before a time


def test_a_right_variant_passes_and_names_no_error(model, config):
    wrong, error = parity.problem(model, parity.whole_batch(parity.small_split(DATA), CPU), config)
    assert wrong is None and 0 <= error < 1e-4


def test_other_mathematics_fails(model, config):
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, gdpa_activation="silu"))
    small = parity.small_split(DATA)
    changed = train.build(other, Data(small, small), 0, CPU)
    wrong, _ = parity.problem(changed, parity.whole_batch(small, CPU), config)
    assert wrong and (wrong.startswith("loss") or "gradient of" in wrong)


def test_one_wrong_or_missing_gradient_fails(model, config):
    batch = parity.whole_batch(parity.small_split(DATA), CPU)
    name = "gradient of layers.0.summary.down.weight"

    def spoiled(change):
        def run(which, *rest):
            loss, found = parity.gradients(which, *rest)
            return (loss, found | change(found)) if which is model else (loss, found)

        return run

    wrong, _ = parity.problem(model, batch, config, spoiled(lambda found: {name: found[name] * 1.01}))
    assert wrong.startswith(f"{name}: error")
    wrong, _ = parity.problem(model, batch, config, spoiled(lambda found: {name: found[name] * math.nan}))
    assert wrong.startswith(name)
    wrong, _ = parity.problem(model, batch, config, spoiled(lambda found: {"gradient of nothing": found[name]}))
    assert "on one side only" in wrong


def test_low_precision_may_err_as_much_as_eager_of_that_precision():
    exact = {"a": torch.ones(100)}
    eager = {"a": torch.full((100,), 1.02)}
    assert parity.compare({"a": torch.full((100,), 1.07)}, [eager], exact, "bfloat16")[0] is None
    assert parity.compare({"a": torch.full((100,), 1.12)}, [eager], exact, "bfloat16")[0].startswith("a: error")


# FLOPs


def test_recomputed_flops_are_one_product_of_scores_and_checkpointed_layers(model, config):
    lengths = {"impression": torch.tensor([100, 3]), "click": torch.tensor([5, 0]), "conversion": torch.tensor([2, 2])}
    counts = Counts(2, lengths)
    scores = 0
    for layer in model.layers:
        for name, branch in layer.branches.items():
            own = lengths[name.removesuffix("_branch")]
            size = (branch.feed_forward or branch.attention).size
            heads = (size.num_heads, size.head_dim)
            if branch.feed_forward:
                scores += flops.gdpa(own, torch.full((2,), 16), *heads) // 2
            if branch.attention:
                scores += flops.block_attention(own, *heads) // 2
            if branch.pooler:
                scores += flops.jagged_attention(torch.full((2,), 8), own, *heads) // 2
    assert model_work.recomputed(model, config, counts) == scores > 0
    toggles = dataclasses.replace(config.toggles, checkpointing=Checkpointing.UNIFORM)
    uniform = dataclasses.replace(config, toggles=toggles)
    layers = sum(sum(layer.flops(counts).values()) for layer in model.layers)
    assert model_work.recomputed(model, uniform, counts) == scores + layers
    work = model_work.of_steps(model, config, [counts, counts])
    assert work.model == 2 * model.step_flops(counts) and work.done == work.model + 2 * scores
    assert work.tokens == 2 * 112 and work.samples == 4


# The clock


class Clock:
    """Calls everything; each call takes `ms`."""

    def __init__(self, ms=10.0):
        self.ms, self.calls = ms, 0

    def run(self, calls):
        for call in calls:
            call()
        self.calls += len(calls)
        return [self.ms] * len(calls)


def looped(config, rows=32):
    own = split(rows)
    model = train.build(config, Data(own, own), 0, CPU)
    return loop.Loop(model, Optimizers(model, config, 10), config, own, CPU)


def test_steps_are_real_training_and_fill_the_time(config):
    made = looped(config)
    before = made.model.heads.logit["ctr"].weight.clone()
    done = made.timed(2, 90.0, Clock())
    made.close()
    assert len(done.counts) == done.timing.n == 9 and done.timing.warmup == 2 and made.steps == 11
    assert done.samples_per_s() == pytest.approx((800.0,) * 3)  # 8 samples in 10 ms
    assert done.rate(range(9)) == pytest.approx((400.0, 160.0, 640.0))  # median and quantiles of the steps' own rates
    assert not torch.equal(before, made.model.heads.logit["ctr"].weight)
    totals = [item.events("impression") for item in done.counts]
    assert len(set(totals)) >= 3  # four batches of eight rows in rotation, shuffled anew in each epoch


def test_a_draft_is_whole_in_samples_and_small_in_events(config):
    data, settings = configuration.load_tier("smoke")["data"], {"batch": 32, "draft": 4}
    made = batches.draft(batches.schema_of(data, 100), settings, data)
    assert made.num_rows == 32
    for lengths in made.batch(np.arange(32)).lengths.values():
        assert (lengths[4:] == 0).all() and lengths[:4].sum() > 0


def test_few_steps_are_never_fewer_than_six(config):
    made = looped(config)
    assert made.timed(1, 1.0, Clock()).timing.n == loop.MIN_STEPS
    made.close()


@pytest.mark.parametrize(("captures", "more"), [(0, 1), (3, 4), (10**6, loop.MAX_CAPTURES)])
def test_warm_up_ends_with_a_step_that_captured_nothing(config, monkeypatch, captures, more):
    """Two steps were asked for, then one more at least wherever there are graphs; a capture a step does not go on."""
    made = looped(config)
    made.model.replay = type("Replay", (), {"made": {"first": None}})()

    def one(self):
        self.counts.append(Counts(1, {}))
        self.steps += 1
        if 2 < self.steps <= 2 + captures:
            made.model.replay.made[self.steps] = None

    monkeypatch.setattr(loop.Loop, "one", one)
    done = made.timed(2, 1.0, Clock())
    made.close()
    assert made.steps == 2 + more + loop.MIN_STEPS == 2 + more + done.timing.n


# Parts one by one


def test_parts_have_all_flops_of_a_step_and_run_alone(model, config):
    batch = split(8).batch(np.arange(8))
    found = units.parts_of(model, batch, config)
    assert [part.name for part in found] == ["embedding", "layer0", "layer1", "heads"]
    assert sum(part.flops for part in found) == model.step_flops(Counts(batch.size, batch.lengths))
    for part in found:
        part.call()
        part.call()
    assert all(value.grad is not None for value in model.layers[0].parameters())
    clock = Clock(5.0)
    timed = units.time_parts(found, CPU, 20.0, clock)
    assert [item.timing.p50 for item in timed] == [5.0] * 4
    whole = sum(part.flops for part in found)
    assert units.local_mfu(timed, 1e9) == pytest.approx(whole / 0.020 / 1e9)
    update = units.optimizer_part(model, Optimizers(model, config, 10))
    before = model.heads.logit["ctr"].weight.clone()
    update.call()
    assert not torch.equal(before, model.heads.logit["ctr"].weight)
    update.call()  # gradients are put back each time


def test_leaves_take_gradients_where_the_layers_inputs_did():
    plain, wanted = torch.ones(2), torch.ones(2, requires_grad=True)
    got = units.leaves({"a": plain, "b": [wanted * 2]})
    assert not got["a"].requires_grad and got["b"][0].requires_grad and got["b"][0].is_leaf


# Records


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results" / "trial" / "records" / "parts"


def rows_of(folder, name):
    # a process gives a run's name once, then name-2: the folder is the test's own
    (path,) = [path for path in folder.glob(f"{name}*.csv") if path.stem.rstrip("-0123456789") == name]
    return record.read(path).set_index(["subject", "metric", "phase"]).sort_index()


@pytest.fixture
def fast(monkeypatch):
    """A step that counts and does nothing; with FITS, one whose batch is larger runs out of memory."""
    limits = {"fits": 10**9}

    def run(model, optimizers, batch, config, number, seed):
        if batch.size > limits["fits"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        time.sleep(0.02)
        return 0.0, 0.0

    monkeypatch.setattr(train, "train_step", run)
    return limits


def test_a_variant_leaves_all_its_rows(place):
    task = step.StepTask("full", dataclasses.replace(OPTIONS, parts=("step", "units", "profile")))
    task.prepare()
    task.measure()
    rows = rows_of(place, "step-full")
    assert (rows.status == "ok").all() and set(rows.case) == {"smoke"}
    value = rows.p50
    assert value["full", "correct", "step"] == 1
    assert value["full", "qps", "step"] > 0 and 0 < value["full", "mfu", "step"] < value["full", "hfu", "step"]
    ratio = value["full", "mfu", "step"] / value["layers@full", "mfu", "step"]
    assert value["full", "scaling_ratio", "step"] == pytest.approx(ratio)
    parts = sum(value[f"{name}@full", "time_ms", "step"] for name in ("embedding", "layer0", "layer1", "heads"))
    scale = value["layers@full", "time_ms", "step"] / parts  # the mean batch against the one that was timed
    assert 0.3 < scale < 3
    both = value["layers@full", "time_ms", "step"] + value["optimizer@full", "time_ms", "step"]
    assert value["parts@full", "time_ms", "step"] == pytest.approx(both)
    shares = rows[rows.index.get_level_values("metric") == "time_share"].p50
    assert shares["full:gdpa"].iloc[0] > 0 and shares.drop("full:input").sum() >= 0.99
    assert not list(place.glob("step_largest*"))


def test_a_wrong_result_gets_no_time(place, monkeypatch, fast):
    monkeypatch.setattr(parity, "problem", lambda *rest: ("gradient of x: error 1, norm 1, allowed 0.1", 1.0))
    task = step.StepTask("baseline_varlen", OPTIONS)
    task.prepare()
    task.measure()
    rows = rows_of(place, "step-baseline_varlen")
    assert rows.loc[("baseline_varlen", "correct", "step")].p50 == 0
    bad = rows.loc[("baseline_varlen", "time_ms", "step")]
    assert bad.status == "failed" and "gradient of x" in bad.note and pd.isna(bad.p50) and len(rows) == 2


@pytest.mark.parametrize(("fits", "status", "largest"), [(8, "ok", 8), (16, "ok", 16), (4, "oom", 4)])
def test_the_largest_batch_is_looked_for_both_ways_and_oom_is_a_row(place, fast, fits, status, largest):
    fast["fits"] = fits
    task = step.StepTask("baseline_varlen", dataclasses.replace(OPTIONS, parts=("step", "largest")))
    task.prepare()
    task.measure()
    assert rows_of(place, "step-baseline_varlen").loc[("baseline_varlen", "time_ms", "step")].status == status
    found = rows_of(place, "step_largest-baseline_varlen")
    assert found.loc[("baseline_varlen", "local_batch", "model")].p50 == largest


def test_a_detail_that_fails_costs_its_own_rows_alone(place, fast, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(units, "parts_of", full)
    task = step.StepTask("baseline_varlen", dataclasses.replace(OPTIONS, parts=("step", "units", "largest")))
    task.prepare()
    task.measure()
    rows = rows_of(place, "step-baseline_varlen")
    assert rows.loc[("baseline_varlen", "time_ms", "step")].status == "ok"
    assert rows.loc[("layers@baseline_varlen", "time_ms", "step")].status == "oom"
    assert list(place.glob("step_largest*"))


def test_after_a_failed_capture_nothing_more_is_measured_in_that_process(place, fast, monkeypatch):
    def refused(*given):
        raise units.CaptureError("not captured: previous error")

    searched = []
    monkeypatch.setattr(units, "parts_of", refused)
    monkeypatch.setattr(step.StepTask, "search_largest", lambda *given: searched.append(given))
    task = step.StepTask("baseline_varlen", dataclasses.replace(OPTIONS, parts=("step", "units", "largest")))
    task.prepare()
    task.measure()
    assert rows_of(place, "step-baseline_varlen").loc[("baseline_varlen", "time_ms", "step")].status == "ok"
    row = rows_of(place, "step_largest-baseline_varlen").loc[("baseline_varlen", "time_ms", "step")]
    assert row.status == "failed" and "not captured" in row.note and not searched


def test_emulated_numerics_get_no_time(place):
    task = step.StepTask("mx_naive", OPTIONS)
    task.prepare()
    task.measure()
    row = rows_of(place, "step-mx_naive").iloc[0]
    assert row.status == "unsupported" and "emulated" in row.note


def test_a_lost_process_leaves_a_row_and_skipped_ones_an_exit_code(place, capsys, monkeypatch):
    lost = [farm.Outcome("full", "failed", "its process ended with exit code -11"), farm.Outcome("x", "skipped", "")]
    monkeypatch.setattr(farm, "run", lambda *rest, **more: lost)
    assert step.main(["--tier", "smoke", "--run", "trial", "--variants", "full", "--limit-s", "9"]) == 3
    row = rows_of(place, "step-full").iloc[0]
    assert row.status == "failed" and "exit code -11" in row.note
    assert "stopped after 9 s, before x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "nothing"], "--variants 'nothing'; allowed: baseline_padded, "),
        (["--parts", "units"], "--parts 'units'; allowed: step, and any of units, profile, largest"),
        (["--batch", "0"], "--batch 0; allowed: a number > 0"),
        (["--limit-s", "nan"], "--limit-s nan; allowed: a number > 0"),
        (["--preset", "huge"], "unknown preset 'huge'; allowed: smoke, quality, base, large"),
    ],
)
def test_bad_arguments_are_one_line(words, message, capsys):
    assert step.main(["--tier", "smoke", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_details_are_for_the_tiers_detailed_variants_unless_asked():
    assert step.StepTask("full", OPTIONS).parts == step.PARTS
    assert step.StepTask("baseline_varlen", OPTIONS).parts == ("step",)
    asked = dataclasses.replace(OPTIONS, parts=("step", "profile"))
    assert step.StepTask("baseline_varlen", asked).parts == ("step", "profile")


def test_statuses_of_failures():
    assert step.status_of(torch.OutOfMemoryError("CUDA out of memory"))[0] == "oom"
    assert step.status_of(RuntimeError("backend: CUDA out of memory. Tried"))[0] == "oom"
    assert step.status_of(ValueError("impl 'tlx' needs sm_90; allowed: triton"))[0] == "unsupported"
    assert step.status_of(RuntimeError("boom")) == ("failed", "RuntimeError: boom")


def test_the_reference_is_plain(config):
    plain = parity.reference_of(config, "float32")
    assert plain.implementations == Implementations() and plain.toggles.compskip == config.toggles.compskip
    assert linear_flops(2, torch.nn.Linear(3, 5)) == 60
