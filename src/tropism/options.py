"""The base of all option groups: typed, frozen, documented by the string under each field."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Options(BaseModel):
    """A group of options. Groups live beside their owner and are composed in `config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True,
                              protected_namespaces=(), allow_inf_nan=False)
    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A description is one paragraph, however its source is wrapped."""
        super().__pydantic_init_subclass__(**kwargs)
        for info in cls.model_fields.values():
            info.description = " ".join((info.description or "").split())

    def dump(self) -> dict[str, Any]:
        """Plain values, as YAML holds them."""
        return self.model_dump(mode="json")

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """Every option by the name that the command line has for it: those of a group inside as `group.name`."""
        found: dict[str, FieldInfo] = {}
        for name, info in cls.model_fields.items():
            group = info.annotation
            if isinstance(group, type) and issubclass(group, Options):
                found |= {f"{name}.{inner}": field for inner, field in group.flat_fields().items()}
            else:
                found[name] = info
        return found

    @classmethod
    def flattened(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values with those of groups by their names on the command line; what is no group stays as it is."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            group = cls.model_fields[name].annotation if name in cls.model_fields else None
            if not (isinstance(group, type) and issubclass(group, Options)):
                found[name] = value
            elif isinstance(value, Mapping | Options):
                inner = value.model_dump() if isinstance(value, Options) else value
                found |= {f"{name}.{key}": entry for key, entry in group.flattened(inner).items()}
            elif value is not None:
                found[name] = value  # no group where there should be one: whoever checks names says so
        return found

    @classmethod
    def nested(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The opposite of `flattened`."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            group, dot, inner = name.partition(".")
            if dot:
                found[group] = {**found.get(group, {}), inner: value}
            else:
                found[name] = value
        return found
