"""The attention's and the gradients' kernels in plain PyTorch, on the same buffers: what the host makes of them.

Parts that a kernel leaves alone are NaN, so that whatever is read without having been written shows. Columns of parts
are in their plain order: the order in which warps hold them is the kernels' own affair.
"""

import math

import torch

LOG2_E = math.log2(math.e)


def load(kernel):
    """In the place of `msa_kernels.cute.compile.load`."""
    return lambda *given: globals()[f"_{type(kernel).__name__}"](kernel, *given)


def _Layout(kernel, cu_seqlens, first, starts, ends, documents, sequence):
    offsets = cu_seqlens if cu_seqlens is not None else torch.arange(documents + 1) * sequence
    starts.fill_(0)
    ends.fill_(0)
    for d, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
        block = begin // kernel.block_size + d
        first[begin:end] = block
        for i, start in enumerate(range(begin, end, kernel.block_size)):
            starts[block + i], ends[block + i] = start, min(start + kernel.block_size, end)


def _own(first, starts, token, block_size):
    oldest = int(first[token])
    return oldest, (token - int(starts[oldest])) // block_size


def _Scores(kernel, q, k, first, starts, scores, begin, end, parts):
    for token in range(begin, end):
        keys = torch.arange(int(starts[int(first[token])]), token + 1)
        found = torch.einsum("hd,khd->hk", q[token].float(), k[keys].repeat_interleave(kernel.group, 1).float())
        for block, part in enumerate(found.split(kernel.block_size, 1)):
            row = (token - begin) * kernel.num_proxies
            scores[block, row : row + kernel.num_proxies] = part.amax(1) * kernel.proxy_dim**-0.5


def _TopK(kernel, scores, first, starts, blocks, begin, end):
    from msa_kernels.selection import ordered, top_blocks

    proxies, sequence = blocks.shape[1:3]
    for token in range(begin, end):
        _, own = _own(first, starts, token, kernel.block_size)
        given = scores[: own + 1, (token - begin) * proxies : (token - begin + 1) * proxies].T[None, :, None]
        rule = kernel.slots, kernel.num_local_blocks, kernel.num_sink_blocks
        found = top_blocks(ordered(given), torch.tensor([[own]]), *rule)[0, :, 0]
        blocks[token // sequence, :, token % sequence] = found


def _ReverseIndex(
    kernel, blocks, first, starts, counts, users, offsets, edges, tasks, task_ptr, claims, own_slot, used, queries,
    window, length,
):  # fmt: skip
    from msa_kernels.cute.index import EDGE_SLOTS

    batch, proxies, sequence, _ = blocks.shape
    total, size = batch * sequence, len(starts)
    rows = {}
    for token in range(total):
        oldest, own = _own(first, starts, token, kernel.block_size)
        for proxy in range(proxies):
            for slot, block in enumerate(blocks[token // sequence, proxy, token % sequence].tolist()):
                if 0 <= block < own:
                    row = (token // window * proxies + proxy) * size + oldest + block
                    rows.setdefault(row, []).append(token * EDGE_SLOTS + slot)
    claims.zero_()
    task_ptr.zero_()
    edge = task = 0
    for row in sorted(rows):
        for begin in range(0, len(rows[row]), length):
            piece = rows[row][begin : begin + length]
            edges[edge : edge + len(piece)] = torch.tensor(piece)
            tasks[task] = torch.tensor([row % size, row // size % proxies, edge, edge + len(piece)])
            edge, task = edge + len(piece), task + 1
            task_ptr[row // (size * proxies) + 1 :] = task
    queries.zero_()
    for token in range(total):
        _, own = _own(first, starts, token, kernel.block_size)
        ids = blocks[token // sequence, :, token % sequence]
        earlier, chosen = ((ids >= 0) & (ids < own)).sum(-1).int(), (ids == own).any(-1)
        own_slot[token // sequence, :, token % sequence] = torch.where(chosen, earlier, -1)
        used[token // sequence, :, token % sequence] = earlier + chosen
        queries += (earlier + chosen > 0).int()


def _Deltas(kernel, out, upstream, delta):
    delta.copy_((out.float() * upstream.float()).sum(-1))


def _items(edges, tasks, task_ptr, first, starts, ends, own_slot, window, begin, end, units, block_size):
    """Of each item with queries: its number, unit, first key, number of keys, and a (token, slot) for each query."""
    from msa_kernels.cute.index import EDGE_SLOTS

    selections, sequence = own_slot.shape[1:]
    sharing, oldest = units // selections, int(task_ptr[window])
    remote = (int(task_ptr[window + 1]) - oldest) * sharing
    for item in range(remote):
        block, selection, low, high = tasks[oldest + item // sharing].tolist()
        queries = [divmod(edge, EDGE_SLOTS) for edge in edges[low:high].tolist()]
        yield item, selection * sharing + item % sharing, int(starts[block]), int(ends[block] - starts[block]), queries
    low = sum(_own(first, starts, begin, block_size))
    for block in range(low, sum(_own(first, starts, end - 1, block_size)) + 1):
        here = range(max(int(starts[block]), begin), min(int(ends[block]), end))
        for unit in range(units):
            if here:
                slots = [int(own_slot[t // sequence, unit // sharing, t % sequence]) for t in here]
                queries = [(token, slot) for token, slot in zip(here, slots, strict=True) if slot >= 0]
                number = remote + (block - low) * units + unit
                yield number, unit, int(starts[block]), int(ends[block] - starts[block]), queries


def _blocks(first, starts, ends, begin, end, units):
    """As `_items`, where every query reads all blocks of its document up to its own, and has a slot for each."""
    for block in range(len(starts)):
        start, length = int(starts[block]), int(ends[block] - starts[block])
        for unit in range(units if length else 0):
            queries = [
                (token, block - int(first[token]))
                for token in range(max(start, begin), end)
                if int(first[token]) == int(first[start])
            ]
            yield block * units + unit, unit, start, length, queries


def _seen(queries, start, length):
    tokens = torch.tensor([token for token, _ in queries], dtype=torch.long)
    return tokens, start + torch.arange(length) <= tokens[:, None]


def _Attend(kernel, *_):
    """Nothing: what it prepares is part of what `_Merge` computes."""


def _Merge(kernel, q, k, v, blocks, first, starts, ends, claims, partial, partial_lse, out, lse, window, begin, end):
    sequence = blocks.shape[2]
    for token in range(begin, end):
        oldest, own = _own(first, starts, token, kernel.block_size)
        for head in range(kernel.num_heads):
            ids = blocks[token // sequence, head * kernel.num_selections // kernel.num_heads, token % sequence].tolist()
            keys = [
                key
                for block in ids
                if 0 <= block <= own
                for key in range(int(starts[oldest + block]), min(int(ends[oldest + block]), token + 1))
            ]
            kv_head = head * kernel.num_kv_heads // kernel.num_heads
            scores = k[keys, kv_head] @ q[token, head] / math.sqrt(q.shape[2])
            lse[token, head] = scores.logsumexp(0) if keys else -math.inf
            if v is not None:
                out[token, head] = scores.softmax(0) @ v[keys, kv_head]


def _Backward(
    kernel, q, k, v, dout, lse, delta, own_slot, edges, tasks, task_ptr, claims, first, starts, ends,
    dq_parts, dk_parts, dv_parts, window, begin, end, slots, _,
):  # fmt: skip
    units, group, scale = kernel.units, kernel.group, kernel.dim**-0.5
    for parts in (dq_parts, dk_parts, dv_parts):
        parts.fill_(math.nan)
    index = edges, tasks, task_ptr, first, starts, ends, own_slot
    for item, unit, start, length, queries in _items(*index, window, begin, end, units, kernel.block_size):
        dk_parts[item], dv_parts[item] = 0, 0
        if not queries:
            continue
        tokens, sees = _seen(queries, start, length)
        kv_head = unit * kernel.num_kv_heads // units
        keys, values = k[start : start + length, kv_head], v[start : start + length, kv_head]
        for head in range(group):
            h = unit * group + head
            weights = (q[tokens, h] @ keys.T * scale - lse[tokens, h, None]).exp() * sees
            ds = weights * (dout[tokens, h] @ values.T - delta[tokens, h, None]) * scale
            dv_parts[item, :length] += weights.T @ dout[tokens, h]
            dk_parts[item, :length] += ds.T @ q[tokens, h]
            lines = [(((t - begin) * units + unit) * slots + slot) * group + head for t, slot in queries]
            dq_parts[lines] = ds @ keys


def _ProxyKL(
    kernel, q, k, q_proxy, k_proxy, lse, lse_proxy, own_slot, edges, tasks, task_ptr, claims, first, starts, ends,
    dq_parts, dk_parts, values, window, begin, end, slots, _,
):  # fmt: skip
    units, many = kernel.num_proxies, kernel.num_heads // kernel.num_proxies
    scale, proxy_scale = kernel.dim**-0.5, kernel.proxy_dim**-0.5
    parts = [dq_parts] if kernel.dense else [values, dq_parts, dk_parts]
    for one in parts:
        if one is not None:
            one.fill_(math.nan)
    index = edges, tasks, task_ptr, first, starts, ends, own_slot
    items = _items(*index, window, begin, end, units, 128)
    for item, proxy, start, length, queries in (
        _blocks(first, starts, ends, begin, end, units) if kernel.dense else items
    ):
        if not kernel.dense:
            values[item] = 0
            if dk_parts is not None:
                dk_parts[item] = 0
        if not queries:
            continue
        tokens, sees = _seen(queries, start, length)
        teacher = 0
        for h in range(proxy * many, (proxy + 1) * many):
            keys = k[start : start + length, h * kernel.num_kv_heads // kernel.num_heads]
            teacher = teacher + (q[tokens, h] @ keys.T * scale - lse[tokens, h, None]).exp() * sees / many
        keys = k_proxy[start : start + length, proxy * kernel.num_proxy_kv_heads // units]
        student = q_proxy[tokens, proxy] @ keys.T * proxy_scale - lse_proxy[tokens, proxy, None]
        values[item] += (torch.special.xlogy(teacher, teacher) - teacher * student).sum()
        if dq_parts is not None:
            difference = student.exp() * sees - teacher
            dk_parts[item, :length] += difference.T @ q_proxy[tokens, proxy]
            dq_parts[[((t - begin) * units + proxy) * slots + slot for t, slot in queries]] = difference @ keys


def _SumQueries(kernel, parts, counts, queries, gradients, scale, begin, end, slots):
    sequence, sharing = counts.shape[2], kernel.units // kernel.num_selections
    lines = parts[: (end - begin) * kernel.units * slots * kernel.group]
    lines = lines.view(end - begin, kernel.units, slots, kernel.group, kernel.dim)
    for token in range(begin, end):
        for unit in range(kernel.units):
            count = int(counts[token // sequence, unit // sharing, token % sequence])
            total = lines[token - begin, unit, :count].float().sum(0) * scale
            total = total / (queries[unit // sharing].clamp(min=1) if kernel.mean else 1)
            gradients[token, unit * kernel.group : (unit + 1) * kernel.group] = total


def _SumKeys(
    kernel, parts, more_parts, tasks, task_ptr, first, starts, ends, queries, kept, more_kept, gradients,
    more_gradients, scale, window, begin, end,
):  # fmt: skip
    sharing, oldest = kernel.sharing, int(task_ptr[window])
    remote = (int(task_ptr[window + 1]) - oldest) * sharing
    low = sum(_own(first, starts, begin, kernel.block_size))
    both = ((parts, kept, gradients), (more_parts, more_kept, more_gradients))[: kernel.tensors]
    for block, (start, stop) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if not start < min(stop, end):
            continue
        for head in range(kernel.heads):
            members = range(head * kernel.members, (head + 1) * kernel.members)
            found = [
                (t - oldest) * sharing + unit % sharing
                for unit in members
                for t in range(oldest, int(task_ptr[window + 1]))
                if tasks[t, :2].tolist() == [block, unit // sharing]
            ]
            if stop > begin:
                found += [remote + (block - low) * kernel.units + unit for unit in members]
            for i, (source, earlier, target) in enumerate(both):
                total = source[found, : stop - start].sum(0) + (0 if start >= begin else earlier[start:stop, head])
                if end == len(first):
                    number = queries[head * kernel.members // sharing].clamp(min=1) if kernel.mean else 1
                    target[start:stop, head] = total * (scale if i == 0 else 1) / number
                else:
                    earlier[start:stop, head] = total


def _SumValues(kernel, parts, tasks, task_ptr, first, starts, ends, queries, value, window, begin, end):
    sharing, oldest = kernel.num_proxies // kernel.num_selections, int(task_ptr[window])
    if begin == 0:
        value.zero_()
    for t in range(oldest, int(task_ptr[window + 1])):
        for i in range(sharing):
            value[int(tasks[t, 1]) * sharing + i] += parts[(t - oldest) * sharing + i]
    remote = (int(task_ptr[window + 1]) - oldest) * sharing
    low = sum(_own(first, starts, begin, kernel.block_size))
    for block in range(low, sum(_own(first, starts, end - 1, kernel.block_size)) + 1):
        if max(int(starts[block]), begin) < min(int(ends[block]), end):
            value += parts[remote + (block - low) * kernel.num_proxies :][: kernel.num_proxies]
    if end == len(first):
        value /= queries.clamp(min=1).repeat_interleave(sharing)


def _SumProxies(
    kernel, value_parts, dk_parts, dq_parts, tasks, task_ptr, first, starts, ends, counts, queries, values, dk, dq,
    kept, of_keys, of_queries, window, begin, end, slots,
):  # fmt: skip
    index, numbers = (tasks, task_ptr, first, starts, ends, queries), (window, begin, end)
    _SumValues(kernel.of_values, value_parts, *index, values, *numbers)
    _SumKeys(kernel.of_keys, dk_parts, None, *index, kept, None, dk, None, of_keys, *numbers)
    _SumQueries(kernel.of_queries, dq_parts, counts, queries, dq, of_queries, begin, end, slots)


def _Scale(kernel, dq, dk, upstream, to_queries, to_keys):
    to_queries.copy_(dq * upstream[:, None])
    to_keys.copy_((dk * upstream[:, None]).unflatten(1, (kernel.heads, -1)).sum(2))
