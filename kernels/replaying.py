"""Repeats what an operator did on a GPU, without the Python that decided it.

The shapes of an operator's arguments decide which kernels it launches, with which options, and what it allocates. The
CPU often takes longer to decide that than the GPU takes for the work, and does so for every block and every step. So
the second call with arguments of the same shapes is recorded as a list of allocations, launches and calls of torch, and
later calls only go through that list. What the operator allocates for itself alone then lies in one piece of memory,
which it holds to the end of the call. An operator that does what such a list cannot hold decides at every call.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .contract import ceil_div

DEVICES: tuple[str, ...] = ("cuda",)  # on a CPU the work itself takes longer
MOST = 1024  # recordings that are kept
LONGEST = 256  # steps; torch's own path, which few take on a GPU, has more for each token
STREAM, SCRATCH = -2, -1  # slots of a recording
_ALIGNMENT = 512  # bytes, as of torch's own allocations
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip
_known: dict[Any, Optional[Callable[..., Any]]] = {}  # by operator and arguments; None after the first call
_lock = threading.Lock()  # to change `_known`, so that one thread records at a time


class _Thread(threading.local):
    recorder: Optional["Recorder"] = None  # of the call that this thread records


_thread = _Thread()


class Part(NamedTuple):
    """A tensor that begins `offset` bytes behind the start of a slot's. Without a dtype, it is the slot's itself."""

    slot: int
    offset: int = 0
    dtype: Optional[torch.dtype] = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    def of(self, slots: list[Any]) -> Tensor:
        base = slots[self.slot]
        if self.dtype is None:
            return base
        if base.dtype != self.dtype:  # the scratch memory
            base = base.view(self.dtype)
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset // self.dtype.itemsize)


def mapped(change: Callable[[Part], Any], value: Any) -> Any:
    """Change the parts in `value`."""
    kind = type(value)
    if kind is Part:
        return change(value)
    return kind([mapped(change, one) for one in value]) if kind in (list, tuple) else value


def filled(value: Any, slots: list[Any]) -> Any:
    """Put tensors in the places of the parts in `value`."""
    return mapped(lambda part: part.of(slots), value)


def found(kind: Any, value: Any) -> Iterator[Any]:
    """Find all of a kind in `value`, and in the lists and tuples inside."""
    if isinstance(value, kind):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from found(kind, one)


class Slot(NamedTuple):
    """Where and how the numbers of a tensor lie in memory, from address `start` to `end`."""

    start: int
    end: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def room(self) -> int:
        """The bytes that an allocation takes for it."""
        return ceil_div(self.end - self.start, _ALIGNMENT) * _ALIGNMENT


class Step(NamedTuple):
    """A step of a call: `act(parts)` returns what to do with the slots."""

    act: Callable[[Any], Callable[[list[Any]], None]]
    parts: Any
    fills: Optional[int] = None  # the slot of the tensor that it makes
    allocates: bool = False


class Block(NamedTuple):
    """Memory for so many bytes, which the steps from `first` to `last` use."""

    first: int
    last: int
    size: int


def arranged(blocks: dict[int, Block]) -> tuple[dict[int, int], int]:
    """Return where each block begins in one memory for all, and the memory's size, in bytes. Blocks overlap only if
    they are not in use at the same time."""
    places: dict[int, int] = {}
    for slot, block in sorted(blocks.items(), key=lambda item: -item[1].size):
        start = 0
        for place, other in sorted((place, blocks[one]) for one, place in places.items()):
            if other.first <= block.last and block.first <= other.last and place < start + block.size:
                start = max(start, place + other.size)
        places[slot] = start
    return places, max((place + blocks[slot].size for slot, place in places.items()), default=0)


class Recording:
    """A call to repeat: its steps take slots that hold the arguments, what the steps make, the stream, and the memory
    that temporary tensors share."""

    def __init__(self, steps: list[Step], values: Sequence[Any], slots: list[Any], results: Any):
        self.more = len(slots) - len(values) + 2
        self.tensor = next(index for index, value in enumerate(values) if isinstance(value, Tensor))
        self.results = results
        kept = {part.slot for part in found(Part, results)}
        made = {step.fills: number for number, step in enumerate(steps) if step.fills is not None}
        last = made | {part.slot: number for number, step in enumerate(steps) for part in found(Part, step.parts)}
        temporary = {slot: number for slot, number in made.items() if slot not in kept}
        shared = {
            slot: Block(number, last[slot], slots[slot].room)
            for slot, number in temporary.items()
            if steps[number].allocates
        }
        places, self.scratch = arranged(shared)

        def moved(part: Part) -> Part:
            if part.slot not in places:
                return part
            how = part[2:] if part.dtype else slots[part.slot][2:]
            return Part(SCRATCH, places[part.slot] + part.offset, *how)

        self.steps = []
        for number, step in enumerate(steps):
            if step.fills not in places:
                self.steps.append(step.act(mapped(moved, step.parts)))
            if done := [slot for slot in temporary if last[slot] == number and slot not in places]:
                self.steps.append(partial(self.free, done))  # memory as soon as without a recording

    def __call__(self, *values: Any) -> Any:
        slots = [*values, *[None] * self.more]
        device = values[self.tensor].device
        with torch.cuda.device_of(values[self.tensor]):
            if device.type == "cuda":
                slots[STREAM] = torch._C._cuda_getCurrentRawStream(device.index)
            if self.scratch:
                slots[SCRATCH] = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            for step in self.steps:
                step(slots)
        return filled(self.results, slots)

    @staticmethod
    def free(done: list[int], slots: list[Any]) -> None:
        for slot in done:
            slots[slot] = None


class Recorder(TorchDispatchMode):
    """Notes what a call with the arguments `values` does while it is entered."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        self.steps: list[Step] = []
        self.slots: list[Optional[Slot]] = []
        self.problem, self.pauses, self.launches = "", False, False
        self.device = next(value.device for value in values if isinstance(value, Tensor))
        for value in values:
            self.add(value)
        places = sorted(slot[:2] for slot in self.slots if slot)
        if any(end > start for (_, end), (start, _) in zip(places, places[1:])):
            self.problem = "arguments share memory"

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let other threads compile: while a mode of another kind is on, torch 2.7 compiles nothing in any thread."""
        return True

    def __enter__(self) -> "Recorder":
        super().__enter__()
        _thread.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.pauses:
            self.note(self.call, func, args, kwargs or {}, out)
        return out

    def note(self, how: Callable[..., Any], *what: Any) -> Any:
        """Return what `how` makes of `what`. If it fails there is no recording, but the recorded call goes on."""
        if len(self.steps) >= LONGEST:
            self.problem = "too many steps"
        if not self.problem:
            try:
                return how(*what)
            except Exception as error:
                self.problem = repr(error)

    def add(self, value: Any) -> int:
        """Give `value` a slot."""
        slot = None
        if isinstance(value, Tensor) and value.numel():
            start, last = value.data_ptr(), sum((n - 1) * s for n, s in zip(value.shape, value.stride()))
            end = start + (last + 1) * value.element_size()
            slot = Slot(start, end, value.dtype, tuple(value.shape), value.stride())
        self.slots.append(slot)
        return len(self.slots) - 1

    def allocate(self, value: Tensor) -> int:
        """Note that a tensor like `value` was made, and return its slot."""
        make = partial(torch.empty_strided, tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)
        number = self.add(value)

        def act(_: Any) -> Callable[[list[Any]], None]:
            def run(slots: list[Any]) -> None:
                slots[number] = make()

            return run

        self.steps.append(Step(act, (), number, allocates=value.numel() > 0))
        return number

    def parts(self, value: Any) -> Any:
        """Put parts of slots in the places of the tensors in `value`."""
        if type(value) in (list, tuple):
            return type(value)([self.parts(one) for one in value])
        if not isinstance(value, Tensor):
            return value
        if not value.numel():
            return Part(self.allocate(value))
        address, how = value.data_ptr(), (value.dtype, tuple(value.shape), value.stride())
        # The newest first, since memory that was freed may have been given out again.
        for number in range(len(self.slots) - 1, -1, -1):
            slot = self.slots[number]
            if slot and slot.start <= address < slot.end:
                if value.dtype != slot.dtype:
                    raise ValueError(f"a view of {slot.dtype} as {value.dtype}")
                if (address, *how) == (slot.start, *slot[2:]):
                    return Part(number)
                return Part(number, address - slot.start, *how)
        raise ValueError("a tensor that is neither an argument nor made of one")

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note a call of torch."""
        if func.namespace != "aten":
            raise ValueError(str(func))
        if any(one.device != self.device for one in found(Tensor, (out,))):
            raise ValueError(f"{func} gives a tensor on another device, where the host may read it")
        if func in _EMPTY:
            if out.numel():
                self.allocate(out)
            return
        names, given = tuple(kwargs), (tuple(args), tuple(kwargs.values()))
        changes = func._schema.is_mutable
        memory = {one.untyped_storage().data_ptr() for one in found(Tensor, given)}
        results = [one.untyped_storage().data_ptr() for one in found(Tensor, (out,))]
        if not changes and memory.issuperset(results) and (results or func.is_view):
            return  # views
        if not isinstance(out, Tensor):
            raise ValueError(f"{func} returns no tensor")
        parts = self.parts(given)
        made = None if changes else self.add(out)

        def act(parts: Any) -> Callable[[list[Any]], None]:
            def run(slots: list[Any]) -> None:
                args, options = filled(parts, slots)
                result = func(*args, **dict(zip(names, options)))
                if made is not None:
                    slots[made] = result

            return run

        self.steps.append(Step(act, parts, made))

    def launch(self, kernel: Any, compiled: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note a launch of one of Triton's kernels."""
        given = dict(zip(kernel.arg_names, args)) | kwargs
        values = [given.pop(name) for name in kernel.arg_names]
        if compiled is None:  # by the interpreter, which takes tensors
            parts, interpret = self.parts(values), partial(kernel[grid], **given)

            def act(parts: Any) -> Callable[[list[Any]], None]:
                return lambda slots: interpret(*filled(parts, slots))

        else:
            parts = [self.parts(value) if not isinstance(value, Tensor) or value.numel() else 0 for value in values]
            if any(type(part) in (list, tuple) and any(found(Part, part)) for part in parts):
                raise ValueError("tensors in a tuple")
            start = compiled[(*grid, 1, 1)[:3]]

            def act(parts: Any) -> Callable[[list[Any]], None]:
                addresses = [(index, part[:2]) for index, part in enumerate(parts) if type(part) is Part]

                def run(slots: list[Any]) -> None:
                    arguments = parts.copy()
                    for index, (slot, offset) in addresses:
                        arguments[index] = slots[slot].data_ptr() + offset
                    start(*arguments, stream=slots[STREAM])

                return run

        self.launches = True
        self.steps.append(Step(act, parts))

    def recording(self, values: Sequence[Any], results: Any) -> "Recording":
        """Return the recording of a call with `values` that gave `results`."""
        if not self.launches:
            raise ValueError("no launch of a kernel: torch's own path would not be faster")
        if not isinstance(results, Tensor) and type(results) is not tuple:
            raise ValueError(f"results in a {type(results).__name__}")
        parts = self.parts(results)
        return Recording(self.steps, values, self.slots, parts)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch one of Triton's kernels, and note it if this thread records."""
    run, recorder = partial(kernel[grid], *args, **options), _thread.recorder
    if recorder is None:
        return run()
    recorder.pauses = True  # the interpreter calls torch
    try:
        compiled = run()
    finally:
        recorder.pauses = False
    recorder.note(recorder.launch, kernel, compiled, grid, args, options)
    return compiled


def record(run: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, Optional[Recording]]:
    """Return what `run` returns for `values`, and its recording if it can be recorded."""
    with Recorder(values) as recorder:
        results = run(*values)
    return results, recorder.note(recorder.recording, values, results)


def repeating(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let `run`, which on a GPU makes new tensors or fills given ones, decide only twice what it does for the same
    shapes."""

    def repeat(*values: Any) -> Any:
        if _thread.recorder is not None:  # another operator's, which notes what this one does
            return run(*values)
        key = (
            run,
            *(
                (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16)
                if isinstance(value, Tensor)
                else value
                for value in values
            ),
        )
        if known := _known.get(key):
            return known(*values)
        if not _lock.acquire(blocking=False):
            return run(*values)
        try:
            if key in _known:
                results, recording = record(run, values)
                _known[key] = recording or run
                return results
            if len(_known) >= MOST:
                _known.pop(next(iter(_known)))
            _known[key] = None
        finally:
            _lock.release()
        return run(*values)

    return repeat


def forget() -> None:
    """Forget all recordings, after a change of what operators depend on beside their arguments: the table of launches,
    what Triton does at a launch or how it compiles (`triton.knobs`)."""
    with _lock:
        _known.clear()
