"""Read the usage objects of OpenAI, Anthropic and Gemini, without importing their packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import InvalidRequest

_OWN = ("input", "output", "cached", "reasoning", "cost", "model", "tokens")
_TOTAL = ("total_tokens", "total_token_count", "totalTokenCount")
_CHAT = ("prompt_tokens", "completion_tokens")
_ANSWERS = ("input_tokens", "output_tokens")
_GEMINI = (
    "prompt_token_count", "promptTokenCount", "candidates_token_count", "candidatesTokenCount",
)  # fmt: skip


def fields(given: Any) -> dict[str, Any]:
    """Return the fields of a Usage. Raises InvalidRequest if `given` is not a usage."""
    if isinstance(given, Mapping) and given.keys() <= {*_OWN}:
        return {name: value for name, value in given.items() if value is not None}
    if _has(given, _CHAT):
        found = _chat(given)
    elif _has(given, _ANSWERS):
        found = _answers(given)
    elif _has(given, _GEMINI) or _has(given, _TOTAL):
        found = _gemini(given)
    else:
        raise InvalidRequest(
            f"not a usage: {given!r:.200}",
            hint=f"a Usage, a dict of {', '.join(_OWN)}, or the usage object of a provider",
        )
    # Providers that only resemble these count a part outside of the whole.
    found["cached"] = min(found["cached"], found["input"])
    found["reasoning"] = min(found["reasoning"], found["output"])
    found["tokens"] = max(_count(given, *_TOTAL), found["input"] + found["output"])
    extra = {name: _value(given, name) for name in ("cost", "model")}
    return found | {name: value for name, value in extra.items() if value is not None}


def _chat(of: Any) -> dict[str, Any]:
    """OpenAI, chat completions: the input includes cached tokens, the output reasoning."""
    return {
        "input": _count(of, "prompt_tokens"),
        "output": _count(of, "completion_tokens"),
        "cached": _count(_value(of, "prompt_tokens_details"), "cached_tokens"),
        "reasoning": _count(_value(of, "completion_tokens_details"), "reasoning_tokens"),
    }


def _answers(of: Any) -> dict[str, Any]:
    """OpenAI, responses: as chat completions. Anthropic: the input excludes the cache."""
    read = _count(of, "cache_read_input_tokens")
    cached = _count(_value(of, "input_tokens_details"), "cached_tokens")
    return {
        "input": _count(of, "input_tokens") + read + _count(of, "cache_creation_input_tokens"),
        "output": _count(of, "output_tokens"),
        "cached": read or cached,
        "reasoning": _count(_value(of, "output_tokens_details"), "reasoning_tokens"),
    }


def _gemini(of: Any) -> dict[str, Any]:
    """Gemini: the input includes cached tokens, but the candidates exclude thoughts."""
    thoughts = _count(of, "thoughts_token_count", "thoughtsTokenCount")
    tools = _count(of, "tool_use_prompt_token_count", "toolUsePromptTokenCount")
    return {
        "input": _count(of, "prompt_token_count", "promptTokenCount") + tools,
        "output": _count(of, "candidates_token_count", "candidatesTokenCount") + thoughts,
        "cached": _count(of, "cached_content_token_count", "cachedContentTokenCount"),
        "reasoning": thoughts,
    }


def _has(of: Any, names: tuple[str, ...]) -> bool:
    return any(_value(of, name) is not None for name in names)


def _value(of: Any, name: str) -> Any:
    """Return a value of a dict, or an attribute of an object; None if it is missing."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _count(of: Any, *names: str) -> int:
    """Return the first of these numbers that is there, or 0."""
    for name in names:
        if (value := _value(of, name)) is not None:
            if type(value) is not int or value < 0:
                raise InvalidRequest(f"not a usage: {name} is no number of tokens: {value!r}")
            return value
    return 0
