"""ResumableLoader: a DataLoader that can go on in the middle of an epoch, bit for bit.

What is where, from top to bottom: `resumable` is what users call; `position` knows which pass is training and which
step has ended, with `passes` and `history`; `factory` chooses a source, and `map_source`, `iterable_source` and
`stateful_source` begin an epoch anywhere; `order` draws indices, `fetch` reads samples, `inputs` compares and
converts; `streams`, `private_generators` and `plain_state` keep random numbers and memories apart.
"""

from safeckpt.loader.resumable import ResumableLoader

__all__ = ["ResumableLoader"]
