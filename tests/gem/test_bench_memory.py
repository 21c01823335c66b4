"""The memory bench end to end on a CPU: every policy at every limit, plans within it, packed activations as well."""

from __future__ import annotations

import re

import pandas as pd

from gem.bench import memory


def test_every_policy_at_every_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = memory.section_of("smoke") | {"repeat_ms": 10, "largest": 16}
    monkeypatch.setattr(memory, "section_of", lambda tier: section)
    assert memory.main(["--tier", "smoke", "--run", "try"]) == 0
    parts = pd.concat([pd.read_csv(path) for path in (tmp_path / "results/try/records/parts").glob("*.csv")])
    assert set(parts.status) == {"ok"}
    points, steps = parts[parts.experiment == "regions"], parts[parts.experiment == "step"]
    kept = points[points.metric == "memory_bytes"].groupby("case").p50.sum()
    assert kept["budget_0"] < kept["budget_1"]
    for share in memory.LIMITS:
        rows = steps[(steps.case == f"memory_{share:g}") & (steps.metric == "qps")].set_index("subject")
        assert set(rows.index) == {"checkpointing_uniform", "checkpointing_region"} and (rows.p50 > 0).all()
        number = int(re.search(r"; (\d+) of (\d+) ", rows.note["checkpointing_region"])[1])
        assert 0 <= number < points.subject.nunique(), "less than everything fits, so some region must recompute"
    packed = steps[(steps.case == "packed") & (steps.metric == "local_batch")].set_index("subject").p50
    assert set(packed.index) == {f"saved_activations_{name}" for name in ("bf16", "fp8", "mx4")}
    assert (packed == 16).all() and steps[steps.metric == "peak_mem_gib"].p20.isna().all()
