from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from row_cases import Row, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flatout.cli.main import main
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.templates.template import ChatTemplate
from flatout.data.token_store import TokenStore
from flatout.io.json_file import read_json

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def shared():
    """Real tokenizers, templates and data, where there are any."""
    if not SHARED.is_dir():
        pytest.skip("no shared data beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def small_tokenizer_dir(tmp_path_factory):
    """A byte-level BPE of 400 tokens with ChatML's specials, eos <|im_end|>, no chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words = "user assistant system think hello there the answer is yes no \n \n\n"
    bpe.train_from_iterator([words] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    folder = tmp_path_factory.mktemp("small_tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(small_tokenizer_dir):
    return PreTrainedTokenizerFast.from_pretrained(small_tokenizer_dir)


@pytest.fixture(scope="session")
def template_of(small_tokenizer):
    """A checked template of the small tokenizer, from its text."""
    return lambda source: ChatTemplate.checked("inline", source, small_tokenizer)


CALL = (ToolCall("get", {"city": "Rome", "n": 3}, "call00000"),)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}},
        },
    },
)


def _chat(*turns: Message, tools: bool = False) -> Conversation:
    return Conversation(turns, Origin("t.jsonl", 3), TOOLS if tools else ())


@pytest.fixture(scope="session")
def chats():
    """The conversations that golden masks are written for."""

    def user(text: str) -> Message:
        return Message("user", text)

    def answer(text: str, reasoning: str | None = None, call: bool = False) -> Message:
        return Message("assistant", text, reasoning=reasoning, tool_calls=CALL if call else ())

    result = Message("tool", '{"x": 1}', tool_call_id="call00000")
    return {
        "multi": _chat(user("hi"), answer("hello"), user("bye"), answer("see you")),
        "system": _chat(Message("system", "be good"), user("hi"), answer("hello")),
        "tool": _chat(user("hi"), answer("", call=True), result, answer("sunny"), tools=True),
        "think": _chat(user("hi"), answer("hello", "let me"), user("b"), answer("c", "yes")),
        "rounds": _chat(
            user("hi"), answer("", "mmm", True), result, answer("sunny", "ok"),
            user("more"), answer("", None, True), result, answer("done"), tools=True,
        ),
    }  # fmt: skip


class Built:
    """A command: its exit code, what it printed in one line, and what it built.

    `samples` are (text, text with loss), `labels` their labels or classes, `counts` the report's. `tries` are the
    words that an error says to add, `steps` the whole commands, the one that takes its columns among them.
    """

    def __init__(self, words: list[str], code: int, printed: str) -> None:
        self.code, self.printed = code, " ".join(printed.split())
        told = [line.partition("  # ")[0] for line in printed.splitlines() if line.startswith("  try ")]
        added = [shlex.split(line)[1:] for line in told]
        self.tries, self.steps = [one for one in added if one != ["--yes"]], [words + one for one in added]
        self.samples, self.labels, self.counts = list[tuple[str, str]](), list[int](), dict[str, int]()

    def refuses(self, said: str) -> Built:
        """Assert that the rows are refused, and that the error says this."""
        assert self.code == 3, self.printed
        assert said in self.printed
        return self

    @property
    def learnt(self) -> list[str]:
        return [labels for _, labels in self.samples]


@pytest.fixture
def run(tmp_path, small_tokenizer, monkeypatch, capsys):
    """Runs a command and reads the data set x."""
    monkeypatch.chdir(tmp_path)

    def command(words: list[str]) -> Built:
        code = main(words)
        out, err = capsys.readouterr()
        built = Built(words, code, out + err)
        if code:
            return built
        store = TokenStore.open(Path("data/built_dataset/x"))
        pairs = [store.sample(index).pair for index in range(store.num_samples)]
        built.samples = [(small_tokenizer.decode(ids), small_tokenizer.decode(ids[mask])) for ids, mask in pairs]
        built.labels = next((store.extra[name].tolist() for name in ("label", "class") if name in store.extra), [])
        built.counts = read_json(store.folder / "report.json")["counts"]
        return built

    return command


@pytest.fixture
def build(run, small_tokenizer_dir):
    """Runs `flatout data build` on rows, or on files that are there."""

    def command(
        rows: list[Row] | None, *options: str, path: str = "rows.jsonl", template: str | None = "chatml"
    ) -> Built:
        if rows is not None:
            write_rows(path, rows)
        named = ["--template", template] if template else []
        words = ["data", "build", path, "--tokenizer", str(small_tokenizer_dir), "--name", "x", "--replace", *named]
        return run([*words, "--num-procs", "1", *options])

    return command
