"""DraftTree: which draft token sees which, for a whole batch of requests.

A draft tree is one list of parents per request: entry i is the parent of draft token i, an index into the same list, and -1 marks a
root. A token sees itself and its ancestors; what the cached prefix adds is not the tree's business.

    tree = DraftTree.from_lists([[-1, 0, 0, 1], [-1, 0]])

        0                 ■ □ □ □          0           ■ □
        ├─ 1              ■ ■ □ □          └─ 1        ■ ■
        │  └─ 3           ■ ■ □ ■
        └─ 2              ■ □ ■ □

The object lives on the host and needs NumPy alone. ``plan`` takes it as it is; parents that already lie on the GPU go to ``plan``
as an array instead.
"""

import numpy as np

from . import drawing
from .kernels.config import MAX_DRAFT_TOKENS


class DraftTree:
    """The draft trees of a batch, stored flat: the nodes of request r are rows ``qo_indptr[r] .. qo_indptr[r + 1]``.

    Several roots, nodes in any order (a parent may come after its children) and requests with no node are all legal. The object and its
    arrays are read-only; two trees are equal when their parents and their request borders are.

    Args:
        parents: ``[num_nodes]`` integers, -1 for a root, else the parent's index within the same request.
        qo_indptr: ``[batch_size + 1]`` integers, 0 first, never falling, ``num_nodes`` last.

    Raises:
        TypeError: not host integers.
        ValueError: wrong rank, borders that do not fit, a cycle, more than ``MAX_DRAFT_TOKENS`` nodes in one request.
        IndexError: a parent outside its request.
    """

    __slots__ = ("_parents", "_depth", "_visibility", "_qo_indptr")

    def __init__(self, parents, qo_indptr):
        parents = _host_integers(parents, "parents")
        qo_indptr = _host_integers(qo_indptr, "qo_indptr")
        _check_borders(qo_indptr, len(parents))
        _check_parents(parents, qo_indptr)
        visibility = _visibility_bits(parents, qo_indptr)
        # A row sees itself and one node per level above it, so the count of its bits is its depth plus one.
        depth = np.bitwise_count(visibility).sum(axis=1, dtype=np.int32) - np.int32(1)
        self._parents = _frozen(parents, np.int32)
        self._qo_indptr = _frozen(qo_indptr, np.int32)
        self._visibility = _frozen(visibility, np.uint32)
        self._depth = _frozen(depth, np.int32)

    @classmethod
    def from_lists(cls, lists):
        """Builds the trees from one list of parents per request: ``[[-1, 0, 0, 1], [-1, 0]]``; ``[]`` is a request with no draft token."""
        rows = []
        for request, row in enumerate(_requests(lists, "[[-1, 0, 0, 1], [-1, 0]]")):
            rows.append(_host_integers(row, f"request {request}: its list of parents"))
        return cls(_concatenate(rows, np.int64), _borders([len(row) for row in rows]))

    @classmethod
    def from_parents(cls, parents, qo_indptr):
        """Builds the trees from flat parents and the request borders, the two arrays that the class is made of."""
        return cls(parents, qo_indptr)

    @classmethod
    def from_visibility(cls, masks):
        """Finds the trees behind one square bool mask per request, ``mask[i, j]``: row i sees draft token j.

        A mask that no tree makes (a row that does not see itself, or sees a token but not that token's ancestors) is a ValueError: a
        DraftTree is always a tree. The kernels obey any mask; pass such a one to ``plan`` itself.
        """
        parents = [_parents_of_mask(mask, request) for request, mask in enumerate(_requests(masks, "[mask_of_request_0, ...]"))]
        return cls(_concatenate(parents, np.int64), _borders([len(row) for row in parents]))

    @classmethod
    def chain(cls, lengths):
        """Builds one chain per request (token i sees tokens 0 .. i): ordinary speculative decoding, ``lengths[r]`` tokens each."""
        lengths = _host_integers(lengths, "lengths")
        if (lengths < 0).any():
            request = int(np.argmax(lengths < 0))
            raise ValueError(f"request {request}: expected a chain of 0 or more tokens, got {lengths[request]}")
        qo_indptr = _borders(lengths)
        return cls(np.arange(qo_indptr[-1]) - np.repeat(qo_indptr[:-1], lengths) - 1, qo_indptr)

    @property
    def parents(self):
        """int32 ``[num_nodes]``: the parent's index within its own request, -1 for a root."""
        return self._parents

    @property
    def depth(self):
        """int32 ``[num_nodes]``: edges to the root above, 0 for a root. Position of the token: prefix length + depth."""
        return self._depth

    @property
    def visibility(self):
        """uint32 ``[num_nodes, words]``: bit ``j % 32`` of word ``j // 32`` is set when the row sees draft token j of its request.

        ``words`` is what the largest request needs, at least 1; the bits past the end of a request are 0.
        """
        return self._visibility

    @property
    def qo_indptr(self):
        """int32 ``[batch_size + 1]``: the first row of each request, ``num_nodes`` last."""
        return self._qo_indptr

    @property
    def num_nodes(self):
        """Draft tokens of all requests together, roots included."""
        return len(self._parents)

    @property
    def batch_size(self):
        """Number of requests, those with no draft token included."""
        return len(self._qo_indptr) - 1

    def rows(self, request):
        """The slice of request ``request`` in the flat arrays: ``tree.depth[tree.rows(3)]``."""
        if not -self.batch_size <= request < self.batch_size:
            raise IndexError(f"expected a request of 0 .. {self.batch_size - 1} (batch_size {self.batch_size}), got {request}")
        request %= self.batch_size
        return slice(int(self._qo_indptr[request]), int(self._qo_indptr[request + 1]))

    def mask(self, request=0):
        """The visibility of one request as a bool matrix ``[n, n]``: row i sees draft token j where ``[i, j]`` is True."""
        words = self._visibility[self.rows(request)]
        octets = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
        return np.unpackbits(octets, axis=1, count=len(words), bitorder="little").astype(bool)

    def to_svg(self, request=0, title=None):
        """Draws one request as an SVG text: its tree on the left, layered by depth, and its mask on the right."""
        return drawing.to_svg(self, request, title)

    def to_html(self, title="Draft trees"):
        """Draws every request on one web page that needs no other file."""
        return drawing.to_html(self, title)

    def _repr_html_(self):
        return drawing.to_notebook(self)

    def __str__(self):
        return drawing.to_text(self)

    def __repr__(self):
        sizes = np.diff(self._qo_indptr)
        deepest = int(self._depth.max()) if self.num_nodes else 0
        largest = int(sizes.max()) if self.batch_size else 0
        return f"<DraftTree: batch_size={self.batch_size}, num_nodes={self.num_nodes}, largest={largest}, max_depth={deepest}>"

    def __eq__(self, other):
        if not isinstance(other, DraftTree):
            return NotImplemented
        return np.array_equal(self._qo_indptr, other._qo_indptr) and np.array_equal(self._parents, other._parents)

    def __hash__(self):
        return hash((self._parents.tobytes(), self._qo_indptr.tobytes()))

    def __reduce__(self):
        # Rebuilt from its parents: a copy by default would come back with writable arrays.
        return DraftTree, (self._parents, self._qo_indptr)


def _requests(lists, example):
    """The argument as a sequence with one entry per request, or a TypeError with an example."""
    if isinstance(lists, np.ndarray) and lists.ndim > 1:
        return list(lists)
    if not isinstance(lists, (list, tuple)):
        raise TypeError(f"expected a list with one entry per request, such as {example}, got {type(lists).__name__}")
    if any(np.ndim(entry) == 0 for entry in lists if not isinstance(entry, (list, tuple))):
        raise TypeError(f"expected one entry per request, such as {example}, got a flat list; put it in brackets if it is one request")
    return lists


def _host_integers(values, name):
    """``values`` as an int64 vector that owns its data, or an error that starts with ``name``."""
    if hasattr(values, "__cuda_array_interface__") or getattr(values, "is_cuda", False):
        raise TypeError(f"{name}: expected host integers, got an array on a GPU; pass it to plan(tree=...) itself, or copy it to the host")
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: expected one flat list of integers, got nested lists of different lengths") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: expected rank 1, got shape {array.shape}")
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.empty(0, np.int64)  # NumPy calls an empty list float64
    if array.dtype == bool or not np.can_cast(array.dtype, np.int64):
        raise TypeError(f"{name}: expected integers of at most 64 signed bits, got dtype {array.dtype}; convert with .astype(np.int32)")
    return array.astype(np.int64)


def _frozen(array, dtype):
    array = np.array(array, dtype=dtype, order="C")
    array.setflags(write=False)
    return array


def _borders(lengths):
    borders = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=borders[1:])
    return borders


def _concatenate(rows, dtype):
    return np.concatenate([np.empty(0, dtype), *rows])


def _check_borders(qo_indptr, num_nodes):
    if len(qo_indptr) == 0 or qo_indptr[0] != 0:
        got = "nothing" if len(qo_indptr) == 0 else int(qo_indptr[0])
        raise ValueError(f"qo_indptr: expected batch_size + 1 entries with 0 first, got {got} first")
    sizes = np.diff(qo_indptr)
    if (sizes < 0).any():
        request = int(np.argmax(sizes < 0))
        first, last = qo_indptr[request : request + 2]
        raise ValueError(f"qo_indptr: request {request} starts at {first} and ends at {last}; expected entries that never fall")
    if qo_indptr[-1] != num_nodes:
        raise ValueError(
            f"qo_indptr: expected the number of parents, {num_nodes}, as last entry, got {qo_indptr[-1]}; "
            "cut padding off with parents[:qo_indptr[-1]]"
        )
    if (sizes > MAX_DRAFT_TOKENS).any():
        _refuse_size(request := int(np.argmax(sizes > MAX_DRAFT_TOKENS)), sizes[request])


def _refuse_size(request, size):
    raise ValueError(f"request {request}: expected at most {MAX_DRAFT_TOKENS} draft tokens, got {size}; prune the tree")


def _check_parents(parents, qo_indptr):
    sizes = np.diff(qo_indptr)
    size_of_row = np.repeat(sizes, sizes)
    outside = (parents < -1) | (parents >= size_of_row)
    if outside.any():
        request, node, row = _place(outside, qo_indptr)
        raise IndexError(
            f"request {request}, node {node}: expected a parent of -1 (a root) or 0 .. {size_of_row[row] - 1} "
            f"(an index within the request), got {parents[row]}"
        )
    own = parents == np.arange(len(parents)) - np.repeat(qo_indptr[:-1], sizes)
    if own.any():
        request, node, _ = _place(own, qo_indptr)
        raise ValueError(f"request {request}, node {node}: the node is its own parent; give a root the parent -1")


def _place(flags, qo_indptr):
    """Request, index within it, and flat row of the first set flag."""
    row = int(np.argmax(flags))
    request = int(np.searchsorted(qo_indptr, row, side="right")) - 1
    return request, row - int(qo_indptr[request]), row


def _visibility_bits(parents, qo_indptr):
    """Bits of every row, by pointer doubling: about log2(depth) passes over the batch and no loop over nodes.

    After pass k a row holds itself and its nearest 2^k - 1 ancestors, and ``jump`` is the flat row of its 2^k-th, or -1 above the root.
    """
    sizes = np.diff(qo_indptr)
    largest = int(sizes.max(initial=0))
    first_row = np.repeat(qo_indptr[:-1], sizes)
    node = np.arange(len(parents)) - first_row
    bits = np.zeros((len(parents), max(1, -(-largest // 32))), np.uint32)
    bits[np.arange(len(parents)), node // 32] = np.left_shift(np.uint32(1), (node % 32).astype(np.uint32))
    jump = np.where(parents >= 0, parents + first_row, -1)
    live = np.flatnonzero(jump >= 0)
    for _ in range(max(largest - 1, 0).bit_length()):
        above = jump[live]
        bits[live] |= bits[above]
        jump[live] = jump[above]
        live = live[jump[live] >= 0]
    if len(live):
        # A tree of n nodes has no n-th ancestor, so whoever still has one went round a cycle and stands on it now.
        _refuse_cycle(parents, qo_indptr, int(jump[live[0]]))
    return bits


def _refuse_cycle(parents, qo_indptr, row):
    request = int(np.searchsorted(qo_indptr, row, side="right")) - 1
    first_row = int(qo_indptr[request])
    cycle = [row - first_row]
    while (above := int(parents[first_row + cycle[-1]])) != cycle[0]:
        cycle.append(above)
    # Starts at the lowest number, so that the text does not depend on where the search met the cycle.
    lowest = cycle.index(min(cycle))
    cycle = cycle[lowest:] + cycle[:lowest]
    shown = [str(node) for node in cycle[:8]] + (["..."] if len(cycle) > 8 else [str(cycle[0])])
    raise ValueError(
        f"request {request}, node {cycle[0]}: the parents form a cycle, {' -> '.join(shown)}; every node must reach a root (-1)"
    )


def _parents_of_mask(mask, request):
    """Parents of the tree that makes ``mask`` (bool ``[n, n]``), or a ValueError that names the first row that no tree has."""
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"request {request}: expected a mask of bool, got dtype {mask.dtype}; convert with .astype(bool)")
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        raise ValueError(f"request {request}: expected a square mask [n, n], got shape {mask.shape}")
    size = len(mask)
    if size == 0:
        return np.empty(0, np.int64)
    if size > MAX_DRAFT_TOKENS:
        _refuse_size(request, size)
    # Of the tokens that a row sees, its parent is the one that sees most. Only tokens that see fewer than the row count: so no cycle.
    seen = mask.sum(axis=1)
    candidates = np.where(mask & (seen[None, :] < seen[:, None]), seen[None, :], 0)
    parents = np.where(candidates.max(axis=1) > 0, candidates.argmax(axis=1), -1)
    wrong = (DraftTree(parents, [0, size]).mask() != mask).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        tokens = np.flatnonzero(mask[row])
        shown = ", ".join(map(str, tokens[:8])) + (", ..." if len(tokens) > 8 else "") if len(tokens) else "none"
        raise ValueError(
            f"request {request}, row {row}: no tree makes this mask; the row sees the tokens {shown}, expected token {row} and its "
            "ancestors up to a root. Pass a mask that is not a tree to plan(tree=...) as it is"
        )
    return parents
