"""What a run leaves in final/ is whole: the format that was trained stands beside the weights."""

import argparse
import json

import pytest
from transformers import AutoTokenizer

from flatout.cli import merge as merge_cli
from flatout.data.templates.template import template_text
from flatout.data.token_store import TokenStore
from flatout.trainer.run import train
from tests.usual import usual


@pytest.mark.parametrize("method", usual(["lora", "full"], ["lora"]))
def test_the_trained_template_is_the_exported_tokenizers(tiny, tmp_path, method):
    """`data.template` is not the tokenizer's own; whoever renders with the export gets the tokens that were trained."""
    config = tiny.config(
        tmp_path / "run",
        method=method,
        data={"name": f"alpaca-{method}", "template": "alpaca", "root": str(tmp_path / "data"), "max_tokens": None},
        batch={"max_steps": 1, "micro_batch_tokens": 1200},
    )
    train(config)
    folders = [config.folder / "final"]
    if method == "lora":
        parser = argparse.ArgumentParser()
        merge_cli.add_arguments(parser)
        merge_cli.run(parser.parse_args([str(config.folder), "--out", str(tmp_path / "merged")]))
        folders.append(tmp_path / "merged")
    (manifest,) = (tmp_path / "data").rglob("manifest.json")
    store = TokenStore.open(manifest.parent)
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()]
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        _, template = template_text(tokenizer, "alpaca", "tiny")
        assert (folder / "chat_template.jinja").read_bytes() == template.encode()
        for index in range(store.num_samples):
            rendered = tokenizer.apply_chat_template(rows[store.rows[index] - 1], return_dict=True)["input_ids"]
            assert rendered == store.sample(index).token_ids.tolist()
