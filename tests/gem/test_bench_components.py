"""Kernels find their component by what launched them, then by their own name."""

from types import SimpleNamespace

import pytest
import torch

from gem.bench import components
from gem.bench.components import classify


@pytest.mark.parametrize(
    ("kernel", "operators", "component"),
    [
        ("forward_kernel", ["gem_kernels::jagged_attention"], "attention"),
        ("backward_kernel", ["gem_kernels::gdpa_backward", "autograd::engine"], "gdpa"),
        ("backward_kernel", ["gem_kernels::block_attention_backward"], "attention"),
        ("enter_kernel", ["gem_kernels::pffn"], "norm"),
        ("gdpa_fwd_kernel", ["gem_kernels::pffn"], "gdpa"),
        ("leave_backward_kernel", ["gem_kernels::pffn_backward"], "norm"),
        ("flash_fwd_splitkv_kernel", ["torch_attn::_varlen_attn"], "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", ["aten::_efficient_attention_forward"], "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", ["aten::mm"], "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", ["aten::addmm"], "gemm"),
        ("triton_per_fused__to_copy_native_layer_norm_3", [], "norm"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_2", [], "norm"),
        ("triton_poi_fused_gelu_mul_1", [], "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluFunctor>", ["aten::gelu"], "elementwise"),
        ("split_embedding_codegen_forward_unweighted_kernel", ["fbgemm::lookup"], "embedding"),
        ("void multi_tensor_apply_kernel<...FusedAdamMathFunctor>", ["aten::_fused_adamw_"], "optimizer"),
        ("void multi_tensor_apply_kernel<LpNormFunctor>", ["aten::_foreach_norm"], "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", ["aten::copy_"], "input"),
        ("Memcpy DtoD (Device -> Device)", ["aten::copy_"], "copies"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", ["aten::copy_"], "copies"),
        ("CatArrayBatchedCopy", ["aten::cat"], "copies"),
    ],
)
def test_every_kind_of_kernel(kernel, operators, component):
    assert classify(kernel, operators) == component


def event(name, kind="CPU", parent=None, kernels=(), own=0.0, us=0.0, annotation=False):
    made = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels]
    return SimpleNamespace(
        name=name, device_type=f"DeviceType.{kind}", cpu_parent=parent, kernels=made, self_cpu_time_total=own,
        time_range=SimpleNamespace(elapsed_us=lambda: us), is_user_annotation=annotation,
    )  # fmt: skip


def test_kernels_of_a_gpu_are_counted_once_and_annotations_never():
    op = event("gem_kernels::gdpa", kernels=[("forward_kernel", 700.0)])
    events = [
        op, event("aten::mm", kernels=[("nvjet", 200.0)]),
        event("forward_kernel", "CUDA", us=700.0), event("nvjet", "CUDA", us=200.0),
        event("triton_poi_fused_add", "CUDA", us=100.0),  # launched outside any operator
        event("## Call CompiledFxGraph ##", "CUDA", us=5000.0), event("marked", "CUDA", us=9.0, annotation=True),
    ]  # fmt: skip
    assert components.of_profile(events, on_gpu=True) == pytest.approx({"gdpa": 0.7, "gemm": 0.2, "elementwise": 0.1})


def test_operators_of_a_cpu_count_their_own_time():
    parent = event("gem_kernels::gdpa", own=50.0)
    events = [parent, event("aten::bmm", parent=parent, own=150.0), event("ProfilerStep*", own=1e6)]
    assert components.of_profile(events, on_gpu=False) == pytest.approx({"gdpa": 0.2})


def test_a_real_profile_has_the_matrix_products():
    a = torch.randn(96, 96)
    found = components.profiled(lambda: torch.nn.functional.layer_norm(a @ a, (96,)), 3, on_gpu=False)
    assert found["gemm"] > 0 and found["norm"] > 0 and sum(found.values()) < 1000
