# LongNet on PyTorch's own image. Any tag of pytorch/pytorch with torch 2.11 to 2.13 will do:
#   docker build --tag longnet .
#   docker run --gpus all --shm-size 8g --volume "$PWD/runs:/longnet/runs" longnet
#   docker run --gpus all longnet python train.py experiment=stdlib_gpu
# docker stop kills after 10 seconds, which may be too few for a step and a save: docker stop --time 170 CONTAINER
ARG PYTORCH=2.11.0-cuda12.8-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# Triton compiles what starts its kernels when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The image's torch is kept: it is within the bounds of pyproject.toml. Some tags have the system's own Python.
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
WORKDIR /longnet
# The dependencies alone, so that a change of the code does not install them again.
COPY pyproject.toml README.md LICENSE ./
COPY longnet/__init__.py longnet/
RUN python -m pip install --editable .

COPY . .
RUN useradd --create-home --uid 10001 longnet && mkdir --parents runs data && chown longnet runs data
# By number, so that a cluster that forbids root can tell.
USER 10001
CMD ["python", "train.py"]
