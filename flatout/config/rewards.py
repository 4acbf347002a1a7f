"""Rewards as settings: a function in a person's own file, or a ready one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flatout.config.own_code import APART
from flatout.config.section import PathText, Section, refuse_unused, require_own_code, require_regex, short_form

# the ready rewards (rollout/rewards/ready.py), and the settings that each reads
READY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exact": ("field", "pattern"),
        "number": ("field", "pattern"),
        "regex": ("pattern",),
        "json_schema": ("json_schema",),
        "code": ("field",),
        "length": ("min_tokens", "max_tokens"),
        "model": ("path",),
    }
)
_NEEDED = {"regex": "pattern", "json_schema": "json_schema", "length": "max_tokens", "model": "path"}
if TYPE_CHECKING:
    RewardName: TypeAlias = str
else:
    RewardName = Literal[tuple(READY)]


class RewardConfig(Section):
    """A function that scores answers; `FILE.py:FUNCTION` or the name of a ready one is short for it."""

    path: PathText | None = None
    """A function in a file of your own, which runs as code in processes of its own: rewards.py:correct; with kind
    model, the folder of a reward model: runs/judge/final."""
    kind: RewardName | None = None
    """A ready one instead: exact, number, regex, json_schema, code, length, model (docs/rewards.md)."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,39}$")] | None = None
    """Its name in figures; null: that of the function, or the kind."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Weight in the sum of the rewards; 0: only reported."""
    seconds: float = Field(default=30.0, gt=0, le=86_400)
    """Limit of time for one call; a process that takes longer is ended and started again."""
    memory_gb: float = Field(default=8.0, ge=0.25, le=1024)
    """Limit of the process's address space (RLIMIT_AS) in GiB during a call."""
    on_error: Literal["stop", "zero", "skip"] = "stop"
    """What an exception, a hang, or a result that is no finite number does: stop ends the run; zero counts it, and
    scores 0; skip counts it, and leaves this function out of the answer's sum."""
    field: Annotated[str, Field(min_length=1)] | None = None
    """exact, number: the row's field with the right answer (answer); code: with the tests (tests)."""
    pattern: Annotated[str, Field(min_length=1)] | None = None
    """regex: what the answer has to contain; exact, number: the first group of its last match is compared."""
    json_schema: dict[str, Any] | None = None
    """json_schema: what the JSON of an answer has to be."""
    min_tokens: int = Field(default=0, ge=0)
    """length: fewest tokens of an answer that scores 1."""
    max_tokens: int | None = Field(default=None, ge=1)
    """length: most tokens of an answer that scores 1; the stop token counts."""

    @classmethod
    def long_form(cls, value: Any) -> Any:
        if callable(value):
            file = Path(value.__code__.co_filename if isinstance(value, FunctionType) else "")
            name = getattr(value, "__name__", "").replace("<lambda>", "") or "FUNCTION"
            named = f"{file if file.is_file() else 'FILE.py'}:{name}"
            starts = f", and {APART.format(name)}" if getattr(value, "__module__", "") == "__main__" else ""
            raise ValueError(f"rewards run in processes of their own, which import their files: give {named!r}{starts}")
        return {"path" if ".py" in value else "kind": value} if isinstance(value, str) else value

    @property
    def title(self) -> str:
        """Its name in figures and messages."""
        return self.name or self.kind or str(self.path).rpartition(":")[2]

    @property
    def function(self) -> str | None:
        """What runs as code of a person's own: FILE.py:FUNCTION."""
        return self.path if self.kind is None else None

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> Self:
        if self.kind is None and self.path is None:
            raise ValueError(f"neither path nor kind is given: FILE.py:FUNCTION, or one of {', '.join(READY)}")
        own = {name for names in READY.values() for name in names}
        unread = sorted(own.difference(READY[self.kind] if self.kind else ("path",)))
        unread += ["seconds", "memory_gb"] * (self.kind == "model")  # it runs in no process of its own
        refuse_unused(self, unread, f"kind: {self.kind}, which does not read it" if self.kind else "path")
        if self.function is not None:
            require_own_code("path", self.function, "rewards.py:correct", kind="FUNCTION")
        if (needed := _NEEDED.get(self.kind or "")) and getattr(self, needed) is None:
            raise ValueError(f"kind: {self.kind} needs {needed}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens is above max_tokens")
        if self.pattern is not None:
            require_regex("pattern", self.pattern)
        return self


def _with_own_names(rewards: list[RewardConfig]) -> list[RewardConfig]:
    titles = [reward.title for reward in rewards]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise ValueError(f"two rewards have the name {twice}; give one of them another name, such as {twice}_2")
    return rewards


RewardList: TypeAlias = Annotated[
    list[Annotated[RewardConfig, short_form({"type": "string"})]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) or callable(value) else value),
    AfterValidator(_with_own_names),
    short_form({"type": "string"}),
]
"""The functions whose weighted sum is the reward of an answer; a text alone is a list of one."""
