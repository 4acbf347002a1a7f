from flatout.compat.unsloth.models import FastLanguageModel, FastVisionModel, is_bfloat16_supported
