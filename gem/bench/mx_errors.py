"""Records of the error of MX recipes on each matrix product: python -m gem.bench.mx_errors --tier smoke

A linear layer (y, dx, dW) and jagged attention (o, dq, dk, dv) run under every recipe with MX numerics emulated
exactly in float32, against float64. Tensors are drawn as training shows them: activations with a few outlier
channels, heavy-tailed gradients; an even distribution would hide what the recipes are for. Whether a recipe keeps
quality is another question, of NE over seeds.
"""

from __future__ import annotations

import sys

import torch

from gem import record, workflow
from gem.cli import Parser
from kernels.jagged import lengths_to_offsets
from kernels.mxfp8 import RECIPES, Recipe, jagged_attention_mx, linear
from kernels.testing import relative_error, snr_db

SOURCES = ("kernels/mxfp8", "gem/bench/mx_errors.py")
TOKENS, FEATURES_IN, FEATURES_OUT, SEED = 512, 256, 256, 0
LENGTHS, HEADS, HEAD_DIM = (96, 33, 64, 7), 2, 64
OUTLIER_CHANNELS, OUTLIER_FACTOR = 4, 30.0
LINEAR_NOTE = "skip_last acts on layers, not on one product"


def tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """float64: x [TOKENS, in] with outlier channels, w [out, in], dy [TOKENS, out] log-normal in size; attention's
    q, k, v, do [T, H, D], the keys with an outlier channel.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, w = normal(TOKENS, FEATURES_IN), normal(FEATURES_OUT, FEATURES_IN) / FEATURES_IN**0.5
    x[:, torch.randperm(FEATURES_IN, generator=generator)[:OUTLIER_CHANNELS]] *= OUTLIER_FACTOR
    total = sum(LENGTHS)
    q, k, v = (normal(total, HEADS, HEAD_DIM) for _ in range(3))
    k[..., 3] *= 4
    heavy = {"dy": normal(TOKENS, FEATURES_OUT), "do": normal(total, HEADS, HEAD_DIM)}
    sizes = {name: (1.5 * normal(value.shape[0])).exp() for name, value in heavy.items()}
    heavy = {name: value * sizes[name].view(-1, *[1] * (value.dim() - 1)) for name, value in heavy.items()}
    return {"x": x, "w": w, "q": q, "k": k, "v": v, **heavy}


def exact(drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every product in float64."""
    x, w, dy = (drawn[name] for name in ("x", "w", "dy"))
    values = {"linear_y": x @ w.T, "linear_dx": dy @ w, "linear_dw": dy.T @ x}
    q, k, v = (drawn[name].clone().requires_grad_() for name in ("q", "k", "v"))
    outputs, start = [], 0
    for length in LENGTHS:
        part = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[part], k[part]) * HEAD_DIM**-0.5
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[part]))
        start += length
    output = torch.cat(outputs)
    grads = torch.autograd.grad(output, (q, k, v), drawn["do"])
    return values | dict(
        zip(("attention_o", "attention_dq", "attention_dk", "attention_dv"), (output.detach(), *grads), strict=True)
    )


def with_recipe(drawn: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """The same products under a recipe, float32."""
    x, w = (drawn[name].float().requires_grad_() for name in ("x", "w"))
    y = linear(x, w, recipe=recipe)
    dx, dw = torch.autograd.grad(y, (x, w), drawn["dy"].float())
    q, k, v = (drawn[name].float().requires_grad_() for name in ("q", "k", "v"))
    offsets = lengths_to_offsets(torch.tensor(LENGTHS))
    o = jagged_attention_mx(q, k, v, offsets, offsets, recipe=recipe)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), drawn["do"].float())
    names = ("linear_y", "linear_dx", "linear_dw", "attention_o", "attention_dq", "attention_dk", "attention_dv")
    return dict(zip(names, (y.detach(), dx, dw, o.detach(), dq, dk, dv), strict=True))


def add_records(run: record.Run) -> None:
    """A case a product; subject linear or attention; impl the recipe."""
    drawn = tensors(torch.Generator().manual_seed(SEED))
    right = exact(drawn)
    for name, recipe in RECIPES.items():
        torch.manual_seed(SEED)  # of stochastic rounding
        for case, value in with_recipe(drawn, recipe).items():
            subject = case.partition("_")[0]
            phase = "fwd" if case in ("linear_y", "attention_o") else "bwd"
            base = {"case": case, "subject": subject, "impl": name, "phase": phase, "scope": "emulated", "seed": SEED}
            run.add(**base, metric="rel_err", p50=relative_error(value, right[case]))
            run.add(
                **base, metric="snr_db", p50=snr_db(value, right[case]), note=LINEAR_NOTE if recipe.skip_last else ""
            )


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.mx_errors", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        config = {"tokens": TOKENS, "features": [FEATURES_IN, FEATURES_OUT], "lengths": LENGTHS, "head_dim": HEAD_DIM}
        config |= {"outlier_channels": OUTLIER_CHANNELS, "outlier_factor": OUTLIER_FACTOR}
        with record.Run(args.run or settings.name, "mx", config=config, sources=SOURCES) as run:
            add_records(run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
