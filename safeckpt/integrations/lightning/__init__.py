"""Lightning's `Trainer` that resumes exactly: `Trainer(callbacks=[SafeCheckpoint("runs/x", save_every=100)])`.

Nothing else in the script changes, and `ckpt_path` is not needed: `fit` goes on where the last one was killed.

Parts: `callback` (what the user sees), `safe_points` (where a step is over, and how the loops are entered there again),
`trainer_state` (what a trainer carries from step to step), `support` (what is relied on, and what is refused).
"""

from safeckpt.integrations.requirements import requires

requires("lightning", "2.6", "2.7", "lightning")

from safeckpt.integrations.lightning.callback import SafeCheckpoint  # noqa: E402 - behind the check of the version

__all__ = ["SafeCheckpoint"]
