from collections.abc import Iterator

import pytest

from flatout.demo.check import check
from flatout.demo.conversations import ChatMessage, draw_conversations, to_json_lines
from flatout.demo.families import is_held_out
from flatout.demo.prompts import held_out_prompts
from flatout.demo.world import SMALL_TALK

ABOUT_CONTEXT = ("What is your", "Where are you", "Who are you", "What is my", "Where do I")


def turns(num: int, seed: int, *, held_out: bool) -> Iterator[tuple[list[ChatMessage], str]]:
    for messages in draw_conversations(num, seed, held_out=held_out):
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                yield messages[:index], message["content"]


@pytest.mark.parametrize("held_out", [False, True])
def test_every_written_answer_passes_the_check(held_out: bool) -> None:
    checked = [check(prompt, answer) for prompt, answer in turns(400, seed=1, held_out=held_out)]
    assert len(checked) > 800
    assert all(checked)


def test_the_check_refuses_answers_to_other_questions() -> None:
    asked: dict[str, tuple[list[ChatMessage], str]] = {}
    num_refused = 0
    for prompt, answer in turns(400, seed=2, held_out=False):
        first_word = answer.split()[0]
        if first_word in asked and asked[first_word][1] != answer:
            assert not check(prompt, asked[first_word][1])
            num_refused += 1
        asked[first_word] = (prompt, answer)
    assert num_refused > 300


@pytest.mark.parametrize(
    ("question", "wrong", "right"),
    [
        ("Thanks.", "Hello!", "You are welcome."),
        ("Sort these words: toad, ant, fox.", "Sorted: ant, toad, fox.", "Sorted: ant, fox, toad."),
        ("Sort these words: toad, ant.", "Sorted: ant, toad, fox.", "Sorted: ant, toad."),
        ("Sort from low to high: 10, 9.", "Sorted: 10, 9.", "Sorted: 9, 10."),
        ("Reverse this list: key, hat.", "Backwards: key, hat.", "Backwards: hat, key."),
        ("Please spell goat.", "Letters: g o a.", "Letters: g o a t."),
        ("Please count from 3 to 5.", "Counting: 3 4 5 6.", "Counting: 3 4 5."),
        ("Which day comes before Monday?", "It is Tuesday.", "It is Sunday."),
        ("Today is Sunday. What day is tomorrow?", "It is Sunday.", "It is Monday."),
        ("Not cold, but?", "The opposite of cold is cold.", "The opposite of cold is hot."),
        ("Tell me the capital of Brae.", "The capital of Brae is Tweed.", "The capital of Brae is Cairn."),
    ],
)
def test_the_check_by_hand(question: str, wrong: str, right: str) -> None:
    prompt: list[ChatMessage] = [{"role": "user", "content": question}]
    assert check(prompt, right)
    assert not check(prompt, wrong)
    assert not check(prompt, "")


def test_the_check_reads_the_system_prompt_and_earlier_turns() -> None:
    told: list[ChatMessage] = [
        {"role": "system", "content": "You are Ada, a nurse from Kelso."},
        {"role": "user", "content": "Hi, my name is Hugo and I live in Arden."},
        {"role": "assistant", "content": "Nice to meet you, Hugo."},
    ]
    assert check([*told, {"role": "user", "content": "What is your job?"}], "I am a nurse.")
    assert not check([*told, {"role": "user", "content": "What is your job?"}], "I am a pilot.")
    assert check([*told, {"role": "user", "content": "What is my name?"}], "Your name is Hugo.")
    assert not check([*told, {"role": "user", "content": "What is my name?"}], "Your name is Ada.")
    assert not check([{"role": "user", "content": "What is my name?"}], "Your name is Hugo.")


def test_a_question_that_no_rule_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rule knows"):
        check([{"role": "user", "content": "Why?"}], "Because.")


def test_held_out_questions_are_never_trained_on() -> None:
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


def test_no_whole_conversation_is_in_both_files() -> None:
    trained = {to_json_lines([messages]) for messages in draw_conversations(2000, 3, held_out=False)}
    assert not trained & {to_json_lines([messages]) for messages in draw_conversations(500, 3, held_out=True)}


def test_lengths_are_very_uneven() -> None:
    words = sorted(
        sum(len(m["content"].split()) for m in messages) for messages in draw_conversations(2000, 0, held_out=False)
    )
    assert words[0] <= 3
    assert words[-1] > 8 * words[len(words) // 2]
    roles = [{m["role"] for m in messages} for messages in draw_conversations(300, 0, held_out=False)]
    assert 60 < sum("system" in found for found in roles) < 150


def test_the_seed_decides_everything() -> None:
    assert list(draw_conversations(50, 7, held_out=False)) == list(draw_conversations(50, 7, held_out=False))
    assert list(draw_conversations(50, 7, held_out=False)) != list(draw_conversations(50, 8, held_out=False))
    assert held_out_prompts(7) == held_out_prompts(7)


@pytest.mark.parametrize("seed", range(20))
def test_the_closing_prompts_are_held_out_and_end_with_the_user(seed: int) -> None:
    sort, persona, guest = held_out_prompts(seed)
    assert is_held_out(sort[0]["content"])
    assert is_held_out(persona[0]["content"])
    assert [message["role"] for message in guest] == ["user", "assistant", "user", "assistant", "user"]
    assert check(guest[:1], guest[1]["content"])
    assert check(guest[:3], guest[3]["content"])
    assert all(prompt[-1]["role"] == "user" for prompt in (sort, persona, guest))
