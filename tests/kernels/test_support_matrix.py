"""The support matrices of the READMEs say what the implementations themselves answer.

A table's cells are expanded to probes: one property of a supported call is changed at a time, and the registry's answer
must be the table's. The TLX modules need fbtriton to be imported; what they refuse is plain Python, so without it they
are imported here around an empty stand-in for the language.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import kernels
from kernels import block_attention, gdpa, jagged, jagged_attention
from kernels.block_attention.api import REGISTRY as BLOCK
from kernels.gdpa.activations import ACTIVATIONS
from kernels.gdpa.api import REGISTRY as GDPA
from kernels.jfa.api import REGISTRY as JFA
from kernels.registry import Case, Registry

FOLDER = Path(kernels.__file__).parent
REGISTRIES = {"jfa": JFA, "gdpa": GDPA, "block_attention": BLOCK}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
HEAD_DIMS = (1, 7, 8, 16, 20, 40, 60, 64, 96, 104, 128, 136, 192, 250, 256, 257, 264, 512)
DEVICES = {"cpu": (0, 0), "sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_90": (9, 0), "sm_100": (10, 0)}
NEEDS = {
    "nothing": set(DEVICES),
    "GPU from sm_80": {"sm_80", "sm_86", "sm_90", "sm_100"},
    "Hopper, TLX": {"sm_90"},
}
FEATURES = {"cross": "cross", "shared queries": "shared_q", "window": "window", "bias": "bias", "schedule": "schedule",
            "rotary": "rotary", "other block sizes": "block_size"}  # fmt: skip
ANSWERS = {"yes": True, "ignored": True, "no": False}
TLX = "triton.language.extra.tlx"


def table(folder: str) -> dict[str, dict[str, str]]:
    """impl -> column -> cell of the table under "Implementations"."""
    section = (FOLDER / folder / "README.md").read_text().split("## Implementations")[1]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert all(len(row) == len(head) for row in rows), head
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


ROWS = [(folder, impl) for folder in REGISTRIES for impl in table(folder)]


def head_dims(cell: str) -> set[int]:
    """Probes that a head_dim cell allows."""
    if cell == "any":
        return set(HEAD_DIMS)
    if match := re.fullmatch(r"(\d+) to (\d+) in steps of (\d+)", cell):
        return set(HEAD_DIMS) & set(range(int(match[1]), int(match[2]) + 1, int(match[3])))
    if match := re.fullmatch(r"up to (\d+)", cell):
        return {n for n in HEAD_DIMS if n <= int(match[1])}
    return {int(n) for n in cell.split(", ")}


@pytest.fixture(scope="module")
def registries():
    """Registries whose TLX modules are loaded, around a stand-in where the language is missing; undone afterwards."""
    before = dict(sys.modules)
    missing = importlib.util.find_spec("triton.language.extra") is None or importlib.util.find_spec(TLX) is None
    if missing:
        language, warps = types.ModuleType(TLX), types.ModuleType(f"{TLX}.warp_spec")
        warps.get_bufidx_phase = None
        sys.modules |= {TLX: language, warps.__name__: warps}
    loaded = {}
    for folder, registry in REGISTRIES.items():
        loaded[folder] = Registry(registry.op, registry.package, dict(registry.entries))
        for name in registry.names:
            loaded[folder].load(name)
    yield loaded
    if missing:
        for name in set(sys.modules) - set(before):
            if name.startswith(TLX) or getattr(sys.modules[name], "tlx", None) is language:
                parent, _, child = name.rpartition(".")
                if hasattr(sys.modules.get(parent), child):
                    delattr(sys.modules[parent], child)
                del sys.modules[name]


def case(dtype="bf16", head_dim=64, device="sm_90", features=(), activation=None) -> Case:
    kind = "cpu" if device == "cpu" else "cuda"
    return Case(kind, DEVICES[device], DTYPES[dtype], head_dim, frozenset(features), activation)


def base(folder: str) -> dict:
    return {"activation": "gelu_tanh"} if folder == "gdpa" else {}


@pytest.mark.parametrize("folder", REGISTRIES)
def test_a_table_has_every_implementation_and_known_cells(folder):
    assert list(table(folder)) == sorted(table(folder), key=lambda impl: -REGISTRIES[folder].entries[impl][1])
    assert set(table(folder)) == set(REGISTRIES[folder].names)
    for impl, row in table(folder).items():
        assert row["needs"] in NEEDS, (impl, row["needs"])
        assert set(row["dtypes"].split(", ")) <= set(DTYPES) and row.get("self", "yes") == "yes", impl
        assert all(row[column] in ANSWERS for column in FEATURES if column in row), impl


@pytest.mark.parametrize(("folder", "impl"), ROWS)
def test_a_row_says_what_the_implementation_answers(folder, impl, registries):
    row, plain = table(folder)[impl], base(folder)

    def runs(**change) -> bool:
        return registries[folder].why_not(impl, case(**(plain | change))) is None

    assert runs(), registries[folder].why_not(impl, case(**plain))
    assert {name for name in DTYPES if runs(dtype=name)} == set(row["dtypes"].split(", "))
    assert {n for n in HEAD_DIMS if runs(head_dim=n)} == head_dims(row["head_dim"])
    assert {name for name in DEVICES if runs(device=name)} == NEEDS[row["needs"]]
    for column, feature in FEATURES.items():
        if column in row:
            assert runs(features=(feature,)) == ANSWERS[row[column]], column
    if "activations" in row:
        allowed = ACTIVATIONS if row["activations"] == "all" else tuple(row["activations"].split(", "))
        assert {name for name in ACTIVATIONS if runs(activation=name)} == set(allowed)


@pytest.mark.parametrize(("folder", "impl"), [(f, i) for f, i in ROWS if table(f)[i]["needs"] == "nothing"])
def test_what_needs_nothing_runs_here_with_every_feature(folder, impl):
    """The answers of those that refuse little are held to calls: each dtype, each feature, forward and backward."""
    row = table(folder)[impl]
    offsets, keys = (jagged.lengths_to_offsets(torch.tensor(n)) for n in ((3, 0, 2), (1, 4, 2)))

    def call(dtype="fp32", feature=None):
        def rows(n):
            return torch.randn(n, 2, 6, dtype=DTYPES[dtype]).requires_grad_()

        q, k, v = rows(5), rows(5), rows(5)
        if folder == "block_attention":
            angles = torch.rand(5, 3)
            rotary = kernels.Rotary(angles.cos(), angles.sin()) if feature == "rotary" else None
            size = 2 if feature == "block_size" else 64
            o = block_attention(q, k, v, offsets, block_size=size, rotary=rotary, impl=impl)
        else:
            op, settings, where = (gdpa if folder == "gdpa" else jagged_attention), {}, (offsets,)
            if feature in ("cross", "shared_q"):
                k, v, where = rows(7), rows(7), (None if feature == "shared_q" else offsets, keys)
            elif feature == "window":
                settings = {"window": 1}
            elif feature == "bias":
                settings = {"bias": kernels.Bias(torch.randn(2, 4))}
            elif feature == "schedule":
                lengths = offsets.diff()
                settings = {"schedule": kernels.schedule.tile_schedule(lengths, lengths, 16, 16, 2, "valid")}
            o = op(q, k, v, *where, impl=impl, **settings)
        o.sum().backward()
        assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))

    for dtype in row["dtypes"].split(", "):
        call(dtype)
    for column, feature in FEATURES.items():
        if column in row and ANSWERS[row[column]]:
            call(feature=feature)
        elif column in row:
            with pytest.raises(ValueError, match=f"impl '{impl}' has no {feature}"):
                call(feature=feature)
