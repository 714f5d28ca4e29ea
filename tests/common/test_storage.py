"""check_storage: tensors whose storage is freed are named, all others accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.storage import freed, freed_view
from transformer_kernels.common.storage import are_plainly_stored, check_storage


@pytest.mark.parametrize("free", [freed, freed_view])
@pytest.mark.parametrize("make", [torch.ones, nn.Parameter])
def test_names_the_freed_tensor(free: Callable[..., Tensor], make: Callable[..., Tensor]) -> None:
    x = free(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"k has the shape \(2, 3\), but its storage is freed"):
        check_storage((("q", torch.ones(1)), ("k", nn.Parameter(x) if make is nn.Parameter else x)))


class Subclass(Tensor):
    """A subclass, which may have no storage of its own."""


def test_accepts_everything_else() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    accepted = (
        None, 1.5, torch.ones(3), torch.ones(0), torch.ones(3, 0)[1:], torch.ones(3, device="meta"),
        torch.ones(2, 2).to_sparse(), torch._efficientzerotensor((2,)), fake,
        torch.ones(3).as_subclass(Subclass), freed(torch.ones(3))[:0],
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    )  # fmt: skip
    check_storage((str(n), x) for n, x in enumerate(accepted))


def test_is_silent_under_transforms_and_compilers() -> None:
    def call(x: Tensor) -> Tensor:
        check_storage((("x", x),))
        return x * 2

    x = torch.ones(2, 3)
    assert torch.equal(torch.func.vmap(call)(x), x * 2)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), x * 2)


class OnAnotherDevice:
    """Attributes of a valid tensor on a GPU."""

    device, dtype, is_nested = torch.device("cuda", 1), torch.float32, False

    def data_ptr(self) -> int:
        return 1 << 45


def test_tensors_on_different_devices_are_not_plain() -> None:
    x, y = torch.ones(2), cast(Tensor, OnAnotherDevice())
    assert are_plainly_stored(x, x, x)
    assert not are_plainly_stored(x, y, x)
    assert not are_plainly_stored(x, x, y)
