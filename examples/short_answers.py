"""Teach a small chat model to answer in one sentence, with preference pairs generated from its own answers.

    python examples/short_answers.py HuggingFaceTB/SmolLM2-135M-Instruct --topics 12

The model answers four questions on each topic. Its full answer is rejected, and the first sentence of that answer is
chosen. DPO trains on the pairs of four topics in five. The questions of the other topics show whether it worked: in how
many held-out pairs the chosen answer has the higher reward, and how many new answers are one sentence.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import flatout

TOPICS = re.split(
    ", ",
    "rain, bread, a bicycle, the moon, a library, salt, a volcano, a clock, tea, a bridge, glass, a "
    "magnet, honey, snow, a compass, paper, a river, gold, a telescope, coffee, wind, a battery, soap, a "
    "map, ice, a forest, a camera, cotton, a lighthouse, rice, thunder, a piano, cheese, a desert, steel, "
    "a windmill, butter, an island, rubber, a mirror",
)
QUESTIONS = ("What is {}?", "Why is {} useful?", "Tell me about {}.", "What should a child know about {}?")
MAX_NEW_TOKENS = 32
FIRST_SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)


def first_sentence(answer: str) -> str:
    """The text up to the first sign that ends a sentence; all of it if there is none."""
    found = FIRST_SENTENCE.match(answer.strip())
    return found[0] if found else answer.strip()


def is_short(answer: str) -> bool:
    """The rule: an answer is one whole sentence."""
    return answer.strip() == first_sentence(answer) and answer.strip().endswith((".", "!", "?"))


def pairs_of(questions: list[str], answers: list[str]) -> list[dict[str, str]]:
    """A pair of each answer that is longer than its first sentence."""
    rows = [
        {"prompt": question, "chosen": first_sentence(answer), "rejected": answer.strip()}
        for question, answer in zip(questions, answers, strict=True)
    ]
    return [row for row in rows if row["chosen"] != row["rejected"] and len(row["chosen"].split()) > 3]


def ask(model: str, questions: list[str]) -> list[str]:
    """Greedy answers of a model as it is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    answering, answers = AutoModelForCausalLM.from_pretrained(model, dtype="float32"), list[str]()
    for first in range(0, len(questions), 16):
        chats = [[{"role": "user", "content": question}] for question in questions[first : first + 16]]
        asked = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        said = answering.generate(**asked, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main() -> None:
    """Make pairs, train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a chat model: its name on the hub, or a folder")
    parser.add_argument(
        "--out", type=Path, default=Path("short-answers"), help="folder of pairs and run (short-answers)"
    )
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate (5e-4)")
    parser.add_argument("--epochs", type=float, default=1, help="epochs (1)")
    parser.add_argument("--topics", type=int, default=len(TOPICS), help="ask about fewer topics")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    started_s = time.time()

    asked = [
        (place % 5 == 4, text.format(topic)) for place, topic in enumerate(TOPICS[: args.topics]) for text in QUESTIONS
    ]
    questions = [question for _, question in asked]
    answers = ask(args.model, questions)
    rows = {}
    for name, is_held_out in (("pairs", False), ("held-out", True)):
        own = [place for place, (held_out, _) in enumerate(asked) if held_out is is_held_out]
        rows[name] = pairs_of([questions[place] for place in own], [answers[place] for place in own])
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]), encoding="utf-8")
    held_out = [place for place, (is_held_out, _) in enumerate(asked) if is_held_out]
    before = [answers[place] for place in held_out]
    made_s = time.time() - started_s

    data = {"root": args.out / "data", "max_tokens": 512}
    flatout.build_data(args.out / "held-out.jsonl", tokenizer=args.model, name="held-out", replace=True, **data)
    run = flatout.train(
        model=args.model,
        data={**data, "name": "pairs", "sources": [{"path": str(args.out / "pairs.jsonl")}]},
        objective={"kind": "dpo", "beta": 0.1},
        run_dir=args.out / "run",
        lr=args.lr,
        epochs=args.epochs,
        samples_per_step=8,
        eval={"data": ["held-out"], "prompts": [], "every_steps": 0.5},
    )
    trained_s = time.time() - started_s - made_s
    after = run.generate([questions[place] for place in held_out], temperature=0, max_new_tokens=MAX_NEW_TOKENS)

    accuracy = run.log.evals[-1].metrics["rewards/accuracies"]
    shares = [sum(map(is_short, said)) / len(said) for said in (before, after)]
    print(f"{len(rows['pairs'])} pairs to train on, {len(rows['held-out'])} held out")
    print(f"held-out pairs whose chosen answer has the higher reward: {accuracy:.0%}")
    print(f"held-out answers of one sentence: {shares[0]:.0%} before, {shares[1]:.0%} after")
    print(f"{made_s:.0f} s to make pairs, {trained_s:.0f} s to train, {time.time() - started_s:.0f} s in all")
    for place, said, says in list(zip(held_out, before, after, strict=True))[:3]:
        print(f"\n{questions[place]}\n  before: {said.strip()!r}\n  after:  {says.strip()!r}")


if __name__ == "__main__":
    main()
