"""Draw draft trees and their masks, as text, SVG or a web page.

    show-tree                                   the names of the published trees
    show-tree eagle-mc-sim-7b-63                one of them
    show-tree "-1,0,0,1; -1,0"                  parents, -1 a root; requests are separated by semicolons
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from .. import drawing, published
from ..tree import DraftTree
from .console import say, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tree", nargs="?", help='a published tree by name, or parents: "-1,0,0,1; -1,0" (-1: root, ;: next request)')
    parser.add_argument("--list", action="store_true", help="list the published trees")
    parser.add_argument("--mask", action=argparse.BooleanOptionalAction, default=True, help="show the mask beside the tree")
    add_picture_arguments(parser)


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that write a picture; `write_pictures` obeys them."""
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the tree and its mask as SVG (the first request)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write all trees as a web page")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list or arguments.tree is None:
        say(list_of_trees())
        return 0
    name = arguments.tree.strip()
    tree = parse(name)
    say(drawing.to_text(tree, with_mask=arguments.mask))
    write_pictures(arguments, tree, name)
    return 0


def parse(text: str) -> DraftTree:
    """A published tree by name, or trees from lists of parents. ValueError / IndexError for anything else."""
    if text in published.names() or text[:1].isalpha():
        return published.load(text)
    lists = []
    for request, part in enumerate(text.split(";")):
        fields = part.replace(",", " ").split()
        try:
            lists.append([int(field) for field in fields])
        except ValueError:
            raise ValueError(f"request {request}: expected parents such as -1,0,0,1, got {part.strip()!r}") from None
    return DraftTree.from_lists(lists)


def list_of_trees() -> str:
    """Names, sizes and depths of the published trees."""
    rows = []
    for name in published.names():
        tree = published.load(name)
        leaves = tree.num_nodes - len(np.unique(tree.parents[tree.parents >= 0]))
        rows.append([name, tree.num_nodes, int(tree.depth.max()), leaves])
    return table(["tree", "nodes", "depth", "leaves"], rows, right=["nodes", "depth", "leaves"])


def write_pictures(arguments: argparse.Namespace, tree: DraftTree, title: str) -> None:
    """Write what --svg and --html ask for."""
    for path, text in ((arguments.svg, lambda: tree.to_svg(title=f"Draft tree {title}")),
                       (arguments.html, lambda: tree.to_html(title=f"Draft tree {title}"))):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
            say(f"written: {path}")
