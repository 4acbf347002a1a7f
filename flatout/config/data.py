"""Settings of the training data: sources, and how they are tokenized."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from flatout.config.section import PathText, Section, short_form
from flatout.errors import Fix, SettingError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(f"it contains the lone surrogate U+{code:04X}, half of a character; write it whole") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text that a tokenizer takes."""
Format = Literal[
    "auto", "alpaca", "sharegpt", "messages", "prompt_completion", "segments", "text", "tokens", "preference", "reward",
    "kto", "classify", "rollouts", "prompts",
]  # fmt: skip
CONVERTERS = {name: f"examples/formats/{name}.py:rows" for name in ("gemini", "glaive", "oasst", "xlam")}
"""Data sets with rows of their own form, and the converters that flatout's repository has for them."""


def _format(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return the name of a format, or a converter, FILE.py:FUNCTION, as it is."""
    if isinstance(value, str) and re.fullmatch(r".+\.py:[A-Za-z_]\w*", value):
        return value
    if isinstance(value, str) and value in CONVERTERS:
        why = "the converter in flatout's repository; copy it if you have no checkout"
        raise SettingError(f"format {value!r} is a file of yours: a converter", Fix({"format": CONVERTERS[value]}, why))
    return check(value)


KeyMeaning = Literal["train", "masked", "train_detail", "ignored"]
Dedupe = Literal["exact", "off"]

_SUFFIXES = (
    ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".txt", ".zip", ".tar", ".tgz",
    ".xz", ".gz", ".bz2", ".zst",
)  # fmt: skip


class SourceConfig(Section):
    """One source of training rows: a local path or a hub id."""

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Return the source that a path alone stands for; any other value unchanged."""
        return {"path": value} if isinstance(value, str | Path) else value

    path: PathText
    """A file, folder or glob (json, jsonl, csv, tsv, parquet, arrow, feather, txt; also .xz, .gz, .bz2, .zst; .zip and
    .tar of these, webdataset's shards), or a hub id."""
    hub: bool | None = None
    """true: `path` is a hub id; false: a local path; null: a hub id unless a local file or folder has that name."""
    split: str | None = None
    """Split of a hub data set, or of a local folder or glob whose file names contain it; null: train."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set; null: main. The build records the commit. If the branch has moved, a
    later build reads the new rows."""
    unread_files: Literal["error", "skip"] = "error"
    """Files of unknown types in a folder, glob or archive. error: stop and name them; skip: skip and count them. Files
    such as README.md and LICENSE are always ignored."""
    format: Annotated[Format, Path, WrapValidator(_format)] = "auto"
    """Row format; auto detects it from the first row and prints it. FILE.py:FUNCTION: your own converter of rows, which
    runs as code (docs/data.md)."""
    columns: dict[str, str] = {}
    """Maps the format's column names to yours: {instruction: question}."""
    roles: dict[str, str] = {}
    """Maps your role names to flatout's, e.g. {Agent: assistant}."""
    keys: dict[str, KeyMeaning] = {}
    """Says what other keys of turns mean: train (true: loss), masked (true: no loss), ignored, e.g. {bad: masked}."""
    system: Text | None = None
    """System prompt for conversations that have none."""
    pairs: Literal["best_worst", "adjacent", "all"] = "best_worst"
    """How several answers with scores or ranks become pairs: best and worst, neighbors in rank, or every combination.
    Answers with equal values form no pair."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Weight in the mix: 2.0 uses every row twice, 0.5 uses half of them (drawn with `data.seed`)."""

    @property
    def converter(self) -> str | None:
        """The converter that `format` names, FILE.py:FUNCTION; None for the name of a format."""
        return self.format if ".py:" in self.format else None


class DataConfig(Section):
    """Training data: the name of a data set that is already built, or sources that are built on first use.

    `data: chats.jsonl` is short for a data set `chats` of that source, `data: chats` for `data: {name: chats}`.
    """

    name: Name = "default"
    """Name of the data set in the registry `<root>/data_config.json` and of its folder in `<root>/built_dataset/`."""
    root: Path = Path("data")
    """Folder that holds the registry and the built data sets."""
    sources: list[Annotated[SourceConfig, short_form({"type": "string"})]] = []
    """Sources to build from; if empty, build `name` first with `flatout data build`."""
    tokenizer: PathText | None = None
    """Hub id or folder of the tokenizer; null: the model's."""
    new_tokens: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Tokens to add to the tokenizer, such as ["<tool>", "</tool>"]. The model gets embedding rows for them, which are
    trained (method: lora trains only these rows), even if a token already exists. They are ordinary text."""
    new_special_tokens: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """The same for special tokens, which do not appear in decoded answers and are only written by the template (see
    `special_tokens`)."""
    media_root: Path | None = None
    """Folder that relative image paths start from; null: the folder of the data file."""
    template: PathText | None = None
    """Chat template: chatml, llama-3, qwen3, gemma, mistral, phi, zephyr, alpaca, plain or a .jinja file; null:
    the tokenizer's own."""
    template_args: dict[str, bool | int | float | str] = {}
    """Variables for the chat template, such as {enable_thinking: false}; a variable it does not read is an error."""
    empty_reasoning: Literal["train", "mask"] = "train"
    """Empty <think></think> that the template puts before an answer: train on it, or mask it (no loss)."""
    lost_reasoning: Literal["split", "mask", "train"] = "split"
    """Conversations whose template drops the reasoning of earlier answers. split: one sample per question, rendered as
    at inference; mask: these answers carry no loss; train: train them without their reasoning."""
    end_of_turn: Annotated[Text, StringConstraints(min_length=1)] | None = None
    """The text that ends an answer, such as </s>, for chat templates that write none. It carries loss and is appended
    to the last answer of a row. null: the template's end of turn, or the marker of the next turn; none: no such text.
    If the template has an end of turn, another value is an error."""
    special_tokens: Literal["keep", "text"] | None = None
    """Special tokens in the texts of rows. keep: read them as tokens in plain texts (text, prompt/completion) and, with
    template: plain, in all rows, to which nothing is added; text: tokenize them as text; null: text, but the build
    stops if too many rows contain them."""
    loss_type: Literal["response_only", "all"] = "response_only"
    """Tokens in the loss. response_only: each assistant turn with its end-of-turn token; all: every token."""
    max_tokens: int | None = Field(default=2048, ge=2)
    """Maximum tokens per sample; null: no limit."""
    too_long: Literal["auto", "error", "drop", "truncate", "split"] = "auto"
    """What to do with samples longer than `max_tokens` (always counted); auto: split plain documents, drop pairs and
    labeled answers, truncate all others."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error: stop the build at the first bad rows and name file, row and field; skip: drop, count and list them."""
    dedupe: Dedupe = "off"
    """Drop and count rows that repeat an earlier one. exact: the same tokens and loss mask; off: none."""
    num_samples: int | None = Field(default=None, ge=1)
    """Use only this many rows, chosen as `shuffle` says; null: all."""
    shuffle: bool = True
    """Draw the `num_samples` rows at random (with `seed`) instead of taking the first ones."""
    seed: int = Field(default=3407, ge=0)
    """Seed for sampling and mixing rows."""
    num_procs: int | None = Field(default=None, ge=1)
    """Tokenizer processes; null: one per core, at most 16. The maximum is 16 or the number of cores, if larger."""

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Return the section that `data: PATH_OR_NAME` or a list of paths is short for; any other value unchanged.

        Text with a slash, a star or the suffix of a data file is a path or hub id, any other the name of a built data
        set. The data set that is built from a path has the name of its file.
        """
        value = str(value) if isinstance(value, Path) else value
        is_path = isinstance(value, str) and (
            {"/", "*"} & {*value} or value.endswith(_SUFFIXES) or Path(value).is_file()
        )
        if isinstance(value, str) and not is_path:
            return {"name": value}
        if isinstance(value, str):
            stem = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePath(value).name.partition(".")[0]).strip("-_")[:64]
            return {"sources": [{"path": value}], **({"name": stem} if stem else {})}
        if isinstance(value, list):
            return {"sources": [{"path": path} if isinstance(path, str) else path for path in value]}
        return value

    @field_validator("dedupe", mode="before")
    @classmethod
    def _exact_or_off(cls, value: object) -> object:
        if value == "near":
            text = "near-duplicates are not searched for; remove them first, with datatrove or text-dedup"
            raise SettingError(text, Fix({"data.dedupe": "exact"}, "drops equal rows"))
        return value

    @model_validator(mode="after")
    def _new_tokens_are_named_once(self) -> Self:
        tokens = [*self.new_tokens, *self.new_special_tokens]
        if wrong := [text for text, count in Counter(tokens).items() if count > 1 or not text.strip()]:
            raise ValueError(f"new_tokens and new_special_tokens: {wrong[0]!r} is blank or named twice")
        return self

    def with_format(self, name: Format | None) -> Self:
        """Return it with this format of the sources that name none."""
        named = [one.model_copy(update={"format": name}) if one.format == "auto" else one for one in self.sources]
        return self.model_copy(update={"sources": named}) if name else self

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that are added to the tokenizer, in order, and whether each is special."""
        return {**dict.fromkeys(self.new_tokens, False), **dict.fromkeys(self.new_special_tokens, True)}
