"""A small results folder with records of every kind that the report reads, made by the code that makes real ones."""

from __future__ import annotations

import json
from pathlib import Path

from gem import claims, record, record_store

SOURCES = ("gem/metrics.py",)  # any module: a record without sources counts as stale
VARIANTS = {
    "baseline_padded": 0.91,
    "baseline_varlen": 0.90,
    "full_same_math": 0.905,
    "full": 0.91,
    "no_sequence": 0.97,
}


def results(root: Path, *, run: str = "smoke") -> Path:
    """results/<run> under root with merged records and claims.csv; the numbers are made up. Returns `root/results`."""
    folder = root / "results"
    with record.Run(run, "data", results=folder, command="made up", sources=SOURCES) as part:
        common = {"subject": "toy", "impl": "data", "phase": "model"}
        for event, mean in (("click", 9.5), ("impression", 38.25)):
            case = f"train_{event}"
            values = {"events": 6144 * mean, "mean_length": mean, "length_cv": 0.91, "fill": 0.3}
            for metric, value in values.items():
                part.add(case=case, metric=metric, p50=value, **common)
            part.add(case=f"{case}_tokens", metric="waste", p50=0.7, **common)
            part.add(case=f"{case}_pairs", metric="waste", p50=0.84, **common)
    for experiment, cases in (("train", ["train"]), ("quality", ["long_range_0", "long_range_1"])):
        for variant, ne in VARIANTS.items():
            with record.Run(
                run, experiment, results=folder, command="made up", sources=SOURCES, name=f"{experiment}-{variant}"
            ) as part:
                for case in cases:
                    common = {"case": case, "subject": variant, "impl": "attention:eager gdpa:eager optimizer:foreach"}
                    for seed, shift in enumerate((-0.002, 0.0, 0.003)):
                        part.add(**common, phase="eval", metric="ne_ctr", p50=ne + shift, seed=seed)
                    part.add(
                        **common, phase="eval", metric="ne_ctr", p50=ne, p20=ne - 0.001, p80=ne + 0.002, n=3,
                        note="over 3 seeds",
                    )  # fmt: skip
                    if experiment == "train":
                        add = {"ne_cvr": 0.95, "auc_ctr": 0.71, "ne_bayes_ctr": 0.74}
                        for metric, value in add.items():
                            part.add(**common, phase="eval", metric=metric, p50=value)
                        for metric, value in {
                            "qps": 1234.5,
                            "time_ms": 104.2,
                            "mfu": 0.063,
                            "peak_mem_gib": 1.4,
                        }.items():
                            part.add(**common, phase="step", metric=metric, p50=value)
                        part.add(**common, phase="model", metric="flops_per_sample", p50=3.2e6)
                        part.add(**common, phase="model", metric="train_flops", p50=2e10)
    with record.Run(run, "balance", results=folder, command="made up", sources=SOURCES) as part:
        for ranks, skew in ((8, 1.05), (4096, 1.16)):
            for scheme, share in (("none", 0.0), ("local", 0.9), ("bbs_pool256", 0.8), ("global", 1.0)):
                common = {"case": f"ranks{ranks}", "subject": scheme, "impl": "model", "phase": "model"}
                part.add(**common, metric="skew", p50=1 + (skew - 1) * (1 - share), seed=0, scope="modelled")
                part.add(**common, metric="share_of_optimum", p50=share, seed=0, scope="modelled")
    record_store.merge(folder / run / "records")
    judge(folder / run, root / "measured")
    log = folder / run / "logs" / "train" / "full.benchmark.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"s": 12.5, "max_rss": 900.0}) + "\n")
    return folder


def judge(folder: Path, measured: Path) -> None:
    """claims.csv of a run."""
    arguments = [
        "--records",
        f"{folder}/records",
        "--measured",
        str(measured),
        "--output",
        f"{folder}/claims/claims.csv",
    ]
    assert claims.main(arguments) == 0


def frozen_kernels(measured: Path) -> None:
    """A folder of shipped records as a GPU host would leave it, measured/h200, with two generations of one kernel."""
    staging = measured.parent / "staging"
    with record.Run("gpu", "kernels", results=staging, command="made up", sources=SOURCES, name="kernels-toy") as part:
        part.info["device"] = {"type": "cuda", "name": "NVIDIA H200", "slug": "h200", "count": 1, "driver": "580.1"}
        part.info["device"] |= {"power_limit_w": "700.00"}
        for impl, milliseconds in (("v2", 3.0), ("v3", 2.5), ("v4", 1.5)):
            common = {"case": "jfa_self_uniform_1024", "subject": "jagged_attention", "impl": impl, "phase": "fwd"}
            part.add(**common, metric="time_ms", p50=milliseconds)
            part.add(**common, metric="tflops", p50=600 / milliseconds)
            part.add(**common, metric="share_of_bound", p50=0.75)
            part.add(**common, metric="bound_ms", p50=0.75 * milliseconds, note="tensor")
    record_store.merge(staging / "gpu" / "records")
    record_store.freeze(staging / "gpu" / "records", measured, device="h200", experiments=())
