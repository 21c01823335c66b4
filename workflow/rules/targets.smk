# What can be asked for by name: `snakemake --cores all TARGET`, and `--list-target-rules`.
localrules:
    data,
    train,
    bench,
    records,
    ablations,
    figures,
    tables,
    claims,
    paper,
    frozen,
    archive,


rule data:
    input:
        RUN.data_files(),


rule train:
    input:
        RUN.train_receipts(),


rule bench:
    input:
        [f"{R}/records/jobs/{name}.json" for name in RUN.benches],


rule records:
    input:
        f"{R}/records/checked.txt",


rule ablations:
    input:
        RUN.ablation_reports(),


rule figures:
    input:
        RUN.files("Figure"),


rule tables:
    input:
        RUN.files("Table"),


rule claims:
    input:
        f"{R}/claims/claims.csv",


rule paper:
    input:
        f"{R}/paper/report.pdf",


rule frozen:
    input:
        RUN.frozen_files(),


rule archive:
    input:
        "results/frozen/archive.tar",
