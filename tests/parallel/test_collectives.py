"""Collectives: what runs on gloo is right there, what needs a GPU says so, and the numbers around them are right."""

import os
from types import SimpleNamespace

import pytest
import torch

from gem.bench import collectives as bench
from gem.bench import exposure, scaling
from gem.bench import sparse as sparse_bench
from gem.parallel import collectives, launch
from tests.parallel import collectives_checks as checks

WORLD = 2
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return launch.spawn(WORLD, checks.everything, "gloo", timeout_s=100)


def test_collectives_are_right_and_their_checks_can_fail(ranks):
    for seen in ranks:
        assert seen["plain"] == {
            "all_gather": [True, False],
            "reduce_scatter": [True, False],
            "all_reduce": [True],
            "all_to_all": [True, False],
        }


def test_quantising_before_the_gather_gives_the_same_from_half_the_bytes(ranks):
    for seen in ranks:
        found = seen["low_precision"]
        assert found["equal"] and 0 < found["error"] < 0.04
        assert found["bytes"] == (6 * 32 * 2, 6 * 32 + 6 * 4)


def test_times_are_those_of_the_slowest_rank(ranks):
    for seen in ranks:
        found = seen["timing"]
        # calls took 11, 12, 13, 14 ms: each on another rank
        assert found["p50"] == 12.5 and found["n"] == 4 and found["calls"] == 6
        assert found["largest"] == 1.5 and found["gathered"] == [0.5, 1.5]
        assert found["agree"] == (True, False)
        assert found["late"] == (False, True), "one late rank stops all"


@without_gpu
def test_what_needs_a_gpu_says_so():
    for what, call in (
        ("a NCCL group", lambda: collectives.limited_group(4)),
        ("a gather by copy engines", lambda: collectives.CopyEngineGather(8, torch.bfloat16)),
        ("holding multiprocessors", lambda: collectives.occupied(4).__enter__()),
    ):
        with pytest.raises(ValueError, match=f"^collectives: {what} needs CUDA, .*; allowed: ") as caught:
            call()
        assert "\n" not in str(caught.value)
    for call in (lambda: collectives.limited_group(0), lambda: collectives.limited_group(65)):
        with pytest.raises(ValueError, match="allowed: a whole number from 1 to 64"):
            call()
    with pytest.raises(ValueError, match="a shard of 0 elements"):
        collectives.CopyEngineGather(0, torch.bfloat16)


@without_gpu
@pytest.mark.parametrize("module", [bench, sparse_bench, scaling], ids=lambda module: module.__name__)
def test_benchmarks_say_in_one_line_what_they_lack(module, capsys):
    assert module.main(["--tier", "gpu2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: collectives: python -m gem.bench.") and error.count("\n") == 1 and "CUDA" in error
    assert module.main(["--tier", "gpu2", "--parts", "nothing"]) == 1
    assert "--parts: 'nothing' is unknown; allowed: " in capsys.readouterr().err
    assert module.main(["--tier", "gpu9"]) == 1


def test_multicast_is_off_before_a_group_is_made(monkeypatch):
    for name in launch.NO_MULTICAST:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(RuntimeError, match="NCCL_NVLS_ENABLE"):
        collectives.without_multicast()
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: False)
    collectives.without_multicast()
    assert {name: os.environ[name] for name in launch.NO_MULTICAST} == launch.NO_MULTICAST
    assert set(launch.NO_MULTICAST) == {
        "NCCL_NVLS_ENABLE",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        "NVSHMEM_DISABLE_NVLS",
    }


def test_bytes_that_a_rank_sends():
    assert bench.sent("all_gather", 800, 2) == 400 and bench.sent("all_gather", 800, 8) == 700
    assert bench.sent("all_reduce", 800, 2) == 800 and bench.sent("all_to_all", 800, 4) == 600


def test_exposed_communication():
    """Communication 0-10, 20-30 and 25-40; work 5-8, 7-22 and 35-50: exposed are 0-5 and 22-35."""
    talk, work = [(20, 30), (0, 10), (25, 40)], [(35, 50), (5, 8), (7, 22)]
    assert exposure.union(talk) == [(0, 10), (20, 40)]
    assert exposure.outside(talk, work) == 5 + 13
    assert exposure.outside(talk, []) == 30 and exposure.outside([], work) == 0
    assert exposure.outside([(0, 10)], [(2, 3), (4, 5), (9, 12)]) == 7

    def event(name, start, end, device="DeviceType.CUDA", note=False):
        span = SimpleNamespace(start=1e3 * start, end=1e3 * end)
        return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=note)

    events = [event("ncclDevKernel_AllGather_RING_LL", *span) for span in talk]
    events += [event("nvjet_tst_128x256", *span) for span in work]
    events += [event("nccl:all_gather", 0, 100, note=True), event("FSDP::all_gather", 0, 100)]
    events += [event("aten::mm", 0, 100, "DeviceType.CPU"), event("## forward ##", 0, 100)]
    assert exposure.of_profile(events) == (30.0, 18.0)


def test_the_holding_kernel_waits_without_spilling():
    """Compiled for sm_90 without a GPU: it reads the flag anew each time, looks at the clock, and says where it is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gem.parallel import sm_holder

    if not isinstance(sm_holder._hold, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: the kernel is not compiled")
    signature = {"flag": "*i32", "places": "*i32", "limit_ns": "i64", "POLL": "constexpr"}
    source = ASTSource(sm_holder._hold, signature=signature, constexprs={"POLL": sm_holder.POLL_NS})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": sm_holder.WARPS})
    assert kernel.asm["ptx"].count("ld.volatile.global") == 2
    assert "%globaltimer" in kernel.asm["ptx"] and "%smid" in kernel.asm["ptx"]
    assert ".local" not in kernel.asm["ptx"].split(".section")[0]


@pytest.mark.parametrize("world", [1, 2], ids=["one_gpu", "two_gpus"])
def test_on_gpus(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"NCCL, copy engines and held multiprocessors need {world} of {torch.cuda.device_count()} GPUs")
    for seen in launch.spawn(world, checks.on_gpus, "nccl", timeout_s=120):
        assert all(values[0] for values in seen["plain"].values()) and seen["low_precision"]["equal"]
        assert seen["copies"] == [True] * 3 and seen["limited"] == [float(world)] * 8
        copies = [name for name in seen["kernels"] if "emcpy" in name]
        kernels = [name for name in seen["kernels"] if "emcpy" not in name and "emset" not in name]
        assert (copies or world == 1) and all("barrier" in name for name in kernels), (
            f"no copy engine: {seen['kernels']}"
        )
        # half of 132 multiprocessors held: about twice the time
        assert 1.6 < seen["times"][66] / seen["times"][0] < 3.0
