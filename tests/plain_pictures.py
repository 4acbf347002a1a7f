"""What plain transformers + PEFT make of rows with pictures, one sample at a time, with processors of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from picture_world import LR


def plain_processor(folder: Path) -> Any:
    """Make the processor by transformers' own classes, without its part for videos."""
    import transformers

    fields = json.loads((folder / "processor_config.json").read_text())
    own = getattr(transformers, fields.pop("processor_class"))
    fields.pop("image_processor")
    parts = dict.fromkeys(own.get_attributes())

    class WithoutVideos(own):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts |= {"image_processor": images, "tokenizer": tokenizer}
    return WithoutVideos(**parts, chat_template=tokenizer.chat_template, **fields)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in messages
    ]


def plain_inputs(
    processor: Any, row: list[dict[str, Any]], folder: Path, *, blank: bool = False
) -> dict[str, torch.Tensor]:
    from PIL import Image

    text = processor.tokenizer.apply_chat_template(in_parts(row), tokenize=False)
    paths = [p["path"] for m in row if not isinstance(m["content"], str) for p in m["content"] if p["type"] == "image"]
    images = [Image.open(folder / path) for path in paths]
    images = [Image.new("RGB", image.size) if blank else image for image in images]
    given = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    given.pop("attention_mask")
    if not images:
        given.pop("mm_token_type_ids", None)
    return given


def plain_losses(
    model: Any, steps: list[Any], loss_of: Any, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> Iterator[tuple[float, float]]:
    """Take the steps one sample at a time, with clipped gradients and a linear schedule.

    Yields each step's loss and gradient norm.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(trained, lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / len(steps))
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for sample_id in step.sample_ids:
            loss = loss_of(sample_id, step.num_label_tokens)
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        optimizer.step()
        scheduler.step()
        yield total, grad_norm


def start_adapter(config: Any, folder: Path) -> Any:
    """Save the adapter that a run starts with; return the planned run."""
    from built_run import built_run

    from flatout.models.lora.adapter import save_adapter

    start = built_run(config)
    folder.mkdir()
    save_adapter(start.model, folder, base_name=config.model.name, config=config.lora)
    start.close()
    return start.planned


class PlainRun:
    """The same steps by transformers and PEFT, from the rows themselves: losses in fp64 on a CPU, and the adapter.

    With `blank`, every picture is black. Without an adapter, the whole model is trained, without weight decay; with
    `sgd`, by SGD without momentum.
    """

    def __init__(
        self, planned: Any, model_dir: Path, adapter: Path | None, rows: Path, *, blank: bool = False, sgd: bool = False
    ) -> None:
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(
            model_dir, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
        )
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        self.model = model.double().train()
        self._planned, self._folder, self._blank = planned, rows.parent, blank
        self._make = torch.optim.SGD if sgd else partial(torch.optim.AdamW, weight_decay=0.01 if adapter else 0.0)
        self._processor = plain_processor(model_dir)
        self._rows = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]

    def losses(self) -> list[float]:
        steps = list(self._planned.plan.steps())
        taken = list(plain_losses(self.model, steps, self._loss, self._make))
        self.grad_norms = [grad_norm for _, grad_norm in taken]
        return [loss for loss, _ in taken]

    def adapter(self) -> dict[str, torch.Tensor]:
        return peft.get_peft_model_state_dict(self.model)

    def _loss(self, sample_id: int, num_label_tokens: int) -> torch.Tensor:
        store = self._planned.store
        ids, loss_mask = store.sample(sample_id).pair
        given = plain_inputs(
            self._processor, self._rows[int(store.rows[sample_id]) - 1], self._folder, blank=self._blank
        )
        assert given["input_ids"][0].tolist() == ids.tolist()  # what stands for pictures is the processor's own
        logits = self.model(**given, use_cache=False).logits[0, :-1]
        labels = torch.where(torch.from_numpy(loss_mask.copy()), given["input_ids"][0], -100)[1:]
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_label_tokens
