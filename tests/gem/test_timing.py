"""The timer: warm-up never counts, the spread is kept, a faked clock gives exact numbers."""

import time

import pytest

from gem.bench.timing import CpuClock, Timing, clock_for, measure


class FakeCalls:
    """Calls that take scripted seconds of a faked clock; the last duration repeats."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.count = list(seconds), 0.0, 0

    def __call__(self):
        self.now += self.seconds[min(self.count, len(self.seconds) - 1)]
        self.count += 1

    def clock(self):
        return CpuClock(now=lambda: self.now)


def test_compile_step_does_not_enter_the_throughput():
    """Steps of 2.0 (compile), 0.1, 0.1, 0.1 s of 4,096 samples: 40,960 samples/s; the naive mean would say 7,123."""
    calls = FakeCalls(2.0, 0.1, 0.1, 0.1)
    timing = measure(calls, warmup=1, repeat_ms=0, min_repeats=3, clock=calls.clock())
    assert timing.rate(4096)[0] == pytest.approx(40960)
    assert (timing.n, timing.warmup) == (3, 1)
    assert timing.p50 == pytest.approx(100) and timing.p20 == pytest.approx(100) and timing.p80 == pytest.approx(100)


def test_quantiles_and_their_rates_keep_their_order():
    timing = Timing.of([1, 2, 3, 4, 100], warmup=2)
    assert timing.p50 == 3 and timing.p20 == pytest.approx(1.8) and timing.p80 == pytest.approx(23.2)
    p50, p20, p80 = timing.rate(1.0)
    assert p20 < p50 < p80


def test_warm_up_lasts_its_time_and_repeats_follow_from_it():
    calls = FakeCalls(1.0, 0.01)
    timing = measure(calls, warmup=2, warmup_ms=1050, repeat_ms=200, clock=calls.clock())
    assert timing.warmup == 6  # 1,000 ms and five times 10 ms
    assert timing.n == pytest.approx(20, abs=1)


def test_inputs_rotate_so_that_a_call_does_not_find_its_own_data_in_the_cache():
    calls, order = FakeCalls(0.01), []

    def call(name):
        return lambda: (order.append(name), calls())

    measure([call("a"), call("b"), call("c")], warmup=1, repeat_ms=0, min_repeats=6, clock=calls.clock())
    assert order[1:] == ["a", "b", "c", "a", "b", "c"]


def test_real_cpu_time_grows_with_the_work():
    short = measure(lambda: time.sleep(0.002), repeat_ms=20)
    long = measure(lambda: time.sleep(0.008), repeat_ms=40)
    assert 2 < short.p50 < 8 <= long.p50


@pytest.mark.parametrize("kwargs", [{"warmup": 0}, {"min_repeats": 0}, {"min_repeats": 5, "max_repeats": 4}])
def test_bad_arguments_are_errors(kwargs):
    with pytest.raises(ValueError, match="allowed: warmup >= 1"):
        measure(lambda: None, **kwargs)


def test_no_samples_and_unknown_devices_are_errors():
    with pytest.raises(ValueError, match="at least one"):
        Timing.of([], warmup=1)
    with pytest.raises(ValueError, match="device 'tpu'; allowed: cpu, cuda"):
        clock_for("tpu")


@pytest.mark.gpu
def test_a_larger_matmul_takes_longer_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    small = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    large = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
    assert measure(lambda: large @ small, device="cuda").p50 > 2 * measure(lambda: small @ small, device="cuda").p50
