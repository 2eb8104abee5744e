"""Turn plain data into dataclasses and pydantic models, for `load(as_=Model)`."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin

from holdfast.errors import InvalidRequest

M = TypeVar("M")


def to_model(value: Any, model: type[M]) -> M:
    """Return an instance of `model`. Raises InvalidRequest if the data does not fit it."""
    try:
        found = _fit(value, model)
        if not callable(model) and get_origin(model) is None:
            raise TypeError("it is no type")
        if type(model) is type and model.__module__ == "builtins" and not isinstance(found, model):
            raise TypeError(f"it is a {type(found).__name__}")
        return typing.cast("M", found)
    except InvalidRequest:
        raise
    except (TypeError, ValueError, LookupError, NameError, AttributeError) as e:
        name = getattr(model, "__name__", str(model))
        raise InvalidRequest(
            f"the state does not fit {name}: {e}", hint="load() without as_ returns the plain data"
        ) from e


def _fit(value: Any, kind: Any) -> Any:
    """Return `value` as the type of an annotation; unchanged if the annotation is not supported."""
    if kind is Any or isinstance(kind, TypeVar):
        return value
    if hasattr(kind, "model_validate"):
        return _fit_pydantic(value, kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _fit_dataclass(value, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, args)
    if value is not None and origin in (list, set, frozenset) and args:
        return origin(_fit(v, args[0]) for v in value)
    if value is not None and origin is tuple and args:
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_fit(v, a) for v, a in zip(value, inner, strict=True))
    if value is not None and origin in (Sequence, Collection, Iterable) and args:
        return type(value)(_fit(v, args[0]) for v in value)
    if value is not None and origin in (dict, Mapping, MutableMapping) and args:
        return {_fit(k, args[0]): _fit(v, args[1]) for k, v in value.items()}
    return value


def _fit_pydantic(value: Any, kind: Any) -> Any:
    """Validate by field name, because states are stored by it even if a model has aliases."""
    try:
        return kind.model_validate(value, by_name=True, by_alias=True)
    except TypeError:  # an older pydantic has no by_name
        return kind.model_validate(value)


def _fit_dataclass(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{kind.__name__} needs a dict, not {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    names = {f.name: f for f in dataclasses.fields(kind)}
    unknown = set(value) - set(names)
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {min(unknown)!r}")
    fitted = {k: _fit(v, hints.get(k, Any)) for k, v in value.items()}
    instance = kind(**{k: v for k, v in fitted.items() if names[k].init})
    for name, field in names.items():
        if not field.init and name in fitted:
            object.__setattr__(instance, name, fitted[name])
    return instance


def _fit_union(value: Any, args: tuple[Any, ...]) -> Any:
    """Return `value` as the first type of the union that fits. Raises TypeError if none does."""
    if value is None and type(None) in args:
        return None
    error: Exception | None = None
    for kind in args:
        if kind is not type(None):
            try:
                return _fit(value, kind)
            except (TypeError, ValueError) as e:
                error = e
    raise TypeError(str(error))
