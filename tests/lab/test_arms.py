"""The arms of a study: regrouped heads and shared choices are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msa_kernels import Selection, dense_attention, sparse_attention
from msa_kernels.selection import window_selection
from tiny import MODEL
from torch.nn import functional as F

from msa_lab.budget import count_parameters, flops_per_token
from msa_lab.config import RunConfig
from msa_lab.config_model import share_every
from msa_lab.environment import kernel_path
from msa_lab.model import Transformer
from msa_lab.selections import record

REGROUPED = replace(MODEL, attention="regrouped", num_query_heads=8)
SHARED = replace(MODEL, num_layers=4, attention=share_every(2, 4))


def tokens(batch: int = 2, sequence: int = 64) -> torch.Tensor:
    return torch.randint(0, 257, (batch, sequence), generator=torch.Generator().manual_seed(1))


def moved(model: Transformer) -> Transformer:
    """Weights so large that attention is not flat."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model.double().eval()


@pytest.mark.parametrize("config", [REGROUPED, SHARED], ids=["regrouped", "shared"])
def test_with_every_block_selected_an_arm_is_the_dense_model(config) -> None:
    dense, arm = (
        moved(Transformer(replace(config, top_k_blocks=8, attention=kind))) for kind in ("dense", config.attention)
    )
    x = tokens()
    for sparse in (True, False):
        logits = [model(x, sparse=sparse).logits for model in (dense, arm)]
        torch.testing.assert_close(*logits, atol=1e-10, rtol=1e-10)
    for model in (dense, arm):
        F.cross_entropy(model(x).logits.flatten(0, 1), x.flatten()).backward()
    others = dict(arm.named_parameters())
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, atol=1e-10, rtol=1e-8, msg=name)


def plain_layer(model: Transformer, x: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first layer's attention and KL with heads where the projections leave them, one list of blocks a head.

    Slow and apart from the model: `Selection.for_heads`, and the KL from probabilities in full.
    """
    attention, config = model.layers[0].attention, model.config
    context = model._context(x, None, True, True, None)
    hidden = model.layers[0].attention_norm(model.embedding(x))
    q, k = attention.query(hidden, context.rotation), attention.key(hidden, context.rotation)
    v = attention.value(hidden, None)
    q_proxy, k_proxy = attention.proxy(hidden, context.proxy_rotation)
    chosen: Selection = attention.select(q_proxy, k_proxy, None)
    serving = torch.empty_like(order)
    serving[order] = torch.arange(len(order)) // (len(order) // config.num_proxies)
    by_head = chosen.for_heads(serving)
    out, lse = sparse_attention(q, k, v, by_head)
    position = torch.arange(x.shape[1])
    read = (by_head.blocks[..., None] == position // config.block_size).any(-2) & (position <= position[:, None])
    wide = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide) * config.head_dim**-0.5
    main = (scores - lse.transpose(1, 2)[..., None]).exp() * read
    kls = []
    for proxy in range(config.num_proxies):
        teacher = main[:, serving == proxy].mean(1)
        raw = torch.einsum("bqd,bkd->bqk", q_proxy[:, :, proxy], k_proxy[:, :, 0]) * config.proxy_dim**-0.5
        support = read[:, serving == proxy][:, 0]
        student = raw.masked_fill(~support, -torch.inf).log_softmax(-1).masked_fill(~support, 0)
        kls.append((torch.special.xlogy(teacher, teacher) - teacher * student).sum(-1).mean())
    return attention.output(out.flatten(2)), torch.stack(kls)


def test_a_regrouped_proxy_serves_the_heads_it_drew_across_kv_heads() -> None:
    model = moved(Transformer(REGROUPED, seed=3))
    order = model.layers[0].attention.head_order
    assert order.sort().values.tolist() == list(range(8))
    assert any(len({int(head) // 4 for head in group}) == 2 for group in order.view(2, 4))  # KV heads are mixed
    x = tokens()
    expected, kl = plain_layer(model, x, order)
    context = model._context(x, None, True, True, None)
    got = model.layers[0].attention(model.layers[0].attention_norm(model.embedding(x)), context)
    torch.testing.assert_close(got[0], expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got[1], kl, atol=1e-10, rtol=1e-10)
    with_adjacent, _ = plain_layer(model, x, torch.arange(8))
    assert not torch.allclose(with_adjacent, expected, atol=1e-3)


def test_groups_differ_by_layer_and_seed_and_are_never_the_adjacent_ones() -> None:
    smallest = replace(REGROUPED, num_query_heads=4, num_layers=1)  # three ways to make two pairs, one of them as it is
    drawn = set()
    for seed in range(40):
        groups = Transformer(smallest, seed=seed).layers[0].attention.head_order.view(2, 2).tolist()
        drawn.add(frozenset(map(tuple, groups)))
    assert drawn == {frozenset({(0, 2), (1, 3)}), frozenset({(0, 3), (1, 2)})}
    orders = {tuple(layer.attention.head_order.tolist()) for layer in Transformer(REGROUPED).layers}
    assert len(orders) == 2
    assert torch.equal(
        Transformer(REGROUPED).layers[0].attention.head_order, Transformer(REGROUPED).layers[0].attention.head_order
    )


def test_a_shared_layer_has_no_proxies_and_reads_the_choice_before_it() -> None:
    model = moved(Transformer(SHARED))
    owners = {name.split(".")[1] for name, _ in model.proxy_parameters()}
    assert owners == {"0", "2"}
    with record(model) as seen:
        output = model(tokens(), with_kl=True)
    blocks = [seen[f"layers.{i}.attention.select"].selection.blocks for i in range(4)]
    assert torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks[2], blocks[3])
    assert not torch.equal(blocks[0], blocks[2])
    assert output.kl.shape == (4, 2)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(SHARED).total
    own = count_parameters(replace(SHARED, attention="msa")).proxy
    assert count_parameters(SHARED).proxy * 2 == own


def test_a_shared_layer_teaches_the_proxies_it_reads_by_and_nothing_else() -> None:
    model = moved(Transformer(SHARED))
    model(tokens(), with_kl=True).kl[1].sum().backward()
    for name, parameter in model.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert reached == name.startswith("layers.0.attention.proxy."), name


def test_shared_choices_outlive_activation_checkpointing() -> None:
    gradients = []
    for on in (False, True):
        model = Transformer(SHARED, activation_checkpointing=on)
        output = model(tokens(), with_kl=True)
        (output.logits.logsumexp(-1).mean() + output.kl.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_model_of_such_layers_compiles_in_one_piece() -> None:
    model, x = Transformer(replace(REGROUPED, num_layers=3, attention=("regrouped", "msa", "shared"))), tokens()

    def loss(x: torch.Tensor) -> torch.Tensor:
        output = model(x, with_kl=True)
        return output.logits.logsumexp(-1).mean() + output.kl.sum()

    compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), loss(x))


def test_another_selection_in_place_of_a_shared_one_is_read_by_all_layers_that_share_it() -> None:
    model = moved(Transformer(SHARED))
    other = window_selection(2, 64, top_k_blocks=SHARED.top_k_blocks, block_size=SHARED.block_size, device="cpu")
    for replaced, follows in ((0, True), (1, False)):
        handle = model.layers[replaced].attention.select.register_forward_hook(lambda *_: other)
        with record(model) as seen:
            model(tokens())
        handle.remove()
        blocks = [seen[f"layers.{i}.attention.select"].selection.blocks for i in range(4)]
        assert torch.equal(blocks[replaced], other.blocks)
        assert torch.equal(blocks[1 - replaced], other.blocks) == follows
        assert not torch.equal(blocks[2], other.blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": ("shared", "msa")}, "layer 0 shares"),
        ({"attention": ("window", "shared")}, "layer 1 shares"),
        ({"attention": ("regrouped", "shared")}, "layer 1 shares"),
        ({"attention": "regrouped", "num_proxies": 1}, "more than one proxy"),
        ({"attention": "regrouped", "num_proxies": 4}, "fewer than num_query_heads=4"),
    ],
)
def test_kinds_that_mean_nothing_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)
    with pytest.raises(ValueError, match="share_every=3: must lie within 1 to num_layers=2"):
        share_every(3, 2)


def test_flops_of_the_arms() -> None:
    msa = replace(SHARED, attention="msa")
    plain, shared, regrouped = (
        flops_per_token(config, 128).training for config in (msa, SHARED, replace(msa, attention="regrouped"))
    )
    assert shared.proxy_scoring * 2 == plain.proxy_scoring
    assert shared.proxy_projections * 2 == plain.proxy_projections
    assert shared.kl == plain.kl
    assert regrouped.kl == plain.kl
    # Keys and values of two more heads of 8 in each of four layers, forward and backward.
    assert regrouped.projections - plain.projections == 3 * 4 * 2 * 2 * 2 * 8 * 32
    for phase in ("warmup", "sparse"):
        attention = [flops_per_token(config, 128, phase=phase).training.attention for config in (msa, SHARED)]
        assert attention[0] == attention[1]


def test_kernels_are_chosen_for_the_groups_that_they_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("msa_kernels.select_path", lambda **sizes: asked.append(sizes) or ("reference", ""))
    for model in (REGROUPED, replace(REGROUPED, attention="msa"), replace(REGROUPED, attention=("msa", "regrouped"))):
        kernel_path(RunConfig(model=model), torch.device("cpu"))
    assert [sizes["group_size"] for sizes in asked] == [1, 4, 1]


def test_dense_and_sparse_cores_meet_heads_in_the_drawn_order() -> None:
    """Teacher and interventions read q and k from the core: they must stand in the proxies' groups."""
    model = moved(Transformer(REGROUPED))
    with record(model) as seen:
        model(tokens())
    core = seen["layers.0.attention.select"]
    attention = model.layers[0].attention
    hidden = model.layers[0].attention_norm(model.embedding(tokens()))
    context = model._context(tokens(), None, True, False, None)
    q, k = attention.query(hidden, context.rotation), attention.key(hidden, context.rotation)
    assert torch.allclose(core.q, q[:, :, attention.head_order])
    assert torch.allclose(core.k, k[:, :, attention.head_order // 4])
    whole = dense_attention(q, k, k)[0][:, :, attention.head_order]
    assert torch.allclose(dense_attention(core.q, core.k, core.k)[0], whole)
