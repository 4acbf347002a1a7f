from flatout.compat.unsloth.models import FastLanguageModel, is_bfloat16_supported
