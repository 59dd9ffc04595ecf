"""PEFT adapter folders: from files on disk to a checked specification and its manifest.

    folder → files → options + tensors → targets → manifest, specification, coverage report

Pure Python and numpy; nothing here executes, imports or unpickles what an adapter brings.
"""

from loraplex.adapter_format.check import (
    MAX_RANK,
    CheckedAdapter,
    adapter_parts,
    adapter_spec,
    check_adapter,
)
from loraplex.adapter_format.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFolder,
    FolderFile,
    read_folder,
)
from loraplex.adapter_format.manifest import Manifest, ManifestFile, parse_manifest
from loraplex.adapter_format.spec import (
    AdapterParts,
    AdapterSpec,
    BaseModelFacts,
    BiasSpec,
    CoverageReport,
    CoverageRow,
    SavedModule,
    TargetSpec,
    TensorLocator,
)
from loraplex.adapter_format.vocabulary import MAX_SAVED_BYTES

__all__ = [
    "CONFIG_FILE",
    "MAX_RANK",
    "MAX_SAVED_BYTES",
    "WEIGHTS_FILE",
    "AdapterFolder",
    "AdapterParts",
    "AdapterSpec",
    "BaseModelFacts",
    "BiasSpec",
    "CheckedAdapter",
    "CoverageReport",
    "CoverageRow",
    "FolderFile",
    "Manifest",
    "ManifestFile",
    "SavedModule",
    "TargetSpec",
    "TensorLocator",
    "adapter_parts",
    "adapter_spec",
    "check_adapter",
    "parse_manifest",
    "read_folder",
]
