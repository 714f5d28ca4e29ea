"""The command `train`: trains a reference model."""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .error_mapping import as_user_error, memory_as_user_error
from .errors import UserError
from .recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from ..training import TrainConfig, TrainingRun, TrainResult
    from ..training.distributed import DistributedContext

_INTERRUPTED = 130

_RUN_OPTIONS = (
    (
        "attn-implementation",
        str,
        "attention implementation: eager (bmm, softmax, bmm in plain torch), fused (the kernels of "
        "this package) or sdpa (torch's scaled_dot_product_attention)",
    ),
    ("steps", int, "number of training steps, one batch each"),
    ("batch", int, "examples per step, over all processes"),
    ("accumulate", int, "gradient accumulation: number of micro-batches per step, to save memory"),
    ("precision", str, "autocast precision of matrix products; weights stay in float32"),
    ("eval-every", int, "steps between validations, each followed by a checkpoint"),
    ("seed", int, "random seed of weights, batches and dropout"),
    ("device", str, "torch device; with `cuda`, each process under torchrun uses its own GPU"),
)
_CHOICES = {
    "attn-implementation": ("eager", "fused", "sdpa"),
    "precision": ("float32", "bfloat16", "float16"),
    "pattern": ("local", "strided", "fixed"),
    "combination": ("merged", "split"),
    "positions": ("learned", "decay"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a reference model",
        description="Trains one of the reference models. Help for one model: "
        "transformer-kernels train MODEL --help",
    )
    models = parser.add_subparsers(metavar="model", required=True)
    for recipe in RECIPES:
        model_parser = models.add_parser(
            recipe.kind,
            help=recipe.help,
            description=(
                f"Trains {recipe.help}. A preset defines every setting; options override single "
                "ones. Ctrl-C saves a checkpoint and stops. To train on several processes, run "
                f"torchrun --nproc-per-node N -m transformer_kernels train {recipe.kind} ..."
            ),
        )
        _add_files(model_parser, recipe)
        _add_options(model_parser, recipe)
        model_parser.set_defaults(run=run_training, recipe=recipe)


def _add_files(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    parser.add_argument("--data", type=Path, metavar="PATH", help=recipe.data)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"output folder for checkpoint, curve and picture (default: {recipe.out})",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="CHECKPOINT",
        help="continue an interrupted run in its folder, with the settings of this checkpoint",
    )


def _add_options(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    parser.add_argument(
        "--preset",
        choices=recipe.presets,
        help=f"named settings (default: {recipe.presets[0]})",
    )
    for name, kind, meaning in (*recipe.model_options, *recipe.task_options, *_RUN_OPTIONS):
        choices = _CHOICES.get(name)
        metavar = None if choices else "NAME" if kind is str else "N"
        parser.add_argument(f"--{name}", type=kind, choices=choices, metavar=metavar, help=meaning)
    parser.add_argument("--lr", type=float, metavar="N", help="peak learning rate")
    parser.add_argument(
        "--recompute",
        action="store_const",
        const=True,
        help="activation checkpointing: keep only the input of each block for the backward pass",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="number of CPU threads (default: torch's)"
    )
    parser.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="under torchrun: divide each sequence over N processes (generator, gpt2)",
    )
    parser.add_argument(
        "--shard",
        action="store_true",
        help="under torchrun: divide parameters, gradients and optimizer states over all processes "
        "(generator, gpt2)",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="use only deterministic algorithms"
    )


def run_training(args: argparse.Namespace) -> int:
    import torch

    from ..common.optional_deps import require
    from ..training.distributed import check_processes, distributed_context

    with as_user_error(ImportError):
        require("rich", extra="train")
        require("matplotlib", extra="train")
    if args.threads is not None:
        most = max(64, 4 * (os.cpu_count() or 1))
        if not 1 <= args.threads <= most:  # OpenMP ends the process if it cannot start a thread
            raise UserError(f"--threads must be at least 1 and at most {most}, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    with as_user_error(ValueError):
        check_processes(args.context_parallel, args.shard)
    with distributed_context(args.context_parallel, args.shard) as distributed:
        with as_user_error(OSError, ValueError, ImportError), memory_as_user_error():
            run = (
                _resumed_run(args, distributed)
                if args.resume is not None
                else _new_run(args, distributed)
            )
        with (
            _stop_on_interrupt() as should_stop,
            _progress(run) as on_row,
            as_user_error(OSError, FloatingPointError),
            memory_as_user_error(),
        ):
            result = run.train(on_row=on_row, should_stop=should_stop)
        return _report(run, result, args.recipe.used_by) if distributed.is_main else 0


def _new_run(args: argparse.Namespace, distributed: DistributedContext) -> TrainingRun:
    from ..nn.options import check_device
    from ..training import TrainingRun
    from ..training.distributed import local_device

    config = configured(args)
    check_device(local_device(config.device))
    data = config.task.data(args.data)
    out = args.out or Path(args.recipe.out)
    return TrainingRun.start(config, data, out=out, distributed=distributed)


def _resumed_run(args: argparse.Namespace, distributed: DistributedContext) -> TrainingRun:
    from ..training import TrainingRun

    for name in ("preset", "lr", "out", "recompute", *_option_names(args.recipe)):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} cannot be given with --resume: the checkpoint fixes it")
    return TrainingRun.resume(
        args.resume, source=args.data, kind=args.recipe.kind, distributed=distributed
    )


def configured(args: argparse.Namespace) -> TrainConfig:
    """The preset, overridden by the given options.

    Raises:
        ValueError: an option is out of range.
    """
    from dataclasses import replace

    from ..training import PRESETS

    recipe: Recipe = args.recipe
    preset = PRESETS[recipe.kind][args.preset or recipe.presets[0]]
    model = replace(preset.task.model, **_given_values(args, _field_names(recipe.model_options)))
    task = replace(
        preset.task, model=model, **_given_values(args, _field_names(recipe.task_options))
    )
    schedule = preset.schedule
    if args.lr is not None:
        if not 0 < args.lr < math.inf:
            raise ValueError(f"--lr must be above 0 and finite, got {args.lr}")
        schedule = replace(schedule, peak=args.lr)
    if args.steps is not None:
        schedule = replace(schedule, warmup=min(schedule.warmup, max(args.steps, 1) // 10 or 1))
    run = _given_values(args, (*_field_names(_RUN_OPTIONS), "recompute"))
    return replace(preset, task=task, schedule=schedule, **run)


def _option_names(recipe: Recipe) -> tuple[str, ...]:
    return _field_names((*recipe.model_options, *recipe.task_options, *_RUN_OPTIONS))


def _field_names(settings: tuple[tuple[str, type, str], ...]) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name, *_ in settings)


def _given_values(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


@contextmanager
def _progress(run: TrainingRun) -> Iterator[Any]:
    """Progress bar; only the main process shows one."""
    from ..training import progress_bar

    if not run.trainer.distributed.is_main:
        yield None
        return
    config = run.config
    with progress_bar(
        config.steps,
        label=config.attn_implementation,
        unit=config.task.unit,
        score=config.task.score_name,
    ) as on_row:
        yield on_row


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C requests a stop; a second one interrupts as usual."""
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


def _launch(distributed: DistributedContext, words: str) -> str:
    """Command line for the same number of processes on this machine and the same division."""
    command = f"-m transformer_kernels {words}"
    if distributed.world_size == 1 and not distributed.sharded:
        return f"python {command}"
    if distributed.context_parallel > 1:
        command += f" --context-parallel {distributed.context_parallel}"
    if distributed.sharded:
        command += " --shard"
    count = os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size)
    return f"torchrun --nproc-per-node {count} {command}"


def _report(run: TrainingRun, result: TrainResult, used_by: tuple[str, ...]) -> int:
    from ..training import plot_curves
    from ..training.training_run import CURVE, PICTURE

    assert run.folder is not None
    task, checkpoint = result.config.task, run.folder
    with as_user_error(OSError):
        picture = run.folder / PICTURE
        plot_curves(
            {result.config.attn_implementation: result.rows}, picture, score=task.score_name
        )
    command = "python -m transformer_kernels"
    if not result.finished:
        print(f"stopped after step {result.rows[-1].step} of {result.config.steps}; resume with")
        print(f"  {_launch(run.trainer.distributed, f'train {task.kind} --resume {checkpoint}')}")
        return _INTERRUPTED
    print(
        f"{result.config.steps} steps in {result.seconds:.0f} s, "
        f"{result.tokens_per_s:,.0f} {task.unit}/s; held-out data: "
        f"{result.score:.3f} {task.score_name}"
    )
    for path in (result.checkpoint, run.folder / CURVE, picture):
        print(f"  {path}")
    for user in used_by:
        print(f"  {command} {user} --checkpoint {checkpoint}")
    return 0
