"""Which prompts a run answers at each evaluation, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from flatout.config.schema import Config
from flatout.data.pictures.processor import PictureProcessor
from flatout.data.preference_columns import are_good
from flatout.data.prompt_file import Prompt, read_prompts, user_prompt
from flatout.data.rows.formats.pictures import MARK
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import control_pattern, tokenizer_of
from flatout.errors import DataError, Fix, UsageError, reason_of
from flatout.io.template_limits import bounded
from flatout.rollout.sampler import PicturePrompt, pictures_of
from flatout.track.callback import Reporter
from flatout.trainer.picture_inputs import processor_of

# every evaluation writes all of them into one line of answers.jsonl
MAX_PROMPTS, MAX_PROMPT_BYTES = 32, 128 << 10
NUM_ROWS = 3
# rows of the evaluation set up to this length are preferred, as people read them
MAX_ROW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as people read it and as the model does, and the data set's own answer, if it has one.

    `token_ids` are a `PicturePrompt` if the prompt has pictures.
    """

    text: str
    token_ids: tuple[int, ...]
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class EvalPrompts:
    """The prompts of a run; `stop_tokens` end an answer in its chat template, none without one.

    `max_positions` is the longest sequence that the model was made for.
    """

    prompts: tuple[TokenPrompt, ...]
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[str, ...]
    max_positions: int | None


def read_eval_prompts(
    config: Config,
    store: TokenStore,
    evaluated: Sequence[tuple[TokenStore, Sequence[int]]],
    max_positions: int | None,
    max_tokens: int,
    reporter: Reporter,
) -> EvalPrompts | None:
    """Return what to answer at each evaluation, None for nothing; `evaluated` are stores and their sample ids.

    `max_tokens` is the longest pass that memory allows. Prompts of the configuration are rendered by the training
    data's template. Raises DataError or UsageError for a file or prompt that cannot be used.
    """
    if config.eval.prompts == [] or not evaluated:
        return None
    tokenizer = tokenizer_of(config.data, config.model.name)
    meta, args = store.meta, config.data.template_args
    template = ChatTemplate(meta.template, meta.template_text, tokenizer, args) if meta.template_text else None
    most = config.eval.max_new_tokens
    if config.eval.prompts is None:
        rows, num_too_long = choose_rows(evaluated, max_tokens - most)
        prompts = [_prompt_of_row(tokenizer, template, *row) for row in rows]
        if num_too_long:
            why = f"a pass holds {max_tokens:,} tokens, {most} of them for the answer (eval.max_new_tokens)"
            reporter.stage("answers", f"skipped {num_too_long:,} rows of the evaluation set that are too long: {why}")
    else:
        untokenized = _prompts_of_setting(config.eval.prompts)
        has_pictures = store.num_pictures and any(prompt.pictures for prompt in untokenized)
        processor = processor_of(store) if has_pictures else None
        prompts = [_rendered(tokenizer, template, prompt, processor) for prompt in untokenized]
    if max_positions is not None:
        prompts = _cut(prompts, max_positions, most, reporter)
    for number, prompt in enumerate(prompts, start=1):
        if (num_tokens := len(prompt.token_ids) + most) > max_tokens:
            where = untokenized[number - 1].origin or f"eval.prompts: prompt {number}"
            raise UsageError(
                f"{where} has {num_tokens:,} tokens with {most} of its answer, but a pass holds at most {max_tokens:,}",
                [Fix({"batch.micro_batch_tokens": num_tokens}, "or lower eval.max_new_tokens")],
            )
    if not prompts:
        return None
    reporter.stage("answers", f"{len(prompts)} prompts at each evaluation, at most {most} tokens each")
    return EvalPrompts(tuple(prompts), tokenizer, meta.stop_tokens, max_positions)


def _cut(prompts: Sequence[TokenPrompt], max_positions: int, most: int, reporter: Reporter) -> list[TokenPrompt]:
    """Keep the ends of prompts that leave no positions for `most` new tokens, and say so."""
    room, cut = max(max_positions - most, max_positions // 2), list(prompts)
    for number, prompt in enumerate(prompts, start=1):
        if (num_tokens := len(prompt.token_ids)) > room:
            if pictures_of(prompt.token_ids):
                raise UsageError(
                    f"eval.prompts: prompt {number} has {num_tokens:,} tokens with its pictures, which are not cut, "
                    f"and the model {max_positions:,} positions, {most} of them for the answer (eval.max_new_tokens)"
                )
            what = f"prompt {number}: only its last {room:,} of {num_tokens:,} tokens are used"
            reporter.stage("answers", f"{what}; the model has {max_positions:,} positions")
            cut[number - 1] = replace(prompt, token_ids=prompt.token_ids[-room:])
    return cut


def _prompts_of_setting(value: Sequence[str] | str) -> list[Prompt]:
    if isinstance(value, str):
        prompts = read_prompts(Path(value), max_bytes=MAX_PROMPT_BYTES)
    else:
        prompts = [user_prompt(text) for text in value]
        if any(not text.strip() for text in value) or len("".join(value).encode(errors="replace")) > MAX_PROMPT_BYTES:
            raise UsageError(f"eval.prompts: expected prompts with text, {MAX_PROMPT_BYTES:,} bytes in all")
    if len(prompts) > MAX_PROMPTS:
        raise UsageError(f"eval.prompts: {len(prompts)} prompts; at most {MAX_PROMPTS} are answered, keep the best")
    return prompts


def _rendered(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, prompt: Prompt,
    processor: PictureProcessor | None,
) -> TokenPrompt:  # fmt: skip
    """Tokenize a prompt as `flatout chat` does, or as plain text to be continued if the data has no template."""
    if prompt.pictures and (processor is None or template is None):
        raise UsageError(
            f"{prompt.origin}: has pictures, which are answered if the training data has some; remove them"
        )
    try:
        with bounded("the chat template"):
            messages = [*prompt.messages]
            if prompt.pictures and processor is not None and template is not None:
                text = processor.rendered_prompt(template, messages, prompt.pictures)
            else:
                text = template.render(messages, generation_prompt=True) if template else prompt.text
        token_ids = tuple(tokenizer(text, add_special_tokens=template is None)["input_ids"])
    except RENDER_ERRORS as error:
        raise DataError(f"eval.prompts: {prompt.text[:80]!r} cannot be tokenized: {reason_of(error)}") from error
    if not token_ids:
        raise DataError(f"eval.prompts: {prompt.text[:80]!r} has no tokens; leave it out")
    token_ids = PicturePrompt(token_ids, prompt.pictures) if prompt.pictures else token_ids
    return TokenPrompt(prompt.text, token_ids, prompt.accepted[0] if prompt.accepted else None)


def choose_rows(
    evaluated: Sequence[tuple[TokenStore, Sequence[int]]], room: int
) -> tuple[list[tuple[tuple[int, ...], NDArray[np.int32]]], int]:
    """Return the prompts and references of NUM_ROWS samples: evenly spaced among the short ones, data sets in turn.

    A prompt with pictures is a `PicturePrompt`. Answers to avoid are no references. Samples whose prompt has over
    `room` tokens are passed over and counted.
    """
    token_id = cache(
        lambda set_index: processor_of(evaluated[set_index][0]).token_id if evaluated[set_index][0].num_pictures else 0
    )
    chosen: dict[tuple[int, int], tuple[tuple[int, ...], NDArray[np.int32]]] = {}
    too_long = set()
    for number in range(NUM_ROWS):
        set_index = number % len(evaluated)
        store, sample_ids = evaluated[set_index]
        ids = np.sort(np.asarray(sample_ids))
        ids = ids[are_good(store, ids)]
        if not len(ids):
            continue
        lengths = store.lengths[ids]
        # a sample of one token has nothing to answer
        limit = max(MAX_ROW_TOKENS, int(np.sort(lengths)[:NUM_ROWS][-1]))
        ids = np.unique(ids[(lengths <= limit) & (lengths > 1)])
        for sample_id in np.roll(ids, -((2 * number + 1) * len(ids) // (2 * NUM_ROWS))).tolist():
            split, reference = _split(*store.sample(sample_id).pair)
            if len(split) > room:
                too_long.add((set_index, sample_id))
            elif (set_index, sample_id) in chosen:
                continue
            elif context := _with_pictures(store, sample_id, split, token_id(set_index)):
                chosen[set_index, sample_id] = context, reference
                break
    return list(chosen.values()), len(too_long)


def _with_pictures(
    store: TokenStore, sample_id: int, context: NDArray[np.int32], token_id: int
) -> tuple[int, ...] | None:
    """Return a prompt with those of the sample's pictures that are in it; None if it ends inside one."""
    picture_slice = slice(*store.picture_offsets[sample_id : sample_id + 2])
    if picture_slice.start == picture_slice.stop:
        return tuple(context.tolist())
    ends = np.cumsum(store.extra["picture_tokens"][picture_slice])
    count = int((context == token_id).sum())
    num_pictures = int(np.searchsorted(ends, count, side="right"))
    if count and count != ends[num_pictures - 1]:
        return None
    return PicturePrompt(context.tolist(), store.pictures(sample_id)[:num_pictures])


def _split(token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Split a sample before its last trained span, or in the middle if nothing untrained precedes that."""
    ends = np.flatnonzero(loss_mask)
    end = int(ends[-1]) + 1 if len(ends) else len(token_ids)
    untrained = np.flatnonzero(~loss_mask[:end])
    start = int(untrained[-1]) + 1 if len(untrained) else 0
    if not 1 < start < end:
        start, end = (len(token_ids) + 1) // 2, len(token_ids)
    return token_ids[:start], token_ids[start:end]


def _prompt_of_row(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    context: tuple[int, ...],
    reference: NDArray[np.int32],
) -> TokenPrompt:
    """Return a row's prompt as it reads, without the template's marks around a single user turn."""
    text = str(tokenizer.decode(context, skip_special_tokens=True)).strip()
    if template is not None:
        turn = [{"role": "user", "content": "flatout"}]
        before, _, after = template.render(turn, generation_prompt=True).partition("flatout")
        rendered, control = str(tokenizer.decode(context)), control_pattern(tokenizer)
        inner = rendered.removeprefix(before).removesuffix(after)
        is_single = len(inner) == len(rendered) - len(before) - len(after)
        text = inner if is_single and not (control and control.search(inner)) else text
    text = MARK * len(pictures_of(context)) + text
    return TokenPrompt(text, context, str(tokenizer.decode(reference, skip_special_tokens=True)).strip())
