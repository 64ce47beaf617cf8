"""One draft tree and its mask as an SVG text.

    title
    caption
    depth 0    1    2         prefix  0 1 2 3
      (0)---(1)---(3)         ░░░░░░  ■ □ □ □
         \\                    ░░░░░░  ■ ■ □ □
          --(2)               ░░░░░░  ■ □ ■ □
                              ░░░░░░  ■ ■ □ ■
    legend

A node and the mask column of that token share a colour, that of the depth. The picture paints its own background, light or dark as
the viewer prefers, and every style is bound to the class ``nv-tree``, so that it can stand inside any page.
"""

from html import escape

import numpy as np

# Colours from the root to the deepest level, apart from each other also for the colour-blind and on both backgrounds.
RAMP = ((59, 91, 219), (28, 140, 190), (22, 160, 133), (120, 170, 50), (217, 145, 20), (214, 84, 44))
# More steps than this cannot be told apart, and each is one rule of the style sheet.
MAX_COLOURS = 12

# Lengths in px. The mask of a tree of up to 64 nodes is drawn with cells that can be counted; larger trees share MASK_SIDE.
MASK_SIDE = 736.0
CELL_RANGE = (1.25, 26.0)
GRID_FROM_CELL = 6.0  # in smaller cells the lines between them would hide what they part
LEVEL_GAP_RANGE = (4.0, 96.0)
TREE_WIDTH = 480.0
LEAF_GAP_RANGE = (2.5, 40.0)
NODE_RADIUS_RANGE = (1.0, 12.0)
NUMBERED_FROM_RADIUS = 7.0
MARGIN = 28.0
HEADER = 128.0
FOOTER = 64.0
GUTTER = 76.0  # between tree and mask: the row numbers and the axis title stand there
PREFIX_WIDTH = 44.0
PREFIX_GAP = 8.0
MIN_WIDTH = 680.0  # room for the title of a small tree

STYLE = """
.nv-tree text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Helvetica,Arial,sans-serif;fill:#3d4653}
.nv-tree .title{font-size:19px;font-weight:600;fill:#14181f}
.nv-tree .caption{font-size:13px}
.nv-tree .axis{font-size:12px}
.nv-tree .number{font-size:10px;fill:#667080}
.nv-tree .node{font-weight:600;fill:#fff}
.nv-tree .page{fill:#fff;stroke:#d8dee6}
.nv-tree .hidden{fill:#eef1f5}
.nv-tree .prefix{fill:#c3cbd6}
.nv-tree .guide{stroke:#e3e8ee;fill:none}
.nv-tree .edge{stroke:#aab4c1;fill:none}
.nv-tree .grid{stroke:#fff;fill:none}
.nv-tree .self{fill:#fff;fill-opacity:.85}
"""
DARK_STYLE = """
@media (prefers-color-scheme:dark){
.nv-tree text{fill:#b3bdc9}
.nv-tree .title{fill:#f0f3f6}
.nv-tree .number{fill:#8b96a5}
.nv-tree .node{fill:#fff}
.nv-tree .page{fill:#12161c;stroke:#2b323c}
.nv-tree .hidden{fill:#20262f}
.nv-tree .prefix{fill:#4a5462}
.nv-tree .guide{stroke:#262d37}
.nv-tree .edge{stroke:#56616f}
.nv-tree .grid{stroke:#12161c}
}
"""


def draw(parents, depth, mask, preorder, title):
    """The SVG text of one tree.

    Args:
        parents, depth: int ``[n]``, -1 and 0 for a root.
        mask: bool ``[n, n]``, row i sees token j.
        preorder: the nodes in outline order, which decides who stands above whom.
    """
    count = len(parents)
    cell = _clamp(MASK_SIDE / max(count, 1), CELL_RANGE)
    tree = _TreeLayout(parents, depth, preorder, mask_side=cell * count)
    height = max(tree.height, cell * count, 60.0)
    mask_left = MARGIN + tree.width + GUTTER
    width = max(mask_left + PREFIX_WIDTH + PREFIX_GAP + cell * count + MARGIN, MIN_WIDTH)
    colour_of_depth = _colour_classes(int(depth.max(initial=0)))
    body = [_header(title, count)]
    if count:
        body += _draw_levels(tree, bottom=HEADER + height)
        body += _draw_tree(tree, parents, depth, colour_of_depth, top=HEADER + (height - tree.height) / 2)
        body += _draw_mask(mask, depth, colour_of_depth, cell, mask_left, top=HEADER + (height - cell * count) / 2)
        body += _draw_legend(colour_of_depth, baseline=HEADER + height + 36, with_dot=cell >= GRID_FROM_CELL)
    total = HEADER + height + FOOTER
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="nv-tree" role="img" width="{width:.0f}" height="{total:.0f}" '
            f'viewBox="0 0 {width:.0f} {total:.0f}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{_colour_rules(colour_of_depth)}{DARK_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{total - 1:.0f}" rx="10"/>',
            *body,
            "</svg>",
        ]
    )


class _TreeLayout:
    """Where each node stands, with the tree's top left corner at 0, 0: levels from left to right, leaves one below the other."""

    def __init__(self, parents, depth, preorder, mask_side):
        levels = int(depth.max(initial=0)) + 1
        slot, leaves = _leaf_slots(parents, preorder)
        level_gap = _clamp(TREE_WIDTH / max(levels - 1, 1), LEVEL_GAP_RANGE)
        leaf_gap = _clamp(mask_side / max(leaves, 1), LEAF_GAP_RANGE)
        # 0.46 of the closer gap leaves a sliver of background between two neighbours.
        self.radius = _clamp(0.46 * min(level_gap, leaf_gap), NODE_RADIUS_RANGE)
        self.x = self.radius + depth * level_gap
        self.y = (slot + 0.5) * leaf_gap
        self.level_gap = level_gap
        self.levels = levels
        self.width = (levels - 1) * level_gap + 2 * self.radius
        self.height = leaves * leaf_gap


def _leaf_slots(parents, preorder):
    """Vertical place of each node, in leaves: leaves count 0, 1, 2 ... from the top, a parent stands midway between its outer children."""
    count = len(parents)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    slot = np.zeros(count)
    is_leaf = ~np.isin(np.arange(count), parents)
    slot[[node for node in preorder if is_leaf[node]]] = np.arange(is_leaf.sum())
    for node in reversed(preorder):  # children before their parent
        if not is_leaf[node]:
            slot[node] = (first[node] + last[node]) / 2
        if parents[node] >= 0:
            first[parents[node]] = min(first[parents[node]], slot[node])
            last[parents[node]] = max(last[parents[node]], slot[node])
    return slot, int(is_leaf.sum())


def _header(title, count):
    caption = (
        "Row i of the mask: what draft token i sees, besides the whole prefix."
        if count
        else "This request has no draft tokens: there is nothing to verify."
    )
    return f'<text class="title" x="{MARGIN}" y="40">{escape(title)}</text>\n<text class="caption" x="{MARGIN}" y="63">{caption}</text>'


def _draw_levels(tree, bottom):
    """A thin line and a number for each depth, behind the tree."""
    parts = [_text("axis", MARGIN, HEADER - 34, "depth")]
    for level in range(0, tree.levels, _number_step(tree.level_gap, 26)):
        x = MARGIN + tree.radius + level * tree.level_gap
        parts.append(f'<path class="guide" d="M{x:.1f} {HEADER - 8:.1f}V{bottom:.1f}"/>')
        parts.append(_text("number", x, HEADER - 16, str(level), anchor="middle"))
    return parts


def _draw_tree(tree, parents, depth, colour_of_depth, top):
    parts = []
    x, y = MARGIN + tree.x, top + tree.y
    edges = []
    for node, parent in enumerate(parents):
        if parent >= 0:
            middle = (x[node] + x[parent]) / 2
            start, end = f"{x[parent]:.1f} {y[parent]:.1f}", f"{x[node]:.1f} {y[node]:.1f}"
            edges.append(f"M{start}C{middle:.1f} {y[parent]:.1f} {middle:.1f} {y[node]:.1f} {end}")
    parts.append(f'<path class="edge" stroke-width="{_clamp(tree.radius / 6, (0.5, 1.5)):.2f}" d="{"".join(edges)}"/>')
    size = _clamp(tree.radius * 1.05, (7.5, 12.0))
    for node, parent in enumerate(parents):
        hint = f"token {node}, " + ("a root" if parent < 0 else f"parent {parent}, depth {depth[node]}")
        place = f'cx="{x[node]:.1f}" cy="{y[node]:.1f}" r="{tree.radius:.1f}"'
        parts.append(f'<circle class="{colour_of_depth[depth[node]]}" {place}><title>{hint}</title></circle>')
        if tree.radius >= NUMBERED_FROM_RADIUS:
            # 0.36 em below the centre puts the digits, not the line, in the middle.
            parts.append(_text("node", x[node], y[node] + 0.36 * size, str(node), anchor="middle", size=size))
    return parts


def _draw_mask(mask, depth, colour_of_depth, cell, left, top):
    count = len(mask)
    side = count * cell
    draft_left = left + PREFIX_WIDTH + PREFIX_GAP
    parts = [
        f'<rect class="prefix" x="{left:.1f}" y="{top:.1f}" width="{PREFIX_WIDTH}" height="{side:.1f}" rx="2"/>',
        _text("number", left + PREFIX_WIDTH / 2, top - 6, "prefix", anchor="middle"),
        _text("axis", draft_left, top - 22, "draft token j, seen"),
        _text("axis", left - 34, top + side / 2, "draft token i, seeing", anchor="middle", turn=True),
    ]
    step = _number_step(cell, 18)
    for index in range(0, count, step):
        centre = (index + 0.5) * cell
        parts.append(_text("number", draft_left + centre, top - 6, str(index), anchor="middle"))
        parts.append(_text("number", left - 6, top + centre + 3.5, str(index), anchor="end"))
    parts.append(f'<rect class="hidden" x="{draft_left:.1f}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}"/>')
    # Bars that touch must not let the background through between them.
    parts.append('<g shape-rendering="crispEdges">')
    for colour in dict.fromkeys(colour_of_depth):
        columns = [token for token in range(count) if colour_of_depth[depth[token]] == colour]
        parts.append(f'<path class="{colour}" d="{_bars(mask, columns, cell, draft_left, top)}"/>')
    parts.append("</g>")
    if cell >= GRID_FROM_CELL:
        parts += _draw_grid(count, cell, left, draft_left, top)
    return parts


def _bars(mask, columns, cell, left, top):
    """Path data: one bar for each run of rows that see the same column."""
    path = []
    for column in columns:
        rows = np.flatnonzero(mask[:, column])
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            x, y = left + column * cell, top + run[0] * cell
            path.append(f"M{x:.2f} {y:.2f}h{cell:.2f}v{len(run) * cell:.2f}h-{cell:.2f}z")
    return "".join(path)


def _draw_grid(count, cell, left, draft_left, top):
    """Lines in the colour of the page that cut the bars into cells, and a dot on each token's own cell."""
    right, bottom = draft_left + count * cell, top + count * cell
    lines, dots = [], []
    for token in range(count):
        x, y = draft_left + token * cell, top + token * cell
        dots.append(f'<circle cx="{x + cell / 2:.1f}" cy="{y + cell / 2:.1f}" r="{cell * 0.13:.1f}"/>')
        if token:
            lines.append(f"M{left:.1f} {y:.2f}H{right:.1f}M{x:.2f} {top:.1f}V{bottom:.1f}")
    return [f'<path class="grid" d="{"".join(lines)}"/>', f'<g class="self">{"".join(dots)}</g>']


def _draw_legend(colour_of_depth, baseline, with_dot):
    swatches = list(dict.fromkeys(colour_of_depth))
    parts = [_text("axis", MARGIN, baseline, "depth 0")]
    x = MARGIN + 52
    for colour in swatches:
        parts.append(_swatch(colour, x, baseline))
        x += 15
    parts.append(_text("axis", x + 6, baseline, str(len(colour_of_depth) - 1)))
    x += 52
    # The widths of the two texts at 12 px, swatch and space included.
    for kind, label, advance in (("hidden", "not seen", 92), ("prefix", "prefix, always seen", 156)):
        parts += [_swatch(kind, x, baseline), _text("axis", x + 20, baseline, label)]
        x += advance
    if with_dot:
        parts += [_swatch(swatches[0], x, baseline), _text("axis", x + 20, baseline, "the token itself")]
        parts.append(f'<circle class="self" cx="{x + 7:.1f}" cy="{baseline - 4:.1f}" r="2"/>')
    return parts


def _swatch(kind, x, baseline):
    return f'<rect class="{kind}" x="{x:.1f}" y="{baseline - 11:.1f}" width="14" height="14"/>'


def _colour_classes(deepest):
    """The colour class of each depth 0 .. deepest."""
    steps = min(deepest + 1, MAX_COLOURS)
    return [f"nv-d{round(level * (steps - 1) / max(deepest, 1))}-{steps}" for level in range(deepest + 1)]


def _colour_rules(colour_of_depth):
    rules = []
    for colour in dict.fromkeys(colour_of_depth):
        step, steps = (int(part) for part in colour.removeprefix("nv-d").split("-"))
        place = step / max(steps - 1, 1) * (len(RAMP) - 1)
        channels = (np.interp(place, range(len(RAMP)), [stop[channel] for stop in RAMP]) for channel in range(3))
        rules.append(f".nv-tree .{colour}{{fill:#{''.join(f'{round(value):02x}' for value in channels)}}}")
    return "\n".join(rules)


def _number_step(spacing, room):
    """The smallest of 1, 2, 5, 10, 20 ... at which numbers that are ``spacing`` apart have ``room``."""
    for step in (1, 2, 5, 10, 20, 50, 100):
        if step * spacing >= room:
            return step
    return 200


def _text(kind, x, y, text, anchor="start", size=None, turn=False):
    style = f' style="font-size:{size:.1f}px"' if size else ""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{turned}>{escape(text)}</text>'


def _clamp(value, bounds):
    return float(min(max(value, bounds[0]), bounds[1]))
