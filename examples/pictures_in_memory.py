"""Train on Pillow images in memory, and ask about another one: python pictures_in_memory.py MODEL.

MODEL is a vision-language model; `flatout demo --images` writes a tiny one, demo-images/model, for a CPU.
"""

import sys
from random import Random

from PIL import Image

import flatout

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
QUESTION = "What color is it?"


def shade(color: str, random: Random) -> Image.Image:
    """An image of one color, a little lighter or darker."""
    return Image.new("RGB", (32, 32), tuple(value + random.randint(-30, 25) for value in COLORS[color]))


def row(color: str, random: Random) -> dict:
    """A question with an image at its mark <image>, and the answer."""
    return {
        "messages": [
            {"role": "user", "content": f"<image>{QUESTION}"},
            {"role": "assistant", "content": f"It is {color}."},
        ],
        "images": [shade(color, random)],
    }


def main(model: str) -> list[str]:
    """Train on 600 shades of three colors, and return the answers about a new shade of each."""
    random = Random(1)
    run = flatout.train(
        model={"name": model, "init": "random"},  # without `init`, a model keeps its weights
        method="full",
        device="cpu",
        data=[row(random.choice(list(COLORS)), random) for _ in range(600)],
        batch={"samples_per_step": 16, "epochs": 4},
        optim={"lr": 3e-3},
        eval={"prompts": []},
        name="colors",
    )
    return run.generate([QUESTION] * 3, images=[shade(color, random) for color in COLORS])


if __name__ == "__main__":
    sys.stdout.write("\n".join([*main(*sys.argv[1:]), ""]))
