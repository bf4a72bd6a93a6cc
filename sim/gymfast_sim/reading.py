"""TOML to typed settings and back; a key that is not known is refused with the nearest one."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T", bound=msgspec.Struct)


class ScenarioError(ValueError):
    """Settings that cannot be read, or that contradict each other."""


def from_toml(text: str, kind: type[T]) -> T:
    """The settings in a TOML text. Raises ScenarioError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"this is no TOML: {error}") from error
    return from_dict(data, kind)


def from_dict(data: object, kind: type[T]) -> T:
    """The settings in what TOML or JSON holds. Raises ScenarioError."""
    _check_names(data, inspect.type_info(kind), "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        where = path.strip("`").removeprefix("$.")
        raise ScenarioError(f"{where}: {text}" if where else text) from error


def to_dict(settings: msgspec.Struct) -> dict[str, Any]:
    """What `from_dict` reads; settings that have their default are left out."""
    found = msgspec.to_builtins(settings)
    assert isinstance(found, dict)
    return found


def to_toml(settings: msgspec.Struct) -> str:
    """What `from_toml` reads: numbers as short as they can be, tables in the order of fields."""
    return "\n".join(_table(to_dict(settings), "")).strip() + "\n"


def _table(data: Mapping[str, Any], path: str) -> Iterable[str]:
    inner = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key, value in data.items():
        if key not in inner:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        where = f"{path}.{key}" if path else key
        yield f"\n[{where}]"
        yield from _table(value, where)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    assert isinstance(value, int | float)
    return repr(value)


def _check_names(data: object, kind: inspect.Type, where: str) -> None:
    """Refuses keys and tags that are not known, wherever in the settings they stand."""
    if isinstance(kind, inspect.UnionType):
        structs = [t for t in kind.types if isinstance(t, inspect.StructType)]
        if not isinstance(data, dict) or not structs:
            return
        chosen = _chosen(data, structs, where)
        if chosen is not None:
            _check_names(data, chosen, where)
    elif isinstance(kind, inspect.StructType) and isinstance(data, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        known = [*fields, *([kind.tag_field] if kind.tag_field else [])]
        for key, value in data.items():
            if key not in known:
                raise ScenarioError(_unknown(_join(where, key), "key", key, known))
            if key in fields:
                _check_names(value, fields[key], _join(where, key))
    elif isinstance(kind, inspect.VarTupleType) and isinstance(data, list | tuple):
        for i, item in enumerate(data):
            _check_names(item, kind.item_type, f"{where}[{i}]")


def _chosen(
    data: Mapping[str, Any], structs: list[inspect.StructType], where: str
) -> inspect.StructType | None:
    tag_field = structs[0].tag_field
    if tag_field is None:
        return structs[0]
    if tag_field not in data:
        return None  # msgspec says so
    tag = data[tag_field]
    for one in structs:
        if one.tag == tag:
            return one
    known = [str(one.tag) for one in structs]
    raise ScenarioError(_unknown(_join(where, tag_field), tag_field, str(tag), known))


def _unknown(where: str, what: str, found: str, known: list[str]) -> str:
    near = difflib.get_close_matches(found, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"
    return f"{where}: {what} {found!r} is not known, {hint}"


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
