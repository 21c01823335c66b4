"""F10: GELU approximations, error and time."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import best_device_first, need, select

ID = "F10"
CAPTION = (
    "Left: largest error against the erf form of GELU in float64 over scores up to the value on the x axis, "
    "evaluated in float32; the shaded range is where normalised queries and keys keep the scores. Right: time of "
    "one elementwise call over the time of the tanh form, forward and with its derivative, by device; on its own "
    "the Taylor form is several passes over memory where the others are one, so this is no measure of the saving "
    "inside a fused kernel, which stands in F07."
)
PHASES = {"fwd": "value", "bwd": "derivative"}


def draw(source):
    frame = source.frame("activations")
    errors = select(frame, metric="max_err", phase="fwd").drop_duplicates(["case", "subject"])
    errors = errors.assign(panel="error", x=pd.to_numeric(errors.case.str.extract(r"^abs_score_le_([0-9.]+)$")[0]))
    errors = need(errors[errors.x.notna()], "activations (max_err)")
    errors = errors.assign(value=errors.p50, low=float("nan"), high=float("nan"))
    times = select(frame, metric="time_ms")
    base = times[times.subject == "gelu_tanh"][["device", "case", "phase", "p50"]].rename(columns={"p50": "tanh"})
    times = times.merge(base, on=["device", "case", "phase"]).assign(panel="time", x=float("nan"))
    times = times.assign(value=times.p50 / times.tanh, low=times.p20 / times.tanh, high=times.p80 / times.tanh)
    devices = best_device_first(times.device)
    figure, axes = style.panels(
        1, 1 + max(1, len(devices)), height=2.7, width_ratios=[1.4] + [1] * max(1, len(devices))
    )
    left = axes[0, 0]
    left.axvspan(0.0, 1.0, color="#f0f0f0")
    for name in ("gelu_tanh", "gelu_taylor6"):
        part = errors[(errors.subject == name) & (errors.value > 0)]
        if len(part):
            style.line(left, part, "x", "value", "activation", name)
    left.set(yscale="log", xlabel="largest |score|", ylabel="largest error against GELU (erf)", title="Error")
    left.set_xlim(left=0)
    if not devices:
        axes[0, 1].remove()
    for axis, device in zip(axes[0, 1:], devices, strict=False):
        part = times[times.device == device]
        names = [name for name in style.FAMILIES["activation"] if name in set(part.subject)]
        for index, phase in enumerate(PHASES):
            for row in part[part.phase == phase].itertuples():
                at = names.index(row.subject) + (index - 0.5) * 0.4
                style.bar(
                    axis, at, row.value, "activation", row.subject, width=0.38, label=False, low=row.low, high=row.high
                )
        axis.axhline(1, color=style.INK, linewidth=0.8)
        axis.set_xticks(range(len(names)), [name.replace("gelu_", "") for name in names], rotation=45)
        axis.set(ylabel="time / time of tanh", title=f"{source.device_label(device)}: value | derivative")
    style.legend(figure, [left])
    columns = ["panel", "device", "case", "subject", "phase", "x", "value", "low", "high"]
    return figure, pd.concat([errors[columns], times[columns]], ignore_index=True)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
