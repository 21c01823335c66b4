# Verdicts by rule, then the report; for this tier and for results/frozen.
rule judge_claims:
    input:
        RUN.all_records,
    output:
        report(
            "results/{run}/claims/claims.csv",
            caption="../report/claims.rst",
            category="Claims",
            labels={"id": "claims", "title": "Claims and verdicts"},
        ),
    log:
        "results/{run}/logs/claims.log",
    benchmark:
        "results/{run}/logs/claims.benchmark.jsonl"
    # a short job that others wait for
    priority: 60
    localrule: True
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=1000,
        runtime=5,
    params:
        rules=RUN.sheets["claims"],
        own=RUN.own_records,
        sources=plan.sources("gem/claims.py gem/expected.py"),
        shipped=plan.shipped_digest(),
    message:
        "Judging the claims of the source from the records of {wildcards.run}"
    shell:
        "python -m gem.claims {params.own} --measured data/measured"
        " --output {output} > {log} 2>&1"


# The shipped records, the claims and the report made of them, and their checksums: the same bytes everywhere.
rule pack:
    input:
        RUN.shipped_files(),
        "results/frozen/claims/claims.csv",
        "results/frozen/paper/report.pdf",
    output:
        "results/frozen/archive.tar",
    log:
        "results/frozen/logs/archive.log",
    benchmark:
        "results/frozen/logs/archive.benchmark.jsonl"
    localrule: True
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=1000,
        runtime=5,
    params:
        sources=plan.sources("gem/archive.py"),
        shipped=plan.shipped_digest(),
    message:
        "Packing the shipped records with their report"
    shell:
        "(python -m gem.archive --output {output} && python -m gem.archive --check {output} --against .) > {log} 2>&1"


rule typeset:
    input:
        RUN.all_records,
        RUN.output_files,
        RUN.ablation_files,
        "results/{run}/claims/claims.csv",
    output:
        pdf=ensure("results/{run}/paper/report.pdf", non_empty=True),
        values="results/{run}/paper/values.json",
    log:
        "results/{run}/logs/paper.log",
    benchmark:
        "results/{run}/logs/paper.benchmark.jsonl"
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=2000,
        runtime=10,
    params:
        sources=plan.sources("paper"),
        text=plan.text_digest("paper"),
        shipped=plan.shipped_digest(),
    message:
        "Typesetting the report of {wildcards.run}"
    shell:
        "(python -m paper.values --tier {wildcards.run} --output {output.values}"
        " && python -m paper.build --tier {wildcards.run} --output {output.pdf}) > {log} 2>&1"
