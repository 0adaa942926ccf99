"""A symbolic tape: tensors without data that remember shape, strides, dtype and who holds them.

Every storage's birth and death is one event, in program order. A death is what CPython's reference counting says it
is, so a forward written like the model's own code frees where the model frees. `backward` is autograd's engine in
small: nodes run by falling sequence number, saved tensors are released after use, gradients are summed where edges
meet. Nothing here imports torch. Order rules were learnt against traces of the real program (torch 2.13).

The tape in use lives in a context variable, so estimates may run in several threads.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import ref

from foretune.memory.kernels import Multiprocessors, reduction_workspaces
from foretune.memory.layout import Shape, broadcast_shape, contiguous_strides, iterator_strides, numel, view_strides
from foretune.memory.ready import ReadyQueue

if TYPE_CHECKING:
    from foretune.memory.autocast import Autocast

__all__ = [
    "FLOATS",
    "ITEM_BYTES",
    "DeviceRules",
    "Dtype",
    "Node",
    "Segment",
    "Storage",
    "Tape",
    "Tensor",
    "attach",
    "backward",
    "checkpoint",
    "current",
    "discard",
    "drop_graph",
    "function_node",
    "node_for",
    "promote",
    "recording",
]

Dtype = Literal["c64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool"]
ITEM_BYTES: dict[str, int] = {"c64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "u8": 1, "bool": 1}

FLOATS = frozenset({"f32", "f16", "bf16"})

Grads = list["Tensor | None"]
Formula = Callable[..., Sequence["Tensor | None"]]


class DeviceRules(NamedTuple):
    """What the kernels of a stack allocate beside their results. Bytes; each field is a rule of a StackProfile."""

    cublas_bytes: int = 8_519_680
    """Workspace of cuBLAS: one for each thread that multiplies (forward, autograd)."""
    cublaslt_bytes: int = 1 << 20
    """Workspace of cublasLt, used as soon as a linear has a bias: one for each thread."""
    sums_in_place: bool = True
    """The engine adds gradients in place where it may; under a dispatch mode (a trace) it never does."""
    rotary_by_product: bool = False
    """Rotary angles are a matrix product, which is the first to need cuBLAS (Transformers before 5.24)."""
    multiprocessors: Multiprocessors = Multiprocessors(108, 2048)
    """They decide into how many partial sums a long sum is divided."""
    softmax_backward_temporary: bool = True
    """Softmax backward first computes grad * output (CUDA)."""
    half_softmax_is_one_kernel: bool = True
    """softmax(fp16, dtype=fp32) makes no fp32 copy of its input (CUDA); bf16 does."""


class Segment(NamedTuple):
    """From `position` on, events belong to a part of the program, repeated for each layer where `layer` is given."""

    position: int
    kind: str
    layer: int | None
    phase: str


class Tape:
    """The recorder. `events` holds (slot, bytes) for a birth and (slot, -1) for a death."""

    def __init__(self, rules: DeviceRules) -> None:
        self.rules = rules
        self.events: list[tuple[int, int]] = []
        self.components: list[str] = []
        self.sizes: list[int] = []
        self.component = "weights"
        self.phase = "load"
        self.segments: list[Segment] = [Segment(0, "start", None, "load")]
        self.layer_ends: list[int] = []
        self.num_layers = 0
        """Layers that have run; nodes made behind the last of them belong to none."""
        self.next_sequence = 0
        self.is_grad_enabled = True
        self.is_training = True
        self.is_reentrant = False
        """Which form of checkpointing is torch's."""
        self.autocast: Autocast | None = None
        """The block that runs, unless an operation inside it has cast its operands already."""
        self.pack: Callable[[Tensor], Any] | None = None
        self.thread = "forward"
        self.workspaces: dict[tuple[str, str], Storage] = {}
        self.kernels_run: set[str] = set()

    def segment(self, kind: str, layer: int | None = None, position: int | None = None) -> None:
        """Begin a part of the program, here or at an earlier position of the last part."""
        last = self.segments[-1]
        if layer is None or (last.kind, last.layer, last.phase) != (kind, layer, self.phase):
            self.segments.append(Segment(len(self.events) if position is None else position, kind, layer, self.phase))

    def enter(self, phase: str) -> None:
        """Begin a phase; it starts a segment of its own."""
        self.phase = phase
        self.segment(phase)

    @contextmanager
    def counted_as(self, component: str) -> Iterator[None]:
        """Count what is born inside under a component of the estimate."""
        before, self.component = self.component, component
        try:
            yield
        finally:
            self.component = before

    def temporaries(self, *sizes: int) -> None:
        """Workspaces of one kernel: born in order, dead in reverse, as C++'s locals are."""
        held = [Storage(n) for n in sizes if n]
        while held:
            held.pop()

    def reduction(self, outputs: int, inputs: int, *, is_inner: bool) -> None:
        """Partial sums of one reduction, after its result."""
        device = self.rules.multiprocessors
        self.temporaries(*reduction_workspaces(outputs, inputs, is_inner=is_inner, device=device))

    def workspace(self, library: str, num_bytes: int) -> None:
        """A library's workspace: once for each thread, kept for good."""
        key = library, self.thread
        if num_bytes and key not in self.workspaces:
            with self.counted_as("workspaces"):
                self.workspaces[key] = Storage(num_bytes)


_TAPE: ContextVar[Tape] = ContextVar("foretune_tape")
current = _TAPE.get


@contextmanager
def recording(rules: DeviceRules) -> Iterator[Tape]:
    """Record on a new tape. Garbage collection waits: a death must come from a reference count alone."""
    tape = Tape(rules)
    token = _TAPE.set(tape)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield tape
    finally:
        if was_enabled:
            gc.enable()
        _TAPE.reset(token)


class Storage:
    """A birth and, when the last holder lets go, a death, on the tape it was born on. Empty ones leave no trace."""

    __slots__ = ("events", "slot")

    def __init__(self, num_bytes: int) -> None:
        tape = current()
        self.events = tape.events
        if num_bytes:
            self.slot = len(tape.components)
            tape.components.append(tape.component)
            tape.sizes.append(num_bytes)
            tape.events.append((self.slot, num_bytes))
        else:
            self.slot = -1

    def __del__(self) -> None:
        if self.slot >= 0:
            self.events.append((self.slot, -1))

    def count_as(self, component: str) -> None:
        """Count under another component from its birth on (a result that turned out to be a gradient)."""
        if self.slot >= 0:
            current().components[self.slot] = component


class Tensor:
    """Shape, strides (elements), dtype; a share in a storage; a place in the graph.

    Slots die in alphabetical order: `grad` before `storage`.
    """

    __slots__ = ("__weakref__", "dtype", "edge", "grad", "is_view", "needs_grad", "shape", "storage", "strides")

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        strides: Shape | None = None,
        storage: Storage | None = None,
        needs_grad: bool = False,
    ) -> None:
        self.shape, self.dtype, self.needs_grad = shape, dtype, needs_grad
        self.grad: Tensor | None = None
        self.edge: Any = None
        self.is_view = storage is not None
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.storage = Storage(numel(shape) * ITEM_BYTES[dtype]) if storage is None else storage

    def view_as(self, shape: Shape, strides: Shape) -> "Tensor":
        """Return a view that is not part of the graph."""
        return Tensor(shape, self.dtype, strides, self.storage)

    def detach(self) -> "Tensor":
        """Return the same data outside the graph."""
        return self.view_as(self.shape, self.strides)


# ------------------------------------------------------------------ the graph
class Node:
    """One step of backward: `formula(grads, node, *saved)` gives one gradient for each edge."""

    __slots__ = (
        "__weakref__",
        "component",
        "edges",
        "formula",
        "is_python",
        "layer",
        "num_outputs",
        "saved",
        "sequence",
    )

    def __init__(self, formula: Formula, inputs: Sequence[Tensor | None]) -> None:
        tape = current()
        self.formula, self.num_outputs = formula, 1
        self.is_python = False
        """An autograd.Function, which is given its gradients to keep: they die when it returns."""
        self.saved: list[Any] = []
        self.edges = [_edge(t) for t in inputs]
        self.sequence = tape.next_sequence = tape.next_sequence + 1
        self.component, self.layer = tape.component, len(tape.layer_ends)

    def save(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward in the order autograd unpacks them (by name, inputs before results)."""
        pack = current().pack
        for t in tensors:
            if t is not None:
                self.saved.append(pack(t) if pack else t)

    def run(self, grads: Grads) -> list["Tensor | None"]:
        """Unpack what was saved, compute, and let the unpacked go in reverse. Without any gradient none is computed."""
        saved = [s.unpack() if type(s) is _Holder else s for s in self.saved]
        out: Sequence[Tensor | None] = [None] * len(self.edges)
        if any(grad is not None for grad in grads):
            out = self.formula(grads, self, *saved)
        while saved:
            saved.pop()
        return list(out)

    def release(self) -> None:
        """Let go of what was saved, in order."""
        for i in range(len(self.saved)):
            self.saved[i] = None
        self.saved = []

    def forget(self) -> None:
        """Let go of what the formula knows; a graph may be dropped twice."""
        if hasattr(self, "formula"):
            del self.formula

    def __del__(self) -> None:
        if self.edges:
            _let_go(self)


class _Accumulate:
    """The end of an edge: a leaf that keeps its gradient."""

    __slots__ = ("__weakref__", "component", "edges", "layer", "leaf", "num_outputs", "sequence")
    is_python = False

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self.edges, self.num_outputs = leaf, (), 1
        self.sequence, self.component, self.layer = 1 << 62, "gradients", len(current().layer_ends)

    def run(self, grads: Grads) -> list[Tensor | None]:
        grad, leaf = grads.pop(), self.leaf
        if leaf.grad is None and grad is not None:
            is_sole = getrefcount(grad) <= 2  # one that somebody else holds is copied (accumulate_grad.h)
            leaf.grad = grad if is_sole and grad.strides == leaf.strides else Tensor(leaf.shape, leaf.dtype)
            if not leaf.is_view:  # the input of a reentrant checkpoint hands its gradient on
                leaf.grad.storage.count_as("gradients")
        return []  # a second gradient is added in place

    def release(self) -> None:
        """Nothing is saved."""

    def forget(self) -> None:
        """Let go of the leaf."""
        if hasattr(self, "leaf"):
            del self.leaf


def _edge(t: Tensor | None) -> tuple[Any, int, Shape, str] | None:
    """Return (node, output number, shape, dtype), or None where no gradient is wanted."""
    if t is None or not t.needs_grad:
        return None
    edge = t.edge
    if type(edge) is tuple:
        return edge[0], edge[1], t.shape, t.dtype
    node = edge() if edge else None
    if node is None:
        node = _Accumulate(t)
        t.edge = ref(node)
    return node, 0, t.shape, t.dtype


def node_for(formula: Formula, *inputs: Tensor | None) -> Node | None:
    """Return a node if any input wants a gradient."""
    if current().is_grad_enabled:
        for t in inputs:
            if t is not None and t.needs_grad:
                return Node(formula, inputs)
    return None


def function_node(formula: Formula, *inputs: Tensor | None) -> Node | None:
    """Return the node of an autograd.Function, if any input wants a gradient."""
    node = node_for(formula, *inputs)
    if node:
        node.is_python = True
    return node


def attach(node: Node | None, out: Tensor, number: int = 0) -> Tensor:
    """Make `out` the result number `number` of a node."""
    if node is not None:
        out.needs_grad, out.edge = True, (node, number)
    return out


def promote(*dtypes: str) -> str:
    """Return the dtype that torch promotes to (floats of the tape only)."""
    return "f32" if "f32" in dtypes or {"f16", "bf16"} <= set(dtypes) else dtypes[0]


def like_iterator(*operands: Tensor) -> Tensor:
    """Allocate the result of an elementwise kernel over operands."""
    shape = operands[0].shape
    for t in operands[1:]:
        shape = broadcast_shape(shape, t.shape)
    return Tensor(shape, promote(*[t.dtype for t in operands]), iterator_strides(shape, operands))


# ------------------------------------------------------------------ the engine
def backward(loss: Tensor) -> None:
    """Run the graph behind `loss` once, as autograd's engine does (torch/csrc/autograd/engine.cpp)."""
    tape = current()
    tape.is_grad_enabled, tape.thread = False, "backward"
    seed = Tensor(loss.shape, loss.dtype)
    _run_graph(loss.edge[0], seed)
    tape.is_grad_enabled, tape.thread = True, "forward"
    tape.segment("backward end")
    del seed


def _run_graph(root: Node, seed: Tensor) -> None:
    """Run a root with its gradient and all that follows; inside a node of another graph too."""
    tape = current()
    counts = _dependencies(root)
    waiting: dict[Any, Grads] = {}
    ready = ReadyQueue((root.sequence, root, [seed]))
    before = tape.component
    while ready.tasks:
        _, node, grads = ready.pop()
        while tape.layer_ends and node.sequence <= tape.layer_ends[-1]:
            tape.layer_ends.pop()
            tape.segment("backward", len(tape.layer_ends))
        tape.component = node.component
        out = node.run(grads)
        while grads and node.is_python:  # a tuple's items die from the last
            grads.pop()
        for i, edge in enumerate(node.edges):
            out[i] = _fit(out, i, edge)
        while grads:
            grads.pop(0)
        node.release()
        for i, edge in enumerate(node.edges):
            if edge is not None:
                new, out[i] = out[i], None
                _collect(waiting, edge, new)
                new = None
                counts[edge[0]] -= 1
                if not counts[edge[0]]:
                    ready.push((edge[0].sequence, edge[0], waiting.pop(edge[0])))
        node = edge = None
    tape.component = before


def _dependencies(root: Node) -> dict[Any, int]:
    """Count for each node how many gradients it will be given."""
    counts: dict[Any, int] = {}
    stack: list[Any] = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge:
                if edge[0] not in counts:
                    counts[edge[0]] = 0
                    stack.append(edge[0])
                counts[edge[0]] += 1
    return counts


def _collect(waiting: dict[Any, Grads], edge: tuple[Any, int, Shape, str], new: Tensor | None) -> None:
    """Put a gradient into its receiver's buffer; a second one is added, in place where the engine may."""
    target, number = edge[0], edge[1]
    buffer = waiting.get(target)
    if buffer is None:
        buffer = waiting[target] = [None] * target.num_outputs
    held = buffer[number]
    if held is None:
        buffer[number] = new
    elif new is not None:
        in_place = current().rules.sums_in_place and not held.is_view
        # `held`, the buffer and getrefcount's argument hold the tensor; the tensor and the argument hold its storage.
        if not (in_place and getrefcount(held) <= 3 and getrefcount(held.storage) <= 2):
            buffer[number] = like_iterator(held, new)


def _fit(out: Grads, i: int, edge: tuple[Any, int, Shape, str] | None) -> Tensor | None:
    """Take a gradient and make it match its receiver: sum over broadcast dimensions, then cast (validate_outputs)."""
    grad, out[i] = out[i], None
    if edge is None or grad is None:
        return None
    shape, dtype = edge[2], edge[3]
    if grad.shape != shape:
        if numel(grad.shape) != numel(shape):
            outputs, inputs = numel(shape), numel(grad.shape) // numel(shape)
            is_inner = not shape or shape[-1] != grad.shape[-1]
            total = Tensor(shape, grad.dtype)
            total.is_view = len(grad.shape) > len(shape)  # at::sum_to drops leading dimensions by a view
            current().reduction(outputs, inputs, is_inner=is_inner)
            grad = total if len(grad.shape) == len(shape) else total.detach()  # sum_to: leading dimensions by a view
            del total
        else:
            strides = view_strides(grad.shape, grad.strides, shape)
            grad = Tensor(shape, grad.dtype) if strides is None else grad.view_as(shape, strides)
    if grad.dtype != dtype:
        grad = Tensor(shape, dtype, iterator_strides(shape, [grad]))
    return grad


def drop_graph(edge: tuple[Any, int] | None) -> None:
    """Let go of a finished graph from the loss's edge down."""
    if edge is not None:
        _let_go(edge[0])


def _let_go(node: Any) -> None:
    """Delete a node and what only it leads to, without recursion: a node lets go of what it holds, its last edge is
    followed first (deleteNode in torch/csrc/autograd/function.cpp). Outside the layers, what dies with a node is a part
    of the node's layer."""
    tape = _TAPE.get(None)
    if tape is not None and tape.segments[-1].layer is not None:
        tape = None
    todo = []
    while True:
        layer, position = node.layer, len(tape.events) if tape else 0
        node.release()
        edges, node.edges = [edge for edge in node.edges if edge], ()
        while edges:
            target = edges.pop(0)[0]
            if getrefcount(target) <= 2:  # the name and the argument: nobody else leads there
                todo.append(target)
            del target
        node.forget()
        if tape and len(tape.events) > position:
            tape.segment("graph", layer if layer < tape.num_layers else None, position)
        if not todo:
            break
        node = todo.pop()
    if tape and tape.segments[-1].kind == "graph":
        tape.segment("graph end")


def discard(t: Tensor) -> None:
    """Let go of a tensor that nothing else holds, and of a graph behind it that no backward will run.

    As torch does (deleteNode in torch/csrc/autograd/function.cpp): the graph goes first; a node's saved variables go
    before what it alone leads to, its last edge first.
    """
    if getrefcount(t) > 2 or type(t.edge) is not tuple:  # ours and getrefcount's argument
        return
    todo, t.edge = [t.edge], None
    while todo:
        node = todo.pop()[0]
        if getrefcount(node) > 2:
            node = None
            continue
        node.release()
        edges, node.edges = list(node.edges), ()
        node = None
        while edges:
            following = edges.pop(0)
            if following is not None and getrefcount(following[0]) <= 2:
                todo.append(following)
            following = None


# ------------------------------------------------------------------ activation checkpointing
class _Stop(Exception):
    """All that was saved has been recomputed."""


class _Holder:
    """What a checkpointed node keeps instead of a tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: "_Frame") -> None:
        self.frame = frame
        self.value: Tensor | None = None

    def unpack(self) -> Tensor | None:
        self.frame.recompute()
        value, self.value = self.value, None
        return value


class _Frame:
    """A checkpointed call. Slots die in alphabetical order: what `run` closes over, then the inputs."""

    __slots__ = ("autocast", "component", "done", "holders", "position", "run", "saved_inputs")

    def __init__(self, run: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> None:
        self.run, self.saved_inputs, self.component = run, inputs, current().component
        self.autocast = current().autocast  # the recomputation runs under it, outside the caller's block
        self.holders: list[Any] = []
        self.done, self.position = False, 0

    def keep(self, t: Tensor) -> _Holder:
        holder = _Holder(self)
        self.holders.append(ref(holder))
        return holder

    def fill(self, t: Tensor) -> Tensor:
        t = t.detach()
        holder = self.holders[self.position]()
        self.position += 1
        if holder is not None:
            holder.value = t
        if self.position == len(self.holders):
            raise _Stop
        return t

    def recompute(self) -> None:
        if self.done:
            return
        tape = current()
        tape.is_grad_enabled, tape.pack, self.done = True, self.fill, True
        component, tape.component = tape.component, self.component
        try:  # contextlib.suppress would change the order in which the unwound frames die
            with self.autocast or nullcontext():
                self.run(*self.saved_inputs)
        except _Stop:
            pass
        tape.is_grad_enabled, tape.pack, tape.component = False, None, component


def checkpoint(run: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """Run now, keep only the inputs, run again when backward asks for the first saved tensor.

    torch's non-reentrant form (torch/utils/checkpoint.py), which stops the recomputation at the last saved tensor.
    """
    tape = current()
    if tape.is_reentrant:
        return _checkpoint_reentrant(run, *inputs)
    frame = _Frame(run, inputs)
    tape.pack = frame.keep
    try:
        return run(*inputs)
    finally:
        tape.pack = None


def _checkpoint_reentrant(run: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """Run without a graph; in backward run again with one and go through it at once (CheckpointFunction)."""
    tape = current()
    autocast, component = tape.autocast, tape.component
    is_given = [t is not None for t in inputs]

    def formula(grads: Grads, node: Node, *tensors: Tensor) -> Grads:
        tape, waiting = current(), list(tensors)
        detached_inputs = tuple([_detached(waiting.pop(0)) if given else None for given in is_given])
        before, tape.component, tape.is_grad_enabled = tape.component, component, True
        with autocast or nullcontext():
            outputs = run(*detached_inputs)
        tape.component, tape.is_grad_enabled = before, False
        seed = grads[0]
        assert seed is not None
        edge = _first(outputs).edge
        assert edge is not None
        _run_graph(edge[0], seed)
        drop_graph(edge)
        return [t.grad if t is not None else None for t in detached_inputs]

    node = function_node(formula, *inputs)
    if node:
        node.save(*inputs)
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    outputs = run(*inputs)
    tape.is_grad_enabled = before
    attach(node, _first(outputs))
    return outputs


def _first(outputs: Any) -> Tensor:
    """The hidden states; what a layer returns beside them is None here (`qualify` refuses the rest)."""
    if not isinstance(outputs, tuple):
        assert isinstance(outputs, Tensor)
        return outputs
    first, *rest = outputs
    assert not any(rest)
    assert isinstance(first, Tensor)
    return first


def _detached(t: Tensor) -> Tensor:
    """A leaf of a graph of its own."""
    leaf = t.detach()
    leaf.needs_grad = t.needs_grad
    return leaf
