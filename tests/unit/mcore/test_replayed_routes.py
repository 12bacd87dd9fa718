"""Replayed routes: the experts are given, their weights and the gradient are the router's own."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_sequences

from megarl.mcore.batch import ContextGroup, build_batch
from megarl.mcore.layers import Replay, moe_utils

topk_routing_with_score_function = moe_utils.topk_routing_with_score_function

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0], [1.0, 0.0, 0.5, -2.0]])
GIVEN = 1 + torch.tensor([[3, 1], [3, 1], [-1, -1]], dtype=torch.int16)
"""Another set than the highest scores, the same set, and the router's own choice"""


def route(logits: torch.Tensor, experts: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    replay = Replay()
    replay.experts = experts
    return topk_routing_with_score_function(logits, 2, router_replay=replay, **options)


def test_given_experts_are_weighed_by_the_softmax_of_the_routers_own_scores_over_them() -> None:
    weights, routes = route(LOGITS, GIVEN)
    high, low = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    one, other = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    half, rest = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))
    expected = torch.tensor([[0, high, 0, low], [0, one, 0, other], [half, 0, rest, 0]])
    torch.testing.assert_close(weights, expected)
    assert torch.equal(routes, expected > 0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_given_experts_have_the_softmax_over_all_or_sigmoids_without_a_correction_bias(with_bias: bool) -> None:
    if with_bias:
        bias = torch.tensor([0.0, 0.0, 9.0, 0.0])
        weights, routes = route(LOGITS, GIVEN, score_function="sigmoid", expert_bias=bias)
        scores = LOGITS.sigmoid() * routes
        expected = scores / scores.sum(-1, keepdim=True)
    else:
        weights, routes = route(LOGITS, GIVEN, use_pre_softmax=True)
        expected = LOGITS.softmax(-1) * routes
    torch.testing.assert_close(weights, expected)
    assert routes.nonzero().tolist() == [[0, 1], [0, 3], [1, 1], [1, 3], [2, 0], [2, 2]]


def test_the_gradient_reaches_the_scores_of_the_given_experts_alone() -> None:
    logits = LOGITS.clone().requires_grad_()
    slope = torch.tensor([[5.0, 1.0, 7.0, -2.0]] * 3)
    weights, _ = route(logits, GIVEN)
    (weights * slope).sum().backward()
    # d w_i / d s_j = w_i (delta_ij - w_j) over the given experts
    w = weights.detach()
    torch.testing.assert_close(logits.grad, w * (slope - (w * slope).sum(-1, keepdim=True)))
    assert logits.grad[0, [0, 2]].tolist() == [0, 0]
    assert logits.grad[0, 1] > 0.1


@pytest.mark.parametrize("options", [{}, {"use_pre_softmax": True}, {"score_function": "sigmoid"}])
@pytest.mark.parametrize("topk", [2, 5, 8])
def test_the_routers_own_experts_in_any_order_give_the_same_bits(options: dict[str, Any], topk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 16, generator=generator)
    slope = torch.randn(200, 16, generator=generator)
    own = topk_routing_with_score_function(logits, topk, **options)[1].nonzero()[:, 1].view(200, topk)
    shuffled = torch.stack([row[torch.randperm(topk, generator=generator)] for row in own])
    replay, found = Replay(), []
    replay.experts, replay.is_counting = (shuffled + 1).to(torch.uint8), True
    for given in (None, replay):
        x = logits.clone().requires_grad_()
        weights, routes = topk_routing_with_score_function(x, topk, router_replay=given, **options)
        (weights * slope).sum().backward()
        found.append((weights.detach(), routes, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert replay.counts.tolist() == [200, 200]


@pytest.mark.parametrize("cp", [1, 2])
def test_experts_go_with_their_tokens_into_every_share_of_a_batch(cp: int) -> None:
    sequences = build_sequences()
    number = 1 + torch.arange(len(sequences.tokens), dtype=torch.int16)
    sequences = type(sequences)(
        number.long(), sequences.lengths, sequences.prompt_lengths, number[:, None, None].expand(-1, 3, 2)
    )
    for rank in range(cp):
        batch = build_batch(sequences, [4, 1, 7], multiple=8, context=ContextGroup(cp, rank))
        experts, real = batch.params.routed_experts, batch.params.sequence_numbers >= 0
        assert experts.shape == (batch.tokens.shape[1], 3, 2)
        assert (experts[~real] == 0).all()
        assert torch.equal(experts[real], batch.tokens[0, real].to(torch.int16)[:, None, None].expand(-1, 3, 2))
    assert build_batch(replace(sequences, routed_experts=None), [4]).params.routed_experts is None
