#!/bin/sh
# Fine-tunes on every GPU of this machine. Set MODEL_PATH, DATA_PATH, CKPT_PREFIX and DS_CONFIG_PATH first.
# Further flags go to the training script: `bash qwen3_sft.sh --use_lora`.
set -eu
export HF_HOME="${HF_HOME:-$CKPT_PREFIX/cache}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$CKPT_PREFIX/triton_cache_dir}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$CKPT_PREFIX/torch_extensions_dir}"

NUM_GPU="${NUM_GPU:-$(nvidia-smi --list-gpus | wc -l)}"
# without --use_fast_moe_block and --use_fp8: flatout has no expert kernels, and DeepSpeed's stages no FP8
set -- \
    --model_path "$MODEL_PATH" \
    --dataset_path "$DATA_PATH" \
    --output_dir "$CKPT_PREFIX/ckpt" \
    --train_steps "${NUM_STEP:-50}" \
    --micro_batch_size 4 \
    --max_length 8192 \
    --deepspeed_config "$DS_CONFIG_PATH" \
    --use_liger_kernel \
    --use_liger_efficiency_callback \
    --torch_compile \
    "$@"
# what is missing is said once, not by every rank
python qwen3_sft.py --check_for "$NUM_GPU" "$@"
torchrun --standalone --nproc-per-node="$NUM_GPU" qwen3_sft.py "$@"
