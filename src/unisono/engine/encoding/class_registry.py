"""Classes by name: dataclasses, msgspec Structs and enums.

The name in a message only selects among classes that the receiving process has already imported. Decoding
imports nothing, calls no module's `__getattr__`, and accepts only these three kinds of classes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from types import ModuleType
from typing import Any, cast

import msgspec


def field_names(cls: type) -> tuple[str, ...] | None:
    """The fields of a dataclass or Struct; None: it is neither."""
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    if any("__dataclass_fields__" in vars(base) for base in cls.__mro__):
        return tuple(field.name for field in dataclasses.fields(cast(Any, cls)))
    return None


def class_name(cls: type) -> str:
    """The name under which the receiver looks for a class.

    Example: "package.module:Outer.Inner"
    """
    return f"{cls.__module__}:{cls.__qualname__}"


def reason_against(cls: type) -> str:
    """Why instances of a class cannot be made by the receiver; "" when they can."""
    name = class_name(cls)
    if "<locals>" in name:
        return "its class is made inside a function; move it to the top level of a module"
    if look_up(name) is not cls:
        return f"its class is not what {name} is; a receiver finds classes by that name"
    if any("__del__" in vars(base) for base in cls.__mro__):
        return "its class has a __del__, which would run on data from another process"
    if not issubclass(cls, (Enum, msgspec.Struct)):
        try:
            object.__new__(cls)
        except TypeError as error:
            return f"its class is more than a dataclass ({error})"
    return ""


def reason_against_instance(obj: Any, names: Sequence[str]) -> str:
    """Why an instance cannot be sent by its fields alone; "" when it can."""
    missing = [name for name in names if not hasattr(obj, name)]
    if missing:
        return f"its field {missing[0]} is not set"
    for name in getattr(obj, "__dict__", {}).keys() - set(names):
        if name != "__orig_class__" and not _is_derived(type(obj), name):
            return f"its attribute {name} is not a field of its class, and would be lost"
    return ""


def _is_derived(cls: type, name: str) -> bool:
    """Whether an attribute is a cached property, which the receiver computes again."""
    return any(isinstance(vars(base).get(name), cached_property) for base in cls.__mro__)


def find(name: str) -> type:
    """The class that a message names.

    Raises:
        ValueError: this process has not imported it, or its kind is not accepted.
    """
    cls = look_up(name)
    if cls is None:
        module = name.partition(":")[0]
        raise ValueError(
            f"cannot decode: class {name[:200]} is not known here. "
            f"Import {module[:200]} on the receiving rank too"
        )
    if not issubclass(cls, Enum) and field_names(cls) is None:
        raise ValueError(f"cannot decode: {name} is no dataclass, Struct or enum")
    if reason := reason_against(cls):
        raise ValueError(f"cannot decode a {name}: {reason}")
    return cls


def look_up(name: str) -> type | None:
    """A class by name, through dictionaries only."""
    module_name, _, path = name.partition(":")
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        return None
    scope: Any = ModuleType.__getattribute__(module, "__dict__")
    found: Any = None
    for part in path.split("."):
        found = scope.get(part)
        if not isinstance(found, type):
            return None
        scope = vars(found)
    return found if class_name(found) == name else None


def make(cls: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An instance with these fields.

    `__init__` and `__post_init__` of a dataclass do not run. For a Struct, `__post_init__` cannot be avoided.

    Raises:
        ValueError: the class has other fields in this process, or refuses these values.
    """
    expected = field_names(cls)
    if expected is None or sorted(names) != sorted(expected):
        raise ValueError(
            f"cannot decode a {class_name(cls)}: the sender's has the fields {', '.join(names)[:200]}, "
            f"this process's {', '.join(expected or ())}"
        )
    try:
        if issubclass(cls, msgspec.Struct):
            return cls(**dict(zip(names, values, strict=True)))
        obj = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(obj, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"cannot decode a {class_name(cls)}: {error}") from error
    return obj
