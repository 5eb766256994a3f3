"""ResumableLoader: a DataLoader that can go on in the middle of an epoch, bit for bit.

What is where: `resumable` keeps the position; `sources` knows how to begin an epoch anywhere; `order` draws indices,
`fetch` reads samples, `inputs` compares and converts; `streams` and `generators` keep random numbers apart.
"""

from safeckpt.loader.resumable import ResumableLoader

__all__ = ["ResumableLoader"]
