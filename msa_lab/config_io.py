"""Configs as plain values and back: what YAML, JSON and weights-only checkpoints can hold."""

from __future__ import annotations

import difflib
import hashlib
import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal

from msa_lab.config import RunConfig


def config_hash(config: RunConfig) -> str:
    """Eight hex digits over every field that changes the numbers of an arm."""
    plain = to_dict(config)
    for name in ("study", "arm", "seed"):
        plain.pop(name)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings: what YAML, JSON and a weights-only checkpoint can hold."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(plain: dict[str, Any], cls: type = RunConfig, at: str = "") -> Any:
    """The config that `to_dict` wrote.

    Raises:
        ValueError: An unknown key, named with the nearest valid one, or a value that breaks a rule.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    if not isinstance(plain, dict):
        raise ValueError(f"{at.rstrip('.') or 'config'}={plain!r}: must hold fields; try {at}{next(iter(known))}")
    for key in plain:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{at}{key}: unknown key; did you mean {at}{near}?")
    values: dict[str, Any] = {}
    for name, value in plain.items():
        hint = hints[name]
        if is_dataclass(hint):
            values[name] = from_dict({} if value is None else value, typing.cast(type, hint), f"{at}{name}.")
        else:
            values[name] = checked(value, hint, f"{at}{name}", known[name].default)
    return cls(**values)


def checked(value: Any, hint: Any, name: str, default: Any) -> Any:
    """`value` as the type that `hint` says; YAML has no tuples and writes 1.0 as 1.

    Raises:
        ValueError: It is of another type; the line ends with `default` as the way out.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            item = typing.get_args(option)[0]
            return tuple(checked(v, item, name, default) for v in value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin is None and isinstance(option, type) and type(value) is option:
            return value
    way_out = "leave it out" if default is None else f"try {default!r}"
    ending = "" if typing.get_origin(hint) is Literal else f"; {way_out}"
    raise ValueError(f"{name}={value!r}: must be {_describe(hint)}{ending}")


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is dict:
        return "a mapping of names to values, such as {qos: high}"
    if typing.get_origin(hint) is tuple:
        return f"a list of ({_describe(typing.get_args(hint)[0])})"
    return {"int": "a whole number", "float": "a finite number", "str": "text", "bool": "true or false"}.get(
        getattr(hint, "__name__", ""), str(hint)
    )
