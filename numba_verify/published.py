"""Draft trees that published systems really verify, by name, to test and to measure with.

* ``medusa-*``: the fixed trees of Medusa, 64 nodes with the root [FasterDecoding/Medusa, ``medusa/model/medusa_choices.py``; Cai et
  al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024].
* ``eagle-mc-sim-7b-63``: the fixed tree of EAGLE-1, 26 nodes with the root [SafeAILab/EAGLE, ``eagle/model/choices.py``; Li et al.,
  "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024].
* ``sequoia-*``: trees that Sequoia's dynamic programme found for one GPU and one pair of models, of 16 to 512 nodes, and the regular
  ones it is compared with (``8-chain``, ``5x8``, ``16x8``, ``1x128``) [Infini-AI-Lab/Sequoia, ``A100_growmaps`` and ``L40_growmaps``;
  Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", 2024].

The data file holds one list of parents per name, node 0 the root.
"""

import functools
import json
from importlib import resources

from .tree import DraftTree


@functools.cache
def _parents_by_name():
    source = resources.files(__package__) / "data" / "published_trees.json"
    return json.loads(source.read_text(encoding="utf-8"))


def names():
    """The names of all published trees, sorted."""
    return sorted(_parents_by_name())


def load(name, batch_size=1):
    """The published tree ``name`` for each of ``batch_size`` requests.

    Raises:
        ValueError: no tree has that name; the text lists those there are.
    """
    if name not in _parents_by_name():
        raise ValueError(f"expected the name of a published tree, one of {', '.join(names())}; got {name!r}")
    return DraftTree.from_lists([_parents_by_name()[name]] * batch_size)
