"""Shards as FP8 messages: the definition, and its Triton kernels byte for byte under the interpreter and for sm_90."""

import pytest
import torch

from gem.parallel import fp8_rows
from tests.kernels import triton_interpreted
from tests.parallel import fp8_rows_checks


@pytest.fixture(scope="module")
def found():
    return triton_interpreted.results("tests.parallel.fp8_rows_checks")


@pytest.mark.parametrize("check", fp8_rows_checks.CHECKS)
def test_interpreted(found, check):
    assert found[check] is None, found[check]


def test_rows_of_zeros_and_large_values_survive():
    x = torch.tensor([[0.0] * 4, [1.0, -448.0, 2.0, 0.5], [1e30, 1e-30, 0.0, -1e30]])
    data, scale = fp8_rows.quantise_rows(x)
    back = data.float() * scale
    assert torch.equal(back[0], x[0]) and torch.equal(back[1], x[1]) and back.isfinite().all()
    assert back[2].tolist() == pytest.approx([1e30, 0.0, 0.0, -1e30], rel=0.05)


def test_a_message_is_the_elements_and_then_the_scales():
    x = torch.randn(6, 32)
    message = fp8_rows.to_message(x)
    assert message.numel() == fp8_rows.message_bytes(6, 32) == 6 * 32 + 6 * 4
    data, scale = fp8_rows.parts_of(message, 6, 32)
    assert torch.equal(scale[:, 0], x.abs().amax(1) / 448) and data.data_ptr() == message.data_ptr()
    whole = fp8_rows.from_messages(torch.cat((message, message)), 6, 32, torch.float32)
    assert torch.equal(whole[:6], whole[6:]) and ((whole[:6] - x).norm() / x.norm()).item() < 0.04
    with pytest.raises(ValueError, match=r"shape \(4,\); allowed: \[rows, features\]"):
        fp8_rows.quantise_rows(torch.ones(4))
    with pytest.raises(ValueError, match="rows of 40 bytes; allowed: 32 and a code for each 32"):
        fp8_rows.from_mx_rows(torch.zeros(2, 40, dtype=torch.uint8), 32, torch.float32)


def test_kernels_move_whole_lines_without_spilling(monkeypatch):
    """Compiled for sm_90 without a GPU: 16 bytes a load and a store, nothing spilled."""
    if not fp8_rows.COMPILED:
        pytest.skip("TRITON_INTERPRET is set: the kernels are not compiled")
    from tests.kernels.triton_offline import compiling

    monkeypatch.setattr(fp8_rows, "runs_in_kernel", lambda x: True)
    x = torch.empty(2048, 512, device="meta")
    messages = torch.empty(2 * fp8_rows.message_bytes(2048, 512), dtype=torch.uint8, device="meta")
    with compiling(sass=True) as compiled:
        fp8_rows.quantise_rows(x)
        fp8_rows.from_messages(messages, 2048, 512, torch.bfloat16)
        fp8_rows.from_mx_rows(torch.empty(2048, 528, dtype=torch.uint8, device="meta"), 512, torch.bfloat16)
    assert [c.name for c in compiled] == ["_quantise", "_restore", "_restore"]
    for kernel in compiled:
        assert kernel.local_bytes == 0 and "LDG.E.128" in kernel.sass and "STG.E.128" in kernel.sass
