"""What a training run leaves behind: summary.json, one line for the terminal, and a part of the records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from gem import evaluate, hardware, metrics
from gem.config import Config
from gem.digest import NOT_TRAINING

# metric of config/metrics.tsv -> phase
SEED_METRICS = {
    "ne_ctr": "eval",
    "ne_cvr": "eval",
    "auc_ctr": "eval",
    "auc_cvr": "eval",
    "loss": "step",
    "qps": "step",
    "time_ms": "step",
    "mfu": "step",
}
TIMED_METRICS = ("qps", "time_ms", "mfu")  # say nothing where other work had the device too
MODEL_METRICS = {"flops_per_sample": "model", "train_flops": "model", "peak_mem_gib": "step"}


# what decides the numbers: the modules that training imports
SOURCES = (
    "kernels",
    *(f"gem/{path.name}" for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem not in NOT_TRAINING),
)


def write_json(path: Path, value: dict) -> None:
    """Write beside the path and rename, so that a killed run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def summarise(config: Config, data, results: list[dict], device: torch.device) -> dict:
    """All seeds and the spread over them. data has `train` and `eval` splits."""
    names = [n for n in (*SEED_METRICS, *MODEL_METRICS, "calibration_ctr", "calibration_cvr") if n in results[0]]
    spreads = {}
    for name in names:
        values = [result[name] for result in results if result[name] is not None]
        spreads[name] = {k: (v if v == v else None) for k, v in metrics.spread(values).items()}
    first = results[0]
    return {
        "variant": config.variant,
        "tier": config.tier,
        "preset": config.preset,
        "config": config.to_dict(),
        "dataset": {
            "name": data.train.schema.name,
            "train_rows": data.train.num_rows,
            "eval_rows": data.eval.num_rows,
            "event_types": [event.name for event in data.train.schema.events],
            "tasks": list(data.train.schema.tasks),
        },
        "device": hardware.device_name(device),
        "peak_name": first["peak_name"],
        "peak_flops": first["peak_flops"],
        "impl": implementation(config),
        "params": first["params_dense"] + first["params_tables"],
        "params_dense": first["params_dense"],
        "params_tables": first["params_tables"],
        "bayes": evaluate.bayes_floor(data.eval.manifest),
        "bayes_same_labels": {t: first[f"ne_bayes_{t}"] for t in data.eval.schema.tasks if f"ne_bayes_{t}" in first},
        "spread": spreads,
        "seeds": results,
    }


def implementation(config: Config) -> str:
    """What really ran, such as "attention:eager gdpa:eager"; parts that the variant does not have are left out."""
    names, toggles = config.implementations, config.toggles
    if toggles.sequence.value == "off":
        parts = [f"compile:{names.compile}"]
    elif toggles.layout.value == "padded":
        parts = ["attention:padded_sdpa", "gdpa:padded", f"norm:{names.norm}", f"compile:{names.compile}"]
    else:
        parts = [f"attention:{names.attention}", f"gdpa:{names.gdpa}"]
        if toggles.self_attention.value == "block":
            parts.append(f"block:{names.block_attention}")
        parts += [f"norm:{names.norm}", f"compile:{names.compile}"]
    emulated = names.precision == "mx"
    if toggles.precision.value in ("mx_attention", "mx_full") and emulated:  # in place of every attention op
        parts = ["attention:mx_emulated", f"compile:{names.compile}"]
    if toggles.mx_recipe.value != "none":
        parts.append(f"{names.precision}:{toggles.mx_recipe.value}")
    parts.append(f"optimizer:{names.optimizer}")
    return " ".join(parts if names.launch == "eager" else [*parts, f"launch:{names.launch}"])


def one_line(summary: dict) -> str:
    """The result as a reader wants it first."""
    parts = [f"{summary['variant']}:"]
    for name, label in (("ne_ctr", "NE ctr"), ("ne_cvr", "NE cvr"), ("auc_ctr", "AUC ctr")):
        value = summary["spread"].get(name)
        if value and value["mean"] is not None:
            std = f" +- {value['std']:.4f}" if value["std"] is not None else ""
            parts.append(f"{label} {value['mean']:.4f}{std},")
        elif value:
            parts.append(f"{label} n/a,")
    parts.append(f"{summary['spread']['qps']['p50']:.0f} samples/s, MFU {100 * summary['spread']['mfu']['p50']:.1f} %")
    parts.append(f"of {summary['peak_name']}, {len(summary['seeds'])} seeds")
    return " ".join(parts)


def record_failure(
    config: Config, status: str, note: str, *, tier: str, experiment: str, case: str, results: str = "results"
) -> Path:
    """Write the part of a variant that could not be trained: every metric of a seed with `status` and no number."""
    from gem import record as records

    with records.Run(
        tier, experiment, config=config.to_dict(), case_row=config.row, sources=SOURCES, results=results
    ) as run:
        for name, phase in SEED_METRICS.items():
            run.add(
                case=case, subject=config.variant, impl=implementation(config), phase=phase, metric=name,
                status=status, note=note,
            )  # fmt: skip
    return run.folder / f"{run.run_id}.csv"


def record(
    config: Config,
    summary: dict,
    *,
    tier: str,
    experiment: str,
    case: str,
    results: str = "results",
    timed: bool = True,
    command: str | None = None,
) -> Path:
    """Write the part of this variant: a row a seed, and one over the seeds with p50, p20, p80.

    timed: False leaves out throughput, step time and MFU. command: the command line that made it (None: this one).
    """
    from gem import record as records

    note = "" if config.device == "cuda" else "peak memory of the whole process"
    with records.Run(
        tier,
        experiment,
        config=summary["config"],
        case_row=config.row,
        sources=SOURCES,
        results=results,
        command=command,
    ) as run:
        common = {"case": case, "subject": config.variant, "impl": summary["impl"]}
        for name, phase in (SEED_METRICS | MODEL_METRICS).items():
            if name not in summary["spread"] or (name in TIMED_METRICS and not timed):
                continue
            for result in summary["seeds"]:
                value = {"p50": result[name]}
                if name == "time_ms":
                    value |= {"p20": result["time_ms_p20"], "p80": result["time_ms_p80"], "n": result["timed_steps"]}
                if value["p50"] is None:
                    value |= {"status": "failed", "note": result["undefined"].get(name, "undefined")}
                elif name == "peak_mem_gib":
                    value["note"] = note
                elif name == "mfu":
                    value["note"] = f"peak: {summary['peak_name']}"
                run.add(**common, phase=phase, metric=name, seed=result["seed"], **value)
            over = summary["spread"][name]
            if over["n"]:
                run.add(
                    **common, phase=phase, metric=name, p50=over["p50"], p20=over["p20"], p80=over["p80"], n=over["n"],
                    note=f"over {over['n']} seeds",
                )  # fmt: skip
        run.add(**common, phase="model", metric="params", p50=summary["params"])
        for task, value in summary["bayes_same_labels"].items():
            if value is not None:
                run.add(**common, phase="eval", metric=f"ne_bayes_{task}", p50=value, scope="modelled")
    return run.folder / f"{run.run_id}.csv"
