"""The trainers' integrations. Each module skips without its trainer: `pytest.importorskip("lightning", reason=...)`.

`.ci/run trainers` has all of them, in the versions of `tests/constraints-trainers.txt`.
"""
