"""How many queries are computed together, so that what kernels keep of each of their blocks fits into memory.

Plain arithmetic on sizes, which may be symbols of `torch.compile`. Forward passes keep a result per query, head and
block. Gradients have parts, which kernels write and sums add (`sums.py`): a query's for each slot, and for each item
of work (`streams.py`) those of a block of keys in fp32. A window's number of items is not known to the host, which does
not wait for the device; it has room for as many as there can be. Each query's own block and earlier ones are all that
it reads, so that a remote block is a whole one: there are no more of them than blocks of tokens.
"""

from typing import NamedTuple

from torch import Tensor

TILE = 256
"""A window is a multiple of so many tokens: what one thread block of the index counts."""
SHORTEST, LONGEST = 512, 2048
"""Bounds of what `task_length` gives."""
TASKS = 480
"""So many tasks were best at 8,192 tokens: fewer leave multiprocessors idle at the end, more cost sums."""
PARTIAL_BYTES = 2**31
"""The most that single blocks' results of a forward pass take, unless one window of gradients has more."""
PART_BYTES = 3 * 2**29
"""The most that the parts of a window take, if they are not to be cut into too many windows."""
PART_SHARE = 6
"""How many times the memory of the queries the parts of a window may take nevertheless."""
MOST_LINES = 2**31 - 1
"""Of a window's parts: the kernels count them in 32 bits."""


class Sizes(NamedTuple):
    """Of a selection and of the documents that it lies in."""

    tokens: int
    selections: int
    slots: int
    ids: int
    """Global ids of blocks (`layout.py`)."""
    block_size: int

    @property
    def edges(self) -> int:
        """Room for those of the index."""
        return self.tokens * self.selections * self.slots

    @property
    def task(self) -> int:
        """The most edges of a task of the index."""
        return task_length(self.edges)

    @property
    def whole(self) -> int:
        """The most whole blocks."""
        return self.tokens // self.block_size

    @property
    def spare(self) -> int:
        """How many more blocks some tokens can have than whole ones: a document adds one, even an empty one."""
        return self.ids - self.whole + 2

    def windows(self, window: int) -> int:
        """Their number."""
        return -(-self.tokens // window)

    def tasks(self, window: int) -> int:
        """Room for those of the index."""
        return most_tasks(self.edges, self.windows(window) * self.selections * self.ids)

    def items(self, units: int, window: int) -> int:
        """The most items of work that a window can have, for so many units of heads."""
        tokens = min(window, self.tokens)
        edges = tokens * self.selections * self.slots
        remote = (edges // self.task + min(self.selections * self.whole, edges)) * (units // self.selections)
        return remote + units * min(self.ids, tokens // self.block_size + self.spare)


class Parts(NamedTuple):
    """What gradients are summed of."""

    units: int
    """Of heads: each has items of its own."""
    group: int
    """Heads of a unit."""
    line_bytes: int
    """Of a query, head and slot."""
    item_bytes: int


def sizes(blocks: Tensor, cu_seqlens: Tensor | None, block_size: int) -> Sizes:
    """Those of a selection's `blocks` (batch, selection, query, slot)."""
    batch, selections, sequence, slots = blocks.shape
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return Sizes(
        batch * sequence, selections, slots, number_of_ids(batch * sequence, documents, block_size), block_size
    )


def task_length(edges: int) -> int:
    """The most edges that a task may have, in an index with room for so many; a multiple of 64 between the bounds.

    The longer tasks are, the less often is a block read and the fewer parts are there to sum; but there must be some
    for each multiprocessor. On an H200, with 16 slots and 4 proxies, 960 to 1,088 edges took least time at 8K tokens
    and 1,536 to 2,048 at 16K and 32K. What is shorter and longer follows from these and was not measured.
    """
    return min(max(edges // TASKS // 64 * 64, SHORTEST), LONGEST)


def most_tasks(edges: int, rows: int) -> int:
    """Those of an index, whatever their length: any of its rows can have one more than its edges fill."""
    return edges // SHORTEST + rows


def number_of_ids(tokens: int, documents: int, block_size: int) -> int:
    """Global ids of blocks that packed documents have."""
    return tokens // block_size + documents


def attention_parts(q: Tensor, units: int, block_size: int) -> Parts:
    """Those of the gradients of queries (batch, sequence, head, dim), and of keys and values."""
    heads, dim = q.shape[2:]
    return Parts(units, heads // units, dim * q.element_size(), 2 * block_size * dim * 4)


def kl_parts(q_proxy: Tensor, block_size: int, with_gradients: bool) -> Parts:
    """Those of the KL: a number of each item, and of each line the proxy's log-sum-exp."""
    proxies, dim = q_proxy.shape[2:]
    if not with_gradients:
        return Parts(proxies, 1, 4, 4)
    return Parts(proxies, 1, dim * q_proxy.element_size() + 4, block_size * dim * 4)


def part_window(size: Sizes, parts: Parts, q: Tensor) -> int:
    """Tokens of a window, in windows of nearly equal size; a multiple of TILE."""
    most = max(PART_BYTES, PART_SHARE * q.numel() * q.element_size())
    fixed = parts.item_bytes * parts.units * (size.whole + size.spare)
    lines = parts.units * parts.group * size.slots
    # A task has so many edges of a unit, an own item the tokens of a block.
    task, block = size.task, size.block_size
    items = -(-parts.item_bytes * parts.units * (size.slots * block + task) // (task * block))
    fitting = min(max(most - fixed, most // 4) // (parts.line_bytes * lines + items), MOST_LINES // lines)
    number = -(-size.tokens // max(fitting // TILE * TILE, TILE))
    return -(-size.tokens // (number * TILE)) * TILE


def forward_window(size: Sizes, heads: int, line_bytes: int) -> int:
    """Tokens of a forward pass with results of `line_bytes` a query, head and slot; a multiple of TILE."""
    return fitting(size.tokens, heads * size.slots * line_bytes, PARTIAL_BYTES, TILE)


def fitting(tokens: int, bytes_a_token: int, most: int, multiple: int) -> int:
    """All tokens, or as many as fit into `most` bytes; rounded up, or down, to a multiple."""
    return min(max(most // bytes_a_token // multiple, 1) * multiple, -(-tokens // multiple) * multiple)


def step_window(
    size: Sizes, q: Tensor, kv_heads: int, q_proxy: Tensor | None, *, main_learns: bool, proxies_learn: bool
) -> int:
    """Tokens of the windows that a whole step goes by: those that suit all of its parts."""
    heads, dim = q.shape[2:]
    if main_learns:
        found = part_window(size, attention_parts(q, max(size.selections, kv_heads), size.block_size), q)
    else:
        found = forward_window(size, heads, dim * q.element_size() + 4)
    if q_proxy is not None:
        found = min(found, part_window(size, kl_parts(q_proxy, size.block_size, proxies_learn), q))
    return found
