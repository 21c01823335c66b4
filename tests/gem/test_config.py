"""Rows of variants.tsv become configs; everything else is one line of error."""

from __future__ import annotations

import dataclasses

import pytest

from gem import config as configuration
from gem.config import (
    PRESETS,
    TOGGLE_TYPES,
    Config,
    EventSize,
    Layout,
    SelfAttention,
    TrainConfig,
    load_tier,
    load_variants,
)
from tests.gem import tiny

TIER = load_tier("smoke")


def one_line(info) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("tier", ["smoke", "gpu"])
def test_every_shipped_variant_makes_a_config(tier):
    rows = load_variants()
    assert {"baseline_padded", "baseline_varlen", "full", "full_same_math", "no_sequence"} <= set(rows)
    for name in rows:
        made = configuration.load(name, tier)
        assert made.variant == name
        assert {k: v.value for k, v in dataclasses.asdict(made.toggles).items()} == {
            k: rows[name][k] for k in TOGGLE_TYPES
        }


def test_toggles_are_enums_and_pick_what_runs():
    made = Config.from_variant(tiny.ROW | {"self_attention": "block", "attention_impl": "v4"}, TIER)
    assert made.toggles.self_attention is SelfAttention.BLOCK and made.toggles.layout is Layout.JAGGED
    assert made.implementations.attention == TIER["implementations"]["attention"]["v4"]
    gpu = Config.from_variant(tiny.ROW | {"gdpa_impl": "tlx"}, load_tier("gpu"))
    assert (gpu.implementations.gdpa, gpu.device, gpu.dtype, gpu.preset) == ("tlx", "cuda", "bfloat16", "base")


def test_no_code_branches_on_a_variants_name():
    for name in load_variants():
        renamed = Config.from_variant(load_variants()[name] | {"variant": "other"}, TIER)
        original = configuration.load(name, "smoke")
        assert renamed.toggles == original.toggles and renamed.implementations == original.implementations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "ragged"}, ["layout", "'ragged'", "padded, jagged"]),
        ({"typo": "1"}, ["unknown column 'typo'", "layout"]),
        ({"compskip": "ON"}, ["compskip", "'ON'", "on, off"]),
        ({"layout": "padded"}, ["layout", "'varlen'"]),
        ({"layout": "padded", "attention_impl": "padded", "gdpa_impl": "tlx"}, ["gdpa_impl", "'tlx'"]),
        ({"layout": "padded", "attention_impl": "padded", "norm": "fused"}, ["norm", "fused"]),
        ({"mx_recipe": "rceil"}, ["mx_recipe", "'rceil'", "bf16"]),
        ({"precision": "mx_full"}, ["mx_recipe", "'none'"]),
    ],
)
def test_bad_rows(change, words):
    with pytest.raises(ValueError) as info:
        Config.from_variant(tiny.ROW | change, TIER)
    assert all(word in one_line(info) for word in ["variant tiny", *words])


def test_missing_column():
    row = {k: v for k, v in tiny.ROW.items() if k != "pooling"}
    with pytest.raises(ValueError, match=r"column 'pooling' is missing"):
        Config.from_variant(row, TIER)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'; allowed: smoke, quality, base, large"):
        Config.from_variant(tiny.ROW, TIER, "huge")
    with pytest.raises(ValueError, match=r"unknown tier 'moon'; allowed: .*smoke"):
        load_tier("moon")
    with pytest.raises(ValueError, match=r"unknown variant 'nope'; allowed: baseline_padded"):
        configuration.load("nope", "smoke")
    with pytest.raises(ValueError, match=r"unknown key train.learning"):
        Config.from_variant(tiny.ROW, TIER | {"train": {"learning": 1}})
    with pytest.raises(ValueError, match=r"implementations\.gdpa has no entry for 'eager'"):
        Config.from_variant(tiny.ROW, TIER | {"implementations": TIER["implementations"] | {"gdpa": {}}})
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        Config.from_variant(tiny.ROW, TIER | {"device": "tpu"})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((30, 4, 1, 1), "width 30 is not divisible by num_heads 4"),
        ((12, 4, 1, 1), "head_dim 3 is odd"),
        ((-8, 2, 1, 1), "width: -8"),
        ((8, 2.0, 1, 1), "2.0 is not an integer"),
        ((8, 2, True, 1), "True is not an integer"),
    ],
)
def test_event_sizes(sizes, words):
    with pytest.raises(ValueError, match=words):
        EventSize(*sizes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": 6}, "num_tokens: 6 is not divisible"),
        ({"num_seeds": 0}, "num_seeds: 0"),
        ({"width": 1.5}, "1.5 is not an integer"),
        ({"num_layers": 1}, "a branch has 2 layers"),
        ({"events": ()}, "events: empty"),
        ({"time_scale": 0.0}, "time_scale"),
    ],
)
def test_model_sizes(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tiny.MODEL, **change)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"dense_lr": -1.0}, {"seeds": ()}, {"seeds": (-1,)}, {"warmup_share": 2}, {"steps": 0}],
)
def test_train_constants(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainConfig(**change)


def test_base_preset_is_the_fixed_one():
    base = PRESETS["base"]
    assert (base.width, base.events[0].num_heads, base.events[0].head_dim) == (512, 4, 128)
    assert set(PRESETS) == {"smoke", "quality", "base", "large"}


def test_variants_file_errors(tmp_path):
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "variants.tsv"
    with pytest.raises(ValueError, match="does not exist"):
        load_variants(tmp_path)
    path.write_text("variant\tlayout\na\tjagged\na\tpadded\n")
    with pytest.raises(ValueError, match="'a' occurs twice"):
        load_variants(tmp_path)
    path.write_text("variant\tlayout\na\tjagged\textra\n")
    with pytest.raises(ValueError, match="another number of columns"):
        load_variants(tmp_path)
