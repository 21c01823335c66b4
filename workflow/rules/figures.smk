# One rule a row of figures.tsv whose data exist, for this tier and for results/frozen (shipped records alone).
# A figure reads files and nothing else, so a colour never retrains.
for name, row in RUN.drawable().items():

    rule:
        name:
            f"draw_{name}"
        input:
            RUN.inputs_of(row),
        output:
            report(
                RUN.output_files("{run}", name)[0],
                caption="../report/output.rst",
                category=RUN.category(name),
                labels={"id": name, "title": row["title"]},
            ),
            RUN.output_files("{run}", name)[1:],
        log:
            f"results/{{run}}/logs/figures/{name}.log",
        benchmark:
            f"results/{{run}}/logs/figures/{name}.benchmark.jsonl"
        conda:
            "../../envs/environment.yaml"
        threads: 1
        resources:
            gpu=0,
            mem_mb=1500,
            runtime=5,
        params:
            row=row,
            prefix=RUN.prefix("{run}", name),
            sources=plan.sources(f"figure:{row['script']}"),
            shipped=plan.shipped_digest(),
        message:
            f"Drawing {name}: {row['title']}"
        shell:
            "python -m figures.{params.row[script]} --records results/{wildcards.run}/records --measured data/measured"
            " --published data/published --output {params.prefix} > {log} 2>&1"


for name in RUN.outputs(RUN.name):

    rule:
        name:
            f"{RUN.category(name).lower()}_{name}"
        input:
            RUN.output_files(RUN.name, name),
        localrule: True
