"""Training scripts as public repositories have them, made resumable with README and `.readme/convert.md` alone.

Each `train_...` trains in a directory of checkpoints from the newest one to its end, in a second or two.
"""
