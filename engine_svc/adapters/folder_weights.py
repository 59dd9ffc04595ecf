"""Adapter folders as a source of weights, without registry or store: for `enginectl generate`.

Every folder passes the check that publishing would make, and is packed when it is added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from engine_svc.adapters.host_region import HostRegion
from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.host_memory import LEAST_BYTES
from engine_svc.layout import AdapterLayout
from engine_svc.names import AdapterEntry, NameMap, NameMapUpdate, token_pairs
from engine_svc.types import AdapterRef, Failure, WeightsFailed, WeightsReady
from loraplex.adapter_format import (
    MAX_SAVED_BYTES,
    WEIGHTS_FILE,
    BaseModelFacts,
    check_adapter,
    read_folder,
)
from loraplex.status import NameInvalid, ResourceExhausted

#: a file in bfloat16 doubles in an engine that computes in float32; pages that are not full add
#: less than that again
_PACKED_GROWTH = 4
#: header and pages that are almost empty, of each adapter
_FOLDER_BYTES = 16 * 2**20


def bytes_for_folders(asked: int, folders: Sequence[Path]) -> int:
    """host_cache_bytes in effect where all adapters are known: room for these alone. Args: asked,
    by the settings, 0: auto."""
    weights = [folder / WEIGHTS_FILE for folder in folders]
    num_bytes = sum(path.stat().st_size for path in weights if path.is_file())
    return asked or LEAST_BYTES + _FOLDER_BYTES * len(folders) + _PACKED_GROWTH * num_bytes


class FolderWeights:
    """Implements `WeightsSource` for adapters that were added before; they are never evicted."""

    def __init__(self, base: BaseModelFacts, layout: AdapterLayout, region: HostRegion) -> None:
        self._base, self._layout, self._region = base, layout, region
        self._ready: dict[str, WeightsReady] = {}
        self._answers: deque[WeightsReady | WeightsFailed] = deque()
        self.names = NameMap()

    def add(
        self,
        name: str,
        folder: Path,
        *,
        max_rank: int = 256,
        base_model_confirmed: bool = False,
        max_saved_bytes: int = MAX_SAVED_BYTES,
    ) -> AdapterRef:
        """Check and pack a folder; `names` then resolves it for every tenant.

        Raises: AdapterRefused; NameInvalid when the name is taken; ResourceExhausted SIZE_LIMIT.
        """
        if name == self._base.name or any(ref.name == name for ref in self.names.list("")):
            raise NameInvalid("adapter", name, "a name that nothing else has")
        files = read_folder(folder).files
        checked = check_adapter(
            files, self._base, max_rank=max_rank, base_model_confirmed=base_model_confirmed,
            max_saved_bytes=max_saved_bytes,
        )  # fmt: skip
        digest = checked.manifest.digest
        if digest not in self._ready:
            plan = plan_packing(checked.spec.parts, self._layout, digest)
            span = self._region.try_take(plan.num_bytes)
            if span is None:
                raise ResourceExhausted(
                    f"adapter {name!r} takes {plan.num_bytes} bytes, more than the host cache has "
                    f"left of {self._region.num_bytes}; raise --host-cache-bytes",
                    reason="SIZE_LIMIT",
                )
            write_packed(plan, files[WEIGHTS_FILE], self._region.view(span))
            self._ready[digest] = WeightsReady(
                digest, span, plan.num_pages, plan.used_bytes, "disk", 0.0
            )
        ref = AdapterRef(
            name=name,
            version=1,
            digest=digest,
            public=True,
            max_rank=checked.spec.max_rank,
            chat_template=checked.spec.chat_template,
            template_tokens=token_pairs(checked.spec.template_tokens),
            eos_token_ids=checked.spec.eos_token_ids,
        )
        entry = AdapterEntry(name, "", public=True, active=True, current=ref)
        self.names.apply(NameMapUpdate(self.names.revision + 1, adapters=(entry,)))
        return ref

    def want(self, ref: AdapterRef, rank: int) -> None:
        ready = self._ready.get(ref.digest)
        if ready is None:
            failure = Failure("NOT_FOUND", "ADAPTER_NOT_FOUND", f"adapter {ref.name!r} not added")
            self._answers.append(WeightsFailed(ref.digest, failure))
        else:
            self._answers.append(ready)

    def drop(self, digest: str) -> None:
        """The weights stay."""

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        answers = tuple(self._answers)
        self._answers.clear()
        return answers
