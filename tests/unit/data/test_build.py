from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data import registry
from flatout.data.build import build, open_or_build
from flatout.data.conversation import Origin
from flatout.data.draw import copies_of_rows
from flatout.data.formats import make_parser
from flatout.data.rows import RawRow
from flatout.data.store import TokenStore, read_report
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.workers import Chunk, tokenize_chunks
from flatout.errors import DataError, FlatoutError, ResourceError

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
        return build(self.config(self.write(rows), **settings), self.tokenizer)


@pytest.fixture
def maker(tmp_path: Path, small_tokenizer_dir: Path) -> Maker:
    return Maker(tmp_path, small_tokenizer_dir)


def texts(store: TokenStore, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(store.sample(i)[0].tolist()) for i in range(store.num_samples)]


def labels(store: TokenStore, tokenizer: PreTrainedTokenizerFast, index: int) -> str:
    ids, trained = store.sample(index)
    return str(tokenizer.decode(ids[trained].tolist()))


def test_rows_become_samples(maker: Maker, small_tokenizer: PreTrainedTokenizerFast) -> None:
    store = maker.build([chat("q", "a"), chat("r", "b c")])
    assert texts(store, small_tokenizer)[1] == "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
    assert labels(store, small_tokenizer, 1) == "b c<|im_end|>"
    assert store.num_labels.tolist() == [int(store.sample(i)[1].sum()) for i in range(2)]
    assert not store.trained[store.offsets[:-1]].any()
    assert str(store.origin(1)).endswith("rows.jsonl:2")
    assert store.meta.max_token_id == store.token_ids.max()
    assert store.meta.end_of_turn == "<|im_end|>"
    entry = registry.find(maker.root / "data", "d")
    assert (entry.num_samples, entry.fingerprint, entry.template) == (2, store.meta.fingerprint, "chatml")
    assert registry.entry_dir(maker.root / "data", entry) == store.folder


def test_plain_text_and_pairs_end_by_eos(maker: Maker, small_tokenizer: PreTrainedTokenizerFast) -> None:
    """C20: pad is another token here, but even eos == pad would not be masked: a real eos always carries loss."""
    store = maker.build([{"prompt": "2+2=", "completion": " 4"}], template=None)
    assert texts(store, small_tokenizer) == ["2+2= 4<|im_end|>"]
    assert labels(store, small_tokenizer, 0) == " 4<|im_end|>"
    store = maker.build([{"text": "a<|im_end|>b"}], template=None)
    assert texts(store, small_tokenizer) == ["a<|im_end|>b<|im_end|>"]
    assert store.token_ids.tolist().count(small_tokenizer.eos_token_id) == 1  # the typed one is text
    assert store.num_labels[0] == len(store.token_ids) - 1
    assert store.meta.counts["typed_control_tokens"] == 1


def test_bos_comes_once(tmp_path: Path, maker: Maker, shared: Path) -> None:
    mistral = str(shared / "tok_mistral_v3")
    for row, template in ((chat("q", "a"), None), ({"text": "words"}, None)):
        config = maker.config(maker.write([row]), template=template)
        store = build(config, mistral)
        assert store.token_ids.tolist().count(1) == 1
        assert store.token_ids[0] == 1


def test_token_rows_are_checked(maker: Maker) -> None:
    store = maker.build([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}])
    assert (store.token_ids.tolist(), store.trained.tolist()) == ([5, 6, 7], [False, False, True])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: token id 999 at position 1 is outside 0\.\.302"):
        maker.build([{"input_ids": [5, 999], "labels": [5, 999]}])


LONG = chat("the question", "the answer is yes " * 20)
CASES: list[tuple[str, list[Row], dict[str, Any], str]] = [
    ("C7 only prompts", [{"messages": [{"role": "user", "content": "q"}]}, chat("q", "a")], {},
     r"1 of 2 rows have nothing to learn .*rows\.jsonl:1; remove them, or set data\.on_bad_row: skip"),
    ("C8 all labels cut off", [chat("the question " * 30, "a"), chat("q", "a")], {"max_tokens": 32},
     r"1 of 2 rows lose every label at max_tokens=32 \(95th percentile \d+, longest \d+ tokens\): .*rows\.jsonl:1;"),
    ("C9 over-long", [LONG, chat("q", "a")], {"max_tokens": 32, "too_long": "error"},
     r"1 of 2 rows are over max_tokens=32 .*rows\.jsonl:1; raise data\.max_tokens, or set data\.too_long"),
    ("C11 nothing left", [LONG], {"max_tokens": 32, "too_long": "drop"},
     r"data set 'd' is empty: of 1 rows 0 were bad, 0 had no labels, 1 were too long"),
    ("C15 turn refused", [chat("q", "a"), {"messages": [{"role": "user", "content": "q"},
     {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}], {"template": "gemma"},
     r"rows\.jsonl:2: messages\[1\] \(system\): chat template 'gemma' refuses it"),
    ("C17 no template", [chat("q", "a")], {"template": None},
     r"has no chat template; set data\.template to one of chatml"),
    ("C4 missing role", [chat("q", "a"), {"messages": [{"content": "q"}]}], {}, r"rows\.jsonl:2: .*role"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "settings", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_stops_the_build(maker: Maker, rows: list[Row], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        maker.build(rows, **settings)
    assert caught.value.exit_code == 3
    assert not (maker.root / "data" / "built_dataset" / "d").exists()
    assert registry.load(maker.root / "data") == {}


def test_malformed_rows_are_told_together_or_skipped_and_listed(maker: Maker) -> None:
    path = Path(maker.write([chat("q", "a")]))
    lines = [path.read_text().strip(), "{bad", '{"messages": []}', path.read_text().strip(), '{"messages": 5}']
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        build(maker.config(str(path)), maker.tokenizer)
    assert [f"rows.jsonl:{row}:" in str(caught.value) for row in (1, 2, 3, 4, 5)] == [False, True, True, False, True]
    store = build(maker.config(str(path), on_bad_row="skip"), maker.tokenizer)
    assert store.num_samples == 2
    report = read_report(store.folder)
    assert (report["counts"]["rows"], report["counts"]["bad"]) == (5, 3)
    assert [re.search(r"rows\.jsonl:(\d)", row)[1] for row in report["bad_rows"]] == ["2", "3", "5"]  # type: ignore[index]


def test_every_lost_or_changed_row_is_in_the_report(maker: Maker) -> None:
    rows = [chat("q", "a"), LONG, chat("the question " * 30, "a"), {"messages": [{"role": "user", "content": "q"}]},
            chat("q", "a"), chat("<|im_end|>", "b")]  # fmt: skip
    store = maker.build(rows, on_bad_row="skip", max_tokens=64)
    report = read_report(store.folder)
    found = {name: next(iter(files.values())) for name, files in report["rows"].items() if files}
    assert found == {"truncated": [2], "lost_labels": [3], "no_labels": [4], "typed_control": [6]}
    assert report["counts"]["duplicates"] == 1
    assert store.num_samples == 4
    assert "1 samples are duplicates; they are kept" in report["notes"]
    assert store.meta.counts == report["counts"]


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [32]), ("drop", []), ("split", [32, 32, 32])])
def test_length_policies(
    maker: Maker, policy: str, lengths: list[int], small_tokenizer: PreTrainedTokenizerFast
) -> None:
    full = maker.build([chat("q", "a"), LONG])
    whole_ids, whole_trained = (array.tolist() for array in full.sample(1))
    store = maker.build([chat("q", "a"), LONG], max_tokens=32, too_long=policy)
    got = store.lengths.tolist()[1:]
    assert got[: len(lengths)] == lengths[: len(got)]
    assert max(store.lengths) <= 32
    assert not store.trained[store.offsets[:-1]].any()
    if policy == "split":
        assert np.concatenate([store.sample(i)[0] for i in range(1, store.num_samples)]).tolist() == whole_ids
        assert read_report(store.folder)["counts"]["split"] == 1
    if policy == "truncate":  # inside an answer: what is kept keeps its labels
        ids, trained = store.sample(1)
        assert (ids.tolist(), trained.tolist()) == (whole_ids[:32], whole_trained[:32])
        assert "<|im_end|>" not in labels(store, small_tokenizer, 1)


def test_a_finished_fingerprint_is_reused(maker: Maker) -> None:
    config = maker.config(maker.write([chat("q", "a")]))
    first = open_or_build(config, maker.tokenizer)
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    again = open_or_build(config, maker.tokenizer)
    assert (again.folder / "manifest.json").stat().st_mtime_ns == stamp
    assert again.meta == first.meta


@pytest.mark.parametrize(
    "change",
    [{"loss_type": "all"}, {"max_tokens": 14}, {"template": "zephyr"}, {"seed": 1, "num_samples": 1}, {"rows": True}],
    ids=str,
)
def test_the_fingerprint_follows_what_matters(maker: Maker, change: dict[str, Any]) -> None:
    first = maker.build([chat("q", "the answer"), chat("q", "b")])
    rows = [chat("q", "the answer"), chat("q", "c" if change.pop("rows", False) else "b")]
    second = open_or_build(maker.config(maker.write(rows), **change), maker.tokenizer)
    assert first.meta.fingerprint != second.meta.fingerprint


def test_the_fingerprint_ignores_what_does_not(maker: Maker) -> None:
    one = maker.build([chat("q", "a")], num_procs=1)
    other = build(maker.config(maker.write([chat("q", "a")], "moved.jsonl"), name="e"), maker.tokenizer)
    assert one.meta.fingerprint == other.meta.fingerprint


def test_a_damaged_store_is_built_again(maker: Maker) -> None:
    config = maker.config(maker.write([chat("q", "a")]))
    store = open_or_build(config, maker.tokenizer)
    (store.folder / "token_ids.npy").write_bytes(b"")
    assert open_or_build(config, maker.tokenizer).num_samples == 1


def test_without_sources_the_registry_is_asked(maker: Maker, shared: Path) -> None:
    built = maker.build([chat("q", "a")])
    config = DataConfig(name="d", root=maker.root / "data")
    assert open_or_build(config, maker.tokenizer).meta == built.meta
    for wrong, message in (
        ({"template": "zephyr"}, "chat template 'chatml', now 'zephyr' is asked for"),
        ({"loss_type": "all"}, "loss_type=response_only, now all is asked for"),
        ({"max_tokens": 7}, "max_tokens=None, now 7 is asked for"),
    ):
        with pytest.raises(DataError, match=message):
            open_or_build(DataConfig(name="d", root=maker.root / "data", **wrong), maker.tokenizer)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="was built with tokenizer"):
        open_or_build(config, str(shared / "tok_minimind"))
    with pytest.raises(DataError, match="no data set 'e'"):
        open_or_build(DataConfig(name="e", root=maker.root / "data"), maker.tokenizer)


def test_several_builders_build_once(maker: Maker) -> None:
    config = maker.config(maker.write([chat("q", f"a{i}") for i in range(300)]))
    said: list[str] = []
    stores: list[TokenStore] = []
    builders = [
        threading.Thread(target=lambda: stores.append(open_or_build(config, maker.tokenizer, say=said.append)))
        for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [store.num_samples for store in stores] == [300, 300, 300]
    assert sum(line.startswith("Reusing") for line in said) == 2


def test_sources_are_mixed_by_weight_and_seed(maker: Maker, small_tokenizer: PreTrainedTokenizerFast) -> None:
    one = maker.write([chat("one", str(i)) for i in range(10)], "one.jsonl")
    two = maker.write([chat("two", str(i)) for i in range(10)], "two.jsonl")
    sources = [{"path": one, "weight": 2.5}, {"path": two, "weight": 0.5}]

    def answers(**settings: Any) -> list[str]:
        return texts(build(maker.config(sources=sources, **settings), maker.tokenizer), small_tokenizer)

    mixed = answers()
    assert (sum("one" in text for text in mixed), sum("two" in text for text in mixed)) == (25, 5)
    assert len(set(mixed)) == 15
    assert mixed == answers()
    assert sorted(mixed) != sorted(answers(seed=4))
    drawn = answers(num_samples=12)
    assert len(drawn) == 12
    assert drawn == answers(num_samples=12)


def test_drawing_is_exact() -> None:
    first, second = copies_of_rows([5, 3], [1.0, 2.0], None, shuffle=True, seed=0)
    assert (first.tolist(), second.tolist()) == ([1] * 5, [2] * 3)
    in_order = copies_of_rows([5, 3], [1.0, 1.0], 6, shuffle=False, seed=0)
    assert [uses.tolist() for uses in in_order] == [[1] * 5, [1, 0, 0]]
    for seed in range(5):
        uses = np.concatenate(copies_of_rows([50, 30], [1.0, 2.0], 40, shuffle=True, seed=seed))
        assert uses.sum() == 40
        assert uses[:50].max() <= 1


def test_processes_change_nothing(maker: Maker) -> None:
    rows = [chat("q", f"the answer {i}") for i in range(2600)]  # more chunks than are in flight at once
    alone = maker.build(rows, name="alone")
    many = maker.build(rows, name="many", num_procs=2)
    assert alone.meta.fingerprint == many.meta.fingerprint
    assert np.array_equal(alone.token_ids, many.token_ids)
    assert np.array_equal(alone.trained, many.trained)
    assert np.array_equal(alone.offsets, many.offsets)
    assert np.array_equal(alone.rows, many.rows)


def test_a_killed_worker_names_its_rows(maker: Maker, small_tokenizer_dir: Path) -> None:
    config = maker.config("rows.jsonl")
    rows = [RawRow(Origin("rows.jsonl", i), chat("q", "a")) for i in range(1, 41)]
    parser = make_parser(config.sources[0], rows[0])
    own = multiprocessing.active_children()

    def chunks() -> Iterator[Chunk]:
        for start in range(0, 40, 10):
            yield Chunk(parser, tuple(rows[start : start + 10]), np.ones(10, np.int32))
        deadline = time.monotonic() + 60
        while not (started := [child for child in multiprocessing.active_children() if child not in own]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for child in started:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    tokenizer = SampleTokenizer(TokenizeOptions(str(small_tokenizer_dir), "chatml", None))
    with pytest.raises(ResourceError, match=r"a tokenising process died .* in rows rows\.jsonl:\d+ to 40"):
        list(tokenize_chunks(chunks(), tokenizer, 2))


REAL = [
    ("alpaca_5000", {}),
    ("t0_50k", {}),
    ("oasst1_en_val", {}),
    ("gsm8k", {"columns": {"prompt": "question", "completion": "answer"}}),
    *[
        (f"llamafactory_demo/{name}", {})
        for name in (
            "glaive_toolcall_en_demo.json", "glaive_toolcall_zh_demo.json", "v1_sft_demo.jsonl",
            "reason_tool_use_demo_50.jsonl", "kto_en_demo.json", "alpaca_zh_demo.json", "identity.json",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("tokenizer", ["tok_qwen3", "tok_minimind"])
def test_all_real_data_builds(tokenizer: str, shared: Path, tmp_path: Path) -> None:
    weights = {"t0_50k": 0.002, "alpaca_5000": 0.02, "oasst1_en_val": 0.1, "gsm8k": 0.02}
    sources = [{"path": str(shared / path), "weight": weights.get(path, 0.3), **more} for path, more in REAL]
    config = DataConfig.model_validate(
        {"name": "real", "root": tmp_path, "sources": sources, "max_tokens": 4096, "num_procs": 1}
    )
    store = build(config, str(shared / tokenizer))
    assert store.num_samples > 900
    assert store.meta.counts["bad"] == 0
    assert (store.num_labels > 0).all()
    assert len(set(store.files.tolist())) == len(REAL)


def test_errors_cross_processes_as_they_are(maker: Maker) -> None:
    rows = [chat("q", "a") for _ in range(600)]
    with pytest.raises(FlatoutError, match="has no chat template"):
        maker.build(rows, template=None, num_procs=2)


def test_pad_equal_to_eos_masks_no_real_eos(tiny, tmp_path: Path) -> None:
    """C20: the same rows with pad == eos give the same tokens and labels, the end of each answer among them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    assert tokenizer.pad_token != tokenizer.eos_token
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "same")
    source = SourceConfig(path=str(tiny.chats))
    stores = [
        build(DataConfig(name="chats", root=tmp_path / name, sources=[source]), str(folder))
        for name, folder in (("own", tiny.model_dir), ("equal", tmp_path / "same"))
    ]
    for name in ("token_ids", "trained", "offsets"):
        assert np.array_equal(getattr(stores[0], name), getattr(stores[1], name))
    ends = stores[1].token_ids == tokenizer.eos_token_id
    assert stores[1].trained[ends].sum() >= stores[1].num_samples
