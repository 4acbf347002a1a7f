"""Unsloth's names: change `from unsloth import ...` to `from flatout_migrate.unsloth import ...`."""

# flatout first: it says how torch's threads wait, before the rest imports torch
from flatout import UsageError as _UsageError  # noqa: F401, I001

from flatout_migrate.unsloth.chat_templates import get_chat_template as get_chat_template
from flatout_migrate.unsloth.chat_templates import standardize_data_formats as standardize_data_formats
from flatout_migrate.unsloth.chat_templates import standardize_sharegpt as standardize_sharegpt
from flatout_migrate.unsloth.chat_templates import train_on_responses_only as train_on_responses_only
from flatout_migrate.unsloth.distributed_utils import *  # noqa: F403  (the original does so)
from flatout_migrate.unsloth.models import FastLanguageModel as FastLanguageModel
from flatout_migrate.unsloth.models import FastVisionModel as FastVisionModel
from flatout_migrate.unsloth.models import is_bfloat16_supported as is_bfloat16_supported
from flatout_migrate.unsloth.trl import PatchDPOTrainer as PatchDPOTrainer
from flatout_migrate.unsloth.trl import PatchFastRL as PatchFastRL
from flatout_migrate.unsloth.trainer import UnslothTrainer as UnslothTrainer
from flatout_migrate.unsloth.trainer import UnslothTrainingArguments as UnslothTrainingArguments
from flatout_migrate.unsloth.trainer import UnslothVisionDataCollator as UnslothVisionDataCollator

FastModel = FastLanguageModel
is_bf16_supported = is_bfloat16_supported
