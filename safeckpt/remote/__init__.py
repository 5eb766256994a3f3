"""An object store behind the local directory: checkpoints that are committed here are copied there, and fetched back.

`keys` says what is there, `client` is every request, `epochs` who may write and what counts, `transfer` the bytes,
`worker` the thread that copies.
"""

from typing import TYPE_CHECKING

from safeckpt.system.lazy import module_getattr

if TYPE_CHECKING:
    from safeckpt.remote.client import Client, open_client
    from safeckpt.remote.epochs import NOTHING, Claim, Epochs, RemoteCheckpoint, View
    from safeckpt.remote.looking import find, local_copy, names_checkpoint, open_prefix, verify_remote, verify_url
    from safeckpt.remote.options import Mirror
    from safeckpt.remote.transfer import fetch, open_remote, trailer_of
    from safeckpt.remote.urls import RemotePath, is_url, shown_url
    from safeckpt.remote.worker import Worker
else:
    __getattr__ = module_getattr(
        __name__,
        {
            "NOTHING": "safeckpt.remote.epochs",
            "Claim": "safeckpt.remote.epochs",
            "Client": "safeckpt.remote.client",
            "Epochs": "safeckpt.remote.epochs",
            "Mirror": "safeckpt.remote.options",
            "RemoteCheckpoint": "safeckpt.remote.epochs",
            "RemotePath": "safeckpt.remote.urls",
            "View": "safeckpt.remote.epochs",
            "Worker": "safeckpt.remote.worker",
            "fetch": "safeckpt.remote.transfer",
            "find": "safeckpt.remote.looking",
            "is_url": "safeckpt.remote.urls",
            "local_copy": "safeckpt.remote.looking",
            "names_checkpoint": "safeckpt.remote.looking",
            "open_client": "safeckpt.remote.client",
            "open_prefix": "safeckpt.remote.looking",
            "open_remote": "safeckpt.remote.transfer",
            "shown_url": "safeckpt.remote.urls",
            "trailer_of": "safeckpt.remote.transfer",
            "verify_remote": "safeckpt.remote.looking",
            "verify_url": "safeckpt.remote.looking",
        },
    )

__all__ = [
    "NOTHING",
    "Claim",
    "Client",
    "Epochs",
    "Mirror",
    "RemoteCheckpoint",
    "RemotePath",
    "View",
    "Worker",
    "fetch",
    "find",
    "is_url",
    "local_copy",
    "names_checkpoint",
    "open_client",
    "open_prefix",
    "open_remote",
    "shown_url",
    "trailer_of",
    "verify_remote",
    "verify_url",
]
