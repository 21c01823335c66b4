# Config rows -> data -> training and benchmark records -> figures and tables -> claims -> report.
# `snakemake --cores all` runs tier smoke; `--workflow-profile profiles/gpu` the GPU tier; config/README.md has the knobs.
import sys

from snakemake.utils import min_version

min_version("9.0")
sys.path.insert(0, str(workflow.basedir))

from gem import workflow as plan

try:
    RUN = plan.load(config)
    RUN.check_targets(sys.argv[1:])
except ValueError as error:
    sys.exit(f"error: {error}")

plan.use_this_python()
R = RUN.results


wildcard_constraints:
    variant="|".join(RUN.sheets["variants"]),
    weight=r"[0-9.]+",
    study=r"hopper|size_[a-z_]+",
    experiment="|".join(RUN.experiments),
    run=f"{RUN.name}|frozen",


report: "workflow/report/workflow.rst"


include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/bench.smk"
include: "workflow/rules/records.smk"
include: "workflow/rules/ablations.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/paper.smk"
include: "workflow/rules/targets.smk"


rule all:
    default_target: True
    input:
        RUN.default_files(),
    localrule: True
