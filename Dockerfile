# CPU:   docker build -t tropism .
# CUDA:  docker build -t tropism:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# See docs/docker.md.
FROM python:3.12.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13.0
RUN python -m venv /opt/tropism
ENV PATH=/opt/tropism/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install --index-url "$TORCH_INDEX" "torch==$TORCH"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install ".[gguf,plots]"

FROM python:3.12.12-slim-bookworm
RUN useradd --create-home --uid 1000 tropism \
  && install -d -o tropism -g tropism /store /huggingface /work
COPY --from=build /opt/tropism /opt/tropism
ENV PATH=/opt/tropism/bin:$PATH \
    TROPISM_STORE=/store \
    HF_HOME=/huggingface \
    MPLCONFIGDIR=/tmp
USER 1000:1000
WORKDIR /work
VOLUME ["/store", "/huggingface"]
ENTRYPOINT ["tropism"]
CMD ["--help"]
