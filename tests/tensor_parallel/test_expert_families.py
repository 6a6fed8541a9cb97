"""plan="auto" with mixtures of experts: each rank has its experts, and the model computes and learns what it did."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.nn import ParallelExperts
from weft.tensor_parallel.auto import automatic_plan
from weft.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attention_dropout=0.0,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
GROUPED = dict(n_routed_experts=6, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
FAMILIES = {
    "Mixtral": dict(num_local_experts=5),
    "Qwen2Moe": dict(num_experts=5, shared_expert_intermediate_size=40),
    "Qwen3Moe": dict(num_experts=5, head_dim=8),
    "Olmoe": dict(num_experts=5),
    "GptOss": dict(num_local_experts=5, head_dim=8),
    "DeepseekV2": dict(**LATENT, **GROUPED, num_key_value_heads=4, head_dim=4),
    "DeepseekV3": dict(**LATENT, **GROUPED, num_key_value_heads=4),
    "Glm4Moe": {**GROUPED, "n_group": 1, "head_dim": 8},
    "GraniteMoe": dict(num_local_experts=5),
    "Phimoe": dict(num_local_experts=5),
    "Ernie4_5_Moe": dict(moe_num_experts=6, moe_k=2, moe_layer_start_index=0),
    "FlexOlmo": dict(num_experts=5),
    "MiniMaxM2": dict(num_local_experts=5, head_dim=8),
    "NemotronH": dict(n_routed_experts=6, head_dim=8, layers_block_type=["attention", "moe"]),
}


def model_of(family, dtype=torch.float64, implementation="eager", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **options})
    config._experts_implementation = implementation
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True  # the loss then has the load-balancing loss of the router
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "bias" in name:  # which transformers sets to zero
            nn.init.normal_(parameter, std=0.1)
    return model


def whole_gradient(parameter):
    shard = weft.shard_of(parameter)
    gradient = parameter.grad.as_subclass(torch.Tensor)
    return gradient if shard is None else shard.gather(gradient)


def whole_of(parameter):
    shard = weft.shard_of(parameter)
    return parameter.detach() if shard is None else shard.gather(parameter.detach())


def compare(found, expected, message, tolerance):
    assert torch.allclose(found, expected, tolerance, tolerance), f"{message}: {(found - expected).abs().max()}"


def learn(model, tokens, steps):
    """Train; yield each step's loss and the output scores, before the optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        torch.manual_seed(step)  # Phi-MoE draws the experts at random
        optimizer.zero_grad()
        output = model(input_ids=tokens[step], labels=tokens[step])
        output.loss.backward()
        yield output.loss.detach(), output.logits.detach()
        optimizer.step()


def check_family(rank, family, steps):
    plain = model_of(family)
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(tp=dist.get_world_size()))
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelExperts)]
    assert layers, "its experts are split"
    exact = 1e-6 if family in ("NemotronH", "Phimoe") else 1e-9  # these compute norms or losses in fp32
    tokens = torch.randint(3, 61, (steps, 2, 7), generator=torch.Generator().manual_seed(1))
    for step, (found, expected) in enumerate(
        zip(learn(model, tokens, steps), learn(plain, tokens, steps), strict=True)
    ):
        compare(found[0], expected[0], f"{family}: loss of step {step}", exact)
        compare(found[1], expected[1], f"{family}: scores of step {step}", 100 * exact)
        if step == 0:
            of_plain = dict(plain.named_parameters())
            for name, parameter in model.named_parameters():
                if of_plain[name].grad is None:
                    assert parameter.grad is None, name
                    continue
                compare(whole_gradient(parameter), of_plain[name].grad, f"{family}: gradient of {name}", exact)
    for name, parameter in model.named_parameters():
        compare(whole_of(parameter), dict(plain.named_parameters())[name], f"{family}: {name} at the end", 1000 * exact)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_family_computes_and_learns_what_it_did(family):
    run_ranks(check_family, 2, family, 10)


@pytest.mark.slow("tensor_parallel", "nn", "ops")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("Mixtral", "GptOss")])
def test_every_family_computes_and_learns_what_it_did(family):
    run_ranks(check_family, 2, family, 10, timeout_s=120)


@pytest.mark.slow("tensor_parallel", "nn", "ops")
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_a_family_computes_and_learns_what_it_did_over_more_ranks(family, world):
    run_ranks(check_family, world, family, 2, timeout_s=120)


def check_router_gradient(rank, implementation):
    """transformers#48687 and #48205: under its expert parallelism the router's gradient is wrong or NaN."""
    plain = model_of("Olmoe", torch.float32, implementation, num_experts=8, norm_topk_prob=False)
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(tp=2))
    tokens = torch.full((1, 3), 7)  # the same token: most experts, and all of some rank, get none
    for x in (plain, model):
        x(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        expected = dict(plain.named_parameters())[name].grad
        assert parameter.grad.isfinite().all(), name
        compare(whole_gradient(parameter), expected, f"{implementation} {name}", 2e-5)
    gate = model.model.layers[0].mlp.gate.weight.grad
    assert gate.abs().max() > 1e-4, "and it is no zero"


def check_router_gradients(rank):
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        check_router_gradient(rank, implementation)


def test_the_router_gets_its_whole_gradient_once_with_any_implementation_of_experts():
    run_ranks(check_router_gradients, 2)


def check_share(rank):
    """Experts that are most of a model leave at most 55% of it on each of two ranks."""
    for family, experts in (("Mixtral", "num_local_experts"), ("Qwen3Moe", "num_experts")):
        model = model_of(family, vocab_size=16, moe_intermediate_size=128, intermediate_size=128, **{experts: 8})
        before = sum(parameter.numel() for parameter in model.parameters())
        model = weft.parallelize(model, weft.init_mesh(tp=2))
        share = sum(parameter.numel() for parameter in model.parameters()) / before
        assert share <= 0.55, (family, share)


def test_a_rank_holds_its_share_of_the_experts():
    run_ranks(check_share, 2)


def check_files(rank, folder):
    plain = model_of("Mixtral")
    model = weft.parallelize(copy.deepcopy(plain), weft.init_mesh(tp=2))
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()], "the names are the plain model's"
    weft.save_checkpoint(model, None, f"{folder}/checkpoint")
    again = weft.full_state_dict(model)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again[name], tensor), name
    with torch.device("meta"):
        bare = model_of("Mixtral")
    bare = weft.load_safetensors(weft.parallelize(bare, weft.init_mesh(tp=2)), f"{folder}/checkpoint")
    tokens = torch.arange(3, 17).view(2, 7)
    compare(bare(input_ids=tokens).logits, plain(input_ids=tokens).logits, "loaded", 1e-9)
    whole = weft.load_safetensors(model_of("Mixtral"), f"{folder}/checkpoint", group=None)
    assert torch.equal(whole.model.layers[1].mlp.experts.down_proj, plain.model.layers[1].mlp.experts.down_proj)


def test_checkpoints_have_the_names_of_the_plain_model(tmp_path):
    run_ranks(check_files, 2, str(tmp_path))


def test_what_is_no_sum_over_experts_stays_whole_with_the_reason():
    model = model_of("Mixtral")
    plan = automatic_plan(model, 2)
    assert plan.plan["model.layers.0.mlp.experts"] == "experts"
    assert automatic_plan(model, 6).plan["model.layers.0.mlp.experts"] == "experts"  # each over several ranks
    few = "5 experts are fewer than 49 ranks, and so are the 48 features inside of each"
    assert few in automatic_plan(model, 49).whole["model.layers.0.mlp.experts"]

    class Normalised(type(model.model.layers[0].mlp.experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states, top_k_index, top_k_weights / top_k_weights.sum(-1, keepdim=True))

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Normalised
    reason = automatic_plan(model, 2).whole["model.layers.0.mlp.experts"]
    assert "the sum over parts of its experts is not what all of them give" in reason


def check_own_tokens(rank, families, sizes, **options):
    """Ranks with tokens of their own: gradients are averaged over them, as one process averages over the batch."""
    mesh = weft.init_mesh(**sizes)
    replicas, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    for family in families:
        exact = 1e-6 if family in ("NemotronH", "Phimoe") else 1e-9
        plain = model_of(family, **options)
        plain.config.output_router_logits = False  # a product of means: of a rank's tokens it is another number
        model = weft.parallelize(copy.deepcopy(plain), mesh)
        layers = [layer for layer in model.modules() if isinstance(layer, ParallelExperts)]
        assert layers and all(layer.place.inner == bool(options) for layer in layers)
        tokens = torch.randint(3, 61, (2, 2 * replicas, 7), generator=torch.Generator().manual_seed(1))
        optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-2, weight_decay=0.1) for x in (plain, model)]
        of_plain = dict(plain.named_parameters())
        for step, batch in enumerate(tokens):
            for x, given, optimizer in ((plain, batch, optimizers[0]), (model, batch.split(2)[place], optimizers[1])):
                optimizer.zero_grad()
                x(input_ids=given, labels=given).loss.backward()
            for name, parameter in model.module.named_parameters():
                if of_plain[name].grad is None:
                    assert parameter.grad is None, name
                    continue
                compare(whole_gradient(parameter), of_plain[name].grad, f"{family} step {step} {name}", 100 * exact)
            for optimizer in optimizers:
                optimizer.step()
        model.check_replicas()


def test_a_family_learns_with_experts_over_ep():
    run_ranks(check_own_tokens, 2, ["Qwen3Moe"], dict(dp=2, ep=2))


FEW = {"num_local_experts": 3, "num_experts": 3, "n_routed_experts": 3, "moe_num_experts": 3, "n_group": 1}


def check_in_parts(rank, families):
    for family in families:  # plan="auto": three experts on four ranks
        options = {name: number for name, number in FEW.items() if name in FAMILIES[family]}
        check_own_tokens(rank, [family], dict(dp=2, tp=2, ep=2), **options)


def test_a_family_learns_with_experts_over_ep_and_each_over_tp():
    run_ranks(check_in_parts, 4, ["GptOss"])


@pytest.mark.slow("tensor_parallel", "nn", "ops")
@pytest.mark.parametrize("start", [0, 1])
def test_families_learn_with_experts_over_ep_and_each_over_tp(start):
    families = [family for family in FIXED if family != "GptOss"]
    run_ranks(check_in_parts, 4, families[start::2], timeout_s=300, group_timeout_s=120)


FIXED = [family for family in FAMILIES if family != "Phimoe"]  # the others draw nothing at random


@pytest.mark.slow("tensor_parallel", "nn", "ops", "data_parallel")
@pytest.mark.parametrize(
    ("families", "world", "sizes"),
    [(FIXED[:6], 2, dict(dp=2, ep=2)), (FIXED[6:], 2, dict(dp=2, ep=2)), (["GptOss"], 4, dict(dp=2, tp=2, ep=2))],
)
def test_families_learn_with_experts_over_ep(families, world, sizes):
    run_ranks(check_own_tokens, world, families, sizes, timeout_s=200, group_timeout_s=120)
