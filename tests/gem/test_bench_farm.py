"""Compile together, time in turn: who runs when, and what a lost process costs the others."""

import pytest

from gem.bench import farm

from .farm_tasks import Task


def jobs(folder, **how):
    return [farm.Job(name, Task, (str(folder), name, what)) for name, what in how.items()]


def log(folder):
    lines = (line.split() for line in (folder / "log").read_text().splitlines())
    return [(what, name) for _, what, name in sorted(lines, key=lambda words: int(words[0]))]


@pytest.mark.parametrize("processes", [1, 3])
def test_measuring_is_alone_and_in_order(tmp_path, processes):
    said = []
    found = farm.run(jobs(tmp_path, a="", b="", c=""), processes, say=said.append)
    assert [(item.name, item.status, item.value) for item in found] == [
        ("a", "done", "A"), ("b", "done", "B"), ("c", "done", "C")
    ]  # fmt: skip
    order = log(tmp_path)
    timed = [entry for entry in order if entry[0] != "prepare"]
    assert timed == [(what, name) for name in "abc" for what in ("begin", "end")]
    if processes == 3:  # nobody measures before the last is ready
        assert {what for what, _ in order[:3]} == {"prepare"}
    ends = [line.partition(":")[0] for line in said if "to measure" in line]
    assert ends == ["a", "b", "c"] and len(said) == (3 if processes == 1 else 6)


def test_a_lost_process_costs_nobody_else_anything(tmp_path):
    found = farm.run(
        jobs(tmp_path, dies="dies", hangs="hangs", raises="raises", breaks="breaks", fine=""), 5,
        prepare_s=4, say=lambda line: None,
    )  # fmt: skip
    status = {item.name: (item.status, item.reason) for item in found}
    assert status["fine"] == ("done", "")
    assert status["dies"] == ("failed", "its process ended with exit code 7")
    assert status["hangs"][0] == "failed" and status["hangs"][1].startswith("not ready after ")
    assert status["raises"] == ("failed", "ValueError: prepare: two lines")
    assert status["breaks"] == ("failed", "RuntimeError: measure")


def test_a_straggler_is_timed_last_and_stands_still_meanwhile(tmp_path):
    found = farm.run(jobs(tmp_path, slow="slow", fast=""), 2, limit_s=8, say=lambda line: None)
    assert [(item.name, item.status) for item in found] == [("slow", "done"), ("fast", "done")]
    order = [entry for entry in log(tmp_path) if entry[0] != "prepare"]
    assert order.index(("end", "fast")) < order.index(("begin", "slow"))
    ticks = [entry for entry in order if entry == ("tick", "slow")]
    between = order[order.index(("begin", "fast")) : order.index(("end", "fast"))]
    assert len(ticks) > 5 and ("tick", "slow") not in between


def test_what_is_not_ready_when_time_is_up_is_skipped_and_not_failed(tmp_path):
    found = farm.run(jobs(tmp_path, hangs="hangs", fine=""), 2, limit_s=5, say=lambda line: None)
    assert [(item.name, item.status) for item in found] == [("hangs", "skipped"), ("fine", "done")]


def test_time_that_is_up_skips_what_is_left(tmp_path):
    found = farm.run(jobs(tmp_path, a="", b=""), 1, limit_s=1e-9, say=lambda line: None)
    assert [item.status for item in found] == ["skipped", "skipped"] and not (tmp_path / "log").exists()
    with pytest.raises(ValueError, match="processes: 0; allowed: 1 or more"):
        farm.run([], 0)
