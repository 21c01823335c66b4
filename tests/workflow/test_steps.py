"""Jobs that time steps and layers: what they depend on, and what a thaw leaves to measure."""

import itertools
import json

import pytest

from gem import record, record_store
from gem.workflow import ROOT, load, read_sheet


def test_steps_depend_on_data_sizes_and_rows_and_kernels_do_not():
    settings = load({"tier": "gpu"})
    for name in ("step", "layers", "memory"):
        sections = settings.bench_sections(settings.benches[name])
        assert {"data", "step", "rows"} <= set(sections), name
        assert {row["variant"] for row in sections["rows"]} >= {"baseline_padded", "full", "rung_gdpa"}
    assert {"data", "step"}.isdisjoint(settings.bench_sections(settings.benches["kernels"]))


def test_every_measuring_rule_states_eight_minutes_at_most_and_its_command_ends_before():
    rows = read_sheet("experiments")
    assert all(int(row["minutes"]) <= 8 for row in rows.values())
    for name in ("step", "layers", *(name for name, row in rows.items() if row["module"] == "gem.bench.kernels")):
        words = rows[name]["arguments"].split()
        limit = float(words[words.index("--limit-s") + 1])
        assert limit + 60 <= 60 * int(rows[name]["minutes"]), name  # what has begun is finished


def test_sources_of_the_records_are_those_of_the_rule():
    from gem.bench import layers, step

    rows = read_sheet("experiments")
    for module, name in ((step, "step"), (layers, "layers")):
        assert set(module.SOURCES) == set(rows[name]["sources"].split()), name


def test_rungs_are_trained_where_a_tier_names_them_only():
    rungs = {name for name, row in read_sheet("variants").items() if row["group"] == "waterfall"}
    assert rungs and rungs.isdisjoint(load({}).variants)
    settings = load({"tier": "gpu"})
    assert rungs <= set(settings.config["step"]["variants"])


def test_waterfall_rungs_differ_from_the_rung_before_in_one_column():
    rows = read_sheet("variants")
    from figures.steps import WATERFALL

    order = list(WATERFALL)[2:]  # from the varlen baseline on
    for before, after in itertools.pairwise(order):
        changed = {
            name
            for name in rows[after]
            if name not in ("variant", "group", "base", "note") and rows[before][name] != rows[after][name]
        }
        assert len(changed) == 1, (before, after, changed)


@pytest.fixture
def frozen(tmp_path):
    """Frozen step records of some variants of tier gpu, made by the code as it is."""

    def make(names):
        folder = tmp_path / "measured" / "h200"
        rows, runs = [], {}
        for name in names:
            for experiment in ("step", "step_largest"):
                with record.Run(
                    "gpu", experiment, name=f"{experiment}-{name}", results=tmp_path / "made",
                    case_row=read_sheet("variants")[name], sources=("gem/counts.py",),
                ) as run:  # fmt: skip
                    run.add(case="base", subject=name, impl="x", phase="step", metric="qps", p50=1.0)
                rows += [row | {"run_id": run.run_id} for row in run._rows]
                runs[run.run_id] = run.info | {"software": {}}
        folder.mkdir(parents=True)
        (folder / "runs.json").write_text(json.dumps(runs))
        for experiment in ("step", "step_largest"):
            own = [row for row in rows if row["experiment"] == experiment]
            (folder / f"{experiment}.csv").write_text(record.to_csv(own))
        return folder, tmp_path / "results" / "gpu" / "records"

    return make


def test_thaw_finishes_the_job_when_all_variants_are_there(frozen, monkeypatch):
    names = load({"tier": "gpu"}).config["step"]["variants"]
    monkeypatch.setattr(record, "_unique", lambda name: name)
    source, folder = frozen(names)
    thawed, left = record_store.thaw(source, folder, config=ROOT / "config")
    assert len(thawed) == 2 * len(names) and not left
    receipt = json.loads((folder / "jobs" / "step.json").read_text())
    assert receipt["thawed_from"] == "h200" and len(receipt["runs"]) == 2 * len(names)


def test_thaw_leaves_the_job_open_while_a_variant_is_missing(frozen, monkeypatch):
    names = load({"tier": "gpu"}).config["step"]["variants"]
    monkeypatch.setattr(record, "_unique", lambda name: name)
    source, folder = frozen(names[1:])
    record_store.thaw(source, folder, config=ROOT / "config")
    assert (folder / "jobs" / "step.started").exists() and not (folder / "jobs" / "step.json").exists()
    monkeypatch.setenv("GEM_RESUME", "1")
    row = read_sheet("variants")[names[1]]
    results = folder.parents[1]
    assert record.already_measured("gpu", f"step-{names[1]}", row, results=results)
    assert not record.already_measured("gpu", f"step-{names[0]}", row, results=results)
