"""The proof that a resumed run is the same run: prove_resume and its report."""

from safeckpt.proof.compare import Difference
from safeckpt.proof.prove import prove_resume
from safeckpt.proof.report import KillReport, ResumeReport

__all__ = ["Difference", "KillReport", "ResumeReport", "prove_resume"]
