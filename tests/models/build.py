"""Tiny models with random weights, and the paged cache and inputs that drive them.

Unused slots and pages hold NaN, pages are handed out in random order, and page 0 is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.config import ModelConfig
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.kernels.ref.gemm import FP8, dequantize
from nextn.models.deepseek import DeepseekModel
from nextn.models.inputs import PrefillInput, TreeInput
from nextn.models.mtp import NextN
from nextn.models.specs import TensorSpec

TINY = Path(__file__).parents[1] / "data" / "dsv3-tiny.json"
CPU = torch.device("cpu")
MAX_POSITIONS = 256


def tiny_dict(**changes: Any) -> dict[str, Any]:
    """The tiny model's config.json without quantisation, with fields changed."""
    config: dict[str, Any] = json.loads(TINY.read_text(encoding="utf-8"))
    del config["quantization_config"]
    return config | changes


def small_dict(**changes: Any) -> dict[str, Any]:
    """A smaller one still, for tests that run many passes: one dense and one MoE layer."""
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "vocab_size": 96,
    }
    return tiny_dict(**(small | changes))


def random_state(specs: Iterable[TensorSpec], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors for every spec in float32, of sizes that keep activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for spec in specs:
        noise = torch.randn(spec.shape, generator=generator)
        if spec.kind == "norm":
            state[spec.name] = 1 + 0.2 * noise
        elif spec.kind == "bias":
            state[spec.name] = 0.2 * noise
        elif "embed" in spec.name:
            state[spec.name] = noise
        else:
            state[spec.name] = noise * spec.shape[-1] ** -0.5
    return state


def load_state(
    specs: Iterable[TensorSpec], state: dict[str, Tensor], scales: dict[str, Tensor] | None = None
) -> None:
    """Give each spec its shard of the full tensors, and of the block scales of FP8 ones."""
    for spec in specs:
        scale = (scales or {}).get(spec.scale_name)
        if scale is not None:
            blocks = tuple(slice(part.start // 128, -(-part.stop // 128)) for part in spec.shard)
            scale = scale[blocks]
        spec.load(state[spec.name][spec.shard], scale)


def quantize(
    state: dict[str, Tensor], specs: Iterable[TensorSpec]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Block FP8 of the 'linear' tensors (not eh_proj, as in real checkpoints), and their scales."""
    weights, scales = dict(state), {}
    for spec in specs:
        if spec.kind != "linear" or "eh_proj" in spec.name:
            continue
        weight = state[spec.name]
        rows, columns = weight.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = weight
        blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        weights[spec.name] = (weight / wide).to(FP8)
        scales[spec.scale_name] = scale
    return weights, scales


def dequantized(weights: dict[str, Tensor], scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 values of a quantised state."""
    plain = dict(weights)
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        plain[weight] = dequantize(weights[weight], scale, (128, 128), torch.float32)
    return plain


@dataclass(repr=False)
class Tiny:
    """A target and, where the config has one, its NextN layer, with the state that filled them."""

    cfg: ModelConfig
    target: DeepseekModel
    nextn: NextN | None
    state: dict[str, Tensor]
    dtype: torch.dtype

    @property
    def draft(self) -> NextN:
        """The NextN layer of a config that has one."""
        assert self.nextn is not None
        return self.nextn

    def specs(self) -> Iterable[TensorSpec]:
        """Every tensor of target and NextN layer."""
        yield from self.target.specs()
        if self.nextn is not None:
            yield from self.nextn.specs()

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits of states before its final norm."""
        return self.target.logits(self.target.final_norm(hidden))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits of states before shared_head.norm."""
        return self.target.logits(self.draft.final_norm(hidden))

    def pool(self, *, page_size: int = 4, pages: int = 64, seed: int = 0) -> Pool:
        """An empty paged cache for this model."""
        layers = self.cfg.num_hidden_layers + 1
        shape = (layers, pages, page_size, self.cfg.latent_dim)
        return Pool(torch.full(shape, float("nan"), dtype=self.dtype), seed)


def build(
    config: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    keep_fp8: bool = False,
    tp: TensorParallel = SINGLE,
    state: dict[str, Tensor] | None = None,
    scales: dict[str, Tensor] | None = None,
    seed: int = 0,
) -> Tiny:
    """Models of a config.json filled with `state` (random by default)."""
    cfg = ModelConfig.from_dict(config)
    options: dict[str, Any] = {"dtype": dtype, "device": CPU, "keep_fp8": keep_fp8, "tp": tp}
    target = DeepseekModel(cfg, max_positions=MAX_POSITIONS, **options)
    nextn = NextN(cfg, target, **options) if cfg.has_nextn else None
    tiny = Tiny(cfg, target, nextn, {}, dtype)
    tiny.state = state if state is not None else random_state(tiny.specs(), seed)
    load_state(tiny.specs(), tiny.state, scales)
    return tiny


@dataclass(repr=False)
class Pool:
    """A cache and its free pages in random order."""

    cache: Tensor  # [layers, pages, page_size, C]
    seed: int
    rows: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.free = (torch.randperm(self.cache.shape[1] - 1, generator=generator) + 1).tolist()
        self.page_size = self.cache.shape[2]

    def reserve(self, lengths: Sequence[int]) -> None:
        """Give row i enough pages for lengths[i] tokens."""
        while len(self.rows) < len(lengths):
            self.rows.append([])
        for row, length in zip(self.rows, lengths, strict=False):
            while len(row) * self.page_size < length:
                row.append(self.free.pop())

    def table(self) -> Tensor:
        """[R, P] int64; pages beyond a row's own hold a number of no page."""
        width = max((len(row) for row in self.rows), default=0)
        return torch.tensor([row + [10**6] * (width - len(row)) for row in self.rows], dtype=torch.int64)

    def slots(self, row: int, positions: Sequence[int]) -> list[int]:
        """Slots of a row's positions."""
        size = self.page_size
        return [self.rows[row][position // size] * size + position % size for position in positions]

    def prefill_input(self, chunks: Sequence[Sequence[int]], starts: Sequence[int]) -> PrefillInput:
        """Row i's tokens chunks[i] at positions from starts[i] on."""
        self.reserve([start + len(chunk) for start, chunk in zip(starts, chunks, strict=True)])
        positions = [list(range(s, s + len(c))) for s, c in zip(starts, chunks, strict=True)]
        slots = [slot for row, ps in enumerate(positions) for slot in self.slots(row, ps)]
        offsets = [0]
        for chunk in chunks:
            offsets.append(offsets[-1] + len(chunk))
        return PrefillInput(
            tokens=torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int64),
            positions=torch.tensor([p for row in positions for p in row], dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            page_table=self.table(),
            cu_seqlens=tuple(offsets),
            prefix_lens=tuple(starts),
        )

    def tree_input(self, trees: Sequence[Tree], starts: Sequence[int]) -> TreeInput:
        """Row i's tree on top of starts[i] cached tokens, padded to the largest tree.

        A tree's node j goes to position starts[i] + j of the row's slots. Padded nodes are invalid, repeat
        token 0 and have slots of no page.
        """
        width = max(len(tree.tokens) for tree in trees)
        self.reserve([start + width for start in starts])

        def padded(values: Sequence[int], fill: int) -> list[int]:
            return [*values, *[fill] * (width - len(values))]

        masks = [[*tree.masks(), *(signed(1 << j) for j in range(len(tree.tokens), width))] for tree in trees]
        depths = [tree.depths() for tree in trees]
        nodes = [range(start, start + len(tree.tokens)) for tree, start in zip(trees, starts, strict=True)]
        return TreeInput(
            tokens=torch.tensor([padded(tree.tokens, 0) for tree in trees]),
            positions=torch.tensor(
                [padded([start + d for d in depth], 0) for depth, start in zip(depths, starts, strict=True)]
            ),
            mask=torch.tensor(masks),
            valid=torch.tensor([[j < len(tree.tokens) for j in range(width)] for tree in trees]),
            slots=torch.tensor([padded(self.slots(row, ps), 10**9) for row, ps in enumerate(nodes)]),
            prefix_lens=torch.tensor(starts),
            page_table=self.table(),
        )


@dataclass
class Tree:
    """Draft tokens and each one's parent (-1 at the root); parents come first."""

    tokens: list[int]
    parents: list[int]

    @staticmethod
    def chain(tokens: Sequence[int]) -> Tree:
        """Each token under the one before."""
        return Tree(list(tokens), list(range(-1, len(tokens) - 1)))

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def depths(self) -> list[int]:
        """Edges from the root."""
        return [len(self.path(node)) - 1 for node in range(len(self.tokens))]

    def masks(self) -> list[int]:
        """Each node's path as a signed 64-bit set."""
        return [signed(sum(1 << step for step in self.path(node))) for node in range(len(self.tokens))]


def signed(bits: int) -> int:
    """A set of 64 bits as a signed integer."""
    return bits - (1 << 64) if bits >> 63 else bits


def prefill(tiny: Tiny, pool: Pool, chunks: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """Target states of new tokens, before the final norm."""
    return tiny.target.prefill(pool.prefill_input(chunks, starts), pool.cache).hidden


def random_tokens(tiny: Tiny, count: int) -> list[int]:
    """Token ids from torch's generator."""
    tokens: list[int] = torch.randint(tiny.cfg.vocab_size, (count,)).tolist()
    return tokens
