import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flatout.demo.conversations import sample_conversations
from flatout.demo.write import VOCABULARY_SIZE, train_tokenizer, write_demo, write_model_folder
from flatout.errors import UsageError

CONVERSATIONS = list(sample_conversations(400, 0, held_out=False))
TOKENIZER = train_tokenizer((m["content"] for c in CONVERSATIONS for m in c), VOCABULARY_SIZE)


@given(st.text())
def test_any_text_comes_back(text):
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_the_vocabulary_fits_the_model_and_words_are_one_token():
    assert 700 < len(TOKENIZER) <= VOCABULARY_SIZE
    assert TOKENIZER.eos_token == "<|im_end|>"
    for word in (" otter", " Tuesday", " 17"):
        assert len(TOKENIZER(word)["input_ids"]) == 1


def test_generation_marks_cover_the_answers_and_their_end_of_turn():
    for messages in CONVERSATIONS[:50]:
        encoded = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        trained = TOKENIZER.decode([token for token, marked in pairs if marked])
        assert trained == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")


def test_the_template_is_chatml():
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(jinja2.TemplateError, match="no tools"):
        TOKENIZER.apply_chat_template(messages, tools=[{"type": "function"}], tokenize=False)


def test_the_folder_is_a_transformers_model_without_weights(tmp_path):
    write_model_folder(tmp_path, TOKENIZER)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded("Sort these words: otter.") == TOKENIZER("Sort these words: otter.")
    assert not list(tmp_path.glob("*.safetensors"))


def test_writing_again_changes_nothing_and_another_seed_is_refused(tmp_path):
    folder = tmp_path / "demo"
    write_demo(folder, 5, num_train=60, num_held_out=10)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    write_demo(folder, 5, num_train=60, num_held_out=10)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    with pytest.raises(UsageError, match=r"train\.jsonl: is not this demo's.*remove"):
        write_demo(folder, 6, num_train=60, num_held_out=10)
