"""Random chat templates with the features that public ones have, and random conversations for them.

A template is written twice: as it is, and with private-use characters where an answer opens (its header ends) and where
its text and calls end. Both are rendered by transformers, so where an answer stands is known without flatout.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

OPENS, WRITTEN = "\ue000", "\ue001"
_TAG, _OUT = "tag", "out"
_Piece = tuple[str, str]
ROLES = ("system", "user", "assistant", "tool")
# how turns open: the text before a role's turn, and the tokens in it; {} is the role
_HEADERS = {
    "chatml": ("<|im_start|>{}\n", ["<|im_start|>"]),
    "by role": ("<|{}|>", [f"<|{role}|>" for role in (*ROLES, "model", "human")]),
    "by role, line": ("<|{}|>\n", [f"<|{role}|>" for role in (*ROLES, "model", "human")]),
    "header": ("<|sh|>{}<|eh|>\n\n", ["<|sh|>", "<|eh|>"]),
    "gemma": ("<start_of_turn>{}\n", ["<start_of_turn>"]),
    "wide bars": ("<｜{}｜>", [f"<｜{role}｜>" for role in (*ROLES, "model", "human")]),
    "brackets": ("[{}]", []),
    "words": ("### {}:\n", []),
    "colon": ("{}: ", []),
    "nothing": ("", []),
}
# those that the tokenizer of all cases has
_KNOWN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_ENDS = ("<|im_end|>", "<|eot|>", "<end_of_turn>", "</s>")


@dataclass
class Drawn:
    """A template: `source`, the same with marks, and what is known of it by the way it was made.

    `stops` end an answer and `call_stops` one that calls tools, which `call_end` closes; empty if nothing does. `ends`
    says that they are the template's own, not the next turn's marker, which `told_stop` replaces. `tokens` are those
    that its tokenizer has, and whether each is special. `options` are the command line's, `args` variables of the
    template.
    """

    source: str
    marked: str
    tokens: dict[str, bool]
    bos: str | None
    eos: str
    stops: list[str] = field(default_factory=list)
    call_stops: list[str] = field(default_factory=list)
    call_end: str = ""
    ends: bool = False
    generation: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    told_stop: str | None = None


def draw_template(rng: random.Random) -> Drawn:
    """Return a random template."""
    return _Writer(rng).drawn()


class _Writer:
    """Draws the features of one template, then writes it piece by piece."""

    def __init__(self, rng: random.Random) -> None:
        pick = self.pick = rng.choice
        self.rng = rng
        self.header, self.header_tokens = _HEADERS[pick(list(_HEADERS))]
        self.names = {"assistant": pick(("assistant", "assistant", "model")), "user": pick(("user", "user", "human"))}
        self.eos = pick(("<|endoftext|>", "<|end_of_text|>"))
        self.bos = pick((None, "<|begin|>", "<s>"))
        self.writes_bos = self.bos is not None and rng.random() < 0.7
        end = pick((*_ENDS, *_ENDS, "eos", "eos", "eos", ""))
        self.end = self.eos if end == "eos" else end
        self.end_as_variable = end == "eos" and rng.random() < 0.5
        self.end_when = pick(("every turn", "every turn", "answers", "answers", "not last", "no prompt", "whole text"))
        self.before_end, self.after_end = pick(("", "", "", "\n", " ")), pick(("", "\n", "\n", "\n\n"))
        self.system = pick(("turn", "turn", "merged", "merged", "refused", "dropped", "bare", "default"))
        self.tools = pick(("dropped", "dropped", "system", "system", "first", "last question", "refused"))
        self.calls = pick(("json", "json", "json", "python", "text", "dropped", "refused"))
        self.call_end = pick(("", "", "<|call|>"))
        self.results = pick(("turn", "turn", "question", "inside", "dropped", "refused"))
        self.trims = {role: rng.random() < 0.5 for role in ROLES}
        self.strict = rng.random() < 0.2
        self.think = pick((("<think>\n", "\n</think>\n\n"), ("<think>", "</think>"), ("<think>\n", "\n</think>\n")))
        self.reasoning = pick(("none", "none", "field", "field", "field", "thinking", "split", "cut"))
        self.reasoning_when = pick(("always", "after the last question", "after the last question", "in the last"))
        self.empty = pick(("nothing", "nothing", "closed", "close", "closed in the last"))
        self.prompt_thinks = pick(("no", "no", "opens", "closed", "switch", "bare"))
        self.generation = pick(("",) * 8 + ("whole", "body", "text"))
        self.prompt_when = pick(("always", "always", "always", "not after an answer", "in the loop"))
        self.spaces = pick(("tight", "tight", "lines", "indented", "raw"))
        self.knows = pick(("special", "special", "special", "special", "added", "mixed", "none"))
        self.header_space = pick(("", "", "", " "))

    def opener(self, role: str) -> str:
        return self.header.format(self.names.get(role, role)) + (self.header_space if role == "assistant" else "")

    def drawn(self) -> Drawn:
        source, marked = (self._joined(list(self._pieces(marks))) for marks in (False, True))
        tokens = {token: True for token in [*self.header_tokens, "<think>", "</think>", "<|call|>", *_ENDS]
                  if token in source or token in self.header_tokens}  # fmt: skip
        if self.knows == "none":
            tokens = {token: True for token in tokens if token == self.end and self.rng.random() < 0.7}
        elif self.knows != "special":
            tokens = {token: self.knows == "mixed" and self.rng.random() < 0.5 for token in tokens}
        drawn = Drawn(source, marked, tokens, self.bos, self.eos, generation=self.generation, call_end=self.call_end)
        if self.end:
            drawn.stops, drawn.call_stops, drawn.ends = [self.end], [self.call_end or self.end], True
        else:  # the next turn's marker, if it is a token
            known = dict.fromkeys((*tokens, *_KNOWN))
            drawn.stops = [token for token in known if self.opener("user").startswith(token)]
            result = self.opener({"turn": "tool", "question": "user"}.get(self.results, "assistant"))
            drawn.call_stops = [token for token in known if token == self.call_end or result.startswith(token)]
        if "enable_thinking" in source and self.rng.random() < 0.4:
            drawn.args = {"enable_thinking": self.rng.random() < 0.5}
        if not self.end and self.rng.random() < 0.5:
            drawn.told_stop = self.pick((self.eos, self.eos, "none", "<|made_up|>"))
        options = {
            "--lost-reasoning": (None, None, None, "split", "mask", "train"),
            "--empty-reasoning": (None, None, None, "mask"),
            "--end-of-turn": (drawn.told_stop,),
        }
        for name, values in options.items():
            if (value := self.pick(values)) is not None:
                drawn.options += [name, value]
        for name, value in drawn.args.items():
            drawn.options += ["--template-arg", f"{name}={str(value).lower()}"]
        return drawn

    def _joined(self, pieces: list[_Piece]) -> str:
        """Write pieces as Jinja, in one of the ways in which people lay it out."""
        parts, depth = [], 0
        for kind, text in pieces:
            if kind == _TAG:
                depth -= text.startswith(("end", "el"))
            indent = "\n" + "    " * depth
            if kind == _OUT and self.spaces == "raw" and text[:1] == text[-1:] == "'" and _is_raw(text[1:-1]):
                parts.append(text[1:-1])
            elif self.spaces == "lines" and kind == _TAG:
                parts.append(f"{{% {text} %}}\n")
            else:
                dash = "-" if self.spaces == "indented" else ""
                body = f"{{%{dash} {text} %}}" if kind == _TAG else f"{{{{{dash} {text} }}}}"
                parts.append(f"{indent if dash else ''}{body}")
            if kind == _TAG:
                depth += text.startswith(("for", "if", "el"))
        return "".join(parts)

    def _pieces(self, marks: bool) -> Iterator[_Piece]:
        yield from _jinja(
            "{% set ns = namespace(last=-1, system='', tool=false) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        )
        if self.writes_bos:
            yield _OUT, "bos_token"
        yield from self._before_the_turns()
        yield _TAG, "for m in messages"
        if self.strict:
            yield from _jinja(
                "{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role and m.role != 'tool' %}"
                "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
            )
        turns = {
            "if m.role == 'system'": self._system(), "elif m.role == 'user'": self._user(),
            "elif m.role == 'assistant'": self._assistant(marks), "elif m.role == 'tool'": self._result(),
        }  # fmt: skip
        for condition, pieces in turns.items():
            yield _TAG, condition
            yield from pieces
        yield _TAG, "endif"
        if self.prompt_when == "in the loop":
            yield from self._prompt("loop.last and add_generation_prompt")
        yield _TAG, "endfor"
        if self.end and self.end_when == "whole text":
            yield from _if("not add_generation_prompt", [(_OUT, _quoted(self.end))])
        if self.prompt_when == "always":
            yield from self._prompt("add_generation_prompt")
        elif self.prompt_when == "not after an answer":
            yield from self._prompt("add_generation_prompt and messages[-1].role != 'assistant'")

    def _before_the_turns(self) -> Iterator[_Piece]:
        if self.system == "default":
            default = self._plain_turn("system", "'You are a helpful assistant.'")
            yield from _if("messages[0].role != 'system'", default)
        if self.tools == "refused":
            yield from _if("tools", _jinja("{{ raise_exception('This template does not support tools') }}"))
        elif self.tools == "first" or (self.tools == "system" and self.system not in ("turn", "default")):
            listed = "{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]\\n' }}"
            yield from _if("tools", _jinja(listed))
        elif self.tools == "system" and self.system == "turn":
            tools = self._plain_turn("system", "'Tools: ' + (tools | tojson)")
            yield from _if("tools and messages[0].role != 'system'", tools)

    def _system(self) -> Iterator[_Piece]:
        content = self._content("system")
        if self.system == "refused":
            yield _OUT, "raise_exception('System role not supported')"
        elif self.system == "merged":
            yield _TAG, f"set ns.system = {content} + '\\n\\n'"
        elif self.system == "bare":
            yield _OUT, content
            yield _OUT, _quoted("\n\n")
        elif self.system in ("turn", "default"):
            tools = " + (('\\n\\nTools: ' + (tools | tojson)) if tools else '')" if self.tools == "system" else ""
            yield from self._plain_turn("system", content + tools)

    def _user(self) -> Iterator[_Piece]:
        yield _OUT, _quoted(self.opener("user"))
        if self.tools == "last question":
            yield from _if("tools and loop.index0 == ns.last", [(_OUT, "'Tools: ' + (tools | tojson) + '\\n\\n'")])
        if self.system == "merged":
            yield from _jinja("{{ ns.system }}{% set ns.system = '' %}")
        yield _OUT, self._content("user")
        yield from self._ended(answers=False)

    def _plain_turn(self, role: str, text: str) -> Iterator[_Piece]:
        yield _OUT, _quoted(self.opener(role))
        yield _OUT, text
        yield from self._ended(answers=False)

    def _ended(self, *, answers: bool) -> Iterator[_Piece]:
        """Write the end of a turn where this template writes one."""
        conditions = {"not last": "not loop.last", "no prompt": "not (loop.last and add_generation_prompt)"}
        if self.end and self.end_when != "whole text" and (answers or self.end_when != "answers"):
            before = [(_OUT, _quoted(self.before_end))] if answers and self.before_end else []
            end = [*before, (_OUT, "eos_token" if self.end_as_variable else _quoted(self.end))]
            condition = conditions.get(self.end_when) if answers else None
            yield from _if(condition, end) if condition else end
        if self.after_end:
            yield _OUT, _quoted(self.after_end)

    def _assistant(self, marks: bool) -> Iterator[_Piece]:
        yield _OUT, _quoted(self.opener("assistant"))
        if marks:
            yield _OUT, f"'{OPENS}'"
        if self.generation in ("whole", "body"):
            yield _TAG, "generation"
        yield from self._thought()
        if self.generation == "text":
            yield _TAG, "generation"
        yield _OUT, "text | trim" if self.trims["assistant"] else "text"
        yield from self._calls()
        if marks:
            yield _OUT, f"'{WRITTEN}'"
        if self.generation in ("body", "text"):
            yield _TAG, "endgeneration"
        if self.call_end and self.calls not in ("dropped", "refused"):
            call_end = [(_OUT, _quoted(self.call_end)), (_TAG, "else")]
            yield from _if("m.tool_calls", [*call_end, *self._ended(answers=True)])
        else:
            yield from self._ended(answers=True)
        if self.generation == "whole":
            yield _TAG, "endgeneration"

    def _thought(self) -> Iterator[_Piece]:
        """Set `text`, and write reasoning, or what stands for it."""
        yield from _jinja("{% set text = m.content if m.content is string else '' %}{% set thought = '' %}")
        if self.reasoning in ("field", "thinking"):
            name = "reasoning_content" if self.reasoning == "field" else "thinking"
            yield from _if(f"m.{name} is string", [(_TAG, f"set thought = m.{name}")])
        if self.reasoning in ("split", "cut"):
            taken = "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
            rest = "{% set text = text.split('</think>')[-1].lstrip('\\n') %}"
            yield from _if("'</think>' in text", _jinja(taken * (self.reasoning == "split") + rest))
        when = {
            "always": "true", "after the last question": "loop.index0 > ns.last", "in the last": "loop.last",
        }[self.reasoning_when]  # fmt: skip
        opened, close = self.think
        yield _TAG, f"if thought and {when}"
        yield from ((_OUT, text) for text in (_quoted(opened), "thought", _quoted(close)))
        empties = {
            "closed": (when, opened + close), "close": ("true", close.lstrip()),
            "closed in the last": ("loop.last", opened + close),
        }  # fmt: skip
        if self.empty in empties:
            condition, text = empties[self.empty]
            yield _TAG, f"elif {condition}"
            yield _OUT, _quoted(text)
        yield _TAG, "endif"

    def _calls(self) -> Iterator[_Piece]:
        ways = {
            "json": "{{ '\\n<tool_call>\\n' }}{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
            "{{ '\\n</tool_call>' }}",
            "text": "{{ '<call>' + f.name + '\\n' + f.arguments + '</call>' }}",
            "python": "{{ '[' + f.name + '(' }}{% for k, v in f.arguments.items() %}"
            "{{ k + '=' + (v | tojson) + (', ' if not loop.last else '') }}{% endfor %}{{ ')]' }}",
        }
        if self.calls == "refused":
            yield from _if("m.tool_calls", _jinja("{{ raise_exception('Tool calls are not supported') }}"))
        elif self.calls in ways:
            each = "{% for c in m.tool_calls %}{% set f = c.function %}" + ways[self.calls] + "{% endfor %}"
            yield from _if("m.tool_calls", _jinja(each))

    def _result(self) -> Iterator[_Piece]:
        if self.results == "refused":
            yield _OUT, "raise_exception('Tool results are not supported')"
        elif self.results == "question":
            opened = _quoted(f"{self.opener('user')}<tool_response>\n")
            closed = _quoted("\n</tool_response>")
            yield from ((_OUT, text) for text in (opened, self._content("tool"), closed))
            yield from self._ended(answers=False)
        elif self.results == "inside":
            yield _OUT, f"'<result>' + {self._content('tool')} + '</result>'"
        elif self.results == "turn":
            yield from self._plain_turn("tool", self._content("tool"))

    def _content(self, role: str) -> str:
        return "m.content | trim" if self.trims[role] else "m.content"

    def _prompt(self, condition: str) -> Iterator[_Piece]:
        opened, close = self.think
        thinks = {"opens": opened, "closed": opened + close, "bare": close.lstrip()}.get(self.prompt_thinks, "")
        asked = [(_OUT, _quoted(self.opener("assistant") + thinks))]
        if self.prompt_thinks == "switch":
            shut = [(_OUT, _quoted(opened + close))]
            asked += _if("enable_thinking is defined and not enable_thinking", shut)
        yield from _if(condition, asked)


def _if(condition: str, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    yield _TAG, f"if {condition}"
    yield from pieces
    yield _TAG, "endif"


def _jinja(text: str) -> Iterator[_Piece]:
    """The pieces of a text that is all tags and outputs."""
    for tag, out in re.findall(r"{% (.*?) %}|{{ (.*?) }}", text):
        yield (_TAG, tag) if tag else (_OUT, out)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'").replace("\n", "\\n") + "'"


def _is_raw(text: str) -> bool:
    """Whether text stays the same outside of an expression, also beside tags."""
    return bool(text) and text == text.strip() and not any(mark in text for mark in ("\\", "{", "}", OPENS, WRITTEN))
