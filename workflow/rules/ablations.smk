# One delta report a variant: it against its base. `snakemake ablation_<id>` trains these two and nothing else.
rule ablation:
    input:
        RUN.ablation_receipts,
    output:
        report(
            f"{R}/ablations/{{variant}}.md",
            caption="../report/ablation.rst",
            category="Ablations",
            labels={"variant": "{variant}"},
        ),
    log:
        f"{R}/logs/ablations/{{variant}}.log",
    benchmark:
        f"{R}/logs/ablations/{{variant}}.benchmark.jsonl"
    localrule: True
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=1000,
        runtime=5,
    params:
        run=RUN.name,
        base=RUN.base_of_row,
        sources=plan.sources("gem/ablation.py"),
    message:
        "Comparing {wildcards.variant} with its base"
    shell:
        "python -m gem.ablation --run {params.run} --variant {wildcards.variant} --base {params.base}"
        " --output {output} > {log} 2>&1"


for name in RUN.variants:

    rule:
        name:
            f"ablation_{name}"
        input:
            f"{R}/ablations/{name}.md",
        localrule: True
