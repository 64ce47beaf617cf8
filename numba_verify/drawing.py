"""Pictures of draft trees: as text, as SVG, as a web page. A tree stands beside its mask, since the one explains the other.

Only the attributes of a DraftTree are used here, so that the object itself stays small.
"""

import html

import numpy as np

from . import svg

# What still fits a wide terminal: 64 columns of mask beside the tree. Medusa's trees (64 nodes) are shown whole.
MAX_TEXT_NODES = 64
MAX_TEXT_DRAWINGS = 8
MAX_NOTEBOOK_DRAWINGS = 4
# Of a deep tree only the nearest levels are indented; a chain would else run off the right edge.
MAX_INDENT = 48


def to_text(tree, with_mask=True):
    """All different trees of the batch in box-drawing lines, each node with its row of the mask."""
    groups = _groups(tree)
    legend = "   ■ sees   □ does not see" if with_mask else ""
    parts = [f"{_count(tree.batch_size, 'request')}, {_count(tree.num_nodes, 'draft token')}{legend}"]
    for requests in groups[:MAX_TEXT_DRAWINGS]:
        parts.append(f"\n{_names(requests)}: {_summary(tree, requests[0])}")
        parts.extend(_text_lines(tree, requests[0], with_mask))
    if len(groups) > MAX_TEXT_DRAWINGS:
        parts.append(f"\nand {len(groups) - MAX_TEXT_DRAWINGS} more trees")
    return "\n".join(parts)


def to_html(tree, title):
    """A whole page with every different tree of the batch."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem auto; max-width: 80rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }}
figure {{ margin: 1.5rem 0; }}
svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{_count(tree.batch_size, "request")}, {_count(tree.num_nodes, "draft token")}. Every token sees the whole prefix of its request,
itself and its ancestors.</p>
{_figures(tree, _groups(tree))}
</body>
</html>
"""


def to_notebook(tree):
    """The first trees of the batch as HTML without a page around it."""
    groups = _groups(tree)
    rest = len(groups) - MAX_NOTEBOOK_DRAWINGS
    note = f"<p>and {rest} more trees; <code>to_html()</code> draws them all</p>" if rest > 0 else ""
    return f"<div>{_figures(tree, groups[:MAX_NOTEBOOK_DRAWINGS])}{note}</div>"


def to_svg(tree, request, title):
    """One request: its tree on the left, layered by depth, its mask on the right."""
    rows = tree.rows(request)
    return svg.draw(
        parents=tree.parents[rows],
        depth=tree.depth[rows],
        mask=tree.mask(request),
        preorder=preorder(tree.parents[rows]),
        title=title or f"Draft tree of request {request}: {_summary(tree, request)}",
    )


def preorder(parents):
    """The nodes in the order in which an outline prints them: a parent, then its children, each with all below it."""
    children = [[] for _ in parents]
    roots = []
    for node, parent in enumerate(parents):
        (roots if parent < 0 else children[parent]).append(node)
    order, stack = [], roots[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children[node][::-1])
    return order


def _figures(tree, groups):
    figures = []
    for requests in groups:
        picture = to_svg(tree, requests[0], f"{_names(requests).capitalize()}: {_summary(tree, requests[0])}")
        figures.append(f"<figure>{picture}</figure>")
    return "\n".join(figures)


def _groups(tree):
    """Requests with the same tree, drawn once: lists of request numbers in order of their first."""
    groups = {}
    for request in range(tree.batch_size):
        groups.setdefault(tree.parents[tree.rows(request)].tobytes(), []).append(request)
    return list(groups.values())


def _names(requests):
    """What the drawings call these requests: `request 3`, or `requests 0 .. 4, 7` for several."""
    if len(requests) == 1:
        return f"request {requests[0]}"
    runs = np.split(requests, np.flatnonzero(np.diff(requests) != 1) + 1)
    shown = [f"{run[0]}" if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in runs]
    return f"requests {', '.join(shown[:6])}{', ...' if len(shown) > 6 else ''}"


def _count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _summary(tree, request):
    depth = tree.depth[tree.rows(request)]
    if len(depth) == 0:
        return "no draft tokens"
    roots = int((depth == 0).sum())
    return f"{_count(len(depth), 'draft token')}, depth {depth.max()}" + (f", {roots} roots" if roots > 1 else "")


def _text_lines(tree, request, with_mask):
    parents = tree.parents[tree.rows(request)]
    shown = min(len(parents), MAX_TEXT_NODES)
    if shown == 0:
        return []
    labels = _outline(parents[:shown])
    lines = _masked_lines(labels, tree.mask(request)[:, :shown]) if with_mask else [label for _, label in labels]
    if shown < len(parents):
        lines.append(f"(the first {shown} of {len(parents)} draft tokens; to_svg({request}) draws them all)")
    return lines


def _masked_lines(labels, mask):
    """The outline with each node's row of the mask beside it, below a line of column numbers."""
    shown = mask.shape[1]
    width = max(len(label) for _, label in labels) + 4
    gap = " " if shown <= 32 else ""
    lines = [" " * width + row for row in _column_numbers(shown, gap)]
    for node, label in labels:
        lines.append(label.ljust(width) + gap.join("■" if seen else "□" for seen in mask[node]))
    return lines


def _outline(parents):
    """(node, its line of the outline) in print order; a node whose parent is not among ``parents`` stands as a root and names it."""
    count = len(parents)
    inside = [parent if parent < count else -1 for parent in parents]
    last_child = {parent: node for node, parent in enumerate(inside)}
    indent, lines = {-1: ""}, []
    for node in preorder(inside):
        parent = inside[node]
        is_last = last_child[parent] == node
        stem = indent[parent]
        if parent < 0:
            label = str(node) if parents[node] < 0 else f"{node} (below {parents[node]})"
            indent[node] = ""
        else:
            shown = stem if len(stem) <= MAX_INDENT else "… " + stem[2 - MAX_INDENT :]
            label = f"{shown}{'└─' if is_last else '├─'} {node}"
            indent[node] = stem + ("   " if is_last else "│  ")
        lines.append((node, label))
    return lines


def _column_numbers(count, gap):
    """Header lines: the units of each column number, with the tens above where they change."""
    units = gap.join(str(column % 10) for column in range(count))
    if count <= 10:
        return [units]
    tens = gap.join(str(column // 10) if column % 10 == 0 and column else " " for column in range(count))
    return [tens.rstrip(), units]
