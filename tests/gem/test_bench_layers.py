"""Modules timed alone on a CPU: the check, the sums that variants make of them, and shares over all orders."""

import copy
import dataclasses
import itertools

import pytest
import torch

from gem import compile as compilation
from gem import config as configuration
from gem import record
from gem.bench import attribution, cells, farm, layers, step
from gem.bench.attribution import PLAYERS
from gem.bench.cell_store import Store
from gem.bench.cells import BASE, COLUMNS, PER_EVENT, Cell
from gem.bench.timing import Timing
from gem.counts import Counts
from gem.hardware import Peak
from gem.sequence import SelfAttentionBlock

CPU = torch.device("cpu")
ROWS = configuration.load_variants()
DATA = configuration.load_tier("smoke")["data"]
OPTIONS = step.Options("smoke", "trial", batch=8)


# Structure and attribution


def test_cells_of_a_variant_are_its_modules():
    from gem.config import PRESETS

    model = PRESETS["base"]
    plain = attribution.cells_of(ROWS[BASE], model, 3)
    own = Cell.of("self_attention", ROWS[BASE])
    assert [plain[own, event] for event in range(3)] == [4, 2, 2]
    assert plain[Cell("interaction"), 0] == plain[Cell("summary"), 0] == 4
    skipped = attribution.cells_of(ROWS["full"], model, 3)
    kinds = {kind: sum(n for (cell, _), n in skipped.items() if cell.kind == kind) for kind in COLUMNS}
    # alternate layers: a branch of four attends twice, branches of two once each
    assert kinds == {
        "feed_forward": 4, "self_attention": 4, "pooling": 4, "summary": 4, "interaction": 4
    }  # fmt: skip


def test_shapley_of_independent_players_is_what_each_adds():
    worth = {"a": 1.0, "b": 5.0, "c": -2.0}
    found = attribution.shapley(list(worth), lambda chosen: 7 + sum(worth[name] for name in chosen))
    assert found == pytest.approx(worth)


def test_shapley_is_the_mean_over_all_orders_and_adds_up():
    def value(chosen):
        return 10.0 * ("a" in chosen and "b" in chosen) + 3.0 * ("c" in chosen and "a" not in chosen)

    players = ["a", "b", "c"]
    means = dict.fromkeys(players, 0.0)
    for order in itertools.permutations(players):
        seen: set = set()
        for name in order:
            means[name] += (value(seen | {name}) - value(seen)) / 6
            seen.add(name)
    found = attribution.shapley(players, value)
    assert found == pytest.approx(means) and sum(found.values()) == pytest.approx(value(set(players)))


def test_players_are_the_columns_between_baseline_and_full_that_one_gpu_computes():
    changed = {name for name in ROWS[BASE] if ROWS[BASE][name] != ROWS["full"][name]}
    assert changed - {"variant", "group", "base", "note", "balance", "launch"} == set(PLAYERS)


def test_all_subsets_of_tier_gpu_come_from_few_cells():
    options = step.Options("gpu", "gpu")
    names = configuration.load_tier("gpu")["step"]["layer_variants"]
    found = layers.wanted_cells(options, names)
    assert len(found) <= 24  # one process each
    labels = [cell.labels(cell.config("gpu", None)) for cell in found.values()]
    assert len(set(labels)) == len(labels)  # no two measurements under one name


def test_the_compared_block_attentions_have_plain_names():
    def label(**columns):
        row = ROWS[BASE] | columns
        cell = Cell.of("self_attention", row)
        config = cell.config("gpu", None)
        impls = dataclasses.replace(config.implementations, block_attention=columns.pop("block"))
        return cell.labels(dataclasses.replace(config, implementations=impls))

    block = {"self_attention": "block", "attention_impl": "v4"}
    assert label(**block, rotary="fused", block="tlx") == ("self_attention_block", "tlx")
    assert label(**block, rotary="separate", block="triton") == ("self_attention_block", "triton")
    assert label(**block, rotary="separate", block="tlx")[1] == "tlx:separate_rotary"
    assert label(**block, rotary="fused", block="triton")[1] == "triton:fused_rotary"


# The check


@pytest.mark.parametrize("kind", list(COLUMNS))
def test_every_module_passes_its_check_and_fails_when_spoiled(kind, monkeypatch):
    config = Cell.of(kind, ROWS["full"]).config("smoke", None)
    inputs = cells.Inputs(config, cells.small_lengths(DATA), CPU)
    built = cells.build(kind, config, inputs)
    wrong, error = cells.problem(kind, built, config, DATA, CPU)
    assert wrong is None and error < 1e-4

    def spoiled(*given):
        result = built.module(*given)
        return result._replace(values=result.values * 1.01) if hasattr(result, "_replace") else result * 1.01

    wrong, _ = cells.problem(kind, dataclasses.replace(built, call=spoiled), config, DATA, CPU)
    assert wrong.startswith("output: error")


def test_other_mathematics_in_a_cell_is_found(monkeypatch):
    config = Cell.of("self_attention", ROWS[BASE]).config("smoke", None)
    inputs = cells.Inputs(config, cells.small_lengths(DATA), CPU)
    built = cells.build("self_attention", config, inputs)
    made = SelfAttentionBlock.__init__

    def windowed(self, config, size):
        made(self, config, size)
        self.kind = configuration.SelfAttention.WINDOW

    monkeypatch.setattr(SelfAttentionBlock, "__init__", windowed)  # the reference is built with it, `built` was not
    wrong, _ = cells.problem("self_attention", built, config, DATA, CPU)
    assert wrong is not None


# Records


def measured(ms: float, flops: int = 1000) -> layers.Measured:
    both, fwd = Timing(ms, ms, ms, 5, 2), Timing(ms / 4, ms / 4, ms / 4, 5, 2)
    return layers.Measured(
        fwd, both, flops, 1e-6, {"norm": 0.2 * ms, "gdpa": 0.3 * ms, "gemm": 0.4 * ms, "copies": 0.1 * ms}
    )


@pytest.fixture
def book():
    """Preset smoke: every module takes 1 ms on the first event type, 2 on the second, 3 on the third; block 0.5."""
    variants = ["baseline_varlen", "full"]
    jobs = layers.wanted_cells(OPTIONS, variants)
    found = {}
    for key, cell in jobs.items():
        factor = 0.5 if "block" in key else 1.0
        count = 3 if cell.kind in PER_EVENT else 1
        found[key] = {event: measured(factor * (event + 1)) for event in range(count)}
    fixed = {name: measured(4.0) for name in layers.FIXED}
    return jobs, layers.Book(OPTIONS, fixed, found)


def written(book, jobs, tmp_path):
    with record.Run("trial", "layers", name="layers", results=tmp_path, sources=("gem/counts.py",)) as run:
        layers.write(run, book, jobs, ["baseline_varlen", "full"], Peak("test", 1e9))
    path = next((tmp_path / "trial" / "records" / "parts").glob("*.csv"))
    return record.read(path).set_index(["subject", "metric", "phase"]).sort_index()


def test_sums_of_modules_are_the_variants(book, tmp_path):
    jobs, made = book
    rows = written(made, jobs, tmp_path)
    # per layer: three modules on events of depth 2, 1, 1; summary and experts in two layers; embedding and heads
    events = 3 * (2 * 1 + 1 * 2 + 1 * 3)
    total = events + 2 * 2 + 2 * 4
    assert rows.p50["baseline_varlen", "time_ms", "model"] == pytest.approx(total)
    assert rows.scope["baseline_varlen", "time_ms", "model"] == "modelled"
    flops = 1000 * (3 * 4 + 4 + 2)
    assert rows.p50["baseline_varlen", "mfu", "step"] == pytest.approx(flops / (total / 1e3) / 1e9)
    assert rows.p50["feed_forward@baseline_varlen", "time_ms", "step"] == pytest.approx(events / 3)
    # CompSkip: the first branch attends in layer 0 (0.5 ms) and feeds and pools in layer 1, the others feed and pool
    assert rows.p50["self_attention", "time_ms", "step"] == pytest.approx(0.5)
    assert rows.p50["feed_forward", "time_ms", "step"] == pytest.approx(1 + 2 + 3)
    assert set(rows.p50["self_attention_full[click]", "time_ms", "bwd"]) == {1.5}  # rotary apart and fused
    shares = {name: rows.p50[name, "time_share", "step"] for name in ("norms", "attention", "gemms", "elementwise")}
    assert shares == pytest.approx({"norms": 0.2, "attention": 0.3, "gemms": 0.4, "elementwise": 0.1})


def test_what_toggles_save_adds_up_to_the_difference(book, tmp_path):
    jobs, made = book
    rows = written(made, jobs, tmp_path)
    saved = {name: rows.p50[f"shapley:{name}", "time_ms", "model"] for name in PLAYERS}
    difference = made.milliseconds(ROWS[BASE]) - made.milliseconds(ROWS["full"])
    assert sum(saved.values()) == pytest.approx(difference) and saved["gdpa_impl"] == pytest.approx(0)
    assert saved["compskip"] > saved["self_attention"] > 0
    share = sum(rows.p50[f"shapley:{name}", "time_share", "model"] for name in PLAYERS)
    assert share == pytest.approx(1)


def test_a_module_without_a_time_leaves_no_sum_that_needs_it(book, tmp_path):
    jobs, made = book
    key = next(key for key in jobs if "block" in key)
    made.found[key] = {0: layers.Measured(status=("oom", "CUDA out of memory")), 1: measured(1.0), 2: measured(1.0)}
    rows = written(made, jobs, tmp_path)
    bad = rows.loc[("full", "mfu", "step")]
    assert bad.status == "failed" and "self_attention: oom" in bad.note
    assert rows.status["shapley", "time_ms", "model"] == "failed"
    assert rows.p50["baseline_varlen", "mfu", "step"] > 0
    assert "oom" in set(rows.status)


def test_a_module_without_a_profile_keeps_its_time(book, tmp_path, monkeypatch, capsys):
    jobs, made = book
    key = next(key for key in jobs if key[0] == "summary")
    made.found[key][0].parts = {}
    rows = written(made, jobs, tmp_path)
    assert rows.p50["baseline_varlen", "mfu", "step"] > 0
    assert "norms" not in rows.index.get_level_values("subject")
    monkeypatch.setattr(layers.components, "profiled", lambda *given: 1 / 0)
    assert layers.profile(lambda: None, CPU) == {} and "profiler: ZeroDivisionError" in capsys.readouterr().err


def test_a_cell_is_checked_and_timed_on_every_event_type(monkeypatch):
    task = layers.CellTask(Cell.of("pooling", ROWS["full"]), OPTIONS)
    task.prepare()
    found = task.measure()
    assert set(found) == {0, 1, 2} and all(item.status[0] == "ok" for item in found.values())
    assert all(item.both.p50 > 0 and item.flops > 0 and item.parts for item in found.values())
    monkeypatch.setattr(cells, "problem", lambda *rest: ("output: error 1", 1.0))
    assert {item.status for item in task.measure().values()} == {("failed", "output: error 1")}


def test_embedding_and_heads_come_from_a_model_whose_layers_are_not_compiled(monkeypatch):
    build = layers.train.build

    def with_compiled_layers(*given):
        model = build(*given)
        for layer in model.layers:
            compilation.compile_module(layer.interaction, "eager")
        return model

    monkeypatch.setattr(layers.train, "build", with_compiled_layers)
    task = layers.FixedTask(OPTIONS)
    task.prepare()
    assert not any(compilation.is_compiled(layer.interaction) for layer in task.model.layers)
    found = task.measure()
    assert set(found) == set(layers.FIXED)
    whole = task.model.flops(Counts(8, next(task.split.epoch(8, 0, 0)).lengths))
    assert {name: item.flops for name, item in found.items()} == {name: 3 * whole[name] for name in layers.FIXED}
    assert all(item.both.p50 > 0 for item in found.values())


def test_what_was_timed_before_a_run_was_stopped_is_taken_from_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEM_RESUME", "1")
    command = ["--tier", "smoke", "--run", "trial", "--batch", "8", "--cells", "summary*"]

    def rows():
        """Of a run of the command: those with a number."""
        assert layers.main(command) == 0
        (part,) = (tmp_path / "results/trial/records/parts").glob("*.csv")  # a process gives each run a name
        frame = record.read(part)
        part.unlink()
        return frame[frame.status == "ok"].drop(columns=["run_id"]).astype(str).to_dict("records")

    first = rows()
    (kept,) = (tmp_path / "results/trial/layers").iterdir()
    assert {row["metric"] for row in first} >= {"time_ms", "mfu", "correct"}

    def never(self):
        raise RuntimeError("measured again")

    monkeypatch.setattr(layers.CellTask, "measure", never)
    assert rows() == first
    assert "summary: measured before" in capsys.readouterr().out

    def measures_again():
        return not rows()

    whole = kept.read_text()
    kept.write_text(whole[:-9])  # damaged
    assert measures_again()
    kept.write_text(whole.replace('"n": 5', '"n": 6', 1).replace('"p50": ', '"p50": 9', 1))  # whole JSON, other numbers
    assert measures_again()
    kept.write_text(whole)
    monkeypatch.setenv("GEM_RESUME", "0")
    assert measures_again()
    monkeypatch.setenv("GEM_RESUME", "1")
    monkeypatch.setattr(layers, "source_digest", lambda *sources: "other")
    assert measures_again()


def test_a_cell_that_failed_is_not_kept(tmp_path):
    store = Store.of(tmp_path, "0", {})
    store.keep("a", {0: layers.Measured(status=("oom", "too large"))})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("section", ["implementations", "data", "preset", "step"])
def test_results_of_another_tier_file_are_not_taken(section, monkeypatch):
    tier = configuration.load_tier("gpu")
    other = copy.deepcopy(tier)
    if section == "preset":
        other["preset"] = "large"
    else:
        part, name, value = {
            "implementations": (other["implementations"]["gdpa"], "tlx", "triton"),
            "data": (other["data"], "length_cv", 9.0),
            "step": (other["step"], "part_ms", 1),
        }[section]
        part[name] = value
    options = step.Options("gpu", "trial")
    keys = []
    for current in (tier, tier, other):
        monkeypatch.setattr(configuration, "load_tier", lambda *given, current=current: current)
        keys.append(layers.store_of(options, CPU).key)
    assert keys[0] == keys[1] != keys[2]


def test_a_disk_that_takes_no_file_costs_no_time_that_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    Store.of(tmp_path / "file", "0", {}).keep("a", {0: measured(1.0)})
    assert "a: not kept: " in capsys.readouterr().err


@pytest.mark.parametrize("kind, variant, rows", [
    ("feed_forward", BASE, 8), ("self_attention", BASE, 16), ("pooling", BASE, 16), ("summary", BASE, 16)
])  # fmt: skip
def test_only_modules_that_pad_are_compiled_on_fewer_samples(kind, variant, rows, monkeypatch):
    sizes, made = [], cells.Inputs

    def seen(config, lengths, device):
        sizes.append({len(value) for value in lengths.values()})
        return made(config, lengths, device)

    task = layers.CellTask(Cell.of(kind, ROWS[variant]), step.Options("smoke", "trial", batch=16))
    task.settings = task.settings | {"draft": 2}
    monkeypatch.setattr(cells, "Inputs", seen)
    task.prepare()
    assert sizes[0] == {rows}


def test_a_sum_names_the_module_that_was_not_timed(book, tmp_path):
    jobs, made = book
    key = next(key for key in jobs if key[0] == "pooling")
    lost = farm.Outcome("x", "skipped", "not ready when time was up")
    made.found[key] = layers.cells_found(lost, layers.events_of(jobs[key], OPTIONS))
    assert made.problem(ROWS[BASE]) == "pooling: failed: not ready when time was up"
    assert written(made, jobs, tmp_path).status["shapley", "time_ms", "model"] == "failed"


def test_a_lost_cell_is_a_failed_cell():
    lost = layers.cells_found(farm.Outcome("x", "failed", "its process ended with exit code -9"))
    assert lost[0].status == ("failed", "its process ended with exit code -9")


def test_bad_arguments_are_one_line(capsys):
    assert layers.main(["--tier", "smoke", "--cells", "nothing-*"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --cells 'nothing-*'; allowed: a glob over feed_forward-") and error.count("\n") == 1
