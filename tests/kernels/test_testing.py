"""The helpers that other tests lean on, and the probe of Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.testing import assert_within_eager, make_inputs, poisoned, relative_error, snr_db


def test_the_interpreter_is_probed_and_its_verdict_recorded(interpreter_dtypes, record_property):
    """O24: a dtype whose product is wrong is known as such; float32 and float16 are right."""
    for name, right in interpreter_dtypes.items():
        record_property(f"interpreter_{name}", right)
    assert set(interpreter_dtypes) == {"float32", "float16", "bfloat16"}
    assert interpreter_dtypes["float32"] and interpreter_dtypes["float16"]


def test_poisoned_buffers_hold_nan_and_are_restored():
    with poisoned():
        for made in (torch.empty(3), torch.zeros(3).new_empty(3), torch.empty_like(torch.zeros(3, dtype=torch.half))):
            assert bool(made.isnan().all())
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
        assert bool(torch.empty(2, dtype=torch.bool).all())
    torch.empty(3).fill_(1.0)
    assert torch.empty.__name__ == "empty"


def test_error_measures():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, exact) == 0 and snr_db(exact, exact) == math.inf
    assert relative_error(exact * 1.01, exact) == pytest.approx(0.01, rel=1e-4)
    assert snr_db(exact * 1.01, exact) == pytest.approx(40, abs=0.01)
    assert relative_error(exact, exact * 0) == math.inf and snr_db(exact, exact * 0) == -math.inf
    assert relative_error(exact * 0, exact * 0) == 0


def test_the_budget_is_eagers_own_error_plus_rounding():
    exact = torch.rand(50, dtype=torch.float64)
    eager = (exact + 1e-3).float()
    assert_within_eager((exact - 1e-3).float(), eager, exact)
    with pytest.raises(AssertionError, match=r"weights: error .* above the budget"):
        assert_within_eager((exact + 1.1e-3).float(), eager, exact, name="weights")
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        assert_within_eager(torch.where(torch.arange(50) == 7, torch.nan, eager), eager, exact)
    with pytest.raises(AssertionError, match=r"dtype torch\.float64, expected torch\.float32"):
        assert_within_eager(exact, eager, exact)
    with pytest.raises(AssertionError, match=r"shape \(49,\), expected \(50,\)"):
        assert_within_eager(eager[1:], eager, exact)


def test_inputs_are_seeded_and_shaped():
    first, again = (make_inputs("gdpa", (3, 0, 2), (1, 2, 3), spare_rows=1) for _ in range(2))
    assert torch.equal(first.q.nan_to_num(), again.q.nan_to_num()) and first.q.shape == (6, 2, 16)
    assert bool(first.q[5].isnan().all())
    torch.testing.assert_close(first.k[:6].norm(dim=-1), torch.ones(6, 2))
    fused = make_inputs("block_attention", (3, 2), fused=True)
    assert not fused.q.is_contiguous() and fused.q.stride(-1) == 1 and fused.cos.shape == (5, 8)
    shared = make_inputs("jagged_attention", (3, 2), shared_q=4)
    assert shared.q_offsets is None and shared.do.shape == (2, 4, 2, 16)
    with pytest.raises(ValueError, match="op: 'attention'; allowed"):
        make_inputs("attention", (3,))
    with pytest.raises(ValueError, match="fused: needs self-attention"):
        make_inputs("gdpa", (3,), (2,), fused=True)
