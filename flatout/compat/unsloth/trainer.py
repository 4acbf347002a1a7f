"""Unsloth's and TRL's trainer for supervised fine-tuning: collects settings and rows, and calls `flatout.train`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from flatout.api.prepare import build_data
from flatout.api.start import train
from flatout.compat.training_arguments import NULLABLE, SFT_DEFAULTS, TRAINING_ARGUMENTS, TRANSFORMERS_DEFAULTS
from flatout.compat.translation import (
    Became,
    Given,
    RefusedError,
    Rule,
    Translation,
    any_value,
    each,
    off,
    only,
    to,
    translate,
)
from flatout.compat.unsloth.distributed_utils import cleanup_distributed_training, this_rank
from flatout.compat.unsloth.models import MODEL_ARGUMENTS, PEFT_ARGUMENTS, Model
from flatout.data.rows.formats.conversations import CHAT_COLUMNS
from flatout.data.templates.template import RENDER_ERRORS
from flatout.environment import environment
from flatout.errors import UsageError
from flatout.models.load.inference import ModelPaths, resolve_model_paths
from flatout.track.callback import Callback

_COLLATORS = {
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
}


def _collator(given: Given) -> Became:
    if type(given.value).__name__ not in _COLLATORS or getattr(given.value, "mlm", False):
        raise RefusedError("flatout makes batches without padding; use train_on_responses_only for masks")
    return Became(note="batches have no padding")


_LOSS = off("write a flatout objective and call flatout.train(objective=...)")
ARGUMENTS: Mapping[str, Rule] = {
    **TRAINING_ARGUMENTS,
    "dataset_num_proc": to("data.num_procs"),
    "embedding_learning_rate": off("embeddings stay frozen under adapters; remove it"),
    "enable_distributed_training": any_value("several processes, or device_map"),
    "distributed_backend": only(("nccl", "gloo"), "ranks talk over nccl on GPUs and gloo on CPUs"),
    "data_collator": _collator,
    **each("compute_loss_func preprocess_logits_for_metrics", _LOSS),
    "compute_metrics": off("eval.prompts and `flatout eval` score answers"),
    **each("optimizers optimizer_cls_and_kwargs model_init", only((None, (None, None)), "write optim= instead")),
}


class SFTConfig:
    """Training arguments by transformers' and TRL's names; one that flatout cannot honour raises ProblemsError here.

    An argument that was not given reads as that library's default.
    """

    defaults: Mapping[str, Any] = SFT_DEFAULTS

    def __init__(self, output_dir: str = "trainer_output", **given: Any) -> None:
        self.__dict__["given"] = {"output_dir": output_dir, **given}
        _translate(self.given, self.defaults).checked(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        from transformers import TrainingArguments

        for values in (self.given, self.defaults, vars(TrainingArguments)):
            if name in values:
                return values[name]
        if name in ARGUMENTS:
            return None
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.given[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that were given."""
        return dict(self.given)


class UnslothTrainingArguments(SFTConfig):
    """The same, with transformers' defaults, as Unsloth has them."""

    defaults = TRANSFORMERS_DEFAULTS


def _translate(given: Mapping[str, Any], defaults: Mapping[str, Any], num_gpus: int = 1) -> Translation:
    rows = {"dataset_text_field", "formatting_func"}
    return translate(
        {name: value for name, value in given.items() if name not in rows},
        ARGUMENTS, defaults=defaults, nullable=NULLABLE, num_gpus=num_gpus,
    )  # fmt: skip


def _changed(args: Any, **needed: Any) -> dict[str, Any]:
    """Return the fields of another library's dataclass that differ from its defaults."""
    fresh = type(args)(**needed)
    values = {name: getattr(args, name) for name in type(args).__dataclass_fields__ if hasattr(fresh, name)}
    changed = {name: value for name, value in values.items() if value != getattr(fresh, name)} | needed
    return {name: value.value if isinstance(value, Enum) else value for name, value in changed.items()}


def _wrapped(model: Any, peft_config: Any) -> Model:
    """Return a name or a transformers model as a Model: with PEFT's configuration for adapters, else trained in full."""
    if isinstance(model, str | Path):
        wrapped = Model(resolve_model_paths(str(model)))
    else:
        wrapped = Model(ModelPaths(model.name_or_path, None, None, model.name_or_path), source=model)
    given, table = (
        ({"full_finetuning": True}, MODEL_ARGUMENTS) if peft_config is None else (vars(peft_config), PEFT_ARGUMENTS)
    )
    if peft_config is not None:
        given = {
            "r": peft_config.r,
            "lora_alpha": peft_config.lora_alpha,
            "target_modules": peft_config.target_modules,
            **_changed(peft_config),
        }
    wrapped.settings = wrapped.with_settings(translate(given, table, nullable=("target_modules",)), "model")
    return wrapped


def _formatted(formatting_func: Any, dataset: Any) -> list[str]:
    """Call a formatting function for each row, or once with all columns if it returns a list of texts."""
    first = formatting_func(dataset[0])
    texts = [formatting_func(row) for row in dataset] if isinstance(first, str) else formatting_func(dataset[:])
    return list(texts)


def _renders(tokenizer: Any, turns: Any, text: str) -> bool:
    with suppress(*RENDER_ERRORS):
        return bool(tokenizer.apply_chat_template(turns, tokenize=False) == text)
    return False


def segments(text: str, instruction: str, response: str) -> list[dict[str, Any]]:
    """Cut a text at the parts that open questions and answers; only what follows a response part has a label."""
    cut, is_answer = [], False
    for piece in re.split(f"({re.escape(instruction)}|{re.escape(response)})", text):
        is_part = piece in (instruction, response)
        cut.append({"text": piece, "label": is_answer and not is_part})
        is_answer = piece == response if is_part else is_answer
    return [piece for piece in cut if piece["text"]]


class _Tokens:
    """The rows of a data set as `input_ids`, `attention_mask` and `labels` (-100: no loss)."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __len__(self) -> int:
        return int(self._store.num_samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids, loss_mask = self._store.sample(range(len(self))[index])
        labels = [int(token) if has_loss else -100 for token, has_loss in zip(ids, loss_mask, strict=True)]
        return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels}


class SFTTrainer:
    """TRL's SFTTrainer: `train()` is `flatout.train` with the settings of the model and of `args`.

    Raises ProblemsError that names every argument that flatout cannot honour.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Any = None,
        *,
        tokenizer: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        **further: Any,
    ) -> None:
        for step in ("training_step", "compute_loss", "create_optimizer"):
            if getattr(type(self), step) is not SFTTrainer._planned:
                raise UsageError(
                    f"{type(self).__name__}.{step} would not be called; pass an objective to flatout.train"
                )
        self.args = SFTConfig() if args is None else args
        self.tokenizer = self.processing_class = processing_class if tokenizer is None else tokenizer
        self.model = model if isinstance(model, Model) else _wrapped(model, peft_config)
        if self.args.__class__.__module__.startswith("flatout."):
            given, defaults = dict(self.args.given), self.args.defaults
        else:
            given = _changed(self.args, output_dir=self.args.output_dir)
            defaults = SFT_DEFAULTS if hasattr(self.args, "max_length") else TRANSFORMERS_DEFAULTS
        self._callbacks = []
        for callback in callbacks or ():
            if isinstance(callback, Callback):
                self._callbacks.append(callback)
            elif type(callback).__name__ == "EarlyStoppingCallback":
                given |= {
                    name: getattr(callback, name) for name in ("early_stopping_patience", "early_stopping_threshold")
                }
            else:
                raise UsageError(
                    f"callbacks: {type(callback).__name__} would not be called; derive it from flatout.Callback"
                )
        given |= {**further, "data_collator": data_collator}
        self._given, self._formatting_func = given, formatting_func
        self._datasets = {"train": train_dataset, "eval": eval_dataset}
        self._answers: tuple[str | None, str | None] | None = None
        self._gpus = self._choose_gpus()
        known = self.model.settings.flat
        defaults = {
            name: value for name, value in defaults.items() if name != "max_length" or "data.max_tokens" not in known
        }
        num_gpus = len(self._gpus or "1") * this_rank().world
        self._settings = self.model.with_settings(_translate(given, defaults, num_gpus), type(self).__name__)

    def _choose_gpus(self) -> list[int] | None:
        """Return the GPUs to start ranks on; None: this process, or the ranks of a launcher. Raises UsageError."""
        world, wanted = this_rank().world, self._given.get("enable_distributed_training")
        device_map, num_gpus = self.model.device_map, torch.cuda.device_count()
        is_forced = environment().get("UNSLOTH_FORCE_SINGLE_GPU") == "1"
        if world > 1 and (is_forced or wanted is False):
            why = "UNSLOTH_FORCE_SINGLE_GPU=1" if is_forced else "enable_distributed_training=False"
            raise UsageError(f"{why}, but a launcher started {world} processes; start the script with python")
        if isinstance(device_map, Mapping):
            devices = {str(device).removeprefix("cuda:") for device in device_map.values()}
            if len(devices) > 1 or (world > 1 and devices != {str(this_rank().local_index)} and devices != {"cpu"}):
                raise UsageError('device_map: in training, GPUs that hold some layers only would wait; write "auto"')
            return [int(device) for device in devices if device.isdigit()] if world == 1 and num_gpus else None
        if world > 1 or is_forced or wanted is False or not (wanted or device_map in ("auto", "balanced")):
            return None
        return list(range(num_gpus)) if num_gpus > 1 else None

    def _planned(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "flatout plans all steps before the first one; call train(), or pass an objective to flatout.train"
        )

    training_step = compute_loss = create_optimizer = _planned

    def answers_only(self, instruction_part: str | None, response_part: str | None) -> None:
        """Give loss to answers only; see `train_on_responses_only`."""
        self._answers = (instruction_part, response_part)
        self._settings = Translation(
            (*self._settings.outcomes, *_translate({"assistant_only_loss": True}, {}).outcomes)
        )
        self._rows(self._datasets["train"])

    @property
    def train_dataset(self) -> _Tokens:
        """The training data as tokens and labels, as the run will read it."""
        return _Tokens(self._build("train", self._datasets["train"]))

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train; return a TrainOutput. A second call resumes the run, or returns it if it is complete.

        Raises UsageError for a checkpoint of another run, and as `flatout.train` does.
        """
        from transformers.trainer_utils import TrainOutput

        values = self._values()
        run_dir = Path(values["run_dir"])
        if isinstance(resume_from_checkpoint, str) and run_dir not in Path(resume_from_checkpoint).parents:
            raise UsageError(
                f"resume_from_checkpoint: {resume_from_checkpoint} is not in output_dir, which is {run_dir}"
            )
        rows, data = self._rows(self._datasets["train"])
        values["data"] |= {**data, "name": "train"}
        evaluated = self._datasets["eval"]
        if evaluated is not None:
            several = evaluated if isinstance(evaluated, Mapping) else {"eval": evaluated}
            names = [self._build(name, dataset).folder.name for name, dataset in several.items()]
            values["eval"] = {"prompts": [], **values.get("eval", {}), "data": names}
        # training joins the ranks itself; the object that was passed stays as it is
        cleanup_distributed_training()
        self.model.loaded = None
        model = {"model": self.model.source} if self.model.source is not None else {}
        self.model.run = train(values, tokenizer=self.tokenizer, data=rows, callbacks=self._callbacks, **model)
        steps = self.model.run.log.steps
        seconds, last = steps[-1].elapsed_s, steps[-1]
        loss = sum(step.loss for step in steps) / len(steps)
        metrics = {
            "train_runtime": seconds, "train_steps_per_second": last.step / seconds, "train_loss": loss, "epoch": last.epoch,
            "train_samples_per_second": sum(step.num_samples for step in steps) / seconds,
        }  # fmt: skip
        return TrainOutput(last.step, loss, metrics)

    @property
    def state(self) -> SimpleNamespace:
        """`global_step` and `log_history`: what transformers' TrainerState is read for."""
        log = self.model.trained().log
        steps = [
            {
                "step": one.step,
                "epoch": one.epoch,
                "loss": one.loss,
                "grad_norm": one.grad_norm,
                "learning_rate": one.lr,
            }
            for one in log.steps
        ]
        evals = [{"step": one.step, "eval_loss": one.eval_loss} for one in log.evals]
        return SimpleNamespace(
            global_step=steps[-1]["step"], log_history=sorted(steps + evals, key=lambda one: one["step"])
        )

    def evaluate(self) -> dict[str, float]:
        """Return the figures of the run's last evaluation, the same on every rank. Raises UsageError if it has none."""
        evals = self.model.trained().log.evals
        if not evals:
            raise UsageError("evaluate: the run has no evaluation; pass eval_dataset, and call train() first")
        return {"eval_loss": evals[-1].eval_loss, "eval_token_accuracy": evals[-1].eval_token_accuracy}

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the trained adapter or model to a folder, `output_dir` of the arguments by default; on rank 0."""
        self.model.save_pretrained(output_dir or self._values()["run_dir"])

    def _values(self) -> dict[str, Any]:
        values = self._settings.settings
        paths, run_dir = self.model.paths, values["run_dir"]
        values["data"] = {**values.get("data", {}), "too_long": "truncate", "root": str(Path(run_dir) / "data")}
        if self.model.source is None:
            revision = {"revision": paths.revision} if paths.revision else {}
            values["model"] = {**revision, **values.get("model", {}), "name": paths.base}
        if "method" not in values and "lora" not in values:
            raise UsageError("the model has no adapters; call get_peft_model, or from_pretrained(full_finetuning=True)")
        return values | ({"gpus": self._gpus} if self._gpus else {})

    def _build(self, name: str, dataset: Any) -> Any:
        """Return the token store of a data set, built with the settings of the run."""
        rows, data = self._rows(dataset)
        return build_data(
            rows, tokenizer=self.tokenizer, **{**self._values()["data"], **data, "name": name, "replace": True}
        )

    def _rows(self, dataset: Any) -> tuple[Any, dict[str, Any]]:
        """Return the rows to train on, with the columns that are read alone, and settings of `data` for them."""
        from datasets import Dataset

        if dataset is None:
            raise UsageError("train_dataset is missing; pass a datasets.Dataset, rows, or the path of a file")
        field, in_full = self._given.get("dataset_text_field") or "text", {"special_tokens": "keep", "loss_type": "all"}
        if self._formatting_func is not None:
            dataset = Dataset.from_dict({"text": _formatted(self._formatting_func, dataset)})
            field = "text"
        names = getattr(dataset, "column_names", [field])
        if field not in names and field != "text":
            raise UsageError(f"dataset_text_field: the data has no column {field!r}; columns: {', '.join(names)}")
        if not isinstance(dataset, Dataset) or field not in names:
            is_pair = {"prompt", "completion"} <= set(names) and self._given.get("completion_only_loss") is not False
            return dataset, {"loss_type": "response_only"} if is_pair or self._answers else {}
        texts = dataset.select_columns(field).rename_columns({field: "text"} if field != "text" else {})
        if self._answers is None:
            return texts, in_full
        for column in {*CHAT_COLUMNS} & {*names}:
            if all(
                _renders(self.tokenizer, turns, text)
                for turns, text in zip(dataset[column], texts["text"], strict=True)
            ):
                return dataset.select_columns(column), {"loss_type": "response_only"}
        instruction, response = self._answers
        if not instruction or not response:
            raise UsageError("train_on_responses_only: these texts have no turns beside them; give both parts")
        pieces = texts.map(
            lambda row: {"segments": segments(row["text"], instruction, response)}, remove_columns="text"
        )
        return pieces, in_full | {"loss_type": "response_only"}


class UnslothTrainer(SFTTrainer):
    """Unsloth's name for it."""
