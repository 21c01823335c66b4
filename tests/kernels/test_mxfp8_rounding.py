"""The emulation's fast rounding equals encoding to bytes and decoding them."""

import pytest
import torch

from kernels.mxfp8 import formats, quantize, round_to_mx


@pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2], ids=lambda f: f.name)
def test_every_element_and_every_midpoint(fmt):
    """Ties to even included: midpoints of neighbouring elements, and the floats on either side of them."""
    elements = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    elements = elements[elements.isfinite()].unique()
    middle = (elements[1:] + elements[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, edge)) for edge in (-1e9, 1e9)]
    x = torch.cat([elements, middle, *near])
    assert torch.equal(formats.round_to_elements(x, fmt), formats.saturating_cast(x, fmt.dtype).float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale_mode", formats.SCALE_MODES)
@pytest.mark.parametrize("block,dims", [((1, 32), (1,)), ((32, 32), (0, 1))])
def test_round_trip_equals_bytes(block, dims, scale_mode, dtype):
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(70, 50, generator=g) * torch.exp(12 * torch.randn(70, 50, generator=g))
    extreme = torch.full((32, 64), 2.0**-149)
    extreme[:, 32:] = 2.0**127
    bad = torch.randn(32, 64, generator=g)
    bad[3, 5], bad[7, 40] = float("inf"), float("nan")
    for x in (torch.randn(96, 64, generator=g), wide, torch.zeros(33, 40), extreme, bad):
        slow = quantize(x, axis=1, block=block, dtype=dtype, scale_mode=scale_mode).dequantize()
        fast = round_to_mx(x, dims, dtype=dtype, scale_mode=scale_mode)
        assert torch.equal(fast.nan_to_num(123.0), slow.nan_to_num(123.0))
