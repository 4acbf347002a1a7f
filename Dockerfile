# docker build -t flatout .                       CPU: plan, build data, train small models
# docker build -t flatout-gpu --target gpu .      NVIDIA GPUs; run it with --gpus all
# Both have the extras of docs/install.md except deepspeed, which compiles its kernels with CUDA's compiler, and trackio,
# which does not admit the Pillow of constraints.txt.
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY flatout ./flatout
COPY migrate ./migrate
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./migrate

FROM python:3.11-slim-bookworm AS base
COPY --from=wheel /wheels /wheels
COPY constraints.txt /
ARG EXTRAS=studio,images,eval,gguf,jsonschema,remote,tensorboard,wandb,mlflow,comet
RUN useradd --create-home --uid 1000 flatout

FROM base AS gpu
# Triton compiles its launchers
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN for wheel in /wheels/flatout-*.whl; do \
    pip install --no-cache-dir -c /constraints.txt "${wheel}[gpu,${EXTRAS}]" /wheels/flatout_migrate-*.whl; done
USER 1000
WORKDIR /home/flatout
ENTRYPOINT ["flatout"]

FROM base AS cpu
# PyTorch's CPU build; the general index has the one with CUDA
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN for wheel in /wheels/flatout-*.whl; do \
    pip install --no-cache-dir -c /constraints.txt --extra-index-url "${TORCH_INDEX}" \
    "${wheel}[${EXTRAS}]" /wheels/flatout_migrate-*.whl; done
USER 1000
WORKDIR /home/flatout
ENTRYPOINT ["flatout"]
