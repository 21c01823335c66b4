"""Training: resume bit for bit, divergence named, optimisers as specified, and the command line's errors."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gem import checkpoint, evaluate, report, train
from gem.config import load_variants
from gem.dataset import Split
from gem.model import GEM
from gem.optim import Optimizers
from tests.gem import tiny

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data") / "d", rows=96)


@pytest.fixture(scope="module")
def data(folder):
    return train.Data.open(folder)


class Killed(Exception):
    pass


def run(data, output, steps=10, config=None, **kwargs):
    return train.train_seed(config or tiny.config(), data, 3, output, CPU, steps=steps, quiet=True, **kwargs)


def log_of(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("grad_norm")) for line in lines]


def equal_states(one: Path, two: Path) -> None:
    a, b = (torch.load(path / "checkpoint.pt", weights_only=True) for path in (one, two))

    def walk(x, y, where):
        assert type(x) is type(y), where
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), where
        elif isinstance(x, dict):
            assert list(x) == list(y), where
            for key in x:
                walk(x[key], y[key], f"{where}.{key}")
        elif isinstance(x, list):
            assert len(x) == len(y), where
            for index, (p, q) in enumerate(zip(x, y, strict=True)):
                walk(p, q, f"{where}[{index}]")
        else:
            assert x == y, where

    for key in ("model", "optimizers", "random", "losses", "step", "flops", "samples"):
        walk(a[key], b[key], key)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"balance": "bbs", "self_attention": "block", "pooling": "hsp", "compskip": "on"},
        {"precision": "mx_mlp", "mx_recipe": "stochastic"},  # draws random numbers in every step
    ],
)
def test_killed_and_resumed_equals_straight_bit_for_bit(data, tmp_path, monkeypatch, columns):
    config = tiny.config(model=dataclasses.replace(tiny.MODEL, width=32, expert_hidden=32), **columns)
    straight = run(data, tmp_path / "straight", config=config, keep_checkpoint=True)
    step = train.train_step
    monkeypatch.setattr(
        train, "train_step", lambda *args: (_ for _ in ()).throw(Killed) if args[4] == 7 else step(*args)
    )
    with pytest.raises(Killed):
        run(data, tmp_path / "killed", config=config, checkpoint_every=5)
    assert [entry[0] for entry in log_of(tmp_path / "killed")] == list(range(7))
    monkeypatch.setattr(train, "train_step", step)
    resumed = run(data, tmp_path / "killed", config=config, resume=True, keep_checkpoint=True)
    equal_states(tmp_path / "straight", tmp_path / "killed")
    assert log_of(tmp_path / "straight") == log_of(tmp_path / "killed")
    timing = ("time", "qps", "mfu", "peak", "eval_seconds")
    assert all(straight[k] == resumed[k] for k in straight if not k.startswith(timing))


def test_max_steps_caps_epochs_and_says_so(data, tmp_path, capsys):
    config = tiny.config(train={"epochs": 3, "max_steps": 2})
    result = train.train_seed(config, data, 0, tmp_path / "capped", CPU)
    assert result["identity"]["total_steps"] == 2 and [entry[0] for entry in log_of(tmp_path / "capped")] == [0, 1, 2]
    assert "tiny: 2 of 36 steps (train.max_steps)" in capsys.readouterr().err
    short = tiny.config(train={"max_steps": 99})
    assert train.train_seed(short, data, 0, tmp_path / "all", CPU)["identity"]["total_steps"] == 12
    assert "(train.max_steps)" not in capsys.readouterr().err
    assert run(data, tmp_path / "given", steps=3, config=config)["identity"]["total_steps"] == 3
    with pytest.raises(ValueError, match="train max_steps: 0 is out of range"):
        tiny.config(train={"max_steps": 0})


@pytest.mark.parametrize("call", ["write_json", "save"])
def test_a_full_disk_is_one_line_that_names_the_folder(folder, tmp_path, monkeypatch, capsys, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report if call == "write_json" else checkpoint, call, full)
    output = tmp_path / "out"
    words = ["--variant", "baseline_varlen", "--data", str(folder), "--output", str(output), "--seeds", "0"]
    assert train.main([*words, "--steps", "2", "--batch-size", "8", "--checkpoint-every", "1", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gem.train: no space left while writing under {output} (") and error.count("\n") == 1
    assert not (output / "summary.json").exists() and not list(output.rglob("result.json"))


def test_same_seed_same_run_other_seed_other_run(data, tmp_path):
    one, two = run(data, tmp_path / "one", steps=4), run(data, tmp_path / "two", steps=4)
    assert one["ne_ctr"] == two["ne_ctr"]
    other = train.train_seed(tiny.config(), data, 4, tmp_path / "other", CPU, steps=4, quiet=True)
    assert other["ne_ctr"] != one["ne_ctr"]


def test_a_finished_seed_is_kept_and_another_identity_is_refused(data, tmp_path):
    first = run(data, tmp_path / "a", steps=4, keep_checkpoint=True)
    again = run(data, tmp_path / "a", steps=4, resume=True)
    assert again == json.loads((tmp_path / "a" / "result.json").read_text()) and again["time_ms"] == first["time_ms"]
    with pytest.raises(ValueError, match="total_steps is 4, this run has 6"):
        run(data, tmp_path / "a", steps=6, resume=True)


def test_checkpoints_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"identity": {"a": 1}, "x": torch.ones(3)})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        checkpoint.save(path, {"identity": {"a": 1}, "x": torch.zeros(3)})
    assert torch.equal(checkpoint.load(path, {"a": 1})["x"], torch.ones(3))
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint.pt"]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="unreadable"):
        checkpoint.load(path, {"a": 1})


def corrupted(data, name, value):
    split = dataclasses.replace if dataclasses.is_dataclass(data.train) else None
    assert split is None
    made = Split(data.train.directory, "train")
    if name == "dense":
        made.dense = made.dense.copy()
        made.dense[:, 1] = value
    return train.Data(made, data.eval)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_input_stops_with_step_variant_and_tensor(data, tmp_path, value):
    with pytest.raises(
        train.DivergedError, match="variant tiny, seed 3, step 0: loss is nan; first bad tensor: input dense"
    ):
        run(corrupted(data, "dense", value), tmp_path)


def test_bad_parameter_and_bad_module_are_named(data):
    config = tiny.config()
    model = train.build(config, data, 0, CPU)
    batch, optimizers = data.train.batch(np.arange(16)), Optimizers(model, config, 10)
    module = model.layers[1].branches["impression_branch"].pooler.out
    handle = module.register_forward_hook(lambda m, a, output: output * math.inf)
    with pytest.raises(
        train.DivergedError,
        match=r"step 5: .*first bad tensor: output of layers\.1\.branches\.impression_branch\.pooler\.out",
    ):
        train.train_step(model, optimizers, batch, config, 5, 0)
    handle.remove()
    with torch.no_grad():
        model.layers[0].interaction.experts.experts[1].up.weight[0, 0] = math.nan
    with pytest.raises(train.DivergedError, match=r"parameter layers\.0\.interaction\.experts\.experts\.1\.up\.weight"):
        train.train_step(model, optimizers, batch, config, 5, 0)


def test_bad_gradient_is_named(data):
    config = tiny.config()
    model = train.build(config, data, 0, CPU)
    batch, optimizers = data.train.batch(np.arange(16)), Optimizers(model, config, 10)
    model.heads.logit["ctr"].weight.register_hook(lambda grad: grad * math.inf)
    before = model.heads.logit["ctr"].weight.detach().clone()
    with pytest.raises(train.DivergedError, match=r"gradient norm is .*gradient of heads\.logit\.ctr\.weight"):
        train.train_step(model, optimizers, batch, config, 0, 0)
    assert torch.equal(model.heads.logit["ctr"].weight, before)


def test_tables_are_updated_in_backward_by_row_wise_adagrad(data):
    config = tiny.config(train={"table_lr": 0.3})
    model = train.build(config, data, 0, CPU)
    twin = train.build(config, data, 0, CPU)
    Optimizers(model, config, 10)
    batch = data.train.batch(np.arange(16))
    for item in (model, twin):
        train.forward_loss(item, batch, config).backward()
    for name, table in model.table_parameters().items():
        old, grad = twin.table_parameters()[name].detach(), twin.table_parameters()[name].grad
        state = grad.square().mean(1, keepdim=True)
        assert table.grad is None
        torch.testing.assert_close(table.detach(), old - 0.3 * grad / (state.sqrt() + 1e-8), rtol=1e-4, atol=1e-6)
        untouched = (grad == 0).all(1)
        assert torch.equal(table[untouched], old[untouched])


def test_dense_gradients_are_clipped_by_their_global_norm(data):
    config = tiny.config(train={"clip_norm": 1e-3})
    model = train.build(config, data, 0, CPU)
    optimizers = Optimizers(model, config, 10)
    batch = data.train.batch(np.arange(16))
    train.forward_loss(model, batch, config).backward()
    norm = optimizers.clip()
    after = torch.stack([p.grad.norm() for p in model.dense_parameters().values()]).norm().item()
    assert norm > 1e-3 and after == pytest.approx(1e-3, rel=1e-3)


def with_optimizer(kind, **kwargs):
    config = tiny.config(**kwargs)
    return dataclasses.replace(config, implementations=dataclasses.replace(config.implementations, optimizer=kind))


@pytest.fixture
def one_thread():
    """AdamW scales even a gradient that is nothing but rounding (of a key's bias) to a full step: sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_the_step_that_waits_for_nothing_is_the_same_step(data, kind, one_thread):
    config = with_optimizer(kind, train={"clip_norm": 0.05})
    models = [train.build(config, data, 0, CPU) for _ in range(2)]
    optimizers = [Optimizers(model, config, 10) for model in models]
    for step in range(3):
        batch = data.train.batch(np.arange(step * 16, step * 16 + 16))
        waited = train.train_step(models[0], optimizers[0], batch, config, step, 0)
        queued = train.step_once(models[1], optimizers[1], batch, config, step)
        assert waited[1] > 0.05 and [x.item() for x in queued] == pytest.approx(waited, rel=1e-5)
    for name, value in models[0].named_parameters():
        torch.testing.assert_close(dict(models[1].named_parameters())[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_bad_step_and_all_after_it_leave_the_dense_parameters_alone(data, place):
    config = with_optimizer("fused")
    model = train.build(config, data, 0, CPU, fused_tables=True)
    optimizers, batch, bad = Optimizers(model, config, 10), data.train.batch(np.arange(16)), torch.zeros(())
    weight = model.heads.logit["ctr"].weight
    if place == "gradient":
        weight.register_hook(lambda grad: torch.where(bad > 0, grad * math.inf, grad))
    else:
        model.heads.register_forward_hook(
            lambda m, a, out: {k: v + torch.where(bad > 0, math.nan, 0.0) for k, v in out.items()}
        )
    kept = None
    for step in range(4):
        bad.fill_(float(step == 1))
        if step == 1:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        loss, norm = train.step_once(model, optimizers, batch, config, step)
        assert bool(loss.isfinite() & norm.isfinite()) == (step != 1)
        if step == 1:
            assert all(value.isfinite().all() for value in model.state_dict().values())
    for name, value in model.dense_parameters().items():
        assert torch.equal(value, kept[name]), name


def test_warm_up_is_linear_and_ends_at_the_rate(data):
    config = tiny.config(train={"warmup_share": 0.4})
    optimizers = Optimizers(GEM(config, data.train.schema), config, 10)
    assert [optimizers.rate_factor(step) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_training_learns_and_starts_at_the_base_rate(data):
    config = tiny.config(train={"dense_lr": 1e-2})
    model = train.build(config, data, 0, CPU)
    optimizers = Optimizers(model, config, 30)

    def ne():
        return evaluate.score(evaluate.predict(model, data.train, 32, CPU), data.train)["ne_ctr"].value

    start = ne()
    assert abs(start - 1) < 0.1
    for step in range(30):
        train.train_step(model, optimizers, data.train.batch(np.arange(96)), config, step, 0)
    assert ne() < start - 0.2


def test_scores_know_the_bayes_floor_and_undefined_tasks(data):
    scores = evaluate.score(evaluate.predict(GEM(tiny.config(), data.eval.schema), data.eval, 7, CPU), data.eval)
    assert {"ne_ctr", "ne_cvr", "auc_ctr", "calibration_cvr", "ne_bayes_ctr"} <= set(scores)
    clicks = data.eval.labels["ctr"] == 1
    p = np.full(data.eval.num_rows, 0.5, np.float32)
    rate = data.eval.labels["cvr"][clicks].mean()
    expected = math.log(2) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert evaluate.score({"cvr": p}, data.eval)["ne_cvr"].value == pytest.approx(expected, rel=1e-5)


def test_results_and_records(data, tmp_path, monkeypatch):
    from gem import record

    config = tiny.config()
    results = [
        train.train_seed(config, data, seed, tmp_path / f"seed{seed}", CPU, steps=6, quiet=True) for seed in (0, 1, 2)
    ]
    result = results[0]
    assert result["warmup_steps"] == 3 and result["timed_steps"] == 3 and 0 < result["mfu"] < 1
    assert result["flops_per_sample"] * 8 * 6 == pytest.approx(result["train_flops"])
    summary = report.summarise(config, data, results, CPU)
    assert (
        len(summary["seeds"]) == 3 and summary["spread"]["ne_ctr"]["n"] == 3 and summary["spread"]["ne_ctr"]["std"] > 0
    )
    report.write_json(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text())["variant"] == "tiny"
    assert "tiny: NE ctr" in report.one_line(summary) and "3 seeds" in report.one_line(summary)
    path = report.record(config, summary, tier="smoke", experiment="train", case="tiny", results=str(tmp_path))
    frame = record.read(path)
    rows = frame[(frame.metric == "ne_ctr") & (frame.subject == "tiny")]
    assert len(rows) == 4 and set(rows.impl) == {
        "attention:eager gdpa:eager norm:eager compile:eager optimizer:foreach"
    }
    assert {"qps", "mfu", "time_ms", "peak_mem_gib", "flops_per_sample", "params", "auc_ctr", "ne_cvr"} <= set(
        frame.metric
    )


def test_out_of_memory_is_a_record_and_a_line(folder, tmp_path, monkeypatch, capsys):
    """With --run the pipeline gets rows of status oom and goes on; without it the command fails."""
    from gem import record

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.\nMore lines")

    monkeypatch.setattr(train, "train_seed", full)
    monkeypatch.chdir(tmp_path)
    words = ["--variant", "baseline_padded", "--data", str(folder), "--batch-size", "64", "--quiet"]
    assert train.main([*words, "--output", "out"]) == 1
    assert train.main([*words, "--run", "smoke"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("baseline_padded does not fit at local batch 64: CUDA out of" in x for x in lines)
    (part,) = Path("results/smoke/records/parts").glob("*.csv")
    rows = record.read(part)
    assert set(rows.status) == {"oom"} and rows.p50.isna().all() and {"qps", "mfu", "ne_ctr"} <= set(rows.metric)
    assert not list(tmp_path.rglob("summary.json"))


def command(*arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "gem.train", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_command_line_trains_every_seed(folder, tmp_path):
    code, out, err = command(
        "--variant", "full", "--data", folder, "--output", tmp_path / "o", "--seeds", "0,1", "--steps", 3,
        "--batch-size", 16,
    )  # fmt: skip
    assert code == 0, err
    assert out.startswith("full: NE ctr") and "2 seeds" in out
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert [seed["seed"] for seed in summary["seeds"]] == [0, 1]
    assert len((tmp_path / "o" / "seed1" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--variant": "nope"}, ["unknown variant 'nope'", "baseline_padded"]),
        ({"--tier": "moon"}, ["unknown tier 'moon'", "smoke"]),
        ({"--preset": "huge"}, ["unknown preset 'huge'", "base"]),
        ({"--data": "/nowhere"}, ["/nowhere", "no manifest.json"]),
        ({"--seeds": "a"}, ["--seeds 'a'"]),
        ({"--seeds": "-1"}, ["seeds: -1"]),
        ({"--steps": "0"}, ["--steps 0"]),
        ({"--batch-size": "-4"}, ["batch_size: -4"]),
        ({"--batch-size": "200"}, ["too few rows", "200"]),
        ({"--output": None}, ["--output is needed"]),
    ],
)
def test_bad_arguments_are_one_line_before_any_work(folder, tmp_path, capsys, change, words):
    arguments = {"--variant": "full", "--data": str(folder), "--output": str(tmp_path / "o")} | change
    code = train.main([f"{name}={value}" for name, value in arguments.items() if value is not None])
    err = capsys.readouterr().err
    assert code == 1 and err.count("\n") == 1 and err.startswith("gem.train: ")
    assert all(word in err for word in words), err
    assert not (tmp_path / "o" / "summary.json").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shipped_variant_takes_a_step(data, dtype):
    """All rows of variants.tsv at the tiny size: a new row is a new variant."""
    rows = load_variants()
    for name, row in rows.items():
        config = tiny.config(**{k: v for k, v in row.items() if k in tiny.ROW})
        wide = dataclasses.replace(tiny.MODEL, width=32) if config.toggles.precision != "bf16" else tiny.MODEL
        config = dataclasses.replace(config, model=wide, dtype=dtype)
        model = train.build(config, data, 0, CPU)
        loss, norm = train.train_step(
            model, Optimizers(model, config, 4), data.train.batch(np.arange(12)), config, 0, 0
        )
        assert math.isfinite(loss) and norm > 0, name
