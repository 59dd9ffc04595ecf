"""Adapters that benchmarks write from sizes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared.made_adapters import BASE_8B, RANK_OF_100_MB, write_adapter
from loraplex.adapter_format import WEIGHTS_FILE, check_adapter, read_folder
from tests.support.tiny_adapters import tiny_base


@pytest.mark.parametrize("seed", [0, None])
def test_written_adapter_passes_the_check(tmp_path: Path, seed: int | None) -> None:
    files = read_folder(write_adapter(tmp_path, 3, tiny_base(), seed=seed)).files
    checked = check_adapter(files, tiny_base())
    assert checked.spec.max_rank == 3
    assert any(files[WEIGHTS_FILE].read_bytes()[-64:]) is (seed is not None)


def test_saved_modules_are_part_of_it(tmp_path: Path) -> None:
    base = tiny_base(tie_word_embeddings=False)
    saved = ("embed_tokens", "lm_head")
    files = read_folder(write_adapter(tmp_path, 3, base, saved=saved)).files
    found = check_adapter(files, base).spec.parts.saved
    assert sorted(one.module for one in found) == sorted(saved)


def test_the_rank_named_so_has_100_mb_on_the_8b_shape(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, RANK_OF_100_MB, seed=None)
    checked = check_adapter(read_folder(folder).files, BASE_8B)
    assert checked.spec.weights_bytes == 100 * 2**20
