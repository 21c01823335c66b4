"""What tests and benchmarks share: error budgets, signal-to-noise, poisoned buffers, length patterns and inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from .jagged import lengths_to_offsets


@dataclass(frozen=True)
class Pattern:
    """Lengths of a batch. kv None: self-attention."""

    name: str
    q: tuple[int, ...]
    kv: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


LENGTH_PATTERNS = [
    Pattern("empty_in_the_middle", (2, 0, 1)),
    Pattern("all_empty", (0, 0, 0)),
    Pattern("no_sequences", ()),
    Pattern("single_row", (1,)),
    Pattern("single_sequence", (6,)),
    Pattern("one_row_of_many", (0, 0, 0, 0, 1)),
    Pattern("tile_edges", (1, 63, 64, 65, 127, 128, 129)),
    Pattern("skewed", (3, 0, 5, 100)),
    Pattern("not_causal", (100, 37, 0, 64)),
    Pattern("last_empty", (70, 3, 0)),
    Pattern("cross_no_keys", (2, 1, 0, 2), (1, 0, 3, 2)),
    Pattern("cross_no_queries", (0, 0, 50), (0, 1, 99)),
    Pattern("cross_one_query", (0, 1, 1, 0), (0, 4, 2, 0)),
    Pattern("cross_short_keys", (130, 1, 65), (7, 64, 1)),
]


@dataclass
class Inputs:
    """Arguments of one op call. kv_offsets None: self-attention. q_offsets None: queries shared by all sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_offsets: torch.Tensor | None
    kv_offsets: torch.Tensor | None
    do: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    @property
    def args(self) -> tuple:
        """(q, k, v, q_offsets, kv_offsets), the positional arguments of jagged_attention and gdpa."""
        return self.q, self.k, self.v, self.q_offsets, self.kv_offsets

    def leaves(self, dtype: torch.dtype | None = None) -> Inputs:
        """The same values as fresh autograd leaves, in another dtype if given."""

        def leaf(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()

        do = self.do.detach().to(dtype or self.do.dtype)
        q, k, v = leaf(self.q), leaf(self.k), leaf(self.v)
        return Inputs(q, k, v, self.q_offsets, self.kv_offsets, do, self.cos, self.sin)


def make_inputs(
    op: str,
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int] | None = None,
    *,
    num_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shared_q: int | None = None,
    spare_rows: int = 0,
    offsets_dtype: torch.dtype = torch.int64,
    fused: bool = False,
) -> Inputs:
    """Seeded inputs of an op: "jagged_attention", "gdpa" or "block_attention".

    kv_lengths None: self-attention. shared_q: number of query rows shared by all sequences (then kv_lengths, or
    q_lengths when it is None, are the keys' lengths). spare_rows: rows past the end, filled with NaN. fused: q, k, v
    are views of one [T, H, 3 D] buffer (self-attention). For gdpa q and k rows have unit length, as QK-norm leaves
    them, so that |scores| <= 1. Drawn on the CPU, so the values do not depend on the device.
    """
    if op not in ("jagged_attention", "gdpa", "block_attention"):
        raise ValueError(f"op: {op!r}; allowed: jagged_attention, gdpa, block_attention")
    generator = torch.Generator().manual_seed(seed)
    draw = torch.float64 if dtype == torch.float64 else torch.float32

    def rows(total: int, spare: int, unit: bool) -> torch.Tensor:
        x = torch.randn(total, num_heads, head_dim, generator=generator, dtype=draw)
        if unit:
            x = torch.nn.functional.normalize(x, dim=-1)
        return torch.cat([x, x.new_full((spare, num_heads, head_dim), float("nan"))]).to(device, dtype)

    def offsets_of(lengths: Sequence[int]) -> torch.Tensor:
        return lengths_to_offsets(torch.tensor(list(lengths), dtype=torch.int64), offsets_dtype).to(device)

    if shared_q is not None and kv_lengths is None:
        kv_lengths = q_lengths
    self_attention = kv_lengths is None
    keys = list(q_lengths if self_attention else kv_lengths)
    unit = op == "gdpa"
    total_q = sum(q_lengths) if shared_q is None else shared_q
    q = rows(total_q, spare_rows if shared_q is None else 0, unit)
    k, v = rows(sum(keys), spare_rows, unit), rows(sum(keys), spare_rows, False)
    do = rows(total_q if shared_q is None else len(keys) * shared_q, spare_rows if shared_q is None else 0, False)
    if shared_q is not None:
        do = do.view(len(keys), shared_q, num_heads, head_dim)
    if fused:
        if not self_attention:
            raise ValueError("fused: needs self-attention; allowed: kv_lengths None and shared_q None")
        q, k, v = torch.cat([q, k, v], dim=-1).split(head_dim, dim=-1)
    kv_offsets = offsets_of(keys)
    inputs = Inputs(q, k, v, kv_offsets if self_attention else None, None if self_attention else kv_offsets, do)
    if shared_q is None and not self_attention:
        inputs.q_offsets = offsets_of(q_lengths)
    angles = torch.rand(q.shape[0], head_dim // 2, generator=generator) * (2 * math.pi)
    inputs.cos, inputs.sin = angles.cos().to(device), angles.sin().to(device)
    return inputs


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the error over that of the exact value; 0.0 for two zeros."""
    actual, exact = actual.detach().double(), exact.detach().double()
    error, norm = (actual - exact).norm().item(), exact.norm().item()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


def snr_db(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB; inf when equal."""
    error = relative_error(actual, exact)
    return float("inf") if error == 0 else (-float("inf") if math.isinf(error) else -20 * math.log10(error))


def error_budget(eager: torch.Tensor, exact: torch.Tensor, *, roundings: float = 2.0, terms: float = 0.0) -> float:
    """Largest allowed absolute error: same-dtype eager's own against float64, plus `roundings` units of the last place.

    The unit is relative to the largest exact value. terms: size of the terms that the result is a sum of, where they
    cancel (a gradient that vanishes because its two parts are equal): adds `roundings` units of theirs in the
    accumulator, which is float32, or float64 for float64 results.
    """
    exact = exact.detach().double()
    if exact.numel() == 0:
        return 0.0
    own = (eager.detach().double() - exact).abs().max().item()
    accumulator = torch.float64 if eager.dtype == torch.float64 else torch.float32
    units = torch.finfo(eager.dtype).eps * exact.abs().max().item() + torch.finfo(accumulator).eps * terms
    return own + roundings * units


def assert_within_eager(
    actual: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    *,
    name: str = "output",
    roundings: float = 2.0,
    terms: float = 0.0,
) -> None:
    """AssertionError unless `actual` is as close to the float64 `exact` as same-dtype `eager` is, up to rounding.

    Shape and dtype must be those of `eager`, and every element finite. roundings, terms: see error_budget.
    """
    assert actual.shape == eager.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(eager.shape)}"
    assert actual.dtype == eager.dtype, f"{name}: dtype {actual.dtype}, expected {eager.dtype}"
    actual = actual.detach()
    bad = (~actual.isfinite()).sum().item()
    assert bad == 0, f"{name}: {bad} elements are not finite"
    if actual.numel() == 0:
        return
    budget = error_budget(eager, exact, roundings=roundings, terms=terms)
    error = (actual.double() - exact.detach().double()).abs().max().item()
    assert error <= budget, f"{name}: error {error:.3e} above the budget {budget:.3e} (eager's own error plus rounding)"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Make every uninitialised tensor that Python code asks for full of NaN (integers: the largest value, bool: True).

    Covers torch.empty, empty_like, empty_strided and Tensor.new_empty, called through these names, so that an output
    row nobody wrote shows in a comparison.
    """

    def fill(x: torch.Tensor) -> torch.Tensor:
        if x.dtype.is_floating_point or x.dtype.is_complex:
            return x.fill_(float("nan"))
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

    def wrap(function):
        return lambda *args, **kwargs: fill(function(*args, **kwargs))

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
