"""Unsloth's names: change `from unsloth import ...` to `from flatout.compat.unsloth import ...`."""

# ruff: noqa: E402  (the rest imports torch)
from flatout.environment import let_idle_threads_sleep

let_idle_threads_sleep()

from flatout.compat.unsloth.chat_templates import get_chat_template as get_chat_template
from flatout.compat.unsloth.chat_templates import standardize_data_formats as standardize_data_formats
from flatout.compat.unsloth.chat_templates import standardize_sharegpt as standardize_sharegpt
from flatout.compat.unsloth.chat_templates import train_on_responses_only as train_on_responses_only
from flatout.compat.unsloth.distributed_utils import *  # noqa: F403  (the original does so)
from flatout.compat.unsloth.models import FastLanguageModel as FastLanguageModel
from flatout.compat.unsloth.models import FastVisionModel as FastVisionModel
from flatout.compat.unsloth.models import is_bfloat16_supported as is_bfloat16_supported
from flatout.compat.unsloth.preference import PatchDPOTrainer as PatchDPOTrainer
from flatout.compat.unsloth.trainer import UnslothTrainer as UnslothTrainer
from flatout.compat.unsloth.trainer import UnslothTrainingArguments as UnslothTrainingArguments
from flatout.compat.unsloth.trainer import UnslothVisionDataCollator as UnslothVisionDataCollator

FastModel = FastLanguageModel
is_bf16_supported = is_bfloat16_supported
