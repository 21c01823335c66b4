"""How each implementation of a benchmark case is called: ours by name and option, peers by their fixed names.

A `Call` runs forward and backward on a case's tensors as often as one likes. Ours are called below the dispatcher,
without
autograd; peers through autograd, as their users do. What cannot run raises `Unsupported` with one line of reason.

    ours       any name of the op's registry, and name:option for a kernel's own switches (OPTIONS); for block attention
               also NAME:block_mask, jagged softmax attention under a block mask
    peers      varlen_attn (torch.nn.attention.varlen), flex (FlexAttention, length mask), sdpa_cudnn,
    sdpa_flash (padded),
               compiled_eager (torch.compile of the plain form), fa4 (flash_attn.cute)

Padded peers get tensors that are padded already: padding a batch is not part of their time, wasted work is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gem.bench import low_precision
from gem.bench.cases import ATTENTION, FOLDERS, LOW_PRECISION, Case, plain_function, turn
from kernels import jagged
from kernels.registry import Case as Properties

PEERS = ("varlen_attn", "flex", "sdpa_cudnn", "sdpa_flash", "compiled_eager", "fa4")
GRADIENTS = ("dq", "dk", "dv")


class Unsupported(Exception):
    """This implementation cannot run this case; the text is the reason."""


@dataclass
class Call:
    """forward() -> result.

    Backward(result) -> gradients, q, k, v first. `unpack(name, x)` gives packed rows to compare.
    """

    forward: Callable[[], object]
    backward: Callable[[object], tuple]
    unpack: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x
    note: str = ""
    gemms: dict[str, int] | None = None
    budget: float | None = None  # relative error allowed instead of a multiple of eager's own
    dtype: torch.dtype | None = None  # of the operands, where that is not the case's

    def output(self, result: object) -> torch.Tensor:
        return result[0] if type(result) is tuple else result


def prepare(case: Case, impl: str) -> Call:
    """Call of an implementation by its name in kernels.tsv."""
    name, _, option = impl.partition(":")
    if name in PEERS:
        return _PEERS[name](case)
    if name == low_precision.NAME or case.op in LOW_PRECISION:
        return low_precision.prepare(case, name, option, Call, Unsupported)
    if case.op not in ATTENTION:
        return _composed(case, name)
    if option.endswith("_rotary"):
        return _outside_rotary(case, name, option)
    if case.op == "block_attention" and option == "block_mask":
        return _block_mask(case, name)
    return _ours(case, name, option)


def from_autograd(
    function: Callable, tensors: tuple, do: torch.Tensor, unpack: Callable | None = None, note=""
) -> Call:
    """Call of a differentiable f(q, k, v) through autograd; inputs without a gradient give None."""
    leaves = [x.detach().requires_grad_() for x in tensors]

    def backward(result) -> tuple:
        output = result[0] if isinstance(result, tuple) else result
        return torch.autograd.grad(output, leaves, do, retain_graph=True, allow_unused=True)

    return Call(lambda: function(*leaves), backward, unpack or (lambda name, x: x), note)


# Ours


def _registry(op: str):
    return importlib.import_module(f"kernels.{FOLDERS[op]}.api").REGISTRY


def _load(case: Case, name: str):
    registry = _registry(case.op)
    if name not in registry.entries:
        raise ValueError(
            f"config/kernels.tsv: impl {name!r} of {case.op}; allowed: {', '.join((*registry.names, *PEERS))}"
        )
    activation = case.row["activation"] or None
    properties = Properties.of(case.q, features=case.features, activation=activation, max_kv_len=case.max_kv)
    reason = registry.why_not(name, properties)
    if reason is not None:
        raise Unsupported(reason)
    return registry.load(name)


def _ours(case: Case, name: str, option: str) -> Call:
    implementation = _load(case, name)
    forward, backward = implementation.forward, implementation.backward
    module = importlib.import_module(forward.__module__)
    if option:
        forward, backward = _with_option(case.op, module, name, option, forward, backward)
    gemms = getattr(module, "GEMMS", None)
    if gemms is not None:
        scheme = option if option in gemms else getattr(module, "DEFAULT_SCHEME", None) or next(iter(gemms))
        gemms = {"fwd": 2, "bwd": gemms[scheme]}
    q, k, v, do, keywords = case.q, case.k, case.v, case.do, case.keywords()
    if case.op == "block_attention":
        run = partial(forward, q, k, v, case.kv_offsets, **keywords)
        return Call(run, lambda o: backward(do, q, k, v, o, case.kv_offsets, **keywords), gemms=gemms)
    run = partial(forward, q, k, v, case.q_offsets, case.kv_offsets, **keywords)
    if case.op == "gdpa":
        return Call(run, lambda o: backward(do, q, k, v, case.q_offsets, case.kv_offsets, **keywords), gemms=gemms)
    return Call(run, lambda r: backward(do, q, k, v, *r, case.q_offsets, case.kv_offsets, **keywords), gemms=gemms)


def _with_option(op: str, module, name: str, option: str, forward: Callable, backward: Callable) -> tuple:
    """Forward and backward with one switch of a kernel set: maskings, backward schemes, tile orders, resident keys."""
    if op == "jagged_attention" and option in getattr(module, "MASKINGS", ()):

        def masked(q, k, v, q_offsets, kv_offsets, *, scale, **_):
            return module.masked_forward(q, k, v, q_offsets, kv_offsets, scale=scale, masking=option)

        return masked, backward
    if op == "jagged_attention" and option in getattr(module, "GEMMS", {}):
        return forward, partial(backward, scheme=option)
    if op == "gdpa" and hasattr(module, "Options"):
        switches = {
            "grid": {"schedule": "grid", "kv_resident": False},
            "valid": {"schedule": "valid", "kv_resident": False},
            "zigzag": {"schedule": "zigzag", "kv_resident": False},
            "resident": {"schedule": "valid", "kv_resident": True},
            "zigzag_resident": {"schedule": "zigzag", "kv_resident": True},
            "owner": {"backward": "owner"},
            "split": {"backward": "split"},
        }
        if option in switches:
            options = module.Options(**switches[option])
            return partial(module.forward_with, options), partial(module.backward_with, options)
    raise Unsupported(f"impl {name!r} has no option {option!r}")


def _outside_rotary(case: Case, name: str, option: str) -> Call:
    """Rotary as an op of its own before block attention: our kernel, compiled, or plain torch."""
    from kernels import block_attention
    from kernels.rotary.api import apply_rotary

    turns = {
        "separate_rotary": partial(apply_rotary, impl="triton"),
        "compiled_rotary": torch.compile(turn, dynamic=True),
        "eager_rotary": turn,
    }
    if option not in turns:
        raise Unsupported(f"impl {name!r} has no option {option!r}; options: {', '.join(turns)}")
    rotate = turns[option]

    def function(q, k, v):
        turned = (rotate(x, case.cos, case.sin) for x in (q, k, v))
        return block_attention(*turned, case.kv_offsets, impl=name)

    return from_autograd(function, (case.q, case.k, case.v), case.do)


def _block_mask(case: Case, name: str) -> Call:
    """The op on kernels of jagged softmax attention under a block mask, with all that these do for rows of any length.

    Each block is a sequence of its own to them, so that they visit no tile outside the mask and mask none inside it:
    the cheapest form that such a mask can take. Building the list of blocks is not part of the time.
    """
    from kernels.block_attention.eager import blocks

    if case.rotary is not None:
        raise Unsupported("block_mask has no rotary")
    properties = Properties.of(case.q, features=case.features)
    registry = _registry("jagged_attention")
    reason = registry.why_not(name, properties)
    if reason is not None:
        raise Unsupported(reason)
    implementation = registry.load(name)
    _, lengths = blocks(case.kv_offsets, 64)
    offsets = jagged.lengths_to_offsets(lengths, torch.int32).to(case.device)
    keywords = {"scale": case.scale, "window": None, "bias": None, "schedule": None}
    keywords |= {"max_q_len": 64, "max_kv_len": 64}
    run = partial(implementation.forward, case.q, case.k, case.v, offsets, offsets, **keywords)

    def backward(result: tuple) -> tuple:
        return implementation.backward(case.do, case.q, case.k, case.v, *result, offsets, offsets, **keywords)

    return Call(run, backward)


def _composed(case: Case, name: str) -> Call:
    """Row-wise ops and norm + GDPA + norm, by the name of an implementation of ours or as plain torch ("eager")."""
    if case.op == "norm_gdpa_norm":
        from kernels.fused_norm.api import pffn

        keywords = {"activation": case.row["activation"], "scale": case.scale, "impl": name}
        keywords |= {"max_q_len": case.max_q, "max_kv_len": case.max_kv}

        def function(q, k, v):
            return pffn(q, k, v, case.q_offsets, case.kv_offsets, **keywords)

        return from_autograd(function, (case.q, case.k, case.v), case.do)
    if name == "eager":
        function = plain_function(case)
    elif case.op == "rotary":
        from kernels.rotary.api import apply_rotary

        def function(q, k, v):
            return apply_rotary(q, case.cos, case.sin, impl=name)
    else:
        from kernels.fused_norm.api import norm

        kind = case.op.removesuffix("_norm")

        def function(q, k, v):
            return norm(q.flatten(1), kind=kind, impl=name).view_as(q)

    return from_autograd(function, (case.q, case.k, case.v), case.do)


# Peers


def _packed_only(case: Case, name: str) -> None:
    if case.op != "jagged_attention":
        raise Unsupported(f"{name} is softmax attention, not {case.op}")
    if case.device.type != "cuda":
        raise Unsupported(f"{name} needs an NVIDIA GPU")


def _own_queries(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable]:
    """(q, q_offsets, do, unpack) with shared queries copied out for every sequence, as these peers need them."""
    if case.q_offsets is not None:
        return case.q, case.q_offsets, case.do, lambda name, x: x
    batch, length = len(case.kv_lengths), case.q.shape[0]
    offsets = torch.arange(batch + 1, device=case.device, dtype=torch.int32) * length

    def unpack(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "o":
            return x.unflatten(0, (batch, length))
        return x.float().unflatten(0, (batch, length)).sum(0).to(x.dtype) if name == "dq" else x

    return case.q.repeat(batch, 1, 1), offsets, case.do.flatten(0, 1), unpack


def _varlen_attn(case: Case) -> Call:
    _packed_only(case, "varlen_attn")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unsupported(f"cannot be imported ({error})") from None
    q, offsets, do, unpack = _own_queries(case)
    window = (-1, -1) if case.window is None else (case.window, case.window)

    def function(q, k, v):
        return varlen_attn(q, k, v, offsets, case.kv_offsets, case.max_q, case.max_kv, window_size=window)

    return from_autograd(function, (q, case.k, case.v), do, unpack)


def _fa4(case: Case) -> Call:
    _packed_only(case, "fa4")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception as error:  # a missing CuTe DSL shows in many ways
        raise Unsupported(f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})") from None
    q, offsets, do, unpack = _own_queries(case)
    window = (None, None) if case.window is None else (case.window, case.window)

    def function(q, k, v):
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_k=case.kv_offsets,
            max_seqlen_q=case.max_q,
            max_seqlen_k=case.max_kv,
            window_size=window,
        )

    return from_autograd(function, (q, case.k, case.v), do, unpack)


def _padded_inputs(case: Case) -> tuple[tuple, torch.Tensor, Callable]:
    """((q, k, v) as [B, H, L, D], do, unpack) for padded peers."""
    q, offsets, do, shared = _own_queries(case)

    def pad(x, at, longest):
        return jagged.pad(x, at, longest).transpose(1, 2).contiguous()

    padded = (
        pad(q, offsets, case.max_q),
        pad(case.k, case.kv_offsets, case.max_kv),
        pad(case.v, case.kv_offsets, case.max_kv),
    )

    def unpack(name: str, x: torch.Tensor) -> torch.Tensor:
        at, total = (case.kv_offsets, case.k.shape[0]) if name in ("dk", "dv") else (offsets, q.shape[0])
        return shared(name, jagged.unpad(x.transpose(1, 2), at, total))

    return padded, pad(do, offsets, case.max_q), unpack


def _key_mask(case: Case) -> torch.Tensor:
    """[B, L] True where a key exists."""
    return torch.arange(case.max_kv, device=case.device) < case.kv_lengths.to(case.device)[:, None]


def _sdpa(backend: str, case: Case) -> Call:
    _packed_only(case, f"sdpa_{backend}")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    ragged = bool((case.kv_lengths != case.max_kv).any())
    if case.window is not None:
        raise Unsupported("padded SDPA has no window")
    if ragged and backend == "flash":
        raise Unsupported("SDPA's flash backend takes no mask, and these lengths differ")
    mask = _key_mask(case)[:, None, None, :].expand(-1, 1, case.max_q, -1) if ragged else None
    padded, do, unpack = _padded_inputs(case)

    def function(q, k, v):
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return from_autograd(function, padded, do, unpack, note="padded beforehand")


def _flex(case: Case) -> Call:
    _packed_only(case, "flex")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, window = case.kv_lengths.to(case.device), case.window

    def visible(b, h, i, j):
        inside = j < lengths[b]
        return inside if window is None else inside & ((i - j).abs() <= window)

    batch = len(case.kv_lengths)
    mask = create_block_mask(visible, batch, None, case.max_q, case.max_kv, device=case.device)
    padded, do, unpack = _padded_inputs(case)
    compiled = torch.compile(flex_attention, dynamic=False)
    function = partial(compiled, block_mask=mask)
    return from_autograd(lambda q, k, v: function(q, k, v), padded, do, unpack, note="padded beforehand")


def _compiled_eager(case: Case) -> Call:
    if case.op not in ("gdpa", "jagged_attention"):
        if case.op == "block_attention":
            raise Unsupported("compiled_eager has no form of block attention")
        if case.op == "norm_gdpa_norm":
            return _compiled_norms(case)
        function = torch.compile(plain_function(case), dynamic=False)
        return from_autograd(function, (case.q, case.k, case.v), case.do)
    padded, do, unpack = _padded_inputs(case)
    mask = _key_mask(case)[:, None, None, :]
    if case.op == "gdpa":
        from kernels.gdpa import activations

        def plain(q, k, v):
            scores = (q @ k.transpose(-1, -2)).float() * case.scale
            weights = activations.value(case.row["activation"], scores)
            return torch.where(mask, weights, 0.0).to(v.dtype) @ v
    else:

        def plain(q, k, v):
            scores = ((q @ k.transpose(-1, -2)).float() * case.scale).masked_fill(~mask, float("-inf"))
            return scores.softmax(-1).to(v.dtype) @ v

    return from_autograd(torch.compile(plain, dynamic=False), padded, do, unpack, note="padded beforehand")


def _compiled_norms(case: Case) -> Call:
    """Compiled norms around our GDPA kernel: what a team gets without fusing by hand."""
    from torch.nn.functional import layer_norm, rms_norm

    from kernels import gdpa

    width = case.q.shape[1] * case.q.shape[2]
    keywords = {"activation": case.row["activation"], "scale": case.scale}
    keywords |= {"max_q_len": case.max_q, "max_kv_len": case.max_kv}

    def function(s, k, v):
        q = layer_norm(s.flatten(1), (width,), eps=1e-5).view_as(s)
        u = gdpa(q, k, v, case.q_offsets, case.kv_offsets, **keywords) + q
        return rms_norm(u.flatten(1), (width,), eps=1e-5).view_as(s) + s

    return from_autograd(torch.compile(function, dynamic=False), (case.q, case.k, case.v), case.do)


_PEERS = {
    "varlen_attn": _varlen_attn,
    "fa4": _fa4,
    "sdpa_cudnn": partial(_sdpa, "cudnn"),
    "sdpa_flash": partial(_sdpa, "flash"),
    "flex": _flex,
    "compiled_eager": _compiled_eager,
}
