import gc
import weakref

import pytest
import torch
from msa_kernels import Selection, select_blocks, sparse_attention
from torch import nn
from torch.utils.checkpoint import checkpoint

from msa_lab.config import ModelConfig
from msa_lab.model import Transformer
from msa_lab.selections import record

MODEL = ModelConfig(
    num_layers=2,
    d_model=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=32,
    block_size=4,
    top_k_blocks=2,
    num_proxies=2,
    proxy_dim=8,
)
TOKENS = torch.arange(40).view(2, 20) % 257


class Choose(nn.Module):
    def forward(self, q_proxy, k_proxy):
        return select_blocks(q_proxy, k_proxy, top_k_blocks=2, block_size=4)


class Attend(nn.Module):
    def forward(self, q, k, v, selection):
        return sparse_attention(q, k, v, selection)[0]


class Mine(nn.Module):
    """A user's layer that knows nothing of this project's model classes."""

    def __init__(self):
        super().__init__()
        self.to_heads, self.to_proxies = nn.Linear(8, 16), nn.Linear(8, 16)
        self.chooser, self.core = Choose(), Attend()

    def forward(self, x):
        q = self.to_heads(x).unflatten(-1, (2, 8))
        proxies = self.to_proxies(x).unflatten(-1, (2, 8))
        return self.core(q, q, q, selection=self.chooser(proxies, k_proxy=proxies)).mean(2)


class Stack(nn.Module):
    def __init__(self, recompute=False, reentrant=False):
        super().__init__()
        self.layers, self.recompute, self.reentrant = nn.ModuleList([Mine(), Mine()]), recompute, reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.recompute else layer(x)
        return x


def hooks(model):
    return {(name, *module._forward_hooks, *module._forward_pre_hooks) for name, module in model.named_modules()}


def test_every_selection_of_the_model_is_seen_with_its_inputs():
    model = Transformer(MODEL).eval()
    with record(model) as seen:
        model(TOKENS)
    assert list(seen) == ["layers.0.attention.select", "layers.1.attention.select"]
    one = seen["layers.1.attention.select"]
    assert one.q.shape == (2, 20, 4, 8)
    assert one.k.shape == (2, 20, 2, 8)
    assert one.q_proxy.shape == (2, 20, 2, 8)
    assert one.k_proxy.shape == (2, 20, 1, 8)
    again = select_blocks(one.q_proxy, one.k_proxy, top_k_blocks=2, block_size=4)
    assert torch.equal(one.selection.blocks, again.blocks)


def test_would_be_selections_are_seen_in_the_warm_up():
    model = Transformer(MODEL).eval()
    with record(model) as seen:
        model(TOKENS, sparse=False)
    assert len(seen) == 2
    assert seen["layers.0.attention.select"].q is not None


def test_a_rules_main_queries_are_not_taken_for_a_proxys():
    model = Transformer(ModelConfig(**{**vars(MODEL), "attention": ("window", "dense")})).eval()
    with record(model) as seen:
        model(TOKENS)
    (one,) = seen.values()
    assert one.q_proxy is None
    assert one.k_proxy is None
    assert one.q.shape == (2, 20, 4, 8)


def test_a_users_module_is_seen_without_registration():
    model = Stack()
    with record(model) as seen:
        model(torch.randn(1, 12, 8))
    assert list(seen) == ["layers.0.chooser", "layers.1.chooser"]
    assert seen["layers.0.chooser"].k_proxy is not None
    assert seen["layers.0.chooser"].q.shape == (1, 12, 2, 8)


def test_a_selecting_module_on_its_own_is_seen():
    choose, proxies = Choose(), torch.randn(1, 12, 2, 8)
    with record(choose) as seen:
        expected = choose(proxies, proxies)
    assert torch.equal(seen[""].selection.blocks, expected.blocks)
    assert seen[""].q is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_the_backward_is_not_recorded_again(reentrant):
    model = Stack(recompute=True, reentrant=reentrant)
    calls = []
    model.layers[0].chooser.register_forward_hook(lambda *_: calls.append(1))
    with record(model) as seen:
        loss = model(torch.randn(1, 12, 8, requires_grad=True)).sum()
        before = dict(seen)
        loss.backward()
    assert len(calls) == 2, "the subject did not recompute, so that this test shows nothing"
    assert list(seen) == ["layers.0.chooser", "layers.1.chooser"]
    assert all(seen[path] is one for path, one in before.items())


def test_a_module_that_chooses_twice_appears_twice():
    model = Stack()
    model.layers[1] = model.layers[0]
    with record(model) as seen:
        model(torch.randn(1, 12, 8))
    assert list(seen) == ["layers.0.chooser", "layers.0.chooser#2"]
    first, second = seen.values()
    assert not torch.equal(first.q, second.q)


def test_the_latest_forward_counts():
    model = Stack()
    with record(model) as seen:
        model(torch.randn(1, 12, 8))
        model(torch.randn(1, 16, 8))
    assert [one.selection.blocks.shape[2] for one in seen.values()] == [16, 16]


def test_what_was_seen_does_not_keep_the_graph_alive():
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output would hold its own graph
            saved.append(weakref.ref(self))

    model, saved = Stack(), []
    with record(model) as seen, torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        out = model(torch.randn(1, 12, 8))
    for one in seen.values():
        for tensor in (one.q, one.k, one.q_proxy, one.k_proxy, one.selection.blocks):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
    assert any(box() for box in saved)
    del out
    gc.collect()
    assert not any(box() for box in saved)


def test_recording_changes_no_output_and_no_gradient():
    model, x = Transformer(MODEL), TOKENS
    results = []
    for watch in (False, True):
        model.zero_grad()
        if watch:
            with record(model):
                output = model(x, with_kl=True)
        else:
            output = model(x, with_kl=True)
        (output.logits.sum() + output.kl.sum()).backward()
        results.append((output.logits, [p.grad.clone() for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_only_own_hooks_are_removed_also_after_an_exception():
    model, mine = Stack(), []
    model.register_forward_pre_hook(lambda *_: None)
    model.layers[0].core.register_forward_hook(lambda *_: mine.append(1))
    before = hooks(model)
    with record(model), record(model) as inner:
        model(torch.randn(1, 12, 8))
    assert len(inner) == 2
    assert hooks(model) == before
    with pytest.raises(RuntimeError), record(model) as seen:
        model(torch.randn(1, 12, 9))
    assert hooks(model) == before
    assert not seen
    model(torch.randn(1, 12, 8))
    assert len(mine) == 2


def test_the_selection_that_was_served_is_seen_not_the_one_it_replaced():
    model = Stack()
    fixed = torch.zeros(1, 2, 12, 2, dtype=torch.int32)
    fixed[..., 1] = -1
    with record(model) as seen:
        handle = model.layers[0].chooser.register_forward_hook(lambda *_: Selection(fixed, 4))
        model(torch.randn(1, 12, 8))
        handle.remove()
    assert torch.equal(seen["layers.0.chooser"].selection.blocks, fixed)
    assert not torch.equal(seen["layers.1.chooser"].selection.blocks, fixed)


def test_compiled_models_are_refused_and_their_original_works():
    model = Stack()
    fast = torch.compile(model, backend="eager")
    x = torch.randn(1, 12, 8)
    fast(x)
    with pytest.raises(ValueError, match="model: is compiled"), record(fast):
        pass
    with record(model) as seen:
        model(x)
    assert len(seen) == 2
    torch._dynamo.utils.counters.clear()
    fast(x)
    assert not torch._dynamo.utils.counters["stats"], "recording made the compiled model compile anew"
    model.layers[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"model\.layers\.1: is compiled"), record(model):
        pass


def test_early_queries_leave_slots_empty():
    model = Transformer(MODEL).eval()
    with record(model) as seen:
        model(TOKENS)
    blocks = seen["layers.0.attention.select"].selection.blocks
    assert (blocks[:, :, :4, 0] == 0).all()
    assert (blocks[:, :, :4, 1] == -1).all()
    assert (blocks[:, :, 4:, 1] >= 0).all()


def test_a_failed_forward_leaves_nothing_to_the_next_one():
    model, x = Stack(), torch.randn(1, 12, 8)
    with record(model) as seen:
        broken = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        broken.remove()
        model(x)
    assert list(seen) == ["layers.0.chooser", "layers.1.chooser"]
