"""Tensors of every kind that torch has, found by introspection where there is a list to be had."""

import torch

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
FLOATING = [dtype for dtype in DTYPES if dtype.is_floating_point and "float4" not in str(dtype)]
COMPLEX = [dtype for dtype in DTYPES if dtype.is_complex]

# torch warns, once in a process each, about what is experimental or on its way out.
TORCH_WARNINGS = (
    "ignore:ComplexHalf support is experimental",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel",
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta",
    "ignore:The PyTorch API of nested tensors is in prototype",
)


class Named(torch.Tensor):
    """A subclass over plain memory."""


def numbers(*size):
    return torch.arange(12.0).reshape(size or (12,))


def holes():
    """Return a matrix with zeros in it."""
    return numbers(3, 4) * (numbers(3, 4) % 2)


def parts():
    return [torch.ones(2), torch.ones(3)]


# Tensors that are not just dense memory in order, and how to make each.
SPECIAL = {
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: numbers(3, 4).t(),
    "every other": lambda: numbers()[::2],
    "expanded": lambda: numbers()[:3].unsqueeze(1).expand(3, 4),
    "windows": lambda: numbers().unfold(0, 3, 1),
    "conj": lambda: torch.complex(numbers(), -numbers()).conj(),
    "neg": lambda: torch.complex(numbers(), -numbers()).conj().imag,
    "parameter": lambda: torch.nn.Parameter(numbers()),
    "subclass": lambda: numbers().as_subclass(Named),
    "coo": lambda: holes().to_sparse(),
    "uncoalesced": lambda: torch.cat([holes().to_sparse(), holes().to_sparse()]),
    "csr": lambda: holes().to_sparse_csr(),
    "csc": lambda: holes().to_sparse_csc(),
    "bsr": lambda: holes()[:2].to_sparse_bsr((2, 2)),
    "bsc": lambda: holes()[:2].to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor(parts()),
    "jagged": lambda: torch.nested.nested_tensor(parts(), layout=torch.jagged),
    "mkldnn": lambda: numbers().to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(numbers(), 0.5, 2, torch.qint8),
    "channels": lambda: torch.quantize_per_channel(holes(), torch.ones(3), torch.zeros(3), 0, torch.quint8),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bool": lambda: numbers() > 3,
    "bytes": lambda: torch.arange(5, dtype=torch.uint8),
    **{
        str(dtype): (lambda dtype=dtype: torch.tensor([0.0, 1.0, float("nan"), -0.0]).to(dtype))
        for dtype in FLOATING + COMPLEX
    },
}
