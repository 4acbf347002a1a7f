"""Settings of the trackers: the services that a run's figures are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flatout.config.data import Name
from flatout.config.section import Section, refuse_unused, short_form
from flatout.errors import Fix

TrackerName = Literal["tensorboard", "wandb", "mlflow", "comet", "trackio"]


class TrackConfig(Section):
    """Where figures are sent besides the run folder; `track: [mlflow, wandb]` is short for `track: {to: [...]}`."""

    to: Annotated[list[TrackerName], short_form({"type": "string"})] = []
    """Services that get settings, metrics and answers; each needs its package; an error says how to install it."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project or experiment there; null: what the service's own environment variable says, else flatout."""
    tags: list[Name] = []
    """Tags of the run there."""
    upload_final: bool = False
    """Also upload the final adapter or model."""

    @classmethod
    def long_form(cls, value: Any) -> Any:
        if value is None or isinstance(value, Mapping | TrackConfig):
            return value
        return {"to": [value] if isinstance(value, str) else value}

    @field_validator("to", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if len(set(self.to)) < len(self.to):
            raise ValueError("a tracker is listed twice; list each once")
        if not self.to:
            refuse_unused(
                self, ("project", "tags", "upload_final"), "no tracker", Fix({"track.to": ["wandb"]}, "for example")
            )
        if self.to == ["tensorboard"]:
            refuse_unused(self, ("project", "upload_final"), "only tensorboard, which has neither")
        return self
