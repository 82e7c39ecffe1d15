"""What every section of a recipe shares. Free of torch, so that ``--help`` is instant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _spell_out(value: Any) -> Any:
    return _SHORT.get(value, value) if isinstance(value, str) else value


SpelledDtype = BeforeValidator(_spell_out)
"""Accepts ``fp32 bf16 fp16`` for ``float32 bfloat16 float16``; use as ``Annotated[Literal[...], SpelledDtype]``."""

Dtype = Annotated[str, SpelledDtype]


class Section(BaseModel):
    """One section of a recipe: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
