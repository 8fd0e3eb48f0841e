"""What the models of all kinds of outputs share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Takes exactly its fields, in exactly their types, and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
