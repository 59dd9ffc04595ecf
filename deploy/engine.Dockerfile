# The engine on CPUs. torch comes from PyTorch's index of CPU builds, nothing else does.
FROM python:3.11.14-slim-bookworm AS wheel
WORKDIR /src
COPY . .
ENV PIP_CONSTRAINT=/src/constraints-cpu.txt
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN groupadd --gid 10001 loraplex \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin loraplex \
    && install -d -o 10001 -g 10001 /models /cache
RUN python -m pip install --no-cache-dir --no-deps \
    --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
COPY constraints-cpu.txt /opt/loraplex/constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --constraint /opt/loraplex/constraints.txt \
    "$(echo /wheels/*.whl)[engine]"
COPY deploy/jobs /opt/loraplex/deploy/jobs
WORKDIR /opt/loraplex
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=12 \
    CMD ["python", "/opt/loraplex/deploy/jobs/health.py", "127.0.0.1:50052"]
ENTRYPOINT ["python"]
CMD ["-m", "engine_svc.main"]
