"""What a build has stored of conversations, compared with what plain transformers renders of them.

Nothing of flatout is used but the reading of the store. A row ends as accepted (text, answers, stops and prompts are
equal), as told (an answer follows other text than inference shows, and the build says so), or as refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_judge import unclear
from fuzz_template_grammar import OPENS, WRITTEN, Drawn

_WORD = re.compile(r"Zq\d{6}x")
_SAYS_UNLIKE = ("inference shows",)
_SAYS_LOST = ("lost their reasoning", "carry no loss")


@dataclass(frozen=True)
class Sample:
    """A stored sample: its ids, their text, and the character ranges of its labels."""

    ids: list[int]
    mask: list[bool]
    text: str
    ranges: list[tuple[int, int]]


def judge_build(here: Path, drawn: Drawn, rows: Sequence[dict[str, Any]]) -> str | None:
    """Return what is wrong with a built data set, or None."""
    from flatout.data.token_store import TokenStore

    store = TokenStore.open(here / "data/built_dataset/new")
    report = json.loads((store.folder / "report.json").read_text(encoding="utf-8"))
    referee = Referee(here, drawn)
    samples: dict[int, list[Sample]] = {}
    for index in range(store.num_samples):
        ids, mask = (np.asarray(each) for each in store.sample(index).pair)
        samples.setdefault(int(store.rows[index]), []).append(referee.sample(ids, mask))
    unlabelled = {number for numbers in report["rows"].get("no_labels", {}).values() for number in numbers}
    for number, row in enumerate(rows, start=1):
        if number in samples:
            problem = referee.judge(row, samples[number], report["notes"])
        elif refusal := next((told for told in report["bad_rows"] if f"rows.jsonl:{number}:" in told), None):
            problem = unclear(refusal) or referee.needless(row, refusal)
        else:
            trained = any(m["role"] == "assistant" and m.get("train", True) for m in row["messages"])
            is_told = not trained or any(text in note for note in report["notes"] for text in _SAYS_LOST)
            problem = None if number in unlabelled and is_told else "vanished"
        if problem:
            return f"row {number}: {problem}"
    return None


def judge_refusal(here: Path, drawn: Drawn, rows: Sequence[dict[str, Any]], err: str) -> str | None:
    """Return why nothing of a file should have been refused, or None."""
    referee = Referee(here, drawn)
    return next((found for row in rows if (found := referee.needless(row, err))), None)


class Referee:
    """Renders rows with the tokenizer's own apply_chat_template."""

    def __init__(self, here: Path, drawn: Drawn) -> None:
        from transformers import AutoTokenizer

        self.drawn = drawn
        self.tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")

    def sample(self, ids: Any, mask: Any) -> Sample:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        parts = [self.decode(ids[a:b]) for a, b in itertools.pairwise([0, *edges.tolist(), len(ids)])]
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        return Sample(ids.tolist(), mask.tolist(), "".join(parts), list(itertools.pairwise(ends))[1::2])

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))

    def render(self, turns: Sequence[Any], tools: Any, *, prompt: bool = False, marked: bool = False) -> str | None:
        try:
            return self.tokenizer.apply_chat_template(
                list(turns), tools=tools, add_generation_prompt=prompt, tokenize=False, **self.drawn.args,
                chat_template=self.drawn.marked if marked else self.drawn.source,
            )  # fmt: skip
        except Exception:  # noqa: BLE001  (a template raises what it likes)
            return None

    def judge(self, row: dict[str, Any], samples: Sequence[Sample], notes: Sequence[str]) -> str | None:
        """Return what is wrong with the samples of a row: text, labels, or that something was not said."""
        learnt = list[int]()
        for sample in samples:
            problem = f"its text is no rendering of the row: {sample.text!r}"
            for view in self._views(row, sample.text):
                found = view.check(sample, notes)
                if not isinstance(found, str):
                    learnt += found
                    break
                problem = found
            else:
                return problem
        wanted = [k for k, m in enumerate(row["messages"]) if m["role"] == "assistant" and m.get("train", True)]
        if self.drawn.generation == "text":  # its marks leave reasoning out, and what is nothing else
            wanted = [k for k in wanted if k in learnt or not row["messages"][k]["content"].endswith("</think>")]
        is_told = any(text in note for note in notes for text in _SAYS_LOST)
        if sorted(learnt) != wanted and not (is_told and set(learnt) < set(wanted) and len(learnt) == len(set(learnt))):
            return f"answers {wanted} should be learnt, {sorted(learnt)} are"
        return None

    def _views(self, row: dict[str, Any], text: str) -> Iterator[View]:
        """Yield the row or its beginning, in each spelling whose rendering is the text."""
        for end in range(len(row["messages"]), 0, -1):
            turns = row["messages"][:end]
            for spelt in spellings(turns):
                full = self.render(spelt, row.get("tools"))
                if full is None:
                    continue
                stops = self._stops(spelt[-1])
                if text in (full, *(full + stop for stop in stops)):
                    yield View(self, spelt, row.get("tools"), text, full)
                elif self._is_generated(spelt, row.get("tools"), text, ("", *stops)):
                    yield View(self, spelt, row.get("tools"), text, None)

    def _is_generated(self, turns: Sequence[Any], tools: Any, text: str, stops: Sequence[str]) -> bool:
        """Whether a text is what a model shows that thinks in its last answer, where the template would cut it.

        That is the generation prompt, the reasoning in its tags, and the answer and its end as without reasoning.
        """
        found = re.fullmatch(r"\s*(?:<think>)?\s*(.*?)\s*</think>\s*(.*)", turns[-1]["content"], re.DOTALL)
        before = text.rpartition("<think>")[0]
        prompt = self.render(turns[:-1], tools, prompt=True) if turns[1:] else before
        said = [*turns[:-1], {**turns[-1], "content": found[2]}] if found else []
        plain = self.render(said, tools, marked=True) if found else None
        if not found or plain is None or prompt is None or not text.startswith(prompt):
            return False
        tail = plain.rpartition(WRITTEN)[2]
        opens = r"\s*" if prompt.rstrip().endswith("<think>") else r"<think>\s*"
        pattern = rf"{opens}{re.escape(found[1])}\s*</think>\s*{re.escape(found[2].strip())}\s*"
        rest = text[len(prompt) :]
        return any(
            rest.endswith(tail + stop) and re.fullmatch(pattern, rest[: len(rest) - len(tail + stop)]) for stop in stops
        )

    def _stops(self, turn: Any) -> list[str]:
        drawn, told = self.drawn, self.drawn.told_stop
        calls = drawn.call_stops if turn.get("tool_calls") else []
        if drawn.ends or told is None:
            return calls + drawn.stops
        return [] if told == "none" else [*calls, told]

    def needless(self, row: dict[str, Any], refusal: str) -> str | None:
        """Return a complaint if a plain row is refused whose rendering shows that it could be trained."""
        turns = row["messages"]
        roles = [turn["role"] for turn in turns]
        is_plain = all(set(turn) == {"role", "content"} for turn in turns) and "tools" not in row
        is_usual = is_plain and roles in (["user", "assistant"] * n for n in (1, 2, 3))
        texts = [turn["content"] for turn in turns]
        if not is_usual or any(not _WORD.fullmatch(text) for text in texts):
            return None
        full = self.render(turns, None)
        stops = [stop for stop in self._stops(turns[-1]) if stop in self.tokenizer.get_vocab()]
        if full is None or not stops or "train" in self.drawn.options:
            return None
        for k in range(1, len(turns), 2):
            prompt = self.render(turns[:k], None, prompt=True)
            if prompt is None or not full.startswith(prompt) or prompt == self.render(turns[:k], None):
                return None
            behind = full.partition(texts[k])[2].lstrip()
            if not behind.startswith(tuple(stops)) and k < len(turns) - 1:
                return None
        return f"a row that transformers renders as one expects is refused: {refusal}"


@dataclass(frozen=True)
class View:
    """One spelling of a row's beginning, and its text; `full` is its rendering, None if that cuts the reasoning."""

    referee: Referee
    turns: Sequence[Any]
    tools: Any
    text: str
    full: str | None

    def check(self, sample: Sample, notes: Sequence[str]) -> list[int] | str:
        """Return the answers that are learnt, or what is wrong."""
        places = self._places()
        if isinstance(places, str):
            return places
        learnt, left, is_unlike = list[int](), list(sample.ranges), False
        answers = [k for k, turn in enumerate(self.turns) if turn["role"] == "assistant"]
        for place, k in enumerate(answers):
            opens, written = places[place]
            following = places[place + 1][0] if place + 1 < len(places) else len(self.text) + 1
            own = [span for span in left if opens <= span[0] < following]
            left = [span for span in left if span not in own]
            if not own:
                continue
            learnt.append(k)
            found = self._answer(k, own, opens, written, sample)
            if isinstance(found, str):
                return f"answer {k}: {found} in {self._shown(sample)!r}"
            is_unlike |= found
        if left:
            return f"labels outside of answers in {self._shown(sample)!r}"
        if is_unlike and not any(text in note for note in notes for text in _SAYS_UNLIKE):
            return f"silent: inference shows other text before an answer of {self._shown(sample)!r}"
        if lost := self._lost(learnt, notes):
            return lost
        return learnt if self._same_ids(sample) else f"control tokens of the data act as such: {self._shown(sample)!r}"

    def _places(self) -> list[tuple[int, int]] | str:
        """Return where each answer's header ends, and where its text and calls end."""
        if self.full is None:
            prompt = (
                (self.referee.render(self.turns[:-1], self.tools, prompt=True) or "") if self.turns[1:] else self.text
            )
            before = replace(self, turns=self.turns[:-1], full=self.referee.render(self.turns[:-1], self.tools))
            earlier = before._places() if len(self.turns) > 1 else []
            word = _WORD.findall(self.turns[-1]["content"])[-1]
            word += self.turns[-1]["content"].rpartition(word)[2].rstrip()
            end = self.text.rfind(word) + len(word)
            # generation marks may begin where they like in the turn
            asked = [*_WORD.findall(self._said(self.turns[-2] if self.turns[1:] else {})), ""][0]
            begin = self.text.find(asked) + len(asked) if self.referee.drawn.generation else len(prompt)
            opens = min(begin, self.text.rfind("<think>"))
            return earlier if isinstance(earlier, str) else [*earlier, (opens, end)]
        marked = self.referee.render(self.turns, self.tools, marked=True) or ""
        pieces = re.split(f"([{OPENS}{WRITTEN}])", marked)
        if "".join(pieces[::2]) != self.full:
            return "the marked template is another"
        ends = list(itertools.accumulate(map(len, pieces[::2])))
        return list(zip(ends[:-1:2], ends[1::2], strict=True))

    def _answer(self, k: int, own: Sequence[tuple[int, int]], opens: int, written: int, sample: Sample) -> bool | str:
        """Return whether an answer follows other text than inference shows, or what is wrong with its labels."""
        (start, end), text, drawn = (own[0][0], own[-1][1]), self.text, self.referee.drawn
        if len(own) > 1:
            return f"{len(own)} ranges"
        words = _WORD.findall(self._said(self.turns[k]))
        lost = {word for word in words if word not in text}
        if drawn.generation == "text":  # its marks leave the reasoning out
            lost |= set(words) - set(_WORD.findall(self.turns[k]["content"].rpartition("</think>")[2]))
        # the first token of all has nothing that predicts it
        if missing := [word for word in words if word not in text[start:end] and word not in lost and start > 1]:
            return f"{missing} carry no loss"
        found = self._begin(k, start, own[0] == sample.ranges[0], sample)
        if isinstance(found, str):
            return found
        if end < written:
            return "it ends before its text does"
        rest, stops = text[written:end].strip(), self.referee._stops(self.turns[k])
        ends = [*stops, *map("".join, itertools.permutations(stops, 2))] if stops else [""]
        if drawn.call_end and self.turns[k].get("tool_calls") and not drawn.ends:
            ends.append(drawn.call_end)  # no token, but what the template writes
        return found if rest in ends else f"ends with {text[written:end]!r} instead of {stops}"

    def _begin(self, k: int, start: int, is_first: bool, sample: Sample) -> bool | str:
        """Return whether inference shows other text before an answer, or what is wrong with its beginning."""
        drawn, text = self.referee.drawn, self.text
        prompt = self.referee.render(self.turns[:k], self.tools, prompt=True)
        if prompt is None or not text.startswith(prompt):
            return k > 0 and not drawn.generation
        if start < len(prompt):
            return False if drawn.generation else "part of the generation prompt is learnt"
        skipped = text[len(prompt) : start]
        if not skipped and is_first and self._same_ids(sample, typed=False):
            given = self.referee.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if sample.ids[: sample.mask.index(True)] != given:
                return "the ids before it are not those of the generation prompt"
        # empty reasoning carries no loss where that is asked
        is_masked = "mask" in drawn.options and re.fullmatch(r"(\s|</?think>)+", skipped)
        return bool(skipped) and not is_masked and k > 0 and not drawn.generation

    @staticmethod
    def _said(turn: Any) -> str:
        said = {name: turn[name] for name in ("content", "reasoning_content", "tool_calls") if turn.get(name)}
        return json.dumps(said)

    def _lost(self, learnt: Sequence[int], notes: Sequence[str]) -> str | None:
        is_told = any(text in note for note in notes for text in _SAYS_LOST)
        for k, turn in enumerate(self.turns):
            missing = {word for word in _WORD.findall(self._said(turn)) if word not in self.text}
            thought = [turn.get("reasoning_content") or "", turn["content"].rpartition("</think>")[0]]
            may_be = set(_WORD.findall(" ".join(thought))) if k not in learnt or is_told else set()
            if missing - (may_be if turn["role"] == "assistant" else set()):
                return f"{missing} of messages[{k}] are not in its text {self.text!r}"
        if self.tools and not all(tool["function"]["name"] in self.text for tool in self.tools):
            return f"tools are not in its text {self.text!r}"
        return None

    def _same_ids(self, sample: Sample, *, typed: bool = True) -> bool:
        """Whether each special token is as often in the ids as the template, not the data, writes it."""
        tokenizer = self.referee.tokenizer
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and not re.fullmatch(r"</?think>", token.content):
                of_data = sum(str(turn["content"]).count(token.content) for turn in self.turns) if typed else 0
                if sample.ids.count(token_id) != self.text.count(token.content) - of_data:
                    return False
        return True

    def _shown(self, sample: Sample) -> str:
        edges = dict.fromkeys([a for a, _ in sample.ranges], "⟦") | dict.fromkeys([b for _, b in sample.ranges], "⟧")
        return "".join(edges.get(at, "") + letter for at, letter in enumerate(self.text + " "))


def spellings(turns: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield turns in the ways in which templates read them: where reasoning stands, and how arguments are written."""
    thinks = any("reasoning_content" in turn or "</think>" in turn["content"] for turn in turns)
    calls = any("tool_calls" in turn for turn in turns)
    for inside, as_text in itertools.product((None, False, True)[: 3 if thinks else 1], (False, True)[: 1 + calls]):
        yield [_spelt(turn, inside, as_text) for turn in turns]


def _spelt(turn: Any, inside: bool | None, as_text: bool) -> Any:
    """Return a turn with reasoning inside its content, outside of it, or where it is."""
    copy = {name: value for name, value in turn.items() if name != "train"}
    if (
        "</think>" in copy["content"]
        and copy["role"] == "assistant"
        and "reasoning_content" not in copy
        and inside is False
    ):
        thought, _, rest = copy["content"].partition("</think>")
        copy |= {"reasoning_content": thought.replace("<think>", "").strip(), "content": rest.strip()}
    if inside and copy.get("reasoning_content"):
        copy["content"] = f"<think>\n{copy.pop('reasoning_content')}\n</think>\n\n{copy['content']}"
    if "reasoning_content" in copy:
        copy["thinking"] = copy["reasoning_content"]
    if as_text and copy.get("tool_calls"):
        functions = [call["function"] for call in copy["tool_calls"]]
        texts = [f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)} for f in functions]
        copy["tool_calls"] = [c | {"function": f} for c, f in zip(copy["tool_calls"], texts, strict=True)]
    return copy
