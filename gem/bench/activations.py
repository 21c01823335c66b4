"""Records of GELU's forms: error over the size of the score, and time of one elementwise call on the tier's device.

    python -m gem.bench.activations --tier smoke

Errors are against the erf form in float64, over an even grid of scores up to the case's bound, evaluated in
float32; the derivative is phase bwd. The source replaces the tanh form by a Taylor polynomial of degree six because
normalised queries and keys keep |s| <= 1.
"""

from __future__ import annotations

import sys

import torch

from gem import record, workflow
from gem.bench.timing import measure
from gem.cli import Parser
from kernels.gdpa import activations

GELUS = ("gelu", "gelu_tanh", "gelu_taylor6")
BOUNDS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
POINTS = 20_001
TIMED = ("gelu", "gelu_tanh", "gelu_taylor6", "silu", "relu")
SIZES = {"cpu": 2**20, "cuda": 2**26}  # elements of a timed call: far larger than the caches of a GPU
SOURCES = ("kernels/gdpa/activations.py", "gem/bench/activations.py")


def errors(name: str, bound: float) -> dict[str, float]:
    """phase -> largest absolute error over |s| <= bound."""
    exact, form = activations.get("gelu"), activations.get(name)
    wide = torch.linspace(-bound, bound, POINTS, dtype=torch.float64)
    narrow = wide.float()
    pairs = {"fwd": (form.value, exact.value), "bwd": (form.derivative, exact.derivative)}
    # the exact form is taken at the score that float32 really holds
    return {
        phase: float((ours(narrow).double() - right(narrow.double())).abs().max())
        for phase, (ours, right) in pairs.items()
    }


def add_errors(run: record.Run) -> None:
    for bound in BOUNDS:
        for name in GELUS:
            for phase, value in errors(name, bound).items():
                run.add(
                    case=f"abs_score_le_{bound:g}",
                    subject=name,
                    impl="float32",
                    phase=phase,
                    metric="max_err",
                    p50=value,
                )


def add_times(run: record.Run, device: str, dtype: torch.dtype, bench: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(SIZES[device], generator=generator) * 2 - 1).to(device, dtype)
    for name in TIMED:
        form = activations.get(name)
        calls = {"fwd": form.value, "bwd": form.derivative}
        for phase, call in calls.items():
            timing = measure(
                lambda call=call: call(scores),
                device=device,
                warmup_ms=bench["warmup_ms"],
                repeat_ms=bench["repeat_ms"],
            )
            spread = {"p50": timing.p50, "p20": timing.p20, "p80": timing.p80, "n": timing.n}
            note = f"{scores.numel()} elements, {dtype}".replace("torch.", "")
            run.add(
                case="elementwise",
                subject=name,
                impl="eager",
                phase=phase,
                metric="time_ms",
                seed=0,
                note=note,
                **spread,
            )


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.activations", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        config = {"bounds": BOUNDS, "points": POINTS, "bench": settings.config["bench"]}
        with record.Run(args.run or settings.name, "activations", config=config, sources=SOURCES) as run:
            add_errors(run)
            device, dtype = settings.config["device"], getattr(torch, settings.config["dtype"])
            add_times(run, device, dtype, settings.config["bench"])
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
