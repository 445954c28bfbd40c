"""Every error this project raises on purpose; each message says what to do about it."""

from __future__ import annotations


class VramGuardError(Exception):
    """Base class: ``except VramGuardError`` catches everything vram_guard raises on purpose.

    Example:
        >>> try:
        ...     Budget.of("24 parsecs")
        ... except VramGuardError as error:
        ...     print(type(error).__name__)
        InvalidInputError
    """


class InvalidInputError(VramGuardError, ValueError):
    """A value handed in by the user cannot be used (batch size 0, "-1GiB", an unknown GPU name, ...)."""


class NoDeviceError(VramGuardError, RuntimeError):
    """No GPU can be read here and neither a budget nor a GPU name was given.

    Attributes:
        problem: why, without the advice that is for callers from Python; "" where the message has no such advice.
    """

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem


class DeviceQueryError(VramGuardError, RuntimeError):
    """The GPU driver is there but cannot be asked (for instance driver and library versions differ)."""


class UnsupportedStepError(VramGuardError, RuntimeError):
    """The training step cannot be run symbolically at all (FSDP, DeepSpeed, lazy modules, no operations, ...)."""


class UnsupportedOperatorError(UnsupportedStepError):
    """One operator of the step can be run neither symbolically nor on stand-in data; names it and its line."""


class DeviceMismatchError(UnsupportedStepError):
    """An operator of the step is given tensors of the GPU and of host memory at once, which CUDA refuses."""


class LostCopyError(UnsupportedStepError):
    """The copy of the process that looked at the training died or hung; says where, as far as that is known."""


class EndedCopyError(LostCopyError):
    """A copy was ended from outside, as where host memory is full, and so was a second one: its answer is not known."""


class LostRankError(VramGuardError, RuntimeError):
    """A process of the training ended while the ranks planned: none of them goes on."""


class DoesNotFitError(VramGuardError, RuntimeError):
    """``mode="strict"``, or nothing that is allowed makes the step fit; names the nearest miss in bytes."""


class UnsupportedTechniqueError(VramGuardError, RuntimeError):
    """A technique cannot be used with this model, optimizer or step; names what prevents it."""


class MissingLibraryError(VramGuardError, ImportError):
    """A technique is applied by a library that is not installed; says which to install."""


class RecoveryFailedError(VramGuardError, RuntimeError):
    """Memory ran out while training and the training cannot go on from there; says what state the weights are in."""


class RecomputationError(VramGuardError, RuntimeError):
    """A checkpointed block computed something else when its forward ran again: its gradients would be wrong.

    It is raised before an optimizer has stepped with them.
    """


class LossChangedError(VramGuardError, RuntimeError):
    """A batch's loss is made in another way than those that micro-batches were proven for: they would not add up.

    It is raised before an optimizer has stepped with the batch's gradients.

    Attributes:
        reason: what is other about it.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
