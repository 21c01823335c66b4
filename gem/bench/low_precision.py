"""How the 8-bit rows of config/kernels.tsv are called: attention, linear layers, and norms followed by quantisation.

    jagged_attention, gdpa   hopper_fp8            quantise q, k, v, then the 8-bit kernel (forward alone)
                             hopper_fp8:kernel     the 8-bit kernel on operands that are quantised already
    mx_linear                bf16                  torch.mm
                             hopper_fp8            all three products in 8 bits
                             hopper_fp8:wgrad_high weight gradient in bf16
    norm_quantize            separate, fused       norm, then quantise; one pass

Quantisation is inside the time wherever a row does not say otherwise. What 8 bits cost in accuracy is the format's, not
a fault of a kernel: results are held to the relative errors below, not to the error of the same formula in bf16.
"""

from __future__ import annotations

from functools import partial

import torch

from gem.bench.cases import Case, linear_weight
from kernels.mxfp8 import Recipe

NAME = "hopper_fp8"
FP8 = torch.float8_e4m3fn
# Relative error (of norms) that four significant bits in one, two or three rounded operands give, and a third more.
BUDGETS = {"jagged_attention": 0.075, "gdpa": 0.08, "mx_linear": 0.05, "norm_quantize": 0.035}


def prepare(case: Case, name: str, option: str, call, unsupported):
    """Call of a row of this module; `call` makes a peers.Call, `unsupported` its exception."""
    maker = {"mx_linear": _linear, "norm_quantize": _norm_quantize}.get(case.op, _attention)
    return maker(case, name, option, call, unsupported)


def _attention(case: Case, name: str, option: str, call, unsupported):
    from kernels.mxfp8 import hopper_attention, hopper_function

    if case.q_offsets is None or case.window is not None:
        raise unsupported("no 8-bit kernel for shared queries or a window")
    if case.op == "gdpa" and case.row["activation"] not in hopper_function.ACTIVATIONS:
        raise unsupported(f"no 8-bit kernel for {case.row['activation']}")
    why = hopper_function.why_not(case.q)
    if why is not None or not case.q.is_cuda:
        raise unsupported(why or "no 8-bit kernel on a CPU")
    if option not in ("", "kernel"):
        raise unsupported(f"impl {name!r} has no option {option!r}; options: kernel")
    from kernels.mxfp8 import attention_tlx

    activation = case.row["activation"] or "softmax"

    def quantized():
        scales = hopper_attention.scales_for(activation)
        return hopper_attention.quantize(case.q, case.k, case.v, case.kv_offsets, scales=scales)

    ready = quantized() if option else None
    run = partial(
        attention_tlx.forward_with,
        attention_tlx.Config(),
        q_offsets=case.q_offsets,
        kv_offsets=case.kv_offsets,
        activation=activation,
        scale=case.scale,
        dtype=case.q.dtype,
    )
    note = "operands quantised beforehand" if option else "quantisation of q, k, v counted"
    note += "; limited by instruction issue (kernels/mxfp8/TUNING.md)"

    def backward(result):
        raise unsupported("no 8-bit backward kernel")

    return call(
        lambda: run(operands=ready or quantized()), backward, note=note, gemms={"fwd": 2, "bwd": 0},
        budget=BUDGETS[case.op], dtype=FP8,
    )  # fmt: skip


def _linear(case: Case, name: str, option: str, call, unsupported):
    from kernels.mxfp8 import hopper

    x, dy, weight = case.q.flatten(1), case.do.flatten(1), linear_weight(case, case.q.dtype)
    shape = case.q.shape
    if name == "bf16":
        return call(
            lambda: (x @ weight.T).view(shape), lambda _: ((dy @ weight).view(shape), None, None, dy.T @ x),
            gemms={"fwd": 1, "bwd": 2},
        )  # fmt: skip
    if name != NAME or option not in ("", "wgrad_high"):
        raise unsupported(f"impl {name}:{option}; allowed: bf16, {NAME}, {NAME}:wgrad_high")
    if x.is_cuda and (why := hopper.unsupported(x.device, *weight.shape)) is not None:
        raise unsupported(why)
    recipe = Recipe(name="bench", format="hopper")

    def backward(_):
        dx = hopper.dgrad(dy, weight, recipe).view(shape)
        return dx, None, None, dy.T @ x if option else hopper.wgrad(dy, x, recipe, weight.dtype)

    return call(
        lambda: hopper.fprop(x, weight, recipe).view(shape), backward, note="quantisation of every operand counted",
        gemms={"fwd": 1, "bwd": 2}, budget=BUDGETS[case.op], dtype=FP8,
    )  # fmt: skip


def _norm_quantize(case: Case, name: str, option: str, call, unsupported):
    from kernels.fused_norm import norm_quantize
    from kernels.mxfp8 import hopper

    if name not in ("separate", "fused") or option:
        raise unsupported(f"impl {name}:{option}; allowed: separate, fused")
    x = case.q.flatten(1)

    def backward(result):
        raise unsupported("quantisation has no gradient")

    def unpack(_, operand: hopper.Scaled) -> torch.Tensor:
        return hopper.values(operand)[: x.shape[0]].view(case.q.shape)

    return call(
        lambda: norm_quantize(x, kind="rms", impl=name), backward, unpack, budget=BUDGETS[case.op], dtype=FP8
    )  # fmt: skip
