"""Copies of a state in memory that is used again."""

from __future__ import annotations

import threading

import pytest
import torch

from safeckpt.state import Staging
from safeckpt.state.tree import named_tensors
from tests.comparing import Bits, bits


def state() -> dict[str, object]:
    """Return tensors of every form that a buffer has to cope with."""
    base = torch.arange(100.0)
    return {
        "large": torch.randn(1000, 1000),
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
        "transposed": torch.randn(30, 40).t(),
        "expanded": torch.randn(1, 5).expand(7, 5),
        "with gaps": torch.randn(10, 10)[::2, 1:4],
        "overlapping": [base[:60], base[40:], base],
        "apart": [torch.arange(10)[:3], torch.arange(10)[7:]],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "half": torch.randn(5).bfloat16(),
        "sparse": torch.eye(3).to_sparse(),
        "number": 1.5,
    }


def pointers(tree: object) -> dict[str, int]:
    dense = ((name, t) for name, t in named_tensors(tree) if t.layout is torch.strided and t.numel())
    return {name: t.data_ptr() for name, t in dense}


def tensors_in(tree: object) -> Bits:
    return bits({name: t.detach() for name, t in named_tensors(tree)}, ties=False)


@pytest.mark.parametrize("warmed", [False, True])
def test_copy_equals_the_state_and_shares_nothing_with_it(warmed: bool) -> None:
    """Every form of tensor is copied; changing the original afterwards changes no copy, also the second time."""
    staging = Staging()
    if warmed:
        staging.warm(state())
    for _ in range(3):
        live = state()
        before = tensors_in(live)
        copied = staging.copy(live)
        assert not set(pointers(live).values()) & set(pointers(copied).values())
        with torch.no_grad():
            for name, tensor in named_tensors(live):
                if name not in ("expanded", "sparse"):
                    tensor.fill_(7)
        assert tensors_in(copied) == before
        whole = copied["overlapping"][2]
        whole[50] = -1
        assert copied["overlapping"][0][50] == copied["overlapping"][1][10] == -1, "what overlaps overlaps in the copy"


def test_memory_is_used_again_as_long_as_the_shapes_stay() -> None:
    """The second copy is where the first was; after a change only what has another size is new."""
    staging = Staging()
    first = pointers(staging.copy(state()))
    changed = state()
    assert pointers(staging.copy(state())) == first
    changed["parameter"] = torch.randn(50, 50)
    changed["another"] = torch.randn(9)
    third = staging.copy(changed)
    assert tensors_in(third) == tensors_in(changed)
    kept = {name for name, where in pointers(third).items() if first.get(name) == where}
    assert {"large", "transposed", "with gaps", "overlapping.0", "overlapping.2"} <= kept


def test_warm_memory_is_what_the_first_copy_goes_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `warm` the first copy allocates nothing for tensors of the shapes that were there."""
    made = []
    from safeckpt.state import staging as module

    fresh = module.fresh
    monkeypatch.setattr(module, "fresh", lambda *args: made.append(threading.current_thread().name) or fresh(*args))
    staging = Staging()
    small = {"a": torch.randn(10), "b": torch.randn(20)}
    staging.warm(small)
    staging.warm(small)
    copied = staging.copy({**small, "c": torch.randn(30)})
    assert tensors_in({"a": copied["a"], "b": copied["b"]}) == tensors_in(small)
    assert made == ["safeckpt-warm", "safeckpt-warm", threading.current_thread().name]


def test_copy_of_another_form_over_the_same_memory_is_right() -> None:
    """The same elements seen through other strides are no longer the copy of before."""
    staging = Staging()
    square = torch.randn(20, 20)
    assert torch.equal(staging.copy([square])[0], square)
    assert torch.equal(staging.copy([square.t()])[0], square.t())
    assert torch.equal(staging.copy([square.view(400)])[0], square.view(400))
