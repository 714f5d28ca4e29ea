"""The command `train`: trains a reference model.

Its options are the fields of config dataclasses. The type, choices and default of an option are
those of its field, and its help is the docstring below the field.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from .common import UserError, add_number, as_user_error, memory_as_user_error, run_folder
from .inference import users_of

if TYPE_CHECKING:
    from ..training import TrainConfig, TrainingRun, TrainResult
    from ..training.distributed import DistributedContext

_INTERRUPTED = 130

_SEPARATOR = "/"
"""Between the names of nested fields in the destination of an option"""

_NAMES = {"peak": ("lr", "peak")}
"""Names of an option, where the first is not that of its field"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    subparsers.add_parser(
        "train",
        help="train a reference model",
        description="Trains one of the reference models. Help for one model: "
        "transformer-kernels train MODEL --help",
    )


def add_models(parser: argparse.ArgumentParser) -> None:
    """Completes the parser with the models and the options of their configs; imports the models."""
    from ..training import PRESETS

    models = parser.add_subparsers(metavar="model", required=True)
    for kind, presets in PRESETS.items():
        task = next(iter(presets.values())).task
        summary = (task.__doc__ or "").split("\n")[0].removesuffix(".")
        model = models.add_parser(
            kind,
            help=summary,
            description=(
                f"Trains: {summary}. A preset defines every setting; options override single ones. "
                "Ctrl-C saves a checkpoint and stops. To train on several processes, run "
                f"torchrun --nproc-per-node N -m transformer_kernels train {kind} ..."
            ),
        )
        _add_run_options(model, kind, task.data_help)
        _add_config_options(model, presets)
        model.set_defaults(run=run_training, kind=kind)


def _add_run_options(parser: argparse.ArgumentParser, kind: str, data: str) -> None:
    add = parser.add_argument
    # fmt: off
    add("--data", type=Path, metavar="PATH", help=data)
    add("--out", type=Path, metavar="DIR",
        help=f"output folder for checkpoint, curve and picture (default: {run_folder(kind)})")
    add("--resume", type=Path, metavar="CHECKPOINT",
        help="continue an interrupted run in its folder, with the settings of this checkpoint")
    add_number(parser, "--threads", help="number of CPU threads (default: torch's)")
    add_number(parser, "--context-parallel", default=1,
               help="under torchrun: divide each sequence over N processes (generator, gpt2)")
    add("--shard", action="store_true",
        help="under torchrun: divide parameters, gradients and optimizer states over all processes "
        "(generator, gpt2)")
    add("--deterministic", action="store_true", help="use only deterministic algorithms")
    # fmt: on


def _add_config_options(parser: argparse.ArgumentParser, presets: dict[str, TrainConfig]) -> None:
    default, first = next(iter(presets.items()))
    settings = parser.add_argument_group("settings", f"The defaults are those of {default}.")
    settings.add_argument(
        "--preset", choices=tuple(presets), help=f"named settings (default: {default})"
    )
    add_options(settings, first, without=first.task.fixed)


def add_options(
    parser: argparse._ActionsContainer, config: Any, *, without: frozenset[str] = frozenset()
) -> None:
    """Adds an option for each field of a config, and of the configs in its fields.

    Fields named in `without` have none. The values of the config are shown as defaults, but an
    option that is not given leaves nothing in the parsed arguments.
    """
    for path, hint, value, meaning in _leaves(config, ""):
        if path.rpartition(_SEPARATOR)[2] in without:
            continue
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        help_ = f"{meaning} (default: {shown})".strip().replace("%", "%%")
        settings = {"dest": path, "default": argparse.SUPPRESS} | _type_settings(hint)
        parser.add_argument(*option_names(path), help=help_, **settings)


def given_options(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The options that were given, by the path of their field."""
    given = vars(args)
    return {path: given[path] for path, *_ in _leaves(config, "") if path in given}


def option_names(path: str) -> list[str]:
    name = path.rpartition(_SEPARATOR)[2]
    return [f"--{one.replace('_', '-')}" for one in _NAMES.get(name, (name,))]


def with_options(config: Any, given: Mapping[str, Any]) -> Any:
    """The config with the fields at these paths replaced; ValueError for a value out of range."""
    inner: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in given.items():
        name, _, rest = path.partition(_SEPARATOR)
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    for name, below in inner.items():
        changes[name] = with_options(getattr(config, name), below)
    return replace(config, **changes)


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Path, type, value and docstring of each field that is no dataclass."""
    hints, meanings = get_type_hints(type(config)), _docstrings(type(config))
    for field in fields(config):
        path, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value, path + _SEPARATOR)
        else:
            yield path, hints[field.name], value, meanings.get(field.name, "")


def _docstrings(cls: type) -> dict[str, str]:
    """The string below each field in the source of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split()).rstrip(".")
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type_settings(hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a type: a number, a string, choices, a flag or a tuple."""
    if NoneType in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": len(get_args(hint)), "type": get_args(hint)[0], "metavar": "N"}
    return {"type": hint, "metavar": "NAME" if hint is str else "N"}


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
            start = _new_run if args.resume is None else _resumed_run
            run = start(args, distributed)
        with (
            _stop_on_interrupt() as should_stop,
            _progress(run) as on_row,
            as_user_error(OSError, FloatingPointError),
            memory_as_user_error(),
        ):
            result = run.train(on_row=on_row, should_stop=should_stop)
        return _report(run, result) if distributed.is_main else 0


def configured(args: argparse.Namespace) -> TrainConfig:
    """The preset, overridden by the given options; ValueError for one out of range."""
    from ..training import PRESETS

    presets = PRESETS[args.kind]
    preset = presets[args.preset or next(iter(presets))]
    given = given_options(args, preset)
    config: TrainConfig = with_options(preset, given)
    if "steps" in given and "schedule/warmup" not in given:
        warmup = min(config.schedule.warmup, config.steps // 10 or 1)
        config = replace(config, schedule=replace(config.schedule, warmup=warmup))
    return config


def _new_run(args: argparse.Namespace, distributed: DistributedContext) -> TrainingRun:
    from ..nn.options import check_device
    from ..training import TrainingRun
    from ..training.distributed import local_device

    config = configured(args)
    check_device(local_device(config.device))
    data = config.task.data(args.data)
    out = args.out or run_folder(args.kind)
    return TrainingRun.start(config, data, out=out, distributed=distributed)


def _resumed_run(args: argparse.Namespace, distributed: DistributedContext) -> TrainingRun:
    from ..training import PRESETS, TrainingRun

    given = [f"--{name}" for name in ("preset", "out") if getattr(args, name) is not None]
    first = next(iter(PRESETS[args.kind].values()))
    given += [option_names(path)[0] for path in given_options(args, first)]
    for option in given:
        raise UserError(f"{option} cannot be given with --resume: the checkpoint fixes it")
    return TrainingRun.resume(
        args.resume, source=args.data, kind=args.kind, distributed=distributed
    )


@contextmanager
def _progress(run: TrainingRun) -> Iterator[Callable[..., None] | None]:
    """Progress bar; only the main process shows one."""
    from ..training import progress_bar

    config, task = run.config, run.config.task
    labels = {"label": config.attn_implementation, "unit": task.unit, "score": task.score_name}
    is_main = run.trainer.distributed.is_main
    with progress_bar(config.steps, **labels) if is_main else nullcontext() as on_row:
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


def _report(run: TrainingRun, result: TrainResult) -> int:
    from ..training import plot_curves
    from ..training.training_run import CURVE, PICTURE

    assert run.folder is not None
    config, task, checkpoint = result.config, result.config.task, run.folder
    picture = run.folder / PICTURE
    with as_user_error(OSError):
        plot_curves({config.attn_implementation: result.rows}, picture, score=task.score_name)
    if not result.finished:
        print(f"stopped after step {result.rows[-1].step} of {config.steps}; resume with")
        print(f"  {_launch(run.trainer.distributed, f'train {task.kind} --resume {checkpoint}')}")
        return _INTERRUPTED
    print(
        f"{config.steps} steps in {result.seconds:.0f} s, {result.tokens_per_s:,.0f} {task.unit}/s;"
        f" held-out data: {result.score:.3f} {task.score_name}"
    )
    for path in (result.checkpoint, run.folder / CURVE, picture):
        print(f"  {path}")
    for command in users_of(task.kind):
        print(f"  python -m transformer_kernels {command} --checkpoint {checkpoint}")
    return 0
