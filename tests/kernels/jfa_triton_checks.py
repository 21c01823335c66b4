"""Checks of the Triton implementations of jagged attention, each raising AssertionError.

And a runner for the interpreter.

`python -m tests.kernels.jfa_triton_checks NAME...` prints one JSON line a check. The interpreter must be chosen by
the environment (TRITON_INTERPRET=1) before the first kernel is defined, so the tests run it as a process of its own.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from types import SimpleNamespace

import torch

from kernels import Bias
from kernels.jfa import v2_tuned, v3_subtraction
from kernels.jfa.triton_schemes import SCHEMES, unsupported
from kernels.testing import Inputs, assert_within_eager, make_inputs, poisoned
from kernels.triton_common import max_tiles, tile_list

from . import jfa_checks as laws
from . import triton_interpreted

OP = "jagged_attention"


def patterns(impl: str, device="cpu", dtype=torch.float32, head_dim=16, names=tuple(laws.PATTERNS), **keywords) -> None:
    """Outputs and all gradients on every length pattern, with rows past the end."""
    for name in names:
        pattern = laws.PATTERNS[name]
        inputs = make_inputs(OP, pattern.q, pattern.kv, device=device, dtype=dtype, head_dim=head_dim, spare_rows=2)
        laws.against_reference(impl, inputs, **keywords)


def shared_queries(impl: str, device="cpu", dtype=torch.float32) -> None:
    for rows, lengths in ((1, (5, 0, 70)), (9, (0, 33, 65, 1)), (40, (64,))):
        laws.against_reference(impl, make_inputs(OP, lengths, shared_q=rows, device=device, dtype=dtype))


def windows(
    impl: str, device="cpu", dtype=torch.float32, sizes=(0, 1, 7, 40, 63, 64, 500), lengths=(100, 0, 5, 65)
) -> None:
    for window in sizes:
        laws.against_reference(impl, make_inputs(OP, lengths, device=device, dtype=dtype), window=window)


def _scheme_arguments(inputs: Inputs, **keywords):
    kv_offsets = inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets
    scale = inputs.q.shape[-1] ** -0.5
    settings = {"scale": scale, "window": None, "bias": None} | keywords
    o, lse = v2_tuned.forward(inputs.q, inputs.k, inputs.v, inputs.q_offsets, kv_offsets, **settings)
    settings.pop("tma", None)
    return (inputs.do, inputs.q, inputs.k, inputs.v, o, lse, inputs.q_offsets, kv_offsets), settings


def scheme(name: str, device="cpu", dtype=torch.float32, head_dim=16, **keywords) -> None:
    """Gradients of one backward scheme: self, cross, shared queries, and a window where the scheme has one."""
    cases = [((0, 1, 33, 64), None, None), ((5, 0, 34, 3), (40, 3, 0, 33), None), ((33, 0, 40), None, 9)]
    options = [{}] if unsupported(name, window=True, bias=False) else [{}, {"window": 20}]
    for (q_lengths, kv_lengths, shared), option in itertools.product(cases, options):
        if option and (kv_lengths or shared):
            continue
        inputs = make_inputs(
            OP, q_lengths, kv_lengths, shared_q=shared, spare_rows=2, device=device, dtype=dtype, head_dim=head_dim
        )
        wide = inputs.leaves(torch.float64)
        exact = laws.run(Inputs(wide.q, wide.k, wide.v, *inputs.args[3:], wide.do), "reference", **option)
        own = laws.run(inputs, "reference", **option)
        with poisoned():
            arguments, settings = _scheme_arguments(inputs, **option)
            gradients = v2_tuned.backward(*arguments, **settings, scheme=name)
        for what, value in zip(("dq", "dk", "dv"), gradients, strict=False):
            assert_within_eager(value, own[what], exact[what], name=f"{name} {what}", roundings=8.0)


def descriptors(device="cpu", dtype=torch.float32, head_dim=16, tma=True) -> None:
    """v2 with rows read by descriptors (or not): self (with and without a window), cross, shared queries; all schemes
    that know the difference."""
    schemes = [("split", "atomics"), ("atomic", "atomics")]
    if tma and device != "cpu":  # the interpreter has no adding copies
        schemes.append(("atomic", "reduce"))
    for q_lengths, kv_lengths, shared, window in (
        ((0, 1, 33, 64, 130), None, None, None), ((5, 0, 100), None, None, 20),
        ((5, 0, 34, 3), (40, 3, 0, 33), None, None), ((33, 0, 40), None, 9, None),
    ):  # fmt: skip
        inputs = make_inputs(
            OP, q_lengths, kv_lengths, shared_q=shared, spare_rows=2, device=device, dtype=dtype, head_dim=head_dim
        )
        wide, option = inputs.leaves(torch.float64), {"window": window}
        exact = laws.run(Inputs(wide.q, wide.k, wide.v, *inputs.args[3:], wide.do), "reference", **option)
        own = laws.run(inputs, "reference", **option)
        with poisoned():
            arguments, settings = _scheme_arguments(inputs, window=window, tma=tma)
            found = {s: v2_tuned.backward(*arguments, **settings, tma=tma, scheme=s[0], add=s[1]) for s in schemes}
        assert_within_eager(arguments[4], own["o"], exact["o"], name="o", roundings=4.0)
        for name, gradients in found.items():
            for what, value in zip(("dq", "dk", "dv"), gradients, strict=False):
                assert_within_eager(value, own[what], exact[what], name=f"{*name, what}", roundings=8.0)


def bias_by_scheme(device="cpu", dtype=torch.float32) -> None:
    """Split and recompute agree on the gradient of the table; the other schemes refuse it."""
    bias = Bias(torch.randn(2, 6, device=device))
    arguments, settings = _scheme_arguments(make_inputs(OP, (34, 0, 5), device=device, dtype=dtype), bias=bias)
    tables = [v2_tuned.backward(*arguments, **settings, scheme=s)[3] for s in ("split", "recompute")]
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-4, atol=1e-4)
    for name in SCHEMES:
        if unsupported(name, window=False, bias=True):
            try:
                v2_tuned.backward(*arguments, **settings, scheme=name)
            except ValueError as error:
                assert "no gradient of the bias table" in str(error)
            else:
                raise AssertionError(f"{name}: took a bias without a gradient for it")


def subtraction_domain(device="cpu", dtype=torch.float32, tma=None) -> None:
    """Lengths 1, 65, 129 with all scores at -12, -30, -80: where subtraction would leave nothing but rounding."""
    for level, length in itertools.product((-12.0, -30.0, -80.0), (1, 65, 129)):
        q = torch.ones(length, 1, 16, dtype=dtype, device=device)
        k = torch.full_like(q, level / 16)
        v = torch.randn(length, 1, 16, device=device).to(dtype)
        inputs = Inputs(q, k, v, laws.offsets(length, device=device), None, v)
        with poisoned():
            o, lse = v3_subtraction.masked_forward(q, k, v, inputs.q_offsets, inputs.q_offsets, scale=1.0, tma=tma)
        exact = v.double().mean(0, keepdim=True).expand_as(v)
        assert_within_eager(o, exact.to(dtype), exact, name=f"o at {level}, {length}", roundings=4.0)
        expected = level + torch.tensor(float(length), dtype=torch.float64).log()
        assert (lse.double().cpu() - expected).abs().max() < 1e-4, f"lse at {level}, {length}"
        # The backward's p = exp(score - lse) carries the rounding of an lse of this size.
        if length == 65:
            laws.against_reference("v3", inputs, scale=1.0, roundings=8.0 - 2 * level, draws=2.0)


def maskings(device="cpu", dtype=torch.float32, block=32) -> None:
    """All three ways of masking give the same answer on whole tiles; "none" must be wrong on ragged ones."""
    for tma in (False, True):
        inputs = make_inputs(OP, (5, 0, 70, 3), (block, 3 * block, 0, 2 * block), device=device, dtype=dtype)
        arguments = inputs.args
        wanted, _ = v2_tuned.forward(*arguments, scale=0.25, window=None, bias=None)
        for masking in v3_subtraction.MASKINGS:
            with poisoned():
                o, _ = v3_subtraction.masked_forward(*arguments, scale=0.25, masking=masking, tma=tma)
            torch.testing.assert_close(
                o, wanted, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-2 * (dtype != torch.float32) + 1e-6
            )
        ragged = make_inputs(OP, (block + 1,), device=device, dtype=dtype)
        o, _ = v3_subtraction.masked_forward(*ragged.args[:4], ragged.q_offsets, scale=0.25, masking="none", tma=tma)
        right, _ = v2_tuned.forward(*ragged.args[:4], ragged.q_offsets, scale=0.25, window=None, bias=None)
        assert not torch.allclose(o, right, atol=1e-2)


def tiles(device="cpu") -> None:
    """The device-made tile list holds every tile of every sequence once, and of the rest, within its bound."""
    generator = torch.Generator().manual_seed(0)
    for batch, block in itertools.product((0, 1, 5, 127, 128, 300), (16, 64)):
        lengths = torch.randint(0, 200, (batch,), generator=generator) * torch.randint(
            0, 2, (batch,), generator=generator
        )
        rest = int(torch.randint(0, 70, (1,), generator=generator))
        total = int(lengths.sum()) + rest
        offsets = laws.offsets(*lengths.tolist(), device=device)
        listed, count, bound = tile_list(offsets, total, block)
        expected = [(b, t) for b, n in enumerate([*lengths.tolist(), rest]) for t in range(-(-n // block))]
        assert [tuple(x) for x in listed[: int(count)].tolist()] == expected
        assert len(expected) <= bound == max_tiles(total, batch, block)


def long_products() -> None:
    """O11: a row's address needs 64 bits. The tensor has two rows, 2^31 elements apart."""
    q = torch.zeros(1, device="meta").as_strided((2, 1, 16), (2**31, 16, 1))
    assert q.stride(0) * 1 == 2147483648 and v3_subtraction.describable(q) is False


def refusals() -> None:
    """What an implementation lacks is said before it runs."""
    case = SimpleNamespace(
        device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, head_dim=64, features=frozenset({"window"})
    )
    assert "no window" in v3_subtraction.IMPLEMENTATION.unsupported(case)
    assert v2_tuned.IMPLEMENTATION.unsupported(case) is None
    case.head_dim = 20
    assert "head_dim" in v2_tuned.IMPLEMENTATION.unsupported(case)
    case.head_dim, case.capability = 64, (7, 5)
    assert "compute capability" in v2_tuned.IMPLEMENTATION.unsupported(case)
    arguments, settings = _scheme_arguments(make_inputs(OP, (3,)))
    for change, message in (
        ({"scheme": "fast"}, "unknown scheme"),
        ({"scale": -1.0}, "scale >= 0"),
        ({"scheme": "owner", "window": 1}, "no window"),
    ):
        try:
            v2_tuned.backward(*arguments, **(settings | change))
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{change} was accepted")


def neighbours(impl: str, device="cpu", dtype=torch.float32, firsts=(1, 33, 64), head_dim=16, **keywords) -> None:
    """O10: NaN, then huge values, in the middle sequence change no bit of the others."""
    for first in firsts:
        inputs = make_inputs(OP, (first, 7, 30), head_dim=head_dim, dtype=dtype, device=device)
        outside = [*range(first), *range(first + 7, first + 37)]
        plain = laws.run(inputs, impl, **keywords)
        for value in (float("nan"), 1e30 if dtype != torch.float16 else 6e4):
            spoiled = inputs.leaves()
            for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.do):
                x.detach()[first : first + 7] = value
            got = laws.run(spoiled, impl, **keywords)
            for name in ("o", "dq", "dk", "dv"):
                assert torch.equal(got[name][outside], plain[name][outside]), f"length {first}, {value}: {name}"


def company(impl: str) -> None:
    """O07, small: the same bits alone, after and before others (`jfa_checks` has the long form, run on a GPU)."""
    parts = [make_inputs(OP, (n,), seed=n) for n in (33, 9, 32)]
    alone = [laws.run(part, impl) for part in parts]
    for order in ((0, 1, 2), (2, 0, 1)):
        joined = Inputs(
            *(torch.cat([getattr(parts[i], n) for i in order]) for n in "qkv"),
            laws.offsets(*(parts[i].q.shape[0] for i in order)), None, torch.cat([parts[i].do for i in order]),
        )  # fmt: skip
        got = laws.run(joined, impl)
        for name in ("o", "dq", "dk", "dv"):
            assert torch.equal(got[name], torch.cat([alone[i][name] for i in order])), f"{order}: {name}"


def head_dims(impl: str, dims=(8, 40, 96), device="cpu", dtype=torch.float32, lengths=(33, 3)) -> None:
    """O14: head dimensions that are no powers of two, outputs and gradients."""
    for head_dim in dims:
        laws.against_reference(impl, make_inputs(OP, lengths, head_dim=head_dim, device=device, dtype=dtype))


HALF = torch.float16
EDGES = (
    "empty_in_the_middle",
    "one_row_of_many",
    "skewed",
    "last_empty",
    "cross_no_keys",
    "cross_no_queries",
    "no_sequences",
)
ALL = ("v1", "v2", "v3")
NEW = ("v2", "v3")
INTERPRETED = {
    **{f"patterns {i}": lambda i=i: patterns(i, names=(*EDGES, "cross_short_keys")) for i in ALL},
    "tile edges": lambda: patterns("v2", names=("tile_edges",)),
    **{
        f"half precision {i}": lambda i=i: patterns(i, dtype=HALF, head_dim=32, names=("skewed", "cross_no_keys"))
        for i in ALL
    },
    **{f"by hand {i}": lambda i=i: (laws.empty_sequence_in_the_middle(i), laws.queries_without_keys(i)) for i in ALL},
    # float32 tiles have 32 rows: one row, a whole tile, a row more
    **{f"neighbours {i}": lambda i=i: neighbours(i, firsts=(1, 32, 33)) for i in NEW},
    "neighbours in a window": lambda: neighbours("v2", firsts=(33,), window=20),
    **{f"empty {i}": lambda i=i: laws.everything_empty(i) for i in NEW},
    "offsets": lambda: laws.offsets_of_any_kind("v2"),
    "views": lambda: laws.views_of_a_fused_buffer("v3"),
    **{f"products {i}": lambda i=i: laws.strict_products(i) for i in ALL},
    **{f"own keys {i}": lambda i=i: laws.own_keys_only(i) for i in ALL},
    "company": lambda: company("v2"),
    "head dimensions": lambda: head_dims("v2"),
    **{f"shared queries {i}": lambda i=i: shared_queries(i) for i in NEW},
    "windows": lambda: (windows("v2", sizes=(0, 7, 40), lengths=(70, 0, 5)), laws.window_is_symmetric("v2")),
    "bias": lambda: (laws.bias_has_its_gradient("v2"), bias_by_scheme()),
    **{f"scheme {s}": lambda s=s: scheme(s) for s in SCHEMES},
    "descriptors": descriptors,
    "subtraction domain": subtraction_domain,
    "maskings": maskings,
    "tile list": tiles,
    "64-bit rows": long_products,
    "refusals": refusals,
}


def main(names: list[str]) -> None:
    triton_interpreted.unsanitized()
    for name in names or INTERPRETED:
        try:
            torch.manual_seed(0)
            INTERPRETED[name]()
            failure = None
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"check": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
