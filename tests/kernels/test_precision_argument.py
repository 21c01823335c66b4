"""precision= of the attention ops: a Recipe runs the emulated MX numerics, anything else is one clear error."""

import pytest
import torch

from kernels import gdpa, jagged_attention, mxfp8
from kernels.jagged import lengths_to_offsets

RECIPE = mxfp8.RECIPES["rceil"]


def call(op, **kwargs):
    x = torch.randn(70, 2, 32, generator=torch.Generator().manual_seed(0)) / 4
    offsets = lengths_to_offsets(torch.tensor([0, 65, 5]))
    return op(x, x, x, offsets, **kwargs)


@pytest.mark.parametrize("op,emulated", [(jagged_attention, mxfp8.jagged_attention_mx), (gdpa, mxfp8.gdpa_mx)])
def test_recipe_gives_the_emulated_numerics(op, emulated):
    low, exact = call(op, precision=RECIPE), call(op)
    assert torch.equal(low, call(emulated, recipe=RECIPE))
    error = (low - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("op", [jagged_attention, gdpa])
def test_errors(op):
    with pytest.raises(ValueError, match=r"precision is 'fp8'; allowed: None .*Recipe"):
        call(op, precision="fp8")
    with pytest.raises(ValueError, match=r"impl 'eager' with a precision; allowed: 'auto'"):
        call(op, precision=RECIPE, impl="eager")
