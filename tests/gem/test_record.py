"""Records: round trip, parts that are whole or absent, schema errors, freeze and thaw."""

import json

import pytest

from gem import provenance, record, record_store


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Each test writes below its own folder and starts with no run ids taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "_ids_of_this_process", set())


def add_time(run, value=1.5, **kwargs):
    row = {"case": "c", "subject": "jagged_attention", "impl": "eager", "phase": "fwd", "metric": "time_ms"}
    run.add(**(row | {"p50": value, "p20": 1.25, "p80": 2.0, "n": 7, "seed": 3} | kwargs))


def write_run(name="kernels-a", tier="smoke", sources=("gem/digest.py",), value=1.5, case_row=None):
    with record.Run(tier, "kernels", name=name, sources=sources, case_row=case_row) as run:
        add_time(run, value)
    return run


def test_round_trip_keeps_every_column_and_names_the_run(tmp_path):
    row = {"case": "jfa_self", "op": "jagged_attention"}
    with record.Run("smoke", "kernels", case_row=row, config={"dtype": "float32"}, sources=("gem/digest.py",)) as run:
        add_time(run, note="two  words,\nand a comma")
        add_time(run, None, p20=None, p80=None, impl="v4", status="unsupported", note="needs sm_90")
    assert run.run_id == "kernels-jfa_self"
    record_store.merge(tmp_path / "results/smoke/records")
    text = (tmp_path / "results/smoke/records/kernels.csv").read_text()
    header = "experiment,case,subject,impl,phase,metric,unit,p50,p20,p80,n,seed,status,scope,run_id,note"
    assert text.splitlines()[0] == header
    frame = record.read(tmp_path / "results/smoke/records")
    ok = frame[frame.status == "ok"].iloc[0]
    assert (ok.p50, ok.p20, ok.p80, ok.n, ok.seed) == (1.5, 1.25, 2.0, 7, 3)
    assert (ok.unit, ok.scope, ok.note) == ("ms", "measured", "two words, and a comma")
    assert frame[frame.status == "unsupported"].p50.isna().all()
    info = record.read_runs(tmp_path / "results/smoke/records")["kernels-jfa_self"]
    assert info["case_row"] == row and info["config"] == {"dtype": "float32"}
    assert {"name", "slug", "type", "count"} <= set(info["device"])
    assert {"python", "torch", "triton"} <= set(info["software"])
    assert info["commit"] and len(info["digest"]) == 16 and info["utc"].endswith("+00:00")
    assert record_store.check(tmp_path / "results/smoke/records") == (2, 1)


def test_second_run_of_a_name_in_one_process_does_not_overwrite_the_first(tmp_path):
    assert [write_run().run_id, write_run().run_id] == ["kernels-a", "kernels-a-2"]
    assert len(record_store.load_parts(tmp_path / "results/smoke/records/parts")) == 2


def test_a_later_failure_does_not_replace_what_this_command_measured(tmp_path, monkeypatch, capsys):
    """As when a process that has written its record dies afterwards, and the one that started it says so."""

    def lost():
        record._ids_of_this_process.clear()  # the other process had them
        with record.Run("smoke", "kernels", name="kernels-a") as run:
            add_time(run, None, p20=None, p80=None, status="failed", note="its process ended")
        (part,) = (tmp_path / "results/smoke/records/parts").glob("*.csv")
        return record.read(part).iloc[0]

    write_run()
    row = lost()
    assert (row.status, row.p50) == ("ok", 1.5)
    assert "kept what was measured before: its process ended" in capsys.readouterr().err
    monkeypatch.setattr(record, "_BEGAN", "2999-01-01T00:00:00+00:00")  # the part is of an earlier command
    assert lost().status == "failed"


def test_exception_and_full_disk_leave_nothing(tmp_path, monkeypatch):
    parts = tmp_path / "results/smoke/records/parts"
    with pytest.raises(RuntimeError), record.Run("smoke", "kernels", name="broken") as run:
        add_time(run)
        raise RuntimeError("the kernel failed")
    assert not parts.exists()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_run()
    assert list(parts.iterdir()) == []


@pytest.mark.parametrize("damage", ["no_json", "other_csv", "leftover_partial"])
def test_half_written_parts_are_left_out_and_named(tmp_path, damage):
    write_run("kernels-good")
    write_run("kernels-bad")
    parts = tmp_path / "results/smoke/records/parts"
    if damage == "no_json":
        (parts / "kernels-bad.json").unlink()
    elif damage == "other_csv":
        text = (parts / "kernels-bad.csv").read_text()
        (parts / "kernels-bad.csv").write_text(text[: len(text) // 2])
    else:
        (parts / "kernels-bad.csv").rename(parts / ".kernels-bad.csv.1.partial")
    lines = []
    record_store.merge(tmp_path / "results/smoke/records", warn=lines.append)
    assert set(record.read(tmp_path / "results/smoke/records").run_id) == {"kernels-good"}
    assert damage == "leftover_partial" or "kernels-bad" in lines[0]


def test_merge_leaves_out_cases_that_are_no_longer_in_the_sheet(tmp_path):
    columns = record_store._sheet(record_store.ROOT / "config/kernels.tsv")[0]
    write_run("kernels-now", case_row=columns)
    write_run("kernels-gone", case_row=columns | {"case": "not_a_case"})
    lines = []
    record_store.merge(tmp_path / "results/smoke/records", warn=lines.append)
    assert set(record.read(tmp_path / "results/smoke/records").run_id) == {"kernels-now"}
    assert "not_a_case" in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "speed"}, "metric 'speed' is not in config/metrics.tsv"),
        ({"phase": "forward"}, "phase 'forward'; allowed: fwd, bwd, step, eval, model"),
        ({"status": "fine"}, "status 'fine'; allowed: ok, oom"),
        ({"scope": "guessed"}, "scope 'guessed'; allowed: measured"),
        ({"value": float("nan")}, "p50 'nan'; allowed: a finite number"),
        ({"value": None}, "status ok without p50"),
        ({"status": "oom"}, "status oom needs a reason"),
        ({"subject": ""}, "subject is empty"),
    ],
)
def test_bad_rows_are_one_line_when_written(change, message):
    run = record.Run("smoke", "kernels", name="bad")
    with pytest.raises(ValueError, match=message) as caught:
        add_time(run, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("p50", "median", "1: header"),
        (",ms,", ",s,", r"2: metric time_ms has unit 's'; allowed: 'ms'"),
        (",measured,", ",measured,extra,", "2: 17 fields; allowed: 16"),
        ("1.25", "fast", "2: p20 'fast'"),
    ],
)
def test_bad_files_are_one_line_when_read(tmp_path, old, new, message):
    write_run()
    path = tmp_path / "results/smoke/records/parts/kernels-a.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        record.read(path)


def test_record_without_a_run_fails_the_check(tmp_path, capsys):
    write_run()
    folder = tmp_path / "results/smoke/records"
    record_store.merge(folder)
    (folder / "runs.json").write_text("{}")
    assert record_store.main(["check", str(folder)]) == 1
    assert "run_id 'kernels-a' is not in" in capsys.readouterr().err


def test_empty_run_and_unwritable_config_are_errors():
    with pytest.raises(ValueError, match="no rows were added"), record.Run("smoke", "kernels", name="empty"):
        pass
    with pytest.raises(TypeError):
        record.Run("smoke", "kernels", config={"tensor": object()})
    with pytest.raises(ValueError, match="no such record"):
        record.read("missing.csv")


def test_freeze_and_thaw_move_current_runs_only(tmp_path):
    (tmp_path / "op.py").write_text("x = 1\n")
    write_run("kernels-current", tier="gpu")
    write_run("kernels-stale", tier="gpu", sources=(str(tmp_path / "op.py"),))
    source, measured = tmp_path / "results/gpu/records", tmp_path / "measured"
    record_store.merge(source)
    target = record_store.freeze(source, measured)
    assert target == measured / "cpu" and record_store.check(target) == (2, 2)
    (tmp_path / "op.py").write_text("x = 2\n")
    folder = tmp_path / "results/fresh/records"
    thawed, left = record_store.thaw(target, folder)
    assert thawed == ["kernels-current"] and left[0].startswith("kernels-stale: its sources")
    parts = record_store.load_parts(folder / "parts")
    assert list(parts) == ["kernels-current"]
    rows, info = parts["kernels-current"]
    assert rows[0]["p50"] == "1.5" and info["thawed_from"] == "cpu"


def test_freeze_replaces_a_run_keeps_others_and_refuses_to_mix_devices(tmp_path, monkeypatch):
    source, measured = tmp_path / "results/gpu/records", tmp_path / "measured"
    write_run("kernels-a", tier="gpu")
    write_run("kernels-b", tier="gpu")
    record_store.merge(source)
    record_store.freeze(source, measured)
    record._ids_of_this_process.clear()
    for path in (source / "parts").iterdir():
        path.unlink()
    write_run("kernels-a", tier="gpu", value=9.0)
    record_store.merge(source)
    record_store.freeze(source, measured)
    frame = record.read(measured / "cpu").set_index("run_id")
    assert frame.p50.to_dict() == {"kernels-a": 9.0, "kernels-b": 1.5}
    with pytest.raises(ValueError, match="records of cpu; allowed: h200"):
        record_store.freeze(source, measured, device="h200")
    monkeypatch.setattr(provenance, "device", lambda count: {"slug": "h200", "type": "cuda", "name": "H200"})
    write_run("kernels-c", tier="gpu")
    record_store.merge(source)
    with pytest.raises(ValueError, match="records of cpu, h200; allowed: one device"):
        record_store.freeze(source, measured)


def test_thaw_leaves_out_a_changed_row(tmp_path):
    row = record_store._sheet(record_store.ROOT / "config/kernels.tsv")[0]
    write_run("kernels-same", tier="gpu", case_row=row)
    write_run("kernels-edited", tier="gpu", case_row=row | {"seed": "1"})
    record_store.merge(tmp_path / "results/gpu/records")
    target = record_store.freeze(tmp_path / "results/gpu/records", tmp_path / "measured")
    thawed, left = record_store.thaw(target, tmp_path / "results/new/records")
    assert thawed == ["kernels-same"] and left == ["kernels-edited: its row of kernels.tsv has changed"]


def test_thawed_jobs_are_finished_when_complete_and_else_marked_as_started(tmp_path, monkeypatch):
    (tmp_path / "op.py").write_text("x = 1\n")
    monkeypatch.setenv("GEM_JOB", "train-full")
    row = next(r for r in record_store._sheet(record_store.ROOT / "config/variants.tsv") if r["variant"] == "full")
    with record.Run("gpu", "train", case_row=row, sources=("gem/digest.py",)) as run:
        add_time(run)
    monkeypatch.setenv("GEM_JOB", "masking")
    for name, sources in (("masking-a", ("gem/digest.py",)), ("masking-b", (str(tmp_path / "op.py"),))):
        with record.Run("gpu", "masking", name=name, sources=sources) as run:
            add_time(run)
    record_store.merge(tmp_path / "results/gpu/records")
    target = record_store.freeze(tmp_path / "results/gpu/records", tmp_path / "measured")
    (tmp_path / "op.py").write_text("x = 2\n")
    folder = tmp_path / "results/new/records"
    for _ in range(2):  # a second thaw takes back what the first one left
        thawed, _ = record_store.thaw(target, folder)
        assert thawed == ["masking-a", "train-full"]
        assert {path.name for path in (folder / "jobs").iterdir()} == {"train-full.json", "masking.started"}
    receipt = json.loads((folder / "jobs/train-full.json").read_text())
    assert receipt["runs"] == ["train-full"] and receipt["thawed_from"] == "cpu"


def test_commit_comes_from_the_environment_where_there_is_no_checkout(tmp_path, monkeypatch):
    provenance.commit.cache_clear()
    monkeypatch.setenv("GEM_COMMIT", "abc123")
    monkeypatch.setenv("GEM_DIRTY", "1")
    assert provenance.commit(tmp_path) == ("abc123", True)
    monkeypatch.delenv("GEM_COMMIT")
    provenance.commit.cache_clear()
    assert provenance.commit(tmp_path) == ("unknown", None)
    provenance.commit.cache_clear()


def test_a_gpus_record_names_its_host_and_how_fast_that_queues_work(monkeypatch):
    fields = dict.fromkeys(provenance._SMI_FIELDS, "1") | {"name": "NVIDIA H200"}
    monkeypatch.setattr(provenance, "_nvidia_smi", lambda bucket: fields)
    found = provenance.device()
    assert found["slug"] == "h200" and found["host_cores"] >= 1 and found["host_cpu"]
    assert 0.1 < found["host_call_us"] < 1000  # torch is loaded here


def test_device_names_become_folder_names():
    assert provenance.device_slug("NVIDIA H200") == "h200"
    assert provenance.device_slug("NVIDIA H200", 2) == "h200x2"
    assert provenance.device_slug("NVIDIA H100 80GB HBM3") == "h100_80gb_hbm3"


def test_frozen_records_in_the_repository_are_sound():
    folders = [p for p in record_store.MEASURED.glob("*") if p.is_dir()] if record_store.MEASURED.exists() else []
    for folder in folders:
        rows, runs = record_store.check(folder)
        assert rows and runs
        for run in json.loads((folder / "runs.json").read_text()).values():
            assert run["device"]["slug"] == folder.name
