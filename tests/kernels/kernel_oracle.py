"""The method written once more, one query row at a time, straight from the equations: nothing shared with the package.

Slow and deliberately naive: Python loops over rows, heads and tokens; autograd gives the gradients.
"""

import itertools
import math

import torch


def document_starts(batch, sequence, cu_seqlens=None):
    """The row-local start of each token's document, as nested lists."""
    starts = [[0] * sequence for _ in range(batch)]
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        for begin, end in itertools.pairwise(offsets):
            for token in range(begin, end):
                starts[token // sequence][token % sequence] = begin % sequence
    return starts


def select(q_proxy, k_proxy, *, top_k_blocks, block_size, cu_seqlens=None, num_local_blocks=1, num_sink_blocks=0):
    """Nested lists [batch][proxy][query] of the selected block ids, ascending."""
    q_proxy, k_proxy = q_proxy.detach(), k_proxy.detach()
    batch, sequence, proxies, dim = q_proxy.shape
    share = proxies // k_proxy.shape[2]
    starts = document_starts(batch, sequence, cu_seqlens)
    chosen = []
    for b in range(batch):
        chosen.append([])
        for p in range(proxies):
            chosen[b].append([])
            for i in range(sequence):
                start = starts[b][i]
                maxima = {}
                for j in range(start, i + 1):
                    score = float(q_proxy[b, i, p] @ k_proxy[b, j, p // share]) / math.sqrt(dim)
                    block = (j - start) // block_size
                    maxima[block] = max(maxima.get(block, -math.inf), score)
                own = (i - start) // block_size
                forced = {x for x in maxima if x > own - num_local_blocks or x < num_sink_blocks}
                free = sorted((x for x in maxima if x not in forced), key=lambda x: (-maxima[x], x))
                chosen[b][p].append(sorted(forced | set(free[: top_k_blocks - len(forced)])))
    return chosen


def tokens(blocks, start, query, block_size):
    """The tokens of the blocks, up to the query."""
    every = (start + x * block_size + t for x in blocks for t in range(block_size))
    return [j for j in every if j <= query]


def attention(q, k, v, chosen, block_size, cu_seqlens=None):
    """Equation 8: (out, lse); `chosen` as `select` gives it, or None for dense attention."""
    batch, sequence, heads, dim = q.shape
    starts = document_starts(batch, sequence, cu_seqlens)
    share = heads // k.shape[2]
    out, lse = [], []
    for b in range(batch):
        for i in range(sequence):
            for h in range(heads):
                seen = _seen(chosen, starts, b, h, heads, i, block_size)
                if not seen:
                    out.append(torch.zeros(v.shape[3], dtype=q.dtype))
                    lse.append(torch.tensor(-math.inf, dtype=q.dtype))
                    continue
                scores = k[b, seen, h // share] @ q[b, i, h] / math.sqrt(dim)
                weights = scores.exp() / scores.exp().sum()
                out.append(weights @ v[b, seen, h // share])
                lse.append(scores.exp().sum().log().detach())
    return torch.stack(out).view(batch, sequence, heads, -1), torch.stack(lse).view(batch, sequence, heads)


def kl(q_proxy, k_proxy, q, k, chosen, block_size, cu_seqlens=None):
    """Equation 10 for each proxy, the mean over the rows that see something."""
    batch, sequence, proxies, proxy_dim = q_proxy.shape
    heads, dim = q.shape[2:]
    starts = document_starts(batch, sequence, cu_seqlens)
    group, share, proxy_share = heads // proxies, heads // k.shape[2], proxies // k_proxy.shape[2]
    values = []
    for p in range(proxies):
        rows = []
        for b in range(batch):
            for i in range(sequence):
                seen = _seen(chosen, starts, b, p, proxies, i, block_size)
                if not seen:
                    continue
                teacher = torch.zeros(len(seen), dtype=q.dtype)
                for h in range(p * group, (p + 1) * group):
                    scores = (k[b, seen, h // share] @ q[b, i, h] / math.sqrt(dim)).detach()
                    teacher += scores.exp() / scores.exp().sum() / group
                scores = k_proxy[b, seen, p // proxy_share] @ q_proxy[b, i, p] / math.sqrt(proxy_dim)
                log_student = scores - scores.exp().sum().log()
                rows.append((teacher * (teacher.log() - log_student)).sum())
        values.append(torch.stack(rows).mean() if rows else torch.zeros((), dtype=q.dtype))
    return torch.stack(values)


def _seen(chosen, starts, b, head, heads, i, block_size):
    if chosen is None:
        return list(range(starts[b][i], i + 1))
    return tokens(chosen[b][head * len(chosen[b]) // heads][i], starts[b][i], i, block_size)


def as_lists(selection):
    """A Selection's blocks as nested lists without the unused slots."""
    return [[[[x for x in row if x >= 0] for row in proxy] for proxy in one] for one in selection.blocks.tolist()]


def tensors(seed, batch, sequence, heads, kv_heads, proxies, proxy_kv_heads, dim=5, proxy_dim=3, dtype=torch.float64):
    """(q_proxy, k_proxy, q, k, v), random, each asking for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (proxies, proxy_dim), (proxy_kv_heads, proxy_dim), (heads, dim), (kv_heads, dim), (kv_heads, dim + 1)
    return tuple(
        torch.randn(batch, sequence, n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n, d in sizes
    )
