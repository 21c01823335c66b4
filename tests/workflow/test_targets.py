"""The workflow as a user types it: targets, profiles, lint, and errors before any work."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import yaml

from gem import sheets, workflow
from gem.workflow import ROOT, load, read_sheet

from .conftest import SNAKEMAKE

TARGETS = {
    "all",
    "data",
    "train",
    "bench",
    "records",
    "ablations",
    "figures",
    "tables",
    "claims",
    "paper",
    "frozen",
    "archive",
}


def test_every_target_can_be_named(real):
    listed = set(real.snakemake("--list-target-rules").stdout.split())
    assert TARGETS <= listed
    settings = load({})
    assert {f"ablation_{name}" for name in settings.variants} <= listed
    outputs = settings.outputs("smoke")
    assert {f"{settings.category(name).lower()}_{name}" for name in outputs} <= listed


def test_default_target_is_everything_of_tier_smoke(real):
    jobs = real.planned()
    settings = load({})
    rows = read_sheet("variants").values()
    # rungs of the waterfall are timed, and trained only where a tier names them
    assert jobs["train_variant"] == len(settings.variants) == sum(row["group"] != "waterfall" for row in rows)
    assert jobs["merge_records"] == len(settings.experiments)
    assert jobs["judge_claims"] == jobs["typeset"] == jobs["check_records"] == 1
    assert {f"bench_{name}" for name in settings.benches} <= set(jobs)


def test_one_ablation_trains_two_variants_only(real):
    assert real.planned("ablation_add_fused_rotary") == {"synthesize": 1, "train_variant": 2, "ablation": 1}


@pytest.mark.parametrize("profile", ["smoke", "gpu", "gpu2", "slurm"], ids="profile_{}".format)
def test_profiles_dry_run(real, profile):
    if profile == "slurm" and importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        pytest.skip("snakemake-executor-plugin-slurm is not installed (envs/slurm.txt)")
    jobs = real.planned("--workflow-profile", f"profiles/{profile}")
    settings = load({"tier": {"slurm": "gpu"}.get(profile, profile)})
    # an ablation also trains what its variant is compared with
    assert jobs["train_variant"] == len({*settings.variants, *map(settings.base_of, settings.variants)})
    assert jobs.get("train_study", 0) == len(settings.study_runs)
    assert {f"bench_{name}" for name in settings.benches} <= set(jobs)


def test_every_training_job_has_a_rule_of_the_same_name():
    for tier in ("smoke", "gpu", "gpu2"):
        settings = load({"tier": tier})
        names = {job.name for job in settings.trainings()}
        assert {f"results/{tier}/records/jobs/{name}.json" for name in names} == set(settings.train_receipts())


def test_profiles_stand_alone_and_cap_the_gpus():
    for name in ("default", "smoke", "gpu", "gpu2", "slurm"):
        profile = yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())
        assert any(item.startswith("gpu=") for item in profile["resources"]), name
        assert ("cores" in profile) or ("jobs" in profile)
        if name != "default":
            tier = load(yaml.safe_load((ROOT / profile["configfile"]).read_text())).tier
            assert tier == {"slurm": "gpu"}.get(name, name)


def test_lint_and_format():
    done = subprocess.run([*SNAKEMAKE, "--lint"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "good condition" in done.stdout + done.stderr, done.stderr[-3000:]
    snakefmt = [sys.executable, "-m", "snakefmt.snakefmt", "--check", "Snakefile", "workflow"]
    done = subprocess.run(snakefmt, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((ROOT / "Snakefile").read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config", "tier=huge"), "error: config: tier 'huge' is unknown; allowed: gpu, gpu2, smoke"),
        (("ablation_nothing",), "error: target ablation_nothing: 'nothing' is unknown; allowed: baseline_padded, "),
    ],
)
def test_a_users_error_is_one_line_and_stops_before_any_work(real, words, message):
    done = real.snakemake(*words, "--cores", "1")
    assert done.returncode != 0
    errors = [line for line in done.stdout.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and errors[0].startswith(message)
    assert not (real.folder / "results").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teir": "gpu"}, "config: key 'teir' is unknown; allowed: dataset, tier, device"),
        ({"dataset": ""}, "config: dataset '' has no manifest.json; allowed: a folder written by"),
        ({"dataset": None}, "config: dataset '' has no manifest.json; allowed: a folder written by"),
        ({"dataset": "nowhere"}, "config: dataset 'nowhere' has no manifest.json; allowed: a folder written by"),
        ({"train": {"epochs": 3}}, "config: train differs from config/smoke.yaml; allowed: a change in that file"),
    ],
)
def test_bad_config_values(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(given)
    assert "\n" not in str(caught.value)


def dataset(folder, rows):
    """A folder with a whole manifest and no shards: enough for planning."""
    folder.mkdir()
    shard = {"file": "train-00000.parquet", "rows": rows, "bytes": 1, "sha256": ""}
    split = {"rows": rows, "shards": [shard], "events": {}, "length": {}}
    manifest = {"format": 1, "name": "x", "seed": None, "command": "", "generator": {}, "num_dense": 1, "bayes": None}
    manifest |= {"sparse_features": {"item": {"num_embeddings": 2, "pooling": "mean"}}, "tasks": ["ctr"]}
    manifest |= {"event_types": {"history": {"num_items": 2, "num_actions": 1, "max_length": 4}}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"splits": {"train": split, "eval": split}}))
    return folder


def test_a_dataset_with_too_few_rows_or_a_broken_manifest_stops_before_any_work(tmp_path):
    folder = dataset(tmp_path / "few", rows=127)
    with pytest.raises(ValueError, match=r"too few rows: 127 training rows do not fill one batch; allowed: .* 128"):
        load({"dataset": str(folder)})
    (folder / "manifest.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match=r"manifest\.json: not readable as JSON") as caught:
        load({"dataset": str(folder)})
    assert "\n" not in str(caught.value)


def test_a_dataset_has_results_of_its_own_and_leaves_out_the_sweep(tmp_path):
    folder = dataset(tmp_path / "ML 100k", rows=128)
    settings = load({"dataset": str(folder)})
    assert settings.results == "results/smoke-ml-100k"
    assert settings.jobs("quality") == [] and settings.data_folder("base") == str(folder)
    assert all(path.startswith("results/smoke-ml-100k/") for path in settings.default_files())
    assert not any("paper" in path for path in settings.default_files())


@pytest.fixture
def tree(tmp_path):
    """Sheets and schemas alone, to be broken."""
    for name in ("config", "workflow/schemas"):
        (tmp_path / name).mkdir(parents=True)
        for path in (ROOT / name).iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("variants.tsv", "\tjagged\t", "\tjaged\t", 'config/variants.tsv: row baseline_varlen: column layout: "jaged"'),
        (
            "variants.tsv",
            "\tlayout\t",
            "\tlayuot\t",
            "config/variants.tsv: column 'layuot' is unknown; allowed: variant,",
        ),
        (
            "variants.tsv",
            "baseline\t\tpadded",
            "baseline\tnobody\tpadded",
            "row baseline_padded: column base: 'nobody'",
        ),
        ("variants.tsv", "add_jagged", "baseline_padded", "row baseline_padded: column variant: the id occurs twice"),
        ("kernels.tsv", "\t1152\t", "\t-5\t", 'column batch: "-5"; allowed: an integer >= 1'),
        (
            "kernels.tsv",
            "\t256\t1.0\t",
            "\t256\t1.5\t",
            'column q_fill: "1.5"; allowed: a number in (0, 1], or nothing',
        ),
        ("kernels.tsv", "\tgpu\t", "\tgpux\t", "column tiers: 'gpux' is unknown; allowed: gpu, gpu2, smoke"),
        ("figures.tsv", "C04;C07", "C04;C77", "row F04: column claims: 'C77' is unknown"),
        ("claims.tsv", "\tgeomean\t", "\tmean\t", 'column aggregate: "mean"; allowed: geomean, median, max, all'),
        ("metrics.tsv", "\tlower\t", "\tless\t", 'column direction: "less"; allowed: higher, lower'),
        (
            "smoke.yaml",
            "batch_size: 128",
            "batch_size: 1.5",
            "config/smoke.yaml: key train.batch_size: 1.5; allowed: an int",
        ),
        ("smoke.yaml", "batch_size: 128", "batch_size: -1", "key train.batch_size: -1; allowed: an integer >= 1"),
        ("smoke.yaml", "fill: 0.3", "fill: 1.3", "key data.fill: 1.3; allowed: a number in (0, 1]"),
        ("smoke.yaml", "epochs: 1", "epoch: 1", "config/smoke.yaml: key train.epoch"),
        (
            "smoke.yaml",
            "variants: all",
            "variants: [fulll]",
            "key train.variants: 'fulll' is unknown; allowed: baseline",
        ),
        ("smoke.yaml", "variants: all", "variants: [full, full]", 'key train.variants: ["full", "full"]'),
        ("smoke.yaml", "train:\n", "train: [\n", "config/smoke.yaml, line "),
        ("smoke.yaml", "epochs: 1", "epochs: 1\n  epochs: 2", "config/smoke.yaml: key epochs occurs twice"),
        ("smoke.yaml", '"on": eager', "on: eager", "config/smoke.yaml: key True is not text; allowed: quotes"),
        ("smoke.yaml", "tier: smoke", "tier: smok", "key tier: 'smok'; allowed: smoke, the file's name"),
        ("smoke.yaml", "fill: 0.3", "fill: .nan", "config/smoke.yaml: key data.fill: nan; allowed: a finite number"),
        ("smoke.yaml", "fill: 0.3", "fill: 0.99", "section data: fill is 0.99 with length law 'lognormal'; attainable"),
        ("smoke.yaml", "batch_size: 128", "batch_size: 9999", "key data.samples: too few rows: "),
        ("smoke.yaml", "batch_size: 128", "batch_size: 128.0", "train batch_size: 128.0 is not an integer"),
        ("smoke.yaml", "v3: eager, v4: eager}", "v3: eager}", "implementations.attention has no entry for 'v4'"),
        ("smoke.yaml", "v4: eager}", "v4: eagre}", 'key implementations.attention.v4: "eagre"; allowed: auto, '),
        ("smoke.yaml", "[0.0, 1.5]", "[0.0, 1.0e-7]", "key quality.long_range_weights: 1e-07; allowed: 0, or"),
        (
            "variants.tsv",
            "\tpadded\tpadded\t",
            "\tpadded\tv4\t",
            "config/variants.tsv: variant baseline_padded: layout: padded runs on attention_impl padded only",
        ),
        ("variants.tsv", "\tlayout\tattention_impl", "\tlayout\tlayout", "column 'layout' occurs twice; allowed: once"),
        ("kernels.tsv", "\tjagged_attention\t", "\tjaged_attention\t", 'column op: "jaged_attention"; allowed: '),
        ("kernels.tsv", "\tfull\t128\t1.0", "\tfull\t128\t0.5", "_fill: 0.5; allowed: 1, or nothing, where"),
        ("experiments.tsv", "gem.bench.balance", "gem.bench.blance", 'gem.bench.blance": no such file; allowed: a mod'),
    ],
)
def test_typos_in_config_files_name_file_row_column_and_what_is_allowed(tree, file, old, new, message):
    path = tree / "config" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load({}, tree)
    assert "\n" not in str(caught.value)


def test_names_in_schemas_are_those_of_the_code():
    """Schemas name implementations and ops without importing torch; here they are held to the registries."""
    from gem import attention, compile, graphs
    from gem.bench import cases
    from kernels.block_attention.api import REGISTRY as block
    from kernels.gdpa.api import REGISTRY as gdpa
    from kernels.jfa.api import REGISTRY as jfa

    choices = sheets.schema_of("tier", ROOT)["$defs"]["implementations"]["properties"]
    named = {key: value["additionalProperties"] for key, value in choices.items() if value.get("additionalProperties")}
    names = {key: set(value["enum"]) for key, value in named.items()}
    assert names["attention"] == {"auto", attention.VARLEN, *jfa.entries}
    assert names["gdpa"] == {"auto", *gdpa.entries} and names["block_attention"] == {"auto", *block.entries}
    assert names["launch"] == set(graphs.LAUNCHES)
    assert names["compile"] == set(compile.BACKENDS) and names["optimizer"] == {"foreach", "fused"}
    assert tuple(sheets.schema_of("kernels", ROOT)["properties"]["op"]["enum"]) == cases.OPS


def test_every_sheet_of_the_repository_is_valid_in_every_tier():
    for tier in ("smoke", "gpu", "gpu2"):
        settings = workflow.load({"tier": tier})
        assert settings.experiments and settings.variants
