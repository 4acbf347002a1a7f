"""A password or token in an address is used, and never shown or written down."""

import json
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.io.redact import redacted

ADDRESS = "https:/anna:hunter2@data.example/rows?token=s3same&part=1.jsonl"
SECRETS = ("hunter2", "s3same")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://anna:p@ss@host/x", "https://***@host/x"),
        ("https:/anna:pass@host/x", "https:/***@host/x"),
        ("s3://key@bucket/x?sig=abc&part=2", "s3://***@bucket/x?sig=***&part=2"),
        ({"https://a:b@host": ["https://a:b@host"]}, {"https://***@host": ["https://***@host"]}),
        ("mail anna@host, see https://host/a", "mail anna@host, see https://host/a"),
        ("org/set", "org/set"),
    ],
)
def test_only_the_secret_parts_of_an_address_go(text, expected):
    assert redacted(text) == expected


def test_no_verb_shows_or_writes_the_secret_of_a_source(tiny, tmp_path, monkeypatch, capfd):
    """The address is a file here, as its folders are named so; its last row is bad, and told."""
    monkeypatch.chdir(tmp_path)
    rows = Path(ADDRESS)
    rows.parent.mkdir(parents=True)
    rows.write_text("\n".join([*tiny.chats.read_text().splitlines()[:8], '{"messages": 1}']) + "\n")
    settings = {
        "model": {"name": str(tiny.model_dir)},
        "data": {"sources": [{"path": ADDRESS}], "on_bad_row": "skip"},
        "batch": {"samples_per_step": 4, "max_steps": 1},
        "device": "cpu",
    }
    Path("run.yaml").write_text(json.dumps(settings))
    source = ["data", "build", ADDRESS, "--tokenizer", str(tiny.model_dir)]
    for argv, succeeds in [
        ([*source, "--name", "strict"], False),
        ([*source, "--name", "loose", "--on-bad-row", "skip"], True),
        (["data", "list"], True),
        (["data", "show", "loose"], True),
        (["plan", "run.yaml"], True),
        (["train", "run.yaml"], True),
        (["train", "run.yaml", "batch.max_steps=2"], False),
        (["plan", "run.yaml", f"model.name={ADDRESS}"], False),
        (["plan", "run.yaml", f"strategy={ADDRESS}"], False),
        (["chat", ADDRESS, "--prompt", "Hi"], False),
        (["merge", ADDRESS, "--out", "merged"], False),
    ]:
        assert (main(argv) == 0) == succeeds, argv
        output = capfd.readouterr()
        assert not [secret for secret in SECRETS if secret in output.out + output.err], argv
    ours = {Path("run.yaml"), rows}
    written = [path for path in Path().rglob("*") if path.is_file() and path not in ours]
    assert len(written) > 15
    assert not [path for path in written for secret in SECRETS if secret.encode() in path.read_bytes()]
