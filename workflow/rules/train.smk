# Training: one process a variant, its seeds inside, so that imports are paid once.
rule train_variant:
    input:
        RUN.training_data,
    output:
        ensure(f"{R}/records/jobs/train-{{variant}}.json", non_empty=True),
    log:
        f"{R}/logs/train/{{variant}}.log",
    benchmark:
        f"{R}/logs/train/{{variant}}.benchmark.jsonl"
    priority: RUN.slow_first
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=RUN.gpus,
        mem_mb=2500,
        runtime=30,
    params:
        tier=RUN.tier,
        run=RUN.name,
        row=RUN.variant_row,
        folder=RUN.data_of_wildcards,
        config=RUN.sections(
            "device", "dtype", "preset", "implementations", "data", "train", "dataset"
        ),
        sources=plan.sources("training"),
    message:
        "Training {wildcards.variant}"
    shell:
        "python -m gem.job {output} -- python -m gem.train --tier {params.tier} --variant {wildcards.variant}"
        " --data {params.folder:q} --run {params.run}"
        " 2>&1 | tee {log}"


rule train_quality:
    input:
        RUN.training_data,
    output:
        ensure(f"{R}/records/jobs/quality-{{weight}}-{{variant}}.json", non_empty=True),
    log:
        f"{R}/logs/quality/{{weight}}-{{variant}}.log",
    benchmark:
        f"{R}/logs/quality/{{weight}}-{{variant}}.benchmark.jsonl"
    priority: 30  # longer histories than the data of most variants
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=RUN.gpus,
        mem_mb=2500,
        runtime=30,
    params:
        tier=RUN.tier,
        run=RUN.name,
        row=RUN.variant_row,
        folder=RUN.data_of_wildcards,
        config=RUN.sections(
            "device", "dtype", "preset", "implementations", "data", "train", "quality"
        ),
        sources=plan.sources("training"),
    message:
        "Training {wildcards.variant} on labels with long-range weight {wildcards.weight}"
    shell:
        "python -m gem.job {output} -- python -m gem.train --tier {params.tier} --variant {wildcards.variant}"
        " --data {params.folder:q} --run {params.run} --experiment quality --case long_range_{wildcards.weight}"
        " 2>&1 | tee {log}"


rule train_study:
    input:
        RUN.training_data,
    output:
        ensure(f"{R}/records/jobs/quality-{{study}}-{{variant}}.json", non_empty=True),
    log:
        f"{R}/logs/quality/{{study}}-{{variant}}.log",
    benchmark:
        f"{R}/logs/quality/{{study}}-{{variant}}.benchmark.jsonl"
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gpu=RUN.gpus,
        mem_mb=2500,
        runtime=30,
    params:
        tier=RUN.tier,
        run=RUN.name,
        row=RUN.variant_row,
        folder=RUN.data_of_wildcards,
        config=RUN.sections(
            "device", "dtype", "preset", "implementations", "data", "train"
        ),
        arguments=RUN.study_of_wildcards,
        sources=plan.sources("training"),
    message:
        "Training {wildcards.variant} for study {wildcards.study}"
    shell:
        "python -m gem.job {output} -- python -m gem.train --tier {params.tier} --variant {wildcards.variant}"
        " --data {params.folder:q} --run {params.run} {params.arguments}"
        " 2>&1 | tee {log}"
