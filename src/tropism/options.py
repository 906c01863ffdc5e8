"""The base of all option groups: typed, frozen, documented by the string under each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict


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
