"""Trains the demo's tokenizer: byte-level BPE with ChatML turns, saved as a transformers fast tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# `{% generation %}` marks what the assistant writes, including the end of turn; the label mask comes from it
CHATML = """\
{%- for message in messages %}
{%- if message.tool_calls or tools %}{{ raise_exception('the demo tokenizer knows no tools') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016, arXiv:1508.07909) of at most `vocab_size` entries.

    Every byte has an entry, so any text can be encoded. `<|im_end|>` ends a turn and is the eos token; `<|endoftext|>`
    is the pad token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START]})
    tokenizer.chat_template = CHATML
    return tokenizer
