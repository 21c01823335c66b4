"""Where the time of a step goes, from torch.profiler: attention, gdpa, gemm, norm, elementwise, embedding, optimizer,
copies.

A kernel is placed by the operators that launched it, innermost first (two ops of ours share the name of a Triton
function, so that the kernel's own name is not enough), and by its own name where the operators say nothing: inductor
names a kernel after what it fuses. One kernel is one component: a fused norm and residual add count as norm.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

COMPONENTS = ("attention", "gdpa", "gemm", "norm", "elementwise", "embedding", "optimizer", "copies")
INPUT = "input"  # host-to-device copies of the next batch, beside the compute stream: not part of the step's sum

_NORM = re.compile(r"layer_?norm|rms_?norm|rsqrt|var_mean|cuComputeGradInput|GammaBeta|RowwiseMoments", re.I)
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|wgmma|cublas|splitK|^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$", re.I)
_COPY = re.compile(r"copy|memcpy|memset|CatArray|^aten::(cat|to|_to_copy|contiguous|clone|zero_|fill_)$", re.I)
_EMBEDDING = re.compile(r"embedding|fbgemm|tbe|indexing_backward|rowwise_adagrad", re.I)
_OPTIMIZER = re.compile(r"^Optimizer\.|_foreach_|_fused_adam|multi_tensor|clip_grad", re.I)
_ATTENTION = re.compile(
    r"scaled_dot_product|flash_attn|flash_fwd|flash_bwd|fmha|varlen_attn|_(flash|cudnn|efficient)_attention"
)
# operator of ours -> component; of pffn, which is norms around GDPA, the kernels tell
_OURS = {
    "jagged_attention": "attention", "block_attention": "attention", "block_attention_qkv": "attention",
    "mx_attention": "attention", "gdpa": "gdpa", "norm": "norm", "norm_rotary": "norm", "rotary": "elementwise",
    "rotary_qkv": "elementwise", "mx_linear": "gemm", "pad": "copies", "unpad": "copies", "concatenate": "copies",
    "split": "copies",
}  # fmt: skip
_PFFN_NORM = re.compile(r"enter|leave|norm", re.I)
_ANNOTATION = re.compile(r"^(ProfilerStep|##|Torch-Compiled|CompiledFunction|Optimizer\.|PrefetchStep)")


def classify(kernel: str, operators: Iterable[str] = ()) -> str:
    """Component of a kernel; operators: names of what launched it, innermost first."""
    operators = list(operators)
    if re.search(r"HtoD", kernel):
        return INPUT
    for name in operators:
        found = re.match(r"gem_kernels::(\w+?)(_backward)?$", name)
        if found and found[1] == "pffn":
            return "norm" if _PFFN_NORM.search(kernel) else "gdpa"
        if found and found[1] in _OURS:
            return _OURS[found[1]]
        if _OPTIMIZER.search(name):
            return "optimizer"
        if _ATTENTION.search(name):
            return "attention"
    if _OPTIMIZER.search(kernel):
        return "optimizer"
    if _ATTENTION.search(kernel):
        return "attention"
    if _EMBEDDING.search(kernel) or any(_EMBEDDING.search(name) for name in operators):
        return "embedding"
    for pattern, component in ((_GEMM, "gemm"), (_NORM, "norm"), (_COPY, "copies")):
        if pattern.search(kernel):
            return component
    if operators and _GEMM.search(operators[0]):
        return "gemm"  # cuBLAS helpers (split-K sums) whose name says nothing
    return "elementwise"


def of_profile(events, on_gpu: bool) -> dict[str, float]:
    """Milliseconds by component from `profiler.events()`, all profiled steps together.

    on_gpu: kernels' time on the device; else the time that each operator spent itself on the CPU.
    """
    found: dict[str, float] = defaultdict(float)
    if not on_gpu:
        for event in events:
            if not _ANNOTATION.match(event.name):
                found[classify(event.name, _operators(event))] += event.self_cpu_time_total / 1e3
        return dict(found)
    linked: dict[str, float] = defaultdict(float)
    on_device: dict[str, float] = defaultdict(float)
    for event in events:
        if str(event.device_type).endswith("CPU"):
            for kernel in event.kernels:
                found[classify(kernel.name, _operators(event))] += kernel.duration / 1e3
                linked[kernel.name] += kernel.duration
        elif not getattr(event, "is_user_annotation", False) and not _ANNOTATION.match(event.name):
            on_device[event.name] += event.time_range.elapsed_us()
    for name, total in on_device.items():  # launched outside any operator
        rest = total - linked.get(name, 0.0)
        if rest > 0.5:
            found[classify(name)] += rest / 1e3
    return dict(found)


def _operators(event) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def profiled(call: Callable[[], object], count: int, on_gpu: bool) -> dict[str, float]:
    """Milliseconds of one call by component, from `count` profiled calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as profiler:
        for _ in range(count):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    return {name: value / count for name, value in of_profile(profiler.events(), on_gpu).items()}
