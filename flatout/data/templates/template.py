"""Chat templates: which one is used, and rendering messages in transformers' immutable Jinja sandbox."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from flatout.data.conversation import PICTURE, Message, ToolCall
from flatout.data.tokenizer import TokenizerFacts, added_texts, any_of, begins_with_bos
from flatout.errors import DataError, Fix, FlatoutError, first_line, reason_of
from flatout.io.near_path import near_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OURS = ("chatml", "llama-3", "qwen3", "gemma", "mistral", "phi", "zephyr", "alpaca", "plain")
RawMessage = dict[str, Any]
# stands for </think> in the last answer while a template renders it that would cut the text there
_CLOSE = "\U000f5a13"
_OPEN_TAG, _CLOSE_TAG = "<think>", "</think>"
_LOOKS_LIKE_MARKUP = r"</?[|｜A-Za-z_][^<>\s]{0,60}>|\[/?[A-Z][A-Z_]*\]"
# What a template can raise: its own raise_exception, an undefined name, a filter on a value of the wrong type.
RENDER_ERRORS = (
    TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
# variables by which public templates switch reasoning
REASONING_SWITCHES = ("enable_thinking", "thinking", "think", "reasoning", "enable_reasoning", "preserve_thinking")
THOUGHT, TOOL_NAME = "WhyprobethreeQkd", "Lookupsix"
"""What templates are probed with: letters only, which none of them changes, and which occur in no real text."""
TOOLS = ({"type": "function", "function": {"name": TOOL_NAME, "description": "d", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "c"}}}}},)  # fmt: skip
_ASK, _CALL = Message("user", "a"), Message("assistant", "", tool_calls=(ToolCall(TOOL_NAME, {"x": 1}, "call00000"),))
_ANSWER = Message("assistant", "b", reasoning=THOUGHT)


@dataclass(frozen=True, slots=True)
class Form:
    """The spelling in which a template reads a row: found by rendering probes, once a template, never by its name."""

    arguments_as_text: bool = False
    """Arguments of calls are JSON text instead of objects."""
    tools_as: str = "tools"
    """The variable that takes the tools; another than `tools` takes the bare functions."""
    empty_tools: bool = False
    """Rows without tools give an empty list."""
    reasoning: Literal["fields", "inline", "last", "prefix"] = "fields"
    """Where it is: in fields of its own; `inline`, in the content between <think> tags; `last`, the same for a template
    that cuts the content at </think>, also in the last answer, where inference shows the reasoning that the model has
    just written; `prefix`, the same for one whose generation prompt writes <think>, and that takes a last answer which
    begins there."""
    breaks: bool = True
    """The tags of reasoning stand on lines of their own."""
    parts: bool = False
    """Every content is a list of typed parts, as templates of vision-language models have it."""

    def content(self, reasoning: str, content: str) -> str:
        line = "\n" * self.breaks
        return f"{_OPEN_TAG}{line}{reasoning}{line}{_CLOSE_TAG}{line * 2}{content}"

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the keywords that give the tools of a row to the template."""
        if not tools:
            return {"tools": [] if self.empty_tools else None}
        if self.tools_as == "tools":
            return {"tools": [dict(tool) for tool in tools]}
        return {"tools": None, self.tools_as: [dict(tool["function"]) for tool in tools]}

    def shown(self, messages: Sequence[RawMessage]) -> list[RawMessage]:
        """Return the messages as the template gets them; its text has _CLOSE for _CLOSE_TAG where it must not cut."""
        spelt = list(messages)
        hides = self.reasoning in ("last", "prefix") and bool(spelt) and spelt[-1]["role"] == "assistant"
        if hides and _CLOSE_TAG in spelt[-1]["content"]:
            thought, _, text = spelt[-1]["content"].partition(_CLOSE_TAG)
            if _OPEN_TAG not in thought:  # left to the generation prompt
                thought = f"{_OPEN_TAG}\n{thought.lstrip()}"
            if self.reasoning == "prefix":
                spelt[-1] = spelt[-1] | {"prefix": True}
                thought = thought.lstrip().removeprefix(_OPEN_TAG)
            spelt[-1] = spelt[-1] | {"content": f"{thought}{_CLOSE}{text}"}
        return [
            message | {"content": _in_parts(message["content"])}
            if self.parts or PICTURE in message["content"]
            else message
            for message in spelt
        ]


def _in_parts(content: str) -> list[dict[str, str]]:
    """Return a content as typed parts: its texts, and its pictures between them."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _shows_reasoning(text: str, thought: str, prompt: str) -> bool:
    """Whether the text of a conversation shows a last answer's reasoning as the model writes it after `prompt`."""
    before = text.partition(thought)[0].rstrip()
    # opened once, and not right behind a block that is closed
    _, closed, behind = before.rpartition(_CLOSE_TAG)
    is_again = bool(closed) and behind.strip() == _OPEN_TAG
    opens = before.endswith(_OPEN_TAG) and behind.count(_OPEN_TAG) == 1 and not is_again
    return thought in text and text.startswith(prompt) and opens


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the tokenizer that supplies its bos and eos text. `name` is for messages.

    `mark` is what it writes for a picture; rendered texts have PICTURE in its place. Empty: rows have no pictures.
    `asks` is what it adds behind the last message even if no answer is asked for: only generation prompts have it.
    """

    name: str
    source: str
    tokenizer: PreTrainedTokenizerBase
    args: Mapping[str, Any] = field(default_factory=dict)
    form: Form = Form()
    mark: str = ""
    asks: str = ""

    @classmethod
    def checked(
        cls,
        name: str,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        args: Mapping[str, Any] | None = None,
        setting: str = "data.template_args",
    ) -> ChatTemplate:
        """Return a template that reads the variables `args` and renders one user turn.

        Raises DataError if not, which names the `setting` that the variables are from.
        """
        args = args or {}
        for variable in args:
            if not reads(source, variable):
                raise DataError(f"{setting}: chat template {name!r} does not read {variable!r}; remove it")
        tried = cls(name, source, tokenizer, args)
        for form in (Form(), Form(empty_tools=True), Form(parts=True)):
            tried = replace(tried, form=form)
            try:
                if "hello" not in tried.render([{"role": "user", "content": "hello"}], generation_prompt=True):
                    raise ValueError("its output lacks the content of the user's message")
                break
            except RENDER_ERRORS as error:
                problem = error
        else:
            raise DataError(
                f"chat template {name!r} cannot render a single user turn: {reason_of(problem)}"
            ) from problem
        return replace(tried, form=tried._find_form())

    @cached_property
    def tokens(self) -> dict[str, bool]:
        """The texts of the tokenizer's added tokens, and whether each is special."""
        return added_texts(self.tokenizer)

    @cached_property
    def markup(self) -> re.Pattern[str]:
        """A pattern of what must stay whole in a rendered text: every added token, and tags that look like one.

        A template may come with tags that this tokenizer does not know, such as <|user|> or [/INST].
        """
        return re.compile("|".join(filter(None, (any_of(self.tokens), _LOOKS_LIKE_MARKUP))))

    def _find_form(self) -> Form:
        """Return the spelling of calls, tools and reasoning that this template shows; where none, the usual one."""

        def show(form: Form, *turns: Message, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
            return replace(self, form=form).attempt([_ASK, *turns], tools)

        form = self.form
        as_texts = [replace(form, arguments_as_text=as_text) for as_text in (False, True)]  # some paste them as text
        form = next((asked for asked in as_texts if TOOL_NAME in show(asked, _CALL)), form)
        variables = dict.fromkeys(["tools", *re.findall(r"\b\w*(?:tools|functions)\b", self.source)])
        named = (replace(form, tools_as=variable) for variable in variables)
        form = next((asked for asked in named if TOOL_NAME in show(asked, tools=TOOLS)), form)
        if "think>" not in self.source or THOUGHT in show(form, _ANSWER):
            return form
        prompt = replace(self, form=form).attempt([_ASK], prompt=True)
        kinds: tuple[Literal["inline", "last", "prefix"], ...] = ("inline", "last", "prefix")
        for kind in kinds:
            asked = replace(form, reasoning=kind, breaks=kind != "prefix" or prompt.endswith("\n"))
            if _shows_reasoning(show(asked, _ANSWER), THOUGHT, prompt):
                return asked
        return form

    def remedy(self, part: str) -> tuple[str, list[Fix]]:
        """Return what a person can do about a part of a row ("reasoning", "tools", ...) that the template drops."""
        if part == "reasoning":
            for name in REASONING_SWITCHES:
                if self.args.get(name) is not True and re.search(rf"\b{name}\b", self.source):
                    switched = replace(self, args={**self.args, name: True})
                    switched = replace(switched, form=switched._find_form())
                    if THOUGHT in switched.attempt([_ASK, _ANSWER]):
                        fix = Fix({"data.template_args": dict(switched.args)}, "shows it in all rows")
                        return f"give {name} to these rows alone, as chat_template_kwargs, or to all", [fix]
        if part == "tools" and TOOL_NAME in self.attempt([_ASK, _CALL]):
            return (
                "it writes calls, but no list of tools: describe them in the system message as the model's card says, "
                "and remove the tools from the row; or choose another template (data.template)",
                [],
            )
        rest = "" if part in ("text", "tools", "cut") else f", write the {part} into the content as the model does,"
        return f"choose a template that renders it (data.template){rest} or remove it from the row", []

    def attempt(
        self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: bool = False
    ) -> str:
        """Render turns, with the generation prompt if `prompt`; return an empty text if the template refuses them."""
        try:
            return self.render(self.raw_messages(turns), tools, generation_prompt=prompt)
        except RENDER_ERRORS:
            return ""

    def render(
        self,
        messages: Sequence[RawMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        source: str | None = None,
    ) -> str:
        """Render `messages`; `source` replaces the template's own text. Raises RENDER_ERRORS."""
        try:
            text = self.tokenizer.apply_chat_template(
                self.form.shown(messages),
                chat_template=self.source if source is None else source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.form.tools(tools),
                **self.args,
            )
        except (FlatoutError, MemoryError, *RENDER_ERRORS):
            raise
        except Exception as error:
            # a template is a program: what else Python raises in it is the template's mistake, too
            raise TemplateError(f"{type(error).__name__}: {first_line(error)}") from error
        if not isinstance(text, str):
            raise TypeError(f"the template rendered a {type(text).__name__}, not text")
        if not text.isascii():
            text.encode()  # half of a surrogate pair is no text
        if self.mark:
            text = text.replace(self.mark, PICTURE)
        if not generation_prompt:
            text = text.removesuffix(self.asks)
        return text.replace(_CLOSE, _CLOSE_TAG) if self.form.reasoning in ("last", "prefix") else text

    def raw_messages(self, messages: Sequence[Message]) -> list[RawMessage]:
        """Return the messages in the form that templates read: OpenAI's, with arguments as objects or as JSON text."""
        raws = []
        for message in messages:
            raw: RawMessage = {"role": message.role, "content": message.content}
            if message.reasoning and self.form.reasoning != "fields":
                raw["content"] = self.form.content(message.reasoning, message.content)
            elif message.reasoning is not None:
                # two names are in use: reasoning_content (Qwen, GLM, DeepSeek) and thinking (gpt-oss)
                raw["reasoning_content"] = raw["thinking"] = message.reasoning
            if message.tool_calls:
                raw["tool_calls"] = []
            for index, call in enumerate(message.tool_calls):
                call_id = f"call{index:05d}" if call.call_id is None else call.call_id
                arguments: Any = dict(call.arguments)
                if self.form.arguments_as_text:
                    arguments = json.dumps(call.arguments, ensure_ascii=False)
                function = {"name": call.name, "arguments": arguments}
                raw["tool_calls"].append({"type": "function", "id": call_id, "function": function})
            if message.name is not None:
                raw["name"] = message.name
            if message.tool_call_id is not None:
                raw["tool_call_id"] = message.tool_call_id
            raws.append(raw)
        return raws


@cache
def _set_by_transformers() -> set[str]:
    """Return the variables that apply_chat_template sets itself."""
    from transformers import PreTrainedTokenizerBase

    return set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


def reads(source: str, variable: str) -> bool:
    """Return whether a template reads a variable that the caller may set."""
    return variable not in _set_by_transformers() and bool(re.search(rf"\b{re.escape(variable)}\b", source))


def choose_template(tokenizer: PreTrainedTokenizerBase, template: str | None, tokenizer_name: str) -> ChatTemplate:
    """Return `template` (one of OURS, or a .jinja file), else the tokenizer's own, checked. Raises DataError."""
    name, source = template_text(tokenizer, template, tokenizer_name)
    return ChatTemplate.checked(name, source, tokenizer)


def template_text(
    tokenizer: PreTrainedTokenizerBase | TokenizerFacts, template: str | None, tokenizer_name: str
) -> tuple[str, str]:
    """Return name (for messages) and text of the template to use. Raises DataError if there is none."""
    if template is None:
        own = tokenizer.chat_template
        if isinstance(own, str) and own:
            return "the tokenizer's own", own
        raise DataError(
            f"tokenizer {tokenizer_name!r} has no chat template; name one of {', '.join(OURS)}, or a .jinja file",
            [Fix({"data.template": OURS[0]}, "for example")],
        )
    if template in OURS:
        text = Path(__file__).with_name(f"{template}.jinja").read_text(encoding="utf-8")
        begins = tokenizer.begins_with_bos if isinstance(tokenizer, TokenizerFacts) else begins_with_bos(tokenizer)
        return template, "{{- bos_token -}}\n" * (begins and template == "plain") + text
    path = Path(template)
    try:
        if path.suffix == ".jinja" and path.exists():
            return path.name, path.read_bytes().decode("utf-8")  # bytes: it is written out again unchanged
    except (OSError, ValueError) as error:
        raise DataError(f"data.template {template[:200]!r}: cannot be read: {reason_of(error)}") from error
    near = difflib.get_close_matches(template.lower(), OURS, n=1) or [str(near_path(template) or "")]
    hint = f"; did you mean {near[0]}?" if near[0] else ""
    raise DataError(f"there is no template {template!r}; known: {', '.join(OURS)}, or a .jinja file{hint}")
