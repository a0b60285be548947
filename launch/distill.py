"""Distil a draft for the chat model: the target writes text for made-up instructions, and a few of its layers learn.

  write   the target answers instructions, some of its own making; text and likeliest next tokens are kept in
          --folder, part by part: an interrupted run is resumed by the same command
  train   a draft made of some of the target's layers learns these distributions; writes --output, which
          `launch/quickstart --chat` uses once it is launch/chat/draft.safetensors

Seeded. Both use all of OMP_NUM_THREADS threads, and bfloat16 where the CPU has instructions for it. Several processes
of one thread write most, each with a --folder and a --seed of its own; their parts, renamed, make one folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chat.smollm2 import target_checkpoint
from children import end_on_signals, say

from ssd_proto.errors import ConfigError

_PROMPTS_AT_ONCE = 1000
_MARK = "@@"
"""A message, to see what the template has before one."""
_OWN = 0.4
"""Share of documents in which the target writes the user's message itself: these are more varied than any list."""
_PLAIN, _PLAIN_STUB = 0.1, 0.5
"""Share of instructions, and of function stubs, that are text to be continued rather than a user's message."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=("write", "train"))
    add("--folder", type=Path, required=True, help="of the text; some hundred MB per million tokens")
    add("--model-path", help="target, Llama-like, a folder (default: SmolLM2-135M-Instruct, made if needed)")
    add("--seed", type=int, default=1, help="%(default)s")
    write = parser.add_argument_group("write")
    write.add_argument("--parts", type=int, default=16, help="of --rows texts each (%(default)s)")
    write.add_argument("--rows", type=int, default=128, help="written at once (%(default)s)")
    write.add_argument("--length", type=int, default=384, help="tokens of a row (%(default)s)")
    write.add_argument("--max-answer", type=int, default=256, help="tokens (%(default)s)")
    learn = parser.add_argument_group("train")
    learn.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2], help="of the target to begin with")
    learn.add_argument("--tokens", type=int, default=8192, help="that the draft may propose (%(default)s)")
    learn.add_argument("--steps", type=int, default=2000, help="%(default)s")
    learn.add_argument("--batch-rows", type=int, default=24, help="of a step (%(default)s)")
    learn.add_argument("--learning-rate", type=float, default=3e-3, help="%(default)s")
    learn.add_argument("--held-out", type=int, default=48, help="rows to measure with (%(default)s)")
    learn.add_argument("--resume", type=Path, metavar="FILE", help="go on from these weights, with their token map")
    learn.add_argument("--output", type=Path, help="of the weights, written anew at each report")
    arguments = parser.parse_args()
    for name in ("parts", "rows", "length", "max_answer", "tokens", "steps", "batch_rows", "held_out"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.stage == "train" and arguments.output is None:
        parser.error("train needs --output FILE for the weights")
    return arguments


def write(arguments: argparse.Namespace, model_path: str) -> None:
    """All parts that are not there. Raises `ConfigError`."""
    import numpy as np
    import torch
    from distillation.corpus import check_about
    from distillation.training import has_bfloat16
    from distillation.writer import Writer

    about = {"target": Path(model_path).name, "seed": arguments.seed, "own_messages": _OWN}
    check_about(arguments.folder, about)
    model, tokenizer = load(model_path, torch.bfloat16 if has_bfloat16() else torch.float32)
    writer = Writer(model, tokenizer.eos_token_id, arguments.rows, arguments.length, arguments.max_answer)
    for number in range(arguments.parts):
        if (arguments.folder / f"part-{number:04d}.npz").exists():
            continue
        seed = [arguments.seed, number]
        corpus = writer.write(prompts_of(tokenizer, seed), np.random.default_rng(seed), progress(f"part {number}", 32))
        corpus.write(arguments.folder, number, about)


def train(arguments: argparse.Namespace, model_path: str) -> None:
    """One student."""
    import numpy as np
    import torch
    from distillation.corpus import Corpus
    from distillation.student import Student, choose_tokens
    from distillation.training import Batches, Score, score
    from distillation.training import train as train_student

    corpus, held_out = Corpus.read(arguments.folder).split(arguments.held_out)
    if len(corpus) < arguments.batch_rows:
        raise ConfigError(f"There are {len(corpus)} rows to train on: write more, or lower --batch-rows.")
    model, tokenizer = load(model_path, torch.float32)
    torch.manual_seed(arguments.seed)
    vocab_size, num_layers = model.config.vocab_size, model.config.num_hidden_layers
    if not all(0 <= layer < num_layers for layer in arguments.layers):
        raise ConfigError(f"--layers has {arguments.layers}: the target has the layers 0 to {num_layers - 1}.")
    if arguments.resume is None:
        token_map = choose_tokens(corpus, vocab_size, tokenizer.all_special_ids, arguments.tokens)
        student = Student(model, arguments.layers, token_map)
    else:
        student = Student.read(model, arguments.resume)
        token_map = student.token_map.numpy()
    del model
    measured = Batches(held_out, token_map, vocab_size)
    begin, every, losses = time.monotonic(), max(1, arguments.steps // 20), [0.0]

    def show(step: int, loss: float) -> None:
        losses.append(loss)
        if step % every and step != arguments.steps:
            return
        found = score(student, measured, len(held_out), arguments.batch_rows)
        mean = sum(losses[-every:]) / len(losses[-every:])
        seconds = time.monotonic() - begin
        say(f"step {step} of {arguments.steps}, {seconds:.0f} s, loss {mean:.3f}; held out {told(found)}")
        student.save(arguments.output, about(step, found))

    def about(step: int, found: Score) -> dict[str, str]:
        written = {
            "target": Path(model_path).name,
            "rows": str(len(corpus)),
            "resumed": str(arguments.resume is not None),
        }
        return written | {"steps": f"{step} of {arguments.steps}", "held_out": json.dumps(found._asdict())}

    say(f"{len(corpus)} rows, {corpus.is_written.sum()} written tokens")
    say(f"at first: {told(score(student, measured, len(held_out), arguments.batch_rows))}")
    generator = np.random.default_rng(arguments.seed)
    batches = Batches(corpus, token_map, vocab_size).shuffled(arguments.batch_rows, generator)
    train_student(student, batches, arguments.steps, arguments.learning_rate, show)


def told(found: Any) -> str:
    """A score in words."""
    return f"loss {found.loss:.3f}, same first {found.same_first:.3f}, sum of min(p, q) {found.overlap:.3f}"


def load(model_path: str, dtype: Any) -> tuple[Any, Any]:
    """Target and its tokenizer. Raises `ConfigError`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"The target {model_path} cannot be loaded ({reason}): name a folder with a model."
        ) from error
    return model.eval().requires_grad_(False), tokenizer


def prompts_of(tokenizer: Any, seed: Sequence[int]) -> Iterator[Any]:
    """Prompts without end, most of them in the chat template."""
    import numpy as np
    from distillation.instructions import make_instructions
    from distillation.writer import Prompt

    def templated(content: str, **options: bool) -> Any:
        message = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False, **options)

    chance = np.random.default_rng([*seed, 1])
    before_message = templated(_MARK, tokenize=False).partition(_MARK)[0]
    before_message = tokenizer(before_message, add_special_tokens=False)["input_ids"]
    while True:
        for instruction in make_instructions(_PROMPTS_AT_ONCE, int(chance.integers(2**31))):
            is_stub = instruction.startswith(("from typing", "def "))
            if chance.random() < _OWN:
                yield Prompt(before_message, num_ends=2)
            elif chance.random() < (_PLAIN_STUB if is_stub else _PLAIN):
                yield Prompt(tokenizer(instruction)["input_ids"])
            else:
                yield Prompt(templated(instruction))


def progress(name: str, every: int) -> Callable[[int], None]:
    """Says how many tokens were written, each ``every`` calls."""
    began, calls, done = time.monotonic(), 0, 0

    def advance(count: int) -> None:
        nonlocal calls, done
        calls, done = calls + 1, done + count
        if calls % every == 0:
            say(f"{name}: {done} tokens, {done / (time.monotonic() - began):.0f} per second")

    return advance


def main() -> int:
    arguments = parse_arguments()
    end_on_signals()
    try:
        model_path = arguments.model_path or str(target_checkpoint(say))
        (write if arguments.stage == "write" else train)(arguments, model_path)
    except ConfigError as error:
        say(f"launch/distill: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nlaunch/distill: interrupted; finished parts are kept")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
