"""A loss is read once: which values are not finite, what is recorded of it, and what is no loss."""

import json
import math
import warnings

import numpy as np
import pytest
import torch

from safeckpt import CheckpointManager
from safeckpt.state.loss import MOST_BYTES, Loss
from safeckpt.system.json_numbers import from_json, to_json

NAN, INF = math.nan, math.inf

FINITE = [
    None, 0, 1.5, True, 10**300, 1 + 2j, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor([[1.0, 2.0]]),
    torch.tensor(1.0, requires_grad=True) * 2, np.float32(1.0), np.int64(3), np.bool_(True), np.array([1.0, 2.0]),
    np.array(3), np.longdouble("1e40"),
    np.array([1.0], dtype=np.clongdouble), np.complex64(1j), {}, [], {"a": 1.0, "b": [torch.tensor(2.0), {"c": 3}]},
    (1.0, 2.0), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0).to(torch.float8_e4m3fn),
]  # fmt: skip
BAD = {
    "float": (NAN, "nan"),
    "minus infinity": (-INF, "-inf"),
    "complex": (complex(0, INF), "infj"),
    "tensor": (torch.tensor(NAN), "nan"),
    "tensor of one element": (torch.tensor([[INF]]), "[[inf]]"),
    "tensor with history": (torch.tensor(1.0, requires_grad=True) * INF, "inf"),
    "bfloat16": (torch.tensor(INF, dtype=torch.bfloat16), "inf"),
    "batch of losses": (torch.tensor([1.0, NAN]), "a tensor with NaN or Inf"),
    "NumPy scalar": (np.float16(INF), "inf"),
    "NumPy array": (np.array([1.0, NAN]), "an array with NaN or Inf"),
    "dict": ({"a": 1.0, "b": NAN}, "nan (in loss['b'])"),
    "deep": ({"a": [1.0, (2.0, torch.tensor(INF))]}, "inf (in loss['a'][1][1])"),
}


@pytest.mark.parametrize("loss", FINITE, ids=repr)
def test_finite_loss_of_any_accepted_kind_passes(loss):
    """Numbers, tensors, NumPy values and containers of them are accepted."""
    assert Loss.read(loss).nonfinite is None


@pytest.mark.parametrize("kind", BAD)
def test_loss_that_is_not_finite_is_described(kind):
    """The description has the value and, inside a container, the way to it."""
    loss, described = BAD[kind]
    assert Loss.read(loss).nonfinite.endswith(described)


@pytest.mark.parametrize(
    "loss", ["1.0", b"1", object(), {1.0}, np.array(["x"]), np.datetime64("2020-01-01"), {"a": "b"}]
)
def test_loss_of_another_kind_is_refused(loss):
    """What is no number is an error that names its type, not a pass."""
    with pytest.raises(TypeError, match="must be a number, a tensor"):
        Loss.read(loss)


# -- what is no loss, or too much of one ----------------------------------------------------------------------------


def nested(levels):
    loss = 1.0
    for _ in range(levels):
        loss = [loss]
    return loss


class Emptied:
    """Makes a tensor whose storage was freed; as a tensor it could not be printed as the name of a test."""

    def __call__(self):
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        return tensor


REFUSED = {
    "integer that no float holds": (lambda: 10**400, ValueError, "loss is an integer of 1,329 bits, which no float"),
    "the same in a dict": (lambda: {"a": 10**400}, ValueError, r"loss\['a'\] is an integer of 1,329 bits"),
    "wide float": (lambda: np.longdouble("1e4000"), ValueError, "loss is larger than a float of 64 bits"),
    "wide floats": (lambda: np.array([1, "1e4000"], dtype=np.longdouble), ValueError, "loss is larger than a float"),
    "200,000 numbers in a tensor": (lambda: torch.zeros(200_000), ValueError, "loss is too long for the header"),
    "200,000 numbers in a list": (lambda: [0.5] * 200_000, ValueError, "loss is too long for the header"),
    "200,000 names": (lambda: dict.fromkeys(range(200_000), 0.5), ValueError, "loss is too long for the header"),
    "long name": (lambda: {"n" * MOST_BYTES: 1.0}, ValueError, "loss is too long for the header"),
    "sparse and huge": (lambda: torch.ones(3).to_sparse().sparse_resize_((10**9,), 1, 0), ValueError, "loss is too"),
    "expanded": (lambda: torch.ones(1).expand(10**9), ValueError, "loss is too long for the header"),
    "3,000 levels": (lambda: nested(3000), ValueError, "loss is nested more than 20 levels deep"),
    "levels of a tensor": (lambda: [torch.ones([1] * 20)], ValueError, "loss is nested more than 20 levels deep"),
    "list in itself": (lambda: (loop := []).append(loop) or loop, ValueError, "loss is nested more than 20 levels"),
    "meta tensor": (lambda: torch.zeros(1, device="meta"), TypeError, "loss is a tensor that is on the meta device"),
    "float4": (
        lambda: torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), TypeError,
        "loss is a tensor that has dtype torch.float4_e2m1fn_x2, which torch cannot convert",
    ),
    "nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), TypeError, "loss is a tensor that is",
    ),
    "emptied": (Emptied(), TypeError, "its storage holds 0 bytes, its shape needs 4000"),
    "uninitialized": (torch.nn.parameter.UninitializedParameter, TypeError, "loss is a tensor that is not initialized"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_loss_that_no_header_can_hold_is_refused_by_name(kind):
    """What is too large, too long, too deep or without values is one clear error, before anything else happens."""
    make, error, text = REFUSED[kind]
    with pytest.raises(error, match=text):
        Loss.read(make())


@pytest.mark.parametrize("kind", REFUSED)
def test_run_that_gives_such_a_loss_writes_nothing_and_goes_on(kind, memory_path):
    """Neither save nor end_step leaves a trace of it, and the next step with a loss is saved."""
    make, error, text = REFUSED[kind]
    with CheckpointManager(memory_path, {"counters": {}}, save_every=1) as manager:
        with pytest.raises(error, match=text):
            manager.save(1, loss=make())
        with pytest.raises(error, match=text):
            manager.end_step(1, loss=make())
        assert not list(memory_path.glob("*.pt"))
        assert manager.end_step(1, loss=0.5).loss == 0.5


METRICS = {
    "integer that no float holds": ({"a": 10**400}, ValueError, r"metrics\['a'\] is an integer of 1,329 bits"),
    "sparse": ({"a": torch.ones(3).to_sparse()}, TypeError, r"metrics\['a'\] must be a number or a one-element"),
    "list": ({"a": [1.0]}, TypeError, r"metrics\['a'\] must be a number or a one-element"),
    "100,000 metrics": (dict.fromkeys(map(str, range(100_000)), 1.0), ValueError, "metrics is too long for the header"),
    "long name": ({"n" * MOST_BYTES: 1.0}, ValueError, "metrics is too long for the header"),
}  # fmt: skip


@pytest.mark.parametrize("kind", METRICS)
def test_metrics_that_no_header_can_hold_are_refused_by_name(kind, memory_path):
    """They are refused as a loss is, before anything is written."""
    metrics, error, text = METRICS[kind]
    with CheckpointManager(memory_path, {"counters": {}}, save_every=1) as manager:
        with pytest.raises(error, match=text):
            manager.save(1, metrics=metrics)
        with pytest.raises(error, match=text):
            manager.end_step(1, loss=0.5, metrics=metrics)
        assert not list(memory_path.glob("*.pt"))
        manager.save(1, metrics={"a": torch.ones(1, 1)})


def test_longest_loss_and_metrics_together_fit_into_the_header(memory_path):
    """What is accepted can be saved and comes back, with the largest numbers and the longest names."""
    loss = [-1.7976931348623157e308] * (MOST_BYTES // 26)
    metrics = {f"{index:06d}": -2.2250738585072014e-308 for index in range(10_000)}
    with CheckpointManager(memory_path, {"counters": {}}) as manager:
        manager.save(1, loss=loss, metrics=metrics)
        assert (manager.latest().loss, manager.latest().metrics) == (loss, metrics)


def test_sparse_or_quantized_loss_is_read_as_the_numbers_it_stands_for():
    """Small tensors of other layouts are no reason to refuse a step."""
    assert Loss.read(torch.tensor([0.0, 2.0]).to_sparse()).floats == [0.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # once a process: deprecated
        assert Loss.read(torch.quantize_per_tensor(torch.ones(1), 0.5, 0, torch.qint8)).floats == [1.0]


def test_loss_in_every_form_has_the_same_exact_text():
    """Hexadecimal holds every bit, whatever holds the number; of a complex number both parts are there."""
    for loss in (0.1, np.float64(0.1), torch.tensor(0.1, dtype=torch.float64), [0.1], {"a": [0.1, None]}):
        assert Loss.read(loss).exact == (0.1).hex()
    assert Loss.read(1 + 2j).exact == f"{(1.0).hex()},{(2.0).hex()}"
    assert Loss.read(-0.0).exact == "-0x0.0p+0"


def test_floats_come_back_from_json_with_their_infinities():
    """JSON has no NaN: the header holds words instead."""
    value = {"a": [1.0, INF, -INF], "b": 0.1, "c": None}
    assert from_json(json.loads(json.dumps(to_json(value), allow_nan=False))) == value
    assert math.isnan(from_json(to_json(NAN)))


def test_loss_that_was_read_is_not_read_again():
    """A `Loss` is accepted wherever a loss is, so that one step reads its tensor once."""
    loss = Loss.read(torch.tensor([1.0, 2.0]))
    assert Loss.read(loss) is loss
    assert loss.numbers == [1.0, 2.0]
