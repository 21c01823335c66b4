# Measuring jobs, one rule a row of experiments.tsv. Timings claim the machine: beside other work
# they would be noise. Models (gpus 0) do not.
for name, row in RUN.benches.items():

    rule:
        name:
            f"bench_{name}"
        output:
            ensure(f"{R}/records/jobs/{name}.json", non_empty=True),
        log:
            f"{R}/logs/bench/{name}.log",
        benchmark:
            f"{R}/logs/bench/{name}.benchmark.jsonl"
        # What takes every core goes first, before any two others: later it would wait until all cores are idle.
        priority: 200 if row["gpus"] != "0" else 50
        conda:
            "../../envs/environment.yaml"
        threads: workflow.cores if row["gpus"] != "0" else 1
        resources:
            gpu=RUN.gpus_of(row),
            mem_mb=6000,
            runtime=int(row["minutes"]),
        params:
            tier=RUN.tier,
            run=RUN.name,
            row=row,
            cases=RUN.kernel_cases(name),
            config=RUN.bench_sections(row),
            sources=plan.sources(row["sources"]),
        message:
            f"Measuring {name}: {row['purpose']}"
        shell:
            "python -m gem.job {output} -- python -m {params.row[module]} --tier {params.tier} --run {params.run} {params.row[arguments]}"
            " 2>&1 | tee {log}"
