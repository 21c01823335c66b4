"""A tiny set of records, of a CPU and of frozen H200 runs, whose numbers figures must show."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from figures.load import COLUMNS

UNITS = {"time_ms": "ms", "tflops": "TFLOP/s", "qps": "samples/s", "snr_db": "dB", "skew": "ratio"}
IMPLS = {"v1": 100.0, "v2": 200.0, "v3": 250.0, "v4": 400.0, "varlen_attn": 180.0, "fa4": 300.0, "sdpa_cudnn": 350.0}
GDPA = {"triton": 240.0, "tlx": 480.0, "compiled_eager": 120.0}
SCHEMES = {"atomic": 1.0, "serial": 1.5, "recompute": 1.25, "split": 0.75, "owner": 0.8}
LENGTHS = (256, 512, 1024, 2048)
CONFIG = {
    "drawn": "smoke",
    "presets": {
        "smoke": {
            "width": 32, "num_layers": 2, "num_tokens": 8, "num_summary": 4, "num_kv": 16, "num_seeds": 4,
            "num_experts": 2, "expert_hidden": 64, "head_hidden": 32,
            "events": [{"width": 32, "num_heads": 1, "num_layers": 2, "window": 32}],
        }
    },
}  # fmt: skip


class Book:
    """Rows and runs of one folder of records."""

    def __init__(self, device: dict):
        self.device, self.rows, self.runs = device, [], {}

    def add(self, experiment, case, subject, impl, phase, metric, p50, *, seed="", case_row=None, run=None, **more):
        run = run or f"{experiment}-{case}-{subject}"
        info = {"run_id": run, "experiment": experiment, "device": self.device, "commit": "c0ffee", "dirty": False}
        info |= {"case_row": case_row or {}, "config": CONFIG if experiment == "model" else {}}
        info |= {"software": {"python": "3.11.9", "torch": "2.13.0"}}
        self.runs[run] = info
        row = dict.fromkeys(COLUMNS, "") | {"experiment": experiment, "case": case, "subject": subject, "impl": impl}
        row |= {"phase": phase, "metric": metric, "unit": UNITS.get(metric, "x"), "p50": repr(float(p50)), "n": "5"}
        row |= {"seed": str(seed), "status": "ok", "scope": "measured", "run_id": run} | more
        self.rows.append(row)

    def timed(self, experiment, case, subject, impl, phase, ms, tflops=None, case_row=None):
        key = (experiment, case, subject, impl, phase)
        self.add(*key, "time_ms", ms, case_row=case_row, p20=repr(0.9 * ms), p80=repr(1.2 * ms))
        if tflops is not None:
            self.add(*key, "tflops", tflops, case_row=case_row)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for experiment in {row["experiment"] for row in self.rows}:
            with open(folder / f"{experiment}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(row for row in self.rows if row["experiment"] == experiment)
        (folder / "runs.json").write_text(json.dumps(self.runs), encoding="utf-8")


def kernels(book: Book) -> None:
    """H200: attention and GDPA over length; a kernel's rate is its number above times length / 2048."""
    for length in LENGTHS:
        for law in ("full", "uniform"):
            row = {"kind": "self", "q_law": law, "q_max": str(length), "kv_max": "", "activation": ""}
            for phase in ("fwd", "bwd"):
                for impl, rate in IMPLS.items():
                    case = f"jfa_self_{law}_{length}"
                    book.timed("kernels", case, "jagged_attention", impl, phase, 1.0, rate * length / 2048, row)
                for impl, rate in GDPA.items():
                    case, own = f"gdpa_self_{law}_{length}", row | {"activation": "gelu_tanh"}
                    book.timed("kernels", case, "gdpa", impl, phase, 1.0, rate * length / 2048, own)
        row = {"kind": "cross", "q_law": "uniform", "q_max": str(length), "kv_max": "256", "activation": "gelu_tanh"}
        for phase in ("fwd", "bwd"):
            book.timed("kernels", f"gdpa_cross_kv256_{length}", "gdpa", "tlx", phase, 1.0, 300.0, row)
    for op, bf16 in (("jagged_attention", "v4"), ("gdpa", "tlx")):
        row = {"q_law": "full", "q_max": "4096", "num_heads": "4", "head_dim": "128"}
        for impl, ms in ((bf16, 3.0), ("hopper_fp8", 2.5), ("hopper_fp8:kernel", 2.0)):
            book.timed("kernels", f"fp8_{op}_4096", op, impl, "fwd", ms, None, row)
    for phase in ("fwd", "bwd"):
        row = {"q_law": "full", "q_max": "1024", "num_heads": "16", "head_dim": "128"}
        for impl, ms in (("bf16", 2.6), ("hopper_fp8", 2.0), ("hopper_fp8:wgrad_high", 2.6)):
            book.timed("kernels", "mx_linear_2048", "mx_linear", impl, phase, ms, None, row)
    for impl, ms in (("separate", 0.7), ("fused", 0.3)):
        row = {"q_law": "full", "q_max": "1024", "num_heads": "4", "head_dim": "128"}
        book.timed("kernels", "norm_quantize_512", "norm_quantize", impl, "fwd", ms, None, row)
    for phase, ms in (("fwd", 4.0), ("bwd", 9.0)):
        book.timed("kernels", "block_2000", "jagged_attention", "v2:block_mask", phase, ms)
        book.timed("kernels", "block_2000", "block_attention", "tlx", phase, ms / 2)


def others(book: Book) -> None:
    """H200: masking, backward schemes, schedules, windows, traffic, steps."""
    for length in (256, 250):
        case = f"mask_{'aligned' if length == 256 else 'unaligned'}_{length}"
        for mask, ms in (("mask2d", 1.3), ("subtraction", 1.0), ("none", 0.95)):
            if mask != "none" or length == 256:
                book.timed("masking", case, "jagged_attention", f"v3:{mask}", "fwd", ms, None, {"q_max": str(length)})
    for batch in (16, 1152):
        for length in (256, 1024):
            row = {"batch": str(batch), "q_max": str(length)}
            for scheme, ratio in SCHEMES.items():
                key = ("backward_schemes", f"scheme_b{batch}_{length}", "jagged_attention", f"v3:{scheme}", "bwd")
                book.timed(*key, 2 * ratio, None, row)
                book.add(*key, "gemms", 5, case_row=row)
    for order, value in (("grid", 6.0), ("valid", 2.0), ("zigzag", 1.1)):
        book.add("schedule", "gdpa_switch_self_uniform_512", "tile_schedule", order, "fwd", "skew", value / 2)
        book.add("schedule", "gdpa_switch_self_uniform_512", "tile_schedule", order, "fwd", "skew_max_min", value)
        book.timed("schedule", "gdpa_switch_self_uniform_512", "gdpa", f"triton:{order}", "fwd", 1 + value / 10)
    for mode, op in (("full", "jagged_attention"), ("window", "jagged_attention"), ("block", "block_attention")):
        for length in (512, 4096):
            row = {"q_max": str(length), "batch": "8", "window": "128" if mode == "window" else ""}
            ms = {"full": length / 512, "window": 1.0, "block": 0.5}[mode]
            for phase in ("fwd", "bwd"):
                impl = "triton" if mode == "block" else "v2"
                book.timed("windows", f"length_{mode}_{length}", op, impl, phase, ms, None, row)
    for case, uniform, region in (("memory_0.5", (40.0, 8.0), (40.0, 6.0)), ("memory_0.75", (50.0, 8.0), (48.0, 5.5))):
        for subject, (memory, ms) in (("checkpointing_uniform", uniform), ("checkpointing_region", region)):
            book.add("step", case, subject, "inductor", "step", "time_ms", ms)
            book.add("step", case, subject, "inductor", "step", "peak_mem_gib", memory)
    for name, memory in (("bf16", 60.0), ("fp8", 36.0), ("mx4", 24.0)):
        book.add("step", "packed", f"saved_activations_{name}", "inductor", "step", "peak_mem_gib", memory)
    for length in (200, 500, 1000):
        for phase in ("fwd", "bwd"):
            book.timed("traffic", f"fmha_{length}", "jagged_attention", "fa4", phase, 1.0, float(length) / 2)
            book.timed("traffic", f"fmha_{length}", "jagged_attention", "varlen_attn", phase, 1.0, float(length) / 4)
            for index, kind in enumerate(("self", "cross64", "pma32")):
                case = f"traffic_{kind}_{length}"
                book.timed("traffic", case, "gdpa", "triton:grid", phase, 1.0, length / (5.0 + 5 * index))


def training(book: Book, experiment: str, factor: float) -> None:
    """Train records with three seeds and the row over them; NE falls by 0.01 from variant to variant."""
    variants = {
        "baseline_padded": ("baseline", ""), "baseline_varlen": ("baseline", "baseline_padded"),
        "add_checkpointing": ("add_one", "baseline_varlen"), "full": ("full", "baseline_padded"),
        "drop_hsp": ("drop_one", "full"), "mx_naive": ("quality", "full"), "mxfp8_full": ("quality", "full"),
        "saved_fp8": ("quality", "full"),
    }  # fmt: skip
    for index, (name, (group, base)) in enumerate(variants.items()):
        recipe = {"mx_naive": "naive", "mxfp8_full": "full"}.get(name, "none")
        row = {"variant": name, "group": group, "base": base, "mx_recipe": recipe}
        for metric, phase, value in (
            ("ne_ctr", "eval", 0.9 - 0.01 * index), ("ne_cvr", "eval", 0.95),
            ("qps", "step", factor * (100 + 10 * index)),
            ("mfu", "step", 0.1 + 0.01 * index), ("train_flops", "model", 1e9 * (index + 1)),
            ("flops_per_sample", "model", 1e6 * (index + 1)),
        ):  # fmt: skip
            for seed in range(3):
                book.add(
                    experiment, "synthetic", name, "eager", phase, metric, value * (1 + 0.001 * (seed - 1)), seed=seed,
                    case_row=row, run=f"{experiment}-{name}",
                )  # fmt: skip
            spread = {"p20": repr(0.999 * value), "p80": repr(1.001 * value)}
            book.add(experiment, "synthetic", name, "eager", phase, metric, value, case_row=row,
                     run=f"{experiment}-{name}", **spread)  # fmt: skip
        book.add(experiment, "synthetic", name, "eager", "eval", "ne_bayes_ctr", 0.7, case_row=row,
                 run=f"{experiment}-{name}")  # fmt: skip


def cpu_records(book: Book) -> None:
    """What a smoke run leaves."""
    row = {"kind": "self", "q_law": "uniform", "q_max": "128", "kv_max": "", "activation": ""}
    for impl, rate in (("eager", 0.004), ("padded", 0.002)):
        book.timed("kernels", "smoke_jfa_self_uniform_128", "jagged_attention", impl, "fwd", 5.0, rate, row)
        book.timed("kernels", "smoke_jfa_self_uniform_128", "jagged_attention", impl, "bwd", 5.0, rate, row)
    own = row | {"activation": "gelu_tanh"}
    book.timed("kernels", "smoke_gdpa_self_uniform_128", "gdpa", "eager", "fwd", 5.0, 0.003, own)
    wasted = {"train_impression_tokens": 0.7, "train_impression_pairs": 0.8}
    for case, value in (wasted | {"law_uniform_0.5_tokens": 0.5, "law_uniform_0.5_pairs": 0.66}).items():
        book.add("data", case, "synthetic", "data", "model", "waste", value)
    for mode, op, window in (("full", "jagged_attention", ""), ("window", "jagged_attention", "64"),
                             ("block", "block_attention", "")):  # fmt: skip
        for length in (128, 512):
            case_row = {"q_max": str(length), "batch": "4", "window": window}
            book.timed("windows", f"smoke_length_{mode}_{length}", op, "eager", "fwd", length / 100, None, case_row)
    for bound in (0.5, 1.0, 2.0):
        for name, value in (("gelu", 1e-8), ("gelu_tanh", 2e-4), ("gelu_taylor6", 1.1e-3 * bound**6)):
            book.add("activations", f"abs_score_le_{bound:g}", name, "float32", "fwd", "max_err", value)
    for name, ms in (("gelu", 2.0), ("gelu_tanh", 4.0), ("gelu_taylor6", 1.0)):
        for phase in ("fwd", "bwd"):
            book.timed("activations", "elementwise", name, "eager", phase, ms)
    for case in ("linear_y", "attention_dq"):
        for index, recipe in enumerate(("naive", "rceil", "full")):
            book.add("mx", case, case.split("_")[0], recipe, "fwd", "snr_db", 25.0 + index)
    for ranks in (8, 4096):
        rows = [("none", 1.15, None), ("local_pool8", 1.05, 0.67), ("local", 1.01, 0.93), ("global", 1.0, 1.0)]
        for subject, value, share in [*rows, ("bbs_pool8", 1.1, 0.33), ("bbs_pool256", 1.03, 0.8)]:
            impl = {"none": "simulation", "global": "simulation", "local": "pool256"}.get(
                subject, subject.partition("_")[2]
            )
            book.add("balance", f"ranks{ranks}", subject, impl, "model", "skew", value)
            if share is not None:
                book.add("balance", f"ranks{ranks}", subject, impl, "model", "share_of_optimum", share)
    for part, flops in (("tables", 0), ("embedding", 10), ("feed_forward", 30), ("self_attention", 20), ("pooling", 10),
                        ("summary", 5), ("interaction", 20), ("heads", 5), ("dense", 100), ("total", 100)):  # fmt: skip
        book.add("model", "smoke", part, "closed_form", "model", "flops_per_sample", flops * 1e6, run="model-x")
        book.add("model", "smoke", part, "closed_form", "model", "params", 2**20 * max(flops, 1), run="model-x")
    for gpus in (256, 1024):
        for index, name in enumerate(("v1", "v2", "v3"), start=1):
            for metric, impl in (("memory_bytes", "resident"), ("memory_bytes", "peak"), ("comm_bytes", "network"),
                                 ("comm_bytes", "across_zones"), ("comm_bytes", "nvlink")):  # fmt: skip
                book.add("sparse", f"gpus{gpus}", name, impl, "model", metric, index * 2**30, scope="modelled")
            for metric, impl, value in (
                ("skew", "model", 1 + 0.1 * index),
                ("comm_bytes", "to_one_peer", 2**10 * index),
            ):
                book.add("sparse", f"gpus{gpus}", name, impl, "model", metric, value, scope="modelled")
    for index, preset in enumerate(("quality_quarter", "quality_half", "quality", "quality_double")):
        own = {"case_row": {"variant": "full", "group": "full"}, "run": f"quality-size_{preset}-full"}
        case, flops = f"size_{preset}", 1e9 * 4.0**index  # NE above the floor halves with 4 times the FLOPs
        for seed in range(3):
            value = 0.7 + 0.2 * 0.5**index + 0.001 * (seed - 1)
            book.add("quality", case, "full", "eager", "eval", "ne_ctr", value, seed=seed, **own)
            book.add("quality", case, "full", "eager", "model", "train_flops", flops, seed=seed, **own)
        book.add("quality", case, "full", "eager", "eval", "ne_bayes_ctr", 0.7, **own)
    for weight in ("0", "1"):
        for index, name in enumerate(("drop_block", "drop_block_for_window", "full")):
            row = {"variant": name, "group": "full"}
            run = f"quality-{weight}-{name}"
            for seed in range(3):
                value = 0.8 + 0.01 * index * float(weight)
                book.add("quality", f"long_range_{weight}", name, "eager", "eval", "ne_ctr", value, seed=seed,
                         case_row=row, run=run)  # fmt: skip
            book.add(
                "quality", f"long_range_{weight}", name, "eager", "eval", "ne_bayes_ctr", 0.7, case_row=row, run=run
            )


def jobs(book: Book) -> None:
    """Modelled jobs of two sizes, without calibration: F15, F16, F22."""

    def add(case, subject, metric, value, impl="assumed", note="not calibrated: no record"):
        book.add("simulate", case, subject, impl, "model", metric, value, scope="modelled", note=note, run="simulate")

    for gpus in (8, 4096):
        for index, name in enumerate(("dense_1d", "dense_2d", "dense_2d_ep", "full", "without_ep", "none"), start=1):
            for metric, value in (("exposed_ms", gpus / index), ("scaling_ratio", 0.1 * index), ("mfu", 0.04 * index)):
                add(f"large_gpus{gpus}", name, metric, value)
        for name, share in (("compute", 0.7), ("wait", 0.1), ("contention", 0.05), ("exposed", 0.15)):
            add(f"large_gpus{gpus}", f"full:{name}", "time_share", share)
    for factor in (1, 2):
        for name, value in (("dense_1d", 8.0), ("dense_2d", 4.0), ("dense_2d_ep", 5.0 - factor)):
            for constant in ("experts", "experts_fast_chip", "zone_bandwidth"):
                add(f"large_gpus4096_x{factor}", f"{name}@{constant}", "time_ms", value)
                add(f"large_gpus4096_x{factor}", f"{name}@{constant}", "exposed_ms", value / factor)
    add("large_gpus4096_x1", "dense_1d@log_latency", "exposed_ms", 3.0)
    for axis, tier in (("shard", "zone"), ("expert", "host"), ("replica", "cross_zone")):
        add("large_gpus4096", f"axis_{axis}", "time_ms", 2.0, note=f"{tier}: why; not calibrated")
        add("large_gpus4096", f"axis_{axis}", "comm_bytes", 3e9, note=f"{tier}: why; not calibrated")
    for tier, ms in (("host", 0.1), ("zone", 1.0), ("cross_zone", 10.0)):
        for power in (16, 24, 30):
            add(f"bytes{2**power}", f"all_gather_{tier}", "time_ms", ms * power)


def pair(book: Book) -> None:
    """Two GPUs: sparse generations, and collectives beside products that take 10 ms alone."""
    for index, name in enumerate(("v1", "v2", "v3", "v3_torchrec"), start=1):
        for metric, impl, value in (("memory_bytes", "tables", index * 2**30), ("skew", "lookups", 1 + index / 10),
                                    ("memory_bytes", "tables_peak", 2 * index * 2**30)):  # fmt: skip
            book.add("sparse", "gpus2", name, impl, "step", metric, value, run="sparse-generations")
        for phase, ms in (("fwd", 1.0), ("bwd", 2.0), ("step", 3.0 + index)):
            book.add("sparse", "gpus2", name, "step", phase, "time_ms", ms, run="sparse-generations")
        book.add("sparse", "gpus2", f"{name}_sync", "step", "step", "time_ms", index, run="sparse-generations")
    base = {"run": "topology-all"}
    book.add("topology", "gemm", "gemm_alone", "torch_mm", "step", "time_ms", 10.0, **base)
    for sms in (8, 24, 66):
        book.add("topology", "gemm", f"gemm_beside_{sms}_sms", "held", "step", "time_ms", 10 + sms / 10, **base)
    for index, impl in enumerate(("nccl", "nccl_ctas4", "nccl_ctas16", "copy_engine"), start=1):
        if impl != "copy_engine":
            book.add("topology", f"bytes{2**29}", "gather_limited", impl, "step", "time_ms", index, **base)
        book.add("topology", "gemm", "gemm_beside_gather", impl, "step", "time_ms", 14 - index, **base)
    for rows in (2048, 8192):
        steps = {"no": ("none", 20.0), "copy_engine": ("copy_engine", 20.2), "nccl": ("nccl", 24.0)}
        for name, (impl, ms) in steps.items():
            book.add("topology", f"rows{rows}", f"step_{name}_gather", impl, "step", "time_ms", ms, **base)
        book.add("topology", f"rows{rows}", "step_nccl_gather", "nccl_ctas4", "step", "time_ms", 23.0, **base)
    for size in (2**20, 2**29):
        for name in ("all_gather", "all_to_all", "gather_copy_engine"):
            impl = "copy_engine" if "copy" in name else "nccl"
            book.add("topology", f"bytes{size}", name, impl, "step", "comm_bytes", size / 2, **base)
            book.add("topology", f"bytes{size}", name, impl, "step", "time_ms", size / 2 / 2e8, **base)
    for index, name in enumerate(("plain", "float8", "mx"), start=1):
        book.add("dense", "base", f"gather_{name}", "fsdp2", "step", "time_ms", 3.0 / index, run="dense-gathers")
    book.add("dense", "base", "gather_float8", "prequantised", "step", "time_ms", 0.9, run="dense-gathers")
    forms = (
        ("experts_replicated", "fsdp2"),
        ("experts_parallel", "reduce_scatter"),
        ("experts_parallel", "all_to_all"),
    )
    for batch in (64, 1024):
        for index, (name, impl) in enumerate(forms, start=1):
            book.add("dense", f"batch{batch}", name, impl, "step", "time_ms", batch / 64 * index, run="dense-experts")
    book.runs["topology-all"]["config"] = {"settings": {"sms": 132}}


FLOWS = {
    "experts": (
        ("fwd", "all_gather", "expert_parameters", "expert_shard"),
        ("fwd", "all_gather", "activations", "expert"),
        ("fwd", "reduce_scatter", "outputs", "expert"),
        ("bwd", "all_gather", "expert_parameters", "expert_shard"),
        ("bwd", "all_gather", "output_gradients", "expert"),
        ("bwd", "reduce_scatter", "input_gradients", "expert"),
        ("bwd", "reduce_scatter", "parameter_gradients", "expert_shard"),
    ),
    "tables_v3": (
        ("fwd", "all_to_all", "ids", "model_parallel"),
        ("fwd", "all_gather", "table_shards", "table_replica"),
        ("bwd", "reduce_scatter", "parameters", "table_replica"),
    ),
}


def flows(book: Book) -> None:
    """Collectives of a step, in an order of rows that is not theirs: F24."""
    for case, steps in FLOWS.items():
        for place, (phase, kind, what, axis) in reversed(list(enumerate(steps, start=1))):
            for metric, value in (("position", place), ("comm_bytes", 1024.0 * place)):
                book.add("data_flow", case, what, kind, phase, metric, value, note=f"{axis} of 2 ranks; messages: 1",
                         run="data_flow")  # fmt: skip


def write(root: Path) -> tuple[Path, Path]:
    """Folders (records, measured) under root, with claims beside the records."""
    cpu = Book({"type": "cpu", "name": "Test CPU", "slug": "cpu", "count": 1})
    gpu = Book({"type": "cuda", "name": "NVIDIA H200", "slug": "h200", "count": 1})
    cpu_records(cpu)
    jobs(cpu)
    flows(cpu)
    training(cpu, "train", 1.0)
    kernels(gpu)
    others(gpu)
    training(gpu, "step", 1000.0)
    records, measured = root / "results" / "records", root / "measured"
    cpu.write(records)
    gpu.write(measured / "h200")
    both = Book({"type": "cuda", "name": "NVIDIA H200", "slug": "h200x2", "count": 2})
    pair(both)
    both.write(measured / "h200x2")
    claims = root / "results" / "claims" / "claims.csv"
    claims.parent.mkdir(parents=True, exist_ok=True)
    claims.write_text(
        "id,statement,published,expected,ours,unit,ratio,scope,verdict,limiter,source_record,figure,command\n"
        "C40,Heaviest rank about 15 % above the mean,1.15,,1.16,x,1.01,modelled,reproduced,,balance,F20,\n",
        encoding="utf-8",
    )
    return records, measured
