"""The reverse index and the rows of a selection in plain PyTorch, on a GPU."""

import torch
from msa_kernels.cute.index import EDGE_SLOTS, Index, Rows
from msa_kernels.cute.windows import task_length


def plain_index(blocks: torch.Tensor, first: torch.Tensor, own: torch.Tensor, size: int, window: int) -> Index:
    """Edges and tasks by sorting and loops over rows."""
    batch, proxies, sequence, slots = blocks.shape
    total = batch * sequence
    ids = blocks.permute(0, 2, 1, 3).reshape(total, proxies, slots).long()
    token = torch.arange(total, device="cuda")[:, None, None]
    proxy = torch.arange(proxies, device="cuda")[None, :, None]
    row = (token // window * proxies + proxy) * size + first.long()[:, None, None] + ids
    edge = (token * EDGE_SLOTS + torch.arange(slots, device="cuda")).expand_as(row)
    remote = (ids >= 0) & (ids < own[:, None, None])
    key = (row[remote] << 32 | edge[remote]).sort().values
    windows = -(-total // window)
    lengths = torch.bincount(key >> 32, minlength=windows * proxies * size).tolist()
    tasks, task_ptr, begin, task = [], [], 0, task_length(blocks.numel())
    for at, length in enumerate(lengths):
        if at % (proxies * size) == 0:
            task_ptr.append(len(tasks))
        for start in range(begin, begin + length, task):
            tasks.append((at % size, at // size % proxies, start, min(start + task, begin + length)))
        begin += length
    task_ptr.append(len(tasks))

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    edges = (key & 0xFFFFFFFF).int()
    return Index(edges, ints(tasks).view(-1, 4), ints(task_ptr), ints([0] * windows))


def plain_rows(blocks: torch.Tensor, own: torch.Tensor) -> Rows:
    """Of each query, from its list and its own block's number in its document."""
    own = own.view(blocks.shape[0], 1, -1, 1)
    earlier, chosen = ((blocks >= 0) & (blocks < own)).sum(-1), (blocks == own).any(-1)
    counts = (earlier + chosen).int()
    return Rows(torch.where(chosen, earlier, -1).int(), counts, (counts > 0).sum((0, 2)).int())
