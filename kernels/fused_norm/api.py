"""Public forms of the norms: alone, with rotary, and around GDPA."""

from __future__ import annotations

import importlib
import math

import torch

from ..gdpa import activations
from ..gdpa.api import _select as _select_gdpa
from ..registry import Implementation, Registry
from ..rotary.api import check_tables
from ..selection import selector, static
from ..validation import FLOAT_DTYPES, accumulation_dtype, check_attention, check_scale, unit_last_stride
from .function import norm_op, norm_rotary_op, pffn_op

KINDS = ("layer", "rms")


class _Family(Registry):
    """Registry of one op of this package, whose modules hold several ops: IMPLEMENTATIONS[op], not IMPLEMENTATION."""

    def load(self, name: str) -> Implementation | str:
        if name not in self.entries:
            raise ValueError(f"{self.op}: unknown impl {name!r}; allowed: auto, {', '.join(self.names)}")
        if name not in self._loaded:
            try:
                module = importlib.import_module(self.entries[name][0], self.package)
                self._loaded[name] = module.IMPLEMENTATIONS.get(self.op, f"has no {self.op}")
            except ImportError as error:
                self._loaded[name] = f"cannot be imported ({error})"
        return self._loaded[name]


REGISTRIES = {op: _Family(op, __package__) for op in ("norm", "norm_rotary", "pffn")}
for _registry in REGISTRIES.values():
    _registry.add("triton", ".triton_ops", 30)
    _registry.add("reference", ".reference", 10)
REGISTRIES["pffn"].add("eager", ".eager", 20)
_select = {op: selector(registry) for op, registry in REGISTRIES.items()}
_select_norm, _select_norm_rotary, _select_pffn = (_select[op] for op in ("norm", "norm_rotary", "pffn"))


def _check_norm(op: str, x: torch.Tensor, kind: str, eps: float) -> float:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOAT_DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{op}: x is {got}; allowed: a floating tensor")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; allowed: [..., N] with N >= 1")
    if kind not in KINDS:
        raise ValueError(f"{op}: kind is {kind!r}; allowed: {', '.join(KINDS)}")
    return _check_eps(op, eps)


def _check_eps(op: str, eps: float) -> float:
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"{op}: eps is {eps!r}; allowed: a finite number > 0")
    return float(eps)


def norm(x: torch.Tensor, *, kind: str = "rms", eps: float = 1e-5, impl: str = "auto") -> torch.Tensor:
    """LayerNorm ("layer") or RMSNorm ("rms") of x [..., N] over the last dimension, without weights.

    The source leaves the affine part out of its norms. Floating x, any strides; statistics in float32 (float64 for
    float64). Returns y like x, contiguous. ValueError: unknown kind or impl, eps <= 0, N = 0.
    """
    eps = _check_norm("norm", x, kind, eps)
    rows = unit_last_stride(x.reshape(-1, x.shape[-1]))
    return norm_op(rows, kind, eps, _select_norm(impl, *static(x))).view(x.shape)


def norm_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = True,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
    impl: str = "auto",
) -> torch.Tensor:
    """R(theta) norm(x) for x [T, H, D]: every head's row normalised over D, then turned; one read and one store.

    The source fuses norms with what follows them so that they cost no pass over memory of their own. The norm is that
    of `norm`, the turn that of rotary.apply_rotary, float32 in between. cos, sin: float32 [T, D/2], constants.
    Returns y like x, contiguous. ValueError: as in both.
    """
    eps = _check_norm("norm_rotary", x, kind, eps)
    if x.dim() != 3:
        raise ValueError(f"norm_rotary: x has shape {tuple(x.shape)}; allowed: [rows, heads, head_dim]")
    check_tables("norm_rotary", x, cos, sin)
    name = _select_norm_rotary(impl, *static(x), ("rotary",))
    return norm_rotary_op(unit_last_stride(x), cos, sin, interleaved, kind, eps, name)


def pffn(
    s: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_offsets: torch.Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    scale: float = 1.0,
    eps: float = 1e-5,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    gdpa_impl: str | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """The tail of the personalised feed-forward as one op: s' = rms(u) + s with u = gdpa(q, k, v) + q, q = layer(s).

    The source's training form of the feed-forward as attention: LayerNorm before, GDPA against keys and values made
    from the non-sequence tokens, the normalised input added, RMSNorm over ALL heads (H * D columns) after, the input
    added.

    s: [T, H, D] sequence tokens, heads side by side; k, v: [Tkv, H, D]; same dtype, any strides. Both norms run over
    H * D, without weights. q_offsets, kv_offsets, activation, scale, hints: as in gdpa. impl: who runs the norms and
    additions. gdpa_impl: who runs GDPA between them, a name that gdpa(impl=...) knows, or None: reference and eager
    keep to their own kind, triton takes what gdpa would take. (reference and eager hand GDPA float32, triton the
    inputs' dtype.) A sequence without keys gets rms(q) + s. Returns s' like s; rows past q_offsets[-1] are exact
    zeros, and so are their gradients.

    ValueError: as in gdpa, and eps <= 0 or q_offsets None.
    """
    if q_offsets is None:
        raise ValueError("pffn: q_offsets is None; allowed: a tensor, queries are never shared here")
    kv_offsets, kind = check_attention("pffn", s, k, v, q_offsets, kv_offsets, max_q_len, max_kv_len)
    activations.get(activation)
    scale, eps = check_scale("pffn", scale), _check_eps("pffn", eps)
    call = tuple(sorted(kind)), activation, max_kv_len
    name = _select_pffn(impl, *static(s), *call)
    device, index, dtype, head_dim = static(s)
    inner = dtype if name == "triton" else accumulation_dtype(dtype)
    gdpa_impl = ("auto" if name == "triton" else name) if gdpa_impl is None else gdpa_impl
    gdpa_impl = _select_gdpa(gdpa_impl, device, index, inner, head_dim, *call)
    s, k, v = (unit_last_stride(x) for x in (s, k, v))
    return pffn_op(s, k, v, q_offsets, kv_offsets, activation, scale, eps, max_q_len, max_kv_len, gdpa_impl, name)[0]


def norm_quantize(
    x: torch.Tensor,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    impl: str = "auto",
):
    """norm(x) in 8-bit slabs of format `hopper` (mxfp8/hopper.py), for the linear layer that follows.

    Source: activation quantisation fused into the norm before it costs no pass over memory of its own. x [..., K], K a
    multiple of 16; statistics in float32, normalised values rounded to x's dtype before they are quantised. impl:
    "fused" (Triton, CUDA tensors, K <= 8192), "separate" (norm, then quantise; any device) or "auto": fused where it
    runs. Returns (data float8 [M', K], scale float32 [M', ceil(K / 128)]), M' = rows rounded up to 16, zeros behind.
    Not differentiable. ValueError: as in `norm`, and for dtype, scale_mode, K or impl.
    """
    from ..mxfp8 import formats, hopper

    eps = _check_norm("norm_quantize", x, kind, eps)
    formats.element_format(dtype)
    if scale_mode not in formats.SCALE_MODES:
        raise ValueError(f"norm_quantize: scale_mode {scale_mode!r}; allowed: {', '.join(formats.SCALE_MODES)}")
    if x.shape[-1] % hopper.ROWS:
        raise ValueError(f"norm_quantize: K is {x.shape[-1]}; allowed: multiples of {hopper.ROWS}")
    if impl not in ("auto", "fused", "separate"):
        raise ValueError(f"norm_quantize: impl {impl!r}; allowed: auto, fused, separate")
    rows = unit_last_stride(x.detach().reshape(-1, x.shape[-1]))
    fused = impl == "fused" or (impl == "auto" and hopper.runs_in_kernel(rows) and rows.shape[1] <= 8192)
    if not fused:
        return hopper.by_row(norm(rows, kind=kind, eps=eps), dtype=dtype, scale_mode=scale_mode)
    from . import triton_quantize

    if not triton_quantize.runs_on(rows):
        raise ValueError(
            f"norm_quantize: impl 'fused' on {rows.device.type}, {rows.dtype}, K {rows.shape[1]}; allowed: CUDA "
            f"tensors of 16 or 32 bits, K <= {triton_quantize.MAX_COLUMNS}"
        )
    return triton_quantize.norm_quantize(rows, kind=kind, eps=eps, dtype=dtype, scale_mode=scale_mode)
