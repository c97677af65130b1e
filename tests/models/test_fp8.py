"""Block FP8 checkpoints: kept as they are, dequantised at load, mixed, and refused if they cannot be cut."""

from __future__ import annotations

import pytest
import torch

from nextn.errors import CheckpointError, ConfigError
from nextn.kernels.comm import TensorParallel
from nextn.kernels.ref.gemm import FP8
from nextn.models.deepseek import DeepseekModel
from tests.compare import assert_close
from tests.models.build import (
    CPU,
    Tree,
    build,
    dequantized,
    load_state,
    prefill,
    quantize,
    random_tokens,
    small_dict,
    tiny_dict,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kept_fp8_computes_what_dequantised_weights_do(dtype: torch.dtype) -> None:
    """keep_fp8, dequantising at load, and a checkpoint that was dequantised before: the same bits."""
    plain = build(tiny_dict(num_hidden_layers=2), dtype=dtype)
    weights, scales = quantize(plain.state, plain.specs())
    tokens, outputs = random_tokens(plain, 9), []
    for keep in (True, False):
        tiny = build(tiny_dict(num_hidden_layers=2), dtype=dtype, keep_fp8=keep, state=weights, scales=scales)
        pool = tiny.pool()
        hidden = prefill(tiny, pool, [tokens[:5]], [0])
        tree = tiny.target.decode(pool.tree_input([Tree.chain(tokens[5:])], [5]), pool.cache).hidden
        kinds = {name.split(".")[-1] for name, p in tiny.target.named_parameters() if p.dtype == FP8}
        assert kinds == ({"weight", "w13", "w2"} if keep else set())
        outputs.append(torch.cat((hidden, tree[0])))
    assert_close(outputs[0], outputs[1], "bitwise")
    if dtype != torch.bfloat16:
        other = build(tiny_dict(num_hidden_layers=2), dtype=dtype, state=dequantized(weights, scales))
        kind = "fp32-logits"  # float32 rounds weight * scale where float64 does not
        assert_close(outputs[0], torch.cat((prefill(other, other.pool(), [tokens], [0]),)), kind)


def test_odd_sizes_fall_back_to_dequantised_stacks() -> None:
    """Stacks whose parts do not fill blocks (q_lora 48, experts of 32) still load from FP8."""
    config = small_dict(num_nextn_predict_layers=1)
    plain = build(config)
    weights, scales = quantize(plain.state, plain.specs())
    kept = build(config, keep_fp8=True, state=weights, scales=scales)
    loose = build(config, state=weights, scales=scales)
    tokens = random_tokens(plain, 8)
    outputs = [prefill(tiny, tiny.pool(), [tokens], [0]) for tiny in (kept, loose)]
    assert_close(outputs[0], outputs[1], "bitwise")
    assert kept.target.layers[0].self_attn.o_proj.weight.dtype == FP8
    assert kept.target.layers[0].self_attn.down_proj.weight.dtype == torch.float32


def test_eh_proj_norms_embedding_head_and_router_are_never_fp8() -> None:
    """What official checkpoints leave unquantised stays so with keep_fp8."""
    tiny = build(tiny_dict(num_hidden_layers=1, first_k_dense_replace=0), keep_fp8=True)
    for owner in (tiny.target, tiny.draft):
        for name, parameter in owner.named_parameters():
            if parameter.dtype == FP8:
                assert not any(word in name for word in ("norm", "embed", "head", "gate.", "eh_proj", "kv_b"))


def test_a_mixed_checkpoint_gives_up_fp8_where_parts_differ() -> None:
    """One plain expert or one plain half of a stack makes its whole stack plain, whatever comes first."""
    config = tiny_dict(num_hidden_layers=2)
    plain = build(config)
    weights, scales = quantize(plain.state, plain.specs())
    exact = dequantized(weights, scales)
    for name in ("model.layers.1.mlp.experts.3.up_proj", "model.layers.0.mlp.up_proj"):
        weights[f"{name}.weight"] = exact[f"{name}.weight"]
        del scales[f"{name}.weight_scale_inv"]
    mixed = build(config, keep_fp8=True, state=weights, scales=scales)
    tokens = random_tokens(plain, 7)
    expected = build(config, state=exact)
    actual, wanted = (prefill(tiny, tiny.pool(), [tokens], [0]) for tiny in (mixed, expected))
    assert_close(actual, wanted, "fp32-logits")
    assert mixed.target.layers[1].mlp.experts.w13.dtype == torch.float32
    assert mixed.target.layers[1].mlp.experts.w2.dtype == FP8
    assert mixed.target.layers[0].mlp.gate_up_proj.weight.dtype == torch.float32


def test_fp8_that_ranks_cannot_share_is_refused() -> None:
    """128 intermediate columns of FP8 experts do not go to two ranks: the error names a way out."""
    config = tiny_dict(num_hidden_layers=2, num_attention_heads=16)
    plain = build(config)
    weights, scales = quantize(plain.state, plain.specs())
    refusal = r"experts\.0\.gate_proj.*64 for each of 2 ranks.*multiple of its block of 128.*fewer ranks"
    for keep in (True, False):
        with pytest.raises(ConfigError, match=refusal):
            build(config, keep_fp8=keep, tp=TensorParallel(0, 2), state=weights, scales=scales)


def test_a_wrong_shape_or_kind_is_refused() -> None:
    """Parts that do not fit, and FP8 where there is none, raise an error that names the tensor."""
    tiny = build(small_dict())
    by_name = {spec.name: spec for spec in tiny.specs()}
    with pytest.raises(CheckpointError, match="q_b_proj"):
        by_name["model.layers.0.self_attn.q_b_proj.weight"].load(torch.zeros(3, 3), None)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored in FP8"):
        by_name["model.norm.weight"].load(torch.zeros(64).to(FP8), torch.ones(1))


def test_specs_name_every_tensor_of_a_checkpoint_once() -> None:
    """The official model's list: 91,991 stored tensors, of which two repeat embedding and head."""
    import json

    from nextn.config import ModelConfig
    from nextn.models.mtp import NextN
    from tests.models.build import TINY

    config = json.loads(TINY.read_text(encoding="utf-8")) | {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
    }
    cfg, meta = ModelConfig.from_dict(config), torch.device("meta")
    target = DeepseekModel(cfg, dtype=torch.bfloat16, device=meta, keep_fp8=True, max_positions=1)
    nextn = NextN(cfg, target, dtype=torch.bfloat16, device=meta, keep_fp8=True)
    specs = [*target.specs(), *nextn.specs()]
    names = {spec.name for spec in specs}
    assert len(names) == len(specs)
    scaled = sum(spec.kind == "linear" and "eh_proj" not in spec.name for spec in specs)
    assert len(specs) + scaled + 2 == 91_991


def test_loading_follows_the_shards_of_every_rank() -> None:
    """Two ranks' shards of each tensor are the whole or its halves."""
    cfg = build(small_dict()).cfg
    ranks = [
        DeepseekModel(
            cfg, dtype=torch.float32, device=CPU, keep_fp8=False, max_positions=8, tp=TensorParallel(r, 2)
        )
        for r in range(2)
    ]
    for first, second in zip(*(list(model.specs()) for model in ranks), strict=True):
        count = torch.zeros(first.shape)
        count[first.shard] += 1
        count[second.shard] += 1
        assert count.unique().numel() == 1, f"{first.name} is not shared equally"
    load_state(ranks[1].specs(), build(small_dict()).state)
