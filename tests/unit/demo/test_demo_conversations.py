import json
import re
from collections.abc import Iterator

import pytest

from flatout.demo.conversations import SMALL_TALK, ChatMessage, held_out_prompts, is_held_out, sample_conversations

ABOUT_CONTEXT = ("What is your", "Where are you", "Who are you", "What is my", "Where do I")


def turns(num: int, seed: int, *, held_out: bool) -> Iterator[tuple[list[ChatMessage], str]]:
    for messages in sample_conversations(num, seed, held_out=held_out):
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                yield messages[:index], message["content"]


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right_by_the_question_and_what_was_told_before(held_out):
    seen = set()
    for prompt, answer in turns(400, seed=1, held_out=held_out):
        question = prompt[-1]["content"]
        told = " ".join(message["content"] for message in prompt if message["role"] != "assistant")
        listed, answered = question.partition(": ")[2].rstrip(".").split(", "), answer.partition(": ")[2].rstrip(".")
        if answer.startswith("Sorted"):
            assert answered == ", ".join(sorted(listed, key=lambda item: (int(item) if item.isdigit() else 0, item)))
        elif answer.startswith("Backwards"):
            assert answered == ", ".join(reversed(listed))
        elif answer.startswith("Letters"):
            assert answered.replace(" ", "") in question
        elif answer.startswith("Counting"):
            first, last = map(int, re.findall(r"\d+", question))
            assert answered == " ".join(map(str, range(first, last + 1)))
        elif question == "What is your job?":
            assert f", {answer.removeprefix('I am ').rstrip('.')} from" in told
        elif question == "What is my name?":
            assert f"my name is {answer.removeprefix('Your name is ').rstrip('.')} " in told
        else:
            continue
        seen.add(answer.split()[0])
    assert seen == {"Sorted:", "Backwards:", "Letters:", "Counting:", "I", "Your"}


def test_held_out_questions_are_never_trained_on():
    def keys(held_out: bool) -> set[str]:
        found = set()
        for prompt, _ in turns(1500, seed=3, held_out=held_out):
            question = prompt[-1]["content"]
            if not question.startswith(ABOUT_CONTEXT) and question not in SMALL_TALK:
                found.add(question)
            found.update(message["content"] for message in prompt if message["role"] == "system")
        return found

    trained, held_out = keys(held_out=False), keys(held_out=True)
    assert len(held_out) > 500
    assert not trained & held_out


def test_no_whole_conversation_is_in_both_files():
    trained = {json.dumps(messages) for messages in sample_conversations(2000, 3, held_out=False)}
    assert not trained & {json.dumps(messages) for messages in sample_conversations(500, 3, held_out=True)}


def test_lengths_are_very_uneven():
    words = sorted(
        sum(len(m["content"].split()) for m in messages) for messages in sample_conversations(2000, 0, held_out=False)
    )
    assert words[0] <= 3
    assert words[-1] > 8 * words[len(words) // 2]
    roles = [{m["role"] for m in messages} for messages in sample_conversations(300, 0, held_out=False)]
    assert 60 < sum("system" in found for found in roles) < 150


def test_the_seed_decides_everything():
    assert list(sample_conversations(50, 7, held_out=False)) == list(sample_conversations(50, 7, held_out=False))
    assert list(sample_conversations(50, 7, held_out=False)) != list(sample_conversations(50, 8, held_out=False))
    assert held_out_prompts(7) == held_out_prompts(7)


@pytest.mark.parametrize("seed", range(20))
def test_the_closing_prompts_are_held_out_and_end_with_the_answer(seed):
    sort, persona, guest = held_out_prompts(seed)
    assert is_held_out(sort[0]["content"])
    assert sort[1]["content"] == f"Sorted: {', '.join(sorted(re.split('[:,.] ?', sort[0]['content'])[1:-1]))}."
    assert is_held_out(persona[0]["content"])
    assert [message["role"] for message in persona] == ["system", "user", "assistant"]
    assert [message["role"] for message in guest] == ["user", "assistant"] * 3
