"""Chat templates as a person's model may have them, with conversations: right, told, or refused in one sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_judge import Case
from fuzz_template_grammar import Drawn, draw_template
from fuzz_template_judge import judge_build, judge_refusal
from fuzz_world import World, both

NUM_TEMPLATES = 5000
ROWS_PER_TEMPLATE = 6
TOOLS = [{"type": "function", "function": {"name": name, "description": f"Tells the {key}.", "parameters": {
    "type": "object", "properties": {key: {"type": "string", "description": f"A {key}."}}, "required": [key]}}}
    for name, key in (("get_weather", "city"), ("get_time", "zone"))]  # fmt: skip
_NOISE = (
    "", "", "", "", "", "", " ", "\n", "  \n\n", " é世界🙂", " a", " <b>&amp;</b>", ' "x" \\n', " {{ x }} {% y %}",
    " assistant", " user\n", "\n\n\n", "\t", " <|nothing|>", " ### assistant:\n", " None", " [INST]", "\r\n", " </i>",
)  # fmt: skip


def cases(world: World) -> Iterator[Case]:
    """Templates by number: the same number is the same template with the same conversations."""
    for number in range(NUM_TEMPLATES):
        drawn = draw_template(random.Random(f"template {number}"))
        rows = partial(_rows, number, drawn)
        yield Case(
            f"template {number}",
            (
                "data", "build", "rows.jsonl", "--tokenizer", "tokenizer", "--template", "chat.jinja", "--name", "new",
                "--num-procs", "1", "--max-tokens", "0", "--on-bad-row", "skip", *drawn.options,
            ),
            both(world.put("model"), partial(_make, drawn, rows)),
            "either",
            done=lambda here, out, drawn=drawn, rows=rows: judge_build(here, drawn, rows()),
            refused=lambda here, err, drawn=drawn, rows=rows: judge_refusal(here, drawn, rows(), err),
            drawn=True,
        )  # fmt: skip


def _rows(number: int, drawn: Drawn) -> list[dict[str, Any]]:
    rng = random.Random(f"rows {number}")
    return [conversation(rng, drawn) for _ in range(ROWS_PER_TEMPLATE)]


def _make(drawn: Drawn, rows: Callable[[], list[dict[str, Any]]], here: Path) -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    for text, is_special in drawn.tokens.items():
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special)], special_tokens=is_special)
    tokenizer.add_special_tokens({"eos_token": drawn.eos, **({"bos_token": drawn.bos} if drawn.bos else {})})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(here / "tokenizer")
    (here / "chat.jinja").write_bytes(drawn.source.encode())
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


def conversation(rng: random.Random, drawn: Drawn) -> dict[str, Any]:
    """Return a row. Each text in it has a word of its own."""
    kind = rng.choice(("chat", "chat", "chat", "reasoning", "reasoning", "tools"))
    write = _Turns(rng, kind, list(drawn.tokens))
    turns: list[dict[str, Any]] = []
    if rng.random() < 0.35:
        turns.append({"role": "system", "content": write.text()})
    if rng.random() < 0.03:
        turns.append(write.answer())
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        turns += [{"role": "user", "content": write.text()} for _ in range(2 if rng.random() < 0.04 else 1)]
        calls = kind == "tools" and rng.random() < 0.8
        turns += write.calls() if calls else ()
        if not calls or rng.random() > 0.15:  # a call may be the answer
            turns.append(write.answer())
    if rng.random() < 0.04:
        turns.append({"role": "user", "content": write.text()})
    return {"messages": turns, **({"tools": TOOLS} if kind == "tools" and rng.random() < 0.8 else {})}


class _Turns:
    """Writes the turns of one conversation."""

    def __init__(self, rng: random.Random, kind: str, tokens: list[str]) -> None:
        self.rng, self.thinks = rng, kind == "reasoning"
        self.noise, self.tokens = (_NOISE, tokens) if rng.random() < 0.3 else (("",), [])

    def word(self) -> str:
        return f"Zq{self.rng.randrange(10**6):06d}x"

    def text(self) -> str:
        typed = self.rng.choice(self.tokens) if self.tokens and self.rng.random() < 0.1 else ""
        return f"{self.rng.choice(self.noise)}{self.word()}{typed}{self.rng.choice(self.noise)}"

    def answer(self, **fields: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text(), **fields}
        given = self.rng.choice(("none", "field", "field", "inline", "empty")) if self.thinks else "none"
        if given == "inline":
            message["content"] = f"<think>\n{self.word()}\n</think>\n\n{self.word()}"
        elif given != "none":
            message["reasoning_content"] = self.word() if given == "field" else ""
        return message | ({"train": False} if self.rng.random() < 0.06 else {})

    def calls(self) -> Iterator[dict[str, Any]]:
        """Yield an answer that calls one or two tools, and their results; now and then a second round."""
        for turn in range(self.rng.choice((1, 1, 1, 2))):
            ids = [f"call{turn}000{place}" for place in range(self.rng.choice((1, 1, 2)))]
            named = list(zip(ids, (("get_weather", "city"), ("get_time", "zone")), strict=False))
            calls = [
                {"type": "function", "id": call_id, "function": {"name": name, "arguments": {key: self.word()}}}
                for call_id, (name, key) in named
            ]
            yield self.answer(content=self.text() if self.rng.random() < 0.3 else "", tool_calls=calls)
            for call_id, (name, _) in named:
                yield {"role": "tool", "content": self.text(), "tool_call_id": call_id, "name": name}
