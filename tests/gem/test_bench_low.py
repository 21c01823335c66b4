"""Steps of rows in 8 bits on a CPU, where their products are emulated: the check before a time, FLOPs by precision."""

import dataclasses
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem import config as configuration
from gem import hardware, precision, train
from gem.bench import loop, low_reference, model_work, parity, step
from gem.counts import Counts
from gem.sizes import PRESETS, EventSize
from gem.train import Data
from kernels import mxfp8
from kernels.mxfp8 import hopper, hopper_attention, hopper_function

CPU = torch.device("cpu")
DATA = configuration.load_tier("smoke")["data"]
SIZE = dataclasses.replace(
    PRESETS["quality"], events=(EventSize(128, 1, 3, 64), EventSize(64, 1, 1, 64), EventSize(64, 1, 1, 64))
)


def configured(variant="mxfp8_full", dtype="bfloat16"):
    """A row in format hopper of a model whose layers are just large enough for it."""
    config = loop.with_batch(configuration.load(variant, "smoke"), 8)
    implementations = dataclasses.replace(config.implementations, precision="hopper")
    return dataclasses.replace(config, dtype=dtype, model=SIZE, implementations=implementations)


@pytest.fixture(scope="module")
def config():
    return configured()


@pytest.fixture(scope="module")
def small():
    return parity.small_split(DATA)


@pytest.fixture(scope="module")
def model(config, small):
    return train.build(config, Data(small, small), 0, CPU)


def test_8_bits_pass_and_the_error_is_that_against_float32(model, small, config):
    wrong, error = parity.problem(model, parity.whole_batch(small, CPU), config)
    assert wrong is None and 0.01 < error < 0.06  # 8 bits, not bfloat16 alone (0.006)


def first_doubled(operand):
    """One scale of an operand twice what it should be."""
    scale = operand.scale.clone()
    scale.view(-1)[0] *= 2
    return operand._replace(scale=scale)


def columns_rolled(operand):
    return operand._replace(data=operand.data.view(torch.uint8).roll(1, 1).view(operand.data.dtype))


def values_doubled(operands):
    operands.v_scale.view(-1)[0] *= 2
    return operands


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        (hopper, "by_tile", first_doubled),
        (hopper, "by_row", columns_rolled),
        (hopper, "product", lambda y: torch.cat([y[:-1], y[-1:] * 0])),
        (hopper, "product", lambda y: y * 1.1),
        (hopper_attention, "quantize", values_doubled),
        (hopper_attention, "forward_plainly", lambda found: (found[0].roll(1, 0), found[1])),
    ],
    ids=("scale of a tile", "columns", "last row", "a tenth too large", "scale of values", "rows of attention"),
)
def test_a_broken_kernel_fails(model, small, config, owner, name, change):
    right = getattr(owner, name)

    def run(which, *rest):
        with pytest.MonkeyPatch.context() as patch:
            if which is model:  # not its reference
                patch.setattr(owner, name, lambda *given, **more: change(right(*given, **more)))
            return parity.gradients(which, *rest)

    assert parity.problem(model, parity.whole_batch(small, CPU), config, run)[0] is not None


def test_plain_products_are_those_of_the_ops_bit_for_bit(config):
    recipe = dataclasses.replace(mxfp8.get_recipe("full").on_hopper(), stochastic=False, wgrad=True)
    x, dy, weight = torch.randn(96, 256), torch.randn(96, 128), torch.randn(128, 256)

    def outputs():
        leaves = [value.clone().requires_grad_() for value in (x, weight)]
        y = mxfp8.linear(*leaves, recipe=recipe)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    want = outputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "product", None)  # nobody multiplies but the plain form
        with low_reference.Plainly():
            got = outputs()
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))
    emulated = dataclasses.replace(recipe, format="mx")
    with pytest.raises(ValueError, match="format 'mx'; allowed: hopper"), low_reference.Plainly():
        mxfp8.linear(x, weight, recipe=emulated)


def test_attention_has_a_plain_form_in_float32_where_its_kernels_have_none(monkeypatch):
    monkeypatch.setattr(hopper_function, "why_not", lambda q: "needs bfloat16 or float16")
    q, offsets, recipe = torch.randn(40, 2, 128), torch.tensor([0, 30, 40]), mxfp8.get_recipe("full").on_hopper()
    with pytest.raises(ValueError, match="needs bfloat16"):
        mxfp8.jagged_attention_mx(q, q, q, offsets, recipe=recipe)
    with low_reference.Plainly():
        assert mxfp8.jagged_attention_mx(q, q, q, offsets, recipe=recipe).dtype == torch.float32
    with pytest.raises(ValueError, match="needs bfloat16"):
        mxfp8.jagged_attention_mx(q, q, q, offsets, recipe=recipe)


# FLOPs by precision


@pytest.mark.parametrize("variant", ("mxfp8_attention", "mxfp8_mlp", "mxfp8_full"))
def test_flops_in_8_bits_are_those_that_ran(variant, small):
    config = configured(variant)
    model, batch = train.build(config, Data(small, small), 0, CPU), parity.whole_batch(small, CPU)
    with FlopCounterMode(display=False) as counter:
        parity.gradients(model, batch, config)
    ran = {str(op).removeprefix("gem_kernels."): number for op, number in counter.get_flop_counts()["Global"].items()}
    high = sum(  # the recipe's weight gradients, which the op of the backward counts too
        number / 2 for name, number in ran.items() if name == "mx_linear_backward"
    )
    low = sum(ran.get(name, 0) for name in ("mx_linear", "mx_linear_backward", "hopper_attention")) - high
    counts = Counts(batch.size, batch.lengths)
    assert model_work.low_flops(model, counts) == low > 0
    work = model_work.of_steps(model, config, [counts, counts])
    assert work.low == 2 * low < work.model and work.model == 2 * model.step_flops(counts)


def test_emulated_and_high_rows_have_no_flops_in_8_bits(small):
    counts = Counts(8, parity.whole_batch(small, CPU).lengths)
    for variant, name in (("mxfp8_full", "mx"), ("full", "hopper")):
        config = configured(variant)
        config = dataclasses.replace(
            config, implementations=dataclasses.replace(config.implementations, precision=name)
        )
        assert model_work.low_flops(train.build(config, Data(small, small), 0, CPU), counts) == 0


def test_mfu_mixed_divides_each_precision_by_its_own_peak(monkeypatch):
    monkeypatch.setattr(hardware, "dense_peak", lambda name, precision: hardware.Peak(f"{name} {precision}", 200.0))
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")
    rows = []
    run = types.SimpleNamespace(add=lambda **row: rows.append(row))
    work = model_work.Work(model=100, low=40, done=100, tokens=1, samples=1)
    done = loop.Done(None, (1000.0,), ())
    for device, low in (("cuda", 40), ("cuda", 0), ("cpu", 40)):
        task = types.SimpleNamespace(device=torch.device(device), config=configured())
        works = [dataclasses.replace(work, low=low)]
        step.StepTask.add_mixed(task, run, {"note": "local batch 8"}, done, works, hardware.Peak("bf16", 100.0))
    assert [row["p50"] for row in rows] == pytest.approx([60 / 100 + 40 / 200, 1.0, 1.0])
    assert rows[0]["note"] == "local batch 8; 40.0% of the FLOPs in 8 bits; peak: a GPU fp8"
    assert rows[1]["note"] == "local batch 8; every product ran in bfloat16"


def test_a_row_in_real_8_bits_is_prepared_and_checked(config, monkeypatch):
    monkeypatch.setattr(step.configuration, "load", lambda *given: config)
    task = step.StepTask("mxfp8_full", step.Options("smoke", "trial", batch=8, repeat_ms=1.0))
    task.prepare()
    assert task.failure is None and any(isinstance(module, precision.MXLinear) for module in task.model.modules())
