"""What the sections of settings share: their base class, and types with limits."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.types import PositiveFloat
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Weights = dict[str, PositiveFloat]


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Section(BaseModel):
    """A group of immutable, validated settings. Unknown names of settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse empty text, and true or false for a number, because pydantic reads true as 1."""
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        if value == "" or (isinstance(value, bool) and not is_switch):
            raise PydanticCustomError("not_converted", "Input should not be empty, true or false")
        return value
