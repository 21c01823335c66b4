"""How the tests of gdpa call it: any inputs, or a toy of one column that can be worked out by hand."""

import pytest
import torch

from kernels import gdpa
from kernels.jagged import lengths_to_offsets
from kernels.testing import poisoned

IMPLS = ("reference", "eager")


both = pytest.mark.parametrize("impl", IMPLS)


def offsets(*lengths, dtype=torch.int64):
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype)


def run(inputs, dtype=None, impl="eager", **kwargs):
    """(o, dq, dk, dv) of one call on fresh leaves."""
    x = inputs.leaves(dtype)
    o = gdpa(*x.args, impl=impl, **kwargs)
    o.backward(torch.nan_to_num(x.do) if o.shape == x.do.shape else x.do)
    return o.detach(), x.q.grad, x.k.grad, x.v.grad


def toy(q, k, v, q_offsets, kv_offsets, impl, dtype=torch.float32, **kwargs):
    """H = 1, D = 16, only coordinate 0 non-zero, dO = 1 there; returns coordinate 0 of (o, dq, dk, dv)."""

    def wide(values):
        x = torch.zeros(len(values), 1, 16, dtype=dtype)
        x[:, 0, 0] = torch.tensor(values)
        return x.requires_grad_()

    q, k, v = wide(q), wide(k), wide(v)
    with poisoned():
        o = gdpa(q, k, v, q_offsets, kv_offsets, impl=impl, **kwargs)
        do = torch.zeros_like(o)
        do[:, 0, 0] = 1
        o.backward(do)
    assert o[..., 1:].eq(0).all()
    return [x[:, 0, 0].detach().double() for x in (o, q.grad, k.grad, v.grad)]
