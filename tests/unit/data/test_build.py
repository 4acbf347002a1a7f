from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data import registry
from flatout.data.build import open_or_build
from flatout.data.conversation import Origin
from flatout.data.readers import copies_of_rows
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.data.templates.template import template_text
from flatout.data.token_store import TokenStore
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.tokenizer import load_tokenizer
from flatout.data.workers import Chunk, tokenize_chunks, usable_procs
from flatout.errors import DataError, FlatoutError, ResourceError, UsageError
from flatout.io.json_file import read_json
from tests.usual import usual

Row = dict[str, Any]


def chat(question: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


class Maker:
    """Writes rows to a file and builds them with the small tokenizer."""

    def __init__(self, root: Path, tokenizer: Path) -> None:
        self.root, self.tokenizer = root, str(tokenizer)

    def write(self, rows: list[Row], name: str = "rows.jsonl") -> str:
        path = self.root / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def config(self, *paths: str, **settings: Any) -> DataConfig:
        sources = settings.pop("sources", None) or [{"path": path} for path in paths]
        base = {"name": "d", "root": self.root / "data", "template": "chatml", "num_procs": 1, "max_tokens": None}
        return DataConfig.model_validate(base | {"sources": sources} | settings)

    def build(self, rows: list[Row], **settings: Any) -> TokenStore:
        return open_or_build(self.config(self.write(rows), **settings), self.tokenizer)


@pytest.fixture
def maker(tmp_path, small_tokenizer_dir):
    return Maker(tmp_path, small_tokenizer_dir)


def texts(store: TokenStore, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(store.sample(i).token_ids.tolist()) for i in range(store.num_samples)]


def labels(store: TokenStore, tokenizer: PreTrainedTokenizerFast, index: int) -> str:
    ids, loss_mask = store.sample(index).pair
    return str(tokenizer.decode(ids[loss_mask].tolist()))


def test_rows_become_samples(maker, small_tokenizer):
    store = maker.build([chat("q", "a"), chat("r", "b c")])
    assert texts(store, small_tokenizer)[1] == "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
    assert labels(store, small_tokenizer, 1) == "b c<|im_end|>"
    assert store.num_label_tokens.tolist() == [int(store.sample(i).loss_mask.sum()) for i in range(2)]
    assert not store.loss_mask[store.offsets[:-1]].any()
    assert str(store.origin(1)).endswith("rows.jsonl:2")
    assert store.meta.max_token_id == store.token_ids.max()
    assert store.meta.end_of_turn == "<|im_end|>"
    entry = registry.find(maker.root / "data", "d")
    assert (entry.num_samples, entry.fingerprint, entry.template) == (2, store.meta.fingerprint, "chatml")
    assert registry.entry_dir(maker.root / "data", entry) == store.folder


def test_plain_text_and_pairs_end_by_eos(maker, small_tokenizer):
    """C20: pad is another token here, but even eos == pad would not be masked: a real eos always carries loss."""
    store = maker.build([{"prompt": "2+2=", "completion": " 4"}], template=None)
    assert texts(store, small_tokenizer) == ["2+2= 4<|im_end|>"]
    assert labels(store, small_tokenizer, 0) == " 4<|im_end|>"
    store = maker.build([{"text": "a<|im_end|>b"}], template=None, special_tokens="text")
    assert texts(store, small_tokenizer) == ["a<|im_end|>b<|im_end|>"]
    assert store.token_ids.tolist().count(small_tokenizer.eos_token_id) == 1  # the typed one is text
    assert store.num_label_tokens[0] == len(store.token_ids) - 1
    assert store.meta.counts["typed_control_tokens"] == 1


TEMPLATED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"


def test_special_tokens_in_plain_text_are_asked_about(maker, small_tokenizer):
    rows = [{"text": TEMPLATED}] * 3 + [{"text": "words"}]
    with pytest.raises(DataError, match=r"3 of 4 texts contain special.*rows\.jsonl:1") as caught:
        maker.build(rows, on_bad_row="skip")
    assert [fix.settings["data.special_tokens"] for fix in caught.value.fixes] == ["keep", "text"]
    kept = maker.build(rows, special_tokens="keep")
    assert texts(kept, small_tokenizer)[0] == TEMPLATED  # its own end, and no second one
    assert kept.sample(0).token_ids.tolist().count(small_tokenizer.eos_token_id) == 2
    assert kept.sample(3).token_ids[-1] == small_tokenizer.eos_token_id
    spelt = maker.build(rows, special_tokens="text")
    assert spelt.sample(0).token_ids.tolist().count(small_tokenizer.eos_token_id) == 1
    rare = [{"text": "words"}] * 20 + [{"text": TEMPLATED}]
    assert maker.build(rare).meta.counts["typed_control"] == 1


@pytest.mark.parametrize(
    "row", [chat("q", "a"), {"text": "words"}, {"text": "<s>[INST] q [/INST] a</s>"}], ids=["chat", "text", "written"]
)
def test_bos_and_eos_come_once(maker, shared, row):
    config = maker.config(maker.write([row]), template=None, special_tokens="keep")
    ids = open_or_build(config, str(shared / "tok_mistral_v3")).token_ids.tolist()
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)


def test_token_rows_are_checked(maker):
    store = maker.build([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}])
    assert [part.tolist() for part in store.sample(0).pair] == [[5, 6, 7], [False, False, True]]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: token id 999 at position 1 is outside 0\.\.302"):
        maker.build([{"input_ids": [5, 999], "labels": [5, 999]}])


LONG = chat("the question", "the answer is yes " * 20)
CASES: list[tuple[str, list[Row], dict[str, Any], str]] = [
    ("C7 only prompts", [{"messages": [{"role": "user", "content": "q"}]}, chat("q", "a")], {},
     r"1 of 2 rows have no answer to learn from .*rows\.jsonl:1;"),
    ("C8 all labels cut off", [chat("the question " * 30, "a"), chat("q", "a")], {"max_tokens": 32},
     r"1 of 2 rows lose all labels at max_tokens=32 \(95th percentile \d+, longest \d+ tokens\): .*rows\.jsonl:1"),
    ("C9 over-long", [LONG, chat("q", "a")], {"max_tokens": 32, "too_long": "error"},
     r"1 of 2 rows are over max_tokens=32 .*rows\.jsonl:1"),
    ("C11 nothing left", [LONG], {"max_tokens": 32, "too_long": "drop"},
     r"no rows are left of 1: 1 were longer than data.max_tokens allows"),
    ("C15 turn refused", [chat("q", "a"), {"messages": [{"role": "user", "content": "q"},
     {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}], {"template": "gemma"},
     r"rows\.jsonl:2: messages\[1\] \(system\): chat template 'gemma' rejects it"),
    ("C17 no template", [chat("q", "a")], {"template": None},
     "has no chat template"),
    ("C4 missing role", [chat("q", "a"), {"messages": [{"content": "q"}]}], {}, r"rows\.jsonl:2: .*role"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "settings", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_stops_the_build(maker, rows, settings, message):
    with pytest.raises(DataError, match=message) as caught:
        maker.build(rows, **settings)
    assert caught.value.exit_code == 3
    assert not (maker.root / "data" / "built_dataset" / "d").exists()
    assert registry.load(maker.root / "data") == {}
    assert caught.value.fixes
    for fix in caught.value.fixes[:1]:
        assert maker.build(rows, **settings | {name[5:]: value for name, value in fix.settings.items()}).num_samples


def test_the_fix_of_one_source_keeps_the_others_as_they_are(maker):
    files = [
        maker.write([row] * 2, f"{name}.jsonl") for name, row in (("a", chat("q", "a")), ("b", {"q": "q", "a": "a"}))
    ]
    sources = [{"path": path, "weight": weight} for path, weight in zip(files, (2.0, 0.5), strict=True)]
    with pytest.raises(DataError, match=r"b\.jsonl:1") as caught:
        open_or_build(maker.config(sources=sources), maker.tokenizer)
    fixed = caught.value.fixes[0].settings["data.sources"]
    assert [one["weight"] for one in fixed] == [2.0, 0.5]
    assert open_or_build(maker.config(sources=fixed), maker.tokenizer).num_samples == 5


def test_malformed_rows_are_told_together_or_skipped_and_listed(maker):
    path = Path(maker.write([chat("q", "a")]))
    lines = [path.read_text().strip(), "{bad", '{"messages": []}', path.read_text().strip(), '{"messages": 5}']
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        open_or_build(maker.config(str(path)), maker.tokenizer)
    assert [f"rows.jsonl:{row}:" in str(caught.value) for row in (1, 2, 3, 4, 5)] == [False, True, True, False, True]
    store = open_or_build(maker.config(str(path), on_bad_row="skip"), maker.tokenizer)
    assert store.num_samples == 2
    report = read_json(store.folder / "report.json")
    assert (report["counts"]["rows"], report["counts"]["bad"]) == (5, 3)
    assert [re.search(r"rows\.jsonl:(\d)", row)[1] for row in report["bad_rows"]] == ["2", "3", "5"]  # type: ignore[index]


def test_every_lost_or_changed_row_is_in_the_report(maker):
    rows = [chat("q", "a"), LONG, chat("the question " * 30, "a"), {"messages": [{"role": "user", "content": "q"}]},
            chat("q", "a"), chat("<|im_end|>", "b")]  # fmt: skip
    store = maker.build(rows, on_bad_row="skip", max_tokens=64, too_long="truncate", special_tokens="text")
    report = read_json(store.folder / "report.json")
    found = {name: next(iter(files.values())) for name, files in report["rows"].items() if files}
    assert found == {"truncated": [2], "lost_labels": [3], "no_labels": [4], "typed_control": [6]}
    assert report["counts"]["duplicates"] == 1
    assert store.num_samples == 4
    assert any(
        note.startswith("1 samples are duplicates; they are kept; data.dedupe=exact") for note in report["notes"]
    )
    assert store.meta.counts == report["counts"]


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [32]), ("drop", []), ("split", [32, 32, 32])])
def test_length_policies(maker, policy, lengths, small_tokenizer):
    full = maker.build([chat("q", "a"), LONG])
    whole_ids, whole_mask = (array.tolist() for array in full.sample(1).pair)
    store = maker.build([chat("q", "a"), LONG], max_tokens=32, too_long=policy)
    got = store.lengths.tolist()[1:]
    assert got[: len(lengths)] == lengths[: len(got)]
    assert max(store.lengths) <= 32
    assert not store.loss_mask[store.offsets[:-1]].any()
    if policy == "split":
        assert np.concatenate([store.sample(i).token_ids for i in range(1, store.num_samples)]).tolist() == whole_ids
        assert read_json(store.folder / "report.json")["counts"]["split"] == 1
    if policy == "truncate":  # inside an answer: what is kept keeps its labels
        ids, loss_mask = store.sample(1).pair
        assert (ids.tolist(), loss_mask.tolist()) == (whole_ids[:32], whole_mask[:32])
        assert "<|im_end|>" not in labels(store, small_tokenizer, 1)


def test_documents_are_split_and_chats_are_cut_by_default(maker):
    path = maker.root / "book.txt"
    path.write_text("the answer is yes no \n" * 40)
    whole = open_or_build(maker.config(str(path)), maker.tokenizer)
    store = open_or_build(maker.config(str(path), max_tokens=32), maker.tokenizer)
    assert np.array_equal(store.token_ids, whole.token_ids)
    assert store.lengths.max() == 32
    for row in (LONG, {"prompt": "q ", "completion": "the answer is yes " * 20}):
        limit = int(maker.build([row]).lengths[0]) * 9 // 10
        cut = maker.build([row], max_tokens=limit)
        assert (cut.lengths.tolist(), cut.meta.counts["truncated"]) == ([limit], 1)


def test_losing_a_fifth_of_the_label_tokens_stops_until_told(maker):
    rows = [chat("q", "a"), LONG, LONG]
    with pytest.raises(
        DataError, match=r"label tokens \(\d\d\.\d%\) are lost at max_tokens=32: 2 rows truncated;.* p100 "
    ) as caught:
        maker.build(rows, max_tokens=32)
    longer, accepts = (fix.settings for fix in caught.value.fixes)
    assert maker.build(rows, max_tokens=longer["data.max_tokens"]).meta.counts["truncated"] == 0
    assert accepts == {"data.too_long": "truncate"}
    cut = maker.build(rows, max_tokens=32, too_long="truncate")
    assert (cut.num_samples, cut.meta.counts["truncated"]) == (3, 2)


@pytest.mark.parametrize("policy", ["truncate", "drop", "split"])
def test_lost_tokens_are_told(maker, policy):
    rows = [chat("the question " * 30, "a"), chat("q", "a"), LONG]
    whole = maker.build(rows)
    store = maker.build(rows, max_tokens=32, too_long=policy, on_bad_row="skip")
    counts, fates = store.meta.counts, ("truncated", "split", "too_long", "lost_labels")
    assert (counts["tokens"], counts["label_tokens"]) == (whole.lengths.sum(), whole.num_label_tokens.sum())
    assert counts["tokens"] - sum(counts[f"{fate}_tokens"] for fate in fates) == store.lengths.sum()
    assert counts["label_tokens"] - sum(counts[f"{fate}_labels"] for fate in fates) == store.num_label_tokens.sum()
    fate = {"truncate": "truncated", "drop": "too_long"}.get(policy, policy)
    tokens, label_tokens = counts[f"{fate}_tokens"], counts[f"{fate}_labels"]
    lost = f"lost: {tokens:,} tokens ({tokens / counts['tokens']:.1%} of all) and {label_tokens:,} label tokens"
    assert any(lost in note for note in read_json(store.folder / "report.json")["notes"])


def test_copies_and_windows_of_a_row_share_its_key(maker):
    sources = [{"path": maker.write([LONG, chat("q", "a"), chat("r", "b")]), "weight": 2}]
    store = open_or_build(maker.config(sources=sources, max_tokens=32, too_long="split"), maker.tokenizer)
    assert len(set(store.row_keys)) == 3
    assert [len(set(store.row_keys[store.hashes == seen])) for seen in set(store.hashes)] == [1] * len(
        set(store.hashes)
    )


def test_a_set_of_earlier_mask_rules_is_built_anew_and_one_without_masks_stays(maker, monkeypatch):
    chats, texts = maker.config(maker.write([chat("q", "a")])), maker.config(maker.write([{"text": "a"}], "t.jsonl"))
    texts = texts.model_copy(update={"name": "texts"})
    with monkeypatch.context() as earlier:
        earlier.setattr("flatout.data.token_store.MASK_RULES", 0)
        old = [open_or_build(config, maker.tokenizer).meta.fingerprint for config in (chats, texts)]
    with pytest.raises(UsageError, match="it was built by earlier rules of which tokens carry loss"):
        open_or_build(chats, maker.tokenizer, replaces=False)
    said: list[str] = []
    assert open_or_build(chats, maker.tokenizer, trained_on=old, log=said.append).meta.fingerprint == old[0]
    assert any(text.endswith("earlier rules of which tokens carry loss; the run continues with it") for text in said)
    by_name = chats.model_copy(update={"sources": []})
    open_or_build(by_name, maker.tokenizer, log=said.append)
    assert said[-1].endswith("carry loss; build it again to train by today's")
    new = open_or_build(chats, maker.tokenizer, log=said.append).meta
    assert "Rebuilding 'd': it was built by earlier rules of which tokens carry loss" in said
    assert (new.mask_rules, new.fingerprint) != (0, old[0])
    said.clear()
    assert open_or_build(chats, maker.tokenizer, log=said.append).meta == new
    assert open_or_build(texts, maker.tokenizer, log=said.append).meta.fingerprint == old[1]
    open_or_build(by_name, maker.tokenizer, log=said.append)
    assert len([text for text in said if text.startswith("Reusing")]) == 2
    assert not any("rules" in text for text in said)


def test_a_setting_that_is_younger_than_a_set_has_its_default_there(maker, monkeypatch):
    config, dump = maker.config(maker.write([chat("q", "a")])), DataConfig.model_dump

    def without_younger(self, **which):
        return {name: one for name, one in dump(self, **which).items() if name not in ("media_root", "dedupe")}

    with monkeypatch.context() as earlier:
        earlier.setattr(DataConfig, "model_dump", without_younger)
        old = open_or_build(config, maker.tokenizer).meta
    assert not {"media_root", "dedupe"} & old.settings.keys()
    assert open_or_build(config, maker.tokenizer, replaces=False).meta == old
    by_name = DataConfig(name="d", root=config.root, dedupe="off", media_root=None)
    assert open_or_build(by_name, maker.tokenizer).meta == old
    for setting, value, had in (("media_root", Path("/pictures"), None), ("dedupe", "exact", "off")):
        said = f"{setting}={had}, but {value} is configured"
        with pytest.raises(UsageError, match=said):
            open_or_build(config.model_copy(update={setting: value}), maker.tokenizer, replaces=False)
        with pytest.raises(DataError, match=said):
            open_or_build(by_name.model_copy(update={setting: value}), maker.tokenizer)
    assert (
        open_or_build(config.model_copy(update={"dedupe": "exact"}), maker.tokenizer).meta.settings["dedupe"] == "exact"
    )


@pytest.mark.parametrize(("value", "stays"), [([], True), (["a.example"], False)])
def test_a_setting_that_is_gone_matters_only_if_it_was_used(maker, monkeypatch, value, stays):
    config, dump, said = maker.config(maker.write([chat("q", "a")])), DataConfig.model_dump, list[str]()
    with monkeypatch.context() as earlier:
        earlier.setattr(DataConfig, "model_dump", lambda self, **which: dump(self, **which) | {"gone": value})
        open_or_build(config, maker.tokenizer)
    open_or_build(config, maker.tokenizer, log=said.append)
    assert any(line.startswith("Reusing") for line in said) == stays


@pytest.mark.parametrize(
    "change",
    [{"loss_type": "all"}, {"max_tokens": 14}, {"template": "zephyr"}, {"seed": 1, "num_samples": 1}, {"rows": True}],
    ids=str,
)
def test_the_fingerprint_follows_what_matters(maker, change):
    first = maker.build([chat("q", "the answer"), chat("q", "b")])
    rows = [chat("q", "the answer"), chat("q", "c" if change.pop("rows", False) else "b")]
    second = open_or_build(maker.config(maker.write(rows), **change), maker.tokenizer)
    assert first.meta.fingerprint != second.meta.fingerprint


def test_the_fingerprint_ignores_what_does_not(maker):
    one = maker.build([chat("q", "a")], num_procs=1)
    other = open_or_build(maker.config(maker.write([chat("q", "a")], "moved.jsonl"), name="e"), maker.tokenizer)
    assert one.meta.fingerprint == other.meta.fingerprint


def test_the_template_is_kept_byte_for_byte(maker):
    text = "{# ü #}\r\n{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}\n"
    text += "{% if add_generation_prompt %}[assistant]{% endif %}\n\n"
    (maker.root / "mine.jinja").write_bytes(text.encode())
    assert maker.build([chat("q", "a")], template=str(maker.root / "mine.jinja")).meta.template_text == text
    assert maker.build([{"text": "words"}]).meta.template_text == ""


def test_a_full_disk_is_told_and_leaves_nothing(maker):
    rows = [chat("q", f"the answer {i}" * 20) for i in range(600)]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = maker.write(rows)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limit[1]))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*File too large"):
            open_or_build(maker.config(path), maker.tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [found.name for found in (maker.root / "data" / "built_dataset").iterdir()] == [".d.lock"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_samples", 1), ("too_long", "drop"), ("on_bad_row", "skip"), ("seed", 1), ("max_tokens", 9),
     ("shuffle", False), ("loss_type", "all"), ("dedupe", "exact")],
)  # fmt: skip
def test_settings_that_a_built_set_does_not_have_are_refused(maker, setting, value):
    store = maker.build([chat("q", "a"), chat("r", "b")])
    config = DataConfig.model_validate({"name": "d", "root": maker.root / "data", setting: value})
    with pytest.raises(DataError, match=f"'d' was built with {setting}={store.meta.settings[setting]}, but {value}"):
        open_or_build(config, maker.tokenizer)


def test_a_damaged_store_is_built_again(maker):
    config = maker.config(maker.write([chat("q", "a")]))
    store = open_or_build(config, maker.tokenizer)
    (store.folder / "token_ids.npy").write_bytes(b"")
    assert open_or_build(config, maker.tokenizer).num_samples == 1


def test_without_sources_the_registry_is_asked(maker, shared):
    built = maker.build([chat("q", "a")])
    config = DataConfig(name="d", root=maker.root / "data")
    assert open_or_build(config, maker.tokenizer).meta == built.meta
    with pytest.raises(DataError, match="chat template 'chatml', but 'zephyr' is configured"):
        open_or_build(DataConfig(name="d", root=maker.root / "data", template="zephyr"), maker.tokenizer)
    with pytest.raises(DataError, match="was built with tokenizer"):
        open_or_build(config, str(shared / "tok_minimind"))
    with pytest.raises(DataError, match="no data set 'e'"):
        open_or_build(DataConfig(name="e", root=maker.root / "data"), maker.tokenizer)


def test_several_builders_build_once(maker):
    config = maker.config(maker.write([chat("q", f"a{i}") for i in range(300)]))
    said: list[str] = []
    stores: list[TokenStore] = []
    builders = [
        threading.Thread(target=lambda: stores.append(open_or_build(config, maker.tokenizer, log=said.append)))
        for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [store.num_samples for store in stores] == [300, 300, 300]
    assert sum(line.startswith("Reusing") for line in said) == 2


def test_sources_are_mixed_by_weight_and_seed(maker, small_tokenizer):
    one = maker.write([chat("one", str(i)) for i in range(10)], "one.jsonl")
    two = maker.write([chat("two", str(i)) for i in range(10)], "two.jsonl")
    sources = [{"path": one, "weight": 2.5}, {"path": two, "weight": 0.5}]

    def answers(**settings: Any) -> list[str]:
        return texts(open_or_build(maker.config(sources=sources, **settings), maker.tokenizer), small_tokenizer)

    mixed = answers()
    assert (sum("one" in text for text in mixed), sum("two" in text for text in mixed)) == (25, 5)
    assert len(set(mixed)) == 15
    assert mixed == answers()
    assert sorted(mixed) != sorted(answers(seed=4))
    drawn = answers(num_samples=12)
    assert len(drawn) == 12
    assert drawn == answers(num_samples=12)


def test_drawing_is_exact():
    first, second = copies_of_rows([5, 3], [1.0, 2.0], None, shuffle=True, seed=0)
    assert (first.tolist(), second.tolist()) == ([1] * 5, [2] * 3)
    in_order = copies_of_rows([5, 3], [1.0, 1.0], 6, shuffle=False, seed=0)
    assert [uses.tolist() for uses in in_order] == [[1] * 5, [1, 0, 0]]
    for seed in range(5):
        uses = np.concatenate(copies_of_rows([50, 30], [1.0, 2.0], 40, shuffle=True, seed=seed))
        assert uses.sum() == 40
        assert uses[:50].max() <= 1


@pytest.mark.parametrize("which", usual(["first", "forked"], ["forked"]))
def test_a_killed_worker_names_its_rows(maker, small_tokenizer_dir, which):
    """One of two processes, the one that was started or the one that it forked, while the other goes on."""
    config = maker.config("rows.jsonl")
    rows = [RawRow(Origin("rows.jsonl", i), chat("q", "a")) for i in range(1, 101)]
    parser = make_parser(config.sources[0], rows[0])
    listed = Path(f"/proc/{os.getpid()}/task")

    def children() -> set[int]:  # any thread may have started it
        return {int(pid) for file in listed.glob("*/children") for pid in file.read_text().split()}

    own = children()

    def wait_for(found: Callable[[], list[int]]) -> int:
        deadline = time.monotonic() + 60
        while not (pids := found()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return pids[0]

    def forks(pid: int) -> Iterator[int]:
        """Its children that run its own command: not ldconfig, which imports start on some systems."""
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            time.sleep(0.2)  # a child that runs another command has it by then
            with suppress(OSError):
                if Path(f"/proc/{child}/cmdline").read_bytes() == command:
                    yield int(child)

    def chunks() -> Iterator[Chunk]:
        for start in range(0, 100, 10):
            if start == 20:
                pid = wait_for(lambda: [*children() - own])
                forked = wait_for(lambda pid=pid: list(forks(pid)))
                os.kill(pid if which == "first" else forked, signal.SIGKILL)
            yield Chunk(parser, tuple(rows[start : start + 10]), np.ones(10, np.int32))

    _, source = template_text(load_tokenizer(str(small_tokenizer_dir)), "chatml", "")
    tokenizer = SampleTokenizer(TokenizeOptions(str(small_tokenizer_dir), "chatml", source))
    with pytest.raises(
        ResourceError, match=r"a tokenizer process died .* in rows rows\.jsonl:\d*1 to rows\.jsonl:\d+0"
    ):
        list(tokenize_chunks(chunks(), tokenizer, 2))
    assert children() == own


class Panic(BaseException):
    """As of a library in Rust: no Exception."""


class TwoPartsError(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Raising(dict[str, Any]):
    """A row's columns; reading one raises what `error` names."""

    error = ""

    def get(self, key: str, default: Any = None) -> Any:
        if self.error:
            raise Panic("index out of bounds") if self.error == "panic" else TwoPartsError("no", " end")
        return super().get(key, default)


@pytest.mark.parametrize(
    ("error", "num_procs", "said"),
    usual(
        [("panic", 1, "index out of"), ("panic", 2, "index out of"), ("parts", 2, "no end"), ("", 2, "")],
        [("panic", 1, "index out of"), ("parts", 2, "no end")],
    ),
)
def test_what_a_process_cannot_raise_names_its_rows(maker, small_tokenizer_dir, error, num_procs, said):
    rows = [RawRow(Origin("rows.jsonl", i), Raising(text="some text")) for i in range(1, 21)]
    parser = make_parser(maker.config("rows.jsonl").sources[0], rows[0])
    rows[14].columns.error = error  # type: ignore[attr-defined]
    chunks = [Chunk(parser, tuple(rows[start : start + 10]), np.ones(10, np.int32)) for start in (0, 10)]
    tokenizer = SampleTokenizer(TokenizeOptions(str(small_tokenizer_dir), "", None))
    if not error:
        assert len(list(tokenize_chunks(chunks, tokenizer, num_procs))) == 2
        return
    with pytest.raises(DataError, match=rf"^rows rows\.jsonl:11 to rows\.jsonl:20: .*{said}"):
        list(tokenize_chunks(chunks, tokenizer, num_procs))


REAL = [
    ("alpaca_5000", {}),
    ("t0_50k", {}),
    ("oasst1_en_val", {"format": "examples/formats/oasst.py:rows"}),
    ("gsm8k", {"columns": {"prompt": "question", "completion": "answer"}}),
    *[
        (f"llamafactory_demo/{name}", {})
        for name in (
            "glaive_toolcall_en_demo.json", "glaive_toolcall_zh_demo.json", "v1_sft_demo.jsonl",
            "reason_tool_use_demo_50.jsonl", "alpaca_zh_demo.json", "identity.json",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("tokenizer", [pytest.param("tok_qwen3", marks=pytest.mark.exhaustive), "tok_minimind"])
def test_all_real_data_builds(tokenizer, shared, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    weights = {"t0_50k": 0.002, "alpaca_5000": 0.02, "oasst1_en_val": 0.1, "gsm8k": 0.02}
    sources = [{"path": str(shared / path), "weight": weights.get(path, 0.3), **more} for path, more in REAL]
    config = DataConfig.model_validate(
        {"name": "real", "root": tmp_path, "sources": sources, "max_tokens": 4096, "num_procs": 1, "on_bad_row": "skip"}
    )
    store = open_or_build(config, str(shared / tokenizer))
    assert store.num_samples > 900
    assert store.meta.counts["bad"] == 0
    assert (store.num_label_tokens > 0).all()
    assert len(set(store.files.tolist())) == len(REAL)


def test_empty_answers_carry_no_loss_and_are_counted(maker, small_tokenizer):
    two = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " \n"}]
    rows = [chat("q", "a"), {"messages": two + chat("r", "b")["messages"]}, {"messages": two}]
    store = maker.build(rows, on_bad_row="skip")
    assert [labels(store, small_tokenizer, index) for index in range(2)] == ["a<|im_end|>", "b<|im_end|>"]
    assert (store.num_samples, store.meta.counts["empty_answers"], store.meta.counts["no_labels"]) == (2, 2, 1)
    with pytest.raises(DataError, match="1 of 3 rows have no answer to learn from"):
        maker.build(rows)


def test_missing_values_of_csv_are_no_answers(maker):
    path = maker.root / "rows.csv"
    path.write_text("instruction,output\nq,a\nq,nan\nq,NaN\nq,\n")
    store = open_or_build(maker.config(str(path), on_bad_row="skip"), maker.tokenizer)
    assert (store.num_samples, store.meta.counts["bad"], store.meta.counts["no_labels"]) == (1, 2, 1)
    assert "output is null, not a string" in read_json(store.folder / "report.json")["bad_rows"][0]


def test_nulls_of_a_table_are_absent_keys(maker, small_tokenizer):
    def row(arguments: dict[str, Any]) -> Row:
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}

    from pyarrow import Table, parquet

    path = maker.root / "rows.parquet"
    parquet.write_table(Table.from_pylist([{"messages": None}, row({"a": "1"}), row({"b": "2"})]), path)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    (maker.root / "t.jinja").write_text(template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    config = maker.config(str(path), template=str(maker.root / "t.jinja"), on_bad_row="skip")
    store = open_or_build(config, maker.tokenizer)
    assert [re.findall(r'"arguments": (\{.*?\})', text) for text in texts(store, small_tokenizer)] == [
        ['{"a": "1"}'], ['{"b": "2"}']
    ]  # fmt: skip
    assert store.meta.counts["bad"] == 1  # the null row


def test_errors_cross_processes_as_they_are(maker):
    rows = [chat("q", "a") for _ in range(600)]
    with pytest.raises(FlatoutError, match="has no chat template"):
        maker.build(rows, template=None, num_procs=2)


def test_pad_equal_to_eos_masks_no_real_eos(tiny, tmp_path):
    """C20: the same rows with pad == eos give the same tokens and labels, the end of each answer among them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    assert tokenizer.pad_token != tokenizer.eos_token
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "same")
    source = SourceConfig(path=str(tiny.chats))
    stores = [
        open_or_build(DataConfig(name="chats", root=tmp_path / name, sources=[source]), str(folder))
        for name, folder in (("own", tiny.model_dir), ("equal", tmp_path / "same"))
    ]
    for name in ("token_ids", "loss_mask", "offsets"):
        assert np.array_equal(getattr(stores[0], name), getattr(stores[1], name))
    ends = stores[1].token_ids == tokenizer.eos_token_id
    assert stores[1].loss_mask[ends].sum() >= stores[1].num_samples


def test_a_long_build_says_how_far_it_is(maker, monkeypatch):
    monkeypatch.setattr("flatout.data.build_report.TOLD_EVERY_S", 0.0)
    said: list[str] = []
    seen: list[tuple[int, int | None]] = []
    config = maker.config(maker.write([chat("q", "a")] * 600))
    open_or_build(config, maker.tokenizer, log=said.append, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 600), (256, 600), (512, 600), (600, 600)]
    assert re.fullmatch(r"tokenized 256 rows of about 600, [\d,]+ s left, [\d,]+ rows/s", said[1])


def test_more_processes_than_a_machine_has_room_for_are_lowered(maker):
    said: list[str] = []
    config = maker.config(maker.write([chat("q", "a")]), num_procs=100_000)
    assert open_or_build(config, maker.tokenizer, log=said.append).num_samples == 1
    most = max(len(os.sched_getaffinity(0)), 16)
    assert said[0] == f"num_procs: 100000 lowered to {most}, the most on this machine"
    assert [usable_procs(wanted) for wanted in (1, most, most + 1)] == [1, most, most]


def test_joined_texts_are_told(maker):
    said: list[str] = []
    config = maker.config(maker.write([{"prompt": "2+2=", "completion": "4"}]), template=None)
    open_or_build(config, maker.tokenizer, log=said.append)
    assert "concatenated, without a chat template or separator" in said[0]
