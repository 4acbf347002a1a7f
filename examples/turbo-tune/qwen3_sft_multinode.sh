#!/bin/sh
# Fine-tunes on every GPU of NUM_NODE machines; run it on each of them. Set MODEL_PATH, DATA_PATH, CKPT_PREFIX,
# DS_CONFIG_PATH, MASTER_ADDR and MASTER_PORT first, and the same FLATOUT_SECRET on each (docs/launching.md).
set -eu
export HF_HOME="${HF_HOME:-$CKPT_PREFIX/cache}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$CKPT_PREFIX/triton_cache_dir}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$CKPT_PREFIX/torch_extensions_dir}"

NUM_GPU="${NUM_GPU:-$(nvidia-smi --list-gpus | wc -l)}"
set -- \
    --model_path "$MODEL_PATH" \
    --dataset_path "$DATA_PATH" \
    --output_dir "$CKPT_PREFIX/ckpt" \
    --train_steps "${NUM_STEP:-100}" \
    --micro_batch_size 2 \
    --max_length 4096 \
    --deepspeed_config "$DS_CONFIG_PATH" \
    --use_liger_kernel \
    "$@"
# what is missing is said once, not by every rank
python qwen3_sft.py --check_for "$((${NUM_NODE:-2} * NUM_GPU))" "$@"
torchrun --nnodes="${NUM_NODE:-2}" --nproc-per-node="$NUM_GPU" \
    --rdzv-id=5566 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" qwen3_sft.py "$@"
