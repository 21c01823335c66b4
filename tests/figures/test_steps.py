"""F21, F11 and T08 on records of timed steps and layers whose numbers are known."""

import importlib

import pandas as pd
import pytest

from figures import steps
from figures.load import Source

from .synthetic import Book

STEP_MS = {
    "baseline_padded": 400, "add_jagged": 300, "baseline_varlen": 240, "add_jfa_v2": 220, "add_jfa_v4": 200,
    "rung_gdpa": 170, "rung_window": 150, "rung_block": 140, "rung_rotary": 130, "rung_norms": 120,
    "rung_compskip": 110, "rung_hsp": 105, "drop_graph": 103, "full": 100, "same_math_eager": 165,
    "full_same_math": 160, "mxfp8_full": 80, "drop_gdpa": 130,
}  # fmt: skip
SHAPLEY = {"attention_impl": 45.0, "gdpa_impl": 30.0, "self_attention": 25.0, "rotary": 12.0, "norm": 8.0,
           "compskip": 12.0, "pooling": 3.0}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("steps")
    book = Book({"type": "cuda", "name": "NVIDIA H200", "slug": "h200", "count": 1})
    for name, ms in STEP_MS.items():
        group = "waterfall" if name.startswith("rung") else {"add": "add_one", "drop": "drop_one"}.get(
            name.partition("_")[0], name.partition("_")[0]
        )  # fmt: skip
        row = {"variant": name, "group": group, "base": "full" if group == "drop_one" else "baseline_varlen"}
        key = ("step", "base", name, "eager", "step")
        common = {"case_row": row, "run": f"step-{name}"}
        for metric, value in (("time_ms", ms), ("qps", 1024e3 / ms), ("mfu", 20 / ms), ("mfu_mixed", 18 / ms),
                              ("peak_mem_gib", ms / 4)):  # fmt: skip
            book.add(*key, metric, value, **common)
        for part, share in (("attention", 0.5), ("idle", 0.1)):
            book.add("step", "base", f"{name}:{part}", "eager", "step", "time_ms", ms * share, **common)
        book.add("step", "base", f"layers@{name}", "eager", "step", "mfu", 0.9, **common)
        book.add("layers", "base", name, "eager", "model", "time_ms", ms - 10.0, run="layers")
        book.add("step", "base", name, "eager", "step", "scaling_ratio", 0.7, **common)
    book.add("layers", "base", "drop_gdpa", "eager", "step", "mfu", 0.25, run="layers")
    book.add("layers", "base", "full", "eager", "model", "time_ms", 83.0, run="layers")  # 7 ms off in the median
    for name, ms in SHAPLEY.items():
        book.add("layers", "base", f"shapley:{name}", "shapley", "model", "time_ms", ms, run="layers")
    for mode, impl, ms in (("full", "v4", 9.0), ("window", "v4", 6.0), ("block", "triton", 4.0), ("block", "tlx", 3.0)):
        for metric, value in (("time_ms", ms), ("mfu", 1 / ms)):
            book.add("layers", "base", f"self_attention_{mode}", impl, "step", metric, value, run="layers")
    book.write(root / "measured" / "h200")
    (root / "records").mkdir()
    return Source(root / "records", root / "measured", root / "published")


def test_scaling_ratios_take_the_layers_without_the_host_first(source):
    """Layers timed by themselves for these variants; the step's own process for those without."""
    found = steps.scaling_ratios(source).set_index("subject").p50
    assert found["drop_gdpa"] == pytest.approx(20 / 130 / 0.25)
    assert found["rung_gdpa"] == 0.7


def drawn(name, source):
    module = importlib.import_module(f"figures.{name}")
    return module.draw(source)[1] if hasattr(module, "draw") else module.build(source)


def test_rungs_stand_in_the_sources_order(source):
    rows = drawn("fig_21_waterfall", source)
    rungs = rows[(rows.panel == "throughput") & (rows.metric == "qps")]
    assert list(rungs.subject) == [*steps.WATERFALL, *steps.SAME_MATH, "mxfp8_full"]
    assert rungs.set_index("subject").p50["full"] == pytest.approx(10240)
    assert not rows.subject.str.contains("[@:]").any()  # parts and components are no rungs


def test_rows_in_8_bits_come_last_with_the_mfu_of_both_peaks(source):
    rows = drawn("fig_21_waterfall", source)
    mixed = rows[rows.metric == "mfu_mixed"]
    assert list(mixed.subject) == ["mxfp8_full"] and list(mixed.group) == ["low"]
    assert mixed.p50.item() == pytest.approx(18 / 80)
    table = drawn("tab_08_ablations", source).set_index("variant")
    assert table.loc["mxfp8_full", ["MFU, %", "mixed MFU, %"]].tolist() == pytest.approx([25.0, 22.5])


def test_savings_in_order_and_over_all_orders_are_beside_each_other(source):
    rows = drawn("fig_21_waterfall", source)
    saved = rows[rows.panel == "saved"].pivot_table(index="subject", columns="metric", values="p50")
    in_order = {"attention_impl": 40, "gdpa_impl": 30, "self_attention": 30, "rotary": 10, "norm": 10, "compskip": 10,
                "pooling": 5}  # fmt: skip
    assert saved.in_order.to_dict() == pytest.approx(in_order)
    assert saved.any_order.to_dict() == pytest.approx(SHAPLEY)


def test_sums_of_modules_are_held_against_real_steps(source):
    rows = drawn("fig_21_waterfall", source)
    checked = rows[rows.panel == "predicted"].pivot_table(index="subject", columns="metric", values="p50")
    assert len(checked) == len(STEP_MS) >= 8
    # the rest of a step is one number for all: 10 ms; full has two sums, whose median is 3.5 ms short
    assert set(checked.rest_ms) == {10.0}
    assert checked.predicted_ms["rung_gdpa"] == 170 and checked.predicted_ms["full"] == pytest.approx(96.5)


def test_components_of_a_step(source):
    found = steps.components(source, "h200")
    assert found.loc["full"].to_dict() == {"attention": 50.0, "idle": 10.0}


def test_the_layer_row_of_f11_has_time_and_mfu_by_kind(source, monkeypatch):
    chart = pd.DataFrame({"case": ["fwd"], "baseline_ms": [2.0], "tlx_ms": [1.0]})
    monkeypatch.setattr(Source, "chart", lambda self, name: chart)
    rows = drawn("fig_11_windows", source)
    layer = rows[rows.panel == "layer"]
    assert list(dict.fromkeys(layer["mode"])) == ["full", "window", "block"]
    times = layer[layer.value >= 1].set_index(["mode", "impl"]).value
    assert times[("block", "triton")] / times[("block", "tlx")] == pytest.approx(4 / 3)


def test_ablations_have_step_time_and_memory_of_timed_steps(source):
    rows = drawn("tab_08_ablations", source).set_index("variant")
    assert rows.loc["full", "step, ms"] == 100 and rows.loc["full", "peak memory, GiB"] == 25
    assert rows.loc["drop_gdpa", "throughput / base"] == pytest.approx(100 / 130)
    assert pd.isna(rows.loc["full", "NE click"])
