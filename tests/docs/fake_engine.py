"""A gRPC server that speaks the engine's protocol: knows one model, answers in three deltas."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_reflection.v1alpha import reflection

from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import NotFound, to_grpc

MODEL = "sql-lora"
SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Repeats the prompt, and max_tokens as the number of tokens."""

    def Generate(self, request, context):
        if request.model != MODEL:
            context.abort_with_status(to_grpc(NotFound(f"no model {request.model!r}")))
        said = request.prompt or request.chat.messages[0].content
        yield engine_pb2.GenerateResponse(started=engine_pb2.Started(request_id="1"))
        for word in ("SELECT", " *", f" -- {said}"):
            yield engine_pb2.GenerateResponse(delta=engine_pb2.Delta(text=word))
        usage = engine_pb2.Usage(completion_tokens=request.sampling.max_tokens)
        yield engine_pb2.GenerateResponse(summary=engine_pb2.Summary(usage=usage, ttft_s=0.5))


@contextmanager
def serving() -> Iterator[str]:
    """The address of a running one."""
    server = grpc.server(ThreadPoolExecutor(2))
    engine_pb2_grpc.add_EngineServicer_to_server(FakeEngine(), server)
    reflection.enable_server_reflection([SERVICE, reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
