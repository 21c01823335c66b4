"""What the Snakefile asks for: the checked configuration, the sheets, and which jobs, figures and tables a tier has.

Everything is checked when the workflow is parsed, against workflow/schemas: an error is one line that names file, row,
column and what is allowed, and no job has run. No torch here: a dry run must be quick.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gem import checks
from gem.digest import NOT_TRAINING, ROOT, source_digest
from gem.sheets import SHEETS, read_sheet, schema_of, validate


@dataclass(frozen=True)
class Training:
    """A training job: its name (of the receipt too), the data set it reads, and its arguments of gem.train besides
    --data and --run."""

    name: str
    dataset: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """One tier, ready for rules.

    `name` is the folder under results: the tier, with "-<dataset>" when data are imported.
    """

    tier: str
    name: str
    config: dict
    dataset: Path | None
    sheets: dict[str, dict[str, dict]] = field(repr=False)

    @property
    def results(self) -> str:
        return f"results/{self.name}"

    @property
    def uses_gpu(self) -> bool:
        return self.config["device"] == "cuda"

    @property
    def variants(self) -> list[str]:
        """Ids trained in this tier."""
        wanted = self.config["train"]["variants"]
        if wanted != "all":
            return list(wanted)
        # rungs of the waterfall are sums of the others: there to be timed, trained where a tier names them
        return [name for name, row in self.sheets["variants"].items() if row["group"] != "waterfall"]

    def variant_rows(self, *ids: str) -> list[dict]:
        return [self.sheets["variants"][name] for name in ids]

    def base_of(self, variant: str) -> str:
        """The variant that `variant` is compared with; a baseline without one is compared with itself."""
        return self.sheets["variants"][variant]["base"] or variant

    def kernel_cases(self, experiment: str) -> list[dict]:
        """Rows of kernels.tsv of one experiment in this tier."""
        rows = self.sheets["kernels"].values()
        return [row for row in rows if row["experiment"] == experiment and self.tier in row["tiers"].split(",")]

    @property
    def benches(self) -> dict[str, dict]:
        """Rows of experiments.tsv that this tier measures."""
        rows = self.sheets["experiments"]
        return {name: row for name, row in rows.items() if self.tier in row["tiers"].split(",")}

    def jobs(self, experiment: str) -> list[str]:
        """Receipts of the jobs that write records of `experiment`, in this tier."""
        folder = f"{self.results}/records/jobs"
        jobs = [name for name, row in self.benches.items() if experiment in _split(row["records"])]
        receipts = [f"{folder}/{name}.json" for name in jobs]
        if experiment == "data":
            receipts += [f"{folder}/data.json"]
        if experiment == "train":
            receipts += [f"{folder}/train-{name}.json" for name in self.variants]
        if experiment == "quality" and not self.dataset:
            receipts += [f"{folder}/quality-{weight}-{name}.json" for weight, name in self.quality_runs]
            receipts += [f"{folder}/quality-{study}-{name}.json" for study, name in self.study_runs]
        return receipts

    @property
    def quality_runs(self) -> list[tuple[str, str]]:
        """(long-range weight, variant) of the sweep over the label law; weights as they stand in paths."""
        quality = self.config["quality"]
        return [(f"{weight:g}", name) for weight in quality["long_range_weights"] for name in quality["variants"]]

    @property
    def study_runs(self) -> list[tuple[str, str]]:
        """(study, variant) on the base data: size_<preset> for NE against FLOPs, hopper for real 8-bit products."""
        quality = self.config["quality"]
        found = [(f"size_{s}", v) for s in quality.get("sizes", ()) for v in quality.get("size_variants", ())]
        return found + [("hopper", name) for name in quality.get("hopper", ())]

    def study_arguments(self, study: str) -> str:
        """Arguments of gem.train that make a study of `study_runs`."""
        own = "--format hopper" if study == "hopper" else f"--preset {study.removeprefix('size_')}"
        return f"--experiment quality --case {study} {own}"

    def study_of_wildcards(self, wildcards) -> str:
        return self.study_arguments(wildcards.study)

    def trainings(self) -> list[Training]:
        """Every training job of the tier, as the rules of workflow/rules/train.smk start them."""
        tier = ("--tier", self.tier, "--variant")
        jobs = [Training(f"train-{name}", "base", (*tier, name)) for name in self.variants]
        if self.dataset:
            return jobs
        for weight, name in self.quality_runs:
            own = ("--experiment", "quality", "--case", f"long_range_{weight}")
            jobs.append(Training(f"quality-{weight}-{name}", f"weight_{weight}", (*tier, name, *own)))
        for study, name in self.study_runs:
            jobs.append(
                Training(f"quality-{study}-{name}", "base", (*tier, name, *self.study_arguments(study).split()))
            )
        return jobs

    @property
    def experiments(self) -> list[str]:
        """Experiments that have records in this tier, in a fixed order."""
        names = {"data", "train", "quality"}
        names |= {name for row in self.benches.values() for name in _split(row["records"])}
        return sorted(name for name in names if self.jobs(name))

    # What rules need. Functions of `wildcards` are input or params functions of the rules in workflow/rules.

    @property
    def gpus(self) -> int:
        """GPUs of one training process."""
        return 1 if self.uses_gpu else 0

    def gpus_of(self, bench: dict) -> int:
        """GPUs of a bench: its own number, none in a CPU tier."""
        return int(bench["gpus"]) if self.uses_gpu else 0

    def sections(self, *keys: str) -> dict:
        """Sections of the tier's configuration that a rule depends on; a change in one reruns the rule."""
        values = dict(self.config) | {"dataset": str(self.dataset) if self.dataset else None}
        return {key: values[key] for key in keys}

    def bench_sections(self, bench: dict) -> dict:
        """Sections that a measuring job depends on: of steps and their layers also the data's law and the variants."""
        keys = ["device", "dtype", "preset", "implementations", "bench", "balance"]
        if not {"step", "layers", "regions"} & set(_split(bench["records"])):
            return self.sections(*keys)
        names = dict.fromkeys(name for key in ("variants", "layer_variants") for name in self.config["step"][key])
        return self.sections(*keys, "data", "step") | {"rows": self.variant_rows(*names)}

    def sheet_ids(self, *sheets: str) -> dict:
        return {name: list(self.sheets[name]) for name in sheets}

    def variant_row(self, wildcards) -> dict:
        return self.sheets["variants"][wildcards.variant]

    def slow_first(self, wildcards) -> int:
        """Priority of a training: the longest start first, so that the last are short and all cores end together."""
        row = self.variant_row(wildcards)
        if row["precision"] != "bf16":
            return 40
        if row["saved_activations"] != "full" or row["checkpointing"] != "none" or row["layout"] == "padded":
            return 30
        return 20 if row["compskip"] == "off" and row["sequence"] == "on" else 10

    def base_of_row(self, wildcards) -> str:
        return self.base_of(wildcards.variant)

    def receipts(self, wildcards) -> list[str]:
        return self.jobs(wildcards.experiment)

    def ablation_receipts(self, wildcards) -> list[str]:
        names = dict.fromkeys((wildcards.variant, self.base_of(wildcards.variant)))
        return [f"{self.results}/records/jobs/train-{name}.json" for name in names]

    def data_folder(self, dataset: str) -> str:
        """Folder of a data set: "base", "weight_<w>", or with --config dataset=PATH that folder."""
        return str(self.dataset) if self.dataset else f"{self.results}/data/{dataset}"

    def data_of_wildcards(self, wildcards) -> str:
        """Data folder of a training rule: the sweep's where the rule has a weight, else the tier's own."""
        weight = wildcards.get("weight")
        return self.data_folder("base" if weight is None else f"weight_{weight}")

    def training_data(self, wildcards) -> list[str]:
        """Data that a training job waits for: none when its records were thawed, so that thawed jobs stay finished."""
        weight = wildcards.get("weight")
        study = weight if weight is not None else wildcards.get("study")
        name = f"train-{wildcards.variant}" if study is None else f"quality-{study}-{wildcards.variant}"
        receipt = ROOT / self.results / "records" / "jobs" / f"{name}.json"
        if receipt.exists() and json.loads(receipt.read_text(encoding="utf-8")).get("thawed_from"):
            return []
        return [self.data_ready("base" if weight is None else f"weight_{weight}")]

    def data_ready(self, dataset: str) -> str:
        """File whose existence says that a data set is complete and valid."""
        folder = f"{self.results}/data/{dataset}"
        return f"{folder}.checked.txt" if self.dataset else f"{folder}/manifest.json"

    def data_files(self) -> list[str]:
        weights = [] if self.dataset else dict.fromkeys(f"weight_{weight}" for weight, _ in self.quality_runs)
        return [self.data_ready(name) for name in ("base", *weights)] + self.jobs("data")

    def synthesize_arguments(self, wildcards) -> str:
        """Command-line arguments of data.synthesize: section `data` as training sees it, for the sweep with
        quality.data. `wildcards`: those of a rule, or the name of a data set."""
        dataset = getattr(wildcards, "dataset", wildcards)
        values = self.config["data"] | self.config["train"].get("data", {})
        if dataset.startswith("weight_"):
            values |= self.config["quality"].get("data", {})
            values["long_range_weight"] = float(dataset.removeprefix("weight_"))
        return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in values.items())

    def train_receipts(self) -> list[str]:
        return self.jobs("train") + self.jobs("quality")

    def ablation_reports(self) -> list[str]:
        return [f"{self.results}/ablations/{name}.md" for name in self.variants]

    def ablation_files(self, wildcards) -> list[str]:
        return self.ablation_reports() if wildcards.run == self.name else []

    # Figures and tables, of this tier and of results/frozen.

    def outputs(self, run: str) -> dict[str, dict]:
        """Figures and tables whose data exist for `run` (this tier's name, or "frozen"): id -> row.

        An id needs its script, and one of its experiments measured in this tier or shipped; the source's own numbers
        are enough for those that show them.
        """
        have = shipped_experiments() | {"claims", "runs"} | (set() if run == "frozen" else set(self.experiments))
        rows = self.drawable().items()
        return {name: row for name, row in rows if "published:" in row["records"] or set(_needs(row)) & have}

    def drawable(self) -> dict[str, dict]:
        """Rows of figures.tsv whose script exists."""
        rows = self.sheets["figures"].items()
        return {name: row for name, row in rows if (ROOT / "figures" / f"{row['script']}.py").exists()}

    def inputs_of(self, row: dict):
        """Input function of one figure or table: the merged records that it reads."""

        def inputs(wildcards) -> list[str]:
            run, needs = wildcards.run, _needs(row)
            if "runs" in needs:
                needs = [*needs, *self._experiments_of(run)]
            files = [f"results/{run}/records/{name}.csv" for name in needs if name in self._experiments_of(run)]
            return list(dict.fromkeys(files)) + ([f"results/{run}/claims/claims.csv"] if "claims" in needs else [])

        return inputs

    def prefix(self, run: str, name: str) -> str:
        return f"results/{run}/{self.category(name).lower()}s/{name}"

    def category(self, name: str) -> str:
        return "Figure" if name.startswith("F") else "Table"

    def suffixes(self, name: str) -> tuple[str, ...]:
        """What an output consists of; the first is what Snakemake's own report shows."""
        return (".svg", ".pdf", ".png", ".csv") if name.startswith("F") else (".csv", ".md")

    def output_files(self, run, name: str | None = None) -> list[str]:
        """Files of one output or of all; `run` may be the wildcards of a rule."""
        run = getattr(run, "run", run)
        names = [name] if name else self.outputs(run)
        return [self.prefix(run, item) + suffix for item in names for suffix in self.suffixes(item)]

    def files(self, category: str) -> list[str]:
        names = [name for name in self.outputs(self.name) if self.category(name) == category]
        return [path for name in names for path in self.output_files(self.name, name)]

    def check_targets(self, words: Iterable[str]) -> None:
        """ValueError for a target like ablation_<id>, figure_<id> or table_<id> on the command line whose id does not
        exist.

        Snakemake's own message names no alternatives, and comes later.
        """
        known = {"ablation": self.variants}
        for kind in ("Figure", "Table"):
            known[kind.lower()] = [name for name in self.outputs(self.name) if self.category(name) == kind]
        for word in words:
            kind, found, name = word.partition("_")
            if found and kind in known and re.fullmatch(r"\w+", word) and name not in known[kind]:
                raise ValueError(f"target {word}: {name!r} is unknown; allowed: {', '.join(known[kind]) or 'none yet'}")

    def _experiments_of(self, run: str) -> list[str]:
        return self.experiments if run == self.name else sorted(shipped_experiments())

    def all_records(self, wildcards) -> list[str]:
        return [f"results/{wildcards.run}/records/{name}.csv" for name in self._experiments_of(wildcards.run)]

    def own_records(self, wildcards) -> str:
        """Records that claims are judged on before the shipped ones: none for `frozen`."""
        return f"--records {self.results}/records" if wildcards.run == self.name else ""

    def shipped_files(self) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "data" / "measured").glob("*/*.csv"))

    def frozen_files(self) -> list[str]:
        return [*self.output_files("frozen"), "results/frozen/claims/claims.csv", "results/frozen/paper/report.pdf"]

    def default_files(self) -> list[str]:
        """Everything of this tier; with a reader's data set, what depends on data: training and ablations."""
        files = [*self.data_files(), *self.train_receipts(), *self.ablation_reports()]
        if self.dataset:
            return files
        files += [f"{self.results}/records/checked.txt", *self.output_files(self.name)]
        return [*files, f"{self.results}/claims/claims.csv", f"{self.results}/paper/report.pdf"]


def load(given: dict, root: Path = ROOT) -> Settings:
    """Settings from Snakemake's config: the tier's file and at most `dataset`.

    Any other key or value is a ValueError.
    """
    tier = given.get("tier", "smoke")
    tiers = sorted(path.stem for path in (root / "config").glob("*.yaml"))
    if tier not in tiers:
        raise ValueError(f"config: tier {tier!r} is unknown; allowed: {', '.join(tiers)}")
    config = checks.read_yaml(root / "config" / f"{tier}.yaml", f"config/{tier}.yaml")
    schema = schema_of("tier", root)
    validate(config, schema, f"config/{tier}.yaml")
    if config["tier"] != tier:
        raise ValueError(f"config/{tier}.yaml: key tier: {config['tier']!r}; allowed: {tier}, the file's name")
    for key, value in given.items():
        if key not in schema["properties"] and key != "dataset":
            allowed = ", ".join(["dataset", *schema["properties"]])
            raise ValueError(f"config: key {key!r} is unknown; allowed: {allowed}")
        if key != "dataset" and value != config.get(key):
            raise ValueError(f"config: {key} differs from config/{tier}.yaml; allowed: a change in that file")
    sheets = {name: read_sheet(name, root) for name in SHEETS}
    _cross_check(config, sheets, tier, tiers)
    dataset, name = None, tier
    if "dataset" in given:
        dataset = checks.dataset(given["dataset"], config, tier)
        name = f"{tier}-{re.sub(r'[^a-z0-9]+', '-', dataset.resolve().name.lower()).strip('-') or 'dataset'}"
    else:
        checks.generated_data(config, f"config/{tier}.yaml")
    return Settings(tier, name, config, dataset, sheets)


def use_this_python() -> None:
    """Let jobs find the Python that runs Snakemake, also where its environment is not activated."""
    folder = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != folder:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def sources(kind: str) -> str:
    """Digest of the code that decides the result of a job.

    "training", "generator", "figure:<script>", or paths separated by blanks.

    Part of the rules' parameters, so that an edit of a module reruns what it decides and an edit of a comment does
    not.
    """
    if kind == "training":
        modules = sorted(path.name for path in (ROOT / "gem").glob("*.py") if path.stem not in NOT_TRAINING)
        return source_digest("kernels", *(f"gem/{name}" for name in modules))
    if kind == "generator":
        others = ("import_log", "validate", "cli")
        return source_digest(*(f"data/{p.name}" for p in (ROOT / "data").glob("*.py") if p.stem not in others))
    if kind.startswith("figure:"):
        script = kind.removeprefix("figure:")
        names = [path.name for path in (ROOT / "figures").glob("*.py")]
        shared = [name for name in names if not re.match(r"(fig|tab)_\d", name)]
        return source_digest(*(f"figures/{name}" for name in [*shared, f"{script}.py"]))
    present = [item for item in kind.split() if (ROOT / item).exists()]
    return source_digest(*present) if present else ""


def shipped_experiments() -> set[str]:
    """Experiments with frozen records under data/measured."""
    return {path.stem for path in (ROOT / "data" / "measured").glob("*/*.csv")}


def shipped_digest() -> str:
    """Digest of the frozen records, which figures, claims and report of every tier show beside their own."""
    return _bytes_digest((ROOT / "data" / "measured").glob("*/*"))


def text_digest(folder: str, suffixes: tuple[str, ...] = (".typ", ".bib", ".csv")) -> str:
    """Digest of the texts of a folder, for steps that read more than Python."""
    return _bytes_digest(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def _bytes_digest(paths: Iterable[Path]) -> str:
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:16]


def _needs(row: dict) -> list[str]:
    return [item for item in _split(row["records"]) if not item.startswith("published:")]


def _split(text: str) -> list[str]:
    return [item for item in re.split(r"[;,]", text) if item]


def _cross_check(config: dict, sheets: dict, tier: str, tiers: list[str]) -> None:
    """References between sheets: bases, variants of a tier, experiments, tiers, figures of claims."""
    variants = sheets["variants"]

    def known(value: str, allowed, where: str) -> None:
        if value not in allowed:
            raise ValueError(f"{where}: {value!r} is unknown; allowed: {', '.join(allowed)}")

    for name, row in variants.items():
        if row["base"]:
            known(row["base"], variants, f"config/variants.tsv: row {name}: column base")
    chosen = config["train"]["variants"]
    for name in chosen if chosen != "all" else ():
        known(name, variants, f"config/{tier}.yaml: key train.variants")
    for key in ("variants", "size_variants", "hopper"):
        for name in config["quality"].get(key, ()):
            known(name, variants, f"config/{tier}.yaml: key quality.{key}")
    for key in ("variants", "detailed", "layer_variants"):
        for name in config.get("step", {}).get(key, ()):
            known(name, variants, f"config/{tier}.yaml: key step.{key}")
    for sheet in ("kernels", "experiments"):
        for name, row in sheets[sheet].items():
            for item in row["tiers"].split(","):
                known(item, tiers, f"config/{sheet}.tsv: row {name}: column tiers")
    checks.variants(config, variants)
    for name, row in sheets["experiments"].items():
        checks.module(row["module"], f"config/experiments.tsv: row {name}: column module")
    for name, row in sheets["kernels"].items():
        checks.kernel_case(row, f"config/kernels.tsv: row {name}")
        known(row["experiment"], sheets["experiments"], f"config/kernels.tsv: row {name}: column experiment")
    for name, row in sheets["figures"].items():
        for claim in _split(row["claims"]):
            known(claim, sheets["claims"], f"config/figures.tsv: row {name}: column claims")
    for name, row in sheets["claims"].items():
        known(row["figure"], sheets["figures"], f"config/claims.tsv: row {name}: column figure")
