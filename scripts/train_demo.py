"""Train the demo model: a small DeepSeek-V3-architecture language model with its NextN layer.

The phases share one wall-clock budget and can be interrupted and resumed: `base` (short sequences, main
loss plus weighted NextN loss, auxiliary-loss-free expert balance), `long` (longer sequences, FP8-rounded
weights through a straight-through estimator, unlikelihood of loops in the model's own greedy text) and
`distill` (target frozen at its FP8 values, the NextN layer learns the target's distribution over three
recycled draft steps). A second run with `--average` starts from the mean of two exports of the first, and
puts `unloop` before `distill`: the plain mean of both teaches the target with repeated n-grams struck out.
The result is exported in the official checkpoint format.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_model import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Config,
    Model,
    deployed,
    export,
    generate,
    load_export,
    repeats,
    rope_table,
)
from tokenizers import Tokenizer
from torch import Tensor, nn

# ---------------------------------------------------------------- data


class Streams:
    """Token streams on the device; batches are a fixed function of (seed, step)."""

    def __init__(self, data: Path, split: str, device: torch.device) -> None:
        meta = json.loads((data / "meta.json").read_text())
        self.weights: dict[str, float] = meta["weights"]
        self.host = {name: self.load(data / f"{split}_{name}.npy.xz") for name in self.weights}
        self.tokens = {name: torch.from_numpy(a.astype(np.int32)).to(device) for name, a in self.host.items()}
        self.document_starts = {name: np.flatnonzero(a == BOS_ID) for name, a in self.host.items()}

    @staticmethod
    def load(path: Path) -> np.ndarray:
        """One uint16 array."""
        return np.load(io.BytesIO(lzma.decompress(path.read_bytes())))

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> Tensor:
        """[rows, length] int64 windows after a BOS; the rows are shared out over the streams by weight."""
        names = list(self.weights)
        share = np.array([self.weights[name] for name in names])
        counts = np.bincount(rng.choice(len(names), rows, p=share / share.sum()), minlength=len(names))
        picked = []
        for name, count in zip(names, counts, strict=True):
            stream = self.tokens[name]
            start = torch.from_numpy(rng.integers(0, len(stream) - length, count)).to(stream.device)
            picked.append(stream[start[:, None] + torch.arange(length, device=stream.device)])
        windows = torch.cat(picked).long()
        windows[:, 0] = BOS_ID
        return windows

    def prompts(self, rng: np.random.Generator, count: int, longest: int, assistant: int) -> list[list[int]]:
        """Beginnings of documents, questions up to the assistant's turn, pieces of code out of the middle."""
        names = list(self.weights)
        share = np.array([self.weights[name] for name in names])
        found: list[list[int]] = []
        for choice in rng.choice(len(names), count, p=share / share.sum()):
            name, length = names[choice], int(rng.integers(longest // 12, longest // 2))
            stream = self.host[name]
            if name.startswith("code") and rng.random() < 0.5:
                start = int(rng.integers(0, len(stream) - longest))
                piece = [BOS_ID, *stream[start : start + length + longest // 3].tolist()]
            else:
                start = int(rng.choice(self.document_starts[name]))
                piece = stream[start : start + longest].tolist()
                turn = piece.index(assistant) + 1 if assistant in piece else length
                piece = piece[:turn]
            end = piece.index(EOS_ID) if EOS_ID in piece else len(piece)
            found.append(piece[: max(end, 2)])
        return found


# ---------------------------------------------------------------- losses


def looping(ids: Tensor, given: Tensor, n: int = 12) -> Tensor:
    """[B, T] bool: generated tokens that complete an n-gram which was generated before."""
    row, at, token = repeats(ids, given, n)
    keep = at + 1 < ids.shape[1]
    row, at, token = row[keep], at[keep] + 1, token[keep]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[row[ids[row, at] == token], at[ids[row, at] == token]] = True
    return mask & (ids != PAD_ID)


def distinct_ratio(tokens: list[int], n: int = 4) -> float:
    """Distinct n-grams over n-grams."""
    grams = list(zip(*(tokens[k:] for k in range(n)), strict=False))
    return len(set(grams)) / max(len(grams), 1)


def head_loss(weight: Tensor, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the head's prediction, and its argmax [B, T]."""
    logits = F.linear(states, weight)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits.detach().argmax(-1)


def unlikelihood(weight: Tensor, states: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """-log(1 - p) of the masked tokens of ids [B, T], from the states that predict them."""
    log_p = F.linear(states[:, :-1], weight).float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = -torch.log1p(-log_p.exp().clamp(max=0.9999)) * mask[:, 1:]
    return loss.sum() / (mask.sum() + 0.02 * mask.numel())


def taught(logits: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
    """Cross-entropy to the teacher's distribution over the rows marked valid [B, T]."""
    return -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)[valid].mean()


def distance(weight: Tensor, states: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """KL(target || draft) plus a little cross-entropy to the target's choice, over the first `valid` rows."""
    draft = F.linear(states[:, :valid], weight).float().log_softmax(-1)
    target = target[:, :valid].float().log_softmax(-1)
    choice = target.argmax(-1)
    kl = (target.exp() * (target - draft)).sum(-1).mean()
    hard = -draft.gather(-1, choice[..., None]).mean()
    return kl + 0.2 * hard, draft.detach().argmax(-1) == choice


# ---------------------------------------------------------------- optimiser


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration to the nearest semi-orthogonal matrix, [n, rows, columns] (Muon)."""
    x = matrix.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices: Nesterov momentum, orthogonal expert by expert, scaled to AdamW's size."""

    def __init__(self, params: list[nn.Parameter], lr: float, expert_width: int, experts: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})
        self.expert_width, self.experts = expert_width, experts

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """[rows, columns] -> [n, rows, columns]: one matrix, or one for each expert."""
        wide = self.expert_width * self.experts
        if tensor.shape[0] == wide:
            return tensor.view(self.experts, self.expert_width, -1)
        if tensor.shape[1] == wide:
            return tensor.view(-1, self.experts, self.expert_width).transpose(0, 1)
        return tensor[None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter; equal shapes are orthogonalised in one batch."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = self.as_matrices(p.grad.lerp(momentum, group["momentum"]))
                shapes.setdefault((update.shape[1], update.shape[2]), []).append(
                    (self.as_matrices(p.data), update)
                )
            for (rows, columns), pairs in shapes.items():
                batch = orthogonalize(torch.cat([update for _, update in pairs]))
                size = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
                for (weight, _), update in zip(pairs, batch.split([len(u) for _, u in pairs]), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        update.to(weight.dtype), alpha=-size
                    )


def optimizers(model: Model, module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices of `module`, AdamW for embedding, head, routers and norms."""
    inner, outer = [], []
    for name, p in module.named_parameters():
        is_inner = (
            p.dim() == 2 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name
        )
        (inner if is_inner else outer).append(p)
    c = model.config
    adam = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=outer[0].is_cuda)
    return [Muon(inner, lr, c.moe_intermediate_size, c.n_routed_experts + 1), adam]


# ---------------------------------------------------------------- training


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors."""

    seconds: float = 0.0
    step: int = 0
    tokens: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Runs the three phases against one clock."""

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self.args, self.config = args, config
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = Model(config).to(self.device)
        self.rope = rope_table(config, args.long_length + 8, self.device)
        self.train, self.val = (Streams(args.data, split, self.device) for split in ("train", "val"))
        self.tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
        self.assistant = self.tokenizer.token_to_id("<｜Assistant｜>")
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.optimizers = optimizers(self.model, self.model, args.lr)
        self.progress, self.phase = Progress(), "base"
        self.frozen: Model | None = None
        self.teacher: Model | None = None
        self.texts: list[tuple[Tensor, Tensor]] = []
        self.looped: tuple[Tensor, Tensor] | None = None
        self.pool: Tensor | None = None
        self.losses: dict[str, list[Tensor]] = {}
        self.process_start = self.clock = self.saved = time.monotonic()
        if args.average:
            self.average()
        if args.checkpoint.exists():
            self.resume()
        self.head_loss, self.unlikelihood, self.distance = head_loss, unlikelihood, distance
        self.draft_step = self.model.nextn.draft
        if args.compile:
            self.compile(args.compile)

    def compile(self, backend: str) -> None:
        """Compile layer by layer: all layers of a kind share one compilation."""
        torch._dynamo.config.recompile_limit = 64
        options: dict[str, Any] = {"dynamic": False, "backend": backend}
        for block in [*self.model.layers, self.model.nextn.block]:
            block.compile(**options)
        self.head_loss, self.unlikelihood, self.distance, self.draft_step = (
            torch.compile(f, **options) for f in (head_loss, unlikelihood, distance, self.model.nextn.draft)
        )

    # ---- state

    def resume(self) -> None:
        """Continue from the checkpoint file."""
        saved = torch.load(self.args.checkpoint, map_location=self.device, weights_only=True)
        self.progress, self.phase = Progress(**saved["progress"]), saved["phase"]
        self.model.load_state_dict(saved["model"])
        if self.phase != "base":
            self.enter(self.phase)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        print(
            f"resumed in phase {self.phase} at step {self.progress.step}, {self.progress.seconds:.0f} s",
            flush=True,
        )

    def save(self) -> None:
        """Write the checkpoint file, atomically."""
        self.tick()
        state = {"progress": asdict(self.progress), "phase": self.phase, "model": self.model.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}  # fmt: skip
        temporary = self.args.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.args.checkpoint)
        self.saved = time.monotonic()

    def tick(self) -> float:
        """Add the time since the last call to the clock of the training; returns the clock."""
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now
        return self.progress.seconds

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return (self.args.joint_minutes + self.args.unloop_minutes + self.args.distill_minutes) * 60

    def due_phase(self) -> str:
        """The phase that the clock asks for."""
        joint, spent = self.args.joint_minutes * 60, self.progress.seconds
        if self.args.smoke:
            first = 2 if self.args.average else 0
            names = [
                name
                for name in ("base", "long", "unloop", "distill")
                if self.args.average or name != "unloop"
            ]
            return [*names[first:], "end"][min(self.progress.step // 4, len(names) - first)]
        if spent < joint * (1 - self.args.long_fraction):
            return "base"
        if spent < joint:
            return "long"
        unloop = joint + self.args.unloop_minutes * 60
        if spent < unloop:
            return "unloop"
        return "distill" if spent < unloop + self.args.distill_minutes * 60 else "end"

    def enter(self, phase: str) -> None:
        """Prepare the model for a phase."""
        if phase == "unloop":
            self.enter_unloop()
        self.phase = phase
        self.model.round_weights(phase != "base")
        if phase == "distill":
            self.frozen = deployed(self.model)
            if self.args.compile:
                for block in self.frozen.layers:
                    block.compile(dynamic=False, backend=self.args.compile)
            self.model.requires_grad_(False)
            self.model.nextn.requires_grad_(True)
            gentle = self.args.distill_optimizer == "adamw"
            self.optimizers = (
                [self.adam(self.model.nextn, self.args.distill_lr)]
                if gentle
                else optimizers(self.model, self.model.nextn, self.args.distill_lr)
            )
            self.pool = None

    def average(self) -> None:
        """Start from a mean of two exports of one run, at the end of the joint phases."""
        early, late = Model(self.config), Model(self.config)
        load_export(early, self.args.average[0])
        load_export(late, self.args.average[1])
        first, second, (inner, outer) = early.state_dict(), late.state_dict(), self.args.shares

        def share(name: str) -> float:
            return (
                outer if name.startswith(("embed", "lm_head")) else 0.5 if name.startswith("nextn") else inner
            )

        self.model.load_state_dict({k: torch.lerp(first[k], second[k], share(k)) for k in first})
        early.load_state_dict({k: torch.lerp(first[k], second[k], 0.5) for k in first})
        self.teacher = deployed(early.to(self.device))
        self.progress.seconds = self.args.joint_minutes * 60

    def enter_unloop(self) -> None:
        """Train the target alone; its teacher is the plain mean of the two checkpoints."""
        if self.teacher is None:
            raise SystemExit("the phase unloop needs --average")
        self.model.requires_grad_(True)
        self.model.nextn.requires_grad_(False)
        self.optimizers = [self.adam(self.model, self.args.unloop_lr)]

    def adam(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        """AdamW over what of the module is trained, for the gentle last phases."""
        return torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad], lr, (0.9, 0.98), weight_decay=0.0
        )

    def prompts(self, streams: Streams, rng: np.random.Generator, count: int) -> list[list[int]]:
        """Prompts that leave about half of a rollout to the model."""
        return streams.prompts(rng, count, self.args.rollout_length * 11 // 20, self.assistant)

    # ---- one step of each phase

    def joint_loss(self, window: Tensor, mtp_weight: float) -> tuple[Tensor, list[Tensor]]:
        """Main loss plus weighted NextN loss on [B, T + 2] tokens; also the expert loads."""
        length = window.shape[1] - 2
        rope, head = self.rope[:, :length], self.model.lm_head.weight
        states, loads = self.model.target(window[:, :-2], rope)
        main, chosen = self.head_loss(head, states, window[:, 1:-1])
        drafts, load = self.model.draft(states, window[:, 1:-1], rope)
        mtp, drafted = self.head_loss(head, drafts, window[:, 2:])
        self.note(loss=main, mtp=mtp, agree=(drafted[:, :-1] == chosen[:, 1:]).float().mean())
        return main + mtp_weight * mtp, [*loads, load] if load is not None else loads

    def joint_step(self) -> None:
        """One optimiser step of the phases base and long."""
        args, long = self.args, self.phase == "long"
        part = min(self.progress.seconds / (args.joint_minutes * 60), 1.0)
        rng = np.random.default_rng([args.seed, self.progress.step])
        length = args.long_length if long else args.length
        window = self.train.windows(rng, args.batch_tokens // length, length + 2)
        self.set_lr(args.lr * min(1.0, (self.progress.step + 1) / 150, (1.0 - part) / 0.75 + 0.01))
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, loads = self.joint_loss(window, 0.3 if part < 0.67 else 0.1)
        loss.backward()
        if long and args.unlikelihood > 0 and self.progress.step % 2 == 0:
            self.unlikelihood_backward()
        self.update(window.numel())
        if not long:
            self.balance(loads)

    def unlikelihood_backward(self) -> None:
        """Push down the loops that the model's own greedy text falls into."""
        args, step = self.args, self.progress.step // 2 % 32
        rows = args.rollouts // 64
        if self.looped is None or step == 0:
            rng = np.random.default_rng([args.seed, 1, self.progress.step])
            prompts = self.prompts(self.train, rng, rows * 32)
            greedy = torch.zeros(rows * 32, device=self.device)
            ids = generate(deployed(self.model), prompts, args.rollout_length, greedy, self.generator)
            given = torch.tensor([len(p) for p in prompts], device=self.device)
            mask = torch.cat([looping(i, g) for i, g in zip(ids.split(rows), given.split(rows), strict=True)])
            print(
                f"  own text: {mask.float().sum(1).gt(16).float().mean().item():.1%} of rows loop", flush=True
            )
            self.looped = ids, mask
        ids, mask = (x[step * rows : (step + 1) * rows] for x in self.looped)
        with torch.autocast(self.device.type, torch.bfloat16):
            states, _ = self.model.target(ids, self.rope[:, : ids.shape[1]])
            loss = self.unlikelihood(self.model.lm_head.weight, states, ids, mask)
        self.note(unlikelihood=loss)
        (args.unlikelihood * loss).backward()

    def unloop_step(self) -> None:
        """One optimiser step towards the teacher's distribution without repeats, on the texts of both."""
        args, n = self.args, 8
        assert self.teacher is not None
        part = (self.progress.seconds - args.joint_minutes * 60) / (args.unloop_minutes * 60)
        self.set_lr(args.unloop_lr * (1.02 - min(part, 1.0)))
        rng = np.random.default_rng([args.seed, 3, self.progress.step])
        if not self.texts or self.progress.step % 20 == 0:
            for model, no_repeat in ((self.teacher, n), (deployed(self.model), 0)):
                prompts = self.prompts(self.train, rng, args.rollouts // 64)
                greedy = torch.zeros(len(prompts), device=self.device)
                ids = generate(model, prompts, args.rollout_length, greedy, self.generator, no_repeat)
                self.texts.append((ids, torch.tensor([len(p) for p in prompts], device=self.device)))
            self.texts = self.texts[-8:]
        rows = max(args.batch_tokens // 8 // args.rollout_length, 1)
        mine = torch.cat([t[0] for t in self.texts]), torch.cat([t[1] for t in self.texts])
        picked = torch.from_numpy(rng.integers(0, len(mine[0]), 2 * rows)).to(self.device)
        ids, given = mine[0][picked], mine[1][picked]
        real = self.train.windows(rng, max(rows // 2, 1), min(args.length, 256) + 1)
        position = torch.arange(ids.shape[1], device=self.device)
        written = (position + 1 >= given[:, None]) & (ids != PAD_ID) & (ids != EOS_ID)
        total = torch.zeros((), device=self.device)
        for name, tokens, valid in (
            ("own", ids, written),
            ("real", real[:, :-1], torch.ones_like(real[:, 1:]) > 0),
        ):
            rope = self.rope[:, : tokens.shape[1]]
            with torch.no_grad():
                target = self.teacher.lm_head(self.teacher.target(tokens, rope)[0]).float()
                if name == "own":
                    target[repeats(ids, given, n)] = -torch.inf
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model.lm_head(self.model.target(tokens, rope)[0])
            loss = taught(logits, target, valid)
            self.note(**{name: loss})
            total = total + (loss if name == "own" else 0.3 * loss)
        truth = F.cross_entropy(logits.float().flatten(0, 1), real[:, 1:].flatten())
        (total + 0.3 * truth).backward()
        self.update(ids.numel() + real.numel())

    def distill_step(self) -> None:
        """One optimiser step of the NextN layer against the frozen target, on the corpus and its own text."""
        args, length = self.args, self.args.distill_length
        assert self.frozen is not None
        spent = self.progress.seconds - (args.joint_minutes + args.unloop_minutes) * 60
        self.set_lr(args.distill_lr * (1.01 - min(spent / (args.distill_minutes * 60), 1.0)))
        rng = np.random.default_rng([args.seed, 2, self.progress.step])
        rows = args.batch_tokens // 2 // length
        if self.pool is None or (self.progress.step % 300 == 0 and len(self.pool) < 2**24):
            self.extend_pool(rng)
        window = self.train.windows(rng, rows // 3, length)
        assert self.pool is not None
        start = torch.from_numpy(rng.integers(0, len(self.pool) - length, rows - len(window))).to(self.device)
        window = torch.cat([window, self.pool[start[:, None] + torch.arange(length, device=self.device)]])
        with torch.no_grad():
            states = self.frozen.target(window, self.rope[:, :length])[0]
            logits = self.frozen.lm_head(states)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.distill_loss(window, states, logits)
        loss.backward()
        self.update(window.numel())

    def distill_loss(self, window: Tensor, states: Tensor, logits: Tensor, steps: int = 3) -> Tensor:
        """Sum over draft steps; step s reads t_{i+1+s} at position i + s and predicts t_{i+2+s}."""
        assert self.frozen is not None
        length, keys, values, total = window.shape[1], [], [], torch.zeros((), device=self.device)
        accepted: Tensor | None = None
        for s in range(steps):
            embedding = self.frozen.embed_tokens(window.roll(-s - 1, 1))
            states, k, v = self.draft_step(
                embedding, states, self.rope[:, s : s + length], list(keys), list(values)
            )
            keys.append(k)
            values.append(v)
            loss, hit = self.distance(
                self.frozen.lm_head.weight, states, logits.roll(-s - 1, 1), length - steps
            )
            total = total + loss * (1.0, 0.8, 0.6)[s]
            accepted = hit if accepted is None else accepted & hit
            self.note(**{f"kl{s + 1}": loss, f"accept{s + 1}": accepted.float().mean()})
        return total

    def extend_pool(self, rng: np.random.Generator) -> None:
        """Let the frozen target write, three quarters greedily; documents are kept end to end."""
        assert self.frozen is not None
        prompts = self.prompts(self.train, rng, self.args.rollouts)
        temperature = torch.where(torch.arange(len(prompts)) % 4 == 0, 0.8, 0.0).to(self.device)
        ids = generate(self.frozen, prompts, self.args.rollout_length, temperature, self.generator)
        fresh = ids[ids != PAD_ID]
        self.pool = fresh if self.pool is None else torch.cat([self.pool, fresh])

    def set_lr(self, lr: float) -> None:
        """The learning rate of all parameters."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def update(self, tokens: int) -> None:
        """Clip, step, count."""
        parameters = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += tokens

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: float = 0.001) -> None:
        """Auxiliary-loss-free balance: raise the bias of experts chosen too rarely, lower the others'."""
        for router, load in zip(self.model.routers(), loads, strict=True):
            load = load.float()
            router.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    # ---- reporting

    def note(self, **values: Tensor) -> None:
        """Remember values for the next report."""
        for name, value in values.items():
            self.losses.setdefault(name, []).append(value.detach())

    def report(self, tokens: int, seconds: float) -> None:
        """Print and record the means since the last report."""
        p = self.progress
        means = {k: round(torch.stack(v).float().mean().item(), 4) for k, v in self.losses.items()}
        self.losses.clear()
        rate, left = tokens / max(seconds, 1e-9), self.total - p.seconds
        p.history.append(
            {"phase": self.phase, "step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1)} | means
        )
        shown = " ".join(f"{k} {v:.3f}" for k, v in means.items())
        print(f"[{self.phase}] step {p.step} {p.tokens / 1e6:.0f}M tokens {shown} "
              f"| {rate / 1e3:.0f}k tokens/s, "
              f"lr {self.optimizers[0].param_groups[0]['lr']:.1e}, ETA {left:.0f} s", flush=True)  # fmt: skip

    def validate(self) -> None:
        """Losses on held-out documents, with the phase's arithmetic."""
        if self.phase in ("unloop", "distill"):
            return
        kept, self.losses = self.losses, {}
        long = self.phase == "long"
        length = self.args.long_length if long else self.args.length
        for i in range(4):
            window = self.val.windows(
                np.random.default_rng([7, i]), self.args.batch_tokens // length, length + 2
            )
            with torch.autocast(self.device.type, torch.bfloat16):
                self.joint_loss(window, 0.1)
        means = {f"val_{k}": round(torch.stack(v).float().mean().item(), 4) for k, v in self.losses.items()}
        self.losses = kept
        p = self.progress
        p.history.append(
            {"phase": self.phase, "step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1)} | means
        )
        print("  held out:", means, flush=True)

    def samples(self, count: int = 192, shown: int = 8) -> None:
        """Greedy text from held-out prompts: show some, count loops, measure the draft on it."""
        frozen = deployed(self.model)
        prompts = self.prompts(self.val, np.random.default_rng(11), count)
        length = self.args.rollout_length
        ids = generate(frozen, prompts, length, torch.zeros(count, device=self.device), self.generator)
        given = torch.tensor([len(p) for p in prompts], device=self.device)
        written = [row[g:].tolist() for row, g in zip(ids, given.tolist(), strict=True)]
        written = [[t for t in row if t != PAD_ID] for row in written]
        ratios = sorted(distinct_ratio(row[:128]) for row in written)
        print(f"greedy text: median distinct 4-grams {ratios[count // 2]:.2f}, below 0.5: "
              f"{sum(r < 0.5 for r in ratios) / count:.1%}, "
              f"ended: {sum(EOS_ID in r for r in written) / count:.1%}")  # fmt: skip
        with torch.no_grad():
            self.frozen, before, self.losses = frozen, self.frozen, {}
            rates = self.acceptance(frozen, ids, given)
            self.frozen = before
        print(
            f"draft steps accepted on it: {rates}, a chain of 3 emits {1 + sum(rates):.2f} a cycle",
            flush=True,
        )
        self.progress.history.append({"phase": self.phase, "step": self.progress.step, "accept": rates})
        for i in range(shown):
            print(f"--- prompt: {self.tokenizer.decode(prompts[i][1:], skip_special_tokens=False)!r}\n"
                  f"    text: {self.tokenizer.decode(written[i], skip_special_tokens=False)!r}",
                  flush=True)  # fmt: skip

    def acceptance(self, frozen: Model, ids: Tensor, given: Tensor, steps: int = 3) -> list[float]:
        """How often the first 1, 2, 3 chained draft tokens all equal the greedy text ids [B, T]."""
        length, keys, values, rates = ids.shape[1], [], [], []
        states = frozen.target(ids, self.rope[:, :length])[0]
        position = torch.arange(length, device=self.device)
        # Row i drafts t_{i+2} onwards: rows whose next token is generated, up to the last real one.
        row = (position + 2 >= given[:, None] + 1) & (position + steps + 1 < (ids != PAD_ID).sum(1)[:, None])
        accepted = row
        for s in range(steps):
            embedding = frozen.embed_tokens(ids.roll(-s - 1, 1))
            states, k, v = frozen.nextn.draft(embedding, states, self.rope[:, s : s + length], keys, values)
            keys, values = [*keys, k], [*values, v]
            accepted = accepted & (frozen.lm_head(states).argmax(-1) == ids.roll(-s - 2, 1))
            rates.append(round((accepted.sum() / row.sum()).item(), 4))
        return rates

    # ---- main loop

    def run(self) -> None:
        """Train until the clock, or this process's share of it, has run out; then save, show and export."""
        args, mark, tokens = self.args, time.monotonic(), self.progress.tokens
        self.clock = time.monotonic()
        while (phase := self.due_phase()) != "end":
            if phase != self.phase:
                self.validate()
                self.save()
                self.enter(phase)
            {"unloop": self.unloop_step, "distill": self.distill_step}.get(phase, self.joint_step)()
            if self.progress.step % args.report_every == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                self.report(self.progress.tokens - tokens, now - mark)
                mark, tokens = now, self.progress.tokens
            if self.progress.step % args.validate_every == 0:
                self.validate()
            if time.monotonic() - self.saved > args.save_seconds:
                self.save()
            self.tick()
            if time.monotonic() - self.process_start > args.stop_minutes * 60:
                break
        self.validate()
        self.save()
        export(self.model, args.data, args.output)
        self.samples()
        (args.output / "history.json").write_text(json.dumps(self.progress.history))


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="directory that prepare_demo_data.py wrote")
    p.add_argument("--output", type=Path, required=True, help="directory for the exported checkpoint")
    p.add_argument(
        "--checkpoint", type=Path, default=Path("demo-training.pt"), help="state to resume from and save to"
    )
    p.add_argument("--joint-minutes", type=float, default=11.5, help="wall time of the phases base and long")
    p.add_argument(
        "--long-fraction", type=float, default=0.23, help="share of the joint time for the phase long"
    )
    p.add_argument(
        "--unloop-minutes", type=float, default=0.0, help="wall time of the phase unloop, with --average"
    )
    p.add_argument("--distill-minutes", type=float, default=3.0, help="wall time of the phase distill")
    p.add_argument(
        "--stop-minutes",
        type=float,
        default=1e9,
        help="save, export and leave after this long, to be resumed",
    )
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--average", type=Path, nargs=2, metavar=("EARLY", "LATE"),
                   help="two exports of one run: skip the joint phases, start from their mean")  # fmt: skip
    p.add_argument("--shares", type=float, nargs=2, default=(0.75, 0.25), metavar=("INNER", "OUTER"),
                   help="share of LATE in that mean, for the layers and for embedding and head")  # fmt: skip
    p.add_argument("--unloop-lr", type=float, default=2e-4, help="peak learning rate of the phase unloop")
    p.add_argument("--distill-lr", type=float, default=2e-3, help="peak learning rate of the phase distill")
    p.add_argument(
        "--distill-optimizer", choices=("muon", "adamw"), default="muon", help="optimiser of distill"
    )
    p.add_argument("--length", type=int, default=1024, help="tokens a sequence in base")
    p.add_argument("--long-length", type=int, default=4096, help="tokens a sequence in long")
    p.add_argument("--distill-length", type=int, default=512, help="tokens a sequence in distill")
    p.add_argument("--batch-tokens", type=int, default=65536, help="tokens a step (half of it in distill)")
    p.add_argument(
        "--rollouts", type=int, default=4096, help="texts the model writes at a time (a multiple of 64)"
    )
    p.add_argument("--rollout-length", type=int, default=256, help="tokens of such a text, prompt included")
    p.add_argument(
        "--unlikelihood",
        type=float,
        default=0.0,
        help="weight of the loss on loops; the shipped run's 1.5 is too much",
    )
    p.add_argument("--report-every", type=int, default=50, help="steps between progress lines")
    p.add_argument("--validate-every", type=int, default=1000, help="steps between validations")
    p.add_argument("--save-seconds", type=float, default=90, help="seconds between checkpoints")
    p.add_argument("--compile", default="", metavar="BACKEND", help="torch.compile backend, such as inductor")
    p.add_argument(
        "--smoke", action="store_true", help="four steps of each phase, to see that everything runs"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    p.add_argument(
        "--config", default="{}", help="JSON object that overrides fields of the model's configuration"
    )
    p.add_argument("--seed", type=int, default=1, help="seed of weights, batches and sampling")
    return p.parse_args()


def main() -> None:
    """Train and export."""
    args = arguments()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = Config(**json.loads(args.config))
    trainer = Trainer(args, config)
    count = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{count / 1e6:.1f}M parameters, "
        f"{sum(len(t) for t in trainer.train.host.values()) / 1e6:.0f}M tokens",
        flush=True,
    )
    trainer.run()


if __name__ == "__main__":
    main()
