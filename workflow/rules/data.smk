# Data sets: the tier's own and the sweep over the label law, or one that the reader brings (--config dataset=PATH).
if RUN.dataset:

    rule check_dataset:
        input:
            f"{RUN.dataset}/manifest.json",
        output:
            ensure(RUN.data_ready("base"), non_empty=True),
        log:
            f"{R}/logs/check_dataset.log",
        benchmark:
            f"{R}/logs/check_dataset.benchmark.jsonl"
        conda:
            "../../envs/environment.yaml"
        threads: 1
        resources:
            gpu=0,
            mem_mb=2000,
            runtime=10,
        params:
            folder=RUN.data_folder("base"),
        message:
            "Checking every shard of {params.folder}"
        shell:
            "python -m data.validate {params.folder:q} 2>&1 | tee {log} {output}"

else:

    rule synthesize:
        output:
            ensure(RUN.data_ready("{dataset}"), non_empty=True),
        log:
            f"{R}/logs/synthesize/{{dataset}}.log",
        benchmark:
            f"{R}/logs/synthesize/{{dataset}}.benchmark.jsonl"
        wildcard_constraints:
            dataset=r"base|weight_[0-9.]+",
        conda:
            "../../envs/environment.yaml"
        threads: 1
        resources:
            gpu=0,
            mem_mb=3000,
            runtime=20,
        params:
            arguments=RUN.synthesize_arguments,
            folder=subpath(output[0], parent=True),
            sources=plan.sources("generator"),
        message:
            "Making jagged data: {wildcards.dataset}"
        shell:
            "python -m data.synthesize --output {params.folder} {params.arguments} 2>&1 | tee {log}"
            " && python -m data.validate {params.folder} 2>&1 | tee -a {log}"


rule data_records:
    input:
        RUN.data_ready("base"),
    output:
        ensure(f"{R}/records/jobs/data.json", non_empty=True),
    log:
        f"{R}/logs/data_records.log",
    benchmark:
        f"{R}/logs/data_records.benchmark.jsonl"
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=2000,
        runtime=10,
    params:
        run=RUN.name,
        folder=RUN.data_of_wildcards,
        sources=plan.sources("gem/bench/data.py"),
    message:
        "Recording what the data are"
    shell:
        "python -m gem.job {output} -- python -m gem.bench.data --data {params.folder:q} --run {params.run}"
        " 2>&1 | tee {log}"
