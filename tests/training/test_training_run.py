"""Training runs: equal curves for all attention implementations, resume, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.training.run_helpers import (
    FINISHED,
    assert_same_weights,
    names,
    overflow_gradients,
    weights_of,
    with_dropout,
    without_times,
)
from transformer_kernels.nn import AttnImplementation, MultiHeadAttention
from transformer_kernels.training import (
    ByteWindows,
    Checkpoint,
    CheckpointError,
    CurveRow,
    Dataset,
    Schedule,
    TrainConfig,
    Trainer,
    TrainingRun,
    corpus_from_bytes,
    load_generator,
    read_curve,
    resume,
    train,
)
from transformer_kernels.training.distributed import DistributedContext

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def windows(text: bytes, name: str) -> ByteWindows:
    return ByteWindows(corpus_from_bytes(text, name), 12)


def test_a_generator_learns(config: TrainConfig, data: Dataset) -> None:
    result = train(replace(config, steps=60), data)
    assert result.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert result.losses[-1] < 3.0
    assert result.finished
    assert result.score is not None
    assert result.score < 3.0 / math.log(2)


def test_every_attention_implementation_gives_the_same_curve(
    config: TrainConfig, data: Dataset
) -> None:
    """In float32; in float64 for every task in test_tasks.py."""
    curves: dict[AttnImplementation, list[float]] = {}
    for implementation in IMPLEMENTATIONS:
        result = train(replace(config, steps=20, attn_implementation=implementation), data)
        modules = [x for x in result.model.modules() if isinstance(x, MultiHeadAttention)]
        assert {x.attn_implementation for x in modules} == {implementation}
        validated = [row.val_loss for row in result.rows if row.val_loss is not None]
        assert len(validated) == 5
        curves[implementation] = result.losses + validated
    assert curves["fused"] == pytest.approx(curves["eager"], rel=2e-5)
    assert curves["sdpa"] == pytest.approx(curves["eager"], rel=2e-5)


def test_eager_and_fused_give_the_same_curve_with_dropout(
    config: TrainConfig, data: Dataset
) -> None:
    config = with_dropout(config, 0.2)
    eager = train(replace(config, attn_implementation="eager"), data)
    fused = train(replace(config, attn_implementation="fused"), data)
    assert fused.losses == pytest.approx(eager.losses, rel=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stopped_run_resumes_exactly(
    config: TrainConfig, data: Dataset, tmp_path: Path, implementation: AttnImplementation
) -> None:
    """With dropout, which draws from torch's global generator."""
    config = with_dropout(replace(config, attn_implementation=implementation), 0.2)
    whole = train(config, data)
    steps = iter(range(1, 4))
    stopped = train(config, data, out=tmp_path, should_stop=lambda: next(steps) == 3)
    assert not stopped.finished
    assert len(stopped.rows) == 3
    torch.manual_seed(999)

    resumed = resume(tmp_path, data=data)

    assert without_times(resumed.rows) == without_times(whole.rows)
    assert read_curve(tmp_path / "curve.csv") == resumed.rows
    assert_same_weights(resumed.model, whole.model)


def test_aborted_run_resumes_from_its_last_checkpoint(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    whole = train(config, data)

    def abort(row: CurveRow) -> None:
        if row.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, data, out=tmp_path, on_row=abort)
    assert len(read_curve(tmp_path / "curve.csv")) == 6
    assert Checkpoint.open(tmp_path).metadata.steps_done == 4

    resumed = resume(tmp_path, data=data)
    assert without_times(resumed.rows) == without_times(whole.rows)
    assert [row.step for row in read_curve(tmp_path / "curve.csv")] == list(range(1, 9))
    assert resumed.seconds > 0


def test_resuming_a_finished_run_does_no_steps(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    first = train(config, data, out=tmp_path)
    again = resume(tmp_path, data=data)
    assert again.rows == first.rows


def test_resume_reads_the_text_from_its_original_path(config: TrainConfig, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, " * 50)
    out = tmp_path / "run"
    train(config, config.task.data(text), out=out, should_stop=lambda: True)
    assert resume(out).finished


def test_resume_with_other_data_is_refused(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    train(config, data, out=tmp_path, should_stop=lambda: True)
    curve = (tmp_path / "curve.csv").read_bytes()
    other = windows(b"something else " * 90, "other.txt")
    with pytest.raises(CheckpointError, match=r"other data: a fox, not other\.txt"):
        resume(tmp_path, data=other)
    assert (tmp_path / "curve.csv").read_bytes() == curve


def test_curve_rows_count_steps_tokens_and_seconds(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    seen: list[CurveRow] = []
    result = train(config, data, out=tmp_path, on_row=seen.append)
    assert seen == result.rows == read_curve(tmp_path / "curve.csv")
    assert [row.step for row in seen] == list(range(1, 9))
    assert [row.tokens for row in seen] == [48 * step for step in range(1, 9)]
    assert [row.val_loss is not None for row in seen] == [step in (4, 8) for step in range(1, 9)]
    last = seen[-1]
    assert last.val_loss is not None
    assert last.score == last.val_loss / math.log(2)
    assert last.seconds == pytest.approx(sum(48 / row.tokens_per_s for row in seen))
    assert result.tokens_per_s == pytest.approx(last.tokens / last.seconds)


def test_last_step_is_validated_and_saved(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    result = train(replace(config, steps=3), data, out=tmp_path)
    assert [row.val_loss is not None for row in result.rows] == [False, False, True]
    loaded = load_generator(tmp_path, attn_implementation="eager")
    assert not loaded.training
    for name, weight in result.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


@pytest.mark.parametrize("name", ["checkpoint-500", "checkpoint.pt", "curve.csv", "curve.png"])
def test_folder_with_a_run_is_not_overwritten(
    config: TrainConfig, data: Dataset, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(config, data, out=tmp_path)
    assert names(tmp_path) == {".lock", name}
    assert (tmp_path / name).read_bytes() == b"precious"


def test_output_path_below_a_file_is_an_oserror(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        train(config, data, out=tmp_path / "file" / "run")


def test_too_short_text_creates_no_folder(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="notes is too short"):
        train(config, windows(b"short", "notes"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nonfinite_loss_stops_the_run(config: TrainConfig, data: Dataset, tmp_path: Path) -> None:
    wild = replace(config, schedule=Schedule(peak=1e30, warmup=0))
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step \d: try a lower"):
        train(wild, data, out=tmp_path)


def test_nonfinite_validation_loss_is_not_saved(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    wild = replace(config, schedule=Schedule(peak=1e30, warmup=0), eval_every=1)
    with pytest.raises(FloatingPointError, match="the held-out loss is nan after step 1"):
        train(wild, data, out=tmp_path)
    assert not list(tmp_path.glob("checkpoint*"))


def test_nonfinite_gradient_leaves_the_model_unchanged(config: TrainConfig, data: Dataset) -> None:
    trainer = Trainer(config, data)
    before = weights_of(trainer)
    overflow_gradients(trainer)
    with pytest.raises(FloatingPointError, match=r"the gradient's norm is (inf|nan) after step 0"):
        trainer.step()
    assert trainer.steps_done == 0
    assert_same_weights(trainer.model, before)


def test_validation_does_not_affect_training(config: TrainConfig, data: Dataset) -> None:
    config = with_dropout(config, 0.3)
    rare = train(replace(config, eval_every=8), data)
    often = train(replace(config, eval_every=1), data)
    assert rare.losses == often.losses


def test_validation_loss_is_the_mean_over_bytes(config: TrainConfig, data: Dataset) -> None:
    trainer = Trainer(replace(config, batch=5, eval_batches=2), data)
    whole = Trainer(replace(config, batch=10, eval_batches=1), data)
    assert trainer.validate().loss == pytest.approx(whole.validate().loss, rel=1e-6)
    assert trainer.validate() == trainer.validate()


def test_learning_rate_and_gradient_clipping_are_applied(
    config: TrainConfig, data: Dataset
) -> None:
    trainer = Trainer(replace(config, clip=1e-3), data)
    for step in range(3):
        trainer.step()
        rate = config.schedule.learning_rate(step, config.steps)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [rate, rate]
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_weight_decay_applies_to_matrices_only(config: TrainConfig, data: Dataset) -> None:
    decayed, spared = Trainer(config, data).optimizer.param_groups
    assert decayed["weight_decay"] == config.weight_decay
    assert spared["weight_decay"] == 0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}


def test_seed_determines_weights_and_batches(config: TrainConfig, data: Dataset) -> None:
    """Not the state of torch's generator before."""
    trainers = [Trainer(replace(config, seed=seed), data) for seed in (0, 1, 1)]
    weights = [trainer.model.get_parameter("logits.weight") for trainer in trainers]
    states = [trainer.batches.get_state() for trainer in trainers]
    for first, second, third in (weights, states):
        assert not torch.equal(first, second)
        assert torch.equal(second, third)
    assert train(config, data).losses == train(config, data).losses


def test_a_second_run_in_the_same_folder_is_refused(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    run = TrainingRun.start(config, data, out=tmp_path)
    with pytest.raises(BlockingIOError, match="another process is training in this folder") as e:
        TrainingRun.start(config, data, out=tmp_path)
    assert e.value.filename == str(tmp_path)
    run.train(should_stop=lambda: True)
    resumed = TrainingRun.resume(tmp_path, data=data)
    with pytest.raises(BlockingIOError, match="another process is training in this folder"):
        run.train()
    resumed.train()
    assert names(tmp_path) == FINISHED


def test_failed_run_releases_the_folder(config: TrainConfig, data: Dataset, tmp_path: Path) -> None:
    for path, error in ((tmp_path / "nothing", FileNotFoundError), (tmp_path, CheckpointError)):
        with pytest.raises(error):
            resume(path, data=data)
    assert not list(tmp_path.iterdir())
    train(config, data, out=tmp_path)
    with pytest.raises(CheckpointError, match="other data") as failure:
        resume(tmp_path, data=windows(b"something else " * 90, "other.txt"))
    assert resume(tmp_path, data=data).finished  # while the error, with its frames, is alive
    del failure
    lost = TrainingRun.resume(tmp_path, data=data)
    del lost
    assert resume(tmp_path, data=data).finished


def test_other_processes_of_a_run_do_not_lock(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    main = TrainingRun.start(config, data, out=tmp_path)
    other = TrainingRun.start(config, data, out=tmp_path, distributed=DistributedContext(1, 1))
    other.train()
    assert names(tmp_path) == {".lock", "curve.csv"}
    assert main.train().checkpoint == tmp_path / "checkpoint-8"


def test_leftovers_of_a_killed_process_are_removed_at_the_next_start(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    train(config, data, out=tmp_path, should_stop=lambda: True)
    for name in (".checkpoint-4.tmp", ".checkpoint-1.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "curve.csv").touch()
    resume(tmp_path, data=data)
    assert names(tmp_path) == FINISHED


def test_model_beyond_any_memory_is_an_error_of_torch(config: TrainConfig, data: Dataset) -> None:
    model = replace(config.task.model, width=10**12)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train(replace(config, task=replace(config.task, model=model)), data)
