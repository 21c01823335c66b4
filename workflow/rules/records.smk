# Parts -> one file an experiment, and runs.json; then every row is checked to have its run.
rule merge_records:
    input:
        RUN.receipts,
    output:
        ensure(f"{R}/records/{{experiment}}.csv", non_empty=True),
    log:
        f"{R}/logs/merge/{{experiment}}.log",
    benchmark:
        f"{R}/logs/merge/{{experiment}}.benchmark.jsonl"
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
        run=RUN.name,
        ids=RUN.sheet_ids("variants", "kernels"),
        sources=plan.sources("gem/record.py gem/record_store.py"),
    message:
        "Merging the records of {wildcards.experiment}"
    shell:
        "python -m gem.record merge --tier {params.run} --experiments {wildcards.experiment} > {log} 2>&1"


rule check_records:
    input:
        RUN.all_records,
    output:
        ensure("results/{run}/records/checked.txt", non_empty=True),
    log:
        "results/{run}/logs/check_records.log",
    benchmark:
        "results/{run}/logs/check_records.benchmark.jsonl"
    localrule: True
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=1000,
        runtime=5,
    params:
        sources=plan.sources("gem/record.py gem/record_store.py"),
    message:
        "Checking that every number of {wildcards.run} has a run"
    shell:
        "python -m gem.record check results/{wildcards.run}/records 2> {log} > {output}"


rule collect_frozen:
    input:
        RUN.shipped_files(),
    output:
        ensure(
            expand(
                "results/frozen/records/{experiment}.csv",
                experiment=plan.shipped_experiments(),
            ),
            non_empty=True,
        ),
        "results/frozen/records/runs.json",
    log:
        "results/frozen/logs/collect.log",
    benchmark:
        "results/frozen/logs/collect.benchmark.jsonl"
    localrule: True
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=1000,
        runtime=5,
    message:
        "Collecting the shipped records of all devices"
    shell:
        "python -m gem.record collect --output results/frozen/records > {log} 2>&1"
