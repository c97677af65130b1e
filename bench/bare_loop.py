"""The yardstick for the engine's overhead: greedy decoding of one sequence in a bare torch loop.

Same weights, same absorbed mathematics, nothing around it: no pages, no rows, no batch, no sampling, no
draft. Checks its tokens against the engine's before it prints a speed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn import LLM, SamplingParams
from nextn.errors import NextnError
from nextn.models.deepseek import Block, DeepseekModel
from nextn.models.moe import MoE


class BareLoop:
    """One sequence through the target's own weights; unquantised weights, one rank."""

    def __init__(self, target: DeepseekModel, max_len: int) -> None:
        self.target = target
        cfg = target.cfg
        example = target.embed_tokens.weight
        self.cache = torch.empty(cfg.num_hidden_layers, max_len, cfg.latent_dim, dtype=example.dtype)
        self.length = 0

    def step(self, token: int) -> Tensor:
        """Append one token; returns its logits [vocab]."""
        target = self.target
        rotary = target.rotary.rows(torch.tensor([self.length]))
        x = target.embed_tokens.weight[token : token + 1]
        self.length += 1
        for layer, block in enumerate(target.blocks()):
            x = x + self._attend(block, block.input_layernorm(x), rotary, self.cache[layer])
            x = x + self._feed(block, block.post_attention_layernorm(x))
        return F.linear(target.norm(x), target.lm_head.proj.weight)[0]

    def _attend(self, block: Block, x: Tensor, rotary: object, cache: Tensor) -> Tensor:
        attn = block.self_attn
        q_nope, q_pe, latent = attn._project(x, rotary)  # type: ignore[arg-type]
        cache[self.length - 1] = latent[0]
        seen = cache[: self.length]
        absorbed = torch.bmm(q_nope.transpose(0, 1), attn.w_uk)  # [H, 1, kv_lora]
        q = torch.cat((absorbed[:, 0], q_pe[0]), -1)  # [H, C]
        weights = (q @ seen.T * attn.scale).softmax(-1)
        mixed = weights @ seen[:, : attn.kv_lora]  # [H, kv_lora]
        out = torch.bmm(mixed.unsqueeze(1), attn.w_uv.transpose(1, 2))  # [H, 1, v]
        return F.linear(out.flatten().unsqueeze(0), attn.o_proj.weight)

    def _feed(self, block: Block, x: Tensor) -> Tensor:
        mlp = block.mlp
        if not isinstance(mlp, MoE):
            return mlp(x)
        weights, indices = mlp.gate(x)
        out = mlp.shared_experts(x) if mlp.shared_experts is not None else torch.zeros_like(x)
        for weight, expert in zip(weights[0], indices[0].tolist(), strict=True):
            gate, up = F.linear(x, mlp.experts.w13[expert]).chunk(2, -1)
            out = out + weight * F.linear(F.silu(gate) * up, mlp.experts.w2[expert])
        return out


@torch.inference_mode()
def run_bare(target: DeepseekModel, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after the prompt and the seconds of each."""
    loop = BareLoop(target, len(prompt) + count + 1)
    for token in prompt[:-1]:
        loop.step(token)
    token, tokens, seconds = prompt[-1], [], []
    for _ in range(count):
        started = time.perf_counter()
        token = int(loop.step(token).argmax())
        seconds.append(time.perf_counter() - started)
        tokens.append(token)
    return tokens, seconds


def run_engine(llm: LLM, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The engine's tokens for the same prompt and its decode tokens/s, prefill left out."""
    from nextn.engine.request import Request

    llm.engine.add(Request("r", prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    started = time.perf_counter()
    while llm.engine.has_work():
        for output in llm.engine.step():
            if not tokens:
                started = time.perf_counter()
            tokens += output.token_ids
    return tokens, (len(tokens) - 1) / (time.perf_counter() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both speeds and their ratio; exit status 1, and no speed, when the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompt", default="The history of the")
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    try:
        llm = LLM(args.model, device="cpu", dtype="float32", max_running_requests=1)
    except NextnError as error:
        print(f"bare_loop: {error}", file=sys.stderr)
        return 2
    prompt = llm.tokenizer.encode(args.prompt)
    drafted, spec_speed = run_engine(llm, prompt, args.tokens)
    llm.engine.set_spec(None)
    plain, plain_speed = run_engine(llm, prompt, args.tokens)
    bare, seconds = run_bare(llm.engine.worker.models.target, prompt, args.tokens)
    if not bare == plain == drafted:
        first = next(i for i in range(args.tokens) if len({bare[i], plain[i], drafted[i]}) > 1)
        print(f"the tokens differ from token {first} on; no speed is reported", file=sys.stderr)
        return 1
    bare_speed = 1 / statistics.fmean(seconds)
    figures = {
        "bare_tokens_per_s": round(bare_speed, 1),
        "plain_tokens_per_s": round(plain_speed, 1),
        "spec_tokens_per_s": round(spec_speed, 1),
        "plain_over_bare": round(plain_speed / bare_speed, 3),
        "accept_length": round(llm.engine.counters.acceptance.length, 3),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
