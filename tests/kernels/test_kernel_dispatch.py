"""Which path runs, what is refused and how it is said."""

import re
import subprocess
import sys

import msa_kernels
import pytest
import torch
from kernel_oracle import tensors
from msa_kernels import msa_attention, reference, select_path, window_selection

CPU = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "proxy_dim": 64, "block_size": 128}
CUDA = CPU | {"device_type": "cuda", "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch):
    monkeypatch.delenv("MSA_KERNELS", raising=False)


def test_the_default_path_and_its_reason():
    path, reason = select_path(**CPU)
    assert path == "reference"
    assert "not on cpu" in reason
    path, reason = select_path(**CUDA)
    assert path == "cute" if torch.cuda.is_available() else path == "flex"
    assert path == "cute" or "the CuTe DSL kernels need a CUDA device" in reason
    path, reason = select_path(**CUDA | {"dtype": torch.float64})
    assert path == "reference"
    assert "float64" in reason
    path, reason = select_path(**CUDA | {"proxy_dim": 8})
    assert path == "reference"
    assert "proxy_dim of at least 16, not 8" in reason


def test_a_wish_is_met_or_refused_never_replaced(monkeypatch):
    assert select_path(**CUDA, backend="reference") == ("reference", "asked for by backend=reference")
    assert select_path(**CUDA, backend="flex")[0] == "flex"
    with pytest.raises(ValueError, match=r"backend='flex' cannot be used: FlexAttention .* not on cpu; use reference"):
        select_path(**CPU, backend="flex")
    with pytest.raises(ValueError, match=r"backend='cute' cannot be used: .* compute capability 9\.0, not for cpu"):
        select_path(**CPU, backend="cute")
    with pytest.raises(ValueError, match="backend='triton' is no path; use one of reference, flex, cute"):
        select_path(**CPU, backend="triton")
    monkeypatch.setenv("MSA_KERNELS", "reference")
    assert select_path(**CUDA) == ("reference", "asked for by MSA_KERNELS=reference")
    assert select_path(**CUDA, backend="flex")[0] == "flex"
    monkeypatch.setenv("MSA_KERNELS", "cute")
    with pytest.raises(ValueError, match="MSA_KERNELS='cute' cannot be used"):
        select_path(**CPU)
    monkeypatch.setenv("MSA_KERNELS", "")
    assert select_path(**CPU)[0] == "reference"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "compute bfloat16 and float16, not float32"),
        ({"head_dim": 80}, "need head_dim of 64 or 128, not 80"),
        ({"proxy_dim": 32}, "need proxy_dim of 64 or 128, not 32"),
        ({"block_size": 32}, "need block_size of 64 or 128, not 32"),
        (
            {"group_size": 6},
            r"num_query_heads / max\(num_proxies, num_kv_heads\) of 1 or 2 or 4 or 8 or 16, not 6",
        ),
        ({"top_k_blocks": 33}, "take top_k_blocks of at most 32, not 33"),
    ],
)
def test_what_the_hopper_kernels_leave_out_is_refused_or_left_to_flex(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert select_path(**CUDA, group_size=4, top_k_blocks=16) == ("cute", "the fastest path on cuda")
    path, why = select_path(**CUDA | change)
    assert path == "flex"
    assert re.search(reason, why)
    path, why = select_path(**CUDA, backend="cute")
    assert path == "cute"
    assert why.startswith("asked for by backend=cute")
    assert "gradients" not in why
    assert select_path(**CUDA | {"block_size": 64})[0] == "flex"
    _, why = select_path(**CUDA | {"block_size": 64}, backend="cute")
    assert why.endswith("; gradients and the KL by flex, for want of kernels for block_size=64")
    with pytest.raises(ValueError, match=reason):
        select_path(**CUDA | change, backend="cute")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"for compute capability 9\.0, not 8\.0"):
        select_path(**CUDA, backend="cute")


def test_every_op_takes_the_wish(monkeypatch):
    leaves = tensors(0, 1, 8, 4, 2, 2, 1)
    selection = window_selection(1, 8, top_k_blocks=1, block_size=4)
    _, lse = reference.sparse_attention(*leaves[2:], selection)
    ops = {
        "block_scores": (leaves[:2], {}),
        "select_blocks": (leaves[:2], {"top_k_blocks": 1}),
        "sparse_attention": ((*leaves[2:], selection), {}),
        "dense_attention": (leaves[2:], {}),
        "proxy_kl": ((*leaves[:4], lse, selection), {}),
        "dense_proxy_kl": ((*leaves[:4], lse), {}),
        "msa_attention": (leaves, {"top_k_blocks": 1}),
    }
    for name, (inputs, rule) in ops.items():
        op = getattr(msa_kernels, name)
        with pytest.raises(ValueError, match="backend='flex' cannot be used"):
            op(*inputs, **rule, backend="flex")
        monkeypatch.setenv("MSA_KERNELS", "cute")
        with pytest.raises(ValueError, match="MSA_KERNELS='cute' cannot be used"):
            op(*inputs, **rule)
        monkeypatch.delenv("MSA_KERNELS")


def test_ops_give_what_the_reference_gives():
    leaves = tensors(1, 2, 20, 4, 2, 2, 1)
    cu = torch.tensor([0, 9, 20, 40], dtype=torch.int32)
    grid = {"block_size": 4, "cu_seqlens": cu}
    rule = {"top_k_blocks": 3, "num_local_blocks": 1, "num_sink_blocks": 1}
    result = msa_attention(*leaves, **rule, **grid)
    selection = reference.select_blocks(*leaves[:2], **rule, **grid)
    out, lse = reference.sparse_attention(*leaves[2:], selection)
    pairs = [
        (result.selection.blocks, selection.blocks),
        (result.out, out),
        (result.kl, reference.proxy_kl(*leaves[:4], lse, selection)),
        (msa_kernels.select_blocks(*leaves[:2], **rule, **grid).blocks, selection.blocks),
        (msa_kernels.sparse_attention(*leaves[2:], selection)[1], lse),
        (msa_kernels.proxy_kl(*leaves[:4], lse, selection), result.kl),
        (
            msa_kernels.block_scores(*leaves[:2], **grid, queries=(3, 9)),
            reference.block_scores(*leaves[:2], **grid, queries=(3, 9)),
        ),
    ]
    full, full_lse = reference.dense_attention(*leaves[2:], cu_seqlens=cu)
    kl = reference.dense_proxy_kl(*leaves[:4], full_lse, cu_seqlens=cu)
    pairs += [
        (msa_kernels.dense_attention(*leaves[2:], cu_seqlens=cu)[0], full),
        (msa_kernels.dense_proxy_kl(*leaves[:4], full_lse, cu_seqlens=cu), kl),
    ]
    assert all(torch.equal(one, other) for one, other in pairs)
    given = msa_attention(*leaves, selection=selection)
    assert torch.equal(given.out, result.out)
    assert torch.equal(given.kl, result.kl)


def saved_bytes(function):
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return total


def test_no_divergence_work_and_no_saved_tensors_when_it_is_off(monkeypatch):
    leaves = tensors(2, 1, 64, 4, 2, 2, 1, dtype=torch.float32)
    rule = {"top_k_blocks": 2, "block_size": 8}
    selection = reference.select_blocks(*leaves[:2], **rule)
    attention_alone = saved_bytes(lambda: reference.sparse_attention(*leaves[2:], selection))
    with_kl = saved_bytes(lambda: msa_attention(*leaves, **rule))

    def never(*_):
        raise AssertionError("KL work without a wish for it")

    monkeypatch.setattr(reference, "proxy_kl", never)
    without = saved_bytes(lambda: msa_attention(*leaves, **rule, with_kl=False))
    assert without == attention_alone < with_kl
    assert msa_attention(*leaves, **rule, with_kl=False).kl is None
    with torch.no_grad():
        assert saved_bytes(lambda: msa_attention(*leaves, **rule, with_kl=False)) == 0


def test_importing_the_package_does_not_load_a_compiler():
    code = (
        "import sys, torch; before = set(sys.modules); import msa_kernels; "
        "new = set(sys.modules) - before; "
        "bad = [m for m in new if m.split('.')[0] in ('cutlass', 'triton') or 'flex' in m or '_inductor' in m]; "
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def shaped(heads=4, kv_heads=2, proxies=2, proxy_kv_heads=1):
    return tensors(3, 1, 8, heads, kv_heads, proxies, proxy_kv_heads)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 5}, r"num_query_heads=5 must be a multiple of num_kv_heads=2; the nearest legal num_kv_heads is 1"),
        ({"proxies": 3}, r"num_query_heads=4 must be a multiple of num_proxies=3; the nearest legal num_proxies is 2"),
        ({"proxies": 4, "proxy_kv_heads": 3}, r"num_proxies=4 must be a multiple of num_proxy_kv_heads=3"),
        (
            {"heads": 12, "kv_heads": 3, "proxies": 2},
            r"num_proxies=2 and num_kv_heads=3: one must divide the other; the nearest legal num_proxies is 1",
        ),
    ],
)
def test_impossible_head_ratios_name_the_rule_and_the_nearest_legal_value(sizes, message):
    with pytest.raises(ValueError, match=message):
        msa_attention(*shaped(**sizes), top_k_blocks=1, block_size=4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 12, "kv_heads": 4, "proxies": 4},  # three heads a proxy
        {"heads": 4, "kv_heads": 4, "proxies": 4, "proxy_kv_heads": 4},  # one
        {"heads": 8, "kv_heads": 4, "proxies": 1},  # fewer proxies than KV heads
        {"heads": 6, "kv_heads": 1, "proxies": 6, "proxy_kv_heads": 3},
    ],
)
def test_every_ratio_that_divides_is_computed(sizes):
    leaves = shaped(**sizes)
    result = msa_attention(*leaves, top_k_blocks=8, block_size=4)
    torch.testing.assert_close(result.out, reference.dense_attention(*leaves[2:])[0], rtol=1e-12, atol=1e-12)


def test_bad_inputs_are_named():
    q_proxy, k_proxy, q, k, v = (x.detach() for x in shaped())
    good = (q_proxy, k_proxy, q, k, v)
    selection = window_selection(1, 8, top_k_blocks=2, block_size=4)

    def refused(message, function, *inputs, **rule):
        with pytest.raises(ValueError, match=message):
            function(*inputs, **rule)

    refused("neither selection nor top_k_blocks", msa_attention, *good)
    refused("both given", msa_attention, *good, selection=selection, top_k_blocks=2)
    refused("cu_seqlens is given but", msa_attention, *good, selection=selection, cu_seqlens=torch.tensor([0, 8]).int())
    refused("top_k_blocks=0 must be at least 1", msa_attention, *good, top_k_blocks=0)
    refused("block_size=0 must be at least 1", msa_attention, *good, top_k_blocks=1, block_size=0)
    refused("num_sink_blocks=-1", msa_attention, *good, top_k_blocks=1, num_sink_blocks=-1)
    refused("k is torch.float32 but q is torch.float64", reference.dense_attention, q, k.float(), v)
    refused("q_proxy is torch.float32", msa_attention, q_proxy.float(), k_proxy.float(), q, k, v, top_k_blocks=1)
    refused("v has shape", reference.dense_attention, q, k, v[:, :, :1])
    refused("k has shape", reference.dense_attention, q, k[:, :4], v)
    refused("q_proxy has .batch, sequence.", msa_attention, q_proxy[:, :4], k_proxy[:, :4], q, k, v, top_k_blocks=1)
    refused("q has shape .1, 8, 20.", reference.dense_attention, q.flatten(2), k, v)
    refused("floating point", reference.dense_attention, q.int(), k.int(), v.int())
    refused("every size must be at least 1", reference.dense_attention, q[:, :0], k[:, :0], v[:, :0])
    attend = reference.sparse_attention
    refused("must be int32", attend, q, k, v, selection._replace(blocks=selection.blocks.long()))
    refused("q has 1 and 8", attend, q, k, v, selection._replace(blocks=selection.blocks[:, :, :4]))
    for row in ([1, 0], [0, 0], [-1, 0], [-2, -1]):
        blocks = selection.blocks.clone()
        blocks[0, 0, 7] = torch.tensor(row)
        refused("must ascend strictly", attend, q, k, v, selection._replace(blocks=blocks))
    three = selection._replace(blocks=selection.blocks.expand(1, 3, 8, 2))
    refused("num_query_heads=4 must be a multiple of num_proxies=3", attend, q, k, v, three)
