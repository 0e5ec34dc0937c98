"""Capture of a step that broke: what it was computed from, kept in the run directory to be replayed."""

from __future__ import annotations

import logging
import math
import random
import re
import shlex
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradtrack._version import __version__
from gradtrack.analyzers.tools.hooks import Unshared, is_unheard
from gradtrack.capture.files import (
    TENSORS,
    Batch,
    CaptureValues,
    Encoder,
    Forward,
    is_plain,
    remove_remains,
    write_capture,
)
from gradtrack.capture.operations import numpy_state, switches
from gradtrack.config import GradientConfig
from gradtrack.gradients.collected import Gradients, SharedGradients, on_device
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.reports import IssueType, StepReport
from gradtrack.support.interrupts import Changes, pass_on
from gradtrack.support.names import file_part
from gradtrack.support.rank import num_ranks, process_rank
from gradtrack.support.regular_files import MEBIBYTE

_MOST_CALLS: Final = 64
_MOST_HELD: Final = 64 * MEBIBYTE
"""The size of the inputs of earlier micro-batches that are kept for a step; those of the last one always are."""
_LARGE_BUFFER: Final = 64 * MEBIBYTE
"""A buffer above this size is a table: it is not copied before it was seen to change."""
_SPARE: Final = 64 * MEBIBYTE
"""The space that a capture leaves on a disk."""
_NEVER: Final = 2**63
_logger = logging.getLogger("gradtrack")


class Training(Protocol):
    """What a capture is made of: a model, and its optimizers and steps."""

    model: nn.Module
    name: str
    config: GradientConfig
    step_count: int

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the optimizers that step the model."""


class Call:
    """A forward pass that has begun: its inputs, by reference, and the state that it began with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.versions = [_version(one) for one in self.tensors]
        self.rng: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        self.rng["numpy"] = numpy_state.read()
        for device in devices:
            place = () if device.type == "mps" else (device,)  # there is one
            self.rng[str(device)] = torch.get_device_module(device).get_rng_state(*place)
        kinds = {"cpu", *(device.type for device in devices)}
        self.autocast = {one: str(torch.get_autocast_dtype(one)) for one in kinds if torch.is_autocast_enabled(one)}

    @property
    def num_bytes(self) -> int:
        """Return the size of the inputs."""
        return sum(one.numel() * one.element_size() for one in self.tensors if one.layout is torch.strided)

    @property
    def changed(self) -> bool:
        """Whether an input was written to since."""
        return self.versions != [_version(one) for one in self.tensors]


class _Hook(Unshared):
    """The forward hook of one module. Code that is compiled does not see it, nor do copies of the module."""

    def __init__(self, module: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        self._module, self._call, self._failed = weakref.ref(module), call, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass on a call from which a backward pass may follow; one within a backward pass computes it again."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (
            module is self._module()
            and not self._failed
            and torch._C._current_graph_task_id() == -1
            and not is_unheard()
        ):
            try:
                self._call(args, kwargs)
            except Exception as fault:
                pass_on(fault)
                self._failed = True
                _logger.warning("forward passes are not noted for replays any more: %s", fault)


class Forwards:
    """The forward passes of a model since its last step, in order, and its buffers before the first of them.

    Nothing is copied but the states of the random numbers, and the buffers that forward passes are seen to change.
    """

    def __init__(
        self, training: Training, *, with_buffers: bool = False, due: Callable[[int], bool] = lambda _: True
    ) -> None:
        self._training, self._with_buffers, self._due = training, with_buffers, due
        self.calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self.groups: list[tuple[object, int]] = []
        """The batches of the micro-batches before the last, each with the number of forward passes up to it."""
        self.num_calls = 0
        self._step = -1
        self._buffers: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._changing: set[str] | None = None
        """The names of the buffers that forward passes write to; None before the first one."""
        self._changes = Changes()
        model = training.model
        while type(model).__name__ == "DistributedDataParallel":  # which changes buffers before the pass
            model = model.module  # type: ignore[assignment]
        self.is_seen = getattr(model, "_compiled_call_impl", None) is None
        """Whether the model calls hooks: one that `model.compile()` has compiled in place does not."""
        self._devices = sorted({param.device for param in model.parameters() if param.device.type != "cpu"}, key=str)
        if self.is_seen:
            hook = _Hook(model, self._begin)
            self._changes.hook(model.register_forward_pre_hook, hook, prepend=True, with_kwargs=True)

    def of_step(self, step: int) -> bool:
        """Whether the forward passes are those that the gradients of a step come from."""
        return self._step == step - 1

    def end_batch(self, batch: object) -> None:
        """Note that the backward pass of a micro-batch is over."""
        self._forget_earlier()
        self.groups.append((batch, self.num_calls))

    def buffer_before(self, name: str, now: Tensor) -> tuple[Tensor, bool]:
        """Return a buffer as it was before the first forward pass, and whether that is known."""
        there, version, copy = self._buffers.get(name, (now, _version(now), None))
        if _version(there) == version:
            return there, True
        return (now, False) if copy is None else (copy, True)

    def close(self) -> None:
        """Remove the hook, and forget the forward passes."""
        self._changes.undo()
        self._step = -1
        self._forget_earlier()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget_earlier()
        if not self.num_calls and self._with_buffers:
            self._note_buffers()
        self.num_calls += 1
        if not self._due(self._step + 1):
            return
        self.calls.append(Call(args, kwargs, self._devices))
        held = sum(call.num_bytes for call in self.calls) if len(self.calls) > 1 else 0
        while held > _MOST_HELD and len(self.calls) > 1:
            held -= self.calls.popleft().num_bytes

    def _forget_earlier(self) -> None:
        """Forget what belongs to a step that was made."""
        if self._step != self._training.step_count:
            self._step = self._training.step_count
            self.calls.clear()
            self.groups.clear()
            self.num_calls = 0

    def _note_buffers(self) -> None:
        if self._buffers:
            self._changing = self._changing or set()
            self._changing |= {name for name, (one, version, _) in self._buffers.items() if _version(one) != version}
        changing, found = self._changing, dict[str, tuple[Tensor, int, Tensor | None]]()
        for name, one in unwrapped(self._training.model).named_buffers():
            copied = name in changing if changing is not None else one.numel() * one.element_size() <= _LARGE_BUFFER
            found[name] = one, _version(one), one.detach().clone() if copied else None
        self._buffers = found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Capture:
    """Keeps the first steps that break, each in a directory of its own, which is written whole or not at all.

    Nothing that goes wrong with it reaches the training: it is said in a note of the report, and in the log.
    """

    def __init__(self, training: Training, place: Callable[[], tuple[Path, str] | None]) -> None:
        self._training, self._place = training, place
        self._rank, self._left = process_rank(), training.config.capture_max_steps
        self._forwards = Forwards(training, with_buffers=True)

    def due(self, step: int) -> bool:
        """Whether the numbers of a step are needed before the optimizer steps."""
        return self._left > 0

    def next_step(self, step: int) -> int:
        """Return the next step that has to be seen whatever its numbers are: none, since a fault is seen anyway."""
        return _NEVER

    def end_batch(self, batch: object) -> None:
        """Note that the backward pass of a micro-batch is over."""
        if self._left > 0:
            self._forwards.end_batch(batch)

    def measured(self, grads: Gradients, batch: object, data: Any) -> None:
        """Let rank 0 tell the others its directory; whether a step breaks is known once it is judged."""
        if self._left <= 0:
            return
        if isinstance(grads, SharedGradients) and (grads.ranks.sharded.any() or on_device(grads.tensors)):
            text = "steps are not captured: ranks share the parameters, or add up on a device. Set capture: off."
            data.notes = [*data.notes, text]
            _logger.warning("%s", text)
            self.close()
        elif self._rank == 0 and num_ranks() > 1:
            self._place()

    def judged(self, report: StepReport, data: Any, finite: bool) -> None:
        """Capture the step if it is one of those that were asked for, and add a note to its report that says so."""
        reason = self._reason(data, finite) if self._left > 0 else ""
        if not reason:
            return
        self._left -= 1
        try:
            text = self._capture(data, reason)
        except Exception as fault:
            pass_on(fault)
            text = f"step {data.step} was not captured: {fault}. See to that, or set capture: off."
        data.notes = [*data.notes, text]
        _logger.warning("%s", text)
        if self._left <= 0:
            self.close()

    def close(self) -> None:
        """Remove the hook from the model."""
        self._left = 0
        self._forwards.close()

    def _reason(self, data: Any, finite: bool) -> str:
        loss_is_finite = data.loss is None or math.isfinite(data.loss)
        opened = {issue.issue_type for issue in data.opened}
        # The scale that a loss scaler begins with is too large on purpose: that alone is no fault.
        if not loss_is_finite or (not finite and (data.scale is None or IssueType.NUMERICAL in opened)):
            return "nonfinite"
        if self._training.config.capture != "spike":
            return ""
        judged = data.spike is not None and data.spike["action"] != "listed"
        return "spike" if judged or IssueType.EXPLODING in opened else ""

    def _capture(self, data: Any, reason: str) -> str:
        config, model = self._training.config, unwrapped(self._training.model)
        place, failed = self._place(), f"step {data.step} was not captured:"
        if place is None:
            self._left = 0
            return f"{failed} this rank has no directory of rank 0. Set run_dir on every rank."
        directory, run_id = place
        head = f"capture-{file_part(data.source)}-" if data.source else "capture-"
        tail = f"-rank{self._rank}" if self._rank else ""
        is_own = re.compile(rf"{head}[0-9]+{tail}")
        remove_remains(directory, is_own)
        earlier = [path for path in directory.glob("capture-*") if is_own.fullmatch(path.name)]
        if len(earlier) >= config.capture_max_steps:
            self._left = 0
            return f"{failed} {directory} has {len(earlier)}. Raise capture_max_steps."
        values, tensors = self._contents(model, data, reason)
        values.run_id = run_id
        size = sum(one.numel() * one.element_size() for one in tensors.values())
        used = sum(found.stat().st_size for path in earlier for found in path.glob(TENSORS))
        if used + size > config.capture_max_bytes:
            self._left = 0
            most = f"the captures may have {config.capture_max_bytes:,} in all"
            return f"{failed} it has {size:,} bytes, and {most}. Raise capture_max_bytes."
        if (free := shutil.disk_usage(directory).free) < size + _SPARE:
            return f"{failed} it has {size:,} bytes. Free some in {directory}: it has {free:,}."
        with torch.no_grad():
            path = write_capture(directory, f"{head}{data.step:05d}{tail}", tensors, values)
        lacking = f" It lacks something: {'; '.join(values.notes)}." if values.notes else ""
        command = f"`gradtrack replay-step {shlex.quote(str(path))} train.py:make`"
        what = "where make is a function in your train.py that returns the model, or the model and loss(model, batch)"
        return f"captured: {path} is this step. {command} computes it again, {what}.{lacking}"

    def _contents(self, model: nn.Module, data: Any, reason: str) -> tuple[CaptureValues, dict[str, Tensor]]:
        params = dict(model.named_parameters())
        if any("FullySharded" in type(one).__name__ for one in model.modules()) or not all(
            map(is_plain, params.values())
        ):
            self._left = 0
            raise ValueError("its parameters are spread over ranks, or of a type that safetensors files do not have")
        encoder, notes, forwards = Encoder(), list[str](), self._forwards
        encoder.tensors |= {f"parameter.{name}": param.detach() for name, param in params.items()}
        unknown, buffers = [], []
        for name, buffer in model.named_buffers():
            before, is_known = forwards.buffer_before(name, buffer)
            if is_plain(before):
                encoder.tensors[f"buffer.{name}"] = before.detach()
                buffers.append(name)
            unknown += [] if is_known else [name]
        if unknown:
            notes.append(f"{', '.join(unknown)} may have been changed by the forward pass")
        batches = self._batches(encoder, data.step, data.batch, notes)
        optimizers = None
        if self._training.config.capture_optimizer:
            states = [one.state_dict() for one in self._training.optimizers]
            optimizers = encoder.encode(states, "optimizer")
        if encoder.lost:
            notes.append(f"values of the types {', '.join(encoder.lost)} were left out")
        fields = {**data.fields(), "step": data.step, "epoch": data.epoch, "source": data.source, "time": data.time}
        if data.rows is not None:
            fields["parameters"] = data.parameters()
        scale = None if data.scale is None or data.scale.value is None else float(data.scale.value)
        loss = data.loss if data.loss is None or math.isfinite(data.loss) else repr(data.loss)
        values = CaptureValues(
            step=data.step,
            source=data.source,
            rank=self._rank,
            ranks=num_ranks(),
            time=data.time,
            reason=reason,
            model=type(model).__name__,
            loss=loss,
            scale=scale,
            device=str(next(iter(params.values())).device),
            evaluating=[name for name, module in model.named_modules() if not module.training],
            frozen=[name for name, param in params.items() if not param.requires_grad],
            parameters=list(params),
            buffers=buffers,
            batches=batches,
            optimizers=optimizers,
            switches=switches(),
            notes=notes,
            versions={"torch": torch.__version__, "gradtrack": __version__},
            report=StepReport.model_validate(fields).model_dump(mode="json", exclude={"batch"}),
        )
        return values, encoder.tensors

    def _batches(self, encoder: Encoder, step: int, batch: object, notes: list[str]) -> list[Batch]:
        """Encode the micro-batches of the step, with the forward passes of each."""
        forwards = self._forwards
        calls = list(forwards.calls) if forwards.of_step(step) else []
        first = forwards.num_calls - len(calls) if calls else 0
        if first:
            notes.append(f"the first {first} forward passes of the step were not kept")
        if not calls:
            notes.append(
                "no forward pass of the model was seen, so random numbers and inputs are missing; "
                + (
                    "call manager.attach(model, optimizer) before the first one"
                    if forwards.is_seen
                    else "model.compile() hides them, torch.compile(model) does not"
                )
            )
        if any(call.changed for call in calls):
            notes.append("inputs were written to after the forward pass")
        groups = list(forwards.groups)
        if batch is not None or not groups or groups[-1][1] < forwards.num_calls:
            groups.append((batch, forwards.num_calls))
        found, start = [], 0
        for index, (passed, end) in enumerate(groups):
            encoded = encoder.encode(passed, f"batch{index}")
            kept = calls[max(start - first, 0) : max(end - first, 0)]
            encoded_calls = [_encoded(encoder, f"forward{index}.{place}", call) for place, call in enumerate(kept)]
            found.append(Batch(batch=encoded, forwards=encoded_calls))
            start = end
        return found


def _encoded(encoder: Encoder, name: str, call: Call) -> Forward:
    return Forward(
        inputs=encoder.encode((call.args, call.kwargs), name),
        rng=encoder.encode(call.rng, f"{name}.rng"),
        autocast=call.autocast,
        changed=call.changed,
    )
