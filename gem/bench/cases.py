"""A row of config/kernels.tsv as tensors on a device, with its FLOPs, bytes, bound, and the right answer for part of
it.

The right answer is the op's reference in float64. It is computed for a few sequences only: a sequence's result
depends on that sequence alone, so those rows of a full-size run can be compared. Queries that all sequences share are
the exception (their gradient sums over the batch); such cases are checked whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kernels import bounds, flops, jagged

ATTENTION = ("jagged_attention", "gdpa", "block_attention")
ROWWISE = ("rotary", "layer_norm", "rms_norm")
LOW_PRECISION = ("mx_linear", "norm_quantize")
OPS = (*ATTENTION, *ROWWISE, "norm_gdpa_norm", *LOW_PRECISION)
FOLDERS = {"jagged_attention": "jfa", "gdpa": "gdpa", "block_attention": "block_attention", "rotary": "rotary"}
MAX_CHECKED_PAIRS = 2**27  # query-key pairs of one head in float64: 1 GiB a score matrix
CHECKED_SEQUENCES = 8


@dataclass
class Case:
    """Tensors of one benchmark case. q_offsets None: queries shared by all sequences. Lengths live on the CPU."""

    row: dict
    device: torch.device
    q_lengths: torch.Tensor
    kv_lengths: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    q_offsets: torch.Tensor | None
    kv_offsets: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def op(self) -> str:
        return self.row["op"]

    @property
    def window(self) -> int | None:
        return int(self.row["window"]) if self.row["window"] else None

    @property
    def is_self(self) -> bool:
        return self.row["kind"] == "self"

    @property
    def scale(self) -> float:
        return 1.0 if self.op in ("gdpa", "norm_gdpa_norm") else self.q.shape[-1] ** -0.5

    @property
    def max_q(self) -> int:
        return int(self.q_lengths.max())

    @property
    def max_kv(self) -> int:
        return int(self.kv_lengths.max())

    @property
    def rotary(self):
        """The case's rotary tables as an argument of block_attention, or None."""
        from kernels import Rotary

        return None if self.cos is None else Rotary(self.cos, self.sin)

    def keywords(self, *, hints: bool = True) -> dict:
        """Keyword arguments of an implementation's forward and backward, as in its api.py."""
        if self.op == "block_attention":
            return {"block_size": 64, "scale": self.scale, "rotary": self.rotary}
        own = {"activation": self.row["activation"]} if self.op == "gdpa" else {"window": self.window, "bias": None}
        lengths = {"max_q_len": self.max_q, "max_kv_len": self.max_kv} if hints else {}
        return own | {"scale": self.scale, "schedule": None} | lengths

    def flops(self, phase: str) -> int:
        """Useful FLOPs; the backward by the kernel convention (scores recomputed once)."""
        phase = {"bwd": "bwd_kernel"}.get(phase, phase)
        heads, width = self.q.shape[-2:]
        if self.op in ROWWISE or self.op == "norm_quantize":
            return 0
        if self.op == "mx_linear":
            return 2 * self.q.shape[0] * (heads * width) ** 2 * (1 if phase == "fwd" else 2)
        if self.op == "block_attention":
            return flops.block_attention(self.q_lengths, heads, width, phase=phase)
        if self.op == "jagged_attention":
            return flops.jagged_attention(
                self.q_lengths, self.kv_lengths, heads, width, window=self.window, phase=phase
            )
        return flops.gdpa(self.q_lengths, self.kv_lengths, heads, width, phase=phase)

    def bytes(self, phase: str) -> int:
        """Bytes that must cross device memory at least once."""
        heads, width, size = *self.q.shape[-2:], self.q.element_size()
        if self.op == "norm_quantize":
            return self.q.numel() * (size + 1) + 4 * self.q.numel() // 128
        if self.op == "mx_linear":
            return size * (2 * self.q.numel() + (heads * width) ** 2) * (1 if phase == "fwd" else 2)
        if self.op in ROWWISE:
            return self.q.numel() * size * (2 if phase == "fwd" or self.op == "rotary" else 3)
        if self.op == "block_attention":
            return flops.block_attention_bytes(self.q_lengths, heads, width, element_size=size, phase=phase)
        return flops.attention_bytes(
            self.q_lengths,
            self.kv_lengths,
            heads,
            width,
            element_size=size,
            shared_q=self.q_offsets is None,
            lse=self.op == "jagged_attention",
            phase=phase,
        )

    def bound(self, phase: str, chip: str, ceilings: bounds.Ceilings, dtype: torch.dtype | None = None) -> bounds.Bound:
        """Least time that the chip allows; dtype: of the operands, None = the case's. ValueError where the chip is not
        known."""
        heads, width = self.q.shape[-2:]
        op = {"layer_norm": "norm", "rms_norm": "norm", "norm_gdpa_norm": "gdpa"}.get(self.op, self.op)
        op = {"mx_linear": "linear", "norm_quantize": "quantize"}.get(op, op)
        needs_keys = op in ("jagged_attention", "gdpa") and not self.is_self
        return bounds.bound(
            op,
            self.q_lengths,
            self.kv_lengths if needs_keys else None,
            heads,
            width,
            "bwd_kernel" if phase == "bwd" and op in ATTENTION else phase,
            self.q.dtype if dtype is None else dtype,
            self.row["activation"] or None,
            chip,
            ceilings=ceilings,
            window=self.window,
            shared_q=self.q_offsets is None,
            rotary=self.cos is not None and op == "block_attention",
        )


def build(row: dict, device: str | torch.device) -> Case:
    """Tensors of a row, drawn on the device from its seed.

    Gdpa's q and k rows have unit length, as QK-norm leaves them.
    """
    if row["op"] not in OPS:
        raise ValueError(f"config/kernels.tsv: row {row['case']}: op {row['op']!r}; allowed: {', '.join(OPS)}")
    device, dtype, seed = torch.device(device), getattr(torch, row["dtype"]), int(row["seed"])
    batch, heads, width = int(row["batch"]), int(row["num_heads"]), int(row["head_dim"])
    generator = torch.Generator().manual_seed(seed)
    shared = row["shared_q"] == "yes"
    q_lengths = jagged.sample_lengths(row["q_law"], batch, int(row["q_max"]), _fill(row["q_fill"]), generator)
    kv_lengths = q_lengths
    if row["kind"] != "self":
        kv_lengths = jagged.sample_lengths(row["kv_law"], batch, int(row["kv_max"]), _fill(row["kv_fill"]), generator)
    draws = torch.Generator(device).manual_seed(seed)
    unit = row["op"] == "gdpa"

    def rows(*shape: int, unit: bool = False) -> torch.Tensor:
        x = torch.randn(*shape, heads, width, generator=draws, device=device, dtype=torch.float32)
        return (torch.nn.functional.normalize(x, dim=-1) if unit else x).to(dtype)

    total_q, total_kv = int(q_lengths.sum()), int(kv_lengths.sum())
    q = rows(int(row["q_max"]) if shared else total_q, unit=unit)
    do = rows(batch, int(row["q_max"])) if shared else rows(total_q)
    k, v = rows(total_kv, unit=unit), rows(total_kv)
    kv_offsets = jagged.lengths_to_offsets(kv_lengths, torch.int32).to(device)
    same = row["kind"] == "self"
    q_offsets = kv_offsets if same else jagged.lengths_to_offsets(q_lengths, torch.int32).to(device)
    case = Case(row, device, q_lengths, kv_lengths, q, k, v, do, None if shared else q_offsets, kv_offsets)
    features = {"shared_q"} if shared else ({"cross"} if not same else set())
    if case.window is not None:
        features.add("window")
    if row["op"] == "rotary" or any(impl.endswith("_rotary") for impl in row["impls"].split(",")):
        angles = torch.rand(total_q, width // 2, generator=draws, device=device) * (2 * torch.pi)
        case.cos, case.sin = angles.cos(), angles.sin()
        features.add("rotary")
    case.features = frozenset(features)
    return case


def _fill(text: str) -> float | None:
    return float(text) if text else None


@dataclass
class Exact:
    """Right values of the checked rows.

    values: name -> (float64, same dtype by the plain formula). `pick` takes those rows out of a full-size result.
    """

    values: dict[str, tuple[torch.Tensor, torch.Tensor]]
    pick: Callable[[str, torch.Tensor], torch.Tensor]


def exact(case: Case, phases: tuple[str, ...]) -> Exact:
    """Reference results (o and, with phase bwd, dq, dk, dv) of a few sequences."""
    chosen, heads = _chosen(case)
    part, q_rows, kv_rows = _part(case, chosen, heads)
    shared = case.q_offsets is None

    def pick(name: str, x: torch.Tensor) -> torch.Tensor:
        rows = kv_rows if name in ("dk", "dv") and case.op in ATTENTION + ("norm_gdpa_norm",) else q_rows
        if shared and name == "o":
            rows = torch.tensor(chosen, device=case.device)
        elif shared and name == "dq":
            return x[:, heads]
        return x[rows][..., heads, :]

    wide = _plain(part, torch.float64, phases)
    own = _plain(part, case.q.dtype, phases)
    return Exact({name: (wide[name], own[name]) for name in wide}, pick)


def _chosen(case: Case) -> tuple[list[int], slice]:
    """Sequences and heads to check: the shortest, the longest and some between, within MAX_CHECKED_PAIRS."""
    if case.q_offsets is None:
        return list(range(len(case.kv_lengths))), slice(None)
    pairs = case.q_lengths * case.kv_lengths
    order = torch.argsort(pairs, stable=True).tolist()
    step = max(1, (len(order) - 1) // (CHECKED_SEQUENCES - 1))
    picked = list(dict.fromkeys([order[0], order[-1], *order[::step]]))[:CHECKED_SEQUENCES]
    kept, total = [], 0
    for index in sorted(picked, key=lambda i: int(pairs[i])):
        total += int(pairs[index])
        if not kept or total <= MAX_CHECKED_PAIRS:
            kept.append(index)
    large = int(pairs[kept].sum()) > MAX_CHECKED_PAIRS // 16
    fused = case.op not in ATTENTION  # norms and linear layers run over all heads
    return sorted(kept), slice(0, 1) if large and not fused else slice(None)


def _part(case: Case, chosen: list[int], heads: slice) -> tuple[Case, torch.Tensor, torch.Tensor]:
    kv_rows = _rows_of(case.kv_lengths, chosen).to(case.device)
    shared = case.q_offsets is None
    q_rows = kv_rows if shared else _rows_of(case.q_lengths, chosen).to(case.device)
    index = torch.tensor(chosen)
    offsets = {
        name: jagged.lengths_to_offsets(lengths[index], torch.int64).to(case.device)
        for name, lengths in (("q", case.q_lengths), ("kv", case.kv_lengths))
    }
    q = case.q[:, heads] if shared else case.q[q_rows][:, heads]
    do = case.do[chosen][:, :, heads] if shared else case.do[q_rows][:, heads]
    part = Case(
        case.row,
        case.device,
        case.q_lengths[index],
        case.kv_lengths[index],
        q,
        case.k[kv_rows][:, heads],
        case.v[kv_rows][:, heads],
        do,
        None if shared else offsets["q"],
        offsets["kv"],
        features=case.features,
    )
    if case.cos is not None:
        part.cos, part.sin = case.cos[q_rows], case.sin[q_rows]
    return part, q_rows, kv_rows


def _rows_of(lengths: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    ends = lengths.cumsum(0)
    return torch.cat([torch.arange(int(ends[i] - lengths[i]), int(ends[i])) for i in chosen])


def _plain(part: Case, dtype: torch.dtype, phases: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Results of the op by its reference (float64) or its plain torch form (the case's own dtype)."""
    q, k, v, do = (x.to(dtype) for x in (part.q, part.k, part.v, part.do))
    if part.op not in ATTENTION:
        return _autograd(plain_function(part), (q, k, v), do, phases)
    module = importlib.import_module(f"kernels.{FOLDERS[part.op]}.{'reference' if dtype == torch.float64 else 'eager'}")
    implementation = module.IMPLEMENTATION
    keywords = part.keywords(hints=False)
    if part.op == "block_attention":
        o = implementation.forward(q, k, v, part.kv_offsets, **keywords)
        grads = partial(implementation.backward, do, q, k, v, o, part.kv_offsets, **keywords)
    else:
        keywords |= {"max_q_len": None, "max_kv_len": None}
        result = implementation.forward(q, k, v, part.q_offsets, part.kv_offsets, **keywords)
        o, saved = (result[0], result) if part.op == "jagged_attention" else (result, ())
        grads = partial(implementation.backward, do, q, k, v, *saved, part.q_offsets, part.kv_offsets, **keywords)
    values = {"o": o}
    if "bwd" in phases:
        values |= dict(zip(("dq", "dk", "dv"), grads()[:3], strict=True))
    return values


def plain_function(case: Case) -> Callable:
    """Plain torch form f(q, k, v) of a row-wise op or of norm + GDPA + norm; unused arguments are ignored."""
    if case.op == "rotary":
        return lambda q, k, v: turn(q, case.cos, case.sin)
    if case.op in ("layer_norm", "rms_norm", "norm_quantize"):
        norm = torch.nn.functional.layer_norm if case.op == "layer_norm" else torch.nn.functional.rms_norm
        return lambda q, k, v: norm(q.flatten(1), (q.shape[1] * q.shape[2],), eps=1e-5).view_as(q)
    if case.op == "mx_linear":
        return lambda q, k, v: (q.flatten(1) @ linear_weight(case, q.dtype).T).view_as(q)
    from kernels.fused_norm.api import pffn

    return lambda q, k, v: pffn(
        q, k, v, case.q_offsets, case.kv_offsets, activation=case.row["activation"], scale=case.scale, impl="reference"
    )


def linear_weight(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Weight [K, K] of an mx_linear case, K = heads * head_dim, rounded to the case's dtype; the same in every call."""
    width = case.q.shape[1] * case.q.shape[2]
    draws = torch.Generator(case.device).manual_seed(int(case.row["seed"]) + 1)
    weight = torch.randn(width, width, generator=draws, device=case.device) * width**-0.5
    return weight.to(getattr(torch, case.row["dtype"])).to(dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on interleaved pairs, as a model's author would write it."""
    a, b = (
        x.float().unflatten(-1, (-1, 2)).unbind(-1) if x.dtype != torch.float64 else x.unflatten(-1, (-1, 2)).unbind(-1)
    )
    cos, sin = cos[:, None].to(a.dtype), sin[:, None].to(a.dtype)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def _autograd(function: Callable, tensors: tuple, do: torch.Tensor, phases: tuple[str, ...]) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = function(*leaves)
    values = {"o": o.detach()}
    if "bwd" in phases:
        grads = torch.autograd.grad(o, leaves, do, allow_unused=True)
        values |= {name: grad for name, grad in zip(("dq", "dk", "dv"), grads, strict=True) if grad is not None}
    return values
