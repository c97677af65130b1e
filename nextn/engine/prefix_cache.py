"""Pages that outlive their request: a trie in which a prompt finds the pages of texts that began like it.

A node is one full page. Slot i of the NextN layer holds the pair (h_i, t_{i+1}), so a page is named by its
tokens and the one behind them: after c common tokens a hit is floor((c - 1) / page size) pages.

| who holds a node's page  | the node is | its page                                   |
|--------------------------|-------------|--------------------------------------------|
| the trie and requests    | locked      | stays                                      |
| the trie alone           | idle        | may be evicted, the longest unused first   |

A running request holds all the nodes from the root down to one, so whatever lies above a locked node is
locked, and all idle nodes can be evicted. They are kept in the order of their last use, a text's last page
first: thus the first in order never has children.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from nextn.engine.pages import PagePool
from nextn.errors import CapacityError

TOKEN = array("i")
"""How a token is written in a key; its item size is 4 bytes, and no vocabulary is larger."""


class PageKeys:
    """The names of a text's pages in order: one for each page whose tokens and next token are known.

    They are bytes and equal only if all tokens are. salt: part of the first page's name, so texts with
    different salts, or with and without one, have no page in common.
    """

    __slots__ = ("_page_bytes", "_salt", "_text")

    def __init__(self, tokens: Iterable[int], page_size: int, salt: str | None = None) -> None:
        self._page_bytes = page_size * TOKEN.itemsize
        self._salt = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        self._text = array(TOKEN.typecode, tokens).tobytes()

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the text."""
        self._text += array(TOKEN.typecode, tokens).tobytes()

    def __len__(self) -> int:
        return max(0, len(self._text) - TOKEN.itemsize) // self._page_bytes

    def __getitem__(self, page: int) -> bytes:
        start = page * self._page_bytes
        key = self._text[start : start + self._page_bytes + TOKEN.itemsize]
        return key if page else key + self._salt


class Node:
    """One page in the trie, under the page before it; the root is its own parent and has no page."""

    __slots__ = ("children", "depth", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent or self
        self.key = key
        self.page = page
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Node] = {}

    @property
    def is_evicted(self) -> bool:
        """Whether the page is gone; a node's parents outlive it."""
        return self.page == EVICTED


ROOT, EVICTED = -1, -2
"""Values of `Node.page` that are no pages."""


class PrefixCache:
    """The trie over one pool. It holds each of its pages once, beside the requests that run with them.

    enabled: with False nothing is found and nothing kept.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.root = Node(None, b"", ROOT)
        self._pool = pool
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def evictable(self) -> int:
        """Pages that only the trie holds."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self._pool.free + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting what is missing; raises `CapacityError` and changes nothing else."""
        if count > self.available:
            raise CapacityError(
                f"{count} cache pages are needed, {self._pool.free} are free and {self.evictable} evictable"
            )
        while self._pool.free < count:
            self._evict(next(iter(self._idle)))
        return self._pool.allocate(count)

    def keyed(self, keys: PageKeys, tokens: int) -> int:
        """Of a text's first `tokens` tokens, the full pages that the trie can hold."""
        return min(tokens // self._pool.page_size, len(keys)) if self.enabled else 0

    def match(self, keys: PageKeys, limit: int, start: Node | None = None) -> Node:
        """The deepest node on the text's path, at most `limit` pages down; the root where there is none.

        start: what an earlier match of the same text found. From there, only what has changed is looked at.
        """
        node = start or self.root
        while node.is_evicted or node.depth > limit:
            node = node.parent
        while node.depth < limit:
            child = node.children.get(keys[node.depth])
            if child is None:
                break
            node = child
        return node

    def idle_pages(self, node: Node) -> int:
        """Pages down to `node` that are evictable now, and would not be once a request holds them."""
        count = 0
        while node in self._idle:
            count += 1
            node = node.parent
        return count

    def acquire(self, node: Node) -> list[int]:
        """Hold all pages down to `node` once more, for a request that begins with them; returns them."""
        pages = []
        while node is not self.root:
            self._idle.pop(node, None)
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        self._pool.share(pages)
        return pages

    def insert(self, node: Node, keys: PageKeys, pages: Sequence[int], stop: int) -> Node:
        """Hang pages of a running request below `node`, down to which it holds the trie's, until `stop`.

        Returns the deepest node that has the request's page: above `stop` where the trie has another page
        under the same name. The request keeps its duplicate then, and what follows, for itself.
        """
        while node.depth < stop:
            key = keys[node.depth]
            if key in node.children:
                break
            node = self._add(node, key, pages[node.depth])
        return node

    def release(self, node: Node, keys: PageKeys, pages: Sequence[int], keep: int) -> None:
        """Give back a request's hold of its pages and keep the first `keep`, unless the trie has such.

        node: down to where it held the trie's own pages; they stay in any case.
        """
        while node.depth < keep:
            key = keys[node.depth]
            node = node.children.get(key) or self._add(node, key, pages[node.depth])
        self._pool.release(pages)
        while node is not self.root and self._pool.references(node.page) == 1:
            self._idle[node] = None
            self._idle.move_to_end(node)
            node = node.parent

    def forget(self, node: Node) -> None:
        """Evict the pages down to `node` that no request holds, and whatever is below them."""
        top: Node | None = None
        while node in self._idle:
            top, node = node, node.parent
        if top is None:
            return
        for each in reversed([top, *self._below(top)]):
            self._evict(each)

    def clear(self) -> None:
        """Evict every page that no request holds."""
        for node in list(self._idle):  # children first
            self._evict(node)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless running requests' `tables` and the trie hold all pages in use.

        A page is free or held, never both; idle are exactly the nodes that no table names, children first.
        """
        nodes = list(self._below(self.root))
        self._pool.check_integrity([*tables, *((node.page,) for node in nodes)])
        assert len({node.page for node in nodes}) == len(nodes), "two nodes have one page"
        idle = {node for node in nodes if self._pool.references(node.page) == 1}
        assert idle == set(self._idle), "the idle nodes are not those that only the trie holds"
        seen: set[Node] = set()
        for node in self._idle:
            assert seen.issuperset(node.children.values()), "a node would be evicted before its children"
            seen.add(node)

    def _below(self, node: Node) -> Iterator[Node]:
        """All nodes under `node`, parents first."""
        left = list(node.children.values())
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def _add(self, node: Node, key: bytes, page: int) -> Node:
        """A new node below `node`, with one hold of the page for the trie."""
        self._pool.share((page,))
        child = node.children[key] = Node(node, key, page)
        return child

    def _evict(self, node: Node) -> None:
        """Free the page of an idle node without children."""
        del self._idle[node]
        del node.parent.children[node.key]
        self._pool.release((node.page,))
        node.page = EVICTED
