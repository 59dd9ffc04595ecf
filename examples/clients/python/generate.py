"""Write the gRPC stubs of a folder of protos.

python generate.py PROTOS_DIR OUT_DIR
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc


def main(protos: Path, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(str(path) for path in protos.rglob("*.proto"))
    # google/protobuf/*.proto come with the compiler
    bundled = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--python_out={out}", f"--grpc_python_out={out}"]
    return int(protoc.main(["protoc", f"-I{protos}", f"-I{bundled}", *outputs, *files]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
