"""The hinge loss over pairs (SLiC, arXiv:2305.10425), as a custom loss based on flatout.Preference."""

from pydantic import Field
from torch import Tensor

from flatout import Answers, Preference


class Hinge(Preference):
    """max(0, 1 - beta (d_chosen - d_rejected)) of each pair; d is an answer's log-ratio to the reference."""

    columns = ("reference_logprob",)
    beta: float = Field(default=0.1, gt=0)

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return (1 - self.beta * (chosen.ratio - rejected.ratio)).clamp_min(0)

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.ratio
