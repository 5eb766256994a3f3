"""Random numbers: every kind of generator, and the process's own streams, go on exactly where they were."""

import inspect
import pickle
import random

import numpy as np
import pytest
import torch

from safeckpt import CheckpointManager, EnvironmentChangedWarning
from safeckpt.state import Mixture, capture, plan, register
from safeckpt.state.random_streams import RngStreams, unpacked_python
from tests.comparing import changes, photograph, streams
from tests.state.runs import give, payload_of, refusal

BITS = sorted(
    name
    for name, kind in vars(np.random).items()
    if inspect.isclass(kind) and issubclass(kind, np.random.BitGenerator) and kind is not np.random.BitGenerator
)


class Loaded(random.Random):
    """A generator of somebody's own over Python's."""


def draw_numpy(generator):
    # Odd numbers of 32-bit draws leave half a word behind, normal draws of the old kind leave a second one.
    return [generator.integers(2**31, dtype=np.uint32).item(), generator.standard_normal(), generator.random()]


def draw_old(generator):
    return [generator.randint(2**31), generator.standard_normal(), generator.rand()]


def draw_bits(generator):
    return generator.random_raw(3).tolist()


def draw_torch(generator):
    # randn keeps the second normal number of a pair for the next draw.
    return [*torch.randn(3, generator=generator).tolist(), torch.randint(99, (1,), generator=generator).item()]


def draw_python(generator):
    return [generator.random(), generator.gauss(0, 1), generator.getrandbits(17)]


KINDS = {
    **{f"Generator({name})": (lambda n, name=name: np.random.Generator(getattr(np.random, name)(n)), draw_numpy)
       for name in BITS},
    **{f"RandomState({name})": (lambda n, name=name: np.random.RandomState(getattr(np.random, name)(n)), draw_old)
       for name in BITS},
    **{name: (lambda n, name=name: getattr(np.random, name)(n), draw_bits) for name in BITS},
    "torch": (lambda n: torch.Generator().manual_seed(n), draw_torch),
    "random.Random": (random.Random, draw_python),
    "a subclass of random.Random": (Loaded, draw_python),
}  # fmt: skip


def test_numpy_has_the_generators_that_are_tested():
    """NumPy's bit generators are found by introspection, the five known ones among them."""
    assert {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"} <= set(BITS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [0, 1, 2])
def test_generator_of_any_kind_goes_on_where_it_was(kind, draws, memory_path):
    """After any number of draws, with half-used words and spare normal numbers, the sequence goes on."""
    make, draw = KINDS[kind]
    generator = make(1)
    for _ in range(draws):
        draw(generator)
    with CheckpointManager(memory_path, {"generator": generator}) as manager:
        manager.save(1)
    expected = [draw(generator) for _ in range(3)]
    other = make(2)
    draw(other)
    with CheckpointManager(memory_path, {"generator": other}) as manager:
        manager.restore()
    assert [draw(other) for _ in range(3)] == expected
    with CheckpointManager(memory_path, {"generator": generator}) as manager:
        manager.restore()  # again, over a generator that went on
    assert [draw(generator) for _ in range(3)] == expected


@pytest.mark.parametrize("saved", KINDS)
def test_state_of_one_kind_is_refused_by_every_other(saved):
    """Class and algorithm have to agree: the state of one means nothing to another; nothing is touched."""
    payload = payload_of({"generator": KINDS[saved][0](1)})
    for live, (make, _) in KINDS.items():
        if live != saved:
            (mismatch,) = refusal(payload, {"generator": make(2)})
            assert mismatch.startswith("generator: saved ")


def test_capturing_a_generator_draws_nothing():
    """A generator is in the same position before and after."""
    generators = {f"g{index}": make(3) for index, (make, _) in enumerate(KINDS.values())}
    registered = register(generators)
    before = photograph(**generators)
    capture(registered)
    assert not changes(before, photograph(**generators))


def test_generator_shares_nothing_with_the_payload():
    """Drawing on leaves the payload, and a second restore begins at the same place."""
    for make, draw in KINDS.values():
        generator = make(5)
        payload = payload_of({"generator": generator})
        results = []
        for _ in range(2):
            give(payload, {"generator": generator})
            results.append([draw(generator) for _ in range(3)])
        assert results[0] == results[1]


# -- the process's own streams --------------------------------------------------------------------------------------


def draw_all():
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal(), np.random.randint(99),
        *torch.randn(3).tolist(), torch.randint(9, (1,)).item(),
    ]  # fmt: skip


@pytest.fixture
def numpy_stream():
    """Put NumPy's process-wide stream back as it was, whatever algorithm a test gave it."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("draws", [0, 1])
def test_streams_of_the_process_go_on_where_they_were(draws, memory_path):
    """Python's, NumPy's and torch's streams are in every checkpoint without being named."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in range(draws):
        draw_all()
    with CheckpointManager(memory_path, {"counters": {}}) as manager:
        manager.save(1)
        expected = draw_all()
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
        manager.restore()
    assert draw_all() == expected


@pytest.mark.parametrize("name", BITS)
def test_numpy_stream_of_another_algorithm_goes_on_where_it_was(name, numpy_stream, memory_path):
    """A process-wide NumPy stream that somebody has changed to another algorithm is saved and restored as well."""
    np.random.set_bit_generator(getattr(np.random, name)(1))
    draw_all()
    with CheckpointManager(memory_path, {"counters": {}}) as manager:
        manager.save(1)
        expected = draw_all()
        manager.restore()
    assert draw_all() == expected


def test_numpy_stream_of_another_algorithm_is_refused_by_name(numpy_stream):
    """The state of one algorithm cannot be given to another; no stream is touched."""
    payload = payload_of({"counters": {}})
    np.random.set_bit_generator(np.random.PCG64(1))
    assert refusal(payload, {"counters": {}}) == ["rng: NumPy's stream was MT19937, now it is PCG64"]
    give(payload, {"counters": {}}, only=("counters",))


def test_streams_can_be_left_out_or_taken_alone():
    """`only` names them as "rng"; without it they stay where they are."""
    counters = {"a": 1}
    payload = payload_of({"counters": counters})
    saved = streams()
    draw_all()
    counters["a"] = 2
    here = streams()
    give(payload, {"counters": counters}, only=("counters",))
    assert (streams(), counters) == (here, {"a": 1})
    counters["a"] = 2
    give(payload, {"counters": counters}, only=("rng",))
    assert (streams(), counters) == (saved, {"a": 2})


def test_streams_of_other_devices_are_refused_with_the_way_out():
    """A run from a machine with two GPUs says what differs and how to give bit-equality up."""
    payload = payload_of({"counters": {}})
    payload["safeckpt"]["rng"]["devices"] = {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    (mismatch,) = refusal(payload, {"counters": {}})
    assert mismatch.startswith("rng: saved with devices {'cuda': 2}, this process has none; leave the streams out")
    give(payload, {"counters": {}}, only=("counters",))


class Drawing:
    """Draws from every stream whenever it is asked for its state or given one."""

    def state_dict(self):
        return {"drawn": str(draw_all())}

    def load_state_dict(self, state):
        draw_all()


class DrawingLayer(torch.nn.Module):
    """A module that draws whenever its state is asked for or given."""

    def get_extra_state(self):
        return draw_all()

    def set_extra_state(self, state):
        draw_all()


def test_components_that_draw_in_both_directions_leave_no_trace(memory_path):
    """Neither building the manager, nor saving, nor restoring moves a stream, whatever the components draw."""
    components = {"drawing": Drawing(), "layer": DrawingLayer()}
    before = streams()
    with CheckpointManager(memory_path, components) as manager:
        assert streams() == before
        manager.save(1)
        assert streams() == before
        expected = draw_all()
        manager.restore()
        assert streams() == before
        assert draw_all() == expected
        here = streams()
        manager.restore(only=("drawing",))
        assert streams() == here


def test_refused_restore_of_a_drawing_component_moves_no_stream():
    """Checking asks for the state, and puts the streams back."""
    payload = payload_of({"layer": DrawingLayer()})
    refusal(payload, {"layer": torch.nn.Linear(1, 1)})
    other = DrawingLayer()
    other.extra = torch.nn.Linear(1, 1)
    refusal(payload, {"layer": other})


def test_streams_are_put_back_when_the_block_fails():
    """An exception inside does not leave the streams moved."""
    before = streams()
    with pytest.raises(ZeroDivisionError), RngStreams.untouched():
        draw_all()[0] / 0
    assert streams() == before


def test_load_that_fails_half_way_says_what_may_be_changed_and_leaves_the_streams():
    """An error of a component's own load_state_dict is passed on with a note; streams are where they were."""

    class Failing(Drawing):
        def load_state_dict(self, state):
            draw_all()
            raise OSError("no")

    components = {"layer": torch.nn.Linear(1, 1), "failing": Failing()}
    payload = payload_of(components)
    before = streams()
    ready = plan(register(components), payload)
    with pytest.raises(OSError, match="no") as caught:
        ready.apply(Mixture())
    assert "stopped half-way: failing may be changed, every other object" in caught.value.__notes__[0]
    assert streams() == before


def test_streams_on_disk_are_plain_numbers_and_tensors(memory_path):
    """No NumPy object gets into a file: any torch reads the streams without safeckpt."""
    with CheckpointManager(memory_path, {"counters": {}, "g": np.random.default_rng(1)}) as manager:
        path = manager.save(1).path
    rng = torch.load(path)["safeckpt"]["rng"]
    assert rng["numpy"]["bit_generator"] == "MT19937"
    assert rng["torch"].dtype is torch.uint8
    assert rng["python"]["state"]["key"].dtype is rng["numpy"]["state"]["key"].dtype is torch.int32
    assert random.getstate() == unpacked_python(rng["python"])


def test_states_survive_a_plain_pickle():
    """Ranks and users send a state on with pickle, which cannot read every dtype of torch back."""
    for make, draw in KINDS.values():
        generator = make(5)
        payload = pickle.loads(pickle.dumps(payload_of({"generator": generator})))
        expected = [draw(generator) for _ in range(3)]
        give(payload, {"generator": generator})
        assert [draw(generator) for _ in range(3)] == expected


def test_streams_saved_elsewhere_are_out_of_reach_of_other_threads_settings(memory_path):
    """A changed number of threads is a warning that names it, and the streams are restored all the same."""
    with CheckpointManager(memory_path, {"counters": {}}) as manager:
        manager.save(1)
        expected = draw_all()
        torch.set_num_threads(torch.get_num_threads() + 1)
        with pytest.warns(EnvironmentChangedWarning, match="threads: 1 -> 2"):
            manager.restore()
    assert draw_all() == expected
