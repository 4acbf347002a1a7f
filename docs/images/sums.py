"""Rows and a reward for the runs that the pictures show: sums of two numbers, in a few minutes on a CPU.

In a folder with a copy of this file, and of SmolLM2-135M-Instruct (Apache-2.0) under this name:

python sums.py   # writes chats.jsonl and sums.jsonl
flatout data build chats.jsonl --tokenizer SmolLM2-135M-Instruct --name chats
flatout train name=first model=SmolLM2-135M-Instruct data=chats batch.samples_per_step=16 batch.max_steps=60 \
    eval.fraction=0.04 eval.every_steps=10 'eval.prompts=["What is 17 plus 25?", "What is 80 minus 34?"]'
flatout train runs/first/config.yaml name=lower-rate run_dir=runs/lower-rate optim.lr=2e-5
flatout train name=sums model=SmolLM2-135M-Instruct data.name=sums data.sources=[sums.jsonl] objective=grpo \
    rollout.rounds=10 rollout.prompts=16 rollout.group=4 rollout.max_new_tokens=24 rollout.rewards=sums.py:near \
    optim.lr=2e-4 schedule.kind=constant eval.fraction=0.1 eval.every_steps=2
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any


def near(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for an answer whose last number is right, and less for one that is further away."""
    numbers = re.findall(r"\d+", answer)
    return max(0.0, 1 - abs(int(numbers[-1]) - row["answer"]) / 100) if numbers else 0.0


def main() -> None:
    """Write 1,500 conversations, and 400 sums without their solutions."""
    random.seed(0)
    chats, sums = list[Any](), list[Any]()
    for _ in range(1500):
        less, more = sorted(random.sample(range(10, 100), 2))
        asked, answer = random.choice([
            (f"What is {less} plus {more}?", f"{less} plus {more} is {less + more}."),
            (f"What is {more} minus {less}?", f"{more} minus {less} is {more - less}."),
            (f"Which is greater, {less} or {more}?", f"{more} is greater than {less}."),
        ])  # fmt: skip
        chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    for _ in range(400):
        one, other = random.sample(range(10, 100), 2)
        sums.append({"question": f"What is {one} plus {other}?", "answer": one + other})
    for name, rows in (("chats.jsonl", chats), ("sums.jsonl", sums)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
