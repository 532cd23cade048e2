"""Fusion as XLA:TPU does it: which nodes become one kernel, and what each kernel reads and writes.

Walking consumers before producers, a producer goes into all its consumers (duplicated when there are several) unless one
of them cannot take it. Dots and convolutions take elementwise producers and epilogues; reductions are roots, and
nothing but free nodes crosses a broadcast. Then kernels over one space that share operands become one with several results.
"""

from __future__ import annotations

import dataclasses

from emutpu.backend.pjrt import Unimplemented

from .graph import Graph, Node, Spec
from .rates import Rates
from .simplify import link, reached
from .tables import ELEMENTWISE, FREE, MOVEMENT, TRANSPARENT
from .work import dot_shape, tree_reduction

__all__ = ["PRODUCTS", "Kernel", "fuse", "kind_of"]

_ROW_SOFTMAX = 8192  # longest row of scores that the compiler keeps inside the kernel of their product
_LONG_ROW = 2048  # scores of a row that are computed again rather than kept, however deep their product is
_CHAINED_BYTES = 16 << 20  # largest result that stays inside a kernel of two products
_MAX_LEAVES = 8
_MAX_MEMBERS = 256  # a producer is not duplicated into kernels that are this long already


@dataclasses.dataclass(slots=True, eq=False)
class Kernel:
    """One launch. ``roots`` are the values it writes, ``members`` what it computes (a member may be in several kernels).

    ``kind`` is loop, reduce, dot, convolution, or the name of an operation that stands alone; ``key`` the member that
    gives the kernel its kind.
    """

    roots: list[Node]
    members: dict[int, Node]
    kind: str
    key: Node
    order: int
    reads: list[Node] = dataclasses.field(default_factory=list)
    softmax: bool = False  # a product whose rows are normalised in place
    chained: bool = False  # it computes the product that makes its operand too
    rows: bool = False  # a whole softmax over rows
    again: Node | None = None  # what it reads or computes once for the maximum and once for the rest
    repeated: tuple[Node, ...] = ()  # operands that it reads again for that

    def add(self, node: Node) -> None:
        self.members[id(node)] = node

    def find_reads(self) -> list[Node]:
        """What the kernel reads from memory, each value once. Scalars and splats are immediates."""
        found: dict[int, Node] = {}
        members = self.members
        for member in members.values():
            for source in member.inputs:
                key = id(source)
                if key not in members and key not in found and source.value is None:
                    found[key] = source
        return list(found.values())

    def __repr__(self) -> str:
        return f"<{self.kind} {'+'.join(node.op for node in self.members.values())} -> {self.roots}>"


def kind_of(node: Node) -> str:
    """The kind of kernel that ``node`` makes as a root."""
    op = node.op
    if op in ("dot_general", "dot"):
        return "dot"
    if op in ("reduce", "vector_product"):
        return "reduce"
    if op in ELEMENTWISE or op in MOVEMENT or op in FREE:
        return "loop"
    return op


def _takes(kernel: Kernel, producer: Node, consumer: Node) -> bool:
    """Whether ``kernel`` can compute ``producer`` inside, where ``consumer`` is the member that reads it."""
    op = producer.op
    if kind_of(producer) != "loop":
        return False
    if consumer.op == "broadcast_in_dim" and consumer.spec.size > producer.spec.size and op not in _THROUGH:
        return False
    if kernel.kind in ("loop", "reduce"):
        return True
    if kernel.kind in ("dot", "convolution"):
        return op in ELEMENTWISE or op in TRANSPARENT or op in FREE
    if kernel.kind == "dynamic_update_slice":
        return op in FREE or op in ELEMENTWISE
    return op in ("constant", "iota", "broadcast_in_dim") and producer.spec.size <= 1


PRODUCTS = frozenset({"dot", "convolution"})
_THROUGH = FREE | {"convert", "reshape"}


def _narrow(kernels: list[Kernel], outputs: set[int]) -> list[Kernel]:
    """Store as bf16 what only products in one bf16 pass read: they would round it anyway."""
    for kernel in kernels:
        for root in kernel.roots:
            if root.spec.dtype != "f32" or id(root) in outputs or not root.users or kernel.kind not in ("dot", "loop"):
                continue
            if all(user.op == "dot_general" and user.attrs[0].passes == 1 for user in root.users):
                root.spec = Spec.of(root.spec.shape, "bf16")
    return kernels


class _Fuser:
    def __init__(self, graph: Graph, rates: Rates) -> None:
        self.graph = graph
        self.chains, self.recomputing = rates.chains, rates.recomputes_scores
        self.rows = _row_softmaxes(graph)
        self.outputs = {id(node) for node in graph.outputs}
        self.homes: dict[int, list[Kernel]] = {}
        self.kernels: list[Kernel] = []
        self.leaves = _full_leaves(graph)
        self.softmaxes = _softmaxes(graph, rates.side if rates.recomputes_scores else 0)
        self.pinned = {id(exponential) for exponential, _, _ in self.softmaxes} | _shared_after_shift(graph)

    def run(self) -> list[Kernel]:
        nodes = self.graph.nodes
        for position in range(len(nodes) - 1, -1, -1):
            node = nodes[position]
            if node.op in ("parameter", "result") or (node.value is not None and id(node) not in self.outputs):
                continue
            if id(node) not in self.outputs and id(node) not in self.pinned:
                hosts = self._hosts(node)
                if hosts:
                    self.homes[id(node)] = hosts
                    for kernel in hosts:
                        kernel.add(node)
                    continue
            kernel = Kernel([node], {id(node): node}, kind_of(node), node, position)
            self.kernels.append(kernel)
            self.homes[id(node)] = [kernel]
        self.kernels.reverse()
        merged = _merge_epilogues(self.kernels, self.outputs)
        merged = _merge_softmaxes(merged, self.softmaxes)
        merged = _merge_row_softmaxes(merged, self.rows, recomputing=self.recomputing)
        merged = _merge_chains(merged, self.outputs, narrow=self.chains)
        for kernel in merged:
            kernel.reads = kernel.find_reads()
        return _narrow(_Joiner(merged, self.outputs).run(), self.outputs)

    def _hosts(self, node: Node) -> list[Kernel]:
        """The kernels that take ``node``; none where it has to be written to memory."""
        found: dict[int, Kernel] = {}
        products = 0
        for user in node.users:
            for kernel in self.homes.get(id(user), ()):
                if not _takes(kernel, node, user):
                    return []
                if id(kernel) not in found:
                    found[id(kernel)] = kernel
                    products += kernel.kind in ("dot", "convolution")
            if user.op == "result" or id(user) not in self.homes:
                return []
        if node.op in FREE:
            return list(found.values())
        leaves = self.leaves.get(id(node), ())
        if len(leaves) > 1 and (products or (len(found) > 1 and any(kind_of(leaf) in PRODUCTS for leaf in leaves))):
            return []  # it is the epilogue of the product among its leaves
        if len(found) > 1 and (
            self._wasteful(node, len(found), leaves) or any(len(k.members) > _MAX_MEMBERS for k in found.values())
        ):
            return []
        return list(found.values())

    def _wasteful(self, node: Node, hosts: int, leaves: tuple[Node, ...]) -> bool:
        """Whether computing ``node`` in every host reads more than writing it once and reading it back."""
        recomputed = hosts * sum(leaf.spec.bytes for leaf in leaves)
        return recomputed >= (hosts + 1) * node.spec.bytes + sum(leaf.spec.bytes for leaf in leaves)


def _full_leaves(graph: Graph) -> dict[int, tuple[Node, ...]]:
    """For loop nodes: the values at least as large as themselves that their chain of loops starts from."""
    found: dict[int, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if kind_of(node) != "loop":
            continue
        leaves: dict[int, Node] = {}
        for source in node.inputs:
            if source.value is not None:
                continue
            chain = found.get(id(source))
            for leaf in (source,) if chain is None else chain:
                if leaf.spec.size >= node.spec.size and len(leaves) < _MAX_LEAVES:
                    leaves[id(leaf)] = leaf
        found[id(node)] = tuple(leaves.values())
    return found


# --------------------------------------------------------------------------------------------------- softmax of a product


def _softmaxes(graph: Graph, recomputing: int) -> list[tuple[Node, Node, Node]]:
    """(exponential, row maximum, product) of each softmax over the rows of a batched product.

    ``recomputing`` is the side of an MXU whose kernel would compute the product twice, 0 otherwise: it does so only where
    that is cheap, at a depth below half the side, or rows are long.
    """
    found = []
    for node in graph.nodes:
        if node.op != "exponential" or node.inputs[0].op != "subtract":
            continue
        scores, shift = node.inputs[0].inputs
        maximum = _skip(shift)
        if maximum.op != "reduce" or maximum.attrs[1] != "maximum" or maximum.inputs[0] is not scores:
            continue
        product = _product_behind(scores)
        row = maximum.inputs[0].spec.size // max(maximum.spec.size, 1)
        if product is not None and row < _LONG_ROW and recomputing and 2 * dot_shape(product)[2] >= recomputing:
            continue
        if product is not None and row <= _ROW_SOFTMAX and any(user.op == "reduce" for user in node.users):
            found.append((node, maximum, product))
    return found


def _converted(node: Node) -> Node:
    while node.op == "convert":
        node = node.inputs[0]
    return node


def _skip(node: Node) -> Node:
    while node.op in ("broadcast_in_dim", "reshape", "maximum", "optimization_barrier", "convert") and node.inputs:
        node = node.inputs[-1] if node.op == "maximum" else node.inputs[0]
    return node


def _product_behind(node: Node) -> Node | None:
    """The batched product whose elementwise epilogue ``node`` is."""
    size = node.spec.size
    for _ in range(16):
        if node.op == "dot_general":
            return node if node.attrs[0].lhs_batch else None
        if node.op not in ELEMENTWISE and node.op != "reshape":
            return None
        wide = [
            source
            for source in node.inputs
            if source.spec.size == size and source.op not in FREE and source.op != "parameter"
        ]
        if not wide:
            return None
        node = wide[0]
    return None


def _merge_softmaxes(kernels: list[Kernel], softmaxes: list[tuple[Node, Node, Node]]) -> list[Kernel]:
    """The product, its maximum, exponential and sum in one kernel that writes exponential and sum."""
    gone: set[int] = set()
    owner = {id(root): kernel for kernel in kernels for root in kernel.roots}
    for exponential, maximum, product in softmaxes:
        parts = [owner.get(id(node)) for node in (product, exponential, maximum)]
        host = next((k for k in kernels if id(product) in k.members and k.kind == "dot" and id(k) not in gone), None)
        if host is None or parts[1] is None or parts[2] is None:
            continue
        sums = [owner[id(u)] for u in exponential.users if u.op == "reduce" and id(u) in owner]
        host.roots = [exponential]
        for part in (parts[2], parts[1], *sums):
            if part is host or id(part) in gone:
                continue
            gone.add(id(part))
            host.members.update(part.members)
            host.order = max(host.order, part.order)
            host.roots += [root for root in part.roots if root is not exponential and root is not maximum]
        if any(id(user) not in host.members for user in maximum.users if user.op != "result"):
            host.roots.append(maximum)
        host.softmax = True
    return [kernel for kernel in kernels if id(kernel) not in gone]


def _row_softmaxes(graph: Graph) -> list[tuple[Node, Node, Node]]:
    """(maximum, sum, quotient) of each softmax over the last dimension of an array of three or more dimensions."""
    found = []
    for node in graph.nodes:
        if node.op != "divide" or len(node.spec.shape) < 3:
            continue
        exponential, total = _converted(node.inputs[0]), _skip(node.inputs[1])
        if exponential.op != "exponential" or total.op != "reduce" or _converted(total.inputs[0]) is not exponential:
            continue
        if exponential.inputs[0].op != "subtract":
            continue
        maximum = _skip(exponential.inputs[0].inputs[1])
        row = node.spec.shape[-1]
        if maximum.op == "reduce" and maximum.attrs[0] == (len(node.spec.shape) - 1,) and row <= _ROW_SOFTMAX:
            found.append((maximum, total, node))
    return found


def _merge_row_softmaxes(
    kernels: list[Kernel], softmaxes: list[tuple[Node, Node, Node]], *, recomputing: bool
) -> list[Kernel]:
    """Maximum, sum and quotient in one kernel, where each is a kernel of its own."""
    gone: set[int] = set()
    owner = {id(root): kernel for kernel in kernels for root in kernel.roots}
    for nodes in softmaxes:
        parts = [owner.get(id(node)) for node in nodes]
        first, second, last = parts
        if first is None or second is None or last is None or last.kind != "loop" or first.softmax or second.softmax:
            continue
        if len(first.roots) > 1 or len(second.roots) > 1 or first.kind != "reduce":
            continue
        inside = first.members.keys() | second.members.keys() | last.members.keys()
        if any(id(user) not in inside for node in nodes[:2] for user in node.users):
            continue
        for part in (first, second):
            last.members.update(part.members)
            gone.add(id(part))
        last.rows = True
        scores = nodes[0].inputs[0]
        last.again = scores if id(scores) not in last.members or recomputing else None
    return [kernel for kernel in kernels if id(kernel) not in gone]


def _shift_rows(graph: Graph) -> bool:
    """``x - max(x)`` over the last of three or more dimensions is one operation, with a window over the row, and reads x
    twice. A whole softmax and one behind a product are found on their own. Tells whether there is any.
    """
    whole = {id(maximum) for maximum, _, _ in _row_softmaxes(graph)}
    changed = False
    for node in graph.nodes:
        if node.op != "subtract" or len(node.spec.shape) < 3 or node.spec.shape[-1] > _ROW_SOFTMAX:
            continue
        scores, maximum = node.inputs[0], _skip(node.inputs[1])
        if maximum.op != "reduce" or maximum.attrs != ((len(node.spec.shape) - 1,), "maximum"):
            continue
        if maximum.inputs[0] is not scores or id(maximum) in whole or _product_behind(scores) is not None:
            continue
        node.op, node.inputs, changed = "row_shift", [scores], True
    if changed:
        _drop_unreached(graph)
    return changed


def _shared_after_shift(graph: Graph) -> set[int]:
    """The first value after a shift of rows that several operations read: it is written, not computed in each."""
    found = set()
    for node in graph.nodes:
        if node.op == "row_shift":
            while len(node.users) == 1 and node.users[0].op in ELEMENTWISE:
                node = node.users[0]
            if len(node.users) > 1:
                found.add(id(node))
    return found


def _drop_unreached(graph: Graph) -> None:
    alive = reached(graph.nodes, graph.outputs)
    graph.nodes[:] = [node for node in graph.nodes if id(node) in alive or node.op == "parameter"]
    link(graph)


def _merge_online_softmaxes(graph: Graph, side: int) -> None:
    """Where probabilities in f32 go straight into a batched product, rows of at least ``side`` scores, the compiler calls a
    kernel of its own that normalises while it multiplies: one node then stands for both.
    """
    merged = False
    for product in graph.nodes:
        if product.op != "dot_general" or not product.attrs[0].lhs_batch:
            continue
        quotient = product.inputs[0]
        if quotient.op != "divide" or quotient.spec.dtype != "f32" or len(quotient.users) > 1:
            continue
        exponential, total = quotient.inputs[0], _skip(quotient.inputs[1])
        if exponential.op != "exponential" or exponential.inputs[0].op != "subtract" or total.op != "reduce":
            continue
        scores, maximum = exponential.inputs[0].inputs[0], _skip(exponential.inputs[0].inputs[1])
        if maximum.op != "reduce" or maximum.inputs[0] is not scores or total.inputs[0] is not exponential:
            continue
        row = scores.spec.size // max(maximum.spec.size, 1)
        if _product_behind(scores) is None or row < side or len(exponential.users) > 2 or len(maximum.users) > 1:
            continue
        alone = Node("dot_general", list(product.inputs), product.spec, product.attrs)
        product.op, product.inputs, product.attrs = "online_softmax", [scores, product.inputs[1]], (alone,)
        product.name = "online_softmax"
        merged = True
    if merged:
        _drop_unreached(graph)


# --------------------------------------------------------------------------------------------------- epilogues


def _merge_epilogues(kernels: list[Kernel], outputs: set[int]) -> list[Kernel]:
    """Join a loop into the dot or convolution whose value it alone reads, the latest one where it reads several."""
    readers: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        for read in kernel.find_reads():
            readers.setdefault(id(read), []).append(kernel)
    gone: set[int] = set()
    for kernel in reversed(kernels):
        if kernel.kind not in PRODUCTS and not sums_windows(kernel):
            continue
        while True:
            root = kernel.roots[0]
            consumers = readers.get(id(root), [])
            if len(consumers) != 1 or id(root) in outputs or id(consumers[0]) in gone:
                break
            other = consumers[0]
            if other.kind != "loop" or other.roots[0].spec.size != root.spec.size or not _pointwise(other):
                break
            kernel.members.update(other.members)
            kernel.roots = other.roots
            kernel.order = other.order
            gone.add(id(other))
            for read in other.find_reads():
                readers[id(read)] = [kernel if k is other else k for k in readers[id(read)]]
    return [kernel for kernel in kernels if id(kernel) not in gone]


def sums_windows(kernel: Kernel) -> bool:
    """Whether it adds up windows, which the compiler does with a convolution."""
    return kernel.kind == "reduce_window" and bool(kernel.key.attrs[1] == "add") and not tree_reduction(kernel.key)


def _merge_chains(kernels: list[Kernel], outputs: set[int], *, narrow: bool) -> list[Kernel]:
    """Join a product into the kernel of the one other product that reads its activated result, where that is small;
    ``narrow``: products of bf16 operands, too.
    """
    products = [k for k in kernels if k.kind == "dot" and not k.softmax and not k.key.attrs[0].lhs_batch]
    owner = {id(member): kernel for kernel in products for member in kernel.members.values()}
    gone: set[int] = set()
    for kernel in products:
        root = kernel.roots[0]
        if len(kernel.roots) > 1 or root is not kernel.key or id(root) in outputs or root.spec.bytes > _CHAINED_BYTES:
            continue
        if not narrow and kernel.key.inputs[0].spec.dtype != "f32":
            continue
        other = owner.get(id(root.users[0])) if root.users else None
        if other is None or other is kernel or other.chained or any(id(u) not in other.members for u in root.users):
            continue
        if not _activated(root, other) or any(_elsewhere(user, other, kernels) for user in root.users):
            continue
        other.members.update(kernel.members)
        other.chained = True
        gone.add(id(kernel))
    return [kernel for kernel in kernels if id(kernel) not in gone]


def _elsewhere(node: Node, kernel: Kernel, kernels: list[Kernel]) -> bool:
    """Whether another kernel computes ``node`` too (and so reads what it reads)."""
    return any(id(node) in other.members for other in kernels if other is not kernel)


def _activated(root: Node, kernel: Kernel) -> bool:
    return any(
        m.op in ELEMENTWISE and m.op != "convert" and m.spec.size == root.spec.size and root in m.inputs
        for m in kernel.members.values()
    )


def _pointwise(kernel: Kernel) -> bool:
    return all(m.op in ELEMENTWISE or m.op in TRANSPARENT or m.op in FREE for m in kernel.members.values())


# --------------------------------------------------------------------------------------------------- several results


class _Joiner:
    """Joins kernels over one space that share a large operand, or of which one reads the other's whole result."""

    def __init__(self, kernels: list[Kernel], outputs: set[int]) -> None:
        self.outputs = outputs
        self.kernels = _schedule(kernels)
        self.producer: dict[int, int] = {}
        for index, kernel in enumerate(self.kernels):
            for root in kernel.roots:
                self.producer[id(root)] = index
        self.group = list(range(len(self.kernels)))
        self.bits = [1 << index for index in range(len(self.kernels))]
        self.reach: list[int] = []
        for index in range(len(self.kernels)):
            mask = 0
            for source in self._sources(index):
                mask |= self.reach[source] | (1 << source)
            self.reach.append(mask)

    def _sources(self, index: int) -> set[int]:
        found = set()
        for read in self.kernels[index].reads:
            source = self.producer.get(id(_origin(read)))
            if source is not None and source != index:
                found.add(source)
        return found

    def run(self) -> list[Kernel]:
        readers: dict[int, list[int]] = {}
        for index, kernel in enumerate(self.kernels):
            if kernel.kind not in _JOINT:
                continue
            space = _space(kernel)
            candidates = [
                self.group[s]
                for r in kernel.reads
                if r.spec.size >= space and (s := self.producer.get(id(r))) is not None
            ]
            for read in kernel.reads:
                if read.spec.size >= space:
                    candidates += [self._home(i) for i in readers.get(id(read), [])]
            host = next((c for c in candidates if c != index and self._joinable(c, index, space)), None)
            if host is not None:
                self._join(host, index)
                index = host
            for read in self.kernels[index].reads:
                readers.setdefault(id(read), []).append(index)
        kept = [kernel for index, kernel in enumerate(self.kernels) if self.group[index] == index]
        for kernel in kept:
            kernel.reads = kernel.find_reads()
        self._keep_inside(kept)
        return _schedule(kept)

    def _keep_inside(self, kernels: list[Kernel]) -> None:
        """A product that only the reductions in its own kernel read is not written."""
        read = {id(_origin(value)) for kernel in kernels for value in kernel.reads} | self.outputs
        for kernel in kernels:
            if kernel.kind in PRODUCTS and len(kernel.roots) > 1:
                kernel.roots = [root for root in kernel.roots if id(root) in read] or kernel.roots[-1:]

    def _home(self, index: int) -> int:
        while self.group[index] != index:
            index = self.group[index]
        return index

    def _joinable(self, host: int, index: int, space: int) -> bool:
        first, second = self.kernels[host], self.kernels[index]
        if _space(first) != space or first.softmax or self.bits[index] & self.reach[host]:
            return False
        if first.kind in PRODUCTS:
            if second.kind != "reduce" or not any(r is s for r in first.roots for s in second.reads):
                return False
        elif first.kind not in _JOINT:
            return False
        return all(self._ready(host, read, space) for read in second.reads)

    def _ready(self, host: int, read: Node, space: int) -> bool:
        """Whether ``read`` is there when ``host`` runs; a reduced value of ``host`` is complete only when it ends."""
        source = self.producer.get(id(_origin(read)))
        if source is None:
            return True
        source = self._home(source)
        return read.spec.size >= space if source == host else not self.reach[source] & self.bits[host]

    def _join(self, host: int, index: int) -> None:
        first, second = self.kernels[host], self.kernels[index]
        first.members.update(second.members)
        first.roots = first.roots + second.roots
        if second.kind == "reduce" and first.kind == "loop":
            first.kind, first.key = "reduce", second.key
        first.order = max(first.order, second.order)
        self.group[index] = host
        own = self.bits[host] | self.bits[index]
        needs = (self.reach[host] | self.reach[index]) & ~own
        self.bits[host] = own
        if needs & ~self.reach[host]:  # whatever waits for one of the two waits for all that they need
            for later, reach in enumerate(self.reach):
                if reach & own:
                    self.reach[later] = reach | own | needs
        self.reach[host] = needs
        first.reads = first.find_reads()


_JOINT = frozenset({"loop", "reduce"})


def _space(kernel: Kernel) -> int:
    """Elements a kernel iterates over: a reduction's operand, otherwise its result."""
    return max(root.inputs[0].spec.size if root.op == "reduce" else root.spec.size for root in kernel.roots)


def _origin(node: Node) -> Node:
    return node.inputs[0] if node.op == "result" else node


def _schedule(kernels: list[Kernel]) -> list[Kernel]:
    """Topological order that follows the program where it can. Raises Unimplemented for kernels that wait for each other."""
    producer = {id(root): kernel for kernel in kernels for root in kernel.roots}
    begun: set[int] = set()
    done: set[int] = set()
    ordered: list[Kernel] = []
    for kernel in sorted(kernels, key=lambda k: k.order):
        stack = [kernel]
        while stack:
            top = stack[-1]
            if id(top) in done:
                stack.pop()
                continue
            waiting = []
            for read in top.reads:
                other = producer.get(id(_origin(read)))
                if other is not None and other is not top and id(other) not in done:
                    waiting.append(other)
            if waiting and id(top) in begun:
                raise Unimplemented("the model joined kernels that wait for each other")
            begun.add(id(top))
            if waiting:
                stack.extend(waiting)
                continue
            done.add(id(top))
            ordered.append(top)
            stack.pop()
    return ordered


def fuse(graph: Graph, rates: Rates) -> list[Kernel]:
    """The kernels of a simplified graph, in the order in which they run, fused as the compiler does it for a chip."""
    _merge_online_softmaxes(graph, rates.side)
    shifted = _shift_rows(graph)
    kernels = _Fuser(graph, rates).run()
    for kernel in kernels:
        if shifted or kernel.again is not None:
            kernel.repeated = _repeated(kernel)
    return kernels


def _repeated(kernel: Kernel) -> tuple[Node, ...]:
    """Operands that are read once for the maximum of their rows, and again."""
    members = kernel.members
    again = [m.inputs[0] for m in members.values() if m.op == "row_shift" and id(m.inputs[0]) not in members]
    if kernel.again is not None:
        large = max(kernel.reads, key=lambda value: value.spec.padded)
        again.append(large if id(kernel.again) in members else kernel.again)
    return tuple(again)
