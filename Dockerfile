# One image for every role of a deployment: SuperLink, SuperNodes, the curious server, attack workers, the page.
FROM python:3.11-slim

# the index for torch; for workers with GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# HOME is a tmpfs when the root is read-only; caches and Flower's settings lie below it
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    OMP_NUM_THREADS=1 \
    HOME=/tmp \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

RUN groupadd --gid 10001 fedgauge && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin fedgauge

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch's index may lack what torch needs: that comes from the default index, with the other dependencies
RUN pip install --no-deps --index-url "$TORCH_INDEX" $(grep -E '^torch(vision)?==' constraints.txt)
# a layer of its own: a change of the code installs none of it again
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; o = p['optional-dependencies']; \
print(*p['dependencies'], *o['text'], *o['adapters'], sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY client ./client
COPY defenses ./defenses
COPY attacks ./attacks
COPY server ./server
COPY simulations ./simulations
RUN pip install --no-deps . && pip check && rm -rf /app

# the newest format of a deployment's folder that it reads
LABEL fedgauge.format=1
WORKDIR /deployment
USER 10001:10001
# the log of each of docker-compose.yml's containers begins with what it waits for
ENTRYPOINT ["/bin/sh", "-c", "[ -z \"$WAITS_FOR\" ] || echo \"fedgauge: waiting for $WAITS_FOR\"; exec \"$@\"", "--"]
CMD ["fedgauge", "--help"]
