# One combination of versions for a first day on GPUs: docs/first_gpu.md. CUDA and NCCL come with torch; of the
# machine it needs the driver alone. After the build no network is needed.
FROM python:3.11.11-slim-bookworm

# Triton compiles what launches its kernels; the report names the commit by git.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ git make numactl \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /omni
COPY . .
ARG TORCH=torch==2.13.0
RUN make PYTHON=python3.11 TORCH="${TORCH}" .venv/ready-dev data

ENV HF_HUB_OFFLINE=1 WANDB_MODE=offline
CMD ["make", "gpu"]
