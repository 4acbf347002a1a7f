"""What becomes of each kind of conversation under each chat template of a folder, judged by plain transformers.

    python benchmarks/template_table.py FOLDER --tokenizer DIR [--manifest FILE] [--docs FILE]
        [--json FILE] [--only NAME]

FOLDER holds .jinja files. A manifest (a list of {name, family, ...}) groups them; without one, each is a family of its
own. For every template, a tokenizer with the template's control tokens is made from the one in DIR, and rows of all
kinds are built with `flatout data build`'s function. This script then renders the rows itself, with
`tokenizer.apply_chat_template`, and compares: the stored text, where each answer begins (after exactly what the
generation prompt shows) and ends, and that nothing else carries loss. Every part of a row is a word of its own.

accepted: all of it is equal. told: equal, and the build said that the generation prompt differs. refused: one sentence.
WRONG: text or labels differ. silent: answers begin after other text than inference shows, and the build did not say so.
Exit status 1 if any cell is WRONG or silent.
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
    r"|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|\[e~\[|\]~b\]|\]~!b\[|<SPECIAL_\d+>"
)
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


KINDS = {
    "chat": [user(), answer()],
    "3 turns": [user(), answer(), user(), answer(), user(), answer()],
    "system": [turn("system"), user(), answer(), user(), answer()],
    "reasoning last": [user(), answer(), user(), answer(reasoning=True)],
    "reasoning each": [user(), answer(reasoning=True), user(), answer(reasoning=True)],
    "reasoning empty": [user(), answer(reasoning=""), user(), answer(reasoning="")],
    "reasoning in text": [user(), inline()],
    "tools unused": [user(), answer(), user(), answer()],
    "call": [user(), call()],
    "call, result": [user(), call(), result(), answer()],
    "parallel calls": [user(), call(calls=2), result(), result("aaaaaaaa2", "get_time"), answer()],
    "text and call": [user(), call(text=True), result(), answer()],
    "calls in rounds": [user(), call(), result(), call("aaaaaaaa3"), result("aaaaaaaa3"), answer(), user(), answer()],
    "reasoning, call": [user(), call(reasoning=True), result(), answer(reasoning=True)],
}
WITH_TOOLS = tuple(kind for kind, turns in KINDS.items() if "call" in kind or kind == "tools unused")


def make_tokenizer(base, source, folder):
    """Return a tokenizer that knows the control tokens in a template's text."""
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
    for spelling in itertools.product((False, True), repeat=0 if plain else 3):
        spelt = [spelled(message, *(spelling or (False,) * 3)) for message in messages]
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
    """Renders rows with plain transformers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        # the template's own marks say what is learnt, even of the prompt
        self.is_marked = "endgeneration" in tokenizer.chat_template

    def render(self, messages, keywords, prompt=False):
        keywords = dict(keywords)
        tools = keywords.pop("tools", None)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **keywords
            )
        except Exception:  # noqa: BLE001  (a template raises what it likes)
            return None

    def judge(self, kind, samples, notes, stops):
        """Return (verdict, why) of the stored samples of a row: (text, label ranges)."""
        messages, tools = KINDS[kind], TOOLS if kind in WITH_TOOLS else None
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        learnt, told = [], False
        for text, ranges in samples:
            problem, found, differs = "its text is no rendering of the row", None, False
            for spelt, keywords in self._renderings(messages, tools, text, stops):
                problem, found, differs = self._labels(spelt, keywords, text, ranges, answers, stops)
                if problem is None:
                    break
            if problem is not None:
                return "WRONG", problem
            learnt += found
            told |= differs
        if sorted(learnt) != answers:
            return "WRONG", f"answers {answers} expected, {sorted(learnt)} have loss"
        if told and not any("inference shows" in note for note in notes):
            return "silent", "an answer begins after other text than the generation prompt shows"
        return ("told" if told else "accepted"), ""

    def _renderings(self, messages, tools, text, stops):
        """Yield (messages, keywords), of the row or its beginning in all spellings, whose rendering is `text`."""
        for end in range(len(messages), 0, -1):
            for spelt, keywords in forms(messages[:end], tools):
                full = self.render(spelt, keywords)
                texts = {full, *(f"{full}{stop}" for stop in stops), *(f"{full}".rstrip() + stop for stop in stops)}
                if full is not None and (text in texts or self._is_generated(spelt, keywords, text)):
                    yield spelt, keywords

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

    def _labels(self, spelt, keywords, text, ranges, answers, stops):
        """Return what is wrong with the labels, the answers that have loss, and whether a prompt differs."""
        found, differs, left = [], False, list(ranges)
        for k in [k for k in answers if k < len(spelt)]:
            words = words_of({**spelt[k], "thinking": ""})
            inside = [(a, b) for a, b in ranges if any(a <= text.find(word) < b for word in words)]
            if not inside:
                continue
            left = [span for span in left if span not in inside]
            problem = wrong_words(spelt, k, "".join(text[a:b] for a, b in inside))
            problem = problem or self._wrong_end(spelt[: k + 1], keywords, text, inside, stops)
            prompt = self.render(spelt[:k], keywords, prompt=True)
            follows = prompt is not None and text.startswith(prompt)
            if follows and inside[0][0] < len(prompt) and not self.is_marked:
                problem = problem or "part of the generation prompt"
            if problem:
                return f"answer {k} is learnt with {problem}", [], False
            differs |= not follows or (inside[0][0] != len(prompt) and not self.is_marked)
            found.append(k)
        if left:
            return f"labels outside of answers: {[text[a:b] for a, b in left][:2]}", [], False
        return None, found, differs

    def _wrong_end(self, until, keywords, text, inside, stops):
        end = inside[-1][1]
        rendered = self.render(until, keywords)
        if rendered is not None and text.startswith(rendered.rstrip()):
            rest = text[len(rendered.rstrip()) : end].strip()
            if rest and rest not in stops:
                return f"{rest!r} of the next turn"
        last = max(text.find(word) + len(word) for word in words_of({**until[-1], "thinking": ""}))
        # a template may write the text of a call behind its result: the call has the stop then
        ends = [text[last:end], *(text[a:b] for a, b in inside[:-1])]
        return None if any(stop in each for stop in stops for each in ends) else f"no stop: {text[last:end]!r}"


def words_of(message):
    return re.findall(r"Zq\w{3}x", json.dumps(message))


def wrong_words(spelt, turn, body):
    """Return which words of a turn are not in the text that is learnt for it, or which of other turns are."""
    words = words_of({**spelt[turn], "thinking": ""})
    if missing := [word for word in words if word not in body]:
        return f"{missing} left out"
    others = {word for message in spelt if message["role"] != "assistant" for word in words_of(message)}
    return next((f"{word} of another turn" for word in sorted(others) if word in body), None)


def judge_template(source, base, folder):
    """Return {kind: (verdict, why)} of one template."""
    tokenizer = make_tokenizer(base, source, folder / "tokenizer")
    rows = [{"messages": m, **({"tools": TOOLS} if kind in WITH_TOOLS else {})} for kind, m in KINDS.items()]
    notes, cells = [], {}
    for chunk in (list(KINDS)[:7], list(KINDS)[7:]):  # rows of a file have the same columns
        file = folder / f"{len(notes)}-{len(chunk)}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for kind, row in zip(KINDS, rows, strict=True) if kind in chunk))
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
        stops = {stop for stop in (*store.meta.stop_tokens, tokenizer.eos_token) if stop}
        report = json.loads((store.folder / "report.json").read_text())
        samples = defaultdict(list)
        for index in range(store.num_samples):
            ids, mask = (np.asarray(each) for each in store.sample(index).pair)
            samples[int(store.rows[index])].append(decoded(tokenizer, ids, mask))
        referee = Referee(tokenizer)
        for row, kind in enumerate(chunk, start=1):
            problem = next((text for text in report["bad_rows"] if f"{file.name}:{row}:" in text), None)
            cells[kind] = ("refused", problem or "no labels") if row not in samples else referee.judge(
                kind, samples[row], said, stops
            )  # fmt: skip
    return cells, notes


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
