"""T09: environments that the records come from."""

import sys

import pandas as pd

from figures import cli
from figures.load import NoDataError

ID = "T09"
CAPTION = (
    "Machines and software behind the records: every distinct combination, with the number of runs and the "
    "experiments that came from it. commits: how many commits the runs name; dirty: runs whose working tree had "
    "changes that the commit does not name. Every run's own commit and digest of sources stand in runs.json."
)
SOFTWARE = ("python", "torch", "cuda", "triton", "torchrec", "numpy")


def build(source):
    if not source.runs:
        raise NoDataError(f"no runs.json in {source.records} or {source.measured}")
    rows = []
    for info in source.runs.values():
        device, software = info.get("device", {}), info.get("software", {})
        row = {"device": device.get("name", "unknown"), "count": device.get("count", 1)}
        row |= {"driver": device.get("driver") or "", "power limit, W": str(device.get("power_limit_w") or "")}
        row |= {"host": device.get("host_cpu") or ""}
        row |= {name: str(software.get(name) or "") for name in SOFTWARE}
        code = {"commit": str(info.get("commit") or "")[:10], "dirty": bool(info.get("dirty"))}
        rows.append(row | code | {"experiment": info.get("experiment", "")})
    frame = pd.DataFrame(rows)
    key = [name for name in frame.columns if name not in ("experiment", "commit", "dirty")]
    return (
        frame.groupby(key, sort=True)
        .agg(
            runs=("experiment", "size"),
            commits=("commit", "nunique"),
            dirty=("dirty", "sum"),
            experiments=("experiment", lambda names: ", ".join(sorted(set(names)))),
        )
        .reset_index()
    )


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
