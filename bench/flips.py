"""How often a tree changes the target's top token: plain steps against chains of D nodes, over the same text.

`python -m bench.flips demo --positions 20000` feeds held-out text to the model twice, one token a step and
D tokens a step, and compares the best token after every position. In exact arithmetic they are equal; on a
GPU sums run in another order for another number of rows. Prints one JSON object a weight format.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig
from nextn.engine.bench import read_texts
from nextn.engine.llm import resolve_model
from nextn.engine.worker import choose_device, choose_dtype
from nextn.errors import NextnError
from nextn.models.inputs import TreeInput
from nextn.models.weights import Models, build_models
from nextn.text import Tokenizer

logger = logging.getLogger(__name__)
PAGE = 64


@torch.inference_mode()
def top_tokens(models: Models, text: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Best token after each position of text [B, T] and its lead over the second, by chains of `nodes`."""
    rows, length = text.shape
    device, cfg = text.device, models.cfg
    pages = -(-length // PAGE)
    cache = torch.empty(
        cfg.num_hidden_layers + 1,
        rows * pages,
        PAGE,
        cfg.latent_dim,
        dtype=models.target.place.dtype,
        device=device,
    )
    table = torch.arange(rows * pages, device=device).view(rows, pages)
    steps = torch.arange(nodes, device=device)
    mask = ((torch.ones_like(steps) << (steps + 1)) - 1).expand(rows, -1)
    best, lead = [], []
    for start in range(0, length - nodes + 1, nodes):
        positions = (start + steps).expand(rows, -1)
        inputs = TreeInput(
            tokens=text[:, start : start + nodes],
            positions=positions,
            mask=mask,
            valid=torch.ones_like(mask, dtype=torch.bool),
            slots=table.gather(1, positions // PAGE) * PAGE + positions % PAGE,
            prefix_lens=torch.full((rows,), start, device=device),
            page_table=table,
        )
        two = models.target.logits(models.target.decode(inputs, cache).normed).topk(2)
        best.append(two.indices[..., 0])
        lead.append(two.values[..., 0] - two.values[..., 1])
    return torch.cat(best, 1), torch.cat(lead, 1)


def flips(models: Models, text: Tensor, nodes: int) -> dict[str, object]:
    """Positions at which plain steps and chains disagree, and how close the two best tokens were there."""
    length = text.shape[1] // nodes * nodes
    plain, lead = top_tokens(models, text[:, :length], 1)
    chain, _ = top_tokens(models, text[:, :length], nodes)
    differ = plain != chain
    return {
        "nodes": nodes,
        "positions": plain.numel(),
        "flips": int(differ.sum()),
        "rate": round(float(differ.float().mean()), 6),
        "largest_lead_flipped": round(float(lead[differ].max()), 4) if bool(differ.any()) else 0.0,
    }


def held_out_text(path: Path, tokenizer: Tokenizer, rows: int, length: int, device: torch.device) -> Tensor:
    """Prompts end to end, cut into [rows, length]; repeated where they are too short."""
    tokens = tokenizer.encode("\n".join(read_texts(path)), add_special_tokens=False)
    need = rows * length
    tokens = (tokens * -(-need // len(tokens)))[:need]
    return torch.tensor(tokens, device=device).view(rows, length)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 with a sentence on a wrong flag or an unusable model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="bench.flips", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=16, help="texts side by side (default 16)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the chain (default 4)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, default=Path("bench/prompts/demo_heldout.jsonl"))
    args = parser.parse_args(argv)
    try:
        device = choose_device(args.device)
        dtype = choose_dtype(args.dtype, device)
        path = resolve_model(args.model)
        cfg = ModelConfig.from_dir(path)
        length = -(-args.positions // args.rows)
        text = held_out_text(args.prompts, Tokenizer(path), args.rows, length + args.nodes, device)
        for keep_fp8 in (False, True):
            config = EngineConfig(spec=None)
            models = build_models(path, cfg, config, device, dtype, length + 64, keep_fp8=keep_fp8)
            found = flips(models, text, args.nodes)
            print(json.dumps({"weights": "fp8" if keep_fp8 else str(dtype).removeprefix("torch."), **found}))
    except NextnError as error:
        print(f"bench.flips: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
