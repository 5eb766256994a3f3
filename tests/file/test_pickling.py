"""The pickle is torch's own, byte for byte."""

import pytest
import torch

from safeckpt.file.pickle_scan import scan_pickle
from safeckpt.file.writing.pickling import pickle_payload
from tests.file.states import NAMES, corpus, torch_pickle

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|CSC|BSC) tensor support:UserWarning")


@pytest.mark.parametrize("name", NAMES)
def test_states_without_views_pickle_to_the_same_bytes_as_torch_save(name):
    """The record data.pkl equals torch.save's own for every state that needs its storages as a whole."""
    state = corpus()[name]
    assert pickle_payload(state).data == torch_pickle(state)


def test_every_state_of_the_corpus_is_named():
    """No state is left out of the tests that go by name."""
    assert sorted(corpus()) == sorted(NAMES)


def test_whole_corpus_in_one_tree_pickles_to_the_same_bytes_as_torch_save():
    """Memo numbers and storage keys follow torch's over a large mixed tree too."""
    state = corpus()
    pickled = pickle_payload(state)
    assert pickled.data == torch_pickle(state)
    assert pickled.plain


def test_protocol_3_without_bytes_pickles_to_the_same_bytes_as_torch_save():
    """Protocol 3 gives torch's own bytes where its extra opcodes would not be used."""
    state = {"a": torch.arange(3), "set": {1}, "nested": [(1, 2.5), "x"]}
    assert pickle_payload(state, 3).data == torch_pickle(state, 3)


def test_protocol_3_with_bytes_uses_no_opcode_that_a_safe_load_refuses():
    """Bytes are written in the way of protocol 2, since a safe load does not know the opcodes of protocol 3."""
    data = pickle_payload({"a": b"xy", "b": bytearray(b"z")}, 3).data
    assert data[:2] == b"\x80\x03"
    assert scan_pickle(data).protocol == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_scan_accepts_what_torch_save_pickles_and_finds_every_storage(name):
    """The scan reads torch's pickles, and the claims it finds are the contents to be written."""
    pickled = pickle_payload(corpus()[name])
    scan = scan_pickle(pickled.data)
    assert [claim.nbytes for claim in scan.claims.values()] == [span.nbytes for span in pickled.spans]
    assert list(scan.claims) == [str(key) for key in range(len(pickled.spans))]


def test_a_type_that_torch_does_not_list_makes_the_pickle_not_plain():
    """The writer is told when a pickle has to be read once more before it is written."""
    assert not pickle_payload([slice(1)]).plain
    assert not pickle_payload([torch.nn.Linear]).plain
