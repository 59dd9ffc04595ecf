"""Stream one answer with stubs generated into gen/.

python stream.py MODEL PROMPT
"""

import os
import sys
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parent / "gen"))
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

ADDRESS = os.environ.get("LORAPLEX_ENGINE_ADDRESS", "127.0.0.1:50052")
#: gRPC would send even loopback through http_proxy
OPTIONS = [("grpc.enable_http_proxy", 0)]


def main(model: str, prompt: str) -> int:
    request = engine_pb2.GenerateRequest(
        model=model,
        chat=engine_pb2.ChatMessages(
            messages=[engine_pb2.ChatMessage(role="user", content=prompt)]
        ),
        sampling=engine_pb2.SamplingParams(temperature=0.0, max_tokens=64),
    )
    with grpc.insecure_channel(ADDRESS, options=OPTIONS) as channel:
        try:
            for response in engine_pb2_grpc.EngineStub(channel).Generate(request, timeout=60):
                if response.HasField("delta"):
                    print(response.delta.text, end="", flush=True)
                elif response.HasField("summary"):
                    usage = response.summary.usage
                    print(
                        f"\n{usage.completion_tokens} tokens, TTFT {response.summary.ttft_s:.3f} s"
                    )
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
