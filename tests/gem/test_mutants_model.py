"""Code breaks of the model's and the reader's optimisations, one or more a column of variants.tsv, each with the check
that catches it. Kernels and numerics have their own tables (tests/kernels/test_mutants*.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gem import attention, balance, checkpointing, experts, graphs, model, norms, precision, sequence
from gem import compile as compilation
from gem.config import Pooling, SelfAttention
from gem.dataset import Split
from gem.train import Data
from tests.gem import test_balance, test_columns, test_equations, test_graphs, test_model, tiny
from tests.kernels.mutants import Mutant

# Where a break shows as an exception: the compiler's, and a gradient that is not there.
EXCEPTIONS = {"compile": (torch._dynamo.exc.Unsupported, ValueError), "checkpointing": (TypeError,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("mutants") / "d")


def everything_every_layer(old):
    return lambda layer, depth, compskip: old(layer, depth, False)


def cached_summary_never_refreshed(old):
    def steps(layer, depth, compskip):
        found = old(layer, depth, compskip)
        return found and found | {"pool": found["pool"] and not compskip}

    return steps


def without_its_mask(old):
    def forward(q, k, v, mask, *rest):
        return old(q, k, v, torch.ones_like(mask), *rest)

    return forward


def window_is_full(old):
    def run(qkv, events, *, kind, **settings):
        return old(qkv, events, kind=SelfAttention.FULL, **settings)

    return run


def time_is_ignored(old):
    return lambda positions, ages, *rest: old(positions, torch.zeros_like(ages), *rest)


def position_is_ignored(old):
    return lambda positions, ages, *rest: old(torch.zeros_like(positions), ages, *rest)


def turned_backwards(old):
    return lambda cos, sin: old(cos, -sin)


def another_gelu(old):
    return lambda *args, **settings: old(*args, **(settings | {"activation": "relu"}))


def without_the_keys_norm(old):
    return lambda self, x: x


def one_rank(old):
    def forward(self, hidden):
        mixed = self.tokens(hidden.transpose(1, 2)).unflatten(-1, (self.rank, self.num_out)).clone()
        mixed[:, :, 1:] = 0
        return self.channels(mixed.permute(0, 3, 2, 1).flatten(2))

    return forward


def ranks_and_tokens_swapped(old):
    def forward(self, hidden):
        mixed = self.tokens(hidden.transpose(1, 2)).unflatten(-1, (self.rank, self.num_out))
        return self.channels(mixed.permute(0, 3, 2, 1).flatten(2))

    return forward


def of_the_whole_batch(old):
    """Pooling over the packed rows as if they were one history each."""

    def pooled(q, k, v, events, **settings):
        ends = events.offsets.clone()
        ends[1:-1] = (ends[1:-1] + 1).clamp(max=int(ends[-1]))
        return old(q, k, v, events._replace(offsets=ends), **settings)

    return pooled


def no_interactions(old):
    def forward(self, tokens):
        out = old(self, tokens).clone()
        out[:, : self.half] = 0
        return out

    return forward


def everybodys_summary(old):
    def attend(self, events, summary):
        return old(self, events, summary.mean(0, keepdim=True).expand_as(summary))

    return attend


def recomputed_without_gradient(old):
    def run(layer, *inputs, **_):
        with torch.no_grad():
            return layer(*inputs)

    return run


def rebuilt_with_a_break(old):
    def norm(x):
        torch._dynamo.graph_break()
        return old(x)

    return norm


def heaviest_with_heaviest(old):
    return lambda loads, bins: np.argsort(-loads, axis=-1, kind="stable").reshape(*loads.shape[:-1], bins, -1)


def same_direction_each_round(old):
    return lambda order, bins: np.swapaxes(order.reshape(*order.shape[:-1], -1, bins), -1, -2)


def summed_not_averaged(old):
    return lambda sums, counts: old(sums, dict.fromkeys(counts, 1.0))


def always_foreach(old):
    return lambda *args, **settings: old(*args, **(settings | {"fused": False, "foreach": True}))


def recipe_only_for_linears(old):
    return lambda model, recipe, *, attention, **settings: old(model, recipe, attention=False, **settings)


def seeds_are_queries(old):
    """Seed pooling that forgets its projection runs plain pooled attention."""

    def build(self, config, size):
        toggles = dataclasses.replace(config.toggles, pooling=Pooling.PMA)
        old(self, dataclasses.replace(config, toggles=toggles), size)

    return build


M, E = test_model, test_equations
EQUAL = {"self_attention": "full", "pooling": "pma", "compskip": "off"}
# column -> breaks (name, owner, attribute, replacement of the old one, check, its arguments)
BREAKS = {
    "layout": [("padding_is_attended_to", attention, "_padded_self", without_its_mask,
                M.test_padded_and_jagged_are_one_mathematics, EQUAL)],
    "attention_impl": [("pooling_reads_a_neighbour", attention, "jagged_attention",
                        lambda old: lambda q, k, v, *rest, **s: old(q, k, v.roll(1, 0), *rest, **s),
                        E.test_pooling_attends_to_the_samples_own_history, {"pooling": "pma"}),
                       ("pooling_over_shifted_histories", attention, "pooled_attention", of_the_whole_batch,
                        E.test_pooling_attends_to_the_samples_own_history, {"pooling": "pma"})],
    "gdpa_impl": [("another_activation", attention, "gdpa", another_gelu,
                   E.test_feed_forward_is_its_equation_and_personal, {"norm": "separate"}),
                  ("keys_without_their_norm", norms.KeyNorm, "forward", without_the_keys_norm,
                   M.test_generalised_attention_scores_are_bounded, {}),
                  ("not_personal", sequence.PersonalisedFeedForward, "forward", everybodys_summary,
                   E.test_feed_forward_is_its_equation_and_personal, {"norm": "separate"})],
    "self_attention": [("window_and_block_see_all", attention, "self_attention", window_is_full,
                        M.test_self_attention_kinds_differ_and_see_what_they_should, {})],
    "rotary": [("age_not_in_the_angle", attention, "rotary_tables", time_is_ignored,
                M.test_rotary_depends_on_position_and_age, {}),
               ("position_not_in_the_angle", attention, "rotary_tables", position_is_ignored,
                M.test_rotary_depends_on_position_and_age, {}),
               ("fused_turns_backwards", attention, "Rotary", turned_backwards,
                M.test_fused_ops_are_the_same_mathematics,
                {"self_attention": "block", "rotary": "fused", "norm": "separate"})],
    "norm": [("fused_norm_has_another_eps", sequence.fused_norm, "pffn",
              lambda old: lambda *args, **settings: old(*args, **(settings | {"eps": 0.5})),
              M.test_fused_ops_are_the_same_mathematics,
              {"self_attention": "full", "rotary": "separate", "norm": "fused"}),
             ("fused_norm_picks_its_own_gdpa", sequence.fused_norm, "pffn",
              lambda old: lambda *args, gdpa_impl, **settings: old(*args, **settings),
              test_columns.test_the_fused_norms_run_the_gdpa_that_the_row_names, {})],
    "compskip": [("skips_nothing", model, "branch_steps", everything_every_layer,
                  M.test_compskip_costs_less_and_sequence_off_has_no_history, {}),
                 ("never_pools", model, "branch_steps", cached_summary_never_refreshed,
                  M.test_every_dense_parameter_gets_a_gradient, {})],
    "pooling": [("one_rank_of_the_kronecker_sum", sequence.SumKronLinear, "forward", one_rank,
                 E.test_seed_pooling_ends_in_a_sum_of_kronecker_products, {}),
                ("ranks_and_tokens_swapped", sequence.SumKronLinear, "forward", ranks_and_tokens_swapped,
                 E.test_seed_pooling_ends_in_a_sum_of_kronecker_products, {}),
                ("seed_pooling_is_plain_pooling", sequence.Pooler, "__init__", seeds_are_queries,
                 test_columns.test_a_flip_changes_what_runs, {"column": "pooling"})],
    "sequence": [("experts_without_interactions", experts.WukongExpert, "forward", no_interactions,
                  E.test_wukong_expert_is_its_equation, {}),
                 ("history_stays", model.Layer, "__init__",
                  lambda old: lambda self, config, *rest: old(self, tiny.config(), *rest),
                  M.test_compskip_costs_less_and_sequence_off_has_no_history, {})],
    "precision": [("recipe_does_not_reach_attention", precision, "apply_recipe", recipe_only_for_linears,
                   test_columns.test_a_flip_changes_what_runs, {"column": "precision"})],
    "mx_recipe": [("all_recipes_are_one", precision.mxfp8, "get_recipe",
                   lambda old: lambda name: old("rceil"),
                   test_columns.test_a_flip_changes_what_runs, {"column": "mx_recipe"})],
    "checkpointing": [("recomputed_without_gradient", checkpointing, "checkpoint", recomputed_without_gradient,
                       M.test_checkpointing_changes_nothing, {})],
    "saved_activations": [("nothing_is_packed", checkpointing, "quantised",
                           lambda old: lambda model, kind: model.run_layer,
                           test_columns.test_a_flip_changes_what_runs, {"column": "saved_activations"})],
    "balance": [("heaviest_with_heaviest", balance, "merge_pairs", heaviest_with_heaviest,
                 test_balance.test_larger_pools_are_better_and_close_to_dealing_samples, {}),
                ("zigzag_without_its_turn", test_balance, "zigzag", same_direction_each_round,
                 test_balance.test_zigzag, {})],
    "compile": [("graph_break_in_a_layer", sequence, "rms_norm", rebuilt_with_a_break,
                 M.test_a_layer_is_one_graph, {"columns": {"self_attention": "full"}}),
                ("layers_left_alone", compilation, "BACKENDS", lambda old: (),
                 M.test_layers_compile_without_graph_breaks, {})],
    "optimizer": [("fused_is_foreach", torch.optim, "AdamW", always_foreach,
                   test_columns.test_a_flip_changes_what_runs, {"column": "optimizer"}),
                  ("loss_summed_over_the_batch", test_equations, "normalised_loss", summed_not_averaged,
                   E.test_o39_table_gradients_average_over_the_global_batch, {"parts": 2})],
    "launch": [("offsets_stay_those_of_the_capture", graphs, "_plain",
                lambda old: lambda batch, events: old(batch, events)[2 * len(events):],
                test_graphs.test_padded_buffers_train_alike, {"row": "full"}),
               ("tables_learn_nothing", graphs._Graph, "give_back", lambda old: lambda *_: None,
                test_graphs.test_padded_buffers_train_alike, {"row": "plain"})],
}  # fmt: skip
CASES = [(column, *broken) for column, breaks in BREAKS.items() for broken in breaks]


def test_every_column_has_a_break():
    assert set(BREAKS) == set(test_columns.EFFECTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_mutant(case, folder, monkeypatch):
    column, name, owner, attribute, replacement, check, arguments = case
    given = dict(arguments)
    wanted = check.__code__.co_varnames[: check.__code__.co_argcount]
    if "split" in wanted:
        given["split"] = Split(folder, "train")
    if "data" in wanted:
        given["data"] = Data.open(folder)
    shows_as = EXCEPTIONS.get(column, ())
    Mutant(name, owner, attribute, replacement, named(check), given, True, shows_as).kill(monkeypatch)


def named(check):
    """The check under its own name, with a fresh compiler, whose graphs would remember the sound code."""

    def run(**arguments):
        torch._dynamo.reset()
        check(**arguments)

    run.__name__ = check.__name__
    return run
