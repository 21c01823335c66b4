"""Figures and tables on a tiny set of records: the plotted numbers, missing data, repeatability, and the palette."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from figures import cli, load, style
from tests.figures import synthetic

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "data" / "published"
SCRIPTS = sorted(path.stem for path in (ROOT / "figures").glob("*.py") if path.stem[:4] in ("fig_", "tab_"))
# drawn from the source's numbers alone, so never without data
PUBLISHED_ALONE = {"F02", "F03", "F07", "F08", "F11", "T02", "T03"}


def module_of(script: str):
    return importlib.import_module(f"figures.{script}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return synthetic.write(tmp_path_factory.mktemp("records"))


def run(script: str, folders, prefix: Path) -> int:
    records, measured = folders
    arguments = ["--records", records, "--measured", measured, "--published", PUBLISHED, "--output", prefix]
    return cli.main(module_of(script), [str(item) for item in arguments])


@pytest.fixture(scope="module")
def drawn(folders, tmp_path_factory):
    """id -> prefix of the written files, each script run once."""
    output = tmp_path_factory.mktemp("output")
    prefixes = {}
    for script in SCRIPTS:
        name = module_of(script).ID
        assert run(script, folders, output / name) == 0, script
        prefixes[name] = output / name
    return prefixes


def table(drawn, name: str) -> pd.DataFrame:
    return pd.read_csv(f"{drawn[name]}.csv")


def test_every_script_is_a_row_of_the_sheet_and_names_its_id():
    rows = load.figure_rows()
    by_script = {row["script"]: name for name, row in rows.items()}
    assert {script: module_of(script).ID for script in SCRIPTS} == {script: by_script[script] for script in SCRIPTS}
    assert {name for name in rows if name.startswith("T")} <= {module_of(script).ID for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_caption_says_enough(script):
    caption = module_of(script).CAPTION
    assert len(caption) > 80 and caption.endswith(".") and "  " not in caption


def test_files_are_written_whole(drawn):
    for name, prefix in drawn.items():
        suffixes = (".pdf", ".svg", ".png", ".csv") if name.startswith("F") else (".csv", ".md")
        for suffix in suffixes:
            size = Path(f"{prefix}{suffix}").stat().st_size
            assert size > (3000 if suffix in (".pdf", ".svg", ".png") else 40), f"{name}{suffix}: {size} bytes"


def test_generations_show_rates_with_the_spread_of_their_times(drawn):
    rows = table(drawn, "F04")
    point = rows[(rows.impl == "v4") & (rows.case == "jfa_self_uniform_512") & (rows.phase == "bwd")].iloc[0]
    # 400 TFLOP/s at 2048, a quarter at 512; the slowest call takes 1.2 times the median, the fastest 0.9
    assert (point.value, point.low, point.high) == pytest.approx((100, 100 / 1.2, 100 / 0.9))
    assert set(rows[rows.panel == "speed"].device) == {"cpu", "h200"}
    wasted = rows[(rows.panel == "waste") & (rows.law == "law_uniform_0.5")].set_index("kind").value
    assert wasted.to_dict() == {"tokens": 0.5, "pairs": 0.66}


def test_gap_takes_the_fastest_dense_kernel_and_the_slowest_traffic(drawn):
    rows = table(drawn, "F02")
    ours = rows[(rows.device == "h200") & (rows.max_length == 1000)]
    assert ours[ours.series == "benchmark"].high.tolist() == [500.0]
    assert sorted(ours[ours.series == "traffic"].low) == pytest.approx([1000 / 15, 100, 200])
    gaps = table(drawn, "T02").set_index("longest sequence")
    assert gaps.loc[1000, "H200: worst gap, x"] == pytest.approx(7.5)
    assert gaps.loc[200, "B200 (source): worst gap, x"] == pytest.approx(4.5)
    assert gaps.loc[500, "B200 (source): traffic, TFLOP/s"] == "260 to 290"


def test_published_backward_of_the_gap_is_the_other_table(drawn):
    rows = table(drawn, "F03")
    source = rows[(rows.device == "B200 (source)") & (rows.series == "benchmark")]
    assert source.high.tolist() == [193, 317, 472]


def test_masking_is_relative_to_subtraction(drawn):
    rows = table(drawn, "F05").set_index(["aligned", "mask"]).value
    assert rows[(True, "mask2d")] == pytest.approx(1.3) and rows[(True, "none")] == pytest.approx(0.95)
    assert rows[(False, "subtraction")] == 1.0


def test_checkpointing_frontier_memory_and_quality(drawn):
    rows = table(drawn, "F19").set_index(["panel", "name"])
    region = rows.loc[("frontier", "region")].set_index("case")
    assert region.value.to_dict() == {"memory_0.5": 6.0, "memory_0.75": 5.5} and region.memory["memory_0.75"] == 48
    assert rows.loc["memory"].value.to_dict() == {"full": 60, "fp8": 36, "mx4": 24}
    assert rows.loc["quality"].value["fp8"] == pytest.approx(-0.04, rel=0.01)  # four variants after full, 0.01 each


def test_backward_schemes_are_relative_to_split(drawn):
    rows = table(drawn, "F06")
    expected = {scheme: time / synthetic.SCHEMES["split"] for scheme, time in synthetic.SCHEMES.items()}
    assert rows.groupby("scheme").value.first().to_dict() == pytest.approx(expected)
    assert set(rows.gemms) == {5}


def test_gdpa_panels_hold_the_source_beside_ours(drawn):
    rows = table(drawn, "F07").set_index(["device", "panel", "impl", "length"]).value
    assert rows[("B200 (source)", "self_full", "CuteDSL GDPA", 2048)] == 1147
    assert rows[("h200", "self_jagged", "tlx", 1024)] == pytest.approx(240)
    assert rows[("h200", "self_full", "fa4", 2048)] == 300
    assert ("h200", "self_full", "v4", 2048) not in rows.index
    backward = table(drawn, "F08").set_index(["device", "panel", "impl", "length"]).value
    assert backward[("B200 (source)", "cross", "FA4", 256)] == 173


def test_schedule_shows_skew_and_relative_time(drawn):
    rows = table(drawn, "F09").set_index(["panel", "impl"]).value
    assert rows[("skew_max_min", "grid")] == 6.0 and rows[("skew", "zigzag")] == pytest.approx(0.55)
    assert rows[("time", "zigzag")] == pytest.approx(1.11 / 1.6)


def test_gelu_error_is_over_the_score_and_time_over_tanh(drawn):
    rows = table(drawn, "F10")
    error = rows[(rows.panel == "error") & (rows.subject == "gelu_taylor6")].set_index("x").value
    assert error.to_dict() == pytest.approx({0.5: 1.1e-3 / 64, 1.0: 1.1e-3, 2.0: 1.1e-3 * 64})
    time = rows[(rows.panel == "time") & (rows.phase == "fwd")].set_index("subject").value
    assert time.to_dict() == pytest.approx({"gelu": 0.5, "gelu_tanh": 1.0, "gelu_taylor6": 0.25})


def test_windows_tell_full_window_and_block_apart(drawn):
    rows = table(drawn, "F11")
    own = rows[(rows.device == "h200") & (rows.panel == "length") & (rows.phase == "fwd") & (rows.length == 4096)]
    assert own.set_index("mode").value.to_dict() == {"full": 8.0, "window": 1.0, "block": 0.5}
    block = rows[(rows.panel == "block") & (rows.phase == "bwd")].set_index(["device", "mode"]).value
    assert block[("h200", "baseline")] / block[("h200", "block")] == 2.0
    assert block[("B200 (source)", "block")] == 2.36


def test_recipes_compare_seed_by_seed(drawn):
    rows = table(drawn, "F14")
    quality = rows[rows.panel == "quality"].set_index("case")
    # full is the fourth variant (0.87), mx_naive the sixth (0.85)
    assert quality.loc["mx_naive", "value"] == pytest.approx(-0.02)
    assert quality.loc["mxfp8_full", ["recipe", "n"]].tolist() == ["full", 3]
    error = rows[(rows.panel == "error") & (rows.case == "linear_y")].set_index("recipe").value
    assert error.to_dict() == {"naive": 25, "rceil": 26, "full": 27}


def test_sparse_figure_and_table_agree(drawn):
    rows = table(drawn, "F17").set_index(["gpus", "subject", "metric", "impl"]).p50
    assert rows[(1024, "v2", "memory_bytes", "resident")] == pytest.approx(2 * 2**30)
    summary = table(drawn, "T06").set_index("generation")
    assert summary["tables held, GiB"].to_dict() == {"V1": 1, "V2": 2, "V3": 3}
    assert summary["GPUs"].tolist() == [1024] * 3 and summary.loc["V2", "source: memory overhead"] == "high"
    # what two GPUs held and took stands beside it, never in the same column
    assert summary["measured: tables held, GiB"].to_dict() == {"V1": 1, "V2": 2, "V3": 3}
    assert summary["measured: step, ms"].tolist() == [4, 5, 6] and summary["measured: GPUs"].tolist() == [2] * 3
    assert summary["measured: busiest / mean GPU, lookups"].tolist() == pytest.approx([1.1, 1.2, 1.3])
    shown = table(drawn, "F17")
    assert set(shown[shown.scope == "measured"].subject) >= {"v1", "v3_torchrec", "v2_sync"}


def test_contention_is_relative_to_products_alone(drawn):
    rows = table(drawn, "F18").set_index(["panel", "subject", "impl"])
    assert rows.loc[("held", "gemm_beside_24_sms", "held"), "value"] == pytest.approx(24.0)
    beside = rows.loc["beside"].loc["gemm_beside_gather"]
    assert beside.value.to_dict() == pytest.approx({"nccl": 30, "nccl_ctas4": 20, "nccl_ctas16": 10, "copy_engine": 0})
    # 256 MiB sent in 2 ms by NCCL with four blocks, at 200 GB/s by copy engines
    assert beside.place.to_dict() == pytest.approx(
        {"nccl": 268.435456, "nccl_ctas4": 134.217728, "nccl_ctas16": 89.478485, "copy_engine": 200}
    )
    layered = table(drawn, "F18").query("panel == 'layered'").set_index(["place", "impl"]).value
    fast = {(rows, impl): v for rows in (2048, 8192) for impl, v in (("nccl_ctas4", 15.0), ("copy_engine", 1.0))}
    assert layered.to_dict() == pytest.approx(fast), "of NCCL the fastest setting"
    rates = table(drawn, "F18").query("panel == 'bandwidth'")
    assert rates.value.tolist() == pytest.approx([200.0] * 6)


def test_balance_reads_schemes_and_pools(drawn):
    rows = table(drawn, "F20").set_index(["ranks", "scheme", "pool"])
    assert rows.loc[(4096, "local", 256), "share"] == 0.93
    assert rows.loc[(8, "bbs", 8), "skew"] == 1.1
    rebalanced = table(drawn, "T07")
    top = rebalanced[(rebalanced.ranks == 4096) & (rebalanced.scheme == "none")]
    assert top["heaviest rank above the mean, %"].tolist() == pytest.approx([15])
    assert "15.0 % above the mean" in " ".join(table(drawn, "T04")["our records"])


def test_waterfall_has_one_panel_a_device_and_no_drop_one(drawn):
    rows = table(drawn, "F21")
    rate = rows[rows.metric == "qps"].set_index(["device", "subject"]).p50
    assert rate[("h200", "full")] == 130_000 and rate[("cpu", "full")] == 130
    assert "drop_hsp" not in set(rows.subject) and "mx_naive" not in set(rows.subject)


def test_quality_is_drawn_over_flops_and_weight(drawn):
    rows = table(drawn, "F23")
    flops = rows[rows.panel == "flops"].set_index("subject")
    assert flops.loc["full", ["x", "value", "low"]].tolist() == pytest.approx([4e9, 0.87, 0.87 * 0.999])
    weight = rows[(rows.panel == "weight") & (rows.x == 1)].set_index("group").value
    assert weight.to_dict() == pytest.approx({"full": 0.1, "window": 0.11, "block": 0.12})
    sizes = rows[rows.panel == "size"]
    assert sizes.x.tolist() == [1e9, 4e9, 1.6e10, 6.4e10] and sizes.n.tolist() == [3] * 4
    fit = rows[rows.panel == "fit"].iloc[0]
    assert fit.x == pytest.approx(-0.5) and fit.value == pytest.approx(0.2 * 1e9**0.5)


def test_architecture_shares_add_up_without_totals(drawn):
    rows = table(drawn, "F01")
    assert rows.share.sum() == pytest.approx(1) and set(rows.subject).isdisjoint({"total", "dense"})
    assert "Preset smoke" in Path(f"{drawn['F01']}.svg").read_text(encoding="utf-8")


def test_ablations_compare_with_their_base(drawn):
    rows = table(drawn, "T08").set_index(["device", "variant"])
    row = rows.loc[("CPU", "drop_hsp")]
    assert row["change of NE click"] == pytest.approx(-0.01) and row["throughput / base"] == pytest.approx(140 / 130)
    # 0.01 * (-0.001, 0, 0.001) over three seeds: t of two degrees of freedom times 1e-5 / sqrt(3), rounded for a reader
    assert row["\u00b1 click"] == pytest.approx(4.303e-5 / 3**0.5, abs=1e-4)
    assert pd.isna(rows.loc[("CPU", "baseline_padded"), "change of NE click"])


def test_an_interval_is_students(drawn):
    from figures.training import interval

    mean, half = interval(pd.Series([1.0, 2.0, 3.0]))
    assert (mean, half) == pytest.approx((2.0, 4.303 / 3**0.5))
    assert pd.isna(interval(pd.Series([1.0]))[1]) and pd.isna(interval(pd.Series([], dtype=float))[0])


def test_other_tables(drawn):
    assert table(drawn, "T01").loc[0, "verdict"] == "reproduced"
    dense = table(drawn, "T05").set_index("dimension")["smoke, MiB"]
    full = 3 * 2 * 127 / 128 * 100
    assert dense["FSDP, all parameters"] == pytest.approx(full)
    assert dense["FSDP with 2-way expert parallelism"] == pytest.approx(0.9 * full)
    # 8 + 4 + 4 tokens in, 4 out, both ways, 2 layers, batch 1,024, width 32, bf16
    assert dense["expert parallelism"] == pytest.approx(2 * 2 * 1024 * (16 + 4) * 32 * 2 / 2**20)
    measured = table(drawn, "T05").set_index("dimension")["measured on two GPUs"]
    for words in ("bf16 3.00 ms", "8 bits, a scale a row 1.50 ms", "8 bits, a scale a row, quantised before 0.90 ms"):
        assert words in measured["FSDP, all parameters"]
    assert "on every rank 16.00 ms, one a rank, reduce-scatter 32.00 ms" in measured["expert parallelism"]
    machines = table(drawn, "T09").set_index(["device", "count"])
    assert set(machines.index) == {("Test CPU", 1), ("NVIDIA H200", 1), ("NVIDIA H200", 2)}
    assert "windows" in machines.loc[("NVIDIA H200", 1), "experiments"]
    assert machines.commits.tolist() == [1] * 3 and machines.dirty.tolist() == [0] * 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_missing_records_are_one_line_and_exit_code_1(script, tmp_path, capsys):
    module = module_of(script)
    empty = tmp_path / "records"
    empty.mkdir()
    code = run(script, (empty, tmp_path / "measured"), tmp_path / module.ID)
    error = capsys.readouterr().err
    if module.ID in PUBLISHED_ALONE:
        assert code == 0
        return
    assert code == 1 and error.startswith(f"error: {module.ID}: ") and error.count("\n") == 1
    assert not list(tmp_path.glob(f"{module.ID}.*"))


def test_wrong_header_is_named(tmp_path, capsys):
    (tmp_path / "balance.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert run("fig_20_balance", (tmp_path, tmp_path / "none"), tmp_path / "F20") == 1
    assert "balance.csv: header 'a,b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script", ["fig_01_architecture", "fig_04_jfa_generations", "fig_20_balance", "tab_08_ablations"]
)
def test_two_runs_give_the_same_bytes(script, folders, drawn, tmp_path):
    module = module_of(script)
    assert run(script, folders, tmp_path / module.ID) == 0
    for path in tmp_path.iterdir():
        first = drawn[module.ID].parent / path.name
        assert path.read_bytes() == first.read_bytes(), path.name


def test_own_records_hide_frozen_ones_of_the_same_device(folders, tmp_path):
    records, measured = folders
    source = load.Source(measured / "h200", measured, PUBLISHED)
    frozen = load.Source(records, measured, PUBLISHED)
    assert len(source.frame("masking")) == len(frozen.frame("masking")) > 0


def test_failed_rows_are_not_drawn(folders):
    records, measured = folders
    frame = load.Source(records, measured, PUBLISHED).frame("masking")
    frame.loc[frame.index[0], "status"] = "failed"
    assert len(load.select(frame, metric="time_ms")) == len(frame) - 1


def test_available_gives_reasons(folders, monkeypatch):
    records, measured = folders
    assert load.available("F20", records, measured) == (True, "records of balance")
    planned = load.figure_rows() | {"F99": {"script": "fig_99_planned", "records": "kernels"}}
    with monkeypatch.context() as patch:
        patch.setattr(load, "figure_rows", lambda *_: planned)
        good, reason = load.available("F99", records, measured)
    assert not good and "does not exist" in reason
    assert load.available("F05", records, records / "none") == (False, "no records of masking")
    assert load.available("F02", records, records / "none")[0]
    with pytest.raises(ValueError, match="F99"):
        load.available("F99", records, measured)


def test_palette_is_unique_in_colour_and_in_grey():
    for family, looks in style.FAMILIES.items():
        colors = [look.color.lower() for look in looks.values()]
        assert len(set(colors)) == len(colors), family
        assert len({look.marker for look in looks.values()}) == len(looks), family
        assert len({look.label for look in looks.values()}) == len(looks), family
        greys = {name: grey(look.color) for name, look in looks.items()}
        names = list(looks)
        for index, one in enumerate(names):
            for other in names[:index]:
                apart = abs(greys[one] - greys[other]) > 0.08
                a, b = looks[one], looks[other]
                assert apart or a.hatch != b.hatch or a.line != b.line or a.marker != b.marker, (family, one, other)
    with pytest.raises(ValueError, match="v9"):
        style.look("impl", "v9")
    assert style.look("impl", "triton:grid") == style.look("impl", "triton")


def grey(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_same_kernel_same_colour_in_the_source_and_ours():
    for published, ours in (("Triton GDPA", "triton"), ("CuteDSL GDPA", "tlx"), ("FA4", "fa4")):
        assert style.look("published", published).color == style.look("impl", ours).color


def test_nothing_is_smaller_than_eight_points(drawn, monkeypatch):
    style.setup()
    import matplotlib.text

    sizes = []
    original = matplotlib.text.Text.draw

    def spy(self, renderer):
        if self.get_text().strip() and self.get_visible():
            sizes.append(self.get_fontsize())
        return original(self, renderer)

    monkeypatch.setattr(matplotlib.text.Text, "draw", spy)
    source = load.Source(drawn["F01"].parent / "none", drawn["F01"].parent / "none", PUBLISHED)
    figure, _ = module_of("fig_07_gdpa_forward").draw(source)
    figure.canvas.draw()
    assert len(sizes) > 20 and min(sizes) >= 8


def test_figures_import_no_torch_and_no_gem():
    for path in (ROOT / "figures").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"torch", "gem", "kernels"}, path.name


def test_the_command_line_runs_as_a_module(folders, tmp_path):
    records, measured = folders
    command = [
        sys.executable,
        "-m",
        "figures.tab_07_rebalancing",
        "--records",
        str(records),
        "--measured",
        str(measured),
    ]
    done = subprocess.run([*command, "--output", str(tmp_path / "T07")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "T07.md").read_text(encoding="utf-8").startswith("| ranks | scheme |")
    caption = subprocess.run([*command[:3], "--caption"], cwd=ROOT, capture_output=True, text=True)
    assert "rebalancing" in caption.stdout or "heaviest rank" in caption.stdout


def test_collectives_are_drawn_in_their_order(drawn):
    rows = table(drawn, "F24")
    for case, steps in synthetic.FLOWS.items():
        own = rows[rows.case == case]
        assert list(zip(own.phase, own.impl, own.subject, strict=True)) == [step[:3] for step in steps]
        assert list(own.comm_bytes) == [1024.0 * place for place in range(1, len(steps) + 1)]


def test_a_cpu_alone_draws_what_it_measured_and_names_what_is_missing(folders, tmp_path, capsys):
    records, _ = folders
    codes = {}
    for script in SCRIPTS:
        name = module_of(script).ID
        codes[name] = run(script, (records, tmp_path / "none"), tmp_path / name)
    assert [name for name, code in codes.items() if code] == ["F05", "F06", "F09", "F12", "F13", "F18", "F19"]
    assert capsys.readouterr().err.count("\n") == 7


def test_modelled_schedules_need_no_gpu_times(tmp_path):
    book = synthetic.Book({"type": "cpu", "name": "Test CPU", "slug": "cpu", "count": 1})
    for order, value in (("grid", 6.0), ("valid", 2.0), ("zigzag", 1.0)):
        book.add("schedule", "tiles_by_hand", "tile_schedule", order, "fwd", "skew_max_min", value)
    book.write(tmp_path / "records")
    assert run("fig_09_tile_schedule", (tmp_path / "records", tmp_path / "none"), tmp_path / "F09") == 0
    rows = pd.read_csv(tmp_path / "F09.csv").set_index("impl").value
    assert rows.to_dict() == {"grid": 6.0, "valid": 2.0, "zigzag": 1.0}


def test_8_bit_rows_are_compared_with_bf16_of_the_same_case_and_phase(drawn):
    rows = table(drawn, "F12").set_index(["subject", "impl", "phase"]).value
    assert rows["jagged_attention", "hopper_fp8", "fwd"] == pytest.approx(1.2)
    assert rows["gdpa", "hopper_fp8:kernel", "fwd"] == pytest.approx(1.5)
    assert rows["mx_linear", "hopper_fp8", "bwd"] == pytest.approx(1.3)
    assert rows["mx_linear", "hopper_fp8:wgrad_high", "fwd"] == pytest.approx(1.0)
    quantised = table(drawn, "F13")
    shares = quantised[quantised.panel == "attention"].set_index("subject").value
    assert shares["jagged_attention"] == pytest.approx(0.2)
    norms = quantised[(quantised.panel == "norm") & (quantised.metric == "time_ms")].set_index("impl")
    assert norms.value["separate"] == pytest.approx(0.7) and norms.width["fused"] == 512
