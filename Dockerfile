# One image for the SuperLink, the SuperNodes and the operator. It holds no key, no certificate
# and no data: each service mounts its own.
FROM python:3.11.14-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1

RUN groupadd --gid 1000 fedsim && useradd --uid 1000 --gid fedsim --create-home fedsim

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY fedsim ./fedsim
RUN pip install --constraint constraints.txt .

USER fedsim
WORKDIR /home/fedsim
