"""Full pages of KV by what they were computed from: a tree of exact tokens, so nothing collides.

A root is (salt, adapter digest); an edge is the tokens of one page. Whoever refers to a page also
refers to all pages before it, and pages come to rest last page first: the longest resting page is
always a leaf, and evicting in that order never cuts a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Root = tuple[str, str]
Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of one chain; `parent` is None for the first page."""

    key: tuple[object, Tokens]
    page: int
    parent: PrefixNode | None
    num_children: int = 0


class PrefixIndex:
    """Lookup of pages by content; resting pages are those that no sequence refers to."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[tuple[object, Tokens], PrefixNode] = {}
        self._by_page: dict[int, PrefixNode] = {}
        self._resting: OrderedDict[int, PrefixNode] = OrderedDict()

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def holds(self, page: int) -> bool:
        return page in self._by_page

    def match(self, root: Root, token_ids: Tokens) -> list[PrefixNode]:
        """The longest known chain that leaves at least one token to compute."""
        found: list[PrefixNode] = []
        above: object = root
        for end in range(self._page_size, len(token_ids), self._page_size):
            node = self._nodes.get((above, token_ids[end - self._page_size : end]))
            if node is None:
                break
            found.append(node)
            above = node
        return found

    def insert(
        self, root: Root, parent: PrefixNode | None, tokens: Tokens, page: int
    ) -> PrefixNode | None:
        """Name a full page; None when this content is known under another page already."""
        key = (root if parent is None else parent, tokens)
        known = self._nodes.get(key)
        if known is not None:
            return known if known.page == page else None
        node = PrefixNode(key, page, parent)
        self._nodes[key] = self._by_page[page] = node
        if parent is not None:
            parent.num_children += 1
        return node

    def rest(self, page: int) -> None:
        """No sequence refers to the page any more."""
        self._resting[page] = self._by_page[page]

    def wake(self, page: int) -> None:
        """A sequence refers to the page again."""
        self._resting.pop(page, None)

    def evict(self) -> int:
        """Forget the page that rests longest, and return it."""
        page, node = self._resting.popitem(last=False)
        assert node.num_children == 0, f"page {page} rests longer than its continuation"
        del self._nodes[node.key], self._by_page[page]
        if node.parent is not None:
            node.parent.num_children -= 1
        return page

    def check_integrity(self) -> None:
        assert len(self._nodes) == len(self._by_page)
        assert all(self._by_page[page] is node for page, node in self._resting.items())
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a chain is cut"
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        assert all(children.get(id(n), 0) == n.num_children for n in self._nodes.values())
