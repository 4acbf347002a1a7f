"""Chat templates: which one is used, and rendering messages in transformers' immutable Jinja sandbox."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from flatout.data.conversation import PICTURE, Message, ToolCall
from flatout.data.templates.forms import CLOSE, CLOSE_TAG, Form, RawMessage, shows_reasoning
from flatout.data.tokenizer import TokenizerFacts, begins_with_bos
from flatout.errors import DataError, Fix, FlatoutError, first_line, reason_of
from flatout.io.near_path import near_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OURS = ("chatml", "llama-3", "qwen3", "gemma", "mistral", "phi", "zephyr", "alpaca", "plain")
# What a template can raise: its own raise_exception, an undefined name, a filter on a value of the wrong type.
RENDER_ERRORS = (
    TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
_USUAL = Form()
# variables by which public templates switch reasoning
REASONING_SWITCHES = ("enable_thinking", "thinking", "think", "reasoning", "enable_reasoning", "preserve_thinking")
THOUGHT, TOOL_NAME = "WhyprobethreeQkd", "Lookupsix"
"""What templates are probed with: letters only, which none of them changes, and which occur in no real text."""
TOOLS = ({"type": "function", "function": {"name": TOOL_NAME, "description": "d", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "c"}}}}},)  # fmt: skip
_ASK, _CALL = Message("user", "a"), Message("assistant", "", tool_calls=(ToolCall(TOOL_NAME, {"x": 1}, "call00000"),))
_ANSWER = Message("assistant", "b", reasoning=THOUGHT)


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
    form: Form = _USUAL
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
        for form in (_USUAL, Form(empty_tools=True), Form(parts=True)):
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

    def _find_form(self) -> Form:
        """Return the spelling of calls, tools and reasoning that this template shows; where none, the usual one."""
        form = self.form
        for as_text in (False, True):  # some paste arguments as text
            asked = replace(form, arguments_as_text=as_text)
            if TOOL_NAME in (self._probe(asked, [_ASK, _CALL]) or ""):
                form = asked
                break
        for variable in dict.fromkeys(["tools", *re.findall(r"\b\w*(?:tools|functions)\b", self.source)]):
            asked = replace(form, tools_as=variable)
            if TOOL_NAME in (self._probe(asked, [_ASK], TOOLS) or ""):
                form = asked
                break
        if "think>" not in self.source or THOUGHT in (self._probe(form, [_ASK, _ANSWER]) or ""):
            return form
        prompt = self._probe(form, [_ASK], prompt=True) or ""
        kinds: tuple[Literal["inline", "last", "prefix"], ...] = ("inline", "last", "prefix")
        for kind in kinds:
            asked = replace(form, reasoning=kind, breaks=kind != "prefix" or prompt.endswith("\n"))
            if shows_reasoning(self._probe(asked, [_ASK, _ANSWER]) or "", THOUGHT, prompt):
                return asked
        return form

    def remedy(self, part: str) -> tuple[str, list[Fix]]:
        """Return what a person can do about a part of a row ("reasoning", "tools", ...) that the template drops."""
        if part == "reasoning":
            for name in REASONING_SWITCHES:
                if self.args.get(name) is not True and re.search(rf"\b{name}\b", self.source):
                    switched = replace(self, args={**self.args, name: True})
                    if THOUGHT in (switched._probe(switched._find_form(), [_ASK, _ANSWER]) or ""):
                        fix = Fix({"data.template_args": dict(switched.args)}, "shows it in all rows")
                        return f"give {name} to these rows alone, as chat_template_kwargs, or to all", [fix]
        if part == "tools" and TOOL_NAME in (self._probe(self.form, [_ASK, _CALL]) or ""):
            return (
                "it writes calls, but no list of tools: describe them in the system message as the model's card says, "
                "and remove the tools from the row; or choose another template (data.template)",
                [],
            )
        rest = "" if part in ("text", "tools", "cut") else f", write the {part} into the content as the model does,"
        return f"choose a template that renders it (data.template){rest} or remove it from the row", []

    def _probe(
        self,
        form: Form,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = False,
    ) -> str | None:
        asked = replace(self, form=form)
        try:
            return asked.render(asked.raw_messages(messages), tools, generation_prompt=prompt)
        except RENDER_ERRORS:
            return None

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
        return text.replace(CLOSE, CLOSE_TAG) if self.form.reasoning in ("last", "prefix") else text

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
