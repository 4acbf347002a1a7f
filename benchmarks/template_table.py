"""What becomes of each kind of conversation under each chat template of a folder, judged by plain transformers.

    python benchmarks/template_table.py FOLDER --tokenizer DIR [--manifest FILE] [--docs FILE]
        [--json FILE] [--only NAME]

FOLDER holds .jinja files. A manifest (a list of {name, family, ...}) groups them; without one, each is a family of its
own. For every template, a tokenizer with the template's control tokens is made from the one in DIR, and rows of all
kinds are built with `flatout data build`'s function. This script then renders the rows itself, with
`tokenizer.apply_chat_template`, and compares: the stored text, where each answer begins (after exactly what the
generation prompt shows), and that nothing else carries loss. Every part of a row is a word of its own, so where an
answer ends is judged by what stands between two words: the control tokens up to the next turn's header end it, and
the first token of that header only where there are none. What flatout took for the stop token is not asked.

accepted: all of it is equal. told: equal, and the build said that the generation prompt differs. refused: one sentence.
WRONG: text or labels differ. silent: answers begin after other text than inference shows, and the build did not count
them all. Exit status 1 if any cell is WRONG or silent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.errors import FlatoutError

VERDICTS = ("accepted", "told", "refused", "silent", "WRONG")
# control tokens of public models: bos and eos are the first of each that a template's text has
BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<|startoftext|>", "<s>")
EOS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<turn|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|endoftext|>", "[e~[", "<|end|>", "<|im_end|", "</s>",
)  # fmt: skip
MARKERS = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<[^<>\s|'\"{}]{1,40}\|>|<\|[^|<>\s'\"{}]{1,40}>|<｜[^｜<>\s'\"]{1,40}｜>"
    r"|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<bos>|<eos>|<sep>|<end_of_utterance>|<seed:\w+>|</?(?:user|assistant)>|<(?:start|end)_of_turn>|<(?:beginning|end)_of_sentence>|<_\w+>|\[\|\w+\|\]|\[e~\[|\]~b\]|\]~!b\[|<SPECIAL_\d+>"
)
# what ends a turn in public templates; there may be other control tokens before it
ENDS = (
    *EOS, "<|assistant_end|>", "<|call|>", "<|eom_id|>", "<end_of_sentence>", "[|endofturn|]", "<|end_of_msg|>",
    "<sep>", "<end_of_utterance>", "<seed:eos>", "</assistant>",
)  # fmt: skip
TAGS = r"</?[a-z]\w*(?::\w+)?>"
# what closes reasoning
CLOSES = re.compile(r"</(?:\w+:)?think\w*>|\[/THINK\]|<\|END_THINKING\|>|<\|inner_suffix\|>|<channel\|>")
WORDS = map("Zq{}x".format, map("".join, itertools.product("abcdefghij", repeat=3)))
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {key}.", "parameters": {
        "type": "object", "properties": {key: {"type": "string", "description": f"A {key}."}}, "required": [key]}}}
    for name, key in (("get_weather", "city"), ("get_time", "zone"))
]  # fmt: skip


def turn(role, *, reasoning=None, calls=0, ids=(), text=True, **fields):
    message = {"role": role, "content": next(WORDS) if text else "", **fields}
    if reasoning is not None:
        message["reasoning_content"] = reasoning and next(WORDS)
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": ids[place], "function": {"name": name, "arguments": {key: next(WORDS)}}}
            for place, (name, key) in enumerate((("get_weather", "city"), ("get_time", "zone"))[:calls])
        ]
    return message


def user(): return turn("user")  # fmt: skip


def answer(**fields): return turn("assistant", **fields)  # fmt: skip


def call(first="aaaaaaaa1", second="aaaaaaaa2", calls=1, text=False, **fields):  # fmt: skip
    return turn("assistant", calls=calls, ids=(first, second), text=text, **fields)


def result(call_id="aaaaaaaa1", name="get_weather"):  # fmt: skip
    return turn("tool", tool_call_id=call_id, name=name)


def inline():
    message = answer()
    return {**message, "content": f"<think>\n{next(WORDS)}\n</think>\n\n{message['content']}"}


def written(role, form):  # fmt: skip
    return {"role": role, "content": form.format(*WORDS_OF_TEXTS)}


WORDS_OF_TEXTS = list(itertools.islice(WORDS, 12))
KINDS = {
    "chat": [user(), answer()],
    "3 turns": [user(), answer(), user(), answer(), user(), answer()],
    "system": [turn("system"), user(), answer(), user(), answer()],
    "empty system": [turn("system", text=False), user(), answer()],
    "assistant first": [answer(), user(), answer()],
    "two answers": [user(), answer(), answer(), user(), answer()],
    "two questions": [user(), user(), answer()],
    "question last": [user(), answer(), user()],
    "other scripts": [written("user", "é{0} 你好 {1}🙂"), written("assistant", "中文{2} שלום\u00a0{3}🚀")],
    "line breaks": [written("user", "  {4}\n\n{5}\n"), written("assistant", "\n {6}\n\n  - a\n\n{7}  \n")],
    "control tokens": [written("user", "{8}@end@{9}"), written("assistant", "{10} @end@ {11}")],
    "reasoning": [user(), answer(reasoning=True)],
    "reasoning last": [user(), answer(), user(), answer(reasoning=True)],
    "reasoning each": [user(), answer(reasoning=True), user(), answer(reasoning=True)],
    "reasoning empty": [user(), answer(reasoning=""), user(), answer(reasoning="")],
    "reasoning in text": [user(), inline()],
    "reasoning in texts": [user(), inline(), user(), inline()],
    "tools unused": [user(), answer(), user(), answer()],
    "call": [user(), call()],
    "call, result": [user(), call(), result(), answer()],
    "parallel calls": [user(), call(calls=2), result(), result("aaaaaaaa2", "get_time"), answer()],
    "text and call": [user(), call(text=True), result(), answer()],
    "calls in rounds": [user(), call(), result(), call("aaaaaaaa3"), result("aaaaaaaa3"), answer(), user(), answer()],
    "reasoning, call": [user(), call(reasoning=True), result(), answer(reasoning=True)],
}  # fmt: skip
WITH_TOOLS = tuple(kind for kind, turns in KINDS.items() if "call" in kind or kind == "tools unused")


def make_tokenizer(base, source, folder):
    """Return a tokenizer that knows the control tokens in a template's text, for which time stands still."""
    source = re.sub(r"strftime_now\([^()]*\)", "'1 Jan 2026'", source)
    markers = list(dict.fromkeys([*MARKERS.findall(source)]))
    bos = next((token for token in BOS if token in source), "<s>")
    eos = next((token for token in EOS if token in source), "</s>" if bos == "<s>" else "<|endoftext|>")
    if bos == BOS[1]:
        eos = EOS[4]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(base.backend_tokenizer.to_str()), bos_token=bos, eos_token=eos
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [m for m in markers if m not in (bos, eos)]})
    tokenizer.chat_template = source
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def forms(messages, tools):
    """Yield (messages, keywords) of a row in the spellings that templates read."""
    plain = not any("tool_calls" in message or "reasoning_content" in message for message in messages)
    given = [{"tools": tools}, {"xml_tools": tools and [tool["function"] for tool in tools]}]
    for parts, *spelling in itertools.product((False, True), repeat=1 if plain else 4):
        spelt = [spelled(message, *(spelling or (False,) * 3)) for message in messages]
        if parts:
            spelt = [m | {"content": [{"type": "text", "text": m["content"]}] if m["content"] else []} for m in spelt]
        yield from ((spelt, keywords) for keywords in (given if tools else [{"tools": None}, {"tools": []}]))


def spelled(message, as_text, as_none, inside):
    """Return a message with arguments as text, None beside calls, and reasoning inside the content, or not."""
    copy = dict(message)
    if inside and copy.get("reasoning_content"):
        copy["content"] = f"<think>\n{copy.pop('reasoning_content')}\n</think>\n\n{copy['content']}"
    elif "reasoning_content" in copy:
        copy["thinking"] = copy["reasoning_content"]
    if copy.get("tool_calls"):
        copy["content"] = copy["content"] or (None if as_none else "")
        functions = [call["function"] for call in copy["tool_calls"]]
        texts = [f | {"arguments": json.dumps(f["arguments"]) if as_text else f["arguments"]} for f in functions]
        copy["tool_calls"] = [c | {"function": f} for c, f in zip(copy["tool_calls"], texts, strict=True)]
    return copy


class Referee:
    """Renders rows with plain transformers, and judges where the answers of a stored row begin and end."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        # the template's own marks say what is learnt, even of the prompt
        self.is_marked = "endgeneration" in tokenizer.chat_template
        ends = [end for end in dict.fromkeys((*ENDS, tokenizer.eos_token)) if end]
        self._ends = re.compile("|".join(map(re.escape, ends)))
        self._marker = re.compile(f"{self._ends.pattern}|{MARKERS.pattern}|{TAGS}")
        self._opens = self._added = ""  # the first control token of the generation prompt, and the prompt
        self._headers = self._of_headers()

    def render(self, messages, keywords, prompt=False):
        keywords = dict(keywords)
        tools = keywords.pop("tools", None)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **keywords
            )
        except Exception:  # noqa: BLE001  (a template raises what it likes)
            return None

    def _of_headers(self):
        """Return the control tokens by which turns open: the first of the generation prompt, the last of a question."""
        question, found = user(), set()
        for content in (question["content"], [{"type": "text", "text": question["content"]}]):
            turns = [{"role": "user", "content": content}]
            plain, asked = (
                self.render(turns, {}, prompt) or self.render(turns, {"tools": []}, prompt) or ""
                for prompt in (False, True)
            )
            before, _, behind = asked.partition(question["content"])
            self._added = asked[len(plain) :] if asked.startswith(plain) else self._added
            added = self._marker.findall(self._added or behind)
            added = [m for m in added if not CLOSES.search(m) and not self._ends.fullmatch(m)]
            self._opens = next(iter(added), self._opens)
            found |= set(added[:1]) | (set(self._marker.findall(before)[-1:]) - set(added))
        return {m for m in found if not self._ends.fullmatch(m)}

    def judge(self, kind, samples, said):
        """Return (verdict, why, number of answers whose prompt differs) of a row's stored (text, label ranges)."""
        messages, tools = self.row(kind)
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        learnt, num_unlike = [], 0
        for text, ranges in samples:
            problem, found, unlike = "its text is no rendering of the row", None, 0
            for spelt, keywords, full in self._renderings(messages, tools, text):
                problem, found, unlike = self._labels(spelt, keywords, text, ranges, answers, full)
                if problem is None:
                    break
            if problem is not None:
                return "WRONG", problem, 0
            learnt += found
            num_unlike += unlike
        if sorted(learnt) != answers:
            return "WRONG", f"answers {answers} expected, {sorted(learnt)} have loss", 0
        if num_unlike and not said:
            return "silent", "an answer begins after other text than the generation prompt shows", num_unlike
        return ("told" if num_unlike else "accepted"), "", num_unlike

    def row(self, kind):
        """Return (messages, tools) of a kind; a text with an end of turn has this template's."""
        end = next(iter(self._ends.findall(self.tokenizer.chat_template)), self.tokenizer.eos_token)
        messages = [{**m, "content": m["content"].replace("@end@", end)} for m in KINDS[kind]]
        return messages, TOOLS if kind in WITH_TOOLS else None

    def _renderings(self, messages, tools, text):
        """Yield (messages, keywords, rendering), of the row or its beginning in all spellings, with this text.

        The rendering may go on behind the text with what the template adds to ask for an answer.
        """
        for end in range(len(messages), 0, -1):
            for spelt, keywords in forms(messages[:end], tools):
                full = self.render(spelt, keywords)
                if full is None:
                    continue
                # one control token may follow: of the header that ends a turn
                added = text.removeprefix(full.rstrip()).strip()
                is_row = text.startswith(full.rstrip()) and (not added or self._marker.fullmatch(added))
                marks = list(self._marker.finditer(text))
                unended = text[: marks[-1].start()] if marks and marks[-1].end() == len(text.rstrip()) else text
                if is_row or self._is_generated(spelt, keywords, text):
                    yield spelt, keywords, text
                elif full.startswith(text) and not words_of(full[len(text) :]):
                    yield spelt, keywords, full
                elif full.startswith(unended) and not words_of(full[len(unended) :]):
                    yield spelt, keywords, text  # nothing ends it there

    def _is_generated(self, spelt, keywords, text):
        """Whether a text is what a model shows that thinks in its last answer, though the template cuts it there.

        That is: the generation prompt, reasoning in <think> tags, and the answer and its end as without reasoning.
        """
        found = re.fullmatch(r"<think>\n(\w+)\n</think>\n\n(\w*)", str(spelt[-1]["content"]))
        if spelt[-1]["role"] != "assistant" or not found:
            return False
        plain = self.render([*spelt[:-1], {**spelt[-1], "content": found[2]}], keywords)
        prompt = self.render(spelt[:-1], keywords, prompt=True)
        if plain is None or prompt is None or not text.startswith(prompt):
            return False
        if not found[2]:  # calls alone
            return re.sub(rf"(?:<think>)?\s*{found[1]}\s*</think>\s*", "", text, count=1) == plain
        block = rf"\s*(?:<think>)?\s*{found[1]}\s*</think>\s*{found[2]}"
        opened = "<think>" in text[len(prompt) :] or prompt.rstrip().endswith("<think>")
        return opened and bool(re.fullmatch(block + re.escape(plain.partition(found[2])[2]), text[len(prompt) :]))

    def _labels(self, spelt, keywords, text, ranges, answers, full):
        """Return what is wrong with the labels, the answers that have loss, and how many follow another prompt."""
        found, num_unlike, ranges = [], 0, list(self._parted(ranges, spelt, full))
        left = ranges
        for k in [k for k in answers if k < len(spelt)]:
            words = words_of({**spelt[k], "thinking": ""})
            inside = [(a, b) for a, b in ranges if any(a < text.find(word) + len(word) <= b for word in words)]
            if not inside:
                continue
            left = [span for span in left if span not in inside]
            prompt = self.render(spelt[:k], keywords, prompt=True)
            follows = prompt is not None and text.startswith(prompt)
            start = inside[0][0]
            problem = wrong_words(spelt, k, "".join(text[a:b] for a, b in inside))
            problem = problem or self._wrong_start(text, start, words, prompt, follows)
            problem = problem or self._wrong_end(spelt, k, full, inside, words)
            if problem:
                return f"answer {k} is learnt with {problem}", [], 0
            is_asked = prompt is not None or k > 0  # nothing asks for what opens a conversation
            num_unlike += is_asked and (not follows or (start != len(prompt) and not self.is_marked))
            found.append(k)
        if left:
            return f"labels outside of answers: {[text[a:b] for a, b in left][:2]}", [], 0
        return None, found, num_unlike

    def _parted(self, ranges, spelt, text):
        """Yield the ranges, one that holds two answers as two if the first ends there."""
        for a, b in ranges:
            for m in spelt if len(ranges) < len(spelt) else ():
                last = max((text.find(w) + len(w) for w in words_of({**m, "thinking": ""})), default=0)
                after = min((at for at in map(re.Match.start, re.finditer(r"Zq\w{3}x", text)) if at >= last), default=b)
                if a < last and after < b and (ends := self._wanted_ends(text[last:after])):
                    cut = last + len(text[last:after]) - len(text[last:after].lstrip()) + len(min(ends, key=len))
                    yield a, cut
                    a = cut
            yield a, b

    def _wrong_start(self, text, start, words, prompt, follows):
        first = min(text.find(word) for word in words)
        header = max([0, *(m.end() for m in re.finditer(r"Zq\w{3}x", text[:first]))])
        ends = [m.end() for m in self._marker.finditer(text, header, first) if m[0] == self._opens]
        asked = text.rfind(self._added, header, first) if self._added else -1
        header = asked + len(self._added) if asked >= 0 else max([header, *ends])
        if follows and text[start : len(prompt)].strip() and not self.is_marked:
            return f"part of the generation prompt: {text[start : len(prompt)]!r}"
        lead = text[start:first]
        tags = ["".join(lead[: m.end()].split()) for m in self._marker.finditer(lead)]
        is_shown = prompt is not None and any("".join(prompt.split()).endswith(tag) for tag in tags)
        if not follows and (start < header or is_shown) and not self.is_marked:
            return f"a header before it: {lead!r}"
        # what precedes the range and what is in it: the reasoning's own block is the only one
        if CLOSES.search(text, header, first) and CLOSES.search(text, first, text.find(words[-1], first)):
            return f"reasoning behind a closed block: {text[header:first]!r}"
        return None

    def _wrong_end(self, spelt, turn, text, inside, words):
        """Return what is wrong with the end of an answer, which may stand before another turn's part inside of it."""
        others = [text.find(w) for k, m in enumerate(spelt) if k != turn for w in words_of({**m, "thinking": ""})]
        pieces = []
        for a, b in inside:
            last = max((at + len(w) for w in words for at in [text.find(w)] if a <= at < b), default=a)
            after = min((at for at in others if at >= last), default=len(text))
            pieces.append((text[last:b], text[last:after], self._wanted_ends(text[last:after])))
        # a template may write the text of a call behind its result: the call has the stop then
        problems = [(tail, behind) for tail, behind, wanted in pieces if self._without_more(tail) not in wanted]
        if problems and len(problems) == len(pieces):
            return f"the end {problems[-1][0]!r} of {problems[-1][1]!r}"
        extra = next((tail for tail, _ in problems if self._headers & set(self._marker.findall(tail))), None)
        return extra and f"a header: {extra!r}"

    def _without_more(self, tail):
        """Return an end without the ends that follow the first: some templates write eos behind the last answer."""
        ends = list(self._ends.finditer(tail))
        more = ends and self._ends.sub("", tail[ends[0].end() :]).strip() == ""
        return (tail[: ends[0].end()] if more else tail).strip()

    def _wanted_ends(self, behind):
        """Return the texts that may end an answer, of what stands behind it up to the next word of the row."""
        markers = list(self._marker.finditer(behind))
        own = list(itertools.takewhile(lambda m: m[0] not in self._headers, markers))
        if not own:  # nothing of its own: the next turn's header ends it
            return {behind[: m.end()].strip() for m in markers[:1]}
        end = next((m for m in own if self._ends.fullmatch(m[0])), None)
        return {behind[: m.end()].strip() for m in ([end] if end else own)}


def words_of(message):
    return re.findall(r"Zq\w{3}x", json.dumps(message))


def wrong_words(spelt, turn, body):
    """Return which words of a turn are not in the text that is learnt for it, or which of other turns are."""
    words = words_of({**spelt[turn], "thinking": ""})
    # nothing predicts the first token of a text
    if missing := [word for word in words if word not in body and not (turn == 0 and word[1:] in body)]:
        return f"{missing} left out"
    others = {word for k, message in enumerate(spelt) if k != turn for word in words_of(message)}
    return next((f"{word} of another turn" for word in sorted(others) if word in body), None)


def judge_template(source, base, folder):
    """Return {kind: (verdict, why)} of one template, and what the build said."""
    tokenizer = make_tokenizer(base, source, folder / "tokenizer")
    referee, notes, cells, layouts = Referee(tokenizer), [], {}, {}
    kinds = list(KINDS)
    first = kinds.index("tools unused")
    for chunk in (kinds[:first], kinds[first:]):  # rows of a file have the same columns
        rows = [dict(zip(("messages", "tools"), referee.row(kind), strict=True)) for kind in chunk]
        file = folder / f"{len(chunk)}.jsonl"
        lines = [json.dumps({name: value for name, value in row.items() if value}) + "\n" for row in rows]
        file.write_text("".join(lines))
        config = DataConfig.model_validate({
            "name": file.stem, "root": folder / "data", "sources": [{"path": str(file)}], "on_bad_row": "skip",
            "max_tokens": None, "num_procs": 1, "tokenizer": str(folder / "tokenizer"),
        })  # fmt: skip
        said = []
        try:
            store = open_or_build(config, str(folder / "tokenizer"), log=said.append)
        except FlatoutError as error:
            cells |= {kind: ("refused", str(error)) for kind in chunk}
            continue
        except Exception as error:  # noqa: BLE001  (a crash is a verdict, too)
            cells |= {kind: ("WRONG", f"crash: {type(error).__name__}: {error}") for kind in chunk}
            continue
        notes += said
        report = json.loads((store.folder / "report.json").read_text())
        samples = defaultdict(list)
        for index in range(store.num_samples):
            ids, mask = (np.asarray(each) for each in store.sample(index).pair)
            samples[int(store.rows[index])].append(decoded(tokenizer, ids, mask))
        says, num_unlike = any("inference shows" in note for note in said), 0
        for row, kind in enumerate(chunk, start=1):
            problem = next((text for text in report["bad_rows"] if f"{file.name}:{row}:" in text), None)
            if row not in samples:
                cells[kind] = ("refused", problem or "no labels")
                continue
            *cells[kind], unlike = referee.judge(kind, samples[row], says)
            num_unlike += unlike
            layouts[kind] = without_words(samples[row])
        if num_unlike > report["counts"]["unlike_prompt"]:
            counted = f"{num_unlike} answers follow other text than inference shows, and it counts " + str(
                report["counts"]["unlike_prompt"]
            )
            cells |= {kind: ("silent", counted) for kind in chunk if cells[kind][0] == "told"}
    one, two = (layouts.get(kind) for kind in ("reasoning", "reasoning in text"))
    if one and two and one != two and not any("reasoning in <think> tags" in note for note in notes):
        cells["reasoning in text"] = ("silent", f"reasoning in a field is written {one}, and in the text {two}")
    return {kind: tuple(cell) for kind, cell in cells.items()}, notes


def without_words(samples):
    """Return the stored texts of a row with its words numbered."""
    texts = [text for text, _ in samples]
    numbers = {word: f"#{place}" for place, word in enumerate(dict.fromkeys(words_of(texts)))}
    return [re.sub(r"Zq\w{3}x", lambda word: numbers[word[0]], text) for text in texts]


def decoded(tokenizer, ids, mask):
    """Return the text of ids, and the character ranges of its labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    cuts = [0, *edges.tolist(), len(ids)]
    parts = [tokenizer.decode(ids[a:b].tolist()) for a, b in itertools.pairwise(cuts)]
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    return "".join(parts), list(itertools.pairwise(ends))[1::2]


def page(results, families):
    """Return the table of docs/templates.md."""
    by_family = defaultdict(list)
    for name in results:
        by_family[families.get(name, name)].append(name)
    total = Counter(verdict for cells in results.values() for verdict, _ in cells.values())
    lines = [
        "# Chat templates",
        "",
        "Many chat templates drop or reject reasoning, tools or tool calls. Look up the template of your model here "
        "before you build such data, or analyze it with `flatout data template MODEL` ([what it "
        f"prints](masks.md#what-a-template-does)). We tested {len(results)} public chat templates of {len(by_family)} "
        f"families with {len(KINDS)} kinds of conversations. `benchmarks/template_table.py` renders each conversation "
        "with plain `apply_chat_template`, and compares the text, the position of each answer and its stop token with "
        "what flatout stores:",
        "",
        "| verdict | cells | meaning |",
        "|---|---:|---|",
        f"| accepted | {total['accepted']:,} | the text is the same, loss is exactly on the answers and their stop "
        "tokens, and each answer begins where the generation prompt ends |",
        f"| warned | {total['told']:,} | the same, but the generation prompt differs from the text before the answer; "
        "the build prints both texts |",
        f"| refused | {total['refused']:,} | the template drops or rejects a part of the row; the error names it |",
        f"| silent or wrong | {total['silent'] + total['WRONG']:,} | |",
        "",
        "Each cell counts templates. A number without a suffix was accepted, `t` was accepted with a warning, and "
        "`r` was refused. About a third of the cells are refused, because many templates drop or reject reasoning, "
        "tools or tool calls. The model would then be trained on a text that lacks a part of the row, so flatout gives "
        "an error that names the part. This command tests any folder of templates:",
        "",
        "    python benchmarks/template_table.py FOLDER --tokenizer TOKENIZER --manifest MANIFEST --docs PAGE",
        "",
        "| family | " + " | ".join(KINDS) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    for family, names in sorted(by_family.items(), key=lambda item: item[0].lower()):
        cells = []
        for kind in KINDS:
            counts = Counter(results[name][kind][0] for name in names)
            marks = {"accepted": "", "told": "t", "refused": "r", "silent": " silent", "WRONG": " WRONG"}
            cells.append(" ".join(f"{counts[v]}{mark}" for v, mark in marks.items() if counts[v]))
        lines.append(f"| {family} ({len(names)}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of .jinja files")
    parser.add_argument("--tokenizer", required=True, help="folder of a small byte-level tokenizer")
    parser.add_argument("--manifest", type=Path, help="JSON list of {name, family, repository, path, commit, licence}")
    parser.add_argument("--docs", type=Path, help="write the table here")
    parser.add_argument("--json", type=Path, help="write verdicts and the manifest's facts here")
    parser.add_argument("--only", help="only templates whose name contains this; prints every cell that is no accepted")
    args = parser.parse_args()
    logging.set_verbosity_error()
    manifest = {entry["name"]: entry for entry in json.loads(args.manifest.read_text())} if args.manifest else {}
    files = [path for path in sorted(args.folder.glob("*.jinja")) if not args.only or args.only in path.stem]
    base = AutoTokenizer.from_pretrained(args.tokenizer)
    results = {}
    for path in files:
        with tempfile.TemporaryDirectory() as folder:
            results[path.stem], notes = judge_template(path.read_text(encoding="utf-8"), base, Path(folder))
        for kind, (verdict, why) in results[path.stem].items():
            if verdict in ("silent", "WRONG") or (args.only and verdict != "accepted"):
                print(f"{verdict}: {path.stem}: {kind}: {why[:600]}", flush=True)
        if args.only:
            print(*notes, sep="\n")
    total = Counter(verdict for cells in results.values() for verdict, _ in cells.values())
    print(f"{len(results)} templates: " + ", ".join(f"{total[verdict]} {verdict}" for verdict in VERDICTS))
    if args.docs:
        args.docs.write_text(page(results, {name: entry["family"] for name, entry in manifest.items()}))
    if args.json:
        facts = [
            {**manifest.get(name, {"name": name}), "verdicts": {kind: verdict for kind, (verdict, _) in cells.items()}}
            for name, cells in results.items()
        ]
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in facts)
        args.json.write_text(f'{{"total": {json.dumps(total)}, "templates": [\n{lines}\n]}}\n')
    return 1 if total["silent"] or total["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
