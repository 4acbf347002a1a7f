"""Unsloth's and TRL's trainer for supervised fine-tuning: collects arguments and rows, and calls `flatout.train`."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jinja2 import TemplateError

from flatout import Callback, UsageError, build_data, train
from flatout.api.data import CHAT_COLUMNS, load_tokenizer
from flatout.api.ranks import this_rank
from flatout_migrate.call_arguments import ARGUMENTS, PEFT_DEFAULTS, changed_fields, settings_of
from flatout_migrate.preference import defaults_of, rules_of_method
from flatout_migrate.training_arguments import SFT_DEFAULTS, TRANSFORMERS_DEFAULTS
from flatout_migrate.translation import Rule
from flatout_migrate.unsloth.distributed_utils import cleanup_distributed_training
from flatout_migrate.unsloth.models import Model

if TYPE_CHECKING:
    from datasets import Dataset


class SFTConfig:
    """Training arguments by transformers' and TRL's names; one that flatout cannot honour raises ProblemsError here.

    An argument that was not given reads as that library's default.
    """

    method: ClassVar[str] = ""
    defaults: Mapping[str, Any] = SFT_DEFAULTS
    table: ClassVar[Mapping[str, Rule]] = ARGUMENTS
    # stands for what only the trainer knows
    told_later: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, output_dir: str = "trainer_output", **given: Any) -> None:
        self.__dict__["given"] = {"output_dir": output_dir, **given}
        if self.method:
            self.__dict__["defaults"] = defaults_of(self.method, given)
        settings_of(self.given, type(self).__name__, {**self.defaults, **self.told_later}, table=self.table)

    def __getattr__(self, name: str) -> Any:
        from transformers import TrainingArguments

        if name.startswith("__") or name not in self.table:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return {**vars(TrainingArguments), **self.defaults, **self.given}.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.given[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that were given."""
        return dict(self.given)


class UnslothTrainingArguments(SFTConfig):
    """The same with transformers' defaults, as in Unsloth."""

    defaults = TRANSFORMERS_DEFAULTS


def config_of(name: str, **told_later: Any) -> type[SFTConfig]:
    """Return the class of the arguments of TRL's trainer of this name."""
    method = name.lower()
    own = {"method": method, "table": {**ARGUMENTS, **rules_of_method(method)}, "told_later": told_later}
    return type(f"{name}Config", (SFTConfig,), {"__doc__": f"TRL's arguments of {name}Trainer.", **own})


class UnslothVisionDataCollator:
    """Says which tokens have loss in conversations with pictures; flatout makes the batches. Raises ProblemsError."""

    def __init__(
        self, model: Any, processor: Any, *, formatting_func: Any = None, train_on_responses_only: bool = False,
        instruction_part: str | None = None, response_part: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        settings_of(given, type(self).__name__)
        self.given, self.formatting_func, self.processor = given, formatting_func, processor
        self.parts = (instruction_part, response_part) if train_on_responses_only else None

    def rows(self, dataset: Any) -> Any:
        """Return the rows with their conversations; a list stays one, as it may hold Pillow's images."""
        return [self.formatting_func(row) for row in dataset] if self.formatting_func and dataset else dataset


class SFTTrainer:
    """TRL's SFTTrainer: `train()` is `flatout.train` with the arguments of the model and of the trainer.

    Raises ProblemsError that names every argument that flatout cannot honour.
    """

    config: type[SFTConfig] = SFTConfig

    def __init__(
        self, model: Any, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, *, tokenizer: Any = None, peft_config: Any = None,
        callbacks: Any = (), **given: Any,
    ) -> None:  # fmt: skip
        planned = ("training_step", "compute_loss", "create_optimizer")
        if own := [name for name in planned if getattr(type(self), name) is not SFTTrainer._planned]:
            raise UsageError(
                f"{type(self).__name__}.{own[0]} would never be called; pass an objective to flatout.train"
            )
        self.args = self.config() if args is None else args
        self._is_unsloth = isinstance(model, Model)
        self.model = model if isinstance(model, Model) else _wrapped(model, peft_config)
        self.tokenizer = self.processing_class = processing_class if tokenizer is None else tokenizer
        self._given = {**given, "data_collator": data_collator, "callbacks": callbacks or ()}
        self._datasets = {"train": train_dataset, "eval": eval_dataset}
        self._parts: tuple[str | None, str | None] | None = None
        if isinstance(data_collator, UnslothVisionDataCollator):
            self._given |= data_collator.given
            self.tokenizer = self.tokenizer or data_collator.processor
            self._parts = data_collator.parts
            self._datasets = {name: data_collator.rows(rows) for name, rows in self._datasets.items()}
        if self.tokenizer is None:
            paths = self.model.paths
            self.tokenizer = load_tokenizer(paths.tokenizer if paths else self.model.source.name_or_path)
        # a processor of pictures and texts, and its tokenizer
        self._reader, self.tokenizer = self.tokenizer, getattr(self.tokenizer, "tokenizer", self.tokenizer)
        if not {"r", "full_finetuning"} & self.model.given.keys():
            is_frozen = self.model.given.get("load_in_4bit") or self.model.given.get("load_in_fp8")
            self._given |= PEFT_DEFAULTS if is_frozen else {"full_finetuning": True}
            how = "adapters of rank 16 are trained on the frozen weights" if is_frozen else "all weights are trained"
            warnings.warn(f"get_peft_model was not called: {how}", stacklevel=2)
        self._settings()

    def _planned(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "all steps are planned before the first one; call train(), or pass an objective to flatout.train"
        )

    training_step = compute_loss = create_optimizer = _planned

    def answers_only(self, instruction_part: str | None, response_part: str | None) -> None:
        """Give loss to answers only; see `train_on_responses_only`."""
        self._parts = (instruction_part, response_part)
        self._rows(self._datasets["train"])

    @property
    def train_dataset(self) -> Dataset:
        """The training data as the run reads it: `input_ids`, and `labels` (-100: no loss)."""
        from datasets import Dataset

        store = self._store("train", self._datasets["train"])
        if store.num_pictures:
            raise UsageError("train_dataset: a set with pictures has no ids and labels alone; see `flatout data show`")
        samples = (store.sample(index).pair for index in range(store.num_samples))
        return Dataset.from_list([{"input_ids": ids, "labels": np.where(mask, ids, -100)} for ids, mask in samples])

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train, or go on with the run in `output_dir`; return transformers' TrainOutput. Raises as flatout.train."""
        from transformers.trainer_utils import TrainOutput

        settings, model, data = self._settings(), self.model, self._datasets["eval"]
        if isinstance(resume_from_checkpoint, str):
            raise UsageError("resume_from_checkpoint: write True; the newest valid checkpoint in output_dir is resumed")
        if data is not None:
            stores = [
                self._store(name, rows) for name, rows in (data if isinstance(data, dict) else {"eval": data}).items()
            ]
            settings["eval"] = {"prompts": [], **settings.get("eval", {}), "data": [one.folder.name for one in stores]}
        rows, more = self._rows(self._datasets["train"])
        settings["data"] |= {**more, "name": "train"}
        # training joins the ranks itself, and needs the memory of a model that has answered
        cleanup_distributed_training()
        model.loaded = None
        callbacks = [callback for callback in self._given["callbacks"] if isinstance(callback, Callback)]
        in_memory = {} if model.paths else {"model": model.source}
        model.run = train(settings, tokenizer=self._reader, data=rows, callbacks=callbacks, **in_memory)
        if not (steps := model.run.log.steps):  # no round had a signal
            return TrainOutput(0, math.nan, {})
        losses, seconds = [step.loss for step in steps if step.loss is not None], steps[-1].elapsed_s
        loss = sum(losses) / len(losses) if losses else math.nan
        rates = {"samples": sum(step.num_samples for step in steps) / seconds, "steps": len(steps) / seconds}
        metrics = {f"train_{name}_per_second": rate for name, rate in rates.items()}
        return TrainOutput(steps[-1].step, loss, {"train_runtime": seconds, "train_loss": loss, **metrics})

    @property
    def state(self) -> SimpleNamespace:
        """What transformers' TrainerState is read for: `global_step`, `log_history`."""
        log = self.model.trained().log
        steps = [
            {"step": one.step, "epoch": one.epoch, "loss": one.loss, "learning_rate": one.lr, **one.metrics}
            for one in log.steps
        ]
        evals = [{"step": one.step, "eval_loss": one.eval_loss} for one in log.evals]
        return SimpleNamespace(global_step=log.steps[-1].step, log_history=[*steps, *evals])

    def evaluate(self) -> dict[str, float]:
        """Return the figures of the run's last evaluation, equal on every rank. Raises UsageError if it has none."""
        evals = self.model.trained().log.evals
        if not evals:
            raise UsageError("evaluate: the run has no evaluation; pass eval_dataset")
        metrics, accuracy = {"eval_loss": evals[-1].eval_loss}, evals[-1].eval_token_accuracy
        return metrics if accuracy is None else {**metrics, "eval_token_accuracy": accuracy}

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the trained adapter or model to a folder (None: that of the arguments), on rank 0."""
        self.model.save_pretrained(output_dir or self._settings()["run_dir"])

    def _given_and_defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of all calls, and the defaults of their library."""
        if isinstance(self.args, SFTConfig):
            of_args, defaults = self.args.given, dict(self.args.defaults)
        else:
            of_args = changed_fields(self.args, output_dir=self.args.output_dir)
            defaults = dict(SFT_DEFAULTS if hasattr(self.args, "max_length") else TRANSFORMERS_DEFAULTS)
        settings = {**self.model.given, **of_args, **self._given}
        if method := self.config.method:
            if "seed" in settings:  # their notebooks give another to get_peft_model; here one seed does both
                settings.pop("random_state", None)
            defaults = defaults_of(method, settings, is_unsloth=self._is_unsloth)
        # how long samples may be: as the trainer says, else the model, else the default
        if "max_length" in settings:
            settings.pop("max_seq_length", None)
        elif "max_seq_length" in settings:
            defaults.pop("max_length", None)
        return settings, defaults

    def _settings(self) -> dict[str, Any]:
        given, defaults = self._given_and_defaults()
        gpus = _gpus(given, self.model.device_map)
        world, table = len(gpus) if gpus else this_rank().world, self.config.table
        settings = settings_of(given, type(self).__name__, defaults, world, table)
        root = f"{settings['run_dir']}/data"
        settings["data"] = {
            **settings.get("data", {}),
            "too_long": "drop" if self.config.method else "truncate",
            "root": root,
        }
        if paths := self.model.paths:
            revision = {"revision": paths.revision} if paths.revision else {}
            settings["model"] = {**revision, **settings.get("model", {}), "name": paths.base}
        return settings | ({"gpus": gpus} if gpus else {})

    def _store(self, name: str, dataset: Any) -> Any:
        rows, more = self._rows(dataset)
        return build_data(
            rows, tokenizer=self._reader, replace=True, **{**self._settings()["data"], **more, "name": name}
        )

    def _rows(self, dataset: Any) -> tuple[Any, dict[str, Any]]:
        """Return the rows with the column that is read, and the settings of `data` for them. Raises UsageError."""
        from datasets import Dataset

        if self.config.method:
            return listed(dataset), {}
        settings, _ = self._given_and_defaults()
        field, formatting_func = settings.get("dataset_text_field") or "text", settings.get("formatting_func")
        if formatting_func is not None and dataset is not None:
            # for one row, or for all of its columns at once
            is_single = isinstance(formatting_func(dataset[0]), str)
            dataset = {field: [formatting_func(row) for row in dataset] if is_single else formatting_func(dataset[:])}
            dataset = Dataset.from_dict(dataset)
        reads_pictures = isinstance(settings.get("data_collator"), UnslothVisionDataCollator)
        dataset = listed(dataset, reads_pictures=reads_pictures)
        names = dataset.column_names if isinstance(dataset, Dataset) else []
        if field not in names:
            if names and field != "text":
                raise UsageError(f"dataset_text_field: there is no column {field!r}; columns: {', '.join(names)}")
            is_pair = {"prompt", "completion"} <= {*names} and settings.get("completion_only_loss") is not False
            answers = is_pair or self._parts or settings.get("assistant_only_loss")
            return dataset, {"loss_type": "response_only" if answers else "all"}
        end = self.tokenizer.eos_token or "\n"
        # a text whose template ends it by eos and a line break does not get another eos
        texts = [text.rstrip() if text.rstrip().endswith(end) else text for text in dataset[field]]
        if self._parts is None:
            return Dataset.from_dict({"text": texts}), {"special_tokens": "keep", "loss_type": "all"}
        for column in (name for name in CHAT_COLUMNS if name in names):
            if all(_renders(self.tokenizer, *row) for row in zip(dataset[column], dataset[field], strict=True)):
                return dataset.select_columns(column), {"loss_type": "response_only"}
        if None in self._parts:
            raise UsageError("train_on_responses_only: these texts have no turns beside them; give both parts")
        cut = [_segments(text, *self._parts) for text in texts]
        return Dataset.from_dict({"segments": cut}), {"special_tokens": "keep", "loss_type": "response_only"}


class UnslothTrainer(SFTTrainer):
    """Unsloth's name for it."""


def listed(dataset: Any, *, reads_pictures: bool = False) -> Any:
    """Return rows in memory as a data set, except for pictures. Raises UsageError for none."""
    from datasets import Dataset, IterableDataset

    if dataset is None:
        raise UsageError("train_dataset is missing; pass a datasets.Dataset, rows, or the path of a file")
    is_listed = isinstance(dataset, list | IterableDataset) and not reads_pictures
    return Dataset.from_list([dict(row) for row in dataset]) if is_listed else dataset


def _wrapped(model: Any, peft_config: Any) -> Model:
    """Return a name or a transformers model as a Model: trained in full, or with adapters as PEFT's configuration."""
    if peft_config is None:
        return Model(model, full_finetuning=True)
    always = {name: getattr(peft_config, name) for name in ("r", "lora_alpha", "target_modules")}
    return Model(model, **{**always, **changed_fields(peft_config)})


def _gpus(settings: Mapping[str, Any], device_map: Any) -> list[int] | None:
    """Return the GPUs to start a rank on each; None: this process, or the ranks of a launcher. Raises UsageError."""
    rank, wanted, num_gpus = this_rank(), settings.get("enable_distributed_training"), torch.cuda.device_count()
    is_forced = os.environ.get("UNSLOTH_FORCE_SINGLE_GPU") == "1"
    if rank.world > 1 and (is_forced or wanted is False):
        why = "UNSLOTH_FORCE_SINGLE_GPU=1" if is_forced else "enable_distributed_training=False"
        raise UsageError(f"{why}, but a launcher started {rank.world} processes; start the script with python")
    if isinstance(device_map, Mapping):
        devices = {str(device).removeprefix("cuda:") for device in device_map.values()}
        if len(devices) > 1 or (rank.world > 1 and not devices <= {str(rank.local_index), "cpu"}):
            raise UsageError('device_map: a GPU that holds some layers would wait in training; write device_map="auto"')
        return [int(device) for device in devices - {"cpu"}] or None if rank.world == 1 else None
    # torchrun --nproc_per_node=1 is a launcher too
    is_single = (
        "LOCAL_RANK" in os.environ
        or rank.world > 1
        or is_forced
        or wanted is False
        or not (wanted or device_map in ("auto", "balanced"))
    )
    return None if is_single or num_gpus < 2 else list(range(num_gpus))


def _renders(tokenizer: Any, turns: Any, text: str) -> bool:
    with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return bool(tokenizer.apply_chat_template(turns, tokenize=False) == text)
    return False


def _segments(text: str, instruction: str | None, response: str | None) -> list[dict[str, Any]]:
    """Cut a text at the parts that open questions and answers; what follows a response part has a label."""
    cut, is_answer = [], False
    for piece in re.split(f"({re.escape(instruction or '')}|{re.escape(response or '')})", text):
        is_part = piece in (instruction, response)
        cut.append({"text": piece, "label": is_answer and not is_part})
        is_answer = piece == response if is_part else is_answer
    return [piece for piece in cut if piece["text"]]
