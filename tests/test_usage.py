"""Usage: sums, costs without dust, and the usage objects of providers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import InvalidRequest, Usage


def as_objects(given: Any) -> Any:
    """Return a dict as the objects of a provider's package have it: values are attributes."""
    if not isinstance(given, dict):
        return given
    return SimpleNamespace(**{name: as_objects(value) for name, value in given.items()})


GIVEN: dict[str, tuple[dict[str, Any], Usage]] = {
    "own": ({"input": 7, "output": 3, "cost": 0.5, "model": "m"}, Usage(7, 3, 0, 0, 0.5, "m")),
    "own, total only": ({"tokens": 10, "cost": None}, Usage(tokens=10)),
    "openai chat": (
        {
            "prompt_tokens": 100, "completion_tokens": 30, "total_tokens": 130,
            "prompt_tokens_details": {"cached_tokens": 80, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 0},
        },
        Usage(100, 30, 80, 20),
    ),
    "openai chat, no details": (
        {"prompt_tokens": 100, "completion_tokens": 30, "prompt_tokens_details": None},
        Usage(100, 30),
    ),
    "openai responses": (
        {
            "input_tokens": 100, "output_tokens": 30, "total_tokens": 130,
            "input_tokens_details": {"cached_tokens": 80},
            "output_tokens_details": {"reasoning_tokens": 20},
        },
        Usage(100, 30, 80, 20),
    ),
    "anthropic": (
        {
            "input_tokens": 10, "output_tokens": 30, "cache_read_input_tokens": 80,
            "cache_creation_input_tokens": 5, "service_tier": "standard",
        },
        Usage(95, 30, 80),
    ),
    "anthropic, no cache": (
        {"input_tokens": 10, "output_tokens": 3, "cache_read_input_tokens": None},
        Usage(10, 3),
    ),
    "gemini": (
        {
            "prompt_token_count": 100, "candidates_token_count": 10, "thoughts_token_count": 20,
            "cached_content_token_count": 80, "tool_use_prompt_token_count": 4,
            "total_token_count": 134,
        },
        Usage(104, 30, 80, 20),
    ),
    "gemini, camel case": (
        {
            "promptTokenCount": 100, "candidatesTokenCount": 10, "thoughtsTokenCount": 20,
            "cachedContentTokenCount": 80, "toolUsePromptTokenCount": 4, "totalTokenCount": 134,
        },
        Usage(104, 30, 80, 20),
    ),
    "a server that counts reasoning apart": (
        {
            "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 65,
            "completion_tokens_details": {"reasoning_tokens": 50},
        },
        Usage(10, 5, 0, 5, tokens=65),
    ),
    "a router that knows more": (
        {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25, "model": "m"},
        Usage(10, 5, cost=0.25, model="m"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", [dict, as_objects])
@pytest.mark.parametrize("name", GIVEN)
def test_shapes_of_providers(name: str, shape: Callable[[Any], Any]) -> None:
    given, usage = GIVEN[name]
    if name.startswith("own") and shape is as_objects:
        with pytest.raises(InvalidRequest):
            Usage.of(shape(given))
        return
    assert Usage.of(shape(given)) == usage
    assert Usage.of(shape(given), model="other", cost=2).model == "other"
    assert Usage.of(shape(given), model=None) == usage


def test_objects_of_a_real_package() -> None:
    openai = pytest.importorskip("openai.types")
    given = GIVEN["openai chat"][0]
    assert Usage.of(openai.CompletionUsage(**given)) == GIVEN["openai chat"][1]


WRONG: list[Any] = [
    None, "10", 10, [1], {"inputs": 1}, {"input": 1, "outptu": 2}, {"input": "1"},
    {"input": -1}, {"tokens": -1}, {"input": 1, "cached": 2}, {"output": 1, "reasoning": 2},
    {"input": 5, "tokens": 4}, {"cost": float("nan")}, {"cost": float("-inf")}, {"cost": "1"},
    {"model": ""}, {"model": 5}, {"prompt_tokens": "5"}, {"prompt_tokens": -5},
    {"input_tokens": 1.5}, {"prompt_token_count": True}, {"prompt_tokens": 5, "cost": "free"},
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG, ids=repr)
def test_what_is_no_usage(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Usage.of(given)
    assert caught.value.hint or "no number of tokens" in caught.value.message


def test_wrong_types_are_refused_at_once() -> None:
    wrong: list[dict[str, Any]] = [{"input": 0.5}, {"cost": "1"}, {"tokens": None}, {"model": 1}]
    for fields in wrong:
        with pytest.raises(InvalidRequest):
            Usage(**fields)


# -- sums ------------------------------------------------------------------------------------------


def test_costs_have_no_dust() -> None:
    assert Usage(cost=41 * 0.00005).cost == 0.00205  # 0.0020499999999999997 as it is computed
    total = functools.reduce(operator.add, [Usage(cost=0.1)] * 1_000)
    assert repr(total.cost) == "100.0"
    assert (Usage(cost=0.1) + Usage(cost=0.2)).cost == 0.3


def test_a_sum_keeps_the_models_apart() -> None:
    one, other, plain = Usage(7, 3, model="a"), Usage(5, cost=0.5, model="b"), Usage(tokens=2)
    total = sum([one, other, one, plain], Usage())
    assert (total.input, total.output, total.tokens, total.cost) == (19, 6, 27, 0.5)
    assert total.model is None
    assert total.by_model() == {None: plain, "a": Usage(14, 6, model="a"), "b": other}
    assert total == plain + one + (other + one)
    assert total + total == sum([one, other, one, plain] * 2, Usage())
    assert (one + one).by_model() == {"a": one + one}
    assert Usage().by_model() == {}
    assert one + Usage(model="b") == Usage(model="b") + one == one
