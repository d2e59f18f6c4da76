# One image for the SuperLink, the SuperNodes and the operator. It holds no key, no certificate
# and no data: each service mounts its own.
#
# The base image is what you say it is, by its digest: a tag may be another image tomorrow.
#
#   docker pull python:3.11-slim-bookworm
#   docker inspect --format '{{index .RepoDigests 0}}' python:3.11-slim-bookworm
#   docker build --build-arg PYTHON_IMAGE=python@sha256:... .
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}

ARG PYTHON_IMAGE
RUN echo "${PYTHON_IMAGE}" | grep -Eq '@sha256:[0-9a-f]{64}$' \
    || { echo "PYTHON_IMAGE is '${PYTHON_IMAGE}'; it must end in @sha256: and a digest." >&2; exit 1; }

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1

RUN groupadd --gid 1000 fedsim && useradd --uid 1000 --gid fedsim --create-home fedsim

WORKDIR /app
# What is installed is what was locked, to the byte; nothing else is fetched.
COPY requirements.lock ./
RUN pip install --require-hashes --only-binary :all: --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY fedsim ./fedsim
RUN pip install --no-deps --no-index --no-build-isolation .

USER fedsim
WORKDIR /home/fedsim
