"""The command `train`: trains a reference model on text."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformer_kernels.cli.conversion import as_user_error
from transformer_kernels.cli.errors import UserError

if TYPE_CHECKING:
    from transformer_kernels.models import GeneratorConfig
    from transformer_kernels.training import GeneratorRun, TrainConfig, TrainResult

_DEFAULT_OUT = Path("runs/generator")
_DEFAULT_PRESET = "nanogpt-cpu"

_MODEL_SETTINGS = ("context", "width", "layers", "heads", "dropout")
_RUN_SETTINGS = ("attention", "steps", "batch", "eval_every", "seed", "device")
_FIXED_BY_CHECKPOINT = ("preset", "lr", "out", *_MODEL_SETTINGS, *_RUN_SETTINGS)

_INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("train", help="train a reference model on text")
    models = parser.add_subparsers(metavar="model", required=True)
    generator = models.add_parser(
        "generator",
        help="a transformer that writes text, byte by byte",
        description=(
            "Trains a text generator. A preset gives every setting; the options change some. "
            "Ctrl-C saves a checkpoint and stops."
        ),
    )
    _add_files(generator)
    _add_settings(generator)
    generator.set_defaults(run=run_generator)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text to learn, any file (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder for checkpoint, curve and picture (default: {_DEFAULT_OUT})",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="CHECKPOINT",
        help="go on with an interrupted run, in its folder and with its settings",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        choices=("demo", "nanogpt-cpu", "seed"),
        help=f"settings to start from (default: {_DEFAULT_PRESET})",
    )
    parser.add_argument(
        "--attention",
        choices=("naive", "fused", "torch"),
        help="how attention is computed: bmm and softmax, our kernels, or torch's SDPA "
        "(default: fused)",
    )
    for name, kind, meaning in (
        ("steps", int, "batches to train on"),
        ("batch", int, "windows in a batch"),
        ("context", int, "bytes in a window"),
        ("width", int, "width of the model"),
        ("layers", int, "transformer blocks"),
        ("heads", int, "attention heads"),
        ("dropout", float, "share of values dropped in training"),
        ("lr", float, "highest learning rate"),
        ("eval-every", int, "steps between validations and checkpoints"),
        ("seed", int, "decides weights, batches and dropout"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=meaning)
    parser.add_argument("--device", metavar="NAME", help="torch device (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--deterministic", action="store_true", help="only algorithms that repeat bit for bit"
    )


def run_generator(args: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.training import progress_bar
    from transformer_kernels.training.extras import require

    with as_user_error(ImportError):
        require("rich", extra="train")
        require("matplotlib", extra="train")
    if args.threads is not None:
        if args.threads < 1:
            raise UserError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    with as_user_error(OSError, ValueError):
        run = _resumed_run(args) if args.resume is not None else _new_run(args)
    with (
        _stop_on_interrupt() as should_stop,
        progress_bar(run.config.steps, label=run.config.attention) as on_row,
        as_user_error(OSError, FloatingPointError),
    ):
        result = run.train(on_row=on_row, should_stop=should_stop)
    return _report(run, result)


def _new_run(args: argparse.Namespace) -> GeneratorRun:
    from transformer_kernels.training import GeneratorRun, load_corpus

    config = _config(args)
    corpus = load_corpus(args.data)
    return GeneratorRun.start(config, corpus, out=args.out or _DEFAULT_OUT)


def _resumed_run(args: argparse.Namespace) -> GeneratorRun:
    from transformer_kernels.training import GeneratorRun, load_corpus

    for name in _FIXED_BY_CHECKPOINT:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} cannot be given with --resume: the checkpoint fixes it")
    corpus = None if args.data is None else load_corpus(args.data)
    return GeneratorRun.resume(args.resume, corpus=corpus)


def _config(args: argparse.Namespace) -> TrainConfig:
    """The preset with the options put in; ValueError where one is out of range."""
    from dataclasses import replace

    from transformer_kernels.training import PRESETS

    preset = PRESETS[args.preset or _DEFAULT_PRESET]
    model: GeneratorConfig = replace(preset.model, **_given(args, _MODEL_SETTINGS))
    schedule = preset.schedule
    if args.lr is not None:
        schedule = replace(schedule, peak=args.lr)
    if args.steps is not None:
        schedule = replace(schedule, warmup=min(schedule.warmup, max(args.steps, 0) // 10))
    return replace(preset, model=model, schedule=schedule, **_given(args, _RUN_SETTINGS))


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """While it is open, the first Ctrl-C asks to stop; a second one interrupts as usual."""
    interrupted = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def _report(run: GeneratorRun, result: TrainResult) -> int:
    from transformer_kernels.training import plot_curves
    from transformer_kernels.training.run import CHECKPOINT, CURVE, PICTURE

    assert run.folder is not None
    checkpoint = run.folder / CHECKPOINT
    with as_user_error(OSError):
        plot_curves({result.config.attention: result.rows}, run.folder / PICTURE)
    command = "python -m transformer_kernels"
    if not result.finished:
        print(f"stopped after step {result.rows[-1].step} of {result.config.steps}; go on with")
        print(f"  {command} train generator --resume {checkpoint}")
        return _INTERRUPTED
    print(
        f"{result.config.steps} steps in {result.seconds:.0f} s, "
        f"{result.tokens_per_s:,.0f} tokens/s; held-out text: {result.bits_per_byte:.3f} bits/byte"
    )
    for name in (CHECKPOINT, CURVE, PICTURE):
        print(f"  {run.folder / name}")
    print(f"  {command} generate --checkpoint {checkpoint}")
    return 0
