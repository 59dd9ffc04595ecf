"""Pages, prefix index, slots and ring by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.core.memory import Memory
from engine_svc.core.pages import PagePool
from engine_svc.core.prefix_index import PrefixIndex
from tests.support.core_world import limits


def test_a_page_of_a_running_step_goes_to_kv_at_once_but_to_a_load_only_after_its_commit() -> None:
    pool = PagePool(2)
    pages = [page for page in (pool.try_take(), pool.try_take()) if page is not None]
    assert sorted(pages) == [0, 1]
    pool.launched_step = 7
    for page in pages:
        assert pool.unref(page)
        pool.free(page)
    assert pool.try_take_settled(1) is None
    assert pool.try_take() in pages
    pool.committed_step = 7
    assert pool.try_take_settled(1) is not None
    pool.check_integrity()


def test_a_page_that_the_launched_step_copies_from_waits_for_that_step_though_it_is_free() -> None:
    memory = Memory(limits(num_pages=4))
    memory.launched(0, ())
    source, target, other = memory.take(), memory.take(), memory.take()
    # of two choices one takes a copy, the other one is preempted in the same plan
    memory.release([source])
    memory.release([other])
    memory.launched(1, [source])
    memory.pool.committed_step = 0
    assert memory.try_take_settled(3) is None
    settled = memory.try_take_settled(2)
    assert settled is not None
    assert source not in settled
    memory.pool.committed_step = 1
    assert memory.try_take_settled(1) == (source,)
    memory.check_integrity([[target], settled, [source]])


def test_a_load_takes_all_its_pages_or_none() -> None:
    pool = PagePool(3)
    assert pool.try_take_settled(4) is None
    assert pool.num_free == 3
    assert pool.try_take_settled(0) == ()
    taken = pool.try_take_settled(3)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2]


def test_releasing_a_page_twice_is_noticed() -> None:
    pool = PagePool(1)
    page = pool.try_take()
    assert page is not None
    pool.unref(page)
    with pytest.raises(AssertionError, match="released twice"):
        pool.unref(page)


def test_a_match_leaves_one_token_to_compute() -> None:
    index = PrefixIndex(2)
    root = ("t", "")
    first = index.insert(root, None, (1, 2), 10)
    assert first is not None
    index.insert(root, first, (3, 4), 11)
    assert [n.page for n in index.match(root, (1, 2, 3, 4))] == [10]
    assert [n.page for n in index.match(root, (1, 2, 3, 4, 5))] == [10, 11]
    assert index.match(root, (1, 2)) == []
    assert index.match(root, ()) == []
    assert index.match(("u", ""), (1, 2, 3, 4, 5)) == []


def test_equal_content_under_another_page_is_not_indexed_twice() -> None:
    index = PrefixIndex(2)
    assert index.insert(("t", ""), None, (1, 2), 10) is not None
    assert index.insert(("t", ""), None, (1, 2), 12) is None
    assert not index.holds(12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40), st.integers(0, 9))
def test_shared_prefixes_come_and_go_and_every_page_comes_back(
    lives: list[tuple[int, int]], keep: int
) -> None:
    """Sequences over few contents share, rest and are evicted; the books stay right."""
    memory = Memory(limits(num_pages=12, page_size=1))
    root, held = ("t", ""), []
    for content, length in lives:
        tokens = tuple((content * position) % 5 for position in range(length))
        nodes = memory.share_prefix(root, tokens)
        pages = [node.page for node in nodes]
        parent = nodes[-1] if nodes else None
        following = True
        while len(pages) < length and memory.num_room:
            pages.append(memory.take())
            at = len(pages) - 1
            if following:
                parent = memory.remember(root, parent, tokens[at : at + 1], pages[at])
                following = parent is not None
        held.append(pages)
        memory.check_integrity(held)
        if len(held) > keep % 4:
            memory.release(held.pop(0))
            memory.check_integrity(held)
    while held:
        memory.release(held.pop())
    memory.check_integrity(held)
    assert memory.num_room == 12
