# The engine on NVIDIA GPUs. The CUDA libraries come with torch; Triton compiles its launchers with
# a C compiler when the engine starts.
FROM python:3.11.14-slim-bookworm AS wheel
WORKDIR /src
COPY . .
ENV PIP_CONSTRAINT=/src/constraints-cpu.txt
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 loraplex \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin loraplex \
    && install -d -o 10001 -g 10001 /models /cache
COPY constraints-cpu.txt /opt/loraplex/constraints-cpu.txt
WORKDIR /opt/loraplex
# A CUDA torch decides its own version of Triton.
RUN grep -vE '^(torch|triton)==' constraints-cpu.txt > constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --constraint constraints.txt \
    "$(echo /wheels/*.whl)[engine]"
COPY deploy/jobs /opt/loraplex/deploy/jobs
USER 10001:10001
ENV TRITON_CACHE_DIR=/cache/triton
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=12 \
    CMD ["python", "/opt/loraplex/deploy/jobs/health.py", "127.0.0.1:50052"]
ENTRYPOINT ["python"]
CMD ["-m", "engine_svc.main"]
