"""The fields of a config.json: a dict in, checked values by name and type out. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fulgurite.errors import WeightsError

MAX_NUMBER = 1e30  # larger numbers overflow float32 arithmetic

Value = TypeVar("Value")


class ConfigFields:
    """The fields of a config.json, read by name and type. Errors name the field and the file."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get_int(self, name: str, default: int | None = None, minimum: int = 0) -> int:
        value = self._get_typed(name, int, default)
        if not minimum <= value < 2**63:
            raise self.error(f"{name}={value} must be at least {minimum} and fit into 64 bits")
        return value

    def get_positive_int(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        return self.get_int(name, default, minimum=1)

    def get_float(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            value = self._get_typed(name, float, default)
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise self.error(f"{name}={value} is out of range")
        return float(value)

    def get_positive_float(self, name: str, default: float | None = None) -> float:
        value = self.get_float(name, default)
        if value <= 0:
            raise self.error(f"{name}={value:g} must be greater than 0")
        return value

    def get_bool(self, name: str, default: bool | None = None) -> bool:
        return self._get_typed(name, bool, default)

    def get_str(self, name: str, default: str | None = None) -> str:
        return self._get_typed(name, str, default)

    def get_optional_int(self, name: str) -> int | None:
        return self.get_int(name) if name in self else None

    def get_optional_positive_int(self, name: str) -> int | None:
        return self.get_positive_int(name) if name in self else None

    def get_optional_float(self, name: str) -> float | None:
        return self.get_float(name) if name in self else None

    def get_cap(self, name: str, default: float) -> float | None:
        """A limit that null turns off; an absent one has the default."""
        return self.get_optional_float(name) if name in self.values else default

    def get_list(self, name: str) -> tuple[object, ...]:
        return tuple(self._get_typed(name, list, []))

    def get_floats(self, name: str) -> tuple[float, ...]:
        found = []
        for value in self.get_list(name):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.error(f"{name} must be a list of numbers")
            found.append(float(value))
        return tuple(found)

    def get_ints(self, name: str) -> tuple[int, ...]:
        """An integer or a list of integers, such as eos_token_id."""
        value = self.values.get(name)
        if isinstance(value, int):
            return (value,)
        return tuple(int(number) for number in self.get_floats(name))

    def get_choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get_str(name, default)
        if value not in allowed:
            raise self.error(f"{name}={value!r} is not supported; supported: {', '.join(allowed)}")
        return value

    def with_defaults(self, **defaults: object) -> ConfigFields:
        """The fields, with these values for those that are absent."""
        missing = {name: value for name, value in defaults.items() if name not in self}
        return ConfigFields({**self.values, **missing}, self.where)

    def with_values(self, **values: object) -> ConfigFields:
        """The fields, with these values instead of the file's."""
        return ConfigFields({**self.values, **values}, self.where)

    def get_section(self, name: str) -> ConfigFields:
        """A nested object; empty if absent."""
        values = self.values.get(name)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise self.error(f"{name} must be an object, not {values!r}")
        return ConfigFields(values, f"{self.where}, {name}")

    def require(self, name: str, supported: object, default: object = None) -> None:
        """Raise if a field has another value than the only supported one."""
        value = self.values.get(name)
        value = default if value is None else value
        if value != supported:
            raise self.error(f"{name}={value!r} is not supported; supported: {supported!r}")

    def error(self, what: str) -> WeightsError:
        return WeightsError(what, where=self.where)

    def _get_typed(self, name: str, kind: type[Value], default: Value | None) -> Value:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"the field {name} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be of type {kind.__name__}, not {value!r}")
        return value
