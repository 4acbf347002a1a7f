"""Reward models: a model with one score rates answers in the process of the run, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from flatout.config.data import DataConfig
from flatout.config.folders import is_run_folder
from flatout.config.read import load_config
from flatout.config.rewards import RewardConfig
from flatout.data.conversation import Conversation, Message, PreferenceRow, Role
from flatout.data.prompts import RunPrompt
from flatout.data.templates.template import template_text
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.environment import cache_folder
from flatout.errors import DataError, ResourceError, UsageError
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.inference import load_trained, resolve_model_paths, saved_scoring
from flatout.models.load.model import read_config
from flatout.models.load.source import cached_file_hash, check_source, weight_files
from flatout.models.scoring import scores_of
from flatout.rollout.rewards.signatures import value_of


class RewardModel:
    """A reward model's files and, once it is loaded, the model; it reads texts by its own tokenizer and template."""

    def __init__(self, config: RewardConfig) -> None:
        """Read what its files say of it. Raises UsageError unless it has one score, and like `check_source`."""
        self._title, folder = config.title, Path(str(config.path))
        if not folder.is_dir():
            raise UsageError(f"rollout.rewards: there is no folder {folder}; name the final/ folder of a reward model")
        self._paths = paths = resolve_model_paths(str(folder))
        check_source(paths.base, paths.revision)
        scoring = saved_scoring(paths.adapter) if paths.adapter else None
        self._config = read_config(paths.base, paths.revision, "model", scoring)
        if not is_scoring(self._config) or self._config.num_labels != 1:
            why = "it has no head with one score; train one with objective=reward"
            raise UsageError(f"rollout.rewards: {folder} is no reward model: {why}")
        own = (paths.adapter or Path(paths.base)).iterdir()
        read = {file for file in own if file.suffix in (".json", ".jinja", ".safetensors")}
        self._files = sorted({*weight_files(paths.base, paths.revision), *read})
        run = next((place for place in (folder, folder.parent) if is_run_folder(place)), None)
        self._data = load_config(run / "config.yaml").data if run else DataConfig()

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, which are on the device as in their files."""
        return sum(file.stat().st_size for file in self._files if file.suffix == ".safetensors")

    @property
    def digests(self) -> dict[str, str]:
        """The hash of each file that decides its scores."""
        kept = cache_folder() / "digests"
        return {f"{self._title}/{file.name}": cached_file_hash(file, kept).xxh3 for file in self._files}

    def load(self, device: torch.device) -> None:
        """Load the weights. Raises like `load_trained`, and DataError for a tokenizer without a chat template."""
        self._model, tokenizer = load_trained(self._paths, device=device, writes=False)
        name, data = self._paths.tokenizer, self._data
        options = TokenizeOptions(name, *template_text(tokenizer, data.template, name), data)
        self._tokenizer = SampleTokenizer(options, tokenizer)

    def scores(self, items: Sequence[tuple[RunPrompt, str, Any]], on_batch: Callable[[], None]) -> list[Any]:
        """Return the score of each answer to its prompt, or a text that says why it has none.

        What `on_batch` raises ends it. Raises ResourceError if memory runs out.
        """
        texts = [self._token_ids(prompt, answer) for prompt, answer, _ in items]
        try:
            known = scores_of(self._model, [ids for ids in texts if not isinstance(ids, str)], lambda *_: on_batch())
        except torch.OutOfMemoryError as error:
            why = f"reward {self._title}: out of memory while it scores answers; lower rollout.max_new_tokens"
            raise ResourceError(why) from error
        left = iter(known[:, 0].tolist())
        return [ids if isinstance(ids, str) else value_of(next(left)) for ids in texts]

    def _token_ids(self, prompt: RunPrompt, answer: str) -> list[int] | str:
        """Return what the model reads, a chat with its answer as in its training, or why it cannot."""
        turns = [Message(cast(Role, turn["role"]), turn["content"], train=False) for turn in prompt.messages]
        chat = Conversation((*turns, Message("assistant", answer)), prompt.origin)
        try:
            (text,) = self._tokenizer.masked(PreferenceRow((chat,), ((0,),), prompt.origin))
        except DataError as error:
            return error.text
        ids: list[int] = self._tokenizer.encoder.encode(text.text, (), text.typed).token_ids.tolist()
        most = getattr(self._config.get_text_config(), "max_position_embeddings", None) or len(ids)
        return ids if len(ids) <= most else f"{len(ids):,} tokens are more than the {most:,} positions of the model"
