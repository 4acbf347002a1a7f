"""Direct preference optimization (arXiv:2305.18290) as a custom loss.

    flatout train run.yaml objective.path=dpo.py:DPO objective.beta=0.1

Each unit of the data set is a pair of answers to one prompt, with the chosen answer first. The column `ref_logprob` has
the log-probability of each answer under the reference, which is the model before training.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from flatout import LabelTokens, Metric, Objective


class DPO(Objective):
    """-log sigmoid(beta (d_chosen - d_rejected)) of each pair; d is an answer's log-ratio to the reference."""

    scope = "unit"
    unit_size = 2
    columns = ("ref_logprob",)
    normalizer = "units"
    metrics = {"rewards/accuracies": Metric(), "rewards/margins": Metric(), "logps/chosen": Metric()}

    beta: float = Field(default=0.1, gt=0)

    def __call__(self, tokens: LabelTokens) -> dict[str, Tensor]:
        logprobs = tokens.by_sample(tokens.logprobs)
        rewards = self.beta * (logprobs - tokens.column("ref_logprob"))
        margins = tokens.by_unit(rewards).diff(dim=1).neg()
        return {
            "loss": -logsigmoid(margins).sum(),
            "rewards/accuracies": (margins > 0).sum(),
            "rewards/margins": margins.sum(),
            "logps/chosen": tokens.by_unit(logprobs)[:, 0].sum(),
        }
