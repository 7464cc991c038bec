"""The model: what reaches what, what equals what, and that every size in the config is real."""

import math
from dataclasses import replace

import pytest
import torch
from msa_kernels import block_scores
from tiny import MODEL
from torch.nn import functional as F

from msa_lab.model import Transformer


def tokens(batch: int = 2, sequence: int = 64) -> torch.Tensor:
    return torch.randint(0, 257, (batch, sequence), generator=torch.Generator().manual_seed(1))


def test_all_blocks_selected_equals_the_dense_model() -> None:
    dense = Transformer(replace(MODEL, attention="dense"))
    everything = Transformer(replace(MODEL, top_k_blocks=8))
    x = tokens()
    expected, got = dense(x).logits, everything(x).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    F.cross_entropy(expected.flatten(0, 1), x.flatten()).backward()
    F.cross_entropy(got.flatten(0, 1), x.flatten()).backward()
    others = dict(everything.named_parameters())
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_kl_reaches_only_proxies_and_cross_entropy_none(sparse: bool) -> None:
    model = Transformer(MODEL)
    proxies = {name for name, _ in model.proxy_parameters()}
    assert proxies
    output = model(tokens(), sparse=sparse, with_kl=True)
    output.kl.sum().backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == (name in proxies), name
    model.zero_grad()
    output = model(tokens(), sparse=sparse, with_kl=True)
    output.logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == (name not in proxies), name


def test_without_the_detach_the_kl_reaches_the_backbone() -> None:
    model = Transformer(replace(MODEL, detach_proxy_input=False))
    model(tokens(), with_kl=True).kl.sum().backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.abs().sum() > 0


def test_a_proxy_that_copies_its_head_has_no_kl() -> None:
    # One main head per proxy and every block selected: scale, RoPE, norm, mask and teacher must all agree.
    config = replace(MODEL, num_kv_heads=4, num_proxies=4, num_proxy_kv_heads=4, top_k_blocks=8)
    model = Transformer(config).double()
    for layer in model.layers:
        attention = layer.attention
        with torch.no_grad():
            attention.proxy.query.projection.weight.copy_(attention.query.projection.weight)
            attention.proxy.key.projection.weight.copy_(attention.key.projection.weight)
    for sparse in (True, False):
        model.zero_grad()
        output = model(tokens(), sparse=sparse, with_kl=True)
        assert output.kl.abs().max() < 1e-12
        output.kl.sum().backward()
        for name, parameter in model.proxy_parameters():
            assert parameter.grad.abs().max() < 1e-12, name


def test_proxies_see_position_as_the_main_branch_does() -> None:
    model = Transformer(MODEL)
    attention = model.layers[0].attention
    constant = torch.ones(1, 32, MODEL.d_model)
    with torch.no_grad():
        q_proxy, k_proxy = attention.proxy(constant, model._context(tokens(1, 32), None, True, False, None).rotation)
        blocks = block_scores(q_proxy, k_proxy, block_size=1)[0, 0]
    for distance in range(1, 31):
        diagonal = blocks.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert blocks[31].std() > 1e-4
    blind = Transformer(replace(MODEL, proxy_rope=False))
    assert blind._context(tokens(1, 32), None, True, False, None).proxy_rotation is None


@pytest.mark.parametrize("kind", ["dense", "msa", "window", "random"])
def test_packed_documents_equal_the_documents_alone(kind: str) -> None:
    model = Transformer(replace(MODEL, attention=kind, top_k_blocks=8)).double().eval()
    x = tokens(1, 60)
    packed = model(x, torch.tensor([0, 23, 60], dtype=torch.int32)).logits
    for start, stop in ((0, 23), (23, 60)):
        torch.testing.assert_close(packed[:, start:stop], model(x[:, start:stop]).logits, atol=1e-12, rtol=1e-12)


def test_a_later_token_changes_no_earlier_output() -> None:
    for kind in ("dense", "msa", "window", "random"):
        model = Transformer(replace(MODEL, attention=kind)).eval()
        x = tokens(1, 64)
        changed = x.clone()
        changed[0, 37] = (changed[0, 37] + 1) % 257
        assert torch.equal(model(x).logits[:, :37], model(changed).logits[:, :37]), kind
        assert not torch.equal(model(x).logits[:, 37:], model(changed).logits[:, 37:]), kind


@pytest.mark.parametrize("leak", [0, 1])
def test_random_tokens_are_never_predicted_unless_the_answer_is_given_away(leak: int) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(MODEL, num_layers=1, vocab_size=16))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(60):
        fresh = torch.randint(16, (8, 65))
        output = model(fresh[:, leak : 64 + leak], with_kl=True)
        loss = F.cross_entropy(output.logits.flatten(0, 1), fresh[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + output.kl.mean(1).sum()).backward()
        optimizer.step()
        losses.append(loss.item())
    best = sum(losses[-20:]) / 20
    assert best < 0.5 * math.log(16) if leak else best > math.log(16) - 0.01


def test_activation_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for on in (False, True):
        model = Transformer(MODEL, activation_checkpointing=on)
        output = model(tokens(), with_kl=True)
        (output.logits.logsumexp(-1).mean() + output.kl.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_bf16_autocast_gives_the_kernels_one_dtype() -> None:
    model = Transformer(MODEL)
    seen: list[set[torch.dtype]] = []

    def look(module: torch.nn.Module, args: tuple) -> None:
        q, k, v, _, proxies, _ = args
        seen.append({t.dtype for t in (q, k, v, *proxies)})

    handles = [layer.attention.core.register_forward_pre_hook(look) for layer in model.layers]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens(), with_kl=True)
    assert seen == [{torch.bfloat16}] * MODEL.num_layers
    (output.logits.float().logsumexp(-1).mean() + output.kl.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    for handle in handles:
        handle.remove()


def test_every_attention_size_is_read_back_from_the_model() -> None:
    config = replace(MODEL, head_dim=16, num_proxies=4, num_proxy_kv_heads=2, proxy_dim=12, mlp_width=(40, 56))
    attention = Transformer(config).layers[0].attention
    assert attention.query.projection.weight.shape == (4 * 16, 32)
    assert attention.key.projection.weight.shape == attention.value.projection.weight.shape == (2 * 16, 32)
    assert attention.output.weight.shape == (32, 4 * 16)
    assert attention.proxy.query.projection.weight.shape == (4 * 12, 32)
    assert attention.proxy.key.projection.weight.shape == (2 * 12, 32)
    assert [layer.mlp.gate.weight.shape[0] for layer in Transformer(config).layers] == [40, 56]
    assert Transformer(replace(MODEL, tie_embeddings=False)).head is not None
    assert Transformer(replace(MODEL, qk_norm=False)).layers[0].attention.query.norm is None


def test_arms_start_with_the_same_numbers_where_they_share_parameters() -> None:
    dense, msa = Transformer(replace(MODEL, attention="dense"), seed=3), Transformer(MODEL, seed=3)
    others = dict(msa.named_parameters())
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, others[name]), name
    assert not torch.equal(dense.embedding.weight, Transformer(MODEL, seed=4).embedding.weight)


def test_random_blocks_differ_by_draw_and_layer_and_repeat() -> None:
    model = Transformer(replace(MODEL, attention="random")).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.layers:
        layer.attention.select.register_forward_hook(lambda m, a, out: chosen.append(out.blocks))
    for draw in (5, 5, 6):
        model(tokens(1, 128), draw=torch.tensor([draw]))
    assert torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[0], chosen[4])
    assert not torch.equal(chosen[0], chosen[1])


def test_no_kl_means_no_kl_work_and_no_saved_proxy_tensors() -> None:
    model = Transformer(MODEL)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = torch.zeros(1, 64, MODEL.d_model, requires_grad=True)
        attention = model.layers[0].attention
        before = len(saved)
        context = model._context(tokens(1, 64), None, True, False, None)
        out, kl = attention.core(
            attention.query(x, context.rotation),
            attention.key(x, context.rotation),
            attention.value(x, None),
            attention.select(*(p := attention.proxy(x.detach(), context.proxy_rotation)), None),
            p,
            context,
        )
    assert kl is None
    storages = {t.untyped_storage().data_ptr() for t in saved[before:]}
    assert out.requires_grad
    assert model(tokens(), with_kl=False).kl is None
    q_proxy, k_proxy = p
    kept_after_core = {q_proxy.untyped_storage().data_ptr(), k_proxy.untyped_storage().data_ptr()}
    assert not storages & kept_after_core
