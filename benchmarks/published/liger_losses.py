"""The losses of Liger-Kernel's benchmarks, described anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor, nn

from benchmarks.published.liger_base import Loss


class CrossEntropy(Loss):
    """Cross-entropy of float32 logits."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(tokens, vocabulary)
        self.hold("target", torch.zeros(tokens, dtype=torch.long))

    def forward(self) -> Tensor:
        return F.cross_entropy(self.x, self.target)


class LinearLoss(Loss):
    """The last linear layer of a language model and a loss on its logits, with the other provider's twin beside it."""

    def __init__(self, shape: tuple[int, ...], vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(*shape, dtype=torch.bfloat16)
        self.hold("target", torch.zeros(shape[:-1], dtype=torch.long))
        self.linear, self.twin = (nn.Linear(shape[-1], vocabulary, bias=False, dtype=torch.bfloat16) for _ in "ab")


class LinearCrossEntropy(LinearLoss):
    """Cross-entropy of bfloat16 logits."""

    def forward(self) -> Tensor:
        return F.cross_entropy(self.linear(self.x), self.target)


class OddsRatio(LinearLoss):
    """ORPO in half precision, as its first benchmark had it."""

    def forward(self) -> Tensor:
        logits = self.linear(self.x)
        half = logits.shape[0] // 2
        nll = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), self.target[:half].view(-1))
        chosen, rejected = F.log_softmax(logits, dim=-1).mean(dim=-1).split(half)
        odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        return nll - (0.1 * F.logsigmoid(odds)).mean()


class Preference(LinearLoss):
    """CPO, SimPO and the later ORPO: logits in float32, log-probabilities of the targets, pairs compared."""

    def forward(self) -> Tensor:
        logits = (self.x @ self.linear.weight.t()).float()
        half = logits.shape[0] // 2
        nll = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), self.target[:half].view(-1))
        mask = self.target != -100
        target = torch.where(self.target == -100, 0, self.target)
        tokens = torch.gather(logits.log_softmax(-1), dim=2, index=target.unsqueeze(2)).squeeze(2)
        chosen, rejected = ((tokens * mask).sum(-1) / mask.sum(-1)).split(half)
        loss = nll + F.logsigmoid(0.1 * (chosen - rejected)).mean()
        # Reported with the loss, and alive until the forward function returns.
        self.reported = (logits[:half].detach().mean(), logits[half:].detach().mean())
        return loss


class Cosine(Loss):
    """Distillation by the cosine of student and teacher logits, and cross-entropy."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        half = torch.bfloat16
        self.x = self.wants(tokens, width // 2, dtype=half)
        self.twin_x = self.wants(tokens, width // 2, dtype=half)
        self.hold("made_from", torch.empty(tokens, width // 2, dtype=half))
        self.hold("teacher_x", torch.empty(tokens, width, dtype=half))
        self.hold("target", torch.zeros(tokens, dtype=torch.long))
        self.student, self.twin = (nn.Linear(width // 2, vocabulary, bias=False, dtype=half) for _ in "ab")
        self.teacher, self.teacher_twin = (nn.Linear(width, vocabulary, bias=False, dtype=half) for _ in "ab")

    def forward(self) -> Tensor:
        student_out = self.x @ self.student.weight.t()
        with torch.no_grad():
            teacher_out = self.teacher_x @ self.teacher.weight.t()
        student, teacher = student_out.float(), teacher_out.float()
        hard = F.cross_entropy(student, self.target)
        del student_out, teacher_out
        student /= 1.0
        teacher /= 1.0
        one, other = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
        return 0.5 * hard + 0.5 * (1 - F.cosine_similarity(one, other, dim=-1)).mean()


class PolicyGradient(Loss):
    """GRPO with a reference model."""

    def __init__(self, shape: tuple[int, int, int], vocabulary: int, level: str) -> None:
        super().__init__()
        half, width = torch.bfloat16, shape[-1]
        self.level = level
        self.x = self.wants(*shape, dtype=half)
        self.hold("reference_x", torch.empty(*shape, dtype=half))
        self.hold("chosen", torch.zeros(shape[:2], dtype=torch.long))
        self.hold("mask", torch.ones(shape[:2]))
        self.hold("advantages", torch.empty(shape[0], dtype=half))
        self.linears = nn.ModuleList(nn.Linear(width, vocabulary, bias=False, dtype=half) for _ in range(4))

    def forward(self) -> Tensor:
        logits = self.x @ self.linears[0].weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        own = log_probs.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = self.reference_x @ self.linears[1].weight.t()
            reference_log_probs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_log_probs.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)
        difference = own - own.detach()
        if self.level == "sequence":
            difference = ((difference * self.mask).sum(-1) / self.mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(difference)
        advantages = self.advantages.unsqueeze(1)
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        each = each + 0.1 * (torch.exp(reference - own) - (reference - own) - 1.0)
        return (each * self.mask).sum() / self.mask.sum().clamp(min=1.0)


class KullbackLeibler(Loss):
    """Its input is the log-softmax of a random tensor, whose graph lives on."""

    keeps_graph = True

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(tokens, vocabulary)
        self.hold("p", torch.empty(tokens, vocabulary))
        self.q: Tensor | None = None

    def forward(self) -> Tensor:
        if self.q is None:
            self.q = self.x.log_softmax(dim=-1)
        return F.kl_div(self.q, self.p, reduction="batchmean")


class TotalVariation(KullbackLeibler):
    """Half the sum of absolute differences; its input is the softmax of a random tensor."""

    def forward(self) -> Tensor:
        if self.q is None:
            self.q = self.x.softmax(dim=-1)
        return torch.sum(torch.abs(self.q - self.p) / 2.0) / self.q.shape[0]


class EarlierJensenShannon(KullbackLeibler):
    """The benchmark's first form; both inputs are log-softmaxes of random tensors."""

    def forward(self) -> Tensor:
        if self.q is None:
            self.q = self.x.log_softmax(dim=-1)
        log_middle = torch.log(0.5 * (torch.exp(self.q) + torch.exp(self.p)))
        each = (F.kl_div(log_middle, one, reduction="batchmean", log_target=True) for one in (self.q, self.p))
        return 0.5 * (next(each) + next(each))


class JensenShannon(Loss):
    """Its inputs are log-softmaxes of random tensors: the first one's graph lives on, and backward runs through it."""

    keeps_graph = True

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.x = self.wants(tokens, vocabulary)
        self.hold("log_p", torch.empty(tokens, vocabulary))
        self.log_q: Tensor | None = None

    def forward(self) -> Tensor:
        if self.log_q is None:
            self.log_q = self.x.log_softmax(dim=-1)
        p, q = self.log_p, self.log_q
        middle = torch.lerp(torch.exp(q), torch.exp(p), 0.5)
        loss = 0.5 * F.kl_div(torch.log(middle), p, reduction="none", log_target=True).sum(dim=-1)
        loss = loss + 0.5 * F.kl_div(torch.log(middle), q, reduction="none", log_target=True).sum(dim=-1)
        return (loss / q.shape[0]).sum()
