"""Lookup of the fact that answers a question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from ...models.lookup import SIZES, Lookup, LookupConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig, is_text
from ..data import Batch, Dataset, Fact, Facts, as_facts, load_facts
from ..task import Extra, Task, check_extra_keys


@dataclass(frozen=True, kw_only=True)
class LookupTask(Task):
    """Lookup in a table of facts, by default the modules of the standard library.

    Training uses soft attention over the rows; the score is the accuracy of hard attention.
    """

    kind = "lookup"
    unit = "words"
    score_name = "accuracy"
    config_type = LookupConfig

    model: LookupConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> Facts:
        return load_facts(source)

    def fitted(self, data: Dataset) -> LookupTask:
        assert isinstance(data, Facts)
        sizes = {"vocabulary": len(data.vocabulary), "rows": len(data.facts)}
        return replace(self, model=replace(self.model, **sizes))

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, Facts)
        return {"facts": [[fact.key, fact.value] for fact in data.facts]}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "facts")
        facts = extra["facts"]
        if type(facts) is not list or not all(map(_is_pair, facts)):
            raise ValueError("extra.facts must be a list of keys and values")
        found = facts_from_extra(extra)
        sizes = (len(found.vocabulary), len(found.facts))
        if sizes != (self.model.vocabulary, self.model.rows):
            raise ValueError(
                f"extra.facts must have {self.model.vocabulary} words and {self.model.rows} facts, "
                f"got {sizes[0]} and {sizes[1]}"
            )

    def build(self, attn_implementation: AttnImplementation) -> Lookup:
        return Lookup(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"row": len(batch["rows"])}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        log_p = model(batch["words"], batch["lengths"])
        return {"row": nn.functional.nll_loss(log_p, batch["rows"], reduction="sum")}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        assert isinstance(model, Lookup)
        correct = count = 0
        for batch in batches:
            answers = model.answer(batch["words"], batch["lengths"])
            correct += int((answers == batch["rows"]).sum())
            count += len(answers)
        return correct / count


def facts_from_extra(extra: Extra) -> Facts:
    """The facts stored in the extra data of a checkpoint."""
    return as_facts([Fact(key, value) for key, value in extra["facts"]], "the checkpoint")


def _is_pair(value: object) -> bool:
    return type(value) is list and len(value) == 2 and all(map(is_text, value))


PRESETS = {
    "demo": TrainConfig(
        task=LookupTask(model=SIZES["demo"]),
        steps=600,
        batch=64,
        schedule=Schedule(peak=3e-2, warmup=20),
        weight_decay=0.0,
        eval_every=100,
        eval_batches=10,
    ),
}
