# docker build -t flatout .                            CPU: plan, build data, train small models
# docker build -t flatout --target gpu .               NVIDIA GPUs; run it with --gpus all
# Of a plain torch, the CPU stage carries CUDA's libraries for nothing: --build-arg TORCH="--index-url URL torch" names
# an index with CPU builds.
FROM python:3.11-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY flatout ./flatout
COPY migrate ./migrate
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./migrate

FROM python:3.11-slim AS gpu
COPY --from=wheel /wheels /wheels
# Triton compiles its launchers
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN wheel="$(ls /wheels/flatout-*.whl)" && pip install --no-cache-dir "${wheel}[gpu]" /wheels/flatout_migrate-*.whl \
    && useradd --create-home flatout
USER flatout
WORKDIR /home/flatout
ENTRYPOINT ["flatout"]

FROM python:3.11-slim AS cpu
COPY --from=wheel /wheels /wheels
COPY constraints.txt /
ARG TORCH=torch
RUN pip install --no-cache-dir -c /constraints.txt ${TORCH} \
    && pip install --no-cache-dir -c /constraints.txt /wheels/*.whl && useradd --create-home flatout
USER flatout
WORKDIR /home/flatout
ENTRYPOINT ["flatout"]
