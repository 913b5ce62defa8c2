# Linted with hadolint, and not built by the authors: no Docker engine was at hand.
#
#   docker build -t three-domain-grpo --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu .
#   docker run --rm -v "$PWD/runs:/work/runs" three-domain-grpo train --num-gpus 2
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" three-domain-grpo train --num-gpus 8
#
# An empty TORCH_INDEX_URL installs torch with CUDA from pip's own index.
FROM python:3.11-slim

ARG TORCH_INDEX_URL=""
ENV PYTHONUNBUFFERED=1

WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY pipeline ./pipeline
COPY recipes ./recipes
COPY accelerate_configs ./accelerate_configs
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
        pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX_URL" \
            "$(grep '^torch==' constraints.txt)"; \
    fi \
    && pip install --no-cache-dir -c constraints.txt . \
    && useradd --create-home --uid 1000 user \
    && install -d -o user /work

USER 1000
WORKDIR /work
ENTRYPOINT ["three-domain-grpo"]
CMD ["--help"]
